"""A fixed logarithmic lattice of bins: 32 bins to each power of two, for both signs.

Log-ratios span 1e-8 to 1e3; bins of equal width would lose one end. The bin of a float64 is read off its
bits, so binning is a shift, and histograms of two dumps merge by adding.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

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


def code(x: Tensor) -> Tensor:
    """Return the leading bits of each value, as fine as the bins: float64 → int64 in [0, CODES)."""
    return (x.contiguous().view(torch.int64) >> SHIFT).bitwise_and_(CODES - 1)


def index(x: Tensor) -> Tensor:
    """Return the bin of each value: float64 → int64 in [0, SIZE)."""
    return _bins(x.device).index_select(0, code(x))


def folded(tables: Tensor) -> Tensor:
    """Add up what was summed by code: [n, CODES] float64 → by bin, [n, SIZE]."""
    return tables.new_zeros(len(tables), SIZE).index_add_(1, _bins(tables.device), tables)


@cache
def _bins(device: torch.device) -> Tensor:
    """Return the bin of each combination of leading bits."""
    step = (torch.arange(CODES // 2, device=device) - _FIRST).clamp(0, HALF)
    return torch.cat((HALF + step, HALF - step))


def edges() -> Tensor:
    """Return the SIZE + 1 edges of the bins, rising, float64."""
    octave = torch.arange(_LOW, _HIGH, dtype=torch.float64)[:, None]
    within = 1 + torch.arange(_PER_OCTAVE, dtype=torch.float64)[None, :] / _PER_OCTAVE
    up = torch.cat(((2**octave * within).flatten(), torch.tensor([2.0**_HIGH], dtype=torch.float64)))
    return torch.cat((-up.flip(0), up))


def quantile(counts: Tensor, q: float) -> float:
    """Compute the q-quantile, linear within a bin (relative error at most 1/32); NaN without values."""
    total = float(counts.sum())
    if total == 0:
        return float("nan")
    below = torch.cumsum(counts, 0)
    wanted = max(q, 1e-12) * total  # q = 0: the first bin that holds anything
    at = min(int(torch.searchsorted(below, torch.tensor(wanted, dtype=torch.float64))), SIZE - 1)
    low, high = edges()[at : at + 2].tolist()
    inside = float(counts[at])
    share = (q * total - (float(below[at]) - inside)) / inside if inside else 0.5
    return float(low + (high - low) * min(max(share, 0.0), 1.0))
