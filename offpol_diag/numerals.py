"""Format numbers for sentences and tables, with as many digits as their intervals support."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from offpol_diag.number import UNRELIABLE, Number

FRACTIONS = frozenset({"fraction", "share", "probability"})
"""Units written as a percentage."""

_PLAIN, _PLAIN_PERCENT = (1e-4, 1e6), (1e-3, 1e6)
"""Magnitudes that are written without a power of ten; of other numbers, and of percentages."""
_DIGITS, _EXACT, _WHOLE, _MOST_DIGITS = 2, 4, 4, 6
"""Significant digits of a measured number and of a bound; digits before the point that are always written;
most significant digits of a value and of the ends of its interval."""
_ROUNDING, _MOST = 1e-13, 1e300
"""Relative width of an interval that is rounding; bound that keeps percentages within float64."""
_NEAR_1, _MOST_PLACES = 0.05, {1.0: 4, 100.0: 2}
"""Distance from 1 below which it is written; what 1 is on a scale → the most decimals for that."""
_MINUS = re.compile(r"(?<![^\s\[(→±≤≥<>~·])-(?=\.?\d)")
"""A hyphen that is the sign of a number."""


class Formatted(NamedTuple):
    """A formatted number: value and interval (may be empty), separate so that tables can style them."""

    value: str
    interval: str


def formatted(number: Number) -> Formatted:
    """Format a value and its interval: `0.26` and `[0.19, 0.34]`, `94%` and `[92%, 95%]`.

    Two significant digits, or as many as the interval tells apart, up to six. An interval without width, or
    one as narrow as float64 rounds, is not written.
    A share is written 100% only where it is exactly 1: `99.7%`, and `>99.99%` beyond two decimals. A star
    marks a value that its note calls unreliable.
    """
    if number.value is None:
        return Formatted(_absent(number), "")
    value, (low, high) = number.value, number.interval or (number.value, number.value)
    share = number.unit in FRACTIONS and max(abs(value), abs(low), abs(high)) < _MOST
    scale, sign = (100.0, "%") if share else (1.0, "")
    mark = "*" if doubted(number) else ""
    exact = math.isclose(low, high, rel_tol=_ROUNDING)
    if exact and (value * scale).is_integer() and abs(value) < 1e12:
        return Formatted(f"{int(value * scale):,}{sign}{mark}", "")
    if exact:
        return Formatted(_plain(value * scale, _alone(value * scale, scale), sign) + mark, "")
    half = (high / 2 - low / 2) * scale
    wide = low < 0 < high
    found, *ends = (
        _plain(x * scale, _places(x * scale, half, wide, scale), sign) for x in (value, low, high)
    )
    return Formatted(found + mark, f"[{', '.join(ends)}]")


def minus(text: str) -> str:
    """Return a text to be read with minus signs before its numbers, where they had hyphens.

    Hyphens in names, dates, powers of ten and code (between backticks, after `=`) stay.
    """
    return "`".join(part if at % 2 else _MINUS.sub("−", part) for at, part in enumerate(text.split("`")))


def doubted(number: Number) -> bool:
    """Return whether the number is unreliable because of heavy-tailed weights."""
    return (number.note or "").startswith(UNRELIABLE)


def format_number(number: Number) -> str:
    """Format a number for a sentence: `16% [0.86%, 80%], unreliable`."""
    value, interval = formatted(number)
    text = f"{value.removesuffix('*')} {interval}".rstrip()
    return f"{text}, unreliable" if number.value is not None and doubted(number) else text


def rounded(value: float | None, unit: str = "") -> str:
    """Format a measured value without an interval for a sentence, to two digits."""
    return format_number(Number(value=value, unit=unit))


def format_value(value: float | None, unit: str = "", digits: int = _EXACT) -> str:
    """Format a bound, or another exact value, to this many significant digits, without zeros at the end."""
    if value is None or not math.isfinite(value):
        return _absent(Number())
    scale, sign = (100.0, "%") if unit in FRACTIONS and abs(value) < _MOST else (1.0, "")
    found = value * scale
    if found.is_integer() and abs(found) < 1e15:
        return f"{int(found):,}{sign}"
    places = digits - 1 - _power(found)
    while sign and places < 12 and round(found, places) == 100:  # only 1 is 100%
        places += 1
    text = _plain(found, places, "")
    head, mark, tail = text.partition("e")
    return (head.rstrip("0").rstrip(".") if "." in head else head) + mark + tail + sign


def count(value: int) -> str:
    """Format an integer with thousands separators: 1,234,567."""
    return f"{value:,}"


def counted(value: int, noun: str) -> str:
    """Format a count with its noun, plural in -s: `1 token`, `2,608 tokens`."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def _absent(number: Number) -> str:
    if number.log10 is not None:
        return f"10^{number.log10:.4g}"
    return f"cannot be known: {number.unknown}" if number.unknown else "cannot be known"


def _power(value: float) -> int:
    """Return the power of ten of a value rounded to the usual digits: 1 of 9.97, which is written 10."""
    return int(f"{value:.{_DIGITS - 1}e}".partition("e")[2])


def _alone(value: float, one: float) -> int:
    """Return the decimals of a value without interval; `one` is 1 on its scale."""
    away, own = abs(value - one) / one, _DIGITS - 1 - _power(value)
    if 0 < away < _NEAR_1:
        return min(max(-_power(away * one), own), _MOST_PLACES[one])
    return max(own, min(0, _WHOLE - 1 - _power(value)))


def _places(value: float, half: float, crosses_0: bool, one: float) -> int:
    """Return the decimals of a value, or of an end of its interval, given the interval's half width."""
    least = -_power(half)
    own = _DIGITS - 1 - _power(value) if value else least
    places = min(max(own, least), least + 1) if crosses_0 else max(own, least)
    places = min(places, own + _MOST_DIGITS - _DIGITS)
    return max(min(places, _MOST_PLACES[one]), own) if abs(value) >= one / 2 else places


def _plain(value: float, places: int, sign: str) -> str:
    """Format with this many decimals (negative: to tens, hundreds, …), by a power of ten if far from 1."""
    low, high = _PLAIN_PERCENT if sign else _PLAIN
    if abs(value) < 1 and not round(value, places):
        value = 0.0
    if sign and value != 100 and round(value, places) == 100:  # more decimals tell it apart, or a bound does
        most = _MOST_PLACES[100.0]
        more = next((n for n in range(max(places + 1, 0), most + 1) if round(value, n) != 100), None)
        beside = f">{100 - 10**-most:.{most}f}" if value < 100 else f"<{100 + 10**-most:.{most}f}"
        return (beside if more is None else f"{value:.{more}f}") + sign
    if value == 0 or low <= abs(value) < high:
        exact = value == 0 or (sign and value == 100)
        return f"{round(value, places) + 0.0:,.{0 if exact else max(places, 0)}f}{sign}"
    mantissa, power = f"{value:.{min(max(places + _power(value), 0), 16)}e}".split("e")
    return f"{mantissa}e{int(power)}{sign}"
