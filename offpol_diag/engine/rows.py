"""Per-sequence numbers of many presets: rows shared by equal presets, sums over tokens, named columns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np

from offpol_diag.engine.segments import Array


@dataclass(frozen=True)
class Rows:
    """Numbers of S sequences under P presets.

    Attributes:
        values: R distinct rows (some may be equal): [R, S]; or [R, N, S] with N numbers each.
        at: the row of each preset, P of them.
    """

    values: Array
    at: tuple[int, ...]

    @property
    def all(self) -> Array:
        """A row for each preset, [P, S]."""
        return of_rows(self.values, self.at)

    def map(self, function: Callable[[Array], Array]) -> Rows:
        """Apply a function to all rows."""
        return Rows(function(self.values), self.at)


def of_rows(x: Array, at: tuple[int, ...]) -> Array:
    """Select rows by index; the array itself where these are all rows in their order."""
    result: Array = x if at == tuple(range(len(x))) else x[list(at)]
    return result


def together(*rows: Rows) -> tuple[list[Array], tuple[int, ...]]:
    """Return, for each combination of rows that occurs, [R, S] of each; and each preset's combination."""
    places, at = _combined(tuple([one.at for one in rows]))
    return [of_rows(one.values, own) for one, own in zip(rows, places, strict=True)], at


@lru_cache(256)
def _combined(ats: tuple[tuple[int, ...], ...]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the row of each for each combination that occurs, and the combination of each preset.

    Cached: the columns of every batch repeat few combinations.
    """
    first, at = distinct(list(zip(*ats, strict=True)))
    return [tuple([own[preset] for preset in first]) for own in ats], at


def joined(function: Callable[..., Array], *rows: Rows) -> Rows:
    """Apply a function to several, once for each combination of their rows that occurs."""
    picked, at = together(*rows)
    return Rows(function(*picked), at)


def distinct(keys: Sequence[Hashable]) -> tuple[list[int], tuple[int, ...]]:
    """Return the index where each distinct key first occurs, and for each key which of those it is."""
    row: dict[Hashable, int] = {}
    at = tuple([row.setdefault(key, len(row)) for key in keys])
    first: list[int] = []
    for preset, one in enumerate(at):
        if one == len(first):
            first.append(preset)
    return first, at


# ---------------------------------------------------------------- named columns


@dataclass(frozen=True)
class Columns:
    """Columns of a batch of S sequences; columns may share one of R rows.

    Attributes:
        names: C column names, all different.
        parts: the rows, in any number of arrays, [r, S] float64 each.
        which: the row of each name, [C] int64; None: each name has its own.
    """

    names: tuple[str, ...]
    parts: tuple[Array, ...]
    which: Array | None = None

    @classmethod
    def of(cls, columns: Mapping[str, Array]) -> Columns:
        """Build from one or more columns [S]; columns that are the same array share a row."""
        own = {id(x): x for x in columns.values()}
        row = {key: at for at, key in enumerate(own)}
        which = None if len(own) == len(columns) else np.array([row[id(x)] for x in columns.values()])
        return cls(tuple(columns), (np.stack(tuple(own.values())),), which)

    @classmethod
    def joined(cls, *each: Columns) -> Columns:
        """Combine columns of the same sequences."""
        names = tuple(chain.from_iterable(one.names for one in each))
        parts = tuple(chain.from_iterable(one.parts for one in each))
        if all(one.which is None for one in each):
            return cls(names, parts)
        begins = accumulate((one.height for one in each), initial=0)
        which = [begin + one._places for begin, one in zip(begins, each, strict=False)]
        return cls(names, parts, np.concatenate(which))

    def only(self, columns: Sequence[int]) -> Columns:
        """Select columns by index; rows of others are not dropped."""
        names = tuple([self.names[at] for at in columns])
        return Columns(names, self.parts, self._places[np.array(columns, np.int64)])

    @property
    def trimmed(self) -> Columns:
        """The same columns without rows that none of them uses."""
        if not self.parts:
            return self
        rows, which = np.unique(self._places, return_inverse=True)
        lines = [line for part in self.parts for line in part]
        few = np.array([lines[row] for row in rows]).reshape(len(rows), self.parts[0].shape[1])
        return Columns(self.names, (few,), which)

    @property
    def height(self) -> int:
        """Number of rows, R."""
        return sum(len(part) for part in self.parts)

    @property
    def rows(self) -> Array:
        """All rows in one array, [R, S]."""
        return np.concatenate(self.parts)

    @property
    def values(self) -> Array:
        """A row for each name, [C, S]."""
        rows = self.rows
        return rows if self.which is None else rows[self.which]

    @property
    def _places(self) -> Array:
        return np.arange(self.height) if self.which is None else self.which
