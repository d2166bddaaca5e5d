"""Polynomials in two log-ratios, and their powers along three directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

Poly = NDArray[np.float64]
"""Coefficients [K+1, K+1] of x^i y^j, x = log π_old − log π_rollout, y = log π_θ − log π_rollout."""

DIRECTIONS = ("old", "current", "drift")
"""The log-ratios x, y and y − x, none of which is larger than the radius."""
ROUNDED = 2.0**-50
"""What rounding may leave of terms that cancel; each further power doubles them, at most four times."""


class Untraced(Exception):
    """A step that power series do not follow."""


def times(p: Poly, q: Poly) -> Poly:
    """The product, without powers beyond the degree."""
    p, q = sorted((p, q), key=np.count_nonzero)
    size, found = len(p), np.zeros_like(q)
    for i, j in zip(*map(np.ndarray.tolist, np.nonzero(p)), strict=True):
        found[i:, j:] += p[i, j] * q[: size - i, : size - j]
    return np.where(_within(size), found, 0.0)


@cache
def _within(size: int) -> NDArray[np.bool_]:
    """Which powers are not beyond the degree."""
    return np.add.outer(range(size), range(size)) < size


def exp(poly: Poly) -> Poly:
    """e^p of a polynomial without a constant."""
    return _exp(poly.tobytes())


@lru_cache(256)  # many formulas have e^Δ in them
def _exp(data: bytes) -> Poly:
    each = np.frombuffer(data)
    size = math.isqrt(len(each))
    poly, one = each.reshape(size, size), np.zeros((size, size))
    one[0, 0] = 1.0
    found = power = one
    for k in range(1, size):
        power = times(power, poly) / k
        found = found + power
    found.flags.writeable = False
    return found


def along(poly: Poly) -> dict[str, list[float]]:
    """Without its constant, as sums of powers of the directions: the coefficient of each power, from 0."""
    return {direction: list(ray) for direction, ray in _along(poly.tobytes()).items()}


@lru_cache(4096)  # formulas have many polynomials in common
def _along(poly: bytes) -> dict[str, list[float]]:
    each = np.frombuffer(poly)
    size = math.isqrt(len(each))
    rows = each.reshape(size, size).tolist()
    rays = {direction: [0.0] * size for direction in DIRECTIONS}
    for k in range(1, size):
        row = [rows[i][k - i] for i in range(k + 1)]
        for direction, c in zip(DIRECTIONS, _rays(row) if any(row) else (), strict=False):
            rays[direction][k] = c
    return {direction: ray for direction, ray in rays.items() if any(ray)}


def _rays(row: Sequence[float]) -> tuple[float, float, float]:
    """Coefficients of x^i y^{k−i} → those of x^k, y^k and (y − x)^k, the only one with mixed terms."""
    k, middle = len(row) - 1, len(row) // 2
    mixed = [math.comb(k, i) * (-1.0) ** i for i in range(k + 1)]
    noise = ROUNDED * 4.0**k * max(map(abs, row))
    if k == 1:  # y − x is two terms, or one of the third direction
        return (0.0, 0.0, row[0]) if abs(row[0] + row[1]) <= noise else (row[1], row[0], 0.0)
    drift = row[middle] / mixed[middle] if abs(row[middle]) > noise else 0.0
    rest = [c - drift * m for c, m in zip(row, mixed, strict=True)]
    if any(abs(c) > noise for c in rest[1:-1]):
        raise Untraced("powers of several log-ratios")
    old, current = (c if abs(c) > noise else 0.0 for c in (rest[-1], rest[0]))
    return old, current, drift
