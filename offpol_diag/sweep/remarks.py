"""Warnings of a sweep: thresholds that drop long responses, lie below the noise, or miss the data.

Each kind of warning marks points (`marks`) and has a sentence on one of them (`SENTENCES`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from offpol_diag.numerals import say, say_value
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.presets.formulas import RATIOS, judged
from offpol_diag.summary import NoiseFloor, Number, SolvedWindow, Sweep, SweptPoint
from offpol_diag.sweep import rounding
from offpol_diag.sweep.readings import Readings
from offpol_diag.sweep.thresholds import LOGARITHMIC, SweptBound

TRAP, TRAP_RATIO = 0.05, 0.9
"""A threshold drops long responses if the kept share of the longest quarter is lower by this much, and less
than this multiple, than that of the shortest."""
FLIPS = 0.32
"""A threshold that drops more than this share at lag 0 lies within one standard deviation of numerics."""
MORE, LEAST = 1.2, 0.05
"""A window is misplaced if one as wide around the median keeps this many times, and this much, more."""

Floors = Sequence[NoiseFloor]


def statistic(preset: Preset, bound: SweptBound) -> str:
    """Return the formula of the statistic that is compared with the thresholds."""
    rule = bound.rule(preset)
    if isinstance(rule, Reject):
        return judged(rule)
    if isinstance(rule, Weight):
        return RATIOS[rule.over]
    return "r_t, any token" if bound.side == "upper" else "the smallest r_t"


def marked(found: Sweep, readings: Readings) -> Sweep:
    """Add the noise floors, the marks of each point, and a sentence on each kind of mark."""
    accounts = floors(readings)
    points = [marks(point, readings, accounts) for point in found.points]
    said = [text for sentence in SENTENCES if (text := sentence(points, readings, accounts))]
    weight = readings.plan.preset.weight
    if weight is not None and weight.normalize:
        said.append(
            "The weights are shown before they are divided by their batch mean, after which κ is near 1."
        )
    return found.model_copy(update={"points": points, "floor": accounts, "remarks": said})


def marks(point: SweptPoint, readings: Readings, accounts: Floors) -> SweptPoint:
    """Add the marks of a point."""
    found = {
        "length": _trapped(point, readings),
        "floor": _under_storage(point, readings, accounts) or _under_lag(point),
        "centre": _beside(point, readings),
    }
    return point.model_copy(update={"marks": [name for name, true in found.items() if true]})


def of_window(one: SolvedWindow, after: Readings, accounts: Floors) -> list[str]:
    """Return the warnings about solved bounds."""
    point = one.point
    short, long = _shares(point, after)
    said = {
        f"Length trap: the solved bounds keep {say_value(short, 'fraction')} of the shortest quarter of "
        f"responses and {say_value(long, 'fraction')} of the longest.": "length" in point.marks,
        "The solved bounds lie under the noise floor of the stored values.": _under_storage(
            point, after, accounts
        ),
        "The solved bounds drop much of policy lag 0 as well, where only numerics differ.": _under_lag(point),
        f"{one.ties} more than asked are kept: they equal the last one, and no bound parts them.": one.ties,
    }
    return [text for text, true in said.items() if true]


# ---------------------------------------------------------------- length


def _shares(point: SweptPoint, readings: Readings) -> tuple[float, float]:
    """Return the kept shares of the shortest and of the longest quarter; 0 for an empty one."""
    return readings.kept(point.quartiles[0]) or 0.0, readings.kept(point.quartiles[-1]) or 0.0


def _trapped(point: SweptPoint, readings: Readings) -> bool:
    """Return whether clearly less of the longest quarter is kept than of the shortest."""
    short, long = _shares(point, readings)
    return short - long > TRAP and long < TRAP_RATIO * short


def _of_length(points: Sequence[SweptPoint], readings: Readings, _: Floors) -> str:
    point = _example(points, "length")
    if point is None:
        return ""
    short, long = (say_value(share, "fraction") for share in _shares(point, readings))
    borders = readings.borders()
    return (
        f"Length trap (L): at {_named(point)}, {short} is kept of the shortest quarter of responses "
        f"({borders[0]} tokens) and {long} of the longest ({borders[-1]}). The batch that is left is a "
        "shorter one, whatever its quality."
    )


# ---------------------------------------------------------------- numerics


def floors(readings: Readings) -> list[NoiseFloor]:
    """Return the noise floors: of the formats of the stored values, and of low-precision logits."""
    first, second = readings.stored.formats()
    kinds = first if first == second else f"{first} (rollout) and {second} (trainer)"
    rows = [(f"log-probs stored as {kinds}", readings.stored.deviation(), True)]
    for name, bits in rounding.BITS.items():
        what = f"logits of about {rounding.LOGIT:g} computed in {name}"
        rows.append((what, rounding.of_logits(bits), False))
    return [
        NoiseFloor(
            source=source,
            per_token=Number(value=value, unit="nats", formula="standard deviation of Δ of a token"),
            statistic=_in_statistic(value, readings),
            found=found,
        )
        for source, value, found in rows
    ]


def _in_statistic(deviation: float, readings: Readings) -> Number:
    bound, preset = readings.plan.bound, readings.plan.preset
    name, over = bound.statistic(preset), bound.over(preset)
    moved = rounding.in_statistic(name, over, deviation, readings.length)
    if moved is None:
        return Number(unknown=f"no rule is known for {name} over {over}")
    return Number(value=moved, formula="how far that moves (the log of) the statistic, at the mean length")


def _distance(point: SweptPoint, readings: Readings) -> float:
    """Return the distance of the nearest varying bound from on-policy, in the units of the noise."""
    bounds = list(point.bounds.values())
    if readings.plan.bound.statistic(readings.plan.preset) not in LOGARITHMIC:
        return min(map(abs, bounds))
    logs = [math.log(one) for one in bounds if one > 0]
    return abs(logs[1] - logs[0]) / 2 if len(logs) == 2 else min(map(abs, logs), default=math.inf)


def _under_storage(point: SweptPoint, readings: Readings, accounts: Floors) -> bool:
    seen = [one.statistic.value for one in accounts if one.found and one.statistic.value is not None]
    return any(_distance(point, readings) < value for value in seen)


def _under_lag(point: SweptPoint) -> bool:
    kept = point.metrics.get("fresh_kept")
    return kept is not None and kept.value is not None and 1 - kept.value > FLIPS


def _of_storage(points: Sequence[SweptPoint], readings: Readings, accounts: Floors) -> str:
    below = [point for point in points if _under_storage(point, readings, accounts)]
    if not below:
        return ""
    seen = next(one for one in accounts if one.found)
    several = f"the threshold {_named(below[0])} lies"
    if len(below) > 1:
        several = f"{len(below)} thresholds, from {_named(below[0])} to {_named(below[-1])}, lie"
    return (
        f"Noise floor (N): {seen.source} alone move the statistic by {say(seen.statistic)}, and "
        f"{several} closer than that: what is kept there is decided by rounding."
    )


def _of_lag(points: Sequence[SweptPoint], readings: Readings, _: Floors) -> str:
    point = _example([one for one in points if _under_lag(one)], "floor")
    if point is None:
        return ""
    dropped = 1 - (point.metrics["fresh_kept"].value or 0.0)
    return (
        f"Noise floor (N): at {_named(point)}, {say_value(dropped, 'fraction')} of the {readings.units} of "
        "policy lag 0 are dropped, where nothing but numerics (and what is wrong with them) makes the "
        "policies differ."
    )


# ---------------------------------------------------------------- centre


def _beside(point: SweptPoint, readings: Readings) -> bool:
    """Return whether a window drops over half the data and one as wide at the median keeps clearly more."""
    kept = readings.kept(point.metrics)
    if kept is None or kept >= 0.5:
        return False
    found = _around_the_data(point, readings)
    return found is not None and found[-1] > max(MORE * kept, kept + LEAST)


def _around_the_data(point: SweptPoint, readings: Readings) -> tuple[float, float, float, float] | None:
    """Return the logs of both bounds and of the median, and the share kept by a window as wide around it.

    None unless the rule is on a ratio and has both bounds, whether they vary or not.
    """
    rule, middle = readings.plan.bound.rule(readings.plan.preset), readings.median()
    if not isinstance(rule, Reject) or rule.statistic != "ratio" or middle is None:
        return None
    moved = {name.rpartition(".")[2]: bound for name, bound in point.bounds.items()}
    low, high = moved.get("lower", rule.lower), moved.get("upper", rule.upper)
    if not low or not high:
        return None
    half = (math.log(high) - math.log(low)) / 2
    share = readings.share_between(middle - half, middle + half)
    return math.log(low), math.log(high), middle, share


def _of_centre(points: Sequence[SweptPoint], readings: Readings, _: Floors) -> str:
    point = _example(points, "centre")
    found = _around_the_data(point, readings) if point is not None else None
    if point is None or found is None:
        return ""
    low, high, middle, share = found
    kept = say_value(readings.kept(point.metrics), "fraction")
    return (
        f"Beside the data (C): the window {math.exp(low):.6g} to {math.exp(high):.6g} lies around 1, keeps "
        f"{kept}; half of the data lie below {math.exp(middle):.6g} (E[log r] = {readings.centre():.3g}). A "
        f"window as wide around that would keep about {say_value(round(share, 2), 'fraction')}; "
        "--keep solves for one."
    )


Sentence = Callable[[Sequence[SweptPoint], Readings, Floors], str]
SENTENCES: tuple[Sentence, ...] = (_of_centre, _of_length, _of_lag, _of_storage)


def _example(points: Sequence[SweptPoint], mark: str) -> SweptPoint | None:
    """Return the preset's own threshold if it has the mark, else the last point that has it, or None."""
    found = [point for point in points if mark in point.marks]
    own = [point for point in found if point.own]
    return next(iter(own or found[-1:]), None)


def _named(point: SweptPoint) -> str:
    """Format a threshold for a sentence."""
    return f"{point.threshold:.7g}{' (the preset as it stands)' if point.own else ''}"
