"""A statistic of tokens within limits: sums of what it is clamped to, and how many lie beyond."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from offpol_diag.crosswalk.ends import Ends
from offpol_diag.crosswalk.view import Measure, View


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
