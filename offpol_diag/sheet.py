"""A number of each sequence under each of many names; rows stay where they were made until all are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sheet:
    """Columns of a batch of S sequences.

    Attributes:
        names: C of them, each once.
        parts: a row [S] for each name, in any number of tensors: [c, S] float64 each.
    """

    names: tuple[str, ...]
    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> Sheet:
        """Of one column [S] or more."""
        return cls(tuple(columns), (torch.stack(tuple(columns.values())),))

    @classmethod
    def joined(cls, *sheets: Sheet) -> Sheet:
        """The columns of all, for the same sequences."""
        names = tuple(name for sheet in sheets for name in sheet.names)
        return cls(names, tuple(part for sheet in sheets for part in sheet.parts))

    @classmethod
    def beside(cls, sheets: Sequence[Sheet]) -> Sheet:
        """The sequences of all, one sheet after the other; they have the same names."""
        return cls(sheets[0].names, (torch.cat([sheet.values for sheet in sheets], dim=1),))

    @property
    def values(self) -> Tensor:
        """All rows in one tensor, [C, S]."""
        return torch.cat(self.parts)
