"""A statistic of tokens within limits: sums of what it is clamped to, and how many lie beyond."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.crosswalk.counts import chunks
from offpol_diag.crosswalk.ends import Ends
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.host import sent
from offpol_diag.metrics.rows import distinct


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


SUMS = ("c", "cc", "high", "low")
"""What is summed within limits: x, x², how many were above and how many below."""
Rows = tuple[Tensor, ...]
"""Those, [.., S] each."""


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

    def within(self, limits: Sequence[Thresholds]) -> Tensor:
        """What becomes of the sums within each of Q limits, by `SUMS`: [4, Q, S]."""
        first, which = distinct([one.acting(self.span) for one in limits])
        few = [limits[at].acting(self.span) for at in first]
        known = [self.view.close or one == UNKNOWN for one in few]
        own = iter(self._of_tokens([one for one, flag in zip(few, known, strict=True) if not flag]))
        rows = [self._of_one(one) if flag else next(own) for one, flag in zip(few, known, strict=True)]
        each = torch.stack([rows[at][sums] for sums in range(len(SUMS)) for at in which])
        return each.view(len(SUMS), len(which), -1)

    def _of_one(self, limits: Thresholds) -> Rows:
        """Of what may be known without a look at the tokens, [S] each."""
        x, none = clamped(self.of, limits), self.view.zeros
        high = none if limits.high == math.inf else self.view.count(_beyond(self.of, limits.high, 1))
        low = none if limits.low == -math.inf else self.view.count(_beyond(self.of, limits.low, -1))
        return self.view.total(x), self.view.total(_squared(x)), high, low

    def _of_tokens(self, limits: Sequence[Thresholds]) -> list[Rows]:
        """Of all limits in one pass over the tokens, [S] each."""
        offsets = self.view.batch.cu_seqlens
        return [
            each
            for some in chunks(len(limits), offsets)
            for each in zip(*(x.unbind() for x in self._in_one(limits[some])), strict=True)
        ]

    def _in_one(self, limits: Sequence[Thresholds]) -> Rows:
        x, offsets = self.view.values(self.of), self.view.batch.cu_seqlens
        low = column(tuple([one.low for one in limits]), x.device)
        high = column(tuple([one.high for one in limits]), x.device)
        inside = x.clamp(low, high)
        each = inside, inside.square(), segments.numbers(x > high), segments.numbers(x < low)
        return tuple([segments.of_rows(segments.total, one, offsets) for one in each])


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


@lru_cache(maxsize=1024)
def column(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """[Q, 1]; a GPU is sent them once."""
    return sent(torch.tensor(numbers, dtype=torch.float64), device)[:, None]
