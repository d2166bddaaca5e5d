"""The verdict on one number: against a limit, by its interval or by its value.

whole interval within the bound      passed
whole interval beyond it             failed
limit inside the interval            passed, open: no evidence of a failure
no interval                          the value alone; on the bound passes
a value that overflows               its log10, where there is no interval
NaN, unknown, unreliable             could not say
unreliable, but certainly beyond it  failed (see `HIDDEN`)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from offpol_diag.gate.bounds import Kind, joined
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, say_limit, told_apart, written

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


class Ruling(NamedTuple):
    """The verdict on one number: `on` says whether the interval or the value decided."""

    passed: bool | None
    reason: str
    open: bool = False
    on: Literal["interval", "value", ""] = ""


def rule(number: Number, kind: Kind, limit: float, hidden: bool = False) -> Ruling:
    """Check a number against a limit; an unreliable one can fail only if what is `hidden` lies beyond it."""
    keeps = operator.le if kind == "max" else operator.ge
    near, far = (number.interval or (math.nan, math.nan))[:: 1 if kind == "max" else -1]
    has_interval = number.known and number.interval is not None
    beyond_it = has_interval and not keeps(near, limit)
    note, sound = number.note, replace(number, note=None)
    if why := silence(number):
        if silence(sound) or not (beyond_it and hidden):
            return Ruling(None, why)
        note = f"{note}, but what a heavy tail hides lies farther beyond the bound"
    value, ends = written(sound)
    if number.value is None:  # too large for a float: its log10 is compared
        held = keeps(number.log10 or 0.0, math.log10(limit) if limit > 0 else -math.inf)
        left, right = f"10^{number.log10:.4g}", say_limit(limit, number.unit)
    else:
        held = keeps(number.value, limit)
        left, right = told_apart(value, number.value, limit, number.unit)
    said = f"{left} {'' if held else 'is not '}{'≤' if kind == 'max' else '≥'} {right}"
    if not has_interval:
        return Ruling(held, joined(said, "no interval", note), on="value")
    if beyond_it:
        end = ends.strip("[]").split(", ")[0 if kind == "max" else -1] or value
        end = told_apart(end, near, limit, number.unit)[0]
        why = f"the whole 95% interval lies beyond it, from {end}"
        return Ruling(False, joined(said, why, note), on="interval")
    within = keeps(far, limit)
    return Ruling(True, joined(said, "" if within else OPEN, note), open=not within, on="interval")


def silence(number: Number) -> str:
    """Return the reason why a number cannot be judged; empty if it can."""
    if doubted(number):
        return number.note or ""
    if not number.known:
        return number.unknown or "there is no value"
    parts = (number.value, number.log10, *(number.interval or ()))
    odd = any(part is not None and math.isnan(part) for part in parts)
    return (number.unknown or "it is not a number") if odd else ""


def shown(number: Number, ruling: Ruling) -> dict[str, Any]:
    """Return the fields of a verdict that hold number and ruling; None for infinite and NaN values."""
    value, log10 = (x if x is not None and math.isfinite(x) else None for x in (number.value, number.log10))
    ends = number.interval if number.interval and all(map(math.isfinite, number.interval)) else None
    of = {"passed": ruling.passed, "open": ruling.open, "judged_on": ruling.on}
    return {"value": value, "interval": ends, "log10": log10, "unit": number.unit} | of
