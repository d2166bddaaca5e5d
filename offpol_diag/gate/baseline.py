"""Comparison with an earlier result: a number fails if it is worse by more than a tolerance.

`directions.py` says which direction is worse. The two results count as independent runs: the interval of
their difference combines both intervals, each end by itself (Zou and Donner 2008), and a comparison fails
only if that whole interval lies beyond the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offpol_diag.directions import WATCHED_GAP, WATCHED_PRESET, Worse, worse
from offpol_diag.gate.aliases import unlike
from offpol_diag.gate.bounds import USUAL, Judge, Level, Name, Tolerance
from offpol_diag.gate.diagnosis import NAME, compare_diagnosis
from offpol_diag.gate.numbers import Found, find, look_up, preset, preset_of
from offpol_diag.gate.verdicts import HIDDEN, Ruling, joined, rule, shown, told_apart, why_unjudged
from offpol_diag.numerals import FRACTIONS, doubted, written
from offpol_diag.presets.catalogue import ALL, plain
from offpol_diag.summary import GateVerdict, Number, Summary, finite

DIAGNOSIS = Name(NAME)
METHOD = ("method", "policy", "loss")
"""Fields that two presets of one name must share for their numbers to be compared."""

# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Baseline:
    """Settings for comparing a result with an earlier one.

    Attributes:
        label: name of the earlier result in messages.
        only: the numbers to compare; empty for the default ones.
        presets: presets whose default numbers are compared too.
        default: tolerance of the numbers that are not in `tolerances`.
        tolerances: number → its own tolerance; these numbers are always compared.
        level: whether a failure fails the gate (error) or is only reported (warn).
        judge: whether the 95% interval decides, or the plain value.
    """

    label: str = "the baseline"
    only: tuple[Name, ...] = ()
    presets: tuple[str, ...] = ()
    default: Tolerance = USUAL
    tolerances: Mapping[Name, Tolerance] = field(default_factory=dict)
    level: Level = "error"
    judge: Judge = "interval"

    @property
    def named(self) -> tuple[Name, ...]:
        """The numbers named by the user."""
        return tuple(dict.fromkeys((*self.only, *self.tolerances)))


def compare(now: Summary, base: Summary, settings: Baseline) -> tuple[GateVerdict, ...]:
    """Return one verdict per number, and one on the diagnosis.

    Default numbers are compared only if reliable in the baseline, and the diagnosis if it has one.
    """
    names = [one for one in settings.named if one != DIAGNOSIS]
    absent: list[GateVerdict] = []
    if not settings.only:
        rows = _rows(base, settings)
        watched = [f"{row}.{metric}" for row in rows if preset(base, row) for metric in WATCHED_PRESET]
        watched = [*_gaps(base), *watched]
        names += [Name(one) for one in watched if Name(one) not in names and _usable(find(base, one))]
        absent = [
            _verdict(Name(f"{row}.{WATCHED_PRESET[0]}"), settings, _no_preset(base, settings, row))
            for row in rows
            if preset(base, row) is None
        ]
    watched_diagnosis = base.diagnosis is not None and not settings.only
    verdict = [compare_diagnosis(now, base, settings.level, settings.label)]
    numbers = (*(_compare(now, base, one, settings) for one in names), *absent)
    return (*numbers, *(verdict if watched_diagnosis or DIAGNOSIS in settings.named else ()))


def not_compared(now: Summary, base: Summary, settings: Baseline) -> str:
    """Return a sentence naming what was not compared; empty if everything was."""
    if settings.only:
        return ""
    doubtful = [one for one in _gaps(base) if isinstance(found := find(base, one), Number) and doubted(found)]
    named = {id(preset(base, row)) for row in _rows(base, settings)}
    rows = [row for row, result in base.presets.items() if id(result) not in named]
    parts = joined(
        f"{', '.join(doubtful)}: unreliable in {settings.label}" if doubtful else "",
        f"its presets ({_few(rows)}): name them with --presets" if rows else "",
    )
    return f"Not compared: {parts}." if parts else ""


def _gaps(base: Summary) -> list[str]:
    """List the default numbers of the policy gaps: rollout → old (or rollout → current), old → current."""
    first = "" if _usable(find(base, "k3")) else "total."
    return [f"{gap}{metric}" for gap in (first, "drift2.") for metric in WATCHED_GAP]


def _rows(base: Summary, settings: Baseline) -> list[str]:
    """List the presets to compare, each once; `all` stands for every preset of the baseline."""
    every = [base.presets if plain(row) == ALL else [row] for row in settings.presets]
    return list(dict.fromkeys(row for rows in every for row in rows))


def _usable(number: Found) -> bool:
    return isinstance(number, Number) and number.value is not None and not doubted(number)


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---------------------------------------------------------------- one comparison


def _compare(now: Summary, base: Summary, name: Name, settings: Baseline) -> GateVerdict:
    here, there = look_up(now, name)[0], look_up(base, name)[0]
    if isinstance(here, str):
        return _verdict(name, settings, here)
    ours, theirs = (preset_of(summary, name.number) for summary in (now, base))
    named, unknown = name.number.rpartition(".")[0], there if isinstance(there, str) else _silence(there)
    why = unknown and f"{settings.label}: {unknown}"
    if ours and not theirs:
        why = _no_preset(base, settings, named)
    elif ours and theirs and any(getattr(ours, key) != getattr(theirs, key) for key in METHOD):
        why = f"{named} is another method in {settings.label}: {theirs.method} there, {ours.method} here"
    if isinstance(there, str):
        return _verdict(name, settings, why)
    if not why and (unknown := _silence(here)):
        return _surely_worse(name, settings, here, there) or _verdict(name, settings, unknown, here, there)
    return _verdict(name, settings, why, here, there) if why else _judged(name, settings, here, there)


def _silence(number: Number) -> str:
    """Return the reason why a number cannot be compared; empty if it can."""
    return why_unjudged(number) or ("the value overflows float64" if number.value is None else "")


def _surely_worse(name: Name, settings: Baseline, here: Number, there: Number) -> GateVerdict | None:
    """Return the failure that a heavy tail can only have made to look smaller; None if there is none."""
    prefix, _, metric = name.number.rpartition(".")
    sound = here.model_copy(update={"note": f"although {here.note}: what a heavy tail hides is worse still"})
    kind = HIDDEN.get(metric)
    if kind is None or _silence(sound) or sound.value is None or sound.interval is None:
        return None
    way = worse(f"{prefix}." if prefix else "", metric)
    outward = way.sign == ("higher" if kind == "max" else "lower")
    outward = outward or (way.sign == "away" and sound.interval[0] >= way.target)
    found = _judged(name, replace(settings, judge="interval"), sound, there)
    return found if outward and found.passed is False and found.judged_on == "interval" else None


def _no_preset(base: Summary, settings: Baseline, named: str) -> str:
    has = f"it has {_few(list(base.presets), 8)}" if base.presets else "it has none"
    return f"{settings.label} has no preset {named}; {has}"


def _judged(name: Name, settings: Baseline, here: Number, there: Number) -> GateVerdict:
    """Judge the difference in the worse direction, or in both where any change counts."""
    prefix, _, metric = name.number.rpartition(".")
    way = worse(f"{prefix}." if prefix else "", metric)
    change, base = difference(_badness(here, way), _badness(there, way)), there.value or 0.0
    allowed = settings.tolerances.get(name, settings.default).of(_badness(there, way).value or 0.0)
    decided = rule(change, "max", allowed, settings.judge)
    if way.sign == "either":
        other = rule(change, "min", -allowed, settings.judge)
        decided = min(decided, other, key=lambda one: (one.passed is True, not one.open))
    limit: dict[str, Any] = {
        "away": {"bound": "within", "centre": way.target, "limit": finite(abs(base - way.target) + allowed)},
        "either": {"bound": "within", "centre": base, "limit": finite(allowed)},
        "lower": {"bound": "min", "limit": finite(base - allowed)},
    }.get(way.sign, {"bound": "max", "limit": finite(base + allowed)})
    reason = _why(way, change, allowed, decided, here)
    return _verdict(name, settings, reason, here, there, decided, **limit)


def _badness(number: Number, way: Worse) -> Number:
    """Transform a number so that higher is worse: negate it, or take its distance from the target."""
    assert number.value is not None
    value, (low, high) = number.value, number.interval or (number.value, number.value)
    if way.sign == "lower":
        value, low, high = -value, -high, -low
    elif way.sign == "away":
        ends = sorted((abs(low - way.target), abs(high - way.target)))
        value, low, high = abs(value - way.target), 0.0 if low <= way.target <= high else ends[0], ends[1]
    return Number(value=value, interval=(low, high) if number.interval else None)


def difference(one: Number, other: Number) -> Number:
    """Return `one` − `other` of independent runs; without an interval if either has none.

    Each end lies √(a² + b²) from the difference, a and b being the distances of the two ends it comes from.
    """
    assert one.value is not None
    assert other.value is not None
    gap = one.value - other.value
    if one.interval is None or other.interval is None:
        return Number(value=gap)
    below = math.hypot(one.value - one.interval[0], other.interval[1] - other.value)
    above = math.hypot(one.interval[1] - one.value, other.value - other.interval[0])
    return Number(value=gap, interval=(gap - below, gap + above))


def _why(way: Worse, change: Number, allowed: float, ruling: Ruling, here: Number) -> str:
    """Return the reason: `worse by 0.01 [0.005, 0.015], 0.002 allowed; …`."""
    value, (low, high) = change.value or 0.0, change.interval or (0.0, 0.0)
    kind = "changed" if way.sign == "either" else "better" if value < 0 else "worse"
    if kind == "better":
        value, low, high = -value, -high, -low
    scale, points = (100.0, " points") if here.unit in FRACTIONS else (1.0, "")
    of = Number(value=value * scale, interval=(low * scale, high * scale) if change.interval else None)
    size, interval = written(of)
    short, exact = (
        float(f"{allowed * scale:.4g}"),
        allowed * scale,
    )  # of a share of the baseline four digits do
    bound = short if (value * scale > short) is (value * scale > exact) and value * scale != short else exact
    size, right = told_apart(size, value * scale, bound, "")
    size, interval, right = f"{size}{points}", f" {interval}" if interval else "", f"{right}{points}"
    sure = ruling.passed is False and ruling.on == "interval"
    return joined(
        f"{kind} by {size}{interval}, {right} allowed",
        "the whole 95% interval of the difference lies beyond that" if sure else "",
        "" if change.interval else "no interval",
        here.note,
    )


def _verdict(
    name: Name,
    settings: Baseline,
    reason: str,
    here: Number | None = None,
    there: Number | None = None,
    ruling: Ruling | None = None,
    **limit: Any,
) -> GateVerdict:
    """Build the verdict; without a ruling the number could not be judged."""
    earlier = shown(there or Number())
    found = ruling or Ruling(None, reason)
    return GateVerdict(
        name=str(name),
        said=name.said,
        level=settings.level,
        source=settings.label,
        tolerance=str(settings.tolerances.get(name, settings.default)),
        baseline=earlier["value"],
        baseline_interval=earlier["interval"],
        **shown(here or Number()),
        passed=found.passed,
        open=found.open,
        judged_on=found.on,
        reason=joined(reason, unlike(name.said)),
        **({"bound": "max", "limit": 0.0} | limit),
    )
