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

    def columns(self, x: Level, batch: Batch) -> Columns:
        """Per-sequence columns [S]."""
        n = batch.lengths.to(torch.float64)
        clamped = x.map(lambda v: v.clamp(self.limits.low, self.limits.high))
        per_row = _total(x, batch) / (n + EPS)
        found = {
            "x": _total(x, batch),
            "c": _total(clamped, batch),
            "cc": _total(clamped.map(torch.square), batch),
            "high": _count(x, x.values > self.limits.high, batch),
            "low": _count(x, x.values < self.limits.low, batch),
            "high_rows": self._rows(x, x.values > self.limits.high, batch),
            "low_rows": self._rows(x, x.values < self.limits.low, batch),
            "m": per_row,
            "m1": per_row - self.center,
            "m2": (per_row - self.center).square(),
            "m_high": self._counted(per_row > self.limits.high, batch),
            "m_low": self._counted(per_row < self.limits.low, batch),
        }
        return {f"{self.key}/{name}": values for name, values in found.items()}

    def ranges(self, x: Level, batch: Batch) -> Ranges:
        """Extremes of x, of its row means, of their deviation from the center."""
        full = batch.lengths > 0
        per_row = _total(x, batch) / (batch.lengths.to(torch.float64) + EPS)
        rows = per_row if self.empty else per_row[full]
        there = x.values if x.per == "token" else x.values[full]
        found = {"x": extremes(there), "m": extremes(rows), "dev": extremes((rows - self.center).abs())}
        return {f"{self.key}/{name}": pair for name, pair in found.items()}

    def _rows(self, x: Level, flags: Tensor, batch: Batch) -> Tensor:
        """Which rows are beyond the threshold, for a statistic of sequences; nothing for one of tokens."""
        return self._counted(flags, batch) if x.per == "sequence" else batch.rollout.new_zeros(1)

    def _counted(self, flags: Tensor, batch: Batch) -> Tensor:
        return (flags if self.empty else flags & (batch.lengths > 0)).to(torch.float64)


def _total(x: Level, batch: Batch) -> Tensor:
    return segments.total(x.values, batch.cu_seqlens) if x.per == "token" else x.values * batch.lengths


def _count(x: Level, flags: Tensor, batch: Batch) -> Tensor:
    if x.per == "token":
        return segments.count(flags, batch.cu_seqlens)
    return flags.to(torch.float64) * batch.lengths


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
