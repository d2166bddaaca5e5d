"""Between what the values of a series lie within a radius, and what their sign is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from offpol_diag.metrics.parts import COLUMNS, Part
from offpol_diag.metrics.polynomials import Poly, Untraced, along

Parts = Mapping[Part, Poly]


def span(parts: Parts, radius: float) -> tuple[float, float]:
    """Bounds on the values of Σ over parts of part · polynomial."""
    low = high = 0.0
    for (column, side, sign), poly in parts.items():
        if side or column not in COLUMNS:
            raise Untraced("no range")
        spans = [_of_ray(ray, radius) for ray in along(poly).values()]
        bottom, top = (float(poly[0, 0]) + sum(ends) for ends in zip((0.0, 0.0), *spans, strict=True))
        if sign:
            bottom, top = -max(abs(bottom), abs(top)), max(abs(bottom), abs(top))
        products = [x * y for x in (bottom, top) for y in COLUMNS[column]]
        low, high = low + min(products), high + max(products)
    return low, high


def _of_ray(ray: Sequence[float], radius: float) -> tuple[float, float]:
    """Of powers of one log-ratio: on one side of 0 where an even power outweighs those that follow it."""
    sizes = [abs(c) * radius**k for k, c in enumerate(ray)]
    first, total = next(k for k, size in enumerate(sizes) if size), sum(sizes)
    if first % 2 or 2 * sizes[first] < total:
        return -total, total
    return (0.0, total) if ray[first] > 0 else (-total, 0.0)


def sign_of(parts: Parts, radius: float) -> tuple[str, float]:
    """A direction d, and the sign of g, where the values are d·g(d): theirs is that of d times it."""
    ((column, side, sign), poly), *more = parts.items() or ((("", "", ""), None),)
    rays = {} if poly is None else along(poly)
    if more or side or sign or column not in COLUMNS or len(rays) != 1 or poly is None or poly[0, 0]:
        raise Untraced("a sign")
    ((direction, ray),) = rays.items()
    rest = sum(abs(c) * radius ** (k - 1) for k, c in enumerate(ray) if k > 1)
    if abs(ray[1]) <= rest:
        raise Untraced("a sign")
    return direction, math.copysign(1.0, ray[1])
