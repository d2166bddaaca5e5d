"""Sums over runs of tokens of powers of log-ratios, and the ends of those, in the host's memory.

Tokens are looked at block by block, a long run in pieces, whose sums are added at the end. Where few tokens
of a batch are left out nothing is copied: they count as 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from offpol_diag import host
from offpol_diag.batch import FEW, Batch, Some
from offpol_diag.metrics.columns import COLUMNS, GAPS, RATIOS
from offpol_diag.metrics.lines import Family
from offpol_diag.metrics.parts import Part
from offpol_diag.metrics.places import found as ends_of
from offpol_diag.metrics.places import joined
from offpol_diag.metrics.products import Products
from offpol_diag.metrics.room import Room

Array = NDArray[np.float64]
Offsets = NDArray[np.int64]
Places = dict[tuple[str, str], Array]
"""By direction and name, a log-ratio of each run or a distance, [N]."""

BLOCK = 1 << 16
"""Tokens of a block."""
PIECE = 1 << 12
"""Tokens of a piece, at most."""
CALL = 1700.0
"""What a matrix product of a run costs beside its tokens, nanoseconds."""


class Gone(NamedTuple):
    """Tokens that do not count, [K] each: where they stand, rising, and where one of their run that does."""

    at: Offsets
    twins: Offsets


@dataclass(frozen=True)
class Tokens:
    """Tokens in N runs.

    Attributes:
        columns: log-probs, advantages and entropies by name, [T] each.
        begins: where each run begins and the last one ends, [N+1].
        gone: tokens that do not count.
    """

    columns: dict[str, Array]
    begins: Offsets
    gone: Gone

    @classmethod
    def of(cls, batch: Batch) -> Tokens:
        """The sequences of a batch that have tokens."""
        starts = batch.cu_seqlens.numpy()
        begins = np.append(starts[:-1][starts[1:] > starts[:-1]], starts[-1])
        if not isinstance(batch, Some) or batch.without is None or FEW * len(batch.without) > batch.tokens:
            return cls(_columns(batch), begins, Gone(*np.zeros((2, 0), dtype=np.int64)))
        begins = np.append(_nth(batch, begins[:-1]), batch.whole.tokens)
        without = batch.without.numpy()
        before = without - np.arange(len(without))  # how many of the others stand before each
        late = before > 0
        return cls(_columns(batch.whole), begins, Gone(without[late], _nth(batch, before[late] - 1)))

    def reduced(
        self, degrees: Mapping[Family, int], wanted: Collection[tuple[str, str]]
    ) -> tuple[Array, Places]:
        """Sums of the powers 1, 2, … of each family, one family after the other [F, N]; and places [N]."""
        plans = _plans(degrees)
        offsets, firsts = _pieces(self.begins, min([PIECE, *(plan.most for plan in plans)]))
        moments = np.empty((sum(degrees.values()), len(offsets) - 1))
        parts: list[Places] = []
        room = Room()
        for first, last in _spans(offsets, BLOCK):
            block = self._block(offsets[first : last + 1], room)
            with np.errstate(all="ignore"):  # tokens that do not count may hold anything
                parts.append(block.places(wanted))
                for plan in plans:
                    moments[plan.rows, first:last] = plan.sums(block)
        places = {key: np.concatenate([np.empty(0), *(part[key] for part in parts)]) for key in wanted}
        if firsts is None:
            return moments, places
        whole = {key: joined(key[1], x, firsts) for key, x in places.items()}
        return np.add.reduceat(moments, firsts, axis=1), whole

    def _block(self, offsets: Offsets, room: Room) -> Block:
        first, last = int(offsets[0]), int(offsets[-1])
        gone = slice(*np.searchsorted(self.gone.at, (first, last)).tolist())
        twins = {name: x[self.gone.twins[gone]] for name, x in self.columns.items()}
        columns = {name: x[first:last] for name, x in self.columns.items()}
        return Block(columns, offsets - first, self.gone.at[gone] - first, twins, room)

    def advantages(self) -> Array | None:
        """The advantage of each run, [N], where all its tokens have the same; else None."""
        x = self.columns.get("advantages")
        return None if x is None or self._changes(x) else x[self.begins[:-1]]

    def _changes(self, x: Array) -> bool:
        """Whether two tokens of a run that count and have none between them that does differ in a column."""
        (gone, twins), changes = self.gone, np.zeros(len(x), dtype=np.bool_)
        np.not_equal(x[1:], x[:-1], out=changes[:-1])
        changes[: self.begins[0]] = changes[self.begins[1:] - 1] = False
        changes[gone] = changes[gone - 1] = False
        if changes.any():
            return True
        last = np.append(gone[1:] != gone[:-1] + 1, True)[: len(gone)]
        after, before = gone[last] + 1, twins[last]
        inside = self.begins[np.searchsorted(self.begins, after)] > after
        return bool((x[after[inside]] != x[before[inside]]).any())


def _nth(some: Some, k: Offsets) -> Offsets:
    found: Offsets = some.nth(torch.from_numpy(k)).numpy()
    return found


def _columns(batch: Batch) -> dict[str, Array]:
    named = {name: getattr(batch, name) for name in ("rollout", "old", "current", "advantages", "entropy")}
    return {name: x.numpy() for name, x in named.items() if x is not None}


def _pieces(begins: Offsets, most: int) -> tuple[Offsets, Offsets | None]:
    """Pieces of about the same length of every run, and the first of each; None where a run is a piece."""
    lengths = np.diff(begins)
    counts = -(-lengths // most)
    if counts.max(initial=0) <= 1:
        return begins, None
    firsts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(firsts, counts)
    starts = np.repeat(begins[:-1], counts) + within * np.repeat(lengths, counts) // np.repeat(counts, counts)
    return np.append(starts, begins[-1]), firsts


def _spans(offsets: Offsets, tokens: int) -> Iterator[tuple[int, int]]:
    """Runs that begin at offsets, about so many tokens at a time: (first, one past last)."""
    wanted = np.arange(offsets[0] + tokens, max(offsets[-1], offsets[0] + tokens), tokens)
    return pairwise(sorted({0, *np.searchsorted(offsets, wanted).tolist(), len(offsets) - 1}))


# ---------------------------------------------------------------- one block

_LOGS = {ratio: direction for direction, ratio in RATIOS.items()}


@dataclass(frozen=True)
class Block:
    """Tokens of whole runs.

    Attributes:
        columns: by name, [T] each.
        begins: where each run begins and the last one ends, [N+1].
        gone: which tokens do not count, [K].
        twins: the columns of tokens that stand in for those, [K] each.
        room: to compute in.
    """

    columns: dict[str, Array]
    begins: Offsets
    gone: Offsets
    twins: dict[str, Array]
    room: Room
    _made: dict[object, Array] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """T."""
        return int(self.begins[-1])

    def gap(self, direction: str) -> Array:
        """A log-ratio d, [T] nats, or e^d − 1; 0 where tokens do not count."""
        if direction not in self._made:
            out = self.room(direction, self.size)
            self._made[direction] = (
                host.expm1(self.gap(_LOGS[direction]), out)
                if direction in _LOGS
                else self._gap(direction, out)
            )
        return self._made[direction]

    def _gap(self, direction: str, out: Array) -> Array:
        below, above = (self.columns[name] for name in GAPS[direction])
        return self._left(np.subtract(above, below, out=out))

    def factor(self, part: Part) -> Array | None:
        """A column times a part of the advantage, [T]; 0 where tokens do not count. None: 1."""
        names = [name for name in part[:2] if name]
        if len(names) < 2:
            return self._column(names[0]) if names else None
        if part[:2] not in self._made:
            one, two = map(self._column, names)
            self._made[part[:2]] = np.multiply(one, two, out=self.room(part[:2], self.size))
        return self._made[part[:2]]

    def _column(self, name: str) -> Array:
        if name not in self._made:
            self._made[name] = self._left(COLUMNS[name](self.columns, self.room(name, self.size)))
        return self._made[name]

    def _left(self, x: Array) -> Array:
        x[self.gone] = 0.0
        return x

    def total(self, part: Part) -> Array:
        """Sum of a part over each run, [N]."""
        x = self.factor(part)
        if x is None:
            return np.diff(self.begins) - np.diff(np.searchsorted(self.gone, self.begins))
        return np.asarray(np.add.reduceat(x, self.begins[:-1]))

    def places(self, wanted: Collection[tuple[str, str]]) -> Places:
        """Places of each run, [N]; tokens that do not count are where their twins are."""
        made: Places = {}
        for direction in dict.fromkeys(direction for direction, _ in wanted):
            gap, (below, above) = self.gap(direction), GAPS[direction]
            gap[self.gone] = self.twins[above] - self.twins[below]
            names = [name for one, name in wanted if one == direction]
            for name, x in ends_of(gap, self.begins[:-1], names).items():
                made[direction, name] = x
            gap[self.gone] = 0.0
        return made

    def powers(self, family: Family, degree: int) -> Iterator[Array]:
        """Sums of part · d, part · d², …, [N] each; of |d|, d |d|, … where the part has its sign."""
        part, direction = family
        gap, factor, x = self.gap(direction), self.factor(part), self.room("powers", self.size)
        np.copyto(x, gap)
        if part[2]:
            np.abs(gap, out=x)
        if factor is not None:
            np.multiply(x, factor, out=x)
        for power in range(degree):
            if power:
                np.multiply(x, gap, out=x)
            yield np.add.reduceat(x, self.begins[:-1])


# ---------------------------------------------------------------- how


@dataclass(frozen=True)
class Plan:
    """The families of one direction.

    Attributes:
        direction: "" for parts by themselves.
        products: their sums.
        rows: where those go, [F].
    """

    direction: str
    products: Products
    rows: Offsets

    @property
    def most(self) -> int:
        """Tokens of a run, at most."""
        return self.products.most

    def sums(self, block: Block) -> Array:
        """Of a block, [F, N]."""
        degrees = self.products.degrees
        if not self.direction:
            return np.array([block.total(part) for part, _ in degrees])
        if CALL * (len(block.begins) - 1) > self.products.saves * int(block.begins[-1]):
            rows = (block.powers((part, self.direction), degree) for part, degree in degrees)
            return np.array([x for found in rows for x in found])
        return self.products.sums(block.gap(self.direction), block.factor, block.begins, block.room)


def _plans(degrees: Mapping[Family, int]) -> list[Plan]:
    places = dict(zip(degrees, accumulate(degrees.values(), initial=0), strict=False))
    found = []
    for direction in dict.fromkeys(direction for _, direction in degrees):
        mine = {part: degree for (part, at), degree in degrees.items() if at == direction}
        rows = [np.arange(degree) + places[part, direction] for part, degree in mine.items()]
        found.append(Plan(direction, Products(tuple(mine.items())), np.concatenate(rows)))
    return found
