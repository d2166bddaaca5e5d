"""A number of the main pair of policies, training step by training step."""

from __future__ import annotations

from typing import NamedTuple

from offpol_diag.number import Number
from offpol_diag.result.charts import Series
from offpol_diag.result.facts import Place
from offpol_diag.result.whole import Result

NO_STEP = "∅"
"""Key of the rows without a step."""


APART = 5.0
"""Factor between K3 of steps at lag 0 from which they are no longer told as one number."""


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


def apart_in_sync(summary: Result) -> tuple[Point, Point] | None:
    """Return the steps at lag 0 of the least and the largest K3, where these are `APART` or more apart."""
    lags = {one.step: one.value for one in curve(summary, "policy_lag")}
    known = [one for one in curve(summary, "k3") if one.value and lags.get(one.step) == 0]
    low, high = (pick(known, key=_value, default=None) for pick in (min, max))
    return (low, high) if low and high and _value(high) >= APART * _value(low) else None


def _value(one: Point) -> float:
    return one.value or 0.0


def in_sync(summary: Result) -> Number | None:
    """Return K3 at lag 0; None where it is unknown, or differs too much by step to be one number."""
    lag = summary.charts.lag
    return lag.in_sync if lag and not apart_in_sync(summary) else None
