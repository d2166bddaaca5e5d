"""One statistic as verl logs it: mean, std, extremes, fractions beyond a threshold, and per sequence.

verl's masked mean divides by (Σmask + 1e-8), and what it takes over rows runs over empty ones too (as 0), but
for the rejection statistics of 2026; both are reproduced, so that a curve can be laid over the user's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.accumulators import extremes
from offpol_diag.batch import Batch
from offpol_diag.ratios import Level

EPS = 1e-8

Columns = dict[str, Tensor]
Ranges = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Thresholds:
    """Where a statistic counts as low or high; statistics for std and ESS are clamped to it."""

    low: float
    high: float


@dataclass(frozen=True)
class Sample:
    """A statistic x on one batch, and what all spreads of it share.

    Attributes:
        x: of tokens or of rows.
        batch: the batch.
        empty: whether rows without a token count.
        n: tokens of each row, [S].
        total: Σx over the tokens of each row, [S].
        judged: verl's mean of x in each row and, for a statistic of rows, x itself: [1 or 2, S].
        ranges: extremes of x, of its row means, and of their deviation from the center.
    """

    x: Level
    batch: Batch
    empty: bool
    n: Tensor
    total: Tensor
    judged: Tensor
    ranges: Ranges

    @classmethod
    def of(cls, x: Level, batch: Batch, center: float, empty: bool) -> Sample:
        """What is shared, made once."""
        n = batch.lengths.to(torch.float64)
        of_rows = x.per == "sequence"
        total = x.values * n if of_rows else segments.total(x.values, batch.cu_seqlens)
        means = total / (n + EPS)
        dev = (means - center).abs()
        there = torch.ones_like(n, dtype=torch.bool) if empty else n > 0
        low, high = ends(torch.stack((means, dev)), there)
        tokens = ends(x.values, n > 0) if of_rows else extremes(x.values)
        ranges = {"x": tokens, "m": (low[0], high[0]), "dev": (low[1], high[1])}
        return cls(x, batch, empty, n, total, torch.stack((means, x.values) if of_rows else (means,)), ranges)


def ends(x: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest along the last axis of what is there; (+inf, -inf) where nothing is."""
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], torch.inf), x.new_full(x.shape[:-1], -torch.inf)
    return torch.where(there, x, torch.inf).amin(-1), torch.where(there, x, -torch.inf).amax(-1)


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

    def sample(self, x: Level, batch: Batch) -> Sample:
        """What spreads of the same statistic share."""
        return Sample.of(x, batch, self.center, self.empty)

    def columns(self, of: Sample) -> Columns:
        """Per-sequence columns [S]."""
        beyond = self._beyond(of)
        found = self._of_rows(of, beyond) if of.x.per == "sequence" else self._of_tokens(of)
        means = of.judged[0]
        off = means - self.center
        found |= {
            "x": of.total,
            "m": means,
            "m1": off,
            "m2": off.square(),
            "m_high": beyond[0][0],
            "m_low": beyond[1][0],
        }
        return {f"{self.key}/{name}": values for name, values in found.items()}

    def ranges(self, of: Sample) -> Ranges:
        """Extremes of x, of its row means, of their deviation from the center."""
        return {f"{self.key}/{name}": pair for name, pair in of.ranges.items()}

    def _beyond(self, of: Sample) -> Tensor:
        """Above and below the limits: means, then x where it is of rows; [2, 1 or 2, S] of 0 and 1."""
        flags = torch.stack((of.judged > self.limits.high, of.judged < self.limits.low))
        return (flags if of.empty else flags & (of.n > 0)).to(torch.float64)

    def _of_rows(self, of: Sample, beyond: Tensor) -> Columns:
        clamped = of.x.values.clamp(self.limits.low, self.limits.high)
        (high, low), (high_tokens, low_tokens) = beyond[:, 1], beyond[:, 1] * of.n
        total = clamped * of.n
        rows = {"high_rows": high, "low_rows": low, "high": high_tokens, "low": low_tokens}
        return {"c": total, "cc": clamped * total, **rows}

    def _of_tokens(self, of: Sample) -> Columns:
        x, offsets, none = of.x.values, of.batch.cu_seqlens, torch.zeros_like(of.n)
        clamped = x.clamp(self.limits.low, self.limits.high)
        return {
            "c": segments.total(clamped, offsets),
            "cc": segments.total(clamped.square(), offsets),
            "high": segments.count(x > self.limits.high, offsets),
            "low": segments.count(x < self.limits.low, offsets),
            "high_rows": none,
            "low_rows": none,
        }


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

    def std(self, key: str) -> float:
        """Of the clamped statistic, over tokens; 0 for one token."""
        if self.sums["tokens"] < 2:
            return 0.0
        mean = self.mean(f"{key}/c")
        return math.sqrt(max(self.mean(f"{key}/cc") - mean * mean, 0.0))

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
