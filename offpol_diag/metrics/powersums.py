"""Sums over each sequence of powers of the log-ratios, and what becomes of them under series (`series.py`).

One pass over the tokens serves every formula: what is left of each is a product of its coefficients with the
sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.polynomial.polynomial import polyval
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.metrics.lines import End, Family, Row
from offpol_diag.metrics.series import SIDES

Array = NDArray[np.float64]
BLOCK = 1 << 15
"""Tokens of a block: a few arrays of this length stay in a core's own cache."""


@dataclass(frozen=True)
class PowerSums:
    """The sums that some lines are made of.

    Attributes:
        rows: what each line is made of.
    """

    rows: tuple[Row | End, ...]

    @cached_property
    def degrees(self) -> dict[Family, int]:
        """The highest power of each family."""
        found: dict[Family, int] = {}
        for one in self.rows:
            for family, ray in one.items() if isinstance(one, dict) else ():
                found[family] = max(found.get(family, 0), len(ray))
        return found

    @cached_property
    def coefficients(self) -> tuple[Array, tuple[int, ...]]:
        """The distinct rows, [L, F], and which of them each line has; -1 for an end."""
        starts = [0, *accumulate(self.degrees.values())]
        places = dict(zip(self.degrees, starts, strict=False))
        distinct: dict[tuple[float, ...], int] = {}
        which = [
            distinct.setdefault(_spread(one, places, starts[-1]), len(distinct))
            if isinstance(one, dict)
            else -1
            for one in self.rows
        ]
        return np.array([*distinct]).reshape(len(distinct), starts[-1]), tuple(which)

    def values(self, batch: Batch) -> list[Tensor]:
        """Every line on a batch of near tokens, [S] each."""
        matrix, which = self.coefficients
        tokens = Tokens.of(batch)
        wanted = {(one.direction, place) for one in self.rows if isinstance(one, End) for place in one.places}
        moments, places = tokens.reduced(self.degrees, wanted)
        sums = torch.from_numpy(tokens.back(matrix @ moments, 0.0))
        ends = dict.fromkeys(one for one in self.rows if isinstance(one, End))
        found = {one: torch.from_numpy(tokens.back(*_end(one, places))) for one in ends}
        return [
            sums[at] if isinstance(one, dict) else found[one]
            for one, at in zip(self.rows, which, strict=True)
        ]


def _spread(row: Row, places: Mapping[Family, int], width: int) -> tuple[float, ...]:
    found = [0.0] * width
    for family, ray in row.items():
        found[places[family] : places[family] + len(ray)] = ray
    return tuple(found)


def _end(end: End, places: Mapping[tuple[str, str], Array]) -> tuple[Array, float]:
    """The end of each sequence, [N], and what an empty one has."""
    absent, join = (-np.inf, np.fmax) if end.how == "max" else (np.inf, np.fmin)
    at = [places[end.direction, place] for place in end.places] or [np.zeros(())]
    found = [
        np.where(np.isfinite(d), polyval(np.where(np.isfinite(d), d, 0.0), end.powers), absent) for d in at
    ]
    return reduce(join, found), absent


