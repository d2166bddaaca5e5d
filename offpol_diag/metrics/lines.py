"""How a series reduced over each sequence is made of sums of powers, or of the ends of a log-ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offpol_diag.metrics.parts import ONE, Part
from offpol_diag.metrics.polynomials import Poly, Untraced, along
from offpol_diag.metrics.series import Line, Series

Family = tuple[Part, str]
"""A part, and the direction whose powers 1, 2, … multiply it; "" for the part by itself."""
Row = dict[Family, list[float]]
"""What the sums of each family's powers are multiplied by."""

UNSEEN = 2.0**-55
"""What a power may add beside the first one without being seen."""
TAIL = 2.0**-46
"""What the last two powers may add beside the largest; what comes after is a hundredth of that, or less."""


@dataclass(frozen=True)
class End:
    """The largest or smallest of a function of one log-ratio d, which lies where d has an end of its own.

    Attributes:
        how: `max` or `min`.
        direction: whose log-ratio d is; "" for a constant.
        powers: the coefficients of 1, d, d², …; of |d| where the places are `near` and `far`.
        places: at which of a sequence's d it is (`places.py`).
    """

    how: str
    direction: str
    powers: tuple[float, ...]
    places: tuple[str, ...]


def compiled(line: Line) -> Row | End:
    """How a line is made of the sums; raises `Untraced` where it is not."""
    return _row(line) if line.how == "sum" else _end(line)


def _row(line: Line) -> Row:
    found: Row = {}
    for part, poly in _rebased(line.of).items():
        _, _, sign = part
        if poly[0, 0]:
            if sign:
                raise Untraced("a sign by itself")
            found[part, ""] = [float(poly[0, 0])]
        for direction, ray in along(poly).items():
            if sign not in ("", direction):
                raise Untraced("a sign of another log-ratio")
            found[part, direction] = _cut(ray[1:], line.of.space.radius)
    return found


def _rebased(series: Series) -> dict[Part, Poly]:
    """With log π_old − x for log π_rollout beside powers of the drift: log π_θ has no mixed terms then."""
    found, space = series, series.space
    for (column, side, sign), poly in series.parts.items():
        if column == "log" and [*along(poly)] == ["drift"]:
            old = space.symbol(("log old", "", "")) - space.symbol(x=1.0, constant=0.0)
            own, rest = Series(space, {("log", side, sign): poly}), Series(space, {("", side, sign): poly})
            found = found - own + rest * old
    return found.parts


def _cut(ray: Sequence[float], radius: float) -> list[float]:
    """Without the powers at the end that cannot be seen; raises `Untraced` where the last one can."""
    sizes = [abs(c) * radius**k for k, c in enumerate(ray)]
    if max(sizes[-2:]) > TAIL * max(sizes):
        raise Untraced("a series that does not end")
    first = next(size for size in sizes if size)
    last = max(k for k, size in enumerate(sizes) if size > UNSEEN * first)
    return list(ray[: last + 1])


def _end(line: Line) -> End:
    """Of a function of one d; of |d| where it has its even powers, and its odd ones with the sign of d."""
    space, parts = line.of.space, line.of.parts
    rays = {part: along(poly) for part, poly in parts.items()}
    direction, *more = {direction for found in rays.values() for direction in found} or {""}
    signed: Part = ("", "", direction)
    if more or not rays.keys() <= {ONE, signed}:
        raise Untraced("ends of several numbers")
    none = [0.0] * (space.degree + 1)
    plain, other = (rays.get(part, {}).get(direction, none) for part in (ONE, signed))
    folded = bool(direction) and not any(plain[1::2]) and not any(other[0::2])
    if any(other) and direction and not folded:
        raise Untraced("ends of a function with a bend")
    powers = [x + y for x, y in zip(plain, other, strict=True)] if folded else plain
    places = _places(powers, space.radius, folded, line.how) if direction else ()
    constant = float(parts[ONE][0, 0]) if ONE in parts else 0.0
    return End(line.how, direction, (constant, *powers[1:]), places)


def _places(powers: Sequence[float], radius: float, folded: bool, how: str) -> tuple[str, ...]:
    """Where the ends are of a function whose first power outweighs all others in its slope."""
    first = next(k for k, c in enumerate(powers) if c and k)
    rest = sum(k * abs(c) * radius ** (k - first) for k, c in enumerate(powers) if k > first)
    if first * abs(powers[first]) <= rest:
        raise Untraced("ends of a function with a bend")
    top = (powers[first] > 0) == (how == "max")
    if folded:
        return ("far",) if top else ("near",)
    if first % 2:
        return ("high",) if top else ("low",)
    return ("low", "high") if top else ("below", "above")
