"""Sums and extremes of a dump, read back as the means, deviations and sample sizes that trainers log.

verl's masked mean divides by (Σmask + 1e-8), which is reproduced, so that a curve can be laid over the
user's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EPS = 1e-8


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
