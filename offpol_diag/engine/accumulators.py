"""States that merge: sums with bootstrap replicates, bins, extremes, groups, tails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offpol_diag.engine import loglattice, tables
from offpol_diag.engine.fields import (
    COUNTS,
    NUMBERS,
    RISING,
    UNSAVED,
    Count,
    Floats,
    Ints,
    Names,
    Saved,
    Size,
    require,
)
from offpol_diag.engine.host import here


class State(Protocol):
    """A mergeable accumulator; a tally is a set of them."""

    def merge(self, other: Self) -> Self:
        """Merge the states of two parts of a dump."""
        ...


M = TypeVar("M", bound=State)


@dataclass(frozen=True)
class Places(Saved, Generic[M]):
    """States by place (a step, a position bucket, a host); mostly sums."""

    sums: dict[str, M]

    def merge(self, other: Places[M]) -> Places[M]:
        """Merge place by place."""
        merged = dict(self.sums)
        for key, sums in other.sums.items():
            merged[key] = merged[key].merge(sums) if key in merged else sums
        return Places(merged)


T = TypeVar("T")


@dataclass(frozen=True)
class Best(Saved, Generic[T]):
    """The k records with the highest score."""

    k: Annotated[int, Size("K")]
    records: tuple[tuple[float, T], ...]

    def check(self) -> None:
        """Refuse more than k records."""
        require(len(self.records) <= self.k, f"there are more than {self.k} records")

    def merge(self, other: Best[T]) -> Best[T]:
        """Keep the k highest of both; ties are ordered by their text, so that the result is deterministic."""
        both = sorted((*self.records, *other.records), key=lambda record: -record[0])
        best: list[tuple[float, T]] = []
        for _, equal in groupby(both, key=lambda record: record[0]):
            if len(best) >= self.k:
                break
            tied = list(equal)
            best += tied if len(tied) == 1 else sorted(tied, key=lambda record: str(record[1]))
        return Best(self.k, tuple(best[: self.k]))


@dataclass(frozen=True)
class Extremes(Saved):
    """Smallest and largest value seen, per name: [K] each."""

    names: Annotated[tuple[str, ...], Names("K", ordered=True)]
    low: Annotated[Tensor, Floats("K")]
    high: Annotated[Tensor, Floats("K")]

    @classmethod
    def of(cls, values: dict[str, tuple[Tensor, Tensor]]) -> Extremes:
        """Build from pairs of scalars (smallest, largest); ±inf where there was no value."""
        if not values:
            return cls((), torch.empty(0), torch.empty(0))
        low, high = zip(*values.values(), strict=True)
        return cls(tuple(values), torch.stack(low), torch.stack(high))

    def merge(self, other: Extremes) -> Extremes:
        """Element-wise minimum and maximum."""
        if self.names != other.names:
            raise ValueError("extremes of different quantities do not merge")
        return Extremes(self.names, torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def read(self) -> dict[str, tuple[float, float]]:
        """Return name → (smallest, largest)."""
        return dict(zip(self.names, zip(self.low.tolist(), self.high.tolist(), strict=True), strict=True))


def extremes(x: Tensor, there: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest element where `there` is true; (+inf, -inf) where it nowhere is."""
    if x.numel() == 0:
        return x.new_full((), torch.inf), x.new_full((), -torch.inf)
    if there is not None:
        low, high = torch.where(there, x, torch.inf), torch.where(there, x, -torch.inf)
        return low.min(), high.max()
    low, high = torch.aminmax(x)
    return low, high


SAMPLE = 4096
"""Most groups kept for counts that are not sums; the counts are exact up to that many."""


