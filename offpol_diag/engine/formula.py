"""Metrics as rows: a formula of sums, its unit, and the interval of its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from offpol_diag.engine.segments import Array
from offpol_diag.number import LARGEST, OVERFLOWS, Number, finite

Ends = tuple[float, float]
"""The two ends of an interval."""
FEWEST_GROUPS = 5
"""Fewest groups for which a bootstrap interval is given."""
FEWEST_EFFECTIVE = 3.0
"""Fewest effective groups for which a bootstrap interval is given."""


Z = 1.959963984540054
"""The quantile in the limit of infinite degrees of freedom: the normal's."""
_TERMS = (
    (Z**3 + Z) / 4,
    (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
    (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
)
"""Coefficients of the 97.5% quantile in powers of 1/freedom; within 0.8% from 2 degrees on, 0.04% from 4."""


def quantile(freedom: float) -> float:
    """Compute the 97.5% quantile of Student's t, from 2 degrees of freedom (Abramowitz & Stegun 26.7.5)."""
    return Z + sum(term / freedom ** (power + 1) for power, term in enumerate(_TERMS))


@dataclass(frozen=True)
class Range:
    """The range of a number's possible values; ±inf where it has no end.

    `seen`: whether it is that of the values in the dump, within which every replicate of their mean lies.
    """

    low: float = -math.inf
    high: float = math.inf
    seen: bool = False

    def inside(self, value: float) -> bool:
        """Return whether a value lies strictly between the ends."""
        return self.low < value < self.high

    def around(self, value: float, half: float) -> tuple[float, float]:
        """Return the interval of half width `half`, to first order, on a scale (log, logit) without ends.

        An end that overflows is the largest float64.
        """
        low, high = self._around(value, half)
        return finite(low), finite(high)

    def _around(self, value: float, half: float) -> tuple[float, float]:
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
AS_SEEN = Range(seen=True)
"""Range of a mean whose values lie in a range that only the dump tells, as rewards of 0 and 1 do."""


def interval(values: Array, groups: float, many: int, within: Range) -> Ends | None:
    """Compute the 95% interval of a number from its replicates.

    Args:
        values: [1+B], the number and its replicates.
        groups: effective number of groups.
        many: number of groups.
        within: range of the number's possible values.

    Returns:
        Its ends, or None with too few groups or defined replicates.
    """
    return intervals(values[None], groups, many, [within])[0]


def intervals(values: Array, groups: float, many: int, within: Sequence[Range]) -> list[Ends | None]:
    """Compute `interval` for every row of [N, 1+B] values, at less overhead than one by one."""
    if many < FEWEST_GROUPS or groups < FEWEST_EFFECTIVE:
        return [None] * len(values)
    halves = _halves(np.ascontiguousarray(values[:, 1:]), groups)
    each = zip(values[:, 0].tolist(), halves, within, strict=True)
    result = [own.around(value, half) if math.isfinite(half) else None for value, half, own in each]
    return [
        _held(ends, row) if ends and own.seen else ends
        for ends, row, own in zip(result, values, within, strict=True)
    ]


def _held(ends: Ends, row: Array) -> Ends:
    """Return an interval that reaches no further than the furthest replicate."""
    return max(ends[0], float(np.nanmin(row))), min(ends[1], float(np.nanmax(row)))


def _halves(drawn: Array, groups: float) -> list[float]:
    """Return the half width of the interval of each row of replicates [N, B]; NaN with too few finite."""
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
    """Compute the standard deviation of each row; exactly 0 where all values are equal."""
    centred, n = drawn - drawn[:, :1], drawn.shape[1]
    sums = np.square(centred.sum(axis=1)) / n
    squares = [float(np.dot(row, row)) for row in centred]
    each = zip(squares, sums.tolist(), strict=True)
    return [math.sqrt(max(square - rest, 0.0) / (n - 1)) for square, rest in each]


@lru_cache(1024)  # most numbers of a dump share groups and replicates
def _times(groups: float, replicates: int) -> float:
    """Return the half width of an interval in standard deviations of the replicates."""
    freedom = 1 / (1 / (groups - 1) + 1 / (replicates - 1))
    return quantile(freedom) * math.sqrt(groups / (groups - 1))


def effective(size: Array, groups: int) -> float:
    """Return the effective number of groups, (Σn)² / Σn²: as many of equal size would vary as much.

    `size` is the sum of the groups' sizes n and its replicates, [1+B]; under Poisson draws its variance is
    Σn².
    """
    drawn, whole = size[1:], float(size[0])
    square = float(np.square(drawn - whole).mean()) if len(drawn) else 0.0
    return min(whole * whole / square, float(groups)) if square > 0 else float(groups)


def none_of(units: float) -> float:
    """Return the upper end of the interval of a share of which no event was seen: about 3.7 / units."""
    return float(1 - 0.025 ** (1 / units))


Lookup = Callable[[str], Array]


@dataclass(frozen=True)
class Formula:
    """One metric.

    Attributes:
        name: the key of JSON, gate and tables.
        unit: nats, ratio, fraction, …; empty for a pure number.
        over: what the metric is averaged over.
        text: the formula, with Δ = log π_train − log π_rollout and r = e^Δ.
        of: sums by column name ([1+B] each) → the metric, [1+B].
        within: range of its possible values; a fraction lies between 0 and 1.
        counts: whether it is a share of events, so that 0 may be chance; else 0 is exact.
        log: the logarithm of a metric that is e to the power of a mean, [1+B]: its interval is exponentiated,
            since the metric itself is linear in its sums over a fraction of a nat only.
    """

    name: str
    unit: str
    over: str
    text: str
    of: Callable[[Lookup], Array]
    within: Range = ANYWHERE
    counts: bool = False
    log: Callable[[Lookup], Array] | None = None

    @property
    def range(self) -> Range:
        """Range of possible values."""
        return SHARE if self.unit == "fraction" else self.within


@dataclass(frozen=True)
class Reader:
    """Computes formulas from the sums of a dump.

    Attributes:
        sums: column → [1+B], the sum and its replicates.
        groups: number of groups that were resampled.
    """

    sums: Mapping[str, Array]
    groups: int

    def number(self, row: Formula, prefix: str = "") -> Number:
        """Compute one metric with its interval; `prefix` precedes column names except shared counts."""
        return self._read(row, lambda name: self.column(name, prefix), 1)[0]

    def numbers(self, row: Formula, prefixes: Sequence[str]) -> list[Number]:
        """Compute a metric under many prefixes at once, at less overhead than one by one.

        Prefixes that share all sums of the metric share its number.
        """
        if not prefixes:
            return []
        own = self._own(row, prefixes[0])
        made_of = [tuple(id(self.sums[prefix + name]) for name in own) for prefix in prefixes]
        few = dict(zip(made_of, prefixes, strict=True))

        def columns(name: str) -> Array:
            if name in SHARED:
                return self.sums[name]
            return np.stack([self.sums[prefix + name] for prefix in few.values()])

        result = self._read(row, columns, len(few))
        each = dict(zip(few, result, strict=True))
        return [each[key] for key in made_of]

    def _own(self, row: Formula, prefix: str) -> tuple[str, ...]:
        """Return the columns that a metric reads, without those shared by the dump."""
        wanted: dict[str, None] = {}
        row.of(lambda name: wanted.setdefault(name) or self.column(name, prefix))
        return tuple(name for name in wanted if name not in SHARED)

    def column(self, name: str, prefix: str = "") -> Array:
        """Return a column's sum and replicates, [1+B]."""
        return self.sums[name if name in SHARED else prefix + name]

    def wrap(self, values: Array, row: Formula) -> Number:
        """Turn [1+B] values into a Number."""
        return self.wrapped([row], values[None])[0]

    def _read(self, row: Formula, get: Lookup, many: int) -> list[Number]:
        """Compute a metric of `many` prefixes at once."""
        if row.log is None:
            return self.wrapped([row] * many, _rows(row.of(get), many))
        logs = _rows(row.log(get), many)
        each = intervals(logs, self._effective, self.groups, [ANYWHERE] * many)
        blank = describe(row)
        return [power(blank, float(own[0]), ends) for own, ends in zip(logs, each, strict=True)]

    def wrapped(self, rows: Sequence[Formula], values: Array) -> list[Number]:
        """Turn the values [N, 1+B] of N metrics into Numbers, at less overhead than one by one."""
        first = values[:, 0].tolist()
        known = [at for at, value in enumerate(first) if math.isfinite(value)]
        there = values if len(known) == len(first) else values[known]
        each = intervals(there, self._effective, self.groups, [rows[at].range for at in known])
        ends = dict(zip(known, each, strict=True))
        return [
            self._known(row, value, ends[at]) if at in ends else _unknown(describe(row), value)
            for at, (row, value) in enumerate(zip(rows, first, strict=True))
        ]

    def _known(self, row: Formula, value: float, ends: Ends | None) -> Number:
        if row.counts and value in (0.0, 1.0) and ends == (value, value):
            ends = _unseen(value, float(self.sums["sequences"][0]))
        return Number(value, unit=row.unit, over=row.over, formula=row.text, **_between(ends))

    def around(self, values: Array, within: Range = ANYWHERE) -> tuple[float, float] | None:
        """Compute the 95% interval of [1+B] values; None with too few groups or finite replicates."""
        return interval(values, self._effective, self.groups, within)

    @cached_property
    def _effective(self) -> float:
        """Effective number of groups, from the tokens of each group."""
        tokens = self.sums.get("tokens")
        return float(self.groups) if tokens is None else effective(tokens, self.groups)


def _rows(values: Array, many: int) -> Array:
    """Return values [1+B] or [many, 1+B] as [many, 1+B]."""
    return np.broadcast_to(values, (many, values.shape[-1]))


def _between(ends: Ends | None) -> dict[str, Any]:
    """Return the fields of a Number that hold its interval, with a note on an end that overflows."""
    over = ends is not None and LARGEST in (-ends[0], ends[1])
    return {"interval": ends, "note": "its 95% interval overflows float64"} if over else {"interval": ends}


def power(blank: Number, log: float, ends: Ends | None) -> Number:
    """Build the Number e^log from the interval of its logarithm."""
    if not math.isfinite(log):
        return _unknown(blank, log)
    value, between = _exp(log), _between(ends and (_exp(ends[0]), _exp(ends[1])))
    if value < LARGEST:
        return replace(blank, value=value, **between)
    more = {"log10": log / math.log(10), "unknown": OVERFLOWS}
    return replace(blank, **(between | more))


def _exp(x: float) -> float:
    """Compute e^x; the largest float64 where it overflows."""
    return math.exp(x) if x < math.log(LARGEST) else LARGEST


def _unknown(blank: Number, value: float) -> Number:
    nothing = "undefined for this dump (nothing to average over)"
    return replace(blank, unknown=nothing if math.isnan(value) else "overflows float64")


def _unseen(value: float, sequences: float) -> tuple[float, float]:
    """Return the interval of 0 or 1 when no sequence, or every one, had the event."""
    missed = none_of(sequences)
    return (0.0, missed) if value == 0 else (1 - missed, 1.0)


SHARED = frozenset({"tokens", "sequences", "rows", "longest"})
"""Columns that belong to the dump, not to a drift or a preset."""


def describe(row: Formula) -> Number:
    """Build a Number without a value."""
    return Number(unit=row.unit, over=row.over, formula=row.text)


def plain(value: float, unit: str, over: str, text: str) -> Number:
    """Build a Number without an interval (an extreme, a tail index); unknown when it is not finite."""
    if not math.isfinite(value):
        return Number(unit=unit, over=over, formula=text, unknown="undefined for this dump")
    return Number(value, unit=unit, over=over, formula=text)


def missing(row: Formula, columns: list[str]) -> Number:
    """Build a Number that is unknown because the dump lacks columns."""
    return replace(describe(row), unknown="missing column " + ", ".join(columns))


def mean(column: str, per: str = "tokens", plus: float = 0.0) -> Callable[[Lookup], Array]:
    """Return the formula of a column's mean, plus a constant subtracted before summing."""
    return lambda get: get(column) / get(per) + plus


def spread(first: str, second: str, per: str) -> Callable[[Lookup], Array]:
    """Return the formula of the standard deviation from Σx and Σx²."""
    return lambda get: np.sqrt(np.maximum(get(second) / get(per) - (get(first) / get(per)) ** 2, 0))
