"""Metrics as rows with a formula over sums; their 95% intervals, differences and tests.

A sum comes with its B bootstrap replicates, [1+B]: in each, every group of sequences (a prompt of a step) is
drawn Poisson(1) times, for tokens of a sequence and responses to a prompt are dependent. The draw is the same
for all sums with one seed, whichever presets, places, files or runs they are of, so that two numbers are
paired: what they share cancels in their difference.

An interval is the value ± t · the standard deviation of its replicates, on a scale on which the range of the
number has no end (log, logit), with t for the effective number of groups: percentiles of the replicates of a
few groups lie too close together. The p-value of a difference is of the same t statistic, so that it is below
5% where the interval excludes 0, or 1; counting replicates could not show one below 1/B, which a correction
for many tests needs.

References: Hanley & MacGibbon 2006 (Poisson bootstrap); Kish 1965 (effective number); Holm 1979.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from offpol_diag.core.state import Array, Table
from offpol_diag.number import LARGEST, OVERFLOWS, Number, finite

Ends = tuple[float, float]

# ---------------------------------------------------------------- groups and Student's t

FEWEST_GROUPS, FEWEST_EFFECTIVE = 5, 3.0
"""Fewest groups, and effective groups, for which an interval is given."""
DEFINED = 0.9
"""Share of the replicates in which a number must be defined to have an interval."""
MOST_NATS = 700.0
"""Largest exponent on the scale of a range: e to it is still a float64."""
ABOVE = 0.99
"""Share of the replicates in which both of two numbers must be above 0 to be divided."""

Z = 1.959963984540054
"""The 97.5% quantile of the normal distribution: that of Student's t with infinite degrees of freedom."""
_TERMS = (
    (Z**3 + Z) / 4,
    (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
    (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
)
"""Coefficients of the quantile of t in powers of 1/freedom; within 0.8% from 2 degrees on, 0.04% from 4."""


def quantile(freedom: Any) -> Any:
    """Compute the 97.5% quantile of Student's t, from 2 degrees of freedom (Abramowitz & Stegun 26.7.5)."""
    return Z + sum(term / freedom**power for power, term in enumerate(_TERMS, 1))


@dataclass(frozen=True)
class Groups:
    """The resampled groups: how many, and how many groups of equal size would vary as much (`effective`)."""

    many: int
    effective: float

    @classmethod
    def of(cls, table: Table, many: int) -> Groups:
        """Count the groups of a table of sums: effectively (Σn)² / Σn², of their tokens n.

        Where groups share buckets, buckets are counted instead.
        """
        _, at = np.unique(table.buckets, return_inverse=True)
        n = np.bincount(at, table.values[table.lines["tokens"]])
        squares = float(np.square(n).sum())
        return cls(many, min(float(n.sum()) ** 2 / squares, float(many)) if squares else float(many))

    def fewer(self, other: Groups) -> Groups:
        """Take the smaller counts of two runs."""
        return Groups(min(self.many, other.many), min(self.effective, other.effective))

    @property
    def enough(self) -> bool:
        """Whether there are enough for an interval."""
        return self.many >= FEWEST_GROUPS and self.effective >= FEWEST_EFFECTIVE

    @np.errstate(all="ignore")
    def errors(self, values: Array) -> tuple[Array, Array]:
        """Compute standard errors of N numbers from their replicates, and their degrees of freedom.

        Args:
            values: numbers and their replicates, [N, 1+B].

        Returns:
            Both [N]; the errors are NaN with too few groups or defined replicates, and exactly 0 where all
            replicates are equal. With G groups the bootstrap underestimates the variance by a factor of
            (G − 1)/G, which is corrected for.
        """
        drawn = values[:, 1:]
        defined = np.isfinite(drawn)
        n = defined.sum(axis=1)
        first = np.take_along_axis(drawn, defined.argmax(axis=1)[:, None], axis=1)
        centred = np.where(defined, drawn - first, 0.0)
        variance = (np.square(centred).sum(axis=1) - np.square(centred.sum(axis=1)) / n) / (n - 1)
        if not self.enough:
            return np.full(len(values), math.nan), n
        g = self.effective
        error = np.sqrt(np.maximum(variance, 0.0) * g / (g - 1))
        known = (n >= max(DEFINED * drawn.shape[1], 2)) & np.isfinite(values[:, 0])
        return np.where(known, error, math.nan), 1 / (1 / (g - 1) + 1 / (n - 1))


# ---------------------------------------------------------------- intervals


@dataclass(frozen=True)
class Range:
    """The range of a number's possible values; ±inf where it has no end.

    `seen`: whether it is that of the values in the dump, within which every replicate of their mean lies.
    """

    low: float = -math.inf
    high: float = math.inf
    seen: bool = False

    def around(self, value: float, half: float) -> Ends:
        """Return the interval of half width `half`, to first order, on the scale of the range without ends.

        That is the logit where the range has two ends, the log where it has a lower one. An end that
        overflows is the largest float64.
        """
        below, above = value - self.low, self.high - value
        if below <= 0 or above <= 0:  # at an end of the range, which a replicate may leave
            ends = max(value - half, min(self.low, value)), min(value + half, max(self.high, value))
        elif self.high < math.inf:
            width = self.high - self.low
            far = math.exp(min(half * width / (below * above), MOST_NATS))
            low = self.low + width * below / (below + above * far)
            ends = low, self.high - width * above / (above + below * far)
        elif self.low > -math.inf:
            far = math.exp(min(half / below, MOST_NATS))
            ends = self.low + below / far, self.low + below * far
        else:
            ends = value - half, value + half
        return finite(ends[0]), finite(ends[1])


ANYWHERE = Range()
POSITIVE = Range(low=0.0)
ABOVE_ONE = Range(low=1.0)
ABOVE_MINUS_ONE = Range(low=-1.0)
SHARE = Range(0.0, 1.0)
CORRELATION = Range(-1.0, 1.0)
AS_SEEN = Range(seen=True)
"""Range of a mean of values whose range is known from the dump alone, such as rewards of 0 and 1."""


def intervals(values: Array, groups: Groups, within: Sequence[Range]) -> list[Ends | None]:
    """Compute the 95% intervals of N numbers from their replicates, [N, 1+B], each within its range.

    None with too few groups or defined replicates.
    """
    errors, freedom = groups.errors(values)
    halves = (quantile(freedom) * errors).tolist()
    result: list[Ends | None] = []
    for value, half, row, bounds in zip(values[:, 0].tolist(), halves, values, within, strict=True):
        ends = bounds.around(value, half) if math.isfinite(half) else None
        if ends and bounds.seen:  # no further than the furthest replicate
            ends = max(ends[0], float(np.nanmin(row))), min(ends[1], float(np.nanmax(row)))
        result.append(ends)
    return result


# ---------------------------------------------------------------- metrics

Lookup = Callable[[str], Array]


@dataclass(frozen=True)
class Formula:
    """One metric.

    Attributes:
        name: the key of JSON, gate and tables.
        text: the formula, with Δ = log π_train − log π_rollout and r = e^Δ.
        of: sums by column name ([1+B] each) → the metric, [1+B].
        unit: nats, ratio, fraction, …; empty for a pure number.
        over: what the metric is averaged over.
        within: range of its possible values; a fraction lies between 0 and 1.
        counts: whether it is a share of events, so that 0 may be chance; else 0 is exact.
        log: the logarithm of a metric that is e to the power of a mean, [1+B]: its interval is exponentiated,
            since the metric itself is linear in its sums over a fraction of a nat only.
    """

    name: str
    text: str
    of: Callable[[Lookup], Array]
    unit: str = ""
    over: str = "tokens"
    within: Range = ANYWHERE
    counts: bool = False
    log: Callable[[Lookup], Array] | None = None

    @property
    def blank(self) -> Number:
        """The metric without a value."""
        return Number(unit=self.unit, over=self.over, formula=self.text)


def mean(column: str, per: str = "tokens", plus: float = 0.0) -> Callable[[Lookup], Array]:
    """Return the formula of a column's mean, plus a constant subtracted before summing."""
    return lambda get: get(column) / get(per) + plus


def spread(column: str, per: str = "tokens") -> Callable[[Lookup], Array]:
    """Return the formula of the standard deviation from Σx and, as COLUMN_sq, Σx²."""
    return lambda get: np.sqrt(np.maximum(get(f"{column}_sq") / get(per) - (get(column) / get(per)) ** 2, 0))


SHARED = frozenset({"tokens", "sequences", "rows", "longest"})
"""Columns that belong to the dump, not to a drift or a preset."""


@dataclass(frozen=True)
class Reader:
    """Computes metrics from the sums of a dump, or of a place of it.

    Attributes:
        drawn: column → [1+B], the sum and its replicates.
        groups: those that were resampled.
    """

    drawn: Mapping[str, Array]
    groups: Groups

    @classmethod
    def of(cls, table: Table, seed: int, many: int) -> Reader:
        """Draw replicates of a table's sums; `many` is its number of groups, whose buckets it may hold."""
        return cls(table.drawn(seed), Groups.of(table, many))

    def column(self, name: str, prefix: str = "") -> Array:
        """Return a column's sum and replicates, [1+B]; `prefix` precedes the names of those not `SHARED`."""
        return self.drawn[name if name in SHARED else prefix + name]

    def sum(self, name: str) -> float:
        """Return a column's sum."""
        return float(self.drawn[name][0])

    def number(self, row: Formula, prefix: str = "") -> Number:
        """Compute one metric with its interval."""
        return self.all([(row, prefix)])[0]

    @np.errstate(all="ignore")  # what is undefined in a replicate is NaN there
    def all(self, rows: Sequence[tuple[Formula, str]]) -> list[Number]:
        """Compute metrics, each under a prefix, at less overhead than one by one."""
        values = [(row.log or row.of)(partial(self.column, prefix=prefix)) for row, prefix in rows]
        if not values:
            return []
        ranges = [SHARE if row.unit == "fraction" else ANYWHERE if row.log else row.within for row, _ in rows]
        each = zip(rows, values, intervals(np.stack(values), self.groups, ranges), strict=True)
        found = []
        for (row, _), x, ends in each:
            value = float(x[0])
            if row.counts and value in (0.0, 1.0) and ends == (value, value):
                # seen of no sequence, or of every one: up to about 3.7 / sequences may have been missed
                missed = 1 - 0.025 ** (1 / self.sum("sequences"))
                ends = (0.0, missed) if value == 0 else (1 - missed, 1.0)
            found.append((power if row.log else known)(row.blank, value, ends))
        return found


def missing(row: Formula, columns: list[str]) -> Number:
    """Build a Number that is unknown because the dump lacks columns."""
    return replace(row.blank, unknown="missing column " + ", ".join(columns))


def known(blank: Number, value: float, ends: Ends | None = None) -> Number:
    """Give a Number its value and interval, or the reason why it has none: it is NaN or infinite."""
    if not math.isfinite(value):
        nothing = "undefined for this dump (nothing to average over)"
        return replace(blank, unknown=nothing if math.isnan(value) else "overflows float64")
    note = "its 95% interval overflows float64" if ends and LARGEST in (-ends[0], ends[1]) else None
    return replace(blank, value=value, interval=ends, note=note)


def power(blank: Number, log: float, ends: Ends | None) -> Number:
    """Give a Number the value e^log, from the interval of its logarithm."""
    if not math.isfinite(log):
        return known(blank, log)
    value, *both = (math.exp(x) if x < math.log(LARGEST) else LARGEST for x in (log, *(ends or ())))
    found = known(blank, value, (both[0], both[1]) if both else None)
    if value >= LARGEST:
        found = replace(found, value=None, log10=log / math.log(10), unknown=OVERFLOWS)
    return found


# ---------------------------------------------------------------- two numbers

LEVEL = 0.05
"""Family-wise error rate of the tests of a comparison."""
ROUNDING = 1e-12
"""Largest relative difference that rounding can cause between two sums of the same terms."""


def difference_of(one: Array, other: Array, like: Number, groups: Groups) -> Number:
    """Subtract numbers, [1+B] with their replicates; `like` has the unit."""
    return _paired(subtract(one, other), Number(unit=like.unit, over=like.over), groups)


def subtract(one: Array, other: Array) -> Array:
    """Compute one − other, set to 0 where the difference is no more than rounding."""
    off = one - other
    return np.where(np.abs(off) <= ROUNDING * np.maximum(np.abs(one), np.abs(other)), 0.0, off)


def ratio_of(one: Array, other: Array, groups: Groups, powers: bool = False) -> Number | None:
    """Divide one number by another; None unless both are above 0, also in 99% of the replicates.

    Of `powers` of means the interval is that of the difference of the means, exponentiated.
    """
    both = np.stack((one, other))
    if (both <= 0).mean() > 1 - ABOVE or not (both[:, 0] > 0).all():
        return None
    one, other = np.where((both <= 0).any(axis=0), math.nan, both)
    if powers:
        logs = np.log(one) - np.log(other)
        return power(Number(), float(logs[0]), intervals(logs[None], groups, [ANYWHERE])[0])
    return _paired(one / other, Number(), groups, POSITIVE)


def log_ratio_of(one: Array, other: Array) -> Array:
    """Compute log(one / other) of positive numbers, set to 0 where the difference is mere rounding.

    A prompt that is hard in both runs adds to their difference, and cancels in their ratio.
    """
    return np.where(subtract(one, other) == 0, 0.0, np.log(one / other))


def _paired(values: Array, blank: Number, groups: Groups, within: Range = ANYWHERE) -> Number:
    value = float(values[0])
    if not math.isfinite(value):
        return replace(blank, unknown="one of the two is not known")
    return replace(blank, value=value, interval=intervals(values[None], groups, [within])[0])


def p_value(differences: Array, groups: Groups) -> float | None:
    """Compute the two-sided p-value of a difference or log-ratio [1+B]; None with too few groups.

    The tail of t is by Wallace's normal score (1959): at most 2% too large where it is ≥ 1%.
    """
    (error,), (freedom,) = groups.errors(differences[None])
    value = float(differences[0])
    if not math.isfinite(error):
        return None
    if value == 0 or error == 0:
        return 1.0 if value == 0 else 0.0
    score = math.sqrt(freedom * math.log1p((value / error) ** 2 / freedom))
    return math.erfc((8 * freedom + 1) / (8 * freedom + 3) * score / math.sqrt(2))


def holm(values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple testing (Holm 1979): the family-wise error rate is at most α."""
    result, worst = [0.0] * len(values), 0.0
    for rank, at in enumerate(sorted(range(len(values)), key=lambda at: values[at])):
        worst = max(worst, min(1.0, (len(values) - rank) * values[at]))
        result[at] = worst
    return result
