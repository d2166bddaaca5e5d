"""From sums to numbers: a metric is a row that names its columns, its unit and its formula.

The same function is evaluated on the sums of the dump and on those of every bootstrap replicate, so each
number comes with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offpol_diag.summary import Number

FEWEST_GROUPS = 5
"""Below this many groups a bootstrap interval says nothing."""

Lookup = Callable[[str], Tensor]


@dataclass(frozen=True)
class Formula:
    """One metric.

    Attributes:
        name: the key of JSON, gate and tables.
        unit: nats, ratio, fraction, …; empty for a pure number.
        over: what it is averaged over.
        text: the formula, with Δ = log π_train − log π_rollout and r = e^Δ.
        of: sums by column name ([1+B] each) → the metric, [1+B].
    """

    name: str
    unit: str
    over: str
    text: str
    of: Callable[[Lookup], Tensor]


@dataclass(frozen=True)
class Reader:
    """Reads formulas off the sums of a dump.

    Attributes:
        sums: column → [1+B], the sum and its replicates.
        groups: how many groups were resampled.
    """

    sums: Mapping[str, Tensor]
    groups: int

    def number(self, row: Formula, prefix: str = "") -> Number:
        """One metric with its interval; `prefix` is put before every column name except the shared counts."""
        values = row.of(lambda name: self.column(name, prefix))
        return self.wrap(values, row)

    def column(self, name: str, prefix: str = "") -> Tensor:
        """A column's sum and replicates."""
        return self.sums[name if name in SHARED else prefix + name]

    def wrap(self, values: Tensor, row: Formula) -> Number:
        """[1+B] values → a Number."""
        number = describe(row.unit, row.over, row.text)
        value = float(values[0])
        if not math.isfinite(value):
            why = (
                "undefined for this dump (nothing to average over)"
                if math.isnan(value)
                else "overflows float64"
            )
            return number.model_copy(update={"unknown": why})
        return number.model_copy(update={"value": value, "interval": self.interval(values[1:])})

    def interval(self, replicates: Tensor) -> tuple[float, float] | None:
        """The central 95 % of the replicates; None with too few groups or defined replicates."""
        values = replicates.numpy()  # thousands of short vectors: numpy's overhead is a tenth of torch's
        finite = np.sort(values[np.isfinite(values)])
        if self.groups < FEWEST_GROUPS or len(finite) < 0.9 * max(len(values), 1):
            return None
        return _quantile(finite, 0.025), _quantile(finite, 0.975)


def _quantile(rising: npt.NDArray[np.float64], q: float) -> float:
    """Linear between the two nearest of sorted values."""
    at = q * (len(rising) - 1)
    below = int(at)
    low, high = float(rising[below]), float(rising[min(below + 1, len(rising) - 1)])
    return low + (at - below) * (high - low)


SHARED = frozenset({"tokens", "sequences", "rows", "longest", "mass_positive", "mass_negative"})
"""Columns that belong to the dump, not to a drift or a preset."""


def describe(unit: str, over: str, text: str) -> Number:
    """A Number that has no value yet."""
    return Number(unit=unit, over=over, formula=text)


def plain(value: float, unit: str, over: str, text: str) -> Number:
    """A Number without an interval (an extreme, a tail index); unknown when it is not finite."""
    number = describe(unit, over, text)
    if not math.isfinite(value):
        return number.model_copy(update={"unknown": "undefined for this dump"})
    return number.model_copy(update={"value": value})


def missing(row: Formula, columns: list[str]) -> Number:
    """The number that cannot be known because the dump lacks columns."""
    unknown = "missing column " + ", ".join(columns)
    return describe(row.unit, row.over, row.text).model_copy(update={"unknown": unknown})


def mean(column: str, per: str = "tokens", plus: float = 0.0) -> Callable[[Lookup], Tensor]:
    """The mean of a column, plus a constant that was taken off before summing."""
    return lambda get: get(column) / get(per) + plus


def spread(first: str, second: str, per: str) -> Callable[[Lookup], Tensor]:
    """Standard deviation from Σx and Σx²."""
    return lambda get: torch.sqrt((get(second) / get(per) - (get(first) / get(per)) ** 2).clamp(min=0))
