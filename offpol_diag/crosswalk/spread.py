"""Statistics as verl logs them: mean, std, extremes, fractions beyond a threshold, and per sequence.

What verl takes over rows runs over empty ones too (as 0), but for the rejection statistics of 2026. All
statistics of a batch are spread together: each has a row, and each pair of limits one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from offpol_diag.crosswalk.ends import Columns, Ends, Ranges, among, named, outer
from offpol_diag.crosswalk.limits import SUMS, UNKNOWN, Piece, Thresholds, column
from offpol_diag.crosswalk.read import EPS
from offpol_diag.host import here
from offpol_diag.metrics.rows import Rows, distinct

Limited = tuple[int, Thresholds]
"""A sample by its place, and limits on it."""


@dataclass(frozen=True)
class Spread:
    """The sums behind a spread, for statistic x.

    Attributes:
        key: prefix of its columns; equal keys mean equal numbers.
        limits: where x counts as low or high; for std and ESS it is clamped to them.
        center: taken off before squaring per-sequence means (1 for weights), so that nothing cancels.
        empty: whether rows without a token count.
    """

    key: str
    limits: Thresholds
    center: float
    empty: bool = True


Asked = Sequence[tuple[Spread, int]]
"""Spreads, each with the place of the sample it is of."""


@dataclass(frozen=True)
class Sample:
    """A statistic x on one batch, of its rows or of its tokens.

    Attributes:
        center: see `Spread`; so is `empty`.
        rows: x of each row, [S]; None for a statistic of tokens.
        pieces: x of tokens.
    """

    center: float
    empty: bool
    rows: Tensor | None = None
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Samples:
    """Statistics on one batch: R of rows, then those of tokens, K in all.

    Attributes:
        each: in that order; there must be one.
        n: tokens of each row, [S].
    """

    each: tuple[Sample, ...]
    n: Tensor

    @cached_property
    def rows(self) -> Tensor:
        """x of rows, [R, S]."""
        return _stack([one.rows for one in self.each if one.rows is not None], self.n)

    @cached_property
    def _of_tokens(self) -> list[tuple[Piece, ...]]:
        return [one.pieces for one in self.each if one.rows is None]

    @cached_property
    def total(self) -> Tensor:
        """Σx over the tokens of each row, [K, S]."""
        sums = [reduce(torch.add, (piece.total for piece in pieces)) for pieces in self._of_tokens]
        return torch.cat((self.rows * self.n, _stack(sums, self.n)))

    @cached_property
    def means(self) -> Tensor:
        """verl's mean of x in each row, [K, S]."""
        return self.total / (self.n + EPS)

    @cached_property
    def centers(self) -> Tensor:
        """[K, 1]."""
        return column(tuple([one.center for one in self.each]), self.n.device)

    @cached_property
    def off(self) -> Tensor:
        """The means less their center, [K, S]."""
        return self.means - self.centers

    @cached_property
    def counted(self) -> Tensor:
        """Which rows count, [K, S] bool."""
        empty = column(tuple([float(one.empty) for one in self.each]), self.n.device) > 0
        return (self.n > 0) | empty

    @cached_property
    def ends(self) -> Ends:
        """Extremes of x in each row, [K, S] each."""
        low, high = among((self.rows, self.rows), self.n > 0)
        tokens = [reduce(outer, (piece.ends for piece in pieces)) for pieces in self._of_tokens]
        lows, highs = (_stack([one[side] for one in tokens], self.n) for side in (0, 1))
        return torch.cat((low, lows)), torch.cat((high, highs))

    def columns(self, asked: Asked) -> Columns:
        """Per-sequence columns [S] by name; spreads whose limits act alike share them."""
        shared = named({"x": self.total, "m": self.means, "m1": self.off, "m2": self.off.square()})
        beyond = self._once(asked, self._spans(self.means, self.means), self._beyond)
        inside = self._once(asked, self._spans(*self._values), self._within)
        return {
            f"{spread.key}/{name}": x
            for (spread, at), one, two in zip(asked, inside, beyond, strict=True)
            for name, x in (*one.items(), *two.items(), *shared[at].items())
        }

    def ranges(self, asked: Asked) -> Ranges:
        """Extremes of x, of its row means, of their deviation from the center."""
        means, off = self.means, self.off.abs()
        each = {
            "x": self.ends,
            "m": among((means, means), self.counted),
            "dev": among((off, off), self.counted),
        }
        pairs = {
            name: list(zip(low.unbind(), high.unbind(), strict=True)) for name, (low, high) in each.items()
        }
        return {f"{spread.key}/{name}": pair[at] for spread, at in asked for name, pair in pairs.items()}

    # ------------------------------------------------------------ limits

    @property
    def _values(self) -> Ends:
        """Extremes of x, those of rows that do not count too."""
        many = len(self.rows)
        low, high = self.ends
        return torch.cat((self.rows, low[many:])), torch.cat((self.rows, high[many:]))

    def _spans(self, low: Tensor, high: Tensor) -> list[Thresholds]:
        """Between what each sample lies; unknown where that cannot be looked at."""
        if not here(low):
            return [UNKNOWN] * len(self.each)
        lows = low.numpy().min(axis=1, initial=math.inf).tolist()
        highs = high.numpy().max(axis=1, initial=-math.inf).tolist()
        return [Thresholds(*both) for both in zip(lows, highs, strict=True)]

    def _once(
        self,
        asked: Asked,
        spans: Sequence[Thresholds],
        make: Callable[[Sequence[Limited]], Sequence[dict[str, Tensor]]],
    ) -> list[dict[str, Tensor]]:
        """Of each spread, made once for all of a sample whose limits act alike on it."""
        limited = [(at, spread.limits.acting(spans[at])) for spread, at in asked]
        first, which = distinct(limited)
        found = make([limited[one] for one in first])
        return [found[one] for one in which]

    def _beyond(self, limited: Sequence[Limited]) -> list[dict[str, Tensor]]:
        """Rows whose mean is above the limits, and below."""
        high, low = self._flags(self.means, limited)
        return named({"m_high": high, "m_low": low})

    def _flags(self, x: Tensor, limited: Sequence[Limited]) -> tuple[Tensor, Tensor]:
        """1 where x [K, S] of a row that counts is above the limits, and below."""
        at, low, high = self._taken(limited)
        x, counted = Rows(x, at).all, Rows(self.counted, at).all
        return ((x > high) & counted).to(torch.float64), ((x < low) & counted).to(torch.float64)

    def _taken(self, limited: Sequence[Limited]) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """Places of samples, and lower and upper limits, [Q, 1] each."""
        at, limits = zip(*limited, strict=True)
        low, high = tuple([one.low for one in limits]), tuple([one.high for one in limits])
        return at, column(low, self.n.device), column(high, self.n.device)

    def _within(self, limited: Sequence[Limited]) -> list[dict[str, Tensor]]:
        """Sums within the limits, and what is beyond them."""
        many = len(self.rows)
        made = {-1: iter(self._rows_within([one for one in limited if one[0] < many]))}
        for at in dict.fromkeys(at for at, _ in limited if at >= many):
            mine = [limits for of, limits in limited if of == at]
            made[at] = iter(self._tokens_within(self.each[at], mine))
        return [next(made[at if at >= many else -1]) for at, _ in limited]

    def _rows_within(self, limited: Sequence[Limited]) -> list[dict[str, Tensor]]:
        if not limited:
            return []
        at, low, high = self._taken(limited)
        x, n = Rows(self.rows, at).all.clamp(low, high), self.n
        off = x - Rows(self.centers, at).all
        above, below = self._flags(self.rows, limited)
        about = {"c1": off * n, "cd": off.square() * n}  # geometric means lie within 1e-3 of 1
        beyond = {"high_rows": above, "low_rows": below, "high": above * n, "low": below * n}
        return named({"c": x * n, "cc": x * (x * n), **about, **beyond})

    def _tokens_within(self, of: Sample, limits: Sequence[Thresholds]) -> list[dict[str, Tensor]]:
        sums = reduce(torch.add, (piece.within(limits) for piece in of.pieces))
        rows = {"high_rows": self._none, "low_rows": self._none}
        return [{**one, **rows} for one in named(dict(zip(SUMS, sums, strict=True)))]

    @cached_property
    def _none(self) -> Tensor:
        return torch.zeros_like(self.n)


def _stack(rows: Sequence[Tensor], n: Tensor) -> Tensor:
    """[K, S]; K may be 0."""
    return torch.stack(tuple(rows)) if rows else n.new_zeros((0, len(n)))
