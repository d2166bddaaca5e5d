"""What is kept of a dump while it is read: sums by bucket of groups, histograms, extremes, best records.

A state of one batch merges with that of another by adding, so batches, threads, files and machines may come
in any order. The bootstrap needs no replicate while a dump is read: sums are kept apart for 256 buckets of
groups, and replicates draw the buckets when the sums are read out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from hashlib import blake2b
from heapq import nsmallest
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from offpol_diag.dump.batch import INCREMENT, mix

Array = npt.NDArray[Any]
T = TypeVar("T")

BUCKETS = 256
"""Most units of the bootstrap: up to this many groups are a unit each; more are hashed into as many."""
COUNTED = 4096
"""Most groups that are counted one by one; how many more there are is estimated from their hashes."""
REPLICATES = 512
"""Bootstrap replicates."""
MOST_PLACES = 4096
"""Most values of a column that are places of their own; all others are one, `OTHERS`."""
OTHERS = "\0others"
"""The place of all values that are not kept; no label of a dump holds a NUL."""
TAIL = 1 << 15
"""Largest values kept for a tail fit: enough for M = 3√n up to n = 1.2e8; a smaller tail is fitted beyond."""
MOST_STEP_GROUPS = 64
"""Most groups of steps where steps are grouped."""


# ---------------------------------------------------------------- groups and their draws


def hashed(text: str) -> int:
    """Return a 64-bit hash of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def groups_of(key: Array, steps: Sequence[str] | None) -> Array:
    """Return the hash of each sequence's group, [S] uint64: its prompt (`key`, [S]), in its step."""
    words = key.view(np.uint64)
    if steps is not None:
        of_step = {step: hashed(step) for step in set(steps)}
        words = words ^ np.array([of_step[step] for step in steps], np.uint64)
    return mix(words)


def buckets_of(groups: Array) -> Array:
    """Return what a batch keeps sums apart for: its groups, or their buckets where they are many."""
    return groups if len(np.unique(groups)) <= BUCKETS else groups % np.uint64(BUCKETS)


