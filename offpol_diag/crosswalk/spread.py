"""One statistic as verl logs it: mean, std, extremes, fractions beyond a threshold, and per sequence.

verl's masked mean divides by (Σmask + 1e-8), and what it takes over rows runs over empty ones too (as 0), but
for the rejection statistics of 2026; both are reproduced, so that a curve can be laid over the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from offpol_diag.crosswalk.ends import Ends, outer, rows
from offpol_diag.crosswalk.view import Measure, View
from offpol_diag.host import here

EPS = 1e-8

Columns = dict[str, Tensor]
Ranges = dict[str, Ends]


@dataclass(frozen=True)
class Thresholds:
    """Where a statistic counts as low or high; statistics for std and ESS are clamped to it."""

    low: float
    high: float

    def acting(self, on: Thresholds) -> Thresholds:
        """The same without what acts on no value, given between what values lie (NaN: not known)."""
        low = -math.inf if on.low >= self.low else self.low
        return Thresholds(low, math.inf if on.high <= self.high else self.high)


UNKNOWN = Thresholds(-math.inf, math.inf)


@dataclass(frozen=True)
class Piece:
    """A statistic x of some tokens.

    Attributes:
        view: those tokens, of a batch that may have others.
        of: its values.
        span: between what they are known to lie.
    """

    view: View
    of: Measure
    span: Thresholds = UNKNOWN

    @property
    def total(self) -> Tensor:
        """Σx of each row, [S]."""
        return self.view.total(self.of)

    @property
    def ends(self) -> Ends:
        """The smallest and the largest of each row."""
        return self.view.ends(self.of)

    def capped(self, high: float) -> Piece:
        """min(x, high); the same piece where that changes nothing."""
        if high >= self.span.high:
            return self
        return Piece(self.view, clamped(self.of, Thresholds(-math.inf, high)), self.span)

    def within(self, limits: Thresholds) -> Bounded:
        """What becomes of the sums within limits; once for all limits that act alike."""
        low = limits.low if limits.low > self.span.low else -math.inf
        high = limits.high if limits.high < self.span.high else math.inf
        x, none = clamped(self.of, Thresholds(low, high)), self.view.zeros
        return Bounded(
            self.view.total(x),
            self.view.total(_squared(x)),
            none if high == math.inf else self.view.count(_beyond(self.of, high, 1)),
            none if low == -math.inf else self.view.count(_beyond(self.of, low, -1)),
        )


@cache
def clamped(x: Measure, to: Thresholds) -> Measure:
    """Within limits."""
    if to == UNKNOWN:
        return x
    return x.then(f"in [{to.low}, {to.high}]", lambda values: values.clamp(to.low, to.high))


@cache
def _squared(x: Measure) -> Measure:
    return x.then("squared", torch.square)


@cache
def _beyond(x: Measure, bound: float, sign: int) -> Measure:
    """A flag: above the bound (sign 1) or below it (-1)."""
    return x.then(f"beyond {bound} to {sign}", lambda v: v > bound if sign > 0 else v < bound)


class Bounded(NamedTuple):
    """Sums of each row within limits, [S]: of x, of x², how many were above and how many below."""

    c: Tensor
    cc: Tensor
    high: Tensor
    low: Tensor

    def plus(self, more: Bounded) -> Bounded:
        """Over the tokens of both."""
        return Bounded(*(one + two for one, two in zip(self, more, strict=True)))


@dataclass(frozen=True)
class Sample:
    """A statistic x on one batch, and what all spreads of it share.

    Attributes:
        pieces: x of tokens; empty for a statistic of rows.
        empty: whether rows without a token count.
        n: tokens of each row, [S].
        total: Σx over the tokens of each row, [S].
        judged: verl's mean of x in each row and, for a statistic of rows, x itself: [1 or 2, S].
        ranges: extremes of x, of its row means, and of their deviation from the center, of each row.
        center: taken off row means.
    """

    pieces: tuple[Piece, ...]
    empty: bool
    n: Tensor
    total: Tensor
    judged: Tensor
    ranges: Ranges
    center: float
    _memo: dict[object, Columns] = field(default_factory=dict, repr=False)

    def once(self, key: object, make: Callable[[], Columns]) -> Columns:
        """`make()`, computed once per key for all spreads."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    @cached_property
    def values(self) -> Thresholds:
        """Between what x lies; unknown where that cannot be looked at."""
        return _between(*self.ranges["x"]) if self.pieces else _between(self.judged[1], self.judged[1])

    @cached_property
    def means(self) -> Thresholds:
        """Between what the row means lie, likewise."""
        return _between(self.judged[0], self.judged[0])

    @cached_property
    def shared(self) -> Columns:
        """What depends on no limits."""
        off = self.judged[0] - self.center
        return {"x": self.total, "m": self.judged[0], "m1": off, "m2": off.square()}

    def flagged(self, flags: Tensor) -> Tensor:
        """1 for rows that have a flag and count."""
        return (flags if self.empty else flags & (self.n > 0)).to(torch.float64)

    @cached_property
    def none(self) -> Tensor:
        """[S] of 0."""
        return torch.zeros_like(self.n)

    @classmethod
    def of_rows(cls, x: Tensor, n: Tensor, center: float, empty: bool) -> Sample:
        """From the statistic of each row, [S]."""
        total = x * n
        means = total / (n + EPS)
        ranges = {"x": rows(x, n > 0), **_mean_ranges(means, center, n, empty)}
        return cls((), empty, n, total, torch.stack((means, x)), ranges, center)

    @classmethod
    def of_tokens(cls, pieces: tuple[Piece, ...], n: Tensor, center: float, empty: bool) -> Sample:
        """From the statistic of all tokens."""
        total = reduce(torch.add, (piece.total for piece in pieces))
        means = total / (n + EPS)
        ranges = {
            "x": reduce(outer, (piece.ends for piece in pieces)),
            **_mean_ranges(means, center, n, empty),
        }
        return cls(pieces, empty, n, total, means[None], ranges, center)


