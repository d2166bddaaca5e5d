"""The bootstrap replicates behind the intervals of all numbers, and differences of two of them.

Two numbers read with the same seed are paired: the bootstrap draws a group equally often for both, whichever
presets, files or runs they come from.

The interval of a difference is made as that of any other number (`engine/formula.py`), of the replicates'
differences or ratios; the p-value is of the same t statistic, so that it is below 5% where the interval
excludes 0, or 1. Two numbers above 0 are tested by the logarithm of their ratio: a prompt that is hard in
both runs adds to their difference, and cancels in their ratio. Counting replicates could not show a p-value
below 1/B, which a correction for many tests needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from offpol_diag.analysis.readout import Readout
from offpol_diag.core.formulas import LARGEST
from offpol_diag.engine import formula, gap, method, policyloss, residual, tails
from offpol_diag.engine.formula import ANYWHERE, FEWEST_EFFECTIVE, FEWEST_GROUPS, POSITIVE, Formula, Range
from offpol_diag.engine.segments import Array
from offpol_diag.number import Number
from offpol_diag.presets import Preset

Replicates = dict[str, Array]
"""Number → [1+B]: its value, then its replicates."""


def base(out: Readout) -> Replicates:
    """Compute replicates of the gaps' metrics of size, by their names; of those that have an interval."""
    result: Replicates = {}
    for drift in out.study.drifts:
        rows: list[Formula] = [*(row for row in gap.ROWS if row is not gap.DIFFER), tails.ESS_TOKENS]
        if f"{drift.prefix}ax" in out.reader.sums:
            rows.append(gap.SURROGATE)
        if out.ranges[f"{drift.prefix}s"][1] <= LARGEST:  # else too large for sums
            rows.append(gap.CHI2_SEQUENCE)
        result |= {drift.prefix + row.name: _values(out, row, drift.prefix) for row in rows}
        result[drift.prefix + tails.ESS_SEQUENCES.name] = tails.ess_of_sequences(
            out.reader, out.tally.whole.log_sums[f"{drift.prefix}products"]
        )
    return result


def of_preset(out: Readout, preset: Preset) -> Replicates:
    """Compute replicates of one preset's metrics, by their names; of those that have an interval."""
    prefix = f"{preset.name}|"
    rows: list[Formula] = [*method.ROWS, *residual.ROWS]
    if f"{prefix}loss" in out.reader.sums:
        rows += policyloss.ROWS
    return {row.name: _values(out, row, prefix) for row in rows}


def _values(out: Readout, row: Formula, prefix: str) -> Array:
    return row.of(lambda name: out.reader.column(name, prefix))


# ---------------------------------------------------------------- differences

LEVEL = 0.05
ROUNDING = 1e-12
"""Largest relative difference that rounding can cause between two sums of the same terms."""


@dataclass(frozen=True)
class Groups:
    """The groups that the bootstrap resampled: `effective` ones of equal size would vary as much."""

    many: int
    effective: float

    @classmethod
    def of(cls, tokens: Array, many: int) -> Groups:
        """Count the groups of a dump from its number of tokens and its replicates, [1+B]."""
        return cls(many, formula.effective(tokens, many))

    def fewer(self, other: Groups) -> Groups:
        """Take the smaller counts of two runs."""
        return Groups(min(self.many, other.many), min(self.effective, other.effective))

    @property
    def enough(self) -> bool:
        """Return whether there are enough groups for an interval."""
        return self.many >= FEWEST_GROUPS and self.effective >= FEWEST_EFFECTIVE


def less(one: Array, other: Array, like: Number, groups: Groups, text: str) -> Number:
    """Subtract numbers, [1+B] with their replicates; `like` has the unit, `text` is the formula."""
    return _number(
        subtracted(one, other), Number(unit=like.unit, over=like.over, formula=text), groups, ANYWHERE
    )


def subtracted(one: Array, other: Array) -> Array:
    """Compute one − other, set to 0 where the difference is no more than rounding."""
    difference = one - other
    return np.where(np.abs(difference) <= ROUNDING * np.maximum(np.abs(one), np.abs(other)), 0.0, difference)


POWERS = frozenset(row.name for row in gap.ROWS if row.log)
"""Numbers that are e to the power of a mean, without the prefix of their drift."""


def over(one: Array, other: Array, groups: Groups, text: str, powers: bool = False) -> Number | None:
    """Divide one number by another; None unless both are above 0 in every defined replicate.

    Of `powers` of means the interval is that of the difference of the means, exponentiated.
    """
    both = np.stack((one, other))
    if not ((both > 0) | np.isnan(both)).all() or not (both[:, 0] > 0).all():
        return None
    if powers:
        logs = np.log(one) - np.log(other)
        ends = formula.interval(logs, groups.effective, groups.many, ANYWHERE)
        return formula.power(Number(formula=text), float(logs[0]), ends)
    return _number(one / other, Number(formula=text), groups, POSITIVE)


def compared(one: Array, other: Array) -> Array:
    """Compute log(one / other) of positive numbers, set to 0 where the difference is mere rounding."""
    return np.where(subtracted(one, other) == 0, 0.0, np.log(one / other))


def _number(values: Array, blank: Number, groups: Groups, within: Range) -> Number:
    value = float(values[0])
    if not math.isfinite(value):
        return replace(blank, unknown="one of the two is not known")
    ends = formula.interval(values, groups.effective, groups.many, within)
    return replace(blank, value=value, interval=ends)


def sure(difference: Number) -> bool:
    """Return whether the interval of a difference excludes 0."""
    return difference.interval is not None and not difference.interval[0] <= 0 <= difference.interval[1]


def p_value(differences: Array, groups: Groups) -> float | None:
    """Compute the two-sided p-value of a difference or log-ratio [1+B]; None with too few groups."""
    drawn = differences[1:]
    drawn = drawn[np.isfinite(drawn)]
    value = float(differences[0])
    if not groups.enough or len(drawn) < max(0.9 * (len(differences) - 1), 2) or not math.isfinite(value):
        return None
    if value == 0:
        return 1.0
    g = groups.effective
    error = float(drawn.std(ddof=1)) * math.sqrt(g / (g - 1))  # of G groups the bootstrap shows (G − 1)/G
    freedom = 1 / (1 / (g - 1) + 1 / (len(drawn) - 1))
    return _two_sided(abs(value) / error, freedom) if error > 0 else 0.0


def _two_sided(t: float, freedom: float) -> float:
    """Compute P(|T| > t) by Wallace's normal score of t (1959): at most 2% too large where it is ≥ 1%."""
    score = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.erfc(score / math.sqrt(2))


def holm(values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple testing (Holm 1979): the family-wise error rate is at most α."""
    order = sorted(range(len(values)), key=lambda at: values[at])
    result, worst = [0.0] * len(values), 0.0
    for rank, at in enumerate(order):
        worst = max(worst, min(1.0, (len(values) - rank) * values[at]))
        result[at] = worst
    return result
