"""Sums and extremes over sequences or turns of packed tokens, and back; numpy and torch.

Tokens lie end to end on the last axis, [T]; segment s has the tokens from offsets[s] to before
offsets[s + 1].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def lengths(offsets: Array) -> Array:
    """Number of tokens of each segment: [S + 1] → [S]."""
    return offsets[1:] - offsets[:-1]


def segment_sum(x, offsets):
    """Sum over each segment, 0 for one without a token: [..., T] → [..., S]."""
    return reduced(x, offsets, np.add, 0.0)


def segment_max(x, offsets):
    """Return the largest of each segment, −inf for one without a token: [..., T] → [..., S]."""
    return reduced(x, offsets, np.maximum, -math.inf)


def reduced(
    x: Array, offsets: Array, kernel: np.ufunc, empty: float, dtype: type[np.integer[Any]] | None = None
) -> Array:
    """Reduce each segment by a function of numpy, in numbers of a type: [..., T] → [..., S].

    Args:
        x: numbers of tokens.
        offsets: where segments begin, and the end.
        kernel: np.add, np.maximum, np.minimum.
        empty: the result for a segment without a token.
        dtype: the type of sums; None for that of x.
    """
    filled = lengths(offsets) > 0
    if filled.all() and len(filled):
        values: Array = kernel.reduceat(x, offsets[:-1], axis=-1, dtype=dtype)
        return values
    result = np.empty((*x.shape[:-1], len(filled)))
    result.fill(empty)  # half the time of numpy's `full`
    if filled.any():
        result[..., filled] = kernel.reduceat(x, offsets[:-1][filled], axis=-1, dtype=dtype)
    return result


def spread(x, offsets, tokens):
    """Give each token its segment's number: [..., S] → [..., T]; `tokens` is T."""
    return np.repeat(x, lengths(offsets), axis=-1)
