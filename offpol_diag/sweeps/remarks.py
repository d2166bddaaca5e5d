"""What a sweep warns of: thresholds that drop long responses, lie under the noise, or beside the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from offpol_diag.formulas import RATIOS, judged
from offpol_diag.numerals import say, say_value
from offpol_diag.presets import Preset, Reject
from offpol_diag.summary import NoiseFloor, Number, SolvedWindow, Sweep, SweptPoint
from offpol_diag.sweeps import floor
from offpol_diag.sweeps.dial import Dial
from offpol_diag.sweeps.numbers import Readings, main, main_of

TRAP, TRAP_RATIO = 0.05, 0.9
"""A threshold drops long responses when it keeps so much less of the longest quarter than of the shortest."""
FLIPS = 0.32
"""A threshold that drops more than that of lag 0 lies within one standard deviation of pure numerics."""
MORE, LEAST = 1.2, 0.05
"""How much more of the data a window must keep for the one beside it to be called misplaced."""
NAMES = {"length": "L", "floor": "N", "centre": "C"}
"""What stands in a table for each mark."""


def statistic(preset: Preset, dial: Dial) -> str:
    """What the thresholds are compared with, in a formula."""
    held = dial.held(preset)
    if dial.part == "veto":
        return "r_t, any token" if dial.side == "upper" else "the smallest r_t"
    return judged(held) if isinstance(held, Reject) else RATIOS[held.over]  # type: ignore[union-attr]


def marked(found: Sweep, readings: Readings) -> Sweep:
    """The sweep with its noise floors, every point's marks, and a sentence on each kind of mark."""
    accounts = floors(readings)
    points = [marks(point, readings, accounts) for point in found.points]
    said = [sentence(points, readings, accounts) for sentence in SENTENCES]
    more = [*_normalised(readings.plan.preset)]
    return found.model_copy(
        update={"points": points, "floor": accounts, "remarks": [*filter(None, said), *more]}
    )


def marks(point: SweptPoint, readings: Readings, accounts: Sequence[NoiseFloor]) -> SweptPoint:
    """The point with what is to be warned of it."""
    found = {
        "length": trapped(point, readings.per_token),
        "floor": _under(point, readings, accounts),
        "centre": beside(point, readings),
    }
    return point.model_copy(update={"marks": [name for name, true in found.items() if true]})


# ---------------------------------------------------------------- length


def trapped(point: SweptPoint, per_token: bool) -> bool:
    """Whether clearly fewer of the longest quarter are kept than of the shortest."""
    short, long = (main_of(point.quartiles[at], per_token) for at in (0, -1))
    return short - long > TRAP and long < TRAP_RATIO * short


def _of_length(points: Sequence[SweptPoint], readings: Readings, _: Sequence[NoiseFloor]) -> str:
    point = _example(points, "length")
    if point is None:
        return ""
    short, long = (say_value(main_of(point.quartiles[at], readings.per_token), "fraction") for at in (0, -1))
    borders = readings.borders()
    return (
        f"Length trap (L): at {named(point)}, {short} is kept of the shortest quarter of responses "
        f"({borders[0]} tokens) and {long} of the longest ({borders[-1]}). The batch that is left is a "
        "shorter one, whatever its quality."
    )


# ---------------------------------------------------------------- numerics


def floors(readings: Readings) -> list[NoiseFloor]:
    """By how values are stored, as seen; by what formats of logits would do."""
    steps = readings.steps
    first, second = steps.stored()
    kinds = first if first == second else f"{first} (rollout) and {second} (trainer)"
    rows = [_account(f"log-probs stored as {kinds}", steps.deviation(), True, readings)]
    for name, bits in floor.BITS.items():
        what = f"logits of about {floor.LOGIT:g} computed in {name}"
        rows.append(_account(what, floor.of_logits(bits), False, readings))
    return rows


def _account(source: str, deviation: float, found: bool, readings: Readings) -> NoiseFloor:
    return NoiseFloor(
        source=source,
        per_token=Number(value=deviation, unit="nats", formula="standard deviation of Δ of a token"),
        statistic=_in_statistic(deviation, readings),
        found=found,
    )


def _in_statistic(deviation: float, readings: Readings) -> Number:
    dial, preset = readings.plan.dial, readings.plan.preset
    held = dial.held(preset)
    over = "token" if dial.part == "veto" else held.over  # type: ignore[union-attr]
    name = held.statistic if isinstance(held, Reject) else "ratio"
    how = floor.IN_STATISTIC.get((name, over))
    if how is None:
        return Number(unknown=f"no rule is known for {name} over {over}")
    length = float(readings.sums["tokens"][0] / readings.sums["sequences"][0])
    text = "how far that moves (the log of) the statistic, at the mean length"
    return Number(value=how(deviation, length), formula=text)


def reach(point: SweptPoint, readings: Readings) -> float:
    """How far from on-policy the nearest moving bound lies, in the units of the noise."""
    if not readings.plan.dial.logarithmic(readings.plan.preset):
        return min(abs(bound) for bound in point.bounds.values())
    logs = [math.log(bound) for bound in point.bounds.values() if bound > 0]
    if len(logs) == 2:
        return abs(logs[1] - logs[0]) / 2
    return min((abs(one) for one in logs), default=math.inf)


def _under(point: SweptPoint, readings: Readings, accounts: Sequence[NoiseFloor]) -> bool:
    return _under_storage(point, readings, accounts) or _under_lag(point)


def _under_storage(point: SweptPoint, readings: Readings, accounts: Sequence[NoiseFloor]) -> bool:
    seen = [one.statistic.value for one in accounts if one.found and one.statistic.value is not None]
    return any(reach(point, readings) < value for value in seen)


