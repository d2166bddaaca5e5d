"""States that merge: sums with bootstrap replicates, histograms, extremes, groups, the best records."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from hashlib import blake2b
from heapq import nsmallest
from itertools import groupby
from typing import Annotated, Generic, Protocol, Self, TypeVar

import numpy as np

from offpol_diag.engine import loglattice, segments
from offpol_diag.engine.fields import (
    COUNTS,
    NUMBERS,
    RISING,
    Floats,
    Ints,
    Names,
    Saved,
    Size,
    require,
)
from offpol_diag.engine.segments import Array


def runs(codes: Array) -> Array:
    """Return the starts of runs of equal codes, and the end: [T] int64 → [R+1]."""
    if not len(codes):
        return np.zeros(1, np.int64)
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    return np.concatenate(([0], changes, [len(codes)]))


def count_by(codes: Array, size: int) -> Array:
    """Count how often each code occurs: [T] int64 in [0, size) → [size] float64."""
    return np.bincount(codes, minlength=size).astype(np.float64)


def sum_by(codes: Array, size: int, x: Array) -> Array:
    """Sum x [T] float64 by code: [T] int64 in [0, size) → [size] float64."""
    return np.bincount(codes, x, size).astype(np.float64, copy=False)  # whole numbers, if there are none


LANES = 4
"""Sums of each code kept apart, so that an addition need not wait for the one before it; a power of 2."""


def sums_by(codes: Array, size: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Sum several x [T] float64 by code, in lanes: [T] int64 in [0, size) → [size] float64 by name."""
    lanes = codes * LANES + (np.arange(len(codes)) & (LANES - 1))
    return {name: sum_by(lanes, size * LANES, x).reshape(-1, LANES).sum(1) for name, x in arrays.items()}


class State(Protocol):
    """A mergeable accumulator; a tally is a set of them."""

    def merge(self, other: Self) -> Self:
        """Merge the states of two parts of a dump."""
        ...


M = TypeVar("M", bound=State)
S = TypeVar("S")
K = TypeVar("K")


def typed(state: object, kind: type[S]) -> S:
    """Return a state after asserting its type."""
    assert isinstance(state, kind)
    return state


def merged(one: Mapping[K, M], two: Mapping[K, M]) -> dict[K, M]:
    """Merge states by key."""
    found = dict(one)
    for key, state in two.items():
        found[key] = found[key].merge(state) if key in found else state
    return found


@dataclass(frozen=True)
class Places(Saved, Generic[M]):
    """States by place (a step, a position bucket, a host); mostly sums."""

    sums: dict[str, M]

    def merge(self, other: Places[M]) -> Places[M]:
        """Merge place by place."""
        return Places(merged(self.sums, other.sums))


MOST_PLACES = 4096
"""Most places kept of a column's values; all others are added up as `OTHERS`."""
OTHERS = "\0others"
"""Key of the sums of all places that are not kept; no label of a dump holds a NUL."""