@dataclass(frozen=True)
class GroupSample(Saved):
    """A sample of groups, chosen by hash: the `SAMPLE` smallest keys.

    Exact while there are no more groups than that.

    Attributes:
        keys: [G] int64, sorted, distinct.
        values: [G, C] float64, per-group sums of C columns.
        full: whether groups were dropped from the sample.
    """

    keys: Annotated[Tensor, Ints("groups", rule=RISING)]
    values: Annotated[Tensor, Floats("groups", "C", rule=COUNTS)]
    full: bool = False

    def check(self) -> None:
        """Refuse more groups than the sample holds, and fewer where it is full."""
        require(len(self.keys) <= SAMPLE, f"there are at most {SAMPLE} keys")
        require(not self.full or len(self.keys) == SAMPLE, f"a full sample has {SAMPLE} keys")

    @classmethod
    def of(cls, keys: Tensor, columns: Tensor) -> GroupSample:
        """Sum columns [S, C] by key [S]; keys must be hashed, so that their order is random."""
        distinct, inverse = torch.unique(keys, return_inverse=True)
        values = torch.zeros(len(distinct), columns.shape[1], dtype=columns.dtype, device=columns.device)
        values.index_add_(0, inverse, columns)
        return cls(distinct[:SAMPLE], values[:SAMPLE], len(distinct) > SAMPLE)

    def merge(self, other: GroupSample) -> GroupSample:
        """Sum the values of groups in both; keep the smallest keys."""
        keys = torch.unique(torch.cat((self.keys, other.keys)))
        values = self.values.new_zeros(min(len(keys), SAMPLE), self.values.shape[1])
        for one in (self, other):  # each has a group once
            at = torch.searchsorted(keys, one.keys)
            kept = int((at < len(values)).sum())
            values[at[:kept]] += one.values[:kept]
        return GroupSample(keys[: len(values)], values, self.full or other.full or len(keys) > SAMPLE)

    @property
    def groups(self) -> int:
        """Number of groups: exact unless `full`, else estimated from the density of the keys."""
        if not self.full:
            return len(self.keys)
        share = (float(self.keys[-1]) + 2.0**63) / 2.0**64
        return round((len(self.keys) - 1) / share)


