"""The gate: numbers and bounds → verdicts. Pure; the truth table is `tests/test_gate.py`.

What the evidence says of one number stands in `judging.py`; what a name means in `bounds.py`; an earlier
result as the bound in `baseline.py`; a file of bounds in `file.py`.

The whole: failed if any bound failed, else could not say if any bound could not be judged, else passed.
Bounds of level warn take no part in that, unless nothing at all could be judged.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Literal

from offpol_diag.gate.bounds import EVERY, GAPS, Bound, Kind, Level, Steps, name, parse, presets_in, span
from offpol_diag.gate.find import find
from offpol_diag.gate.judging import Ruling, apart, rule, shown
from offpol_diag.gate.steps import Series, any_step, pick, series, size
from offpol_diag.summary import GateVerdict, Number, Summary

__all__ = [
    "GAPS",
    "Bound",
    "Kind",
    "Level",
    "Outcome",
    "Steps",
    "apart",
    "beyond",
    "judge",
    "name",
    "outcome",
    "parse",
    "presets_named",
    "span",
]

Outcome = Literal["passed", "failed", "could not say"]

MOST_NEAR = 5
"""Bounds that could not be judged, after which names like theirs are no longer looked for: that is slow."""
MOST_NAMED = 5
"""Steps that a reason lists by name."""


def presets_named(bounds: Iterable[Bound], known: Container[object]) -> tuple[str, ...]:
    """The presets that the bounds speak of, each once: the only ones that need computing.

    What stands before a dot and is neither `known` nor a policy gap is given back too, to be refused.
    """
    return presets_in((bound.name for bound in bounds), known)


def judge(summary: Summary, bounds: Sequence[Bound]) -> tuple[GateVerdict, ...]:
    """One verdict per bound, in their order; none for a part of a bound into which no step falls."""
    idle = {bound for bound in bounds if _idle(summary, bound)}
    judged = {_whole(bound) for bound in bounds if bound not in idle}
    asked = [bound for bound in bounds if bound not in idle or _whole(bound) not in judged]
    made: list[GateVerdict] = []
    silent = 0
    for bound in asked:
        made.append(_verdict(summary, bound, near=silent < MOST_NEAR))
        silent += made[-1].passed is None
    return tuple(made)


def outcome(verdicts: Iterable[GateVerdict]) -> Outcome:
    """A failure decides; then a bound that could not be judged; nothing judged at all is not a pass."""
    every = list(verdicts)
    said = [verdict.passed for verdict in every if verdict.level == "error"]
    if False in said:
        return "failed"
    judged = any(verdict.passed is not None for verdict in every)
    return "could not say" if None in said or not judged else "passed"


def beyond(verdict: GateVerdict) -> bool:
    """Whether the plain value lies on the wrong side of the bound, whatever its interval allows."""
    value, limit = verdict.value, verdict.limit
    if value is None:
        return False
    if verdict.bound == "within":
        return abs(value - (verdict.centre or 0.0)) > limit
    return value > limit if verdict.bound == "max" else value < limit


def _whole(bound: Bound) -> tuple[object, ...]:
    """What the parts of one bound share."""
    return bound.source, bound.asked, bound.kind


def _idle(summary: Summary, bound: Bound) -> bool:
    return "step" in summary.by and not any_step(summary, bound.steps)


# ---------------------------------------------------------------- one bound


def _verdict(summary: Summary, bound: Bound, near: bool) -> GateVerdict:
    if not bound.over:
        found = find(summary, bound.name, near)
        return said(bound, found) if isinstance(found, str) else _of_number(bound, found)
    listed = series(summary, bound.name, bound.steps, near)
    if isinstance(listed, str):
        return said(bound, listed)
    if bound.over == EVERY:
        return _of_every_step(bound, listed)
    picked = pick(listed, bound.over)
    return said(bound, picked) if isinstance(picked, str) else _of_number(bound, *picked)


def said(bound: Bound, why: str) -> GateVerdict:
    """That nothing can be said, and why."""
    return GateVerdict(**_asked(bound), value=None, passed=None, reason=why)


def _of_number(bound: Bound, number: Number, where: str = "") -> GateVerdict:
    return _ruled(bound, number, rule(number, bound.kind, bound.limit, bound.judge, bound.name), where)


def _ruled(bound: Bound, number: Number, ruling: Ruling, where: str = "", reason: str = "") -> GateVerdict:
    return GateVerdict(
        **_asked(bound),
        **shown(number),
        passed=ruling.passed,
        open=ruling.open,
        judged_on=ruling.on,
        reason=reason or (f"{where}: {ruling.reason}" if where else ruling.reason),
        where=where,
    )


def _asked(bound: Bound) -> dict[str, Any]:
    return {
        "name": str(bound.asked),
        "bound": bound.kind,
        "limit": bound.limit,
        "level": bound.level,
        "steps": str(bound.steps),
        "source": bound.source,
        "note": bound.note,
    }


# ---------------------------------------------------------------- every step


def _of_every_step(bound: Bound, listed: Series) -> GateVerdict:
    """The worst step decides; a failure is certain whatever the other steps would have said."""
    rulings = [rule(number, bound.kind, bound.limit, bound.judge, bound.name) for number in listed.numbers]
    failed = [at for at, ruling in enumerate(rulings) if ruling.passed is False]
    silent = [at for at, ruling in enumerate(rulings) if ruling.passed is None]
    at = _worst(bound, listed, failed) if failed else silent[0] if silent else _worst(bound, listed)
    where, ruling, number = f"step {listed.keys[at]}", rulings[at], listed.numbers[at]
    if not failed and not silent and listed.missing:
        return said(bound, f"{listed.missing}; gate the dump itself")
    if not failed and not silent:
        opened = [key for key, one in zip(listed.keys, rulings, strict=True) if one.open]
        ruling = Ruling(True, _worst_said(where, ruling, len(listed.keys), opened), bool(opened), ruling.on)
        return _ruled(bound, number, ruling, where, ruling.reason)
    those, verb = (failed, "fail") if failed else (silent, "cannot be judged")
    count = f"{len(those)} of {len(listed.keys)} steps {verb}: {_listed([listed.keys[i] for i in those])}"
    lead = f"worst at {where}" if failed else f"at {where}"
    return _ruled(bound, number, ruling, where, f"{lead}: {ruling.reason}; {count}")


def _worst(bound: Bound, listed: Series, among: Sequence[int] = ()) -> int:
    sign = 1.0 if bound.kind == "max" else -1.0
    return max(among or range(len(listed.keys)), key=lambda at: sign * size(listed.numbers[at]))


def _worst_said(where: str, ruling: Ruling, steps: int, opened: Sequence[str]) -> str:
    straddling = (
        f"; the intervals of {len(opened)} of {steps} steps hold values on both sides: {_listed(opened)}"
        if opened and not (len(opened) == 1 and ruling.open)
        else ""
    )
    return f"worst at {where}: {ruling.reason}{straddling}"


def _listed(keys: Sequence[str]) -> str:
    more = len(keys) - MOST_NAMED
    return ", ".join(keys[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
