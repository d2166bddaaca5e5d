"""Metrics as rows: a formula of sums, its unit, and the interval of its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offpol_diag.engine.student import quantile
from offpol_diag.summary import Number

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
        within: where it can lie; a fraction lies between 0 and 1.
        counts: whether it is a share of events, none of which may have happened by chance; else 0 is exact.
    """

    name: str
    unit: str
    over: str
    text: str
    of: Callable[[Lookup], Tensor]
    within: Range = ANYWHERE
    counts: bool = False

    @property
    def range(self) -> Range:
        """Where it can lie."""
        return SHARE if self.unit == "fraction" else self.within


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
        return self.wrap(row.of(lambda name: self.column(name, prefix)), row)

    def numbers(self, row: Formula, prefixes: Sequence[str]) -> list[Number]:
        """The metric under each of many prefixes, made at once: the price of one is mostly in the calls.

        Where prefixes share all sums that it is made of, it is one number that they share.
        """
        if not prefixes:
            return []
        own = self._own(row, prefixes[0])
        made_of = [tuple(id(self.sums[prefix + name]) for name in own) for prefix in prefixes]
        few = dict(zip(made_of, prefixes, strict=True))

        def columns(name: str) -> Tensor:
            if name in SHARED:
                return self.sums[name]
            return torch.stack([self.sums[prefix + name] for prefix in few.values()])

        found = self._wrapped(row.of(columns).expand(len(few), -1), row)
        each = dict(zip(few, found, strict=True))
        return [each[key] for key in made_of]

    def _own(self, row: Formula, prefix: str) -> tuple[str, ...]:
        """The columns that a metric asks for, but those of the dump."""
        asked: dict[str, None] = {}
        row.of(lambda name: asked.setdefault(name) or self.column(name, prefix))
        return tuple(name for name in asked if name not in SHARED)

    def column(self, name: str, prefix: str = "") -> Tensor:
        """A column's sum and replicates."""
        return self.sums[name if name in SHARED else prefix + name]

    def wrap(self, values: Tensor, row: Formula) -> Number:
        """[1+B] values → a Number."""
        return self._wrapped(values[None], row)[0]

    def _wrapped(self, values: Tensor, row: Formula) -> list[Number]:
        """[N, 1+B] values → Numbers."""
        first, blank = values[:, 0].tolist(), describe(row.unit, row.over, row.text)
        known = [at for at, value in enumerate(first) if math.isfinite(value)]
        there = values if len(known) == len(first) else values[known]
        each = intervals(there, self._effective, self.groups, row.range)
        ends = dict(zip(known, each, strict=True))
        return [
            self._known(blank, value, ends[at], row) if at in ends else _unknown(blank, value)
            for at, value in enumerate(first)
        ]

    def _known(self, blank: Number, value: float, ends: Ends | None, row: Formula) -> Number:
        if row.counts and value in (0.0, 1.0) and ends == (value, value):
            ends = _unseen(value, float(self.sums["sequences"][0]))
        return blank.model_copy(update={"value": value, "interval": ends})

    def around(self, values: Tensor, within: Range = ANYWHERE) -> tuple[float, float] | None:
        """The 95% interval of [1+B] values; None with too few groups or defined replicates."""
        return interval(values, self._effective, self.groups, within)

    @cached_property
    def _effective(self) -> float:
        """Groups, by how unequally the tokens are spread over them."""
        tokens = self.sums.get("tokens")
        return float(self.groups) if tokens is None else effective(tokens, self.groups)


def _unknown(blank: Number, value: float) -> Number:
    nothing = "undefined for this dump (nothing to average over)"
    return blank.model_copy(update={"unknown": nothing if math.isnan(value) else "overflows float64"})


def _unseen(value: float, sequences: float) -> tuple[float, float]:
    """When no event happened, or every one, among so many responses, whose tokens may share an event."""
    missed = none_of(sequences)
    return (0.0, missed) if value == 0 else (1 - missed, 1.0)


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
