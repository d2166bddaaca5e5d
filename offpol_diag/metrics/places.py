"""Where the log-ratios of a run end: both ends, those of their distance from 0, and what is next to 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PLACES: dict[str, np.ufunc] = {
    "low": np.minimum,
    "high": np.maximum,
    "near": np.minimum,
    "far": np.maximum,
    "below": np.maximum,
    "above": np.minimum,
}
"""The ends of d and of |d|; what is next to 0 on both sides (infinite where nothing is).

Each with how those of several runs become one.
"""


def found(gap: Array, firsts: NDArray[np.int64], names: Sequence[str]) -> dict[str, Array]:
    """Places of the runs of d [T] that begin at `firsts` [N], [N] each."""
    made: dict[str, Array] = {}
    if {"low", "high", "far"} & {*names}:
        made["low"], made["high"] = np.minimum.reduceat(gap, firsts), np.maximum.reduceat(gap, firsts)
        made["far"] = np.maximum(np.abs(made["low"]), np.abs(made["high"]))
    if {"below", "above", "near"} & {*names}:
        made["below"], made["above"] = _around(gap, firsts)
        made["near"] = np.minimum(-made["below"], made["above"])
    return {name: made[name] for name in names}


def joined(name: str, x: Array, firsts: NDArray[np.int64]) -> Array:
    """A place of runs, made of that of their pieces [M], the first of which are `firsts` [N]."""
    return np.asarray(PLACES[name].reduceat(x, firsts))


def _around(gap: Array, firsts: NDArray[np.int64]) -> tuple[Array, Array]:
    """What is next to 0: as integers, negative floats fall with their size and lie below all others.

    As unsigned ones they lie above them.
    """
    bits = gap.view(np.int64)
    down = np.minimum.reduceat(bits, firsts).view(np.float64)
    up = np.minimum.reduceat(bits.view(np.uint64), firsts).view(np.float64)
    nothing = (down == 0) | (up == 0)
    below = np.where(nothing, 0.0, np.where(down < 0, down, -np.inf))
    return below, np.where(nothing, 0.0, np.where(up > 0, up, np.inf))
