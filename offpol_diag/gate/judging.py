"""One number against one limit: what the evidence says.

    whole interval within the bound      passed
    whole interval beyond it             failed
    values on both sides                 passed, open: no evidence of a failure
    no interval, or `point`              the value alone; on the bound passes
    a value that overflows               its log10 alone
    NaN, unknown, unreliable             could not say
    unreliable, but beyond it for sure   failed

What could not be said never passes. For sure is what a heavy tail can only have hidden: see `HIDDEN`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from offpol_diag.gate.bounds import Judge, Kind
from offpol_diag.numerals import doubted
from offpol_diag.summary import Number

SIGNS = {"max": "≤", "min": "≥"}
HIDDEN: Mapping[str, Kind] = {
    "mean_ratio": "max",
    "chi2_token": "max",
    "chi2_sequence": "max",
    "ess_tokens": "min",
    "ess_sequences": "min",
}
"""Number → the kind of bound that it breaks for sure where its whole interval lies beyond it, however heavy
the tail of the weights. The rarest and largest weights are those that a sample lacks: with them a mean of r
or r² would be larger, and the effective sample size smaller."""
OPEN = "the 95% interval holds values on both sides of the bound"


@dataclass(frozen=True)
class Ruling:
    """What is said of a number.

    Attributes:
        passed: None where nothing can be said.
        reason: why.
        open: the interval holds values on both sides.
        on: what decided.
    """

    passed: bool | None
    reason: str
    open: bool = False
    on: Literal["interval", "value", ""] = ""


def rule(number: Number, kind: Kind, limit: float, judge: Judge = "interval", name: str = "") -> Ruling:
    """Hold a number against a limit; of an unreliable one its name says what is certain all the same."""
    why = silent(number)
    if why:
        return _despite_the_tail(number, kind, limit, name) or Ruling(None, why)
    if judge == "interval" and number.value is not None and number.interval is not None:
        return _by_interval(number.value, number.interval, kind, limit, number.note)
    return _by_value(number, kind, limit, judge)


def silent(number: Number) -> str:
    """Why nothing can be said; empty where something can."""
    if doubted(number):
        return number.note or "unreliable"
    if number.value is None and number.log10 is None:
        return number.unknown or "there is no value"
    parts = (number.value, number.log10, *(number.interval or ()))
    odd = any(part is not None and math.isnan(part) for part in parts)
    return (number.unknown or "it is not a number") if odd else ""


def _despite_the_tail(number: Number, kind: Kind, limit: float, name: str) -> Ruling | None:
    """A failure that what the tail hides can only make worse."""
    sound = number.model_copy(update={"note": None})
    certain = HIDDEN.get(name.rpartition(".")[2]) == kind
    if not doubted(number) or not certain or sound.value is None or sound.interval is None or silent(sound):
        return None
    note = f"{number.note}, but what a heavy tail hides lies farther beyond the bound"
    ruling = _by_interval(sound.value, sound.interval, kind, limit, note)
    return ruling if ruling.passed is False else None


def _by_interval(
    value: float, interval: tuple[float, float], kind: Kind, limit: float, note: str | None
) -> Ruling:
    low, high = interval
    within = high <= limit if kind == "max" else low >= limit
    beyond = low > limit if kind == "max" else high < limit
    said = compared(value, kind, limit)
    if beyond:
        nearest = low if kind == "max" else high
        why = f"the whole 95% interval lies beyond it, from {apart(nearest, limit)[0]}"
        return Ruling(False, _joined(said, why, note), on="interval")
    remark = "" if within else OPEN
    return Ruling(True, _joined(said, remark, note), open=not within, on="interval")


def _by_value(number: Number, kind: Kind, limit: float, judge: Judge) -> Ruling:
    held = holds(number, kind, limit)
    value = f"10^{number.log10:.4g}" if number.value is None else None
    said = compared(number.value or 0.0, kind, limit, value, held)
    remark = _straddles(number, limit) if judge == "point" else "no interval"
    return Ruling(held, _joined(said, remark, number.note), on="value")


def _straddles(number: Number, limit: float) -> str:
    low, high = number.interval or (limit, limit)
    return OPEN if low <= limit <= high and low < high else ""


def holds(number: Number, kind: Kind, limit: float) -> bool:
    """Whether the plain value keeps to the limit; of one too large for a float, its log10."""
    value = number.value
    if value is None:
        value, limit = number.log10 or 0.0, math.log10(limit) if limit > 0 else -math.inf
    return value <= limit if kind == "max" else value >= limit


def compared(
    value: float, kind: Kind, limit: float, written: str | None = None, held: bool | None = None
) -> str:
    """`0.0125 is not ≤ 0.002`."""
    keeps = (value <= limit if kind == "max" else value >= limit) if held is None else held
    left, right = apart(value, limit) if written is None else (written, f"{limit:.4g}")
    return f"{left} {SIGNS[kind]} {right}" if keeps else f"{left} is not {SIGNS[kind]} {right}"


def apart(value: float, limit: float) -> tuple[str, str]:
    """Both numbers with as many digits as show that they differ; four at least."""
    for digits in range(4, 18):
        pair = (f"{value:.{digits}g}", f"{limit:.{digits}g}")
        if pair[0] != pair[1] or value == limit:
            return pair
    return repr(value), repr(limit)


def _joined(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part)


def shown(number: Number) -> dict[str, Any]:
    """What a verdict keeps of the number it is about."""
    low, high = number.interval or (math.nan, math.nan)
    return {
        "value": _finite(number.value),
        "interval": (low, high) if math.isfinite(low) and math.isfinite(high) else None,
        "log10": _finite(number.log10),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
