"""From sums to numbers: a metric is a row that names its columns, its unit and its formula.

The same function is evaluated on the sums of the dump and on those of every bootstrap replicate, so each
number comes with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offpol_diag.metrics import interval
from offpol_diag.metrics.interval import ANYWHERE, SHARE, Ends, Range
from offpol_diag.summary import Number

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
        each = interval.intervals(there, self._effective, self.groups, row.range)
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
        return interval.interval(values, self._effective, self.groups, within)

    @cached_property
    def _effective(self) -> float:
        """Groups, by how unequally the tokens are spread over them."""
        tokens = self.sums.get("tokens")
        return float(self.groups) if tokens is None else interval.effective(tokens, self.groups)


def _unknown(blank: Number, value: float) -> Number:
    nothing = "undefined for this dump (nothing to average over)"
    return blank.model_copy(update={"unknown": nothing if math.isnan(value) else "overflows float64"})


def _unseen(value: float, sequences: float) -> tuple[float, float]:
    """When no event happened, or every one, among so many responses, whose tokens may share an event."""
    missed = interval.none_of(sequences)
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