def draws(buckets: Array, seed: int, replicates: int = REPLICATES) -> Array:
    """Draw each bucket Poisson(1) times in each replicate: [N] uint64 → [N, replicates] float64.

    A draw is a pure function of bucket, replicate and seed: whatever is read with one seed is paired.
    (Hanley & MacGibbon 2006: the Poisson bootstrap.)
    """
    counters = np.arange(1, (replicates + 1) // 2 + 1, dtype=np.uint64) * INCREMENT
    lanes = mix(counters + mix(np.array([seed % 2**64], np.uint64)))
    words = mix(mix(buckets + np.uint64(1))[:, None] ^ lanes)
    uniform = words.astype("<u8", copy=False).view("<u4")[:, :replicates]  # two draws of 64 bits
    reached = np.zeros(uniform.shape, np.uint8)
    for step in _poisson_steps():  # a few comparisons take a third of the time of a search
        reached += uniform >= step
    return reached.astype(np.float64)


@lru_cache(maxsize=2)
def _of_all_buckets(seed: int) -> Array:
    return draws(np.arange(BUCKETS, dtype=np.uint64), seed)


@lru_cache(maxsize=1)
def _poisson_steps() -> Array:
    """Return the 32-bit thresholds at which a uniform number becomes 1, 2, 3 … draws."""
    reached = np.cumsum([math.exp(-1.0) / math.factorial(k) for k in range(14)])
    steps = np.round(reached * 2.0**32)
    return steps[steps < 2.0**32].astype(np.uint32)


# ---------------------------------------------------------------- sums by place and bucket

Kind = Literal["sums", "logs"]


@dataclass(frozen=True)
class Table:
    """Numbers by place (a step, a host, a position) and bucket; rows rising by both.

    Attributes:
        lines: name → its column of the values; names that are equal in every dump share one.
        places: [N] int64 or text; "" for the dump as a whole.
        buckets: [N] uint64, the group's hash, or its bucket.
        values: [C, N] float64.
        kind: how two rows merge. sums: they add. logs: e^ of them add.
        most: most places; more merge by the bound of `width`. 0: no bound.
        width: 0: places beyond `most`, by hash, are `OTHERS`. Else a place is the first of so many steps, a
            power of 2 that doubles until there are no more than `most`.
    """

    lines: Mapping[str, int]
    places: Array
    buckets: Array
    values: Array
    kind: Kind = "sums"
    most: int = 0
    width: int = 0

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Array],
        buckets: Array,
        places: Sequence[object] | Array | None = None,
        *,
        kind: Kind = "sums",
        most: int = 0,
        width: int = 0,
    ) -> Table:
        """Add up columns [M] of M sequences, or of sequences at places, by place [M] and bucket [M].

        Columns that are one object share a line.
        """
        distinct = {id(x): x for x in columns.values()}
        line = {key: at for at, key in enumerate(distinct)}
        lines = {name: line[id(x)] for name, x in columns.items()}
        where: Array = np.full(len(buckets), "", object)
        if places is not None:
            where = places if isinstance(places, np.ndarray) else np.array(places, object)
        if kind == "sums":  # one column after the other: side by side they take five times as long
            order, first = _sorted(where, buckets)
            at = np.empty(len(order), np.int64)
            at[order] = np.repeat(np.arange(len(first)), np.diff(first, append=len(order)))
            where, buckets = where[order[first]], buckets[order[first]]
            values = np.stack([np.bincount(at, x, len(first)) for x in distinct.values()])
        else:
            values = np.stack([*distinct.values()])
        return cls(lines, where, buckets, values, kind, most, width)._merged()

    def merge(self, other: Table) -> Table:
        """Merge two parts of a dump.

        Raises:
            ValueError: they hold different columns.
        """
        if self.lines != other.lines or self.kind != other.kind:
            raise ValueError("tables of different columns do not merge")
        if self.width != other.width:
            width = max(self.width, other.width)
            return self._wider(width).merge(other._wider(width))
        if np.array_equal(self.buckets, other.buckets) and np.array_equal(self.places, other.places):
            return replace(self, values=self._adding(self.values, other.values))
        places, buckets, values = (
            np.concatenate((getattr(self, name), getattr(other, name)), axis=-1)
            for name in ("places", "buckets", "values")
        )
        return replace(self, places=places, buckets=buckets, values=values)._merged()

    @property
    def _adding(self) -> np.ufunc:
        return np.add if self.kind == "sums" else np.logaddexp

    @property
    def folded(self) -> Table:
        """The same sums, of buckets in place of groups."""
        if not (self.buckets >= BUCKETS).any():
            return self
        return replace(self, buckets=self.buckets % np.uint64(BUCKETS))._merged()

    def _merged(self) -> Table:
        """Merge rows of equal place and bucket, in their order, within the bound on places."""
        order, at = _sorted(self.places, self.buckets)
        places, buckets, values = self.places[order], self.buckets[order], self.values
        if self.most:
            new = places[at][1:] != places[at][:-1]
            many = np.count_nonzero(new) + 1 - (places.dtype == object and OTHERS in places)
            if many > self.most:
                return self._wider(2 * self.width) if self.width else self._with_others()
        if (order[1:] < order[:-1]).any():
            values = values[:, order]
        if len(at) < len(order):
            values = self._adding.reduceat(values, at, axis=1)
        return replace(self, places=places[at], buckets=buckets[at], values=values)

    def _wider(self, width: int) -> Table:
        return replace(self, places=self.places // width * width, width=width)._merged()

    def _with_others(self) -> Table:
        """Keep as many places, chosen by hash: parts of a dump, in any order, choose the same."""
        labels = self.places.tolist()
        kept = set(nsmallest(self.most, {*labels} - {OTHERS}, key=hashed))
        places = [label if label in kept else OTHERS for label in labels]
        return replace(self, places=np.array(places, object))._merged()

    # ------------------------------------------------------------ reading

    @property
    def labels(self) -> list[Any]:
        """The places, rising."""
        found: list[Any] = np.unique(self.places).tolist()
        return found

    def by_place(self) -> dict[Any, Table]:
        """Return the rows of each place, rising."""
        changes = np.flatnonzero(self.places[1:] != self.places[:-1]) + 1
        parts = (np.split(x, changes, axis=-1) for x in (self.places, self.buckets, self.values))
        each = (replace(self, places=p, buckets=b, values=v) for p, b, v in zip(*parts, strict=True))
        return {one.labels[0]: one for one in each if len(one.places)}

    def sums(self) -> dict[str, float]:
        """Return name → the sum over all rows."""
        return {name: x.item() for name, x in self.drawn(None).items()}

    def drawn(self, seed: int | None) -> dict[str, Array]:
        """Return name → the sum over all rows and, with a seed, its replicates, [1+B]."""
        values, top = self.values, np.zeros((1, 1))
        if self.kind == "logs":
            top = np.maximum(values.max(axis=1, initial=-np.inf, keepdims=True), -1e300)
            values = np.exp(values - top)
        result: Array = values.sum(axis=1, keepdims=True)
        if seed is not None:
            distinct, at = np.unique(self.buckets, return_inverse=True)
            folded = bool((distinct < BUCKETS).all())
            drawn = _of_all_buckets(seed)[distinct] if folded else draws(distinct, seed)
            result = np.concatenate((result, values @ drawn[at]), axis=1)
        if self.kind == "logs":
            with np.errstate(divide="ignore"):
                result = np.log(result) + top
        return {name: result[line] for name, line in self.lines.items()}


def _sorted(places: Array, buckets: Array) -> tuple[Array, Array]:
    """Return the order of rows by place and bucket, [M], and where in it each pair begins."""
    codes = places
    if places.dtype == object:  # texts are slow to compare
        code = {label: at for at, label in enumerate(sorted(set(places.tolist())))}
        codes = np.array([code[label] for label in places.tolist()], np.int64)
    order = np.lexsort((buckets, codes))
    new = np.ones(len(order), np.bool_)
    codes, buckets = codes[order], buckets[order]
    new[1:] = (codes[1:] != codes[:-1]) | (buckets[1:] != buckets[:-1])
    return order, np.flatnonzero(new)


def largest_of(x: Array) -> Array:
    """Return the `TAIL` largest of x [N], or all of a few times as many, in any order."""
    return np.partition(x, -TAIL)[-TAIL:] if len(x) > 4 * TAIL else x


# ---------------------------------------------------------------- the whole


@dataclass(frozen=True)
class State:
    """All that is kept of a dump, or of a part of it.

    Attributes:
        groups: hashes of its groups, rising, the smallest `COUNTED` + 1, [G] uint64.
        tables: sums by place and bucket.
        counts: sums that need no interval, as histograms are.
        ranges: smallest and largest value by name.
        largest: the `TAIL` largest values, and perhaps more, in any order.
        records: rows that are kept as they are (`kept_rows`); each has a `merge`.
    """

    groups: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    tables: dict[str, Table] = field(default_factory=dict)
    counts: dict[str, Array] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    largest: dict[str, Array] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_groups(cls, groups: Array) -> State:
        """Note the groups of sequences, [S]."""
        return cls(np.unique(groups)[: COUNTED + 1])

    @np.errstate(all="ignore")
    def merge(self, other: State) -> State:
        """Add another part of the dump, or other things kept of this one."""
        groups = np.union1d(self.groups, other.groups)[: COUNTED + 1]
        tables = [self.tables, other.tables]
        if len(groups) > BUCKETS:
            tables = [{name: table.folded for name, table in one.items()} for one in tables]
        return State(
            groups,
            _merged(Table.merge, *tables),
            _merged(np.add, self.counts, other.counts),
            _merged(lambda a, b: (min(a[0], b[0]), max(a[1], b[1])), self.ranges, other.ranges),
            _merged(lambda a, b: largest_of(np.concatenate((a, b))), self.largest, other.largest),
            _merged(lambda a, b: a.merge(b), self.records, other.records),
        )

    @classmethod
    def joined(cls, *states: State) -> State:
        """Merge several."""
        return reduce(State.merge, states, cls())

    def top(self, name: str) -> Array:
        """Return the largest values, falling, at most `TAIL`."""
        found: Array = np.sort(self.largest[name])[::-1][:TAIL]
        return found

    @property
    def counted(self) -> bool:
        """Whether the number of groups is exact."""
        return len(self.groups) <= COUNTED

    @property
    def many(self) -> int:
        """Number of groups."""
        if self.counted:
            return len(self.groups)
        return round((COUNTED - 1) / ((float(self.groups[COUNTED - 1]) + 1) / 2.0**64))


def _merged(merge: Callable[[T, T], T], one: Mapping[str, T], two: Mapping[str, T]) -> dict[str, T]:
    return {**one, **{name: merge(one[name], x) if name in one else x for name, x in two.items()}}