@dataclass(frozen=True)
class Tokens:
    """Tokens in the host's memory, of N sequences that have any.

    Attributes:
        columns: log-probs and advantages by name, [T] each.
        begins: where each sequence begins and the last one ends, [N+1].
        there: which of the batch's sequences they are, [S] bool.
    """

    columns: dict[str, Array]
    begins: NDArray[np.int64]
    there: NDArray[np.bool_]
    _made: dict[str, Array] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, batch: Batch) -> Tokens:
        """Of a batch."""
        named = {
            name: getattr(batch, name) for name in ("rollout", "old", "current", "advantages", "entropy")
        }
        starts = batch.cu_seqlens.numpy()
        there = starts[1:] > starts[:-1]
        begins = np.append(starts[:-1][there], starts[-1])
        return cls({name: x.numpy() for name, x in named.items() if x is not None}, begins, there)

    def back(self, x: Array, absent: float) -> Array:
        """[…, N] → […, S]."""
        found = np.full((*x.shape[:-1], len(self.there)), absent)
        found[..., self.there] = x
        return found

    def blocks(self) -> Iterator[tuple[Tokens, slice]]:
        """Whole sequences, about `BLOCK` tokens at a time, and which they are."""
        wanted = np.arange(BLOCK, max(int(self.begins[-1]), BLOCK), BLOCK)
        cuts = sorted({0, *np.searchsorted(self.begins, wanted).tolist(), len(self.begins) - 1})
        for first, last in pairwise(cuts):
            begins = self.begins[first : last + 1]
            columns = {name: x[begins[0] : begins[-1]] for name, x in self.columns.items()}
            yield Tokens(columns, begins - begins[0], self.there), slice(first, last)

    def total(self, x: Array) -> Array:
        """Sum over each sequence, [N]."""
        return np.asarray(np.add.reduceat(x, self.begins[:-1]))

    def reduced(
        self, degrees: Mapping[Family, int], wanted: Collection[tuple[str, str]]
    ) -> tuple[Array, dict[tuple[str, str], Array]]:
        """Sums of the powers 1, 2, … of each family, one family after the other [F, N]; `PLACES` [N]."""
        advantages = self.advantages()
        own = degrees if advantages is None else _sideless(degrees)
        moments = np.empty((sum(own.values()), len(self.begins) - 1))
        places = {key: np.empty(len(self.begins) - 1) for key in wanted}
        for block, at in self.blocks():
            rows = (row for family, degree in own.items() for row in block.powers(family, degree))
            for k, row in enumerate(rows):
                moments[k, at] = row
            for (direction, place), found in places.items():
                found[at] = block.place(direction, place)
        return moments if advantages is None else _sided(moments, own, degrees, advantages), places

    def advantages(self) -> Array | None:
        """The advantage of each sequence, [N], where all its tokens have the same; else None."""
        if "advantages" not in self.columns:
            return None
        a, firsts = self.columns["advantages"], self.begins[:-1]
        low, high = np.minimum.reduceat(a, firsts), np.maximum.reduceat(a, firsts)
        return low if np.array_equal(low, high) else None

    def once(self, name: str, make: Callable[[Mapping[str, Array]], Array]) -> Array:
        """What is made of the columns, once."""
        if name not in self._made:
            self._made[name] = make(self.columns)
        return self._made[name]

    def gap(self, direction: str) -> Array:
        """A log-ratio, [T] nats."""
        below, above = _GAPS[direction]
        return self.once(direction, lambda columns: np.asarray(columns[above] - columns[below]))

    def place(self, direction: str, name: str) -> Array:
        """One log-ratio of each sequence, or distance, [N] (`PLACES`)."""
        of, kernel = PLACES[name]
        return np.asarray(kernel.reduceat(of(self.gap(direction)), self.begins[:-1]))

    def powers(self, family: Family, degree: int) -> Iterator[Array]:
        """Sums of part · d, part · d², …, [N] each; of |d|, d |d|, … where the part has its sign."""
        (column, side, sign), direction = family
        factors = [self.once(name, _COLUMNS[name]) for name in (column, side) if name]
        if direction:
            gap = self.gap(direction)
            factors.append(np.abs(gap) if sign else gap)
        x = np.array(factors[0]) if factors else np.ones(int(self.begins[-1]))
        for factor in factors[1:]:
            np.multiply(x, factor, out=x)
        yield self.total(x)
        for _ in range(degree - 1):
            np.multiply(x, gap, out=x)
            yield self.total(x)


def _sideless(degrees: Mapping[Family, int]) -> dict[Family, int]:
    """The families without parts of the advantage, which are those times a number of each sequence."""
    found: dict[Family, int] = {}
    for ((column, _, sign), direction), degree in degrees.items():
        family = (column, "", sign), direction
        found[family] = max(found.get(family, 0), degree)
    return found


def _sided(
    moments: Array, own: Mapping[Family, int], degrees: Mapping[Family, int], advantages: Array
) -> Array:
    """The families' moments made of those without parts of the advantage, given that of each sequence [N]."""
    places = dict(zip(own, accumulate(own.values(), initial=0), strict=False))
    sides = {side: _COLUMNS[side]({"advantages": advantages}) for side in SIDES} | {"": np.ones(())}
    found = [np.empty((0, len(advantages)))]
    for ((column, side, sign), direction), degree in degrees.items():
        at = places[(column, "", sign), direction]
        found.append(moments[at : at + degree] * sides[side])
    return np.concatenate(found)


PLACES: dict[str, tuple[Callable[[Array], Array], np.ufunc]] = {
    "low": (lambda d: d, np.minimum),
    "high": (lambda d: d, np.maximum),
    "near": (np.abs, np.minimum),
    "far": (np.abs, np.maximum),
    "below": (lambda d: np.where(d <= 0, d, -np.inf), np.maximum),
    "above": (lambda d: np.where(d >= 0, d, np.inf), np.minimum),
}
"""The ends of d and of |d|, and what is next to 0 on both sides (infinite where nothing is)."""
_GAPS = {"old": ("rollout", "old"), "current": ("rollout", "current"), "drift": ("old", "current")}
_COLUMNS: dict[str, Callable[[Mapping[str, Array]], Array]] = {
    "log": lambda columns: columns["rollout"],
    "log old": lambda columns: columns["old"],
    "probability": lambda columns: np.asarray(np.exp(columns["rollout"])),
    "entropy": lambda columns: columns["entropy"],
    "A+": lambda columns: np.maximum(columns["advantages"], 0.0),
    "A-": lambda columns: np.maximum(-columns["advantages"], 0.0),
    "1+": lambda columns: np.asarray(columns["advantages"] > 0, dtype=np.float64),
    "1-": lambda columns: np.asarray(columns["advantages"] < 0, dtype=np.float64),
}
