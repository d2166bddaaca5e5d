"""Check numbers against limits.

One number and one limit:

    whole interval within the bound      passed
    whole interval beyond it             failed
    limit inside the interval            passed, open: no evidence of a failure
    no interval, or `point`              the value alone; on the bound passes
    a value that overflows               its log10, where there is no interval
    NaN, unknown, unreliable             could not say
    unreliable, but certainly beyond it  failed (see `HIDDEN`)

All bounds together: failed if any failed, else could not say if any could not be judged, else passed. Bounds
of level warn do not count, except that some bound must have been judged for the gate to pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from offpol_diag.gate.aliases import unlike
from offpol_diag.gate.bounds import EVERY, Bound, Judge, Kind
from offpol_diag.gate.numbers import Series, chosen_steps, look_up, series, size
from offpol_diag.numerals import FRACTIONS, doubted, say_value, written
from offpol_diag.summary import GateVerdict, Number, Summary

Outcome = Literal["passed", "failed", "could not say"]

MOST_NEAR = 5
"""After this many bounds that could not be judged, similar names are no longer suggested, which is slow."""
MOST_NAMED = 5
"""Most steps that a reason lists."""
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
    keeps = operator.le if kind == "max" else operator.ge
    near, far = (number.interval or (math.nan, math.nan))[:: 1 if kind == "max" else -1]
    has_interval = number.known and number.interval is not None
    beyond_it = has_interval and not keeps(near, limit)
    note, why = number.note, why_unjudged(number)
    if why:
        sound = number.model_copy(update={"note": None})
        if why_unjudged(sound) or not beyond_it or HIDDEN.get(name.rpartition(".")[2]) != kind:
            return Ruling(None, why)
        judge, note = "interval", f"{note}, but what a heavy tail hides lies farther beyond the bound"
    value, ends = written(number.model_copy(update={"note": None}))
    if number.value is None:  # too large for a float: its log10 is compared
        held = keeps(number.log10 or 0.0, math.log10(limit) if limit > 0 else -math.inf)
        left, right = f"10^{number.log10:.4g}", say_limit(limit, number.unit)
    else:
        held = keeps(number.value, limit)
        left, right = told_apart(value, number.value, limit, number.unit)
    said = f"{left} {'' if held else 'is not '}{'≤' if kind == 'max' else '≥'} {right}"
    if not has_interval:
        return Ruling(held, joined(said, "no interval" if judge == "interval" else "", note), on="value")
    if judge == "point":
        straddles = min(near, far) <= limit <= max(near, far) and near != far
        return Ruling(held, joined(said, OPEN if straddles else "", note), on="value")
    if beyond_it:
        end = ends.strip("[]").split(", ")[0 if kind == "max" else -1] or value
        end = told_apart(end, near, limit, number.unit)[0]
        why = f"the whole 95% interval lies beyond it, from {end}"
        return Ruling(False, joined(said, why, note), on="interval")
    within = keeps(far, limit)
    return Ruling(True, joined(said, "" if within else OPEN, note), open=not within, on="interval")


def why_unjudged(number: Number) -> str:
    """Return the reason why a number cannot be judged; empty if it can."""
    if doubted(number):
        return number.note or "unreliable"
    if number.value is None and number.log10 is None:
        return number.unknown or "there is no value"
    parts = (number.value, number.log10, *(number.interval or ()))
    odd = any(part is not None and math.isnan(part) for part in parts)
    return (number.unknown or "it is not a number") if odd else ""


def say_limit(limit: float, unit: str) -> str:
    """Format a bound as it was set: `99%` of a fraction; with all its digits where four would change it."""
    text, (scale, sign) = say_value(limit, unit), _scale(unit)
    return text if math.isclose(_read(text), limit * scale, rel_tol=1e-12) else f"{limit * scale:.12g}{sign}"


def told_apart(text: str, value: float, limit: float, unit: str) -> tuple[str, str]:
    """Return a formatted value and its bound, with more digits where these would look equal or swapped."""
    bound, (scale, sign) = say_limit(limit, unit), _scale(unit)
    one, other = _read(text), _read(bound)
    if value != limit and (one == other or (one > other) is not (value > limit)):
        one_, other_ = distinct_digits(value * scale, limit * scale)
        return one_ + sign, other_ + sign
    return (bound if value == limit else text), bound


def _scale(unit: str) -> tuple[float, str]:
    return (100.0, "%") if unit in FRACTIONS else (1.0, "")


def _read(text: str) -> float:
    try:
        return float(text.replace(",", "").rstrip("%"))
    except ValueError:
        return math.nan


def distinct_digits(value: float, limit: float) -> tuple[str, str]:
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
    value, log10 = (
        None if one is None or not math.isfinite(one) else one for one in (number.value, number.log10)
    )
    known = number.interval is not None and all(map(math.isfinite, number.interval))
    ends = number.interval if known else None
    return {"value": value, "interval": ends, "log10": log10, "unit": number.unit}


# ---------------------------------------------------------------- bounds


def judge(summary: Summary, bounds: Sequence[Bound]) -> tuple[GateVerdict, ...]:
    """Return the verdicts on bounds, in order; parts of a split bound without any step are skipped."""

    def whole(bound: Bound) -> tuple[object, ...]:  # shared by the parts of one bound, for different steps
        return bound.source, bound.full_name, bound.kind

    by_step = "step" in summary.by
    idle = {bound for bound in bounds if by_step and not chosen_steps(summary, bound.steps)}
    judged = {whole(bound) for bound in bounds if bound not in idle}
    made: list[GateVerdict] = []
    open_ones = 0
    for bound in (one for one in bounds if one not in idle or whole(one) not in judged):
        near = open_ones < MOST_NEAR
        found = series(summary, bound.name, bound.steps, near) if bound.over == EVERY else None
        if isinstance(found, str):
            made.append(_verdict(bound, found))
        elif found is not None:
            made.append(_of_every_step(bound, found))
        else:
            made.append(_of_one_number(bound, *look_up(summary, bound.full_name, bound.steps, near)))
        open_ones += made[-1].passed is None
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
    """Return whether the plain value lies on the wrong side of the bound, whatever its interval.

    A diagnosis that this dump cannot make lies there too.
    """
    value, limit = verdict.value, verdict.limit
    if verdict.bound == "diagnosis":
        return verdict.passed is False or verdict.open
    if value is None:
        return False
    if verdict.bound == "within":
        return abs(value - (verdict.centre or 0.0)) > limit
    return value > limit if verdict.bound == "max" else value < limit


def _of_one_number(bound: Bound, found: Number | str, where: str) -> GateVerdict:
    if isinstance(found, str):
        return _verdict(bound, found)
    ruling = rule(found, bound.kind, bound.limit, bound.judge, bound.name)
    return _verdict(bound, f"{where}: {ruling.reason}" if where else ruling.reason, found, ruling, where)


def _verdict(
    bound: Bound, reason: str, number: Number | None = None, ruling: Ruling | None = None, where: str = ""
) -> GateVerdict:
    """Build the verdict; without a ruling the bound could not be judged."""
    ruling = ruling or Ruling(None, reason)
    return GateVerdict(
        name=str(bound.full_name),
        said=bound.said,
        bound=bound.kind,
        limit=bound.limit,
        level=bound.level,
        steps=str(bound.steps),
        source=bound.source,
        note=bound.note,
        **shown(number or Number()),
        passed=ruling.passed,
        open=ruling.open,
        judged_on=ruling.on,
        reason=joined(reason, unlike(bound.said)),
        where=where,
    )


def _of_every_step(bound: Bound, listed: Series) -> GateVerdict:
    """Judge a bound on every step by the worst one; one failed step is enough to fail."""
    rulings = [rule(one, bound.kind, bound.limit, bound.judge, bound.name) for one in listed.numbers]
    steps = range(len(rulings))
    failed = [at for at in steps if rulings[at].passed is False]
    unsaid = [at for at in steps if rulings[at].passed is None]
    opened = [at for at in steps if rulings[at].open]

    def counted(those: Sequence[int], verb: str) -> str:
        named, more = ", ".join(listed.keys[at] for at in those[:MOST_NAMED]), len(those) - MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        return f"{len(those)} of {len(steps)} steps {verb}: {named}{rest}"

    if listed.missing and not failed and not unsaid:
        return _verdict(bound, f"{listed.missing}; gate the dump itself")
    sign = 1.0 if bound.kind == "max" else -1.0
    at = max(failed or steps, key=lambda at: sign * size(listed.numbers[at]))
    lead, more = "worst at", ""
    if failed:
        more = counted(failed, "fail")
    elif unsaid:
        at, lead, more = unsaid[0], "at", counted(unsaid, "cannot be judged")
    elif opened and opened != [at]:
        more = "the intervals of " + counted(opened, "hold values on both sides")
    ruling, where = rulings[at], f"step {listed.keys[at]}"
    reason = joined(f"{lead} {where}: {ruling.reason}", more)
    whole = ruling if failed or unsaid else replace(ruling, open=bool(opened))
    return _verdict(bound, reason, listed.numbers[at], whole, where)