def _under_lag(point: SweptPoint) -> bool:
    kept = point.metrics.get("fresh_kept")
    return kept is not None and kept.value is not None and 1 - kept.value > FLIPS


def _of_storage(points: Sequence[SweptPoint], readings: Readings, accounts: Sequence[NoiseFloor]) -> str:
    below = [point for point in points if _under_storage(point, readings, accounts)]
    if not below:
        return ""
    seen = next(one for one in accounts if one.found)
    return (
        f"Noise floor (N): {seen.source} alone move the statistic by {say(seen.statistic)}, and "
        f"{_several(below)} closer than that: what is kept there is decided by rounding."
    )


def _of_lag(points: Sequence[SweptPoint], readings: Readings, _: Sequence[NoiseFloor]) -> str:
    point = _example([one for one in points if _under_lag(one)], "floor")
    if point is None:
        return ""
    dropped = 1 - (point.metrics["fresh_kept"].value or 0.0)
    what = "tokens" if readings.per_token else "sequences"
    return (
        f"Noise floor (N): at {named(point)}, {say_value(dropped, 'fraction')} of the {what} of policy lag 0 "
        "are dropped, where nothing but numerics (and what is wrong with them) makes the policies differ."
    )


# ---------------------------------------------------------------- centre


def beside(point: SweptPoint, readings: Readings) -> bool:
    """Whether a window loses half the data, and one as wide around their middle would keep clearly more."""
    centre, kept = _middle(readings), main(point, readings.per_token).value
    if centre is None or kept is None or kept >= 0.5:
        return False
    logs = _logs(point, readings)
    return logs is not None and _as_wide(readings, centre, logs) > max(MORE * kept, kept + LEAST)


def _as_wide(readings: Readings, centre: float, logs: tuple[float, float]) -> float:
    """About which share a window as wide would keep around a centre."""
    half = (logs[1] - logs[0]) / 2
    return readings.share_between(centre - half, centre + half)


def _middle(readings: Readings) -> float | None:
    held = readings.plan.dial.held(readings.plan.preset)
    factor = isinstance(held, Reject) and held.statistic == "ratio"
    return readings.median() if factor else None


def _logs(point: SweptPoint, readings: Readings) -> tuple[float, float] | None:
    """The logs of both bounds of the rule, the one that stands still included."""
    dial = readings.plan.dial
    sides = {name.rpartition(".")[2]: bound for name, bound in point.bounds.items()}
    held = dial.held(readings.plan.preset)
    low, high = sides.get("lower", held.lower), sides.get("upper", held.upper)
    return (math.log(low), math.log(high)) if low and high else None


def _of_centre(points: Sequence[SweptPoint], readings: Readings, _: Sequence[NoiseFloor]) -> str:
    point = _example(points, "centre")
    centre = _middle(readings)
    if point is None or centre is None:
        return ""
    low, high = _logs(point, readings) or (0.0, 0.0)
    same = _as_wide(readings, centre, (low, high))
    kept = say_value(main(point, readings.per_token).value, "fraction")
    return (
        f"Beside the data (C): the window {math.exp(low):.6g} to {math.exp(high):.6g} lies around 1, keeps "
        f"{kept}; half of the data lie below {math.exp(centre):.6g} (E[log r] = {readings.centre():.3g}). A "
        f"window as wide around that would keep about {say_value(round(same, 2), 'fraction')}; --keep solves "
        "for one."
    )


# ---------------------------------------------------------------- the window that was solved for


def of_window(one: SolvedWindow, after: Readings, accounts: Sequence[NoiseFloor]) -> list[str]:
    """What is to be warned of bounds that were solved for."""
    point = one.point
    said = [
        "length" in point.marks and _window_traps(point, after),
        _under_storage(point, after, accounts)
        and "The solved bounds lie under the noise floor of the stored values.",
        _under_lag(point)
        and "The solved bounds drop much of policy lag 0 as well, where only numerics differ.",
        one.ties
        and f"{one.ties} more than asked are kept: they equal the last one, and no bound parts them.",
    ]
    return [text for text in said if text]


def _window_traps(point: SweptPoint, after: Readings) -> str:
    short, long = (say_value(main_of(point.quartiles[at], after.per_token), "fraction") for at in (0, -1))
    return (
        f"Length trap: the solved bounds keep {short} of the shortest quarter of responses and {long} of "
        "the longest."
    )


# ---------------------------------------------------------------- words


def _normalised(preset: Preset) -> Sequence[str]:
    if preset.weight is None or not preset.weight.normalize:
        return ()
    return ("The weights are shown before they are divided by their batch mean, after which κ is near 1.",)


def _example(points: Sequence[SweptPoint], mark: str) -> SweptPoint | None:
    """The preset's own threshold where it is marked, else the loosest that is."""
    found = [point for point in points if mark in point.marks]
    own = [point for point in found if point.own]
    return next(iter(own or found[-1:]), None)


def named(point: SweptPoint) -> str:
    """A threshold in a sentence."""
    return f"{point.threshold:.7g}{' (the preset as it stands)' if point.own else ''}"


def _several(points: Sequence[SweptPoint]) -> str:
    if len(points) == 1:
        return f"the threshold {named(points[0])} lies"
    return f"{len(points)} thresholds, from {named(points[0])} to {named(points[-1])}, lie"


Sentence = Callable[[Sequence[SweptPoint], Readings, Sequence[NoiseFloor]], str]
SENTENCES: tuple[Sentence, ...] = (_of_centre, _of_length, _of_lag, _of_storage)
