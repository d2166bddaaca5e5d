"""An earlier result as the bound: nothing may be worse than it was by more than a tolerance.

Which way is worse is the metric's own (`worse.py`). The two results are taken as independent runs: the
interval of their difference is made of both intervals, a side at a time (Zou and Donner 2008), and a
comparison fails only where that whole interval lies beyond the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offpol_diag.catalogue import ALL, plain
from offpol_diag.gate.bounds import Judge, Level, Name, Steps
from offpol_diag.gate.find import Found, find, preset, preset_of
from offpol_diag.gate.judging import Ruling, apart, rule, shown, silent
from offpol_diag.gate.steps import pick, series
from offpol_diag.gate.tolerance import USUAL, Tolerance
from offpol_diag.numerals import doubted
from offpol_diag.summary import GateVerdict, Number, PresetResult, Summary
from offpol_diag.worse import EITHER, GAP, PRESET, WATCHED_GAP, WATCHED_PRESET, Worse

DRIFTS = ("", "drift2.", "total.")

# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Against:
    """What is asked of a baseline.

    Attributes:
        label: what the baseline is called.
        only: the numbers to compare; empty for those that are watched by default.
        presets: further presets whose watched numbers are compared.
        default: the tolerance of all numbers without one of their own.
        tolerances: of single numbers, which are thereby compared.
        level: whether a failure fails the gate.
        judge: whether intervals decide.
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
        """What the user names."""
        return tuple(dict.fromkeys((*self.only, *self.tolerances)))


def against(now: Summary, base: Summary, asked: Against) -> tuple[GateVerdict, ...]:
    """One verdict per number; what the user did not name is left out where the baseline cannot say it."""
    found = tuple(_compare(now, base, one, asked) for one in asked.named)
    watched = () if asked.only else _watched(now, base, asked)
    return (*found, *(_compare(now, base, one, asked) for one in watched), *_absent(base, asked))


def _watched(now: Summary, base: Summary, asked: Against) -> list[Name]:
    """The usual numbers that the baseline has and can be trusted with."""
    rows = [row for row in _rows(base, asked) if preset(base, row)]
    names = [
        Name(one) for one in (*_gaps(base), *(f"{row}.{metric}" for row in rows for metric in WATCHED_PRESET))
    ]
    return [one for one in names if one not in asked.named and _usable(_look_up(base, one))]


def _gaps(base: Summary) -> list[str]:
    """The watched numbers of the gaps; the total where there is no drift 1, of which it is the rest."""
    first = "" if _usable(find(base, "k3")) else "total."
    return [f"{drift}{metric}" for drift in (first, "drift2.") for metric in WATCHED_GAP]


def _rows(base: Summary, asked: Against) -> list[str]:
    """The presets asked for, each once; `all` are those of the baseline."""
    every = [base.presets if plain(row) == ALL else [row] for row in asked.presets]
    return list(dict.fromkeys(row for rows in every for row in rows))


def _usable(number: Found) -> bool:
    return isinstance(number, Number) and number.value is not None and not doubted(number)


def _absent(base: Summary, asked: Against) -> list[GateVerdict]:
    """Presets to be compared that the baseline does not have."""
    lacking = [row for row in _rows(base, asked) if not asked.only and preset(base, row) is None]
    return [
        _verdict(Name(f"{row}.{WATCHED_PRESET[0]}"), asked, passed=None, reason=_no_preset(base, asked, row))
        for row in lacking
    ]


def uncompared(now: Summary, base: Summary, asked: Against) -> str:
    """What a reader should know was left out; empty where nothing was."""
    if asked.only:
        return ""
    doubtful = [one for one in _gaps(base) if isinstance(found := find(base, one), Number) and doubted(found)]
    parts = [f"{', '.join(doubtful)}: unreliable in {asked.label}"] if doubtful else []
    named = {id(preset(base, row)) for row in _rows(base, asked)}
    rows = [row for row, result in base.presets.items() if id(result) not in named]
    parts += [f"its presets ({_few(rows)}): name them with --presets"] if rows else []
    return f"Not compared: {'; '.join(parts)}." if parts else ""


