"""The 95% interval of a number, read off the number and its bootstrap replicates.

Two ends a multiple of the replicates' standard deviation away from the number, on a scale on which the range
of the number has no end: the logarithm of what lies above the lower end, the log-odds between two ends, the
number itself where it has none (delta method). So an interval never leaves the range, and follows the skew of
what is small or rare. The multiple is the quantile of Student's t: the standard deviation is an estimate too,
from as many groups as the dump has in effect (Kish: fewer than there are where some groups hold most tokens)
and from the replicates. Of G groups the bootstrap shows (G − 1)/G of the variance, which is put back.

Percentiles of the replicates do less well on the same dumps (`tests/test_coverage.py`): 2.5% of 256
replicates are 6, a noisy end; and they are too narrow when groups or events are few.

References: Efron & Tibshirani 1993, ch. 12–13 (t intervals, transformed scales); Hesterberg 2015, "What
teachers should know about the bootstrap" (too narrow by √((n − 1)/n), and by z for t); Kish 1965 (effective
sample size); Clopper & Pearson 1934 (no event among n).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from torch import Tensor

from offpol_diag.student import quantile

Array = npt.NDArray[np.float64]
Ends = tuple[float, float]
"""Of an interval."""
FEWEST_GROUPS = 5
"""Below this many groups a bootstrap interval says nothing."""
FEWEST_EFFECTIVE = 3.0
"""And below this many in effect."""


@dataclass(frozen=True)
class Range:
    """Where a number can lie; ±inf where there is no end."""

    low: float = -math.inf
    high: float = math.inf

    def inside(self, value: float) -> bool:
        """Whether it lies between the ends, on neither."""
        return self.low < value < self.high

    def around(self, value: float, half: float) -> tuple[float, float]:
        """The interval of half width `half`, to first order, on the scale without ends."""
        if not self.inside(value):
            return max(value - half, min(self.low, value)), min(value + half, max(self.high, value))
        if self.high < math.inf:
            return self._odds(value, half)
        if self.low > -math.inf:
            above = value - self.low
            far = math.exp(min(half / above, 700.0))
            return self.low + above / far, self.low + above * far
        return value - half, value + half

    def _odds(self, value: float, half: float) -> tuple[float, float]:
        below, above = value - self.low, self.high - value
        width = self.high - self.low
        far = math.exp(min(half * width / (below * above), 700.0))
        return self.low + width * below / (below + above * far), self.high - width * above / (
            above + below * far
        )


ANYWHERE = Range()
POSITIVE = Range(low=0.0)
ABOVE_ONE = Range(low=1.0)
ABOVE_MINUS_ONE = Range(low=-1.0)
SHARE = Range(0.0, 1.0)
CORRELATION = Range(-1.0, 1.0)


def interval(values: Tensor, groups: float, many: int, within: Range) -> Ends | None:
    """The interval of a number and its replicates.

    Args:
        values: [1+B], the number and its replicates.
        groups: how many groups there are in effect.
        many: how many groups there are.
        within: where the number can lie.

    Returns:
        Its ends, or None with too few groups or defined replicates.
    """
    return intervals(values[None], groups, many, within)[0]


def intervals(values: Tensor, groups: float, many: int, within: Range) -> list[Ends | None]:
    """`interval` of every row of [N, 1+B] values: of thousands most of the price would be in the calls."""
    if many < FEWEST_GROUPS or groups < FEWEST_EFFECTIVE:
        return [None] * len(values)
    every = values.numpy()  # of short vectors numpy's overhead is a tenth of torch's
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows has no interval
        halves = _halves(np.ascontiguousarray(every[:, 1:]), groups)
    each = zip(every[:, 0].tolist(), halves, strict=True)
    return [within.around(value, half) if math.isfinite(half) else None for value, half in each]


def _halves(drawn: Array, groups: float) -> list[float]:
    """Half the width of an interval for each row of replicates [N, B]; NaN where too few are finite."""
    fewest = max(0.9 * drawn.shape[1], 2)
    if drawn.shape[1] < fewest:
        return [math.nan] * len(drawn)
    counts = np.isfinite(drawn).sum(axis=1).tolist()
    return [
        math.nan
        if n < fewest
        else _times(groups, n) * (whole if n == len(row) else _deviations(row[None, np.isfinite(row)])[0])
        for n, whole, row in zip(counts, _deviations(drawn), drawn, strict=True)
    ]


def _deviations(drawn: Array) -> list[float]:
    """Standard deviation of each row; 0 where all are equal, which rounding of their mean would hide."""
    centred, n = drawn - drawn[:, :1], drawn.shape[1]
    sums = np.square(centred.sum(axis=1)) / n
    squares = [float(np.dot(row, row)) for row in centred]
    each = zip(squares, sums.tolist(), strict=True)
    return [math.sqrt(max(square - rest, 0.0) / (n - 1)) for square, rest in each]


@lru_cache(1024)  # most numbers of a dump have as many groups and replicates
def _times(groups: float, replicates: int) -> float:
    """Half width of an interval in standard deviations of the replicates."""
    freedom = 1 / (1 / (groups - 1) + 1 / (replicates - 1))
    return quantile(freedom) * math.sqrt(groups / (groups - 1))


def effective(size: Tensor, groups: int) -> float:
    """How many groups of one size would vary as much: (Σn)² / Σn².

    Of the sum of the groups' sizes n and its replicates, [1+B]: under Poisson draws its variance is Σn².
    """
    drawn, whole = size.numpy()[1:], float(size[0])
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows has no interval
        square = float(np.square(drawn - whole).mean()) if len(drawn) else 0.0
    return min(whole * whole / square, float(groups)) if square > 0 else float(groups)


def none_of(units: float) -> float:
    """The upper end of the interval of a share when no event was seen in so many units: about 3.7 / units."""
    return float(1 - 0.025 ** (1 / units))
