"""A number of each sequence under each of many presets, made once for all that have the same.

Most presets of a dump near on-policy leave the same tokens, or weigh them the same; what is made of two such
rows is made once for each pair of them that occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar

import torch
from torch import Tensor

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
    def of_tensors(cls, rows: Sequence[Tensor]) -> Rows:
        """A row [S] of each preset, one for all that have the same tensor; there must be a preset."""
        first, at = distinct([id(row) for row in rows])
        return cls(torch.stack([rows[preset] for preset in first]), at)

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
        return self.values.index_select(0, _sent(at, self.values.device))


def together(*rows: Rows) -> tuple[list[Tensor], tuple[int, ...]]:
    """The rows of several for each combination that occurs, [R, S] each; and which each preset has."""
    places, at = _combined(tuple([one.at for one in rows]))
    return [one._picked(own) for one, own in zip(rows, places, strict=True)], at


@lru_cache(256)
def _combined(ats: tuple[tuple[int, ...], ...]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The row of each for each combination that occurs, and which of those each preset has.

    The columns of a batch ask for few, again and again.
    """
    first, at = distinct(list(zip(*ats, strict=True)))
    return [tuple([own[preset] for preset in first]) for own in ats], at


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


@lru_cache(1024)
def _sent(at: tuple[int, ...], device: torch.device) -> Tensor:
    """Places where they are looked up; on a GPU they depend on the presets alone, and are sent once."""
    return torch.tensor(at, dtype=torch.int64).to(device)
