"""Sums, means and running sums over sequences or turns of packed tokens, and back; numpy and torch.

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


def segment_of(offsets, others):
    """Return the segment in which each of other, finer ones begins: [S + 1], [R + 1] → [R]."""
    return np.searchsorted(offsets, others[:-1], side="right") - 1


def spread(x, offsets, tokens):
    """Give each token its segment's number: [..., S] → [..., T]; `tokens` is T."""
    return np.repeat(x, lengths(offsets), axis=-1)


def longest(offsets, tokens):
    """Return the number of tokens of the longest segment; `tokens` is T."""
    return int(lengths(offsets).max()) if tokens else 0


def later_sum(x, position, offsets, half_life):
    """Sum x over each token and those after it in its sequence, half as much each `half_life`.

    Doubles the tokens that are summed until they reach the end of the longest sequence. Unit: that
    of x.

    Args:
        x: numbers of tokens, [T].
        position: places of the tokens in their sequences, [T]; masked tokens in between count as distance.
        offsets: where sequences begin, [S + 1].
        half_life: distance in tokens after which a token counts half.
    """
    distance = np.zeros_like(x)  # to the next token
    distance[:-1] = position[1:] - position[:-1]
    step = np.exp(distance * (-math.log(2.0) / half_life))  # 0 at the end of a sequence
    if len(x):
        step[offsets[1:] - 1] = np.zeros_like(
            step[:1]
        )  # of an empty sequence: the end of the one before, or of all
    most, summed = longest(offsets, len(x)), 1
    while summed < most:
        sums, steps = x + 0.0, np.zeros_like(step)
        sums[:-summed] = x[:-summed] + step[:-summed] * x[summed:]
        steps[:-summed] = step[:-summed] * step[summed:]
        x, step, summed = sums, steps, 2 * summed
    return x
