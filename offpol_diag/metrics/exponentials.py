"""Rows that ask for e^d − 1 itself, where nothing else is asked of a log-ratio d but d.

One exponential takes less time than the sums of ten powers. Not so beside other series, which need those sums
anyway. e^d − 1 − d stays a series: as a difference it would lose digits next to 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from offpol_diag.metrics.columns import RATIOS
from offpol_diag.metrics.lines import End, Row

LEAST = 8
"""Powers from which a series is that of e^d − 1, cut where the rest cannot be seen; fewer may be meant."""


def exact(rows: Sequence[Row | End]) -> tuple[Row | End, ...]:
    """The same rows, with the first power of e^d − 1 for its series in d."""
    asked: dict[str, list[Sequence[float]]] = {}
    for one in rows:
        for (_, direction), ray in one.items() if isinstance(one, dict) else ():
            asked.setdefault(direction, []).append(ray)
    told = {at for at, rays in asked.items() if all(len(ray) == 1 or _is(ray) for ray in rays)}
    return tuple(_told(one, told) if isinstance(one, dict) else one for one in rows)


def _is(ray: Sequence[float]) -> bool:
    """Whether the coefficients of d, d², … are those of e^d − 1, times a number."""
    whole = (c * math.factorial(k) for k, c in enumerate(ray, 1))
    return len(ray) >= LEAST and all(math.isclose(c, ray[0], rel_tol=1e-13) for c in whole)


def _told(row: Row, told: set[str]) -> Row:
    return {
        (part, RATIOS[at]) if at in told and len(ray) > 1 else (part, at): ray[:1] if at in told else ray
        for (part, at), ray in row.items()
    }
