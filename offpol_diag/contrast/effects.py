"""How large a difference is, in words: as a ratio where both numbers are positive, else as a difference."""

from __future__ import annotations

import math

from offpol_diag.analysis.replicates import ROUNDING
from offpol_diag.numerals import FRACTIONS, written
from offpol_diag.summary import Contrast, Number

FEW = 0.2
"""Shares up to this are compared by their ratio; larger ones by percentage points."""
NEAR = 1.1
"""A ratio closer to 1 than this is said in per cent."""


def size(contrast: Contrast) -> float:
    """|B − A| / (|A| + |B|): 0 where they are equal, 1 where one of them is 0."""
    a, b = contrast.a.value, contrast.b.value
    if a is None or b is None or _equal(a, b):
        return 0.0
    return abs(b - a) / (abs(a) + abs(b))


def effect(contrast: Contrast) -> str:
    """The size of a difference: `2.3x [1.9, 2.8] larger`; its direction only where it is established."""
    a, b = contrast.a.value, contrast.b.value
    if a is None or b is None:
        return ""
    if _equal(a, b):
        return "equal"
    share = contrast.b.unit in FRACTIONS
    if contrast.ratio is not None and contrast.ratio.value is not None and not (share and max(a, b) > FEW):
        return _times(contrast.ratio, contrast.ratio.value, contrast.differs)
    word = ("higher" if b > a else "lower") if contrast.differs else "apart"
    value, interval = written(_size_of(contrast.difference))
    points = " points" if share else ""
    return " ".join(part for part in (value + points, interval, word) if part)


def _equal(a: float, b: float) -> bool:
    """Whether no more than the rounding of sums is between them: two readings on a GPU differ by that."""
    return math.isclose(a, b, rel_tol=ROUNDING, abs_tol=0.0)


def _size_of(difference: Number) -> Number:
    """The difference as a positive number, its interval turned with it; a share in plain points."""
    assert difference.value is not None
    sign = 1 if difference.value >= 0 else -1
    scale = sign * (100 if difference.unit in FRACTIONS else 1)
    ends = difference.interval and tuple(sorted(scale * end for end in difference.interval))
    return Number(value=scale * difference.value, interval=ends or None)


def _times(ratio: Number, value: float, differs: bool | None) -> str:
    """`2.3x [1.9, 2.8] larger`, `smaller, 0.43x [0.36, 0.53] of A's`, `0.3% [0.1, 0.5]% larger`."""
    word = ("larger" if value > 1 else "smaller") if differs else ""
    if 1 / NEAR < value < NEAR:
        return _per_cent(ratio, value, word)
    said, interval = written(ratio)
    text = " ".join(part for part in (f"{said}x", interval) if part)
    if not word:
        return f"{text} of A's"
    return f"{text} larger" if word == "larger" else f"smaller, {text} of A's"


def _per_cent(ratio: Number, value: float, word: str) -> str:
    sign = 1 if value > 1 else -1
    ends = ratio.interval and tuple(sorted(sign * (end - 1) for end in ratio.interval))
    number = Number(value=sign * (value - 1), interval=ends or None, unit="fraction")
    return " ".join(part for part in (*written(number), word or "apart") if part)
