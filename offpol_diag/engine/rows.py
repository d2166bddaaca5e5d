"""Per-sequence numbers of many presets: rows shared by equal presets, sums over tokens, named columns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate, chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from offpol_diag.engine import segments
from offpol_diag.engine.host import here, sent
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.segments import Reduce
from offpol_diag.presets import Preset

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Rows:
    """Numbers of S sequences under P presets.

    Attributes:
        values: R distinct rows (some may be equal): [R, S]; or [R, N, S] with N numbers each.
        at: the row of each preset, P of them.
    """

    values: Tensor
    at: tuple[int, ...]

    @classmethod
    def of_tensors(cls, rows: Sequence[Tensor]) -> Rows:
        """Build from a row [S] per preset, stored once where the tensor is the same; needs a preset."""
        first, at = distinct([id(row) for row in rows])
        return cls(torch.stack([rows[preset] for preset in first]), at)

    @property
    def all(self) -> Tensor:
        """A row for each preset, [P, S]."""
        return self._picked(self.at)

    def of_preset(self, preset: int) -> Tensor:
        """Return the row of one preset, [S]."""
        return self.values[self.at[preset]]

    def of(self, presets: Sequence[int]) -> Rows:
        """Select some presets."""
        return Rows(self.values, tuple([self.at[preset] for preset in presets]))

    def map(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """Apply a function to all rows."""
        return Rows(function(self.values), self.at)

    def _picked(self, at: tuple[int, ...]) -> Tensor:
        if at == _range(len(self.values)):
            return self.values
        return self.values.index_select(0, _sent(at, self.values.device))


def together(*rows: Rows) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return, for each combination of rows that occurs, [R, S] of each; and each preset's combination."""
    places, at = _combined(tuple([one.at for one in rows]))
    return [one._picked(own) for one, own in zip(rows, places, strict=True)], at


