"""Differences of numbers whose replicates are paired: interval, p-value, and a correction for many of them.

The interval is made as that of any other number (`metrics/interval.py`), of the replicates' differences or
ratios; the p-value is of the same t statistic, so that it is below 5% where the interval excludes 0, or 1.
Two numbers above 0 are tested by the logarithm of their ratio: a prompt that is hard in both runs adds to
their difference, and cancels in their ratio. Counting replicates
could not show a p-value below 1/B, which a correction for many tests needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag.metrics import interval
from offpol_diag.metrics.interval import ANYWHERE, FEWEST_EFFECTIVE, FEWEST_GROUPS, POSITIVE, Range
from offpol_diag.summary import Number

LEVEL = 0.05
ROUNDING = 1e-12
"""Of the larger number: what two sums of the same may differ by."""


@dataclass(frozen=True)
class Groups:
    """What was resampled.

    Attributes:
        many: how many groups there are; of two runs in the smaller.
        effective: how many of one size would vary as much.
    """

    many: int
    effective: float

    @classmethod
    def of(cls, tokens: Tensor, many: int) -> Groups:
        """Of a dump, from its number of tokens and the replicates of that, [1+B]."""
        return cls(many, interval.effective(tokens, many))

    def fewer(self, other: Groups) -> Groups:
        """Of two runs."""
        return Groups(min(self.many, other.many), min(self.effective, other.effective))

    @property
    def enough(self) -> bool:
        """Whether an interval says anything."""
        return self.many >= FEWEST_GROUPS and self.effective >= FEWEST_EFFECTIVE


def less(one: Tensor, other: Tensor, like: Number, groups: Groups, text: str) -> Number:
    """One number less another: values and replicates [1+B] each; `like` has the unit, `text` the formula."""
    return _number(
        subtracted(one, other), Number(unit=like.unit, over=like.over, formula=text), groups, ANYWHERE
    )


def subtracted(one: Tensor, other: Tensor) -> Tensor:
    """one − other, 0 where no more than the rounding of sums is between them."""
    difference = one - other
    return torch.where(difference.abs() <= ROUNDING * torch.maximum(one.abs(), other.abs()), 0.0, difference)


def over(one: Tensor, other: Tensor, groups: Groups, text: str) -> Number | None:
    """One number over another; None where either is not above 0 in every replicate that has it."""
    both = torch.stack((one, other))
    if not bool(((both > 0) | both.isnan()).all()) or not bool((both[:, 0] > 0).all()):
        return None
    return _number(one / other, Number(formula=text), groups, POSITIVE)


def compared(one: Tensor, other: Tensor) -> Tensor:
    """log(one / other), of numbers above 0, 0 where no more than rounding is between them."""
    return torch.where(subtracted(one, other) == 0, 0.0, torch.log(one / other))


def _number(values: Tensor, blank: Number, groups: Groups, within: Range) -> Number:
    value = float(values[0])
    if not math.isfinite(value):
        return blank.model_copy(update={"unknown": "one of the two is not known"})
    ends = interval.interval(values, groups.effective, groups.many, within)
    return blank.model_copy(update={"value": value, "interval": ends})


def sure(difference: Number) -> bool:
    """Whether the interval of a difference excludes 0."""
    return difference.interval is not None and not difference.interval[0] <= 0 <= difference.interval[1]


def p_value(differences: Tensor, groups: Groups) -> float | None:
    """Two-sided, of a difference or a log-ratio and its replicates [1+B]; None where there is no interval."""
    drawn = differences[1:]
    drawn = drawn[drawn.isfinite()]
    value = float(differences[0])
    if not groups.enough or len(drawn) < max(0.9 * (len(differences) - 1), 2) or not math.isfinite(value):
        return None
    if value == 0:
        return 1.0
    g = groups.effective
    error = float(drawn.std()) * math.sqrt(g / (g - 1))  # of G groups the bootstrap shows (G − 1)/G
    freedom = 1 / (1 / (g - 1) + 1 / (len(drawn) - 1))
    return _two_sided(abs(value) / error, freedom) if error > 0 else 0.0


def _two_sided(t: float, freedom: float) -> float:
    """P(|T| > t), by Wallace's normal score of t (1959): 2% too large at most where that is 1% or more."""
    score = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.erfc(score / math.sqrt(2))


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): where none is real, one is below α with chance α."""
    order = sorted(range(len(values)), key=lambda at: values[at])
    found, worst = [0.0] * len(values), 0.0
    for rank, at in enumerate(order):
        worst = max(worst, min(1.0, (len(values) - rank) * values[at]))
        found[at] = worst
    return found