@dataclass(frozen=True)
class LogSums(Saved):
    """Σ e^x and Σ e^{2x} for x too large for exp: held as e^{x − shift}, [..., 1+B] with the replicates.

    The leading dimensions are those of `shift`: there may be many sums, each with a shift of its own.
    """

    shift: Annotated[Tensor, Floats("...", rule=NUMBERS)]
    once: Annotated[Tensor, Floats("...", "B")]
    twice: Annotated[Tensor, Floats("...", "B")]

    @classmethod
    def of(cls, x: Tensor, draws: Tensor) -> LogSums:
        """Sum log-weights x [..., S] under draws [S, B]."""
        largest = x.amax(dim=-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
        shift = torch.clamp(largest, min=-1e300)
        x = x - shift[..., None]
        scaled = torch.stack((torch.exp(x), torch.exp(2 * x)))
        both = torch.cat((scaled.sum(dim=-1, keepdim=True), scaled @ draws), dim=-1)
        return cls(shift, both[0], both[1])

    def merge(self, other: LogSums) -> LogSums:
        """Bring both to the larger shift and add."""
        shift = torch.maximum(self.shift, other.shift)
        mine, theirs = (torch.exp(one.shift - shift)[..., None] for one in (self, other))
        once = self.once * mine + other.once * theirs
        return LogSums(shift, once, self.twice * mine**2 + other.twice * theirs**2)


def _count_(counts: Tensor, at: Tensor) -> None:
    """Add how often each index occurs, in place."""
    if here(at):
        counts.numpy()[:] += np.bincount(at.numpy(), minlength=len(counts))
    else:
        counts.add_(tables.count(at, len(counts)))


@dataclass(frozen=True)
class Counts(Saved):
    """Counts on the lattice of `loglattice` (relative width 1/32)."""

    counts: Annotated[Tensor, Floats(loglattice.SIZE, rule=COUNTS)]

    @classmethod
    def none(cls, device: torch.device) -> Counts:
        """Start empty."""
        return cls(torch.zeros(loglattice.SIZE, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, x: Tensor) -> Counts:
        """Bin the values of a tensor."""
        found = cls.none(x.device)
        found.add_(x)
        return found

    def add_(self, x: Tensor) -> None:
        """Add the values of a tensor, in place."""
        _count_(self.counts, loglattice.index(x))

    def merge(self, other: Counts) -> Counts:
        """Add the counts."""
        return Counts(self.counts + other.counts)


@dataclass(frozen=True)
class Bins(Saved):
    """Counts on the lattice of `loglattice` (relative width 1/32), and the sum within each bin."""

    counts: Annotated[Tensor, Floats(loglattice.SIZE, rule=COUNTS)]
    sums: Annotated[Tensor, Floats(loglattice.SIZE)]

    @classmethod
    def none(cls, device: torch.device) -> Bins:
        """Start empty."""
        counts, sums = torch.zeros(2, loglattice.SIZE, dtype=torch.float64, device=device)
        return cls(counts, sums)

    @classmethod
    def of(cls, x: Tensor) -> Bins:
        """Bin the values of a tensor."""
        found = cls.none(x.device)
        found.add_(x)
        return found

    def add_(self, x: Tensor) -> None:
        """Add the values of a tensor, in place."""
        at = loglattice.index(x)
        _count_(self.counts, at)
        self.sums.scatter_add_(0, at, x)

    def plus(self, at: int, x: Tensor) -> Bins:
        """Return a copy with the values of a tensor added to one bin."""
        counts, sums = self.counts.clone(), self.sums.clone()
        counts[at] += x.numel()
        sums[at] += x.sum()
        return Bins(counts, sums)

    def merge(self, other: Bins) -> Bins:
        """Add the counts and sums."""
        return Bins(self.counts + other.counts, self.sums + other.sums)


@dataclass(frozen=True)
class Sums(Saved):
    """Sums of per-sequence columns, and the same sums in every bootstrap replicate.

    Columns that have been equal so far share a row: presets with the same effect have the same sums.

    Attributes:
        names: K column names.
        point: [R] the sums; `rest` [R] the rounding errors of them (compensated summation).
        drawn: [R, B] the sums with each sequence counted as often as its group was drawn.
        which: the row of each name, [K] int64 on the host; None: each has its own.
    """

    names: Annotated[tuple[str, ...], Names("K")]
    point: Annotated[Tensor, Floats("rows")]
    rest: Annotated[Tensor, Floats("rows")]
    drawn: Annotated[Tensor, Floats("rows", "B")]
    which: Annotated[Tensor, Ints("K")] | None = None

    def check(self) -> None:
        """Refuse names whose row does not exist."""
        rows = len(self.point)
        if self.which is None:
            require(len(self.names) == rows, f"point is of shape [{rows}], and must be [K]")
        else:
            require(((self.which >= 0) & (self.which < rows)).all(), f"which is not among {rows} rows")

    @classmethod
    def of(cls, columns: dict[str, Tensor], draws: Tensor, key: Tensor | None = None) -> Sums:
        """Sum columns [S] under draws [S, B]; sequences with equal keys [S] have equal draws."""
        return cls.of_stacked(tuple(columns), torch.stack(tuple(columns.values())), draws, key)

    @classmethod
    def of_stacked(
        cls,
        names: tuple[str, ...],
        columns: Tensor,
        draws: Tensor,
        key: Tensor | None = None,
        which: Tensor | None = None,
    ) -> Sums:
        """Sum columns in one tensor [K, S]; or [R, S], where `which` [K] is the row of each name."""
        return cls.of_parts(names, (columns,), draws, key, which)

    @classmethod
    def of_parts(
        cls,
        names: tuple[str, ...],
        parts: Sequence[Tensor],
        draws: Tensor,
        key: Tensor | None = None,
        which: Tensor | None = None,
    ) -> Sums:
        """Sum rows that lie in several tensors, one after the other, without copying them together."""
        point, (drawn, same) = torch.cat([part.sum(dim=1) for part in parts]), _drawn(parts, draws, key)
        if same is not None:
            first, rows = _pairs(same, point.numpy().view(np.int64))
            point, drawn = point[first], drawn[same[first]]
            which = rows if which is None else rows[which]
        return cls(names, point, torch.zeros_like(point), drawn, which)

    @property
    def whole(self) -> Sums:
        """The same sums with a row for each name."""
        if self.which is None:
            return self
        return Sums(self.names, *self._rows(self.which.to(self.point.device)))

    def _rows(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.point.index_select(0, at), self.rest.index_select(0, at), self.drawn.index_select(0, at)

    def merge(self, other: Sums) -> Sums:
        """Add with compensated summation (two-sum); columns that only one side has are kept."""
        if self.names != other.names:
            return self.whole._widen(other.whole).merge(other.whole._widen(self.whole))
        if self.which is None or other.which is None:
            return self.whole._plus(other.whole, None)
        if torch.equal(self.which, other.which):
            return self._plus(other, self.which)
        first, which = _pairs(self.which, other.which.numpy())
        one, two = (Sums(self.names, *each._rows(each.which[first])) for each in (self, other))  # type: ignore[index]
        return one._plus(two, which)

    def _plus(self, other: Sums, which: Tensor | None) -> Sums:
        """Add row by row."""
        point = self.point + other.point
        moved = point - self.point
        lost = (self.point - (point - moved)) + (other.point - moved)
        return Sums(self.names, point, self.rest + other.rest + lost, self.drawn + other.drawn, which)

    def _widen(self, other: Sums) -> Sums:
        """Return the same sums over the union of both sets of columns, in sorted order."""
        names = tuple(sorted({*self.names, *other.names}))
        at = {name: i for i, name in enumerate(self.names)}
        mine = torch.tensor([at.get(name, len(self.names)) for name in names], device=self.point.device)
        wide = [torch.cat((x, torch.zeros_like(x[:1])))[mine] for x in (self.point, self.rest, self.drawn)]
        return Sums(names, *wide)

    def read(self) -> dict[str, Tensor]:
        """Return name → [1+B] on the CPU: the sum, then its replicates; names of one row share the tensor."""
        both = torch.cat(((self.point + self.rest)[:, None], self.drawn), dim=1).cpu().unbind()
        each = both if self.which is None else [both[at] for at in self.which.tolist()]
        return dict(zip(self.names, each, strict=True))


def _pairs(one: Tensor, two: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the index of each distinct pair of integers, [R], and which of those each of N pairs is, [N]."""
    order = np.lexsort((two, one.numpy()))  # stable: the first of equal ones comes first
    x, y = one.numpy()[order], two[order]
    new = np.concatenate(([True], (x[1:] != x[:-1]) | (y[1:] != y[:-1])))[: len(x)]
    which = np.empty(len(order), np.int64)
    which[order] = np.cumsum(new) - 1
    return torch.from_numpy(order[new]), torch.from_numpy(which)


def _drawn(parts: Sequence[Tensor], draws: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Multiply columns [K, S], in parts, by draws [S, B] → rows, and the row of each; None: each has its own.

    Adjacent sequences with equal keys, whose draws are equal, are added first.
    """
    begins = None if key is None or not here(key) or not len(key) else tables.runs(key)[:-1]
    if begins is None or 2 * len(begins) > len(draws):
        return torch.cat([part @ draws for part in parts]), None
    with np.errstate(all="ignore"):  # inf − inf is a NaN, which readers of sums handle
        together = [np.add.reduceat(part.numpy(), begins.numpy(), axis=1) for part in parts]
        return _of_distinct(np.concatenate(together), draws[begins])


def _of_distinct(rows: npt.NDArray[np.float64], draws: Tensor) -> tuple[Tensor, Tensor | None]:
    """Multiply rows [K, G] by draws [G, B], equal rows once; returns the same as `_drawn`.

    Presets with the same effect on a batch have equal columns, and columns of rare events are mostly zero.
    Rows that may be equal are found by their products with one vector, and compared before they are shared.
    """
    mark = rows @ np.sqrt(np.arange(2.0, 2.0 + rows.shape[1]))
    _, first, which = np.unique(mark, return_index=True, return_inverse=True)
    other = np.flatnonzero(
        (rows[first][which] != rows).any(axis=1)
    )  # of nearly the same product, or no numbers
    few = rows[np.concatenate((first, other))]
    which[other] = len(first) + np.arange(len(other))
    if 2 * len(few) > len(rows):
        return torch.from_numpy(rows) @ draws, None
    return torch.from_numpy(few) @ draws, torch.from_numpy(which)


TAIL = 1 << 15
"""Largest values kept for a tail fit: enough for M = 3√n up to n = 1.2e8; beyond that a smaller tail is
fitted.
"""


class Floor:
    """A lower bound of the tail that rises while parts of a sample arrive; it is pickled without its value.

    Attributes:
        at: at least `TAIL` values of the parts so far are not below it; -inf while that is not known.
    """

    at: float = -math.inf

    def rise(self, to: float) -> None:
        """Raise the bound; a lower value changes nothing."""
        self.at = max(self.at, to)

    def __reduce__(self) -> tuple[type[Floor], tuple[()]]:
        return Floor, ()


@dataclass(frozen=True)
class Tail(Saved):
    """The largest values of a sample.

    Attributes:
        n: how many values there were.
        kept: the `TAIL` largest of them and perhaps more, in no order.
        cut: values below it need not be kept, for at least `TAIL` are not below it; -inf where not known.
        floor: receives the cut, for parts still to come.
    """

    n: Count
    kept: Annotated[Tensor, Floats("kept", rule=NUMBERS)]
    cut: Annotated[float, *UNSAVED] = -math.inf
    floor: Annotated[Floor | None, *UNSAVED] = field(default=None, compare=False, repr=False)

    def check(self) -> None:
        """Refuse fewer values than must be kept, and more than may be."""
        most = min(self.n, 2 * TAIL)
        require(min(self.n, TAIL) <= len(self.kept) <= most, f"{len(self.kept)} of {self.n} values are kept")

    @classmethod
    def of(cls, x: Tensor, floor: Floor | None = None) -> Tail:
        """Keep the largest of all values of a sample.

        With a `floor`, x is a part of a sample all of whose parts will be merged: values below the floor are
        not needed.
        """
        n, known = x.numel(), -math.inf if floor is None else floor.at
        if not here(x):  # shapes must not depend on values: the host would wait for them
            return cls(n, torch.topk(x, min(n, TAIL), sorted=False).values, floor=floor)
        if known > -math.inf:
            return cls._largest(n, _not_below(x, known), known, floor)
        if n <= TAIL:
            return cls(n, x.clone(), floor=floor)
        return cls._above(n, x, _below_the_largest(x.numpy()), floor)

    @classmethod
    def _above(cls, n: int, x: Tensor, cut: float, floor: Floor | None) -> Tail:
        kept = _not_below(x, cut)
        if len(kept) < TAIL:
            return cls._cut(n, x, floor)
        return cls._largest(n, kept, cut, floor)

    @classmethod
    def _largest(cls, n: int, kept: Tensor, cut: float, floor: Floor | None) -> Tail:
        """Keep those of n values that are not below a cut, or the `TAIL` largest where they are too many."""
        return cls(n, kept, cut, floor)._told() if len(kept) <= 2 * TAIL else cls._cut(n, kept, floor)

    @classmethod
    def _cut(cls, n: int, x: Tensor, floor: Floor | None) -> Tail:
        largest = np.partition(x.numpy(), len(x) - TAIL)[-TAIL:]
        return cls(n, torch.from_numpy(largest.copy()), float(largest[0]), floor)._told()

    def _told(self) -> Tail:
        if self.floor is not None:
            self.floor.rise(self.cut)
        return self

    def merge(self, other: Tail) -> Tail:
        """Keep the largest of both."""
        n, cut = self.n + other.n, max(self.cut, other.cut)
        kept = torch.cat([one.kept if one.cut == cut else _not_below(one.kept, cut) for one in (self, other)])
        floor = self.floor or other.floor
        if len(kept) > 2 * TAIL:
            fewer = Tail.of(kept)
            kept, cut = fewer.kept, fewer.cut
        return Tail(n, kept, cut, floor)._told()

    @property
    def top(self) -> Tensor:
        """The `TAIL` largest, in descending order."""
        return torch.topk(self.kept, min(TAIL, len(self.kept))).values


def _below_the_largest(x: npt.NDArray[np.float64]) -> float:
    """Estimate from a subsample a cut above which slightly more than `TAIL` values of x lie."""
    some = x[:: max(len(x) >> 13, 1)]
    rank = max(len(some) - math.ceil(len(some) * min(1.15 * TAIL / len(x), 1.0)), 0)
    return float(np.partition(some, rank)[rank])


def _not_below(x: Tensor, cut: float) -> Tensor:
    values = x.numpy()
    return torch.from_numpy(
        values[np.flatnonzero(values >= cut)]
    )  # few are: their places cost less than a mask