@lru_cache(256)
def _combined(ats: tuple[tuple[int, ...], ...]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the row of each for each combination that occurs, and the combination of each preset.

    Cached: the columns of every batch repeat few combinations.
    """
    first, at = distinct(list(zip(*ats, strict=True)))
    return [tuple([own[preset] for preset in first]) for own in ats], at


def joined(function: Callable[..., Tensor], *rows: Rows) -> Rows:
    """Apply a function to several, once for each combination of their rows that occurs."""
    picked, at = together(*rows)
    return Rows(function(*picked), at)


def woven(parts: Mapping[tuple[int, ...], Rows]) -> Rows:
    """Merge the rows of disjoint sets of presets."""
    begin = 0
    at: dict[int, int] = {}
    for presets, rows in parts.items():
        at |= {preset: begin + row for preset, row in zip(presets, rows.at, strict=True)}
        begin += len(rows.values)
    return Rows(
        laid([rows.values for rows in parts.values()]), tuple([at[preset] for preset in range(len(at))])
    )


def laid(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows into one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def distinct(keys: Sequence[Hashable]) -> tuple[list[int], tuple[int, ...]]:
    """Return the index where each distinct key first occurs, and for each key which of those it is."""
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
    """Copy indices to a device; cached, since they depend on the presets alone."""
    return torch.tensor(at, dtype=torch.int64).to(device)


Columns = Mapping[str, Tensor]
Inputs = tuple[Tensor | None, ...]
Join = Callable[[Tensor, Tensor], Tensor]
AT_ONCE, OF_GPU = 1 << 16, 1 << 22
"""Tokens × rows processed at once, so that they fit in the caches (CPU) or in memory (GPU)."""


class How(NamedTuple):
    """A reduction over a sequence's tokens, and the function that joins its results on two subsets."""

    reduce: Reduce
    join: Join


TOTAL = How(segments.total, torch.add)
MOST = How(segments.largest, torch.maximum)


class Applied(Protocol):
    """A preset applied to some tokens."""

    @property
    def ratios(self) -> Ratios:
        """Ratios of those tokens."""
        ...


A = TypeVar("A", bound=Applied)


@dataclass(frozen=True, eq=False)
class Summed(Generic[A]):
    """Named sums over tokens that presets share.

    Attributes:
        key: identifies the sum: over the same tokens, equal keys have equal sums.
        inputs: tensors that the terms are computed from, [T] each, None where absent; or the sums themselves,
            if computed from other sums. Inputs that presets share must be the same tensor.
        terms: inputs → the terms of each token; of rows of inputs [K, T] → rows of terms.
        how: reduction of the terms over a sequence.
        near: the sums over near tokens (`outcome.Near`), row by row.
    """

    key: Callable[[A, Preset], Hashable]
    inputs: Callable[[A, Preset], Inputs | dict[str, Tensor]]
    terms: Callable[..., dict[str, Tensor]]
    how: How = TOTAL
    near: Callable[[Any], dict[str, Tensor]] | None = None

    def of_near(self, near: object) -> dict[str, Tensor]:
        """Compute the sums over near tokens, row by row."""
        assert self.near is not None
        return self.near(near)

    def __call__(self, done: A, preset: Preset) -> dict[str, Tensor]:
        """Compute the sums of one preset, [S] each."""
        return done.ratios.once(self.key(done, preset), lambda: self._of_one(done, preset))

    def _of_one(self, done: A, preset: Preset) -> dict[str, Tensor]:
        found, offsets = self.inputs(done, preset), done.ratios.batch.cu_seqlens
        if isinstance(found, dict):
            return found
        return {name: self.how.reduce(x, offsets) for name, x in self.terms(*found).items()}

    def of_many(self, asked: Sequence[tuple[A, Preset]]) -> Table:
        """Compute the sums of many presets."""
        alike: dict[Hashable, _Alike] = {}
        for at, (done, preset) in enumerate(asked):
            offsets, found = done.ratios.batch.cu_seqlens, self.inputs(done, preset)
            lacking = None if isinstance(found, dict) else tuple([x is None for x in found])
            alike.setdefault((id(offsets), lacking), _Alike(offsets)).add(at, found)
        tables = {tuple(one.presets): self._of_alike(one) for one in alike.values()}
        return Table.woven(tables)

    def _of_alike(self, alike: _Alike) -> Table:
        if alike.sums:
            return Table.of(alike.sums)
        first, at = distinct([tuple(map(id, one)) for one in alike.inputs])
        few, offsets = [alike.inputs[row] for row in first], alike.offsets
        (tokens, *_) = [len(x) for x in few[0] if x is not None]
        most = max(1, (AT_ONCE if here(offsets) else OF_GPU) // max(1, tokens))
        parts = [self._rows(few[row : row + most], offsets) for row in range(0, len(few), most)]
        return Table(parts[0].names, Rows(laid([part.rows.values for part in parts]), at))

    def _rows(self, few: Sequence[Inputs], offsets: Tensor) -> Table:
        """Compute one row for each, in their order."""
        terms = self.terms(*map(_stacked, zip(*few, strict=True)))
        every = [x.expand(len(few), -1) for x in terms.values()]
        return Table(tuple(terms), Rows(self._reduced(every, offsets), tuple(range(len(few)))))

    def _reduced(self, terms: Sequence[Tensor], offsets: Tensor) -> Tensor:
        """Reduce N names' rows [K, T] to [K, N, S]: on a GPU in one operation, else without copying them."""
        reduce = self.how.reduce
        if here(offsets):
            return torch.stack([segments.of_rows(reduce, x, offsets) for x in terms], 1)
        found = segments.of_rows(reduce, torch.cat(list(terms)), offsets)
        return found.view(len(terms), -1, found.shape[-1]).transpose(0, 1)


@dataclass(frozen=True)
class Table:
    """Columns of sequences under P presets; `rows` are [R, N, S], one number for each of N names."""

    names: tuple[str, ...]
    rows: Rows

    @classmethod
    def of(cls, columns: Sequence[Columns]) -> Table:
        """Build from each preset's columns [S]; presets with the same tensors share a row."""
        names = tuple(columns[0])
        each = [[one[name] for name in names] for one in columns]
        first, at = distinct([tuple(map(id, one)) for one in each])
        values = torch.stack([x for row in first for x in each[row]])
        return cls(names, Rows(values.view(len(first), len(names), -1), at))

    @classmethod
    def woven(cls, tables: Mapping[tuple[int, ...], Table]) -> Table:
        """Merge the rows of disjoint sets of presets."""
        (one, *_) = tables.values()
        return cls(one.names, woven({presets: table.rows for presets, table in tables.items()}))

    def of_presets(self, presets: Sequence[int]) -> Table:
        """Select some presets."""
        return Table(self.names, self.rows.of(presets))

    def joined(self, more: Table, join: Join) -> Table:
        """Join with the sums over other tokens."""
        return Table(self.names, joined(join, self.rows, more.rows))

    @property
    def columns(self) -> dict[str, Rows]:
        """Rows [R, S] by name."""
        each = zip(self.names, self.rows.values.unbind(1), strict=True)
        return {name: Rows(x, self.rows.at) for name, x in each}


@dataclass(frozen=True)
class _Alike:
    """Presets on the same tokens that lack the same inputs, with their inputs or their sums."""

    offsets: Tensor
    presets: list[int] = field(default_factory=list)
    inputs: list[Inputs] = field(default_factory=list)
    sums: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, preset: int, found: Inputs | dict[str, Tensor]) -> None:
        """Add one preset."""
        self.presets.append(preset)
        if isinstance(found, dict):
            self.sums.append(found)
        else:
            self.inputs.append(found)


def _stacked(inputs: Sequence[Tensor | None]) -> Tensor | None:
    """Stack inputs as rows [K, T]; return [T] if all are the same tensor."""
    if all(x is inputs[0] for x in inputs):
        return inputs[0]
    return torch.stack(inputs)  # type: ignore[arg-type]


def left(x: Tensor, keep: Tensor | None, absent: float = 0.0) -> Tensor:
    """Set tokens that are not kept to `absent`, which the reduction ignores."""
    return x if keep is None else torch.where(keep, x, absent)


def flagged(flags: Tensor, keep: Tensor | None) -> Tensor:
    """Return 1 for kept tokens with a flag, else 0."""
    return segments.numbers(flags if keep is None else flags & keep)


@dataclass(frozen=True)
class Sheet:
    """Columns of a batch of S sequences; columns may share one of R rows.

    Attributes:
        names: C column names, all different.
        parts: the rows, in any number of tensors, [r, S] float64 each.
        which: the row of each name, [C] int64 on the host; None: each name has its own.
    """

    names: tuple[str, ...]
    parts: tuple[Tensor, ...]
    which: Tensor | None = None

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> Sheet:
        """Build from one or more columns [S]."""
        return cls(tuple(columns), (torch.stack(tuple(columns.values())),))

    @classmethod
    def shared(cls, columns: Mapping[str, Tensor]) -> Sheet:
        """Build from one or more columns [S]; columns that are the same tensor share a row."""
        own = {id(x): x for x in columns.values()}
        row = {key: at for at, key in enumerate(own)}
        which = torch.tensor([row[id(x)] for x in columns.values()])
        return cls(tuple(columns), (torch.stack(tuple(own.values())),), which)

    @classmethod
    def joined(cls, *sheets: Sheet) -> Sheet:
        """Combine columns of the same sequences."""
        names = tuple(chain.from_iterable(sheet.names for sheet in sheets))
        parts = tuple(chain.from_iterable(sheet.parts for sheet in sheets))
        if all(sheet.which is None for sheet in sheets):
            return cls(names, parts)
        begins = accumulate((sheet.height for sheet in sheets), initial=0)
        which = [begin + sheet._places for begin, sheet in zip(begins, sheets, strict=False)]
        return cls(names, parts, torch.cat(which))

    @classmethod
    def beside(cls, sheets: Sequence[Sheet]) -> Sheet:
        """Concatenate the sequences of several; names and rows must be the same."""
        return cls(sheets[0].names, (torch.cat([sheet.rows for sheet in sheets], dim=1),), sheets[0].which)

    def only(self, columns: Sequence[int]) -> Sheet:
        """Select columns by index; rows of others are not dropped."""
        names = tuple([self.names[at] for at in columns])
        return Sheet(names, self.parts, self._places[torch.tensor(columns, dtype=torch.int64)])

    @property
    def trimmed(self) -> Sheet:
        """The same columns without rows that none of them uses."""
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
        """Number of rows, R."""
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