def _between(low: Tensor, high: Tensor) -> Thresholds:
    if not here(low):
        return UNKNOWN
    return Thresholds(float(low.numpy().min(initial=math.inf)), float(high.numpy().max(initial=-math.inf)))


def _mean_ranges(means: Tensor, center: float, n: Tensor, empty: bool) -> Ranges:
    there = None if empty else n > 0
    return {"m": rows(means, there), "dev": rows((means - center).abs(), there)}


@dataclass(frozen=True)
class Spread:
    """The sums behind a spread, for statistic x.

    Attributes:
        key: prefix of its columns; equal keys mean equal numbers.
        center: taken off before squaring per-sequence means (1 for weights), so that nothing cancels.
        empty: whether rows without a token count.
    """

    key: str
    limits: Thresholds
    center: float
    empty: bool = True

    def of_rows(self, x: Tensor, n: Tensor) -> Sample:
        """What spreads of the same statistic of rows share."""
        return Sample.of_rows(x, n, self.center, self.empty)

    def of_tokens(self, pieces: tuple[Piece, ...], n: Tensor) -> Sample:
        """What spreads of the same statistic of tokens share."""
        return Sample.of_tokens(pieces, n, self.center, self.empty)

    def columns(self, of: Sample) -> Columns:
        """Per-sequence columns [S]; spreads whose limits act alike share them."""
        at, of_means = self.limits.acting(of.values), self.limits.acting(of.means)
        found = {
            **of.once(("x", at), lambda: (_of_tokens if of.pieces else _of_rows)(of, at)),
            **of.once(("m", of_means), lambda: _of_means(of, of_means)),
            **of.shared,
        }
        return {f"{self.key}/{name}": values for name, values in found.items()}

    def ranges(self, of: Sample) -> Ranges:
        """Extremes of x, of its row means, of their deviation from the center."""
        return {f"{self.key}/{name}": pair for name, pair in of.ranges.items()}


def _outside(of: Sample, which: int, limits: Thresholds) -> tuple[Tensor, Tensor]:
    """Where row means (0), or x of rows (1), are above the limits and where below; [S] each of 0 and 1."""
    x = of.judged[which]
    high = of.none if limits.high == math.inf else of.flagged(x > limits.high)
    return high, of.none if limits.low == -math.inf else of.flagged(x < limits.low)


def _of_means(of: Sample, limits: Thresholds) -> Columns:
    high, low = _outside(of, 0, limits)
    return {"m_high": high, "m_low": low}


def _of_rows(of: Sample, limits: Thresholds) -> Columns:
    clamped = of.judged[1].clamp(limits.low, limits.high)
    high, low = _outside(of, 1, limits)
    total, off = clamped * of.n, clamped - of.center
    about = {"c1": off * of.n, "cd": off.square() * of.n}  # geometric means lie within 1e-3 of 1
    rows = {"high_rows": high, "low_rows": low, "high": high * of.n, "low": low * of.n}
    return {"c": total, "cc": clamped * total, **about, **rows}


def _of_tokens(of: Sample, limits: Thresholds) -> Columns:
    sums = reduce(Bounded.plus, (piece.within(limits) for piece in of.pieces))
    return {**sums._asdict(), "high_rows": of.none, "low_rows": of.none}


@dataclass(frozen=True)
class Read:
    """Reads a spread's sums and extremes back.

    Attributes:
        sums: column → its sum over the dump.
        ranges: name → (smallest, largest).
    """

    sums: dict[str, float]
    ranges: dict[str, tuple[float, float]]

    def mean(self, column: str) -> float:
        """verl's masked mean over tokens."""
        return self.sums[column] / (self.sums["tokens"] + EPS)

    def std(self, key: str, center: float = 0.0) -> float:
        """Of the clamped statistic, over tokens; 0 for one token.

        From the sums about the center where there are some, so that little cancels; verl's means divide by
        n + 1e-8, which the last two terms make up for.
        """
        n = self.sums["tokens"]
        if n < 2:
            return 0.0
        if f"{key}/cd" not in self.sums:
            mean = self.mean(f"{key}/c")
            return math.sqrt(max(self.mean(f"{key}/cc") - mean * mean, 0.0))
        off, short = self.mean(f"{key}/c1"), EPS / (n + EPS)
        about = self.mean(f"{key}/cd") - off * off
        return math.sqrt(max(about + 2 * center * off * short + center**2 * (1 - short) * short, 0.0))

    def ess(self, key: str) -> float:
        """1 / E[(w/E w)²] of the clamped weights, over tokens."""
        normalised = self.mean(f"{key}/cc") / (self.mean(f"{key}/c") + EPS) ** 2
        return 1.0 / normalised if normalised > 0 else math.nan

    def row_mean(self, key: str, rows: float) -> float:
        """Mean over rows of the row means."""
        return self.sums[f"{key}/m"] / rows

    def row_std(self, key: str, rows: float) -> float:
        """Standard deviation over rows of the row means (n − 1); 0 for one row."""
        if rows < 2:
            return 0.0
        first, second = self.sums[f"{key}/m1"], self.sums[f"{key}/m2"]
        return math.sqrt(max(second - first * first / rows, 0.0) / (rows - 1))
