"""Standard deviations from sums, as torch's own `std` would give them."""

from __future__ import annotations

import math


def std(first: float, second: float, n: float) -> float:
    """√((Σx² − (Σx)²/n) / (n − 1)) from Σx and Σx², x taken off any constant; NaN for fewer than two."""
    return spread(first, second, n) / math.sqrt(n - 1) if n > 1 else math.nan


def spread(first: float, second: float, n: float) -> float:
    """√(Σ(x − mean)²), which rounding must not make imaginary."""
    return math.sqrt(max(second - first * first / n, 0.0))
