"""K3 that grows over the training steps, a reward that falls beside it, and the last step before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, median

from offpol_diag.result import Result
from offpol_diag.result.steps import Point, curve

GROWN, LEAST = 5.0, 1e-4
"""K3 grows if its median over the last third of the steps is above this times the first third's, and this."""
MERGE = 0.015
"""K3 above which prime-rl merges no new model; a run that stays above it is resumed from before."""
HALF = 0.5
"""Share of itself by which a mean reward must fall to be called a collapse."""


@dataclass(frozen=True)
class Growth:
    """K3 grows over the steps of a dump.

    Attributes:
        ends: K3 at the first step and at the last.
        thirds: median K3 of the first third of the steps and of the last.
        reward: the mean reward of both thirds where it collapses, else None.
        surely: the first step from which on the interval of K3 is above `MERGE`; None where there is none, or
            where it is the first step of the dump.
        perhaps: the same of its value.
    """

    ends: tuple[Point, Point]
    thirds: tuple[float, float]
    reward: tuple[float, float] | None
    surely: str | None
    perhaps: str | None


def growth(summary: Result) -> Growth | None:
    """Return how K3 grows over the steps; None where it does not, or there are fewer than three."""
    points = curve(summary, "k3")
    known = [(one, one.value) for one in points if one.value is not None]
    third = len(known) // 3
    if not third:
        return None
    first, last = (median(value for _, value in part) for part in (known[:third], known[-third:]))
    if last <= max(GROWN * first, LEAST):
        return None
    steps = summary.charts.steps
    names = [str(one) for one in steps.first] if steps else [one.step for one in points]
    surely = _above(names, [one.interval[0] if one.interval else one.value for one in points])
    perhaps = _above(names, [one.value for one in points])
    if surely == names[0]:
        surely = perhaps = None
    return Growth((known[0][0], known[-1][0]), (first, last), _collapse(summary), surely, perhaps)


def _above(names: list[str], values: list[float | None]) -> str | None:
    """Return the first step from which on all values are above the merge gate."""
    backwards = zip(reversed(names), reversed(values), strict=True)
    above = [name for name, _ in takewhile(lambda end: end[1] is not None and end[1] > MERGE, backwards)]
    return above[-1] if above else None


def _collapse(summary: Result) -> tuple[float, float] | None:
    """Return the mean reward of both thirds, if it falls by half and beyond its intervals.

    A step whose rewards are all equal has an interval of no width, and counts with the widest.
    """
    known = [(one.value, one.interval) for one in curve(summary, "reward") if one.value is not None]
    third = len(known) // 3
    if not third:
        return None
    halves = [(high - low) / 2 for low, high in (ends for _, ends in known if ends)]
    widest = max(halves, default=math.inf)
    (first, above), (last, below) = (_mean(part, widest) for part in (known[:third], known[-third:]))
    fell = last < first - HALF * abs(first) and last + below < first - above
    return (first, last) if fell else None


def _mean(points: Sequence[tuple[float, tuple[float, float] | None]], widest: float) -> tuple[float, float]:
    """Return the mean of independent values, and half the width of its interval."""
    halves = [(ends[1] - ends[0]) / 2 if ends and ends[1] > ends[0] else widest for _, ends in points]
    return fmean(value for value, _ in points), math.hypot(*halves) / len(points)