def _few(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _look_up(summary: Summary, asked: Name) -> Found:
    if not asked.over:
        return find(summary, asked.number)
    listed = series(summary, asked.number, Steps())
    picked = listed if isinstance(listed, str) else pick(listed, asked.over)
    return picked if isinstance(picked, str) else picked[0]


# ---------------------------------------------------------------- one comparison


def _compare(now: Summary, base: Summary, one: Name, asked: Against) -> GateVerdict:
    here, there = _look_up(now, one), _look_up(base, one)
    why = (
        (here if isinstance(here, str) else "")
        or _incomparable(now, base, one, asked)
        or _labelled(asked, _silence(there))
        or _silence(here)
    )
    if isinstance(here, str) or isinstance(there, str):
        return _verdict(one, asked, passed=None, reason=why)
    if why:
        return _verdict(one, asked, here, there, passed=None, reason=why)
    return _judged(one, asked, here, there, way(one.number))


def _silence(number: Found) -> str:
    """Why a number cannot be compared; empty where it can."""
    if isinstance(number, str):
        return number
    return silent(number) or ("the value overflows float64" if number.value is None else "")


def _labelled(asked: Against, why: str) -> str:
    return f"{asked.label}: {why}" if why else ""


def _incomparable(now: Summary, base: Summary, one: Name, asked: Against) -> str:
    """Why two numbers of one name are not the same thing."""
    ours, theirs = (_row(summary, one.number) for summary in (now, base))
    named = one.number.rpartition(".")[0]
    if ours is None:
        return ""
    if theirs is None:
        return _no_preset(base, asked, named)
    if (ours.method, ours.policy, ours.loss) == (theirs.method, theirs.policy, theirs.loss):
        return ""
    return f"{named} is another method in {asked.label}: {theirs.method} there, {ours.method} here"


def _no_preset(base: Summary, asked: Against, named: str) -> str:
    has = f"it has {_few(list(base.presets), 8)}" if base.presets else "it has none"
    return f"{asked.label} has no preset {named}; {has}"


def _row(summary: Summary, number: str) -> PresetResult | None:
    key = preset_of(summary, number)
    return summary.presets[key] if key else None


def way(number: str) -> Worse:
    """Which way a number is worse."""
    prefix, _, metric = number.rpartition(".")
    return (GAP if f"{prefix}." in DRIFTS or not prefix else PRESET).get(metric, EITHER)


def _judged(one: Name, asked: Against, here: Number, there: Number, worse: Worse) -> GateVerdict:
    """By the difference in the worse direction; for `either`, by the difference both ways."""
    ours, theirs = (_bad(number, worse) for number in (here, there))
    change = difference(ours, theirs)
    allowed = asked.tolerances.get(one, asked.default).of(
        theirs.value or 0.0
    )  # of a distance, where one counts
    rulings = [rule(change, "max", allowed, asked.judge)]
    if worse.sign == "either":
        rulings.append(rule(change, "min", -allowed, asked.judge))
    decided = min(rulings, key=lambda one: (one.passed is True, not one.open))
    return _verdict(
        one,
        asked,
        here,
        there,
        **_bound(worse, there.value or 0.0, allowed),
        passed=decided.passed,
        open=decided.open,
        judged_on=decided.on,
        reason=_why(worse, change, allowed, decided, here),
    )


def _bad(number: Number, worse: Worse) -> Number:
    """The number so that higher is worse; a distance from a target has the interval of distances."""
    assert number.value is not None
    low, high = number.interval or (number.value, number.value)
    if worse.sign == "lower":
        made = (-number.value, (-high, -low))
    elif worse.sign == "away":
        ends = sorted((abs(low - worse.target), abs(high - worse.target)))
        made = (abs(number.value - worse.target), (0.0 if low <= worse.target <= high else ends[0], ends[1]))
    else:
        made = (number.value, (low, high))
    return Number(value=made[0], interval=made[1] if number.interval else None)


def difference(one: Number, other: Number) -> Number:
    """`one` less `other`, of independent runs; without an interval where either has none.

    Each end is as far from the difference as the two ends that make it are from their values, in quadrature.
    """
    assert one.value is not None
    assert other.value is not None
    gap = one.value - other.value
    if one.interval is None or other.interval is None:
        return Number(value=gap)
    below = math.hypot(one.value - one.interval[0], other.interval[1] - other.value)
    above = math.hypot(one.interval[1] - one.value, other.value - other.interval[0])
    return Number(value=gap, interval=(gap - below, gap + above))


def _bound(worse: Worse, base: float, allowed: float) -> dict[str, Any]:
    """What the value itself is held against."""
    if worse.sign == "away":
        return {"bound": "within", "centre": worse.target, "limit": abs(base - worse.target) + allowed}
    if worse.sign == "either":
        return {"bound": "within", "centre": base, "limit": allowed}
    if worse.sign == "lower":
        return {"bound": "min", "limit": base - allowed}
    return {"bound": "max", "limit": base + allowed}


def _why(worse: Worse, change: Number, allowed: float, ruling: Ruling, here: Number) -> str:
    """`worse by 0.01 [0.005, 0.015], 0.002 allowed; …`."""
    better = (change.value or 0.0) < 0 and worse.sign != "either"
    kind = "changed" if worse.sign == "either" else "better" if better else "worse"
    size, right = apart(-(change.value or 0.0) if better else change.value or 0.0, allowed)
    beyond = "the whole 95% interval of the difference lies beyond that"
    parts = (
        f"{kind} by {_with_interval(size, change, better)}, {right} allowed",
        beyond if ruling.passed is False and ruling.on == "interval" else "",
        "no interval" if change.interval is None else "",
        here.note or "",
    )
    return "; ".join(part for part in parts if part)


def _with_interval(size: str, change: Number, turned: bool) -> str:
    if change.interval is None:
        return size
    low, high = change.interval
    ends = (-high, -low) if turned else (low, high)
    return f"{size} [{ends[0]:.3g}, {ends[1]:.3g}]"


def _verdict(
    one: Name, asked: Against, here: Number | None = None, there: Number | None = None, **more: Any
) -> GateVerdict:
    given: dict[str, Any] = {"bound": "max", "limit": 0.0, **more}
    earlier = shown(there or Number())
    return GateVerdict(
        name=str(one),
        level=asked.level,
        source=asked.label,
        tolerance=str(asked.tolerances.get(one, asked.default)),
        baseline=earlier["value"],
        baseline_interval=earlier["interval"],
        **shown(here or Number()),
        **given,
    )
