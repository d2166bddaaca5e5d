"""Sums, means and running sums over sequences or turns of packed tokens, and back; numpy and torch.

Tokens lie end to end on the last axis, [T]; segment s has the tokens from offsets[s] to before
offsets[s + 1].
"""

import math

import numpy as np


def lengths(offsets):
    """Number of tokens of each segment: [S + 1] → [S]."""
    return offsets[1:] - offsets[:-1]


def segment_sum(x, offsets):
    """Sum over each segment, 0 for one without a token: [..., T] → [..., S]."""
    sums = np.zeros((*x.shape[:-1], len(offsets) - 1))
    filled = np.flatnonzero(lengths(offsets))
    if len(filled):
        sums[..., filled] = np.add.reduceat(x, offsets[:-1][filled], axis=-1)
    return sums


def spread(x, offsets):
    """Give each token its segment's number: [..., S] → [..., T]."""
    return np.repeat(x, lengths(offsets), axis=-1)


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
    step[(offsets[1:] - 1)[lengths(offsets) > 0]] = 0.0
    longest, summed = len(x) and int(lengths(offsets).max()), 1
    while summed < longest:
        sums, steps = x + 0.0, np.zeros_like(step)
        sums[:-summed] = x[:-summed] + step[:-summed] * x[summed:]
        steps[:-summed] = step[:-summed] * step[summed:]
        x, step, summed = sums, steps, 2 * summed
    return x
