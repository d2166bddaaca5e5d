"""Format numbers for sentences and tables, with as many digits as their intervals support."""

from __future__ import annotations

import math
from typing import NamedTuple

from offpol_diag.summary import Number

FRACTIONS = frozenset({"fraction", "share", "probability"})
"""Units written as a percentage."""

_PLAIN = (1e-2, 1e5)
_PLAIN_PERCENT = 1e-4
_DIGITS = 4
_DECIMALS_MAX = 9
_LEAST_POWER, _MOST = -307, 1e300
"""Bounds that keep powers of ten and percentages within float64, since files may hold any number."""
_ROUND_OFF = 1e-9
"""Rounding tolerance in decades: a half width of 9.999…e-5 counts as 1e-4."""


class Written(NamedTuple):
    """A formatted number: value and interval (may be empty), separate so that tables can style them."""

    value: str
    interval: str


def written(number: Number) -> Written:
    """Format a value and its interval: `2.03e-3` and `[1.9, 2.2]e-3`.

    The interval is rounded to the leading digit of its half width, the value to one digit more. An interval
    without width is not written. A number that its note calls unreliable stands behind that word, without
    the interval, which would promise too much.
    """
    if number.value is None:
        return Written(_absent(number), "")
    plain = _written(number, number.value)
    return Written(f"unreliable: {plain.value}", "") if doubted(number) else plain


def doubted(number: Number) -> bool:
    """Return whether the number is unreliable because of heavy-tailed weights."""
    return number.note is not None and number.note.startswith("unreliable")


def _written(number: Number, found: float) -> Written:
    low, high = number.interval or (found, found)
    share = number.unit in FRACTIONS and max(abs(found), abs(low), abs(high)) < _MOST
    scale, sign = (100.0, "%") if share else (1.0, "")
    if low == high:
        return Written(_alone(found * scale, sign), "")
    return _between(found * scale, low * scale, high * scale, sign)


def say(number: Number) -> str:
    """Format a number for a sentence."""
    return " ".join(part for part in written(number) if part)


def say_value(value: float | None, unit: str = "") -> str:
    """Format a value without interval for a sentence."""
    return say(Number(value=value, unit=unit))


def count(value: int) -> str:
    """Format an integer with thousands separators: 1,234,567."""
    return f"{value:,}"


def counted(value: int, noun: str) -> str:
    """Format a count with its noun, plural in -s: `1 token`, `2,608 tokens`."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def size(number_of_bytes: int) -> str:
    """Format bytes in the largest unit that keeps the number at 1 or more: 512 MiB."""
    power = min(int(math.log2(max(number_of_bytes, 1)) // 10), 4)
    return f"{number_of_bytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _absent(number: Number) -> str:
    if number.log10 is not None:
        return f"10^{number.log10:.4g}"
    return f"cannot be known: {number.unknown}" if number.unknown else "cannot be known"


def _alone(value: float, sign: str = "") -> str:
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}{sign}"
    power = _power(value, sign)
    return f"{value / 10.0**power:.{_DIGITS}g}{_exponent(power)}{sign}"


def _between(value: float, low: float, high: float, sign: str) -> Written:
    half = high / 2 - low / 2
    power = _power(max(abs(value), half), sign)
    unit = 10.0**power
    width = half / unit
    if not width > 0:
        return Written(_alone(value, sign), "")
    most = _most_places(value / unit) if sign else _DECIMALS_MAX
    places = min(max(0, -math.floor(math.log10(width) + _ROUND_OFF)), most)
    ends = ", ".join(_fixed(end / unit, places) for end in (low, high))
    more = min(places + (width < 10), most)
    tail = _exponent(power) + sign
    found = _fixed(value / unit, more)
    alone = f"0{sign}" if power and not found.strip("0.") else f"{found}{tail}"
    return Written(alone, f"[{ends}]{tail}")


def _most_places(value: float) -> int:
    """Return the maximum decimals of a percentage; four digits are enough for any decision on a share."""
    return max(0, _DIGITS - 1 - math.floor(math.log10(abs(value)))) if value else _DECIMALS_MAX


def _fixed(value: float, places: int) -> str:
    return f"{round(value, places) + 0.0:,.{places}f}"


def _power(value: float, sign: str = "") -> int:
    """Return the power of ten to factor out; 0 where a plain decimal reads better: percentages to 0.0001%."""
    if value == 0 or (_PLAIN_PERCENT if sign else _PLAIN[0]) <= abs(value) < _PLAIN[1]:
        return 0
    return max(math.floor(math.log10(abs(value))), _LEAST_POWER)


def _exponent(power: int) -> str:
    return f"e{power}" if power else ""
