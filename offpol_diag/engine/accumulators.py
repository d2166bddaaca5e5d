"""States that merge: sums with bootstrap replicates, histograms, extremes, groups, the best records."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from hashlib import blake2b
from heapq import nsmallest
from itertools import groupby
from typing import Annotated, Any, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
from offpol_diag.engine.segments import on_host, sent


def runs(codes: Tensor) -> Tensor:
    """Return the starts of runs of equal codes, and the end: [T] int64 on a CPU → [R+1]."""
    changes = torch.nonzero(codes[1:] != codes[:-1])[:, 0] + 1
    ends = torch.tensor([0, len(codes)])
    return torch.cat((ends[:1], changes, ends[1:])) if len(codes) else ends[:1]


def count_by(codes: Tensor, size: int) -> Tensor:
    """Count how often each code occurs: [T] int64 in [0, size) → [size] float64."""
    if on_host(codes):
        return torch.bincount(codes, minlength=size).to(torch.float64)
    return sum_by(codes, size, torch.ones(codes.shape, dtype=torch.float64, device=codes.device))


def sum_by(codes: Tensor, size: int, x: Tensor) -> Tensor:
    """Sum x [T] float64 by code: [T] int64 in [0, size) → [size] float64."""
    return x.new_zeros(size).scatter_add_(0, codes, x)


LANES = 4
"""Sums of each code kept apart, so that an addition need not wait for the one before it; a power of 2."""


def sums_by(codes: Tensor, size: int, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum several x [T] float64 by code: [T] int64 in [0, size) → [size] float64 by name.

    On a CPU in lanes, in a third of the time of bincount.
    """
    if not on_host(codes):
        return {name: sum_by(codes, size, x) for name, x in arrays.items()}
    lanes = codes * LANES + (torch.arange(len(codes)) & (LANES - 1))
    wide = {name: torch.zeros(size * LANES, dtype=torch.float64) for name in arrays}
    return {name: wide[name].scatter_add_(0, lanes, x).view(-1, LANES).sum(1) for name, x in arrays.items()}


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


@dataclass(frozen=True)
class Counts(Saved):
    """A histogram on the lattice of `loglattice` (relative width 1/32)."""

    counts: Annotated[Tensor, Floats(loglattice.SIZE, rule=COUNTS)]

    def merge(self, other: Counts) -> Counts:
        """Add the counts."""
        return Counts(self.counts + other.counts)