def _hashed(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def retained(keys: Collection[str]) -> Collection[str]:
    """Choose at most `MOST_PLACES` keys by hash, so that parts of a dump, in any order, choose the same."""
    keys = [key for key in keys if key != OTHERS]
    return keys if len(keys) <= MOST_PLACES else nsmallest(MOST_PLACES, keys, key=_hashed)


def crowded(places: Places[M]) -> Places[M]:
    """Add up the places beyond `MOST_PLACES` as `OTHERS`."""
    if len(places.sums) <= MOST_PLACES:
        return places
    keep = set(retained(places.sums))
    found = {key: one for key, one in places.sums.items() if key in keep}
    others = [one for key, one in places.sums.items() if key not in keep]
    return Places(found | ({OTHERS: reduce(lambda one, two: one.merge(two), others)} if others else {}))


def estimated_others(keys: Collection[str]) -> int:
    """Estimate how many places `OTHERS` holds, from the density of the hashes of those kept."""
    if OTHERS not in keys:
        return 0
    kept = len(keys) - 1
    return max(1, round((kept - 1) / (max(_hashed(key) for key in keys if key != OTHERS) / 2.0**64)) - kept)


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
    low: Annotated[Array, Floats("K")]
    high: Annotated[Array, Floats("K")]

    @classmethod
    def of(cls, values: Mapping[str, tuple[float, float]]) -> Extremes:
        """Build from pairs of scalars (smallest, largest); ±inf where there was no value."""
        if not values:
            return cls((), np.empty(0), np.empty(0))
        low, high = zip(*values.values(), strict=True)
        return cls(tuple(values), np.stack(low), np.stack(high))

    def merge(self, other: Extremes) -> Extremes:
        """Element-wise minimum and maximum."""
        if self.names != other.names:
            raise ValueError("extremes of different quantities do not merge")
        return Extremes(self.names, np.minimum(self.low, other.low), np.maximum(self.high, other.high))

    def read(self) -> dict[str, tuple[float, float]]:
        """Return name → (smallest, largest)."""
        return dict(zip(self.names, zip(self.low.tolist(), self.high.tolist(), strict=True), strict=True))


def extremes(x: Array, there: Array | None = None) -> tuple[float, float]:
    """Return the smallest and largest element where `there` is true; (+inf, -inf) where it nowhere is."""
    where = True if there is None else there
    return x.min(initial=math.inf, where=where), x.max(initial=-math.inf, where=where)


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

    keys: Annotated[Array, Ints("groups", rule=RISING)]
    values: Annotated[Array, Floats("groups", "C", rule=COUNTS)]
    full: bool = False

    def check(self) -> None:
        """Refuse more groups than the sample holds, and fewer where it is full."""
        require(len(self.keys) <= SAMPLE, f"there are at most {SAMPLE} keys")
        require(not self.full or len(self.keys) == SAMPLE, f"a full sample has {SAMPLE} keys")

    @classmethod
    def of(cls, keys: Array, columns: Array) -> GroupSample:
        """Sum columns [S, C] by key [S]; keys must be hashed, so that their order is random."""
        distinct, inverse = np.unique(keys, return_inverse=True)
        values = np.zeros((len(distinct), columns.shape[1]))
        np.add.at(values, inverse, columns)
        return cls(distinct[:SAMPLE], values[:SAMPLE], len(distinct) > SAMPLE)

    def merge(self, other: GroupSample) -> GroupSample:
        """Sum the values of groups in both; keep the smallest keys."""
        keys = np.union1d(self.keys, other.keys)
        values = np.zeros((min(len(keys), SAMPLE), self.values.shape[1]))
        for one in (self, other):  # each has a group once
            at = np.searchsorted(keys, one.keys)
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

    shift: Annotated[Array, Floats("...", rule=NUMBERS)]
    once: Annotated[Array, Floats("...", "B")]
    twice: Annotated[Array, Floats("...", "B")]

    @classmethod
    def of(cls, x: Array, draws: Array) -> LogSums:
        """Sum log-weights x [..., S] under draws [S, B]."""
        shift = x.max(axis=-1, initial=-1e300)
        x = x - shift[..., None]
        scaled = np.stack((np.exp(x), np.exp(2 * x)))
        both = np.concatenate((scaled.sum(axis=-1, keepdims=True), scaled @ draws), axis=-1)
        return cls(shift, both[0], both[1])

    def merge(self, other: LogSums) -> LogSums:
        """Bring both to the larger shift and add."""
        shift = np.maximum(self.shift, other.shift)
        mine, theirs = (np.exp(one.shift - shift)[..., None] for one in (self, other))
        once = self.once * mine + other.once * theirs
        return LogSums(shift, once, self.twice * mine**2 + other.twice * theirs**2)


@dataclass(frozen=True)
class Counts(Saved):
    """A histogram on the lattice of `loglattice` (relative width 1/32)."""

    counts: Annotated[Array, Floats(loglattice.SIZE, rule=COUNTS)]

    def merge(self, other: Counts) -> Counts:
        """Add the counts."""
        return Counts(self.counts + other.counts)


@dataclass(frozen=True)
class Bins(Saved):
    """A histogram on the lattice of `loglattice` (relative width 1/32), and the sum within each bin."""

    counts: Annotated[Array, Floats(loglattice.SIZE, rule=COUNTS)]
    sums: Annotated[Array, Floats(loglattice.SIZE)]

    @classmethod
    def of(cls, x: Array) -> Bins:
        """Bin the values of an array."""
        at = loglattice.index(x)
        return cls(count_by(at, loglattice.SIZE), sum_by(at, loglattice.SIZE, x))

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
        which: the row of each name, [K] int64; None: each has its own.
    """

    names: Annotated[tuple[str, ...], Names("K")]
    point: Annotated[Array, Floats("rows")]
    rest: Annotated[Array, Floats("rows")]
    drawn: Annotated[Array, Floats("rows", "B")]
    which: Annotated[Array, Ints("K")] | None = None

    def check(self) -> None:
        """Refuse names whose row does not exist."""
        rows = len(self.point)
        if self.which is None:
            require(len(self.names) == rows, f"point is of shape [{rows}], and must be [K]")
        else:
            require(((self.which >= 0) & (self.which < rows)).all(), f"which is not among {rows} rows")

    @classmethod
    def of(cls, columns: dict[str, Array], draws: Array, key: Array | None = None) -> Sums:
        """Sum columns [S] under draws [S, B]; sequences with equal keys [S] have equal draws."""
        return cls.of_stacked(tuple(columns), np.stack(tuple(columns.values())), draws, key)

    @classmethod
    def of_stacked(
        cls,
        names: tuple[str, ...],
        rows: Array | Sequence[Array],
        draws: Array,
        key: Array | None = None,
        which: Array | None = None,
    ) -> Sums:
        """Sum rows [R, S], in one array or several; `which` [K] is the row of each name, None: its own.

        Adjacent sequences with equal keys, whose draws are equal, are added before they are multiplied.
        """
        parts = (rows,) if isinstance(rows, np.ndarray) else rows
        point = np.concatenate([part.sum(axis=1) for part in parts])
        begins = runs(key)[:-1] if key is not None and len(key) else None
        if begins is not None and 2 * len(begins) <= len(draws):
            parts, draws = [np.add.reduceat(part, begins, axis=1) for part in parts], draws[begins]
        drawn = np.concatenate([_resampled(part, draws) for part in parts])
        return cls(names, point, np.zeros_like(point), drawn, which)

    @property
    def whole(self) -> Sums:
        """The same sums with a row for each name."""
        if self.which is None:
            return self
        return Sums(self.names, *(x[self.which] for x in (self.point, self.rest, self.drawn)))

    def merge(self, other: Sums) -> Sums:
        """Add with compensated summation (two-sum); columns that only one side has are kept."""
        one, two = self, other
        if one.names != two.names:
            one, two = one.whole._widen(two.names), two.whole._widen(one.names)
        same = one.which is two.which or (
            one.which is not None and two.which is not None and np.array_equal(one.which, two.which)
        )
        if not same:
            one, two = one.whole, two.whole
        point = one.point + two.point
        moved = point - one.point
        lost = (one.point - (point - moved)) + (two.point - moved)
        return Sums(one.names, point, one.rest + two.rest + lost, one.drawn + two.drawn, one.which)

    def _widen(self, names: tuple[str, ...]) -> Sums:
        """Return the same sums with zeros for names that are only in `names`, in sorted order."""
        every = tuple(sorted({*self.names, *names}))
        at = {name: i for i, name in enumerate(self.names)}
        mine = [at.get(name, len(self.names)) for name in every]
        wide = [np.concatenate((x, np.zeros_like(x[:1])))[mine] for x in (self.point, self.rest, self.drawn)]
        return Sums(every, *wide)

    def read(self) -> dict[str, Array]:
        """Return name → [1+B]: the sum, then its replicates; names of one row share the array."""
        both = [*np.concatenate(((self.point + self.rest)[:, None], self.drawn), axis=1)]
        each = both if self.which is None else [both[at] for at in self.which.tolist()]
        return dict(zip(self.names, each, strict=True))


def _resampled(rows: Array, draws: Array) -> Array:
    """Compute rows [R, S] @ draws [S, B]; rows of zeros, which short sequences have many of, are skipped."""
    if (filled := rows.any(axis=1)).all():
        return rows @ draws
    drawn = np.zeros((len(rows), draws.shape[1]))
    drawn[filled] = rows[filled] @ draws
    return drawn


# ---------------------------------------------------------------- bootstrap draws
#
# Each group of sequences (a prompt) is drawn Poisson(1) times in each replicate. The draw is a pure function
# of the group's key, the replicate's number and the seed (a counter-based hash), so cutting a dump into
# files, merging shards and reordering rows change nothing, and all sequences of a group are drawn together:
# tokens within a sequence, and samples of one prompt, are dependent. References: Hanley & MacGibbon 2006
# (Poisson bootstrap); Steele et al. 2014, SplittableRandom (the mixer).

REPLICATES = 256
CACHED = 256
"""Sequences drawn at a time, so that their bits stay in the core's cache."""


def mix(x: Array) -> Array:
    """Apply SplitMix64's finaliser to int64 (wrapping arithmetic): a bijection that scatters its input."""
    x = x.view(np.uint64)
    found = np.asarray(x >> np.uint64(30))
    found ^= x
    found *= np.uint64(0xBF58476D1CE4E5B9)
    moved = np.asarray(found >> np.uint64(27))
    found ^= moved
    found *= np.uint64(0x94D049BB133111EB)
    found ^= np.right_shift(found, np.uint64(31), out=moved)
    return found.view(np.int64)


def draws(key: Array, seed: int, replicates: int = REPLICATES) -> Array:
    """Draw each sequence's group Poisson(1) times: key [S] int64 → counts [S, replicates] float64."""
    begins = runs(key)  # adjacent sequences of one group are drawn once
    drawn = _draws(key[begins[:-1]], seed, replicates)
    return drawn if len(drawn) == len(key) else np.repeat(drawn, segments.lengths(begins), axis=0)


def _draws(key: Array, seed: int, replicates: int) -> Array:
    """Draw Poisson(1) times by uniform 32-bit numbers: the halves of 64 bits, the lower one first."""
    counters = np.arange((replicates + 1) // 2, dtype=np.int64)
    lanes = mix((counters + 1) * -0x61C8864680B583EB + mix(np.array([seed], np.int64)))
    found = np.empty((len(key), replicates))
    for at in range(0, len(key), CACHED):
        words = mix(mix(key[at : at + CACHED])[:, None] ^ lanes)
        found[at : at + CACHED] = _poisson(words.astype("<i8", copy=False).view("<u4")[:, :replicates])
    return found


def _poisson(uniform: Array) -> Array:
    """Turn uniform 32-bit numbers into Poisson(1) draws; a few comparisons cost a fifth of a search."""
    reached = np.zeros(uniform.shape, np.uint8)
    for step in _poisson_steps():
        reached += uniform >= np.uint32(step)
    return reached


@lru_cache(maxsize=1)
def _poisson_steps() -> list[int]:
    """Return the 32-bit thresholds at which a uniform number becomes 1, 2, 3 … draws."""
    total, steps = 0.0, []
    for k in range(14):
        total += math.exp(-1.0) / math.factorial(k)
        steps.append(round(total * 2**32))
    return [step for step in steps if step < 2**32]
