"""A fixed logarithmic lattice of bins: 32 bins to each power of two, for both signs.

Log-ratios span 1e-8 to 1e3; bins of equal width would lose one end. The bin of a float64 is read off its
bits, so binning is a shift, and histograms of two dumps merge by adding.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from offpol_diag.engine.segments import Array

_LOW, _HIGH, _PER_OCTAVE_BITS = -40, 96, 5  # k3 of a log-ratio of 66 nats is 2^96
_PER_OCTAVE = 1 << _PER_OCTAVE_BITS
HALF = (_HIGH - _LOW) * _PER_OCTAVE
SIZE = 2 * HALF + 1
"""Number of bins: HALF negative ones, one around zero (|x| < 2^-40), HALF positive ones; the outermost also
hold all values beyond.
"""


CODES = 1 << (12 + _PER_OCTAVE_BITS)
"""Number of combinations of sign, exponent and leading fraction bits; the sign is the highest bit."""
SHIFT = 52 - _PER_OCTAVE_BITS
"""Bits of a float64 below those."""
_FIRST = ((1023 + _LOW) << _PER_OCTAVE_BITS) - 1
"""The largest combination without sign of the bin around zero."""


def code(x: Array) -> Array:
    """Return the leading bits of each value, as fine as the bins: float64 → int64 in [0, CODES)."""
    return (np.ascontiguousarray(x).view(np.uint64) >> np.uint64(SHIFT)).view(np.int64)


def index(x: Array) -> Array:
    """Return the bin of each value: float64 → int64 in [0, SIZE)."""
    return _bins().take(code(x), mode="clip")  # codes are in range: a quarter less time


def folded(tables: Array) -> Array:
    """Add up what was summed by code: [n, CODES] float64 → by bin, [n, SIZE]."""
    return np.stack([np.bincount(_bins(), table, SIZE) for table in tables])


@cache
def _bins() -> Array:
    """Return the bin of each combination of leading bits."""
    step = np.clip(np.arange(CODES // 2) - _FIRST, 0, HALF)
    return np.concatenate((HALF + step, HALF - step))


def edges() -> Array:
    """Return the SIZE + 1 edges of the bins, rising, float64."""
    octave = np.arange(_LOW, _HIGH)[:, None]
    within = 1 + np.arange(_PER_OCTAVE) / _PER_OCTAVE
    up = np.append(2.0**octave * within, 2.0**_HIGH)
    return np.concatenate((-up[::-1], up))


def quantile(counts: Array, q: float) -> float:
    """Compute the q-quantile, linear within a bin (relative error at most 1/32); NaN without values."""
    total = float(counts.sum())
    if total == 0:
        return float("nan")
    below = np.cumsum(counts)
    wanted = max(q, 1e-12) * total  # q = 0: the first bin that holds anything
    at = min(int(np.searchsorted(below, wanted)), SIZE - 1)
    low, high = edges()[at : at + 2].tolist()
    inside = float(counts[at])
    share = (q * total - (float(below[at]) - inside)) / inside if inside else 0.5
    return float(low + (high - low) * min(max(share, 0.0), 1.0))
