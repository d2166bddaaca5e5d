"""How a series reduced over each sequence is made of sums of powers, or of the ends of a log-ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offpol_diag.metrics.polynomials import Untraced, along
from offpol_diag.metrics.series import NEGLIGIBLE, ONE, Line, Part

Family = tuple[Part, str]
"""A part, and the direction whose powers 1, 2, … multiply it; "" for the part by itself."""
Row = dict[Family, list[float]]
"""What the sums of each family's powers are multiplied by."""

TAIL = 2.0**-46
"""What the last two powers may add beside the largest; what comes after is a hundredth of that, or less."""


@dataclass(frozen=True)
class End:
    """The largest or smallest of a monotone function, made of the largest or smallest of its argument.

    Attributes:
        direction: of whose log-ratio d it is a function; "" for a constant.
        folded: whether of |d|.
        powers: the coefficients of 1, d, d², …
        top: whether it is where d or |d| is largest.
        absent: of an empty sequence.
    """

    direction: str
    folded: bool
    powers: tuple[float, ...]
    top: bool
    absent: float


def compiled(line: Line) -> Row | End:
    """How a line is made of the sums; raises `Untraced` where it is not."""
    return _row(line) if line.how == "sum" else _end(line)


def _row(line: Line) -> Row:
    found: Row = {}
    for part, poly in line.of.parts.items():
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


def _cut(ray: Sequence[float], radius: float) -> list[float]:
    """Without the powers at the end that cannot be seen; raises `Untraced` where the last one can."""
    sizes = [abs(c) * radius**k for k, c in enumerate(ray)]
    if max(sizes[-2:]) > TAIL * max(sizes):
        raise Untraced("a series that does not end")
    first = next(size for size in sizes if size)
    last = max(k for k, size in enumerate(sizes) if size > NEGLIGIBLE * first)
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
    powers[0] = float(parts[ONE][0, 0]) if ONE in parts else 0.0
    rises = not direction or _rises(powers, space.radius, folded)
    return End(direction, folded, tuple(powers), rises == (line.how == "max"), _ABSENT[line.how])


_ABSENT = {"max": -math.inf, "min": math.inf}


def _rises(powers: Sequence[float], radius: float, folded: bool) -> bool:
    """Whether a function rises throughout, or falls: its first power outweighs all others in its slope."""
    first = next(k for k, c in enumerate(powers) if c and k)
    rest = sum(k * abs(c) * radius ** (k - first) for k, c in enumerate(powers) if k > first)
    if first * abs(powers[first]) <= rest or not (folded or first == 1):
        raise Untraced("ends of a function with a bend")
    return powers[first] > 0
