"""A number of each sequence under each of many presets, made once for all that have the same.

Most presets of a dump near on-policy leave the same tokens, or weigh them the same; what is made of two such
rows is made once for each pair of them that occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag.host import here

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Rows:
    """Numbers of S sequences under P presets.

    Attributes:
        values: R rows that differ, or may: [R, S]; or [R, N, S] of N numbers each.
        at: the row of each preset, P of them.
    """

    values: Tensor
    at: tuple[int, ...]

    @classmethod
    def made(cls, keys: Sequence[Key], make: Callable[[int], Tensor]) -> Rows:
        """A row [S] of the first preset with each key; equal keys mean equal rows. There must be a preset."""
        first, at = distinct(keys)
        return cls(torch.stack([make(preset) for preset in first]), at)

    @property
    def all(self) -> Tensor:
        """A row of each preset, [P, S]."""
        return self._picked(self.at)

    def of_preset(self, preset: int) -> Tensor:
        """That of one preset, [S]."""
        return self.values[self.at[preset]]

    def of(self, presets: Sequence[int]) -> Rows:
        """Those of some presets."""
        return Rows(self.values, tuple([self.at[preset] for preset in presets]))

    def map(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """What is made of each number."""
        return Rows(function(self.values), self.at)

    def _picked(self, at: tuple[int, ...]) -> Tensor:
        if at == _range(len(self.values)):
            return self.values
        return self.values.index_select(
            0, _places(at) if here(self.values) else _sent(at, self.values.device)
        )


def together(*rows: Rows) -> tuple[list[Tensor], tuple[int, ...]]:
    """The rows of several for each combination that occurs, [R, S] each; and which each preset has."""
    if all(one.at == rows[0].at for one in rows):
        first, at = distinct(rows[0].at)
    else:
        first, at = distinct(list(zip(*(one.at for one in rows), strict=True)))
    return [one._picked(tuple([one.at[preset] for preset in first])) for one in rows], at


def joined(function: Callable[..., Tensor], *rows: Rows) -> Rows:
    """What is made of several rows, for each combination of them that occurs."""
    picked, at = together(*rows)
    return Rows(function(*picked), at)


def woven(parts: Mapping[tuple[int, ...], Rows]) -> Rows:
    """The rows of some presets and those of all others."""
    begin = 0
    at: dict[int, int] = {}
    for presets, rows in parts.items():
        at |= {preset: begin + row for preset, row in zip(presets, rows.at, strict=True)}
        begin += len(rows.values)
    return Rows(
        laid([rows.values for rows in parts.values()]), tuple([at[preset] for preset in range(len(at))])
    )


def laid(parts: Sequence[Tensor]) -> Tensor:
    """Rows in one tensor, one part after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def distinct(keys: Sequence[Hashable]) -> tuple[list[int], tuple[int, ...]]:
    """Where each key occurs first, and which of those each one is equal to."""
    row: dict[Hashable, int] = {}
    at = tuple([row.setdefault(key, len(row)) for key in keys])
    first: list[int] = []
    for preset, one in enumerate(at):
        if one == len(first):
            first.append(preset)
    return first, at


@cache
def _range(many: int) -> tuple[int, ...]:
    return tuple(range(many))


def _places(at: tuple[int, ...]) -> Tensor:
    return torch.tensor(at, dtype=torch.int64)


@cache
def _sent(at: tuple[int, ...], device: torch.device) -> Tensor:
    """The same on a GPU, where they depend on the presets alone: sent once."""
    return _places(at).to(device)
