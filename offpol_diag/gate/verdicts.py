"""Check numbers against limits.

One number and one limit:

    whole interval within the bound      passed
    whole interval beyond it             failed
    limit inside the interval            passed, open: no evidence of a failure
    no interval, or `point`              the value alone; on the bound passes
    a value that overflows               its log10 alone
    NaN, unknown, unreliable             could not say
    unreliable, but certainly beyond it  failed (see `HIDDEN`)

All bounds together: failed if any failed, else could not say if any could not be judged, else passed. Bounds
of level warn do not count, except that some bound must have been judged for the gate to pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from offpol_diag.gate.bounds import EVERY, Bound, Judge, Kind
from offpol_diag.gate.numbers import Series, any_step, look_up, series, size
from offpol_diag.numerals import doubted
from offpol_diag.summary import GateVerdict, Number, Summary

Outcome = Literal["passed", "failed", "could not say"]

MOST_NEAR = 5
"""After this many bounds that could not be judged, similar names are no longer suggested, which is slow."""
MOST_NAMED = 5
"""Most steps that a reason lists."""
SIGNS = {"max": "≤", "min": "≥"}
HIDDEN: Mapping[str, Kind] = {
    "mean_ratio": "max",
    "chi2_token": "max",
    "chi2_sequence": "max",
    "ess_tokens": "min",
    "ess_sequences": "min",
}
"""Number → the kind of bound that it certainly breaks if its whole interval lies beyond the limit, however
heavy the tail of the weights: a sample misses the rarest, largest weights, which would make a mean of r or r²
larger and the effective sample size smaller."""
OPEN = "the 95% interval holds values on both sides of the bound"

# ---------------------------------------------------------------- one number


@dataclass(frozen=True)
class Ruling:
    """The verdict on one number.

    Attributes:
        passed: None if the number could not be judged.
        reason: an explanation for the user.
        open: whether the limit lies inside the interval.
        on: whether the interval or the value decided; empty if neither.
    """

    passed: bool | None
    reason: str
    open: bool = False
    on: Literal["interval", "value", ""] = ""


def rule(number: Number, kind: Kind, limit: float, judge: Judge = "interval", name: str = "") -> Ruling:
    """Check a number against a limit; an unreliable number can fail only if `HIDDEN` lists its `name`."""
    why = silent(number)
    if why:
        sound = number.model_copy(update={"note": None})
        if doubted(number) and HIDDEN.get(name.rpartition(".")[2]) == kind and not silent(sound):
            note = f"{number.note}, but what a heavy tail hides lies farther beyond the bound"
            ruling = _by_interval(sound, kind, limit, note)
            if ruling is not None and ruling.passed is False:
                return ruling
        return Ruling(None, why)
    by_interval = _by_interval(number, kind, limit, number.note) if judge == "interval" else None
    return by_interval or _by_value(number, kind, limit, judge)


def silent(number: Number) -> str:
    """Return the reason why a number cannot be judged; empty if it can."""
    if doubted(number):
        return number.note or "unreliable"
    if number.value is None and number.log10 is None:
        return number.unknown or "there is no value"
    parts = (number.value, number.log10, *(number.interval or ()))
    odd = any(part is not None and math.isnan(part) for part in parts)
    return (number.unknown or "it is not a number") if odd else ""


def _by_interval(number: Number, kind: Kind, limit: float, note: str | None) -> Ruling | None:
    """Check the interval against the limit; None if there is no interval."""
    if number.value is None or number.interval is None:
        return None
    near, far = number.interval if kind == "max" else number.interval[::-1]
    said = _compared(number.value, kind, limit)
    if not _keeps(near, kind, limit):
        why = f"the whole 95% interval lies beyond it, from {apart(near, limit)[0]}"
        return Ruling(False, joined(said, why, note), on="interval")
    within = _keeps(far, kind, limit)
    return Ruling(True, joined(said, "" if within else OPEN, note), open=not within, on="interval")


def _by_value(number: Number, kind: Kind, limit: float, judge: Judge) -> Ruling:
    if number.value is None:  # too large for a float: its log10 is compared
        held = _keeps(number.log10 or 0.0, kind, math.log10(limit) if limit > 0 else -math.inf)
        sign = SIGNS[kind] if held else f"is not {SIGNS[kind]}"
        said = f"10^{number.log10:.4g} {sign} {limit:.4g}"
    else:
        held, said = _keeps(number.value, kind, limit), _compared(number.value, kind, limit)
    low, high = number.interval or (limit, limit)
    straddles = OPEN if low <= limit <= high and low < high else ""
    return Ruling(
        held, joined(said, straddles if judge == "point" else "no interval", number.note), on="value"
    )


def _keeps(value: float, kind: Kind, limit: float) -> bool:
    return value <= limit if kind == "max" else value >= limit


def _compared(value: float, kind: Kind, limit: float) -> str:
    """Return the comparison in words: `0.0125 is not ≤ 0.002`."""
    left, right = apart(value, limit)
    return f"{left} {'' if _keeps(value, kind, limit) else 'is not '}{SIGNS[kind]} {right}"


def apart(value: float, limit: float) -> tuple[str, str]:
    """Format two numbers with just enough digits to tell them apart; at least four."""
    for digits in range(4, 18):
        pair = (f"{value:.{digits}g}", f"{limit:.{digits}g}")
        if pair[0] != pair[1] or value == limit:
            return pair
    return repr(value), repr(limit)


def joined(*parts: str | None) -> str:
    """Join the non-empty parts of a reason."""
    return "; ".join(part for part in parts if part)


def shown(number: Number) -> dict[str, Any]:
    """Return the fields of a verdict that hold its number; None for infinite and NaN values."""
    low, high = number.interval or (math.nan, math.nan)
    return {
        "value": _finite(number.value),
        "interval": (low, high) if math.isfinite(low) and math.isfinite(high) else None,
        "log10": _finite(number.log10),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


# ---------------------------------------------------------------- bounds


def judge(summary: Summary, bounds: Sequence[Bound]) -> tuple[GateVerdict, ...]:
    """Return the verdicts on bounds, in order; parts of a split bound without any step are skipped."""
    by_step = "step" in summary.by
    idle = {bound for bound in bounds if by_step and not any_step(summary, bound.steps)}
    judged = {_whole(bound) for bound in bounds if bound not in idle}
    made: list[GateVerdict] = []
    unsaid = 0
    for bound in bounds:
        if bound not in idle or _whole(bound) not in judged:
            made.append(_verdict(summary, bound, near=unsaid < MOST_NEAR))
            unsaid += made[-1].passed is None
    return tuple(made)


def outcome(verdicts: Iterable[GateVerdict]) -> Outcome:
    """Combine verdicts: any failure fails; else, if one or all were not judged, "could not say"."""
    every = list(verdicts)
    said = [verdict.passed for verdict in every if verdict.level == "error"]
    if False in said:
        return "failed"
    judged = any(verdict.passed is not None for verdict in every)
    return "could not say" if None in said or not judged else "passed"


def beyond(verdict: GateVerdict) -> bool:
    """Return whether the plain value lies on the wrong side of the bound, whatever its interval."""
    value, limit = verdict.value, verdict.limit
    if value is None:
        return False
    if verdict.bound == "within":
        return abs(value - (verdict.centre or 0.0)) > limit
    return not _keeps(value, verdict.bound, limit)


def _whole(bound: Bound) -> tuple[object, ...]:
    """Return a key shared by the parts of one bound, which apply at different steps."""
    return bound.source, bound.full_name, bound.kind


def _verdict(summary: Summary, bound: Bound, near: bool) -> GateVerdict:
    if bound.over == EVERY:
        listed = series(summary, bound.name, bound.steps, near)
        return _unsaid(bound, listed) if isinstance(listed, str) else _of_every_step(bound, listed)
    found, where = look_up(summary, bound.full_name, bound.steps, near)
    if isinstance(found, str):
        return _unsaid(bound, found)
    ruling = _rule(bound, found)
    reason = f"{where}: {ruling.reason}" if where else ruling.reason
    return _said(bound, found, ruling, where, reason)


def _rule(bound: Bound, number: Number) -> Ruling:
    return rule(number, bound.kind, bound.limit, bound.judge, bound.name)


def _unsaid(bound: Bound, why: str) -> GateVerdict:
    """Build the verdict that a bound could not be judged, with the reason."""
    return _said(bound, Number(), Ruling(None, why), "", why)


def _said(bound: Bound, number: Number, ruling: Ruling, where: str, reason: str) -> GateVerdict:
    return GateVerdict(
        name=str(bound.full_name),
        bound=bound.kind,
        limit=bound.limit,
        level=bound.level,
        steps=str(bound.steps),
        source=bound.source,
        note=bound.note,
        **shown(number),
        passed=ruling.passed,
        open=ruling.open,
        judged_on=ruling.on,
        reason=reason,
        where=where,
    )


def _of_every_step(bound: Bound, listed: Series) -> GateVerdict:
    """Judge a bound on every step by the worst one; one failed step is enough to fail."""
    rulings = [_rule(bound, number) for number in listed.numbers]
    steps = range(len(rulings))
    failed = [at for at in steps if rulings[at].passed is False]
    unsaid = [at for at in steps if rulings[at].passed is None]
    if listed.missing and not failed and not unsaid:
        return _unsaid(bound, f"{listed.missing}; gate the dump itself")
    sign = 1.0 if bound.kind == "max" else -1.0
    worst = max(failed or steps, key=lambda at: sign * size(listed.numbers[at]))
    at = unsaid[0] if unsaid and not failed else worst
    ruling, where = rulings[at], f"step {listed.keys[at]}"
    if failed or unsaid:
        those, verb = (failed, "fail") if failed else (unsaid, "cannot be judged")
        more = f"{len(those)} of {len(steps)} steps {verb}: {_listed(listed, those)}"
    else:
        opened = [at for at in steps if rulings[at].open]
        alone = len(opened) == 1 and ruling.open
        ruling = Ruling(True, ruling.reason, bool(opened), ruling.on)
        more = f"the intervals of {len(opened)} of {len(steps)} steps hold values on both sides: "
        more = more + _listed(listed, opened) if opened and not alone else ""
    lead = "at" if unsaid and not failed else "worst at"
    return _said(bound, listed.numbers[at], ruling, where, joined(f"{lead} {where}: {ruling.reason}", more))


def _listed(listed: Series, those: Sequence[int]) -> str:
    more = len(those) - MOST_NAMED
    named = ", ".join(listed.keys[at] for at in those[:MOST_NAMED])
    return f"{named} and {more} more" if more > 0 else named
