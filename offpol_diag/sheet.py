"""A number of each sequence under each of many names; rows stay where they were made until all are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from offpol_diag.host import sent


@dataclass(frozen=True)
class Sheet:
    """Columns of a batch of S sequences; R of them have numbers of their own.

    Attributes:
        names: C of them, each once.
        parts: rows [S], in any number of tensors: [r, S] float64 each.
        which: the row of each name, [C] int64 in the host's memory; None: each name has its own.
    """

    names: tuple[str, ...]
    parts: tuple[Tensor, ...]
    which: Tensor | None = None

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> Sheet:
        """Of one column [S] or more."""
        return cls(tuple(columns), (torch.stack(tuple(columns.values())),))

    @classmethod
    def shared(cls, columns: Mapping[str, Tensor]) -> Sheet:
        """Of one column [S] or more; those that are the same tensor share a row."""
        own = {id(x): x for x in columns.values()}
        row = {key: at for at, key in enumerate(own)}
        which = torch.tensor([row[id(x)] for x in columns.values()])
        return cls(tuple(columns), (torch.stack(tuple(own.values())),), which)

    @classmethod
    def joined(cls, *sheets: Sheet) -> Sheet:
        """The columns of all, for the same sequences."""
        names = tuple(chain.from_iterable(sheet.names for sheet in sheets))
        parts = tuple(chain.from_iterable(sheet.parts for sheet in sheets))
        if all(sheet.which is None for sheet in sheets):
            return cls(names, parts)
        begins = accumulate((sheet.height for sheet in sheets), initial=0)
        which = [begin + sheet._places for begin, sheet in zip(begins, sheets, strict=False)]
        return cls(names, parts, torch.cat(which))

    @classmethod
    def beside(cls, sheets: Sequence[Sheet]) -> Sheet:
        """The sequences of all, one sheet after the other; they have the same names in the same rows."""
        return cls(sheets[0].names, (torch.cat([sheet.rows for sheet in sheets], dim=1),), sheets[0].which)

    def only(self, columns: Sequence[int]) -> Sheet:
        """Some of the columns, by their places; the rows of others are still there."""
        names = tuple([self.names[at] for at in columns])
        return Sheet(names, self.parts, self._places[torch.tensor(columns, dtype=torch.int64)])

    @property
    def trimmed(self) -> Sheet:
        """The same columns, and no row that none of them has."""
        if not self.parts:
            return self
        rows, which = torch.unique(self._places, return_inverse=True)
        begins = torch.tensor([0, *accumulate(len(part) for part in self.parts)][:-1])
        part = torch.searchsorted(begins, rows, right=True) - 1
        cuts = torch.searchsorted(part, torch.arange(1, len(begins)))
        own = sent(rows - begins[part], self.parts[0].device).tensor_split(cuts)
        parts = tuple(x.index_select(0, at) for x, at in zip(self.parts, own, strict=True))
        return Sheet(self.names, parts, which)

    @property
    def height(self) -> int:
        """R."""
        return sum(len(part) for part in self.parts)

    @property
    def rows(self) -> Tensor:
        """All rows in one tensor, [R, S]."""
        return torch.cat(self.parts)

    @property
    def values(self) -> Tensor:
        """A row for each name, [C, S]."""
        rows = self.rows
        return rows if self.which is None else rows[self.which.to(rows.device)]

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.height) if self.which is None else self.which