@dataclass(frozen=True)
class Bins(Saved):
    """A histogram on the lattice of `loglattice` (relative width 1/32), and the sum within each bin."""

    counts: Annotated[Tensor, Floats(loglattice.SIZE, rule=COUNTS)]
    sums: Annotated[Tensor, Floats(loglattice.SIZE)]

    @classmethod
    def of(cls, x: Tensor) -> Bins:
        """Bin the values of a tensor."""
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
        rows: Tensor | Sequence[Tensor],
        draws: Tensor,
        key: Tensor | None = None,
        which: Tensor | None = None,
    ) -> Sums:
        """Sum rows [R, S], in one tensor or several; `which` [K] is the row of each name, None: its own.

        Adjacent sequences with equal keys, whose draws are equal, are added before they are multiplied.
        """
        parts = (rows,) if isinstance(rows, Tensor) else rows
        point = torch.cat([part.sum(dim=1) for part in parts])
        begins = runs(key)[:-1] if key is not None and on_host(key) and len(key) else None
        if begins is not None and 2 * len(begins) <= len(draws):
            with np.errstate(all="ignore"):  # inf − inf is a NaN, which readers of sums handle
                grouped = [np.add.reduceat(part.numpy(), begins.numpy(), axis=1) for part in parts]
            parts, draws = [torch.from_numpy(part) for part in grouped], draws[begins]
        drawn = torch.cat([_resampled(part, draws) for part in parts])
        return cls(names, point, torch.zeros_like(point), drawn, which)

    @property
    def whole(self) -> Sums:
        """The same sums with a row for each name."""
        if self.which is None:
            return self
        at = self.which.to(self.point.device)
        return Sums(self.names, *(x.index_select(0, at) for x in (self.point, self.rest, self.drawn)))

    def merge(self, other: Sums) -> Sums:
        """Add with compensated summation (two-sum); columns that only one side has are kept."""
        one, two = self, other
        if one.names != two.names:
            one, two = one.whole._widen(two.names), two.whole._widen(one.names)
        same = one.which is two.which or (
            one.which is not None and two.which is not None and torch.equal(one.which, two.which)
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
        mine = torch.tensor([at.get(name, len(self.names)) for name in every], device=self.point.device)
        wide = [torch.cat((x, torch.zeros_like(x[:1])))[mine] for x in (self.point, self.rest, self.drawn)]
        return Sums(every, *wide)

    def read(self) -> dict[str, Tensor]:
        """Return name → [1+B] on the CPU: the sum, then its replicates; names of one row share the tensor."""
        both = torch.cat(((self.point + self.rest)[:, None], self.drawn), dim=1).cpu().unbind()
        each = both if self.which is None else [both[at] for at in self.which.tolist()]
        return dict(zip(self.names, each, strict=True))


def _resampled(rows: Tensor, draws: Tensor) -> Tensor:
    """Compute rows [R, S] @ draws [S, B]; rows of zeros, which short sequences have many of, are skipped."""
    if not on_host(rows) or (filled := rows.numpy().any(axis=1)).all():
        return rows @ draws
    drawn, there = rows.new_zeros(len(rows), draws.shape[1]), torch.from_numpy(filled)
    drawn[there] = rows[there] @ draws
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
"""Sequences drawn at a time on a CPU, so that their bits stay in its cache."""
Words = npt.NDArray[Any]


def mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64 (wrapping arithmetic): a bijection that scatters its input."""
    if on_host(x):
        return torch.from_numpy(mixed(x.numpy()))
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def mixed(x: Words) -> Words:
    """Compute the same of a numpy array, in 0.4 of the time."""
    x = x.view(np.uint64)
    found = np.asarray(x >> np.uint64(30))
    found ^= x
    found *= np.uint64(0xBF58476D1CE4E5B9)
    moved = np.asarray(found >> np.uint64(27))
    found ^= moved
    found *= np.uint64(0x94D049BB133111EB)
    found ^= np.right_shift(found, np.uint64(31), out=moved)
    return found.view(np.int64)


def draws(key: Tensor, seed: int, replicates: int = REPLICATES) -> Tensor:
    """Draw each sequence's group Poisson(1) times: key [S] int64 → counts [S, replicates] float64."""
    if not on_host(key):
        return _draws(key, seed, replicates)
    begins = runs(key)  # adjacent sequences of one group are drawn once
    drawn = _draws(key[begins[:-1]], seed, replicates)
    if len(drawn) == len(key):
        return drawn
    return torch.repeat_interleave(drawn, segments.lengths(begins), dim=0)


def _draws(key: Tensor, seed: int, replicates: int) -> Tensor:
    """Draw Poisson(1) times by uniform 32-bit numbers: the halves of 64 bits, the lower one first."""
    counters = torch.arange((replicates + 1) // 2, device=key.device, dtype=torch.int64)
    lanes = mix((counters + 1) * -0x61C8864680B583EB + int(mix(torch.tensor(seed))))
    if not on_host(key):
        bits = mix(mix(key)[:, None] ^ lanes[None, :])
        halves = torch.stack((bits & 0xFFFFFFFF, _shift(bits, 32)), dim=2).flatten(1)[:, :replicates]
        steps = sent(torch.tensor(_poisson_steps()), key.device)
        return torch.bucketize(halves.contiguous(), steps, right=True).to(torch.float64)
    found = np.empty((len(key), replicates))
    for at in range(0, len(key), CACHED):
        words = mixed(mixed(key[at : at + CACHED].numpy())[:, None] ^ lanes.numpy())
        found[at : at + CACHED] = _poisson(words.astype("<i8", copy=False).view("<u4")[:, :replicates])
    return torch.from_numpy(found)


def _poisson(uniform: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """Turn uniform 32-bit numbers into Poisson(1) draws; a few comparisons cost a fifth of a search."""
    reached = np.zeros(uniform.shape, np.uint8)
    for step in _poisson_steps():
        reached += uniform >= np.uint32(step)
    return reached


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift int64 right logically (torch's own shift is arithmetic)."""
    return (x >> by) & ((1 << (64 - by)) - 1)


@lru_cache(maxsize=1)
def _poisson_steps() -> list[int]:
    """Return the 32-bit thresholds at which a uniform number becomes 1, 2, 3 … draws."""
    total, steps = 0.0, []
    for k in range(14):
        total += math.exp(-1.0) / math.factorial(k)
        steps.append(round(total * 2**32))
    return [step for step in steps if step < 2**32]
