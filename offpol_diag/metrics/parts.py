"""What the polynomials of a series are multiplied by, and what two of those make."""

from __future__ import annotations

from offpol_diag.metrics.polynomials import Untraced
from offpol_diag.near import ROUNDING

Part = tuple[str, str, str]
"""What a polynomial is multiplied by: a column, a part of the advantage, the sign of a direction; or ""."""

ONE: Part = ("", "", "")
COLUMNS = {"": (1.0, 1.0), "probability": (0.0, ROUNDING)}
"""Columns whose range is known. `log` is log π_rollout, `probability` its exponential."""
SIDES = ("A+", "A-", "1+", "1-")
"""Parts of the advantage, A = (A+) − (A-), and where it has each sign, as 0 or 1."""


def product(one: Part, two: Part) -> Part | None:
    """What two parts make; None: 0."""
    columns, sides, signs = zip(one, two, strict=True)
    if all(columns) or (all(signs) and signs[0] != signs[1]):
        raise Untraced("a product of columns")
    if all(sides) and sides[0][1] != sides[1][1]:
        return None
    if sides[0].startswith("A") and sides[1].startswith("A"):
        raise Untraced("a square of the advantage")
    side = max(sides)  # "A" hides the "1" of the same sign, and both hide ""
    return columns[0] or columns[1], side, "" if all(signs) else signs[0] or signs[1]
