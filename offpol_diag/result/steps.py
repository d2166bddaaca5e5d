"""A number of the main pair of policies, training step by training step."""

from __future__ import annotations

from typing import NamedTuple

from offpol_diag.number import Number
from offpol_diag.result.charts import Series
from offpol_diag.result.facts import Place
from offpol_diag.result.whole import Result

NO_STEP = "∅"
"""Key of the rows without a step."""


class Point(NamedTuple):
    """A number at a training step, and its interval."""

    step: str
    value: float | None
    interval: tuple[float, float] | None


def at_steps(summary: Result) -> list[Place]:
    """Return the training steps of the dump with their numbers, without the rows that have no step."""
    return [one for one in summary.at("step") if one.key != NO_STEP]


def curve(summary: Result, name: str) -> list[Point]:
    """Return a number of the main pair of policies by training step."""
    steps = summary.charts.steps
    if steps is None:
        prefix, places = summary.prefix, at_steps(summary)  # where the main pair has no prefix
        each = [(one.key, one.numbers.get(prefix + name, one.numbers.get(name, Number()))) for one in places]
        return [Point(key, one.value, one.interval) for key, one in each]
    found = steps.series.get(name, Series(values=[]))
    none = [None] * len(found.values)
    ends = zip(steps.last, found.values, found.low or none, found.high or none, strict=False)
    return [
        Point(str(last), value, None if low is None or high is None else (low, high))
        for last, value, low, high in ends
    ]
