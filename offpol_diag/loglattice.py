"""A fixed lattice of bins, fine everywhere: 32 bins to each power of two, both signs.

Log-ratios span 1e-8 to 1e3; bins of equal width would lose one end. The bin of a float64 is read off its
bits, so binning is a shift, and histograms of two dumps merge by adding.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW, _HIGH, _PER_OCTAVE_BITS = -40, 96, 5  # k3 of a log-ratio of 66 nats is 2^96
_PER_OCTAVE = 1 << _PER_OCTAVE_BITS
HALF = (_HIGH - _LOW) * _PER_OCTAVE
SIZE = 2 * HALF + 1
"""Bins: HALF negative ones, one around zero (|x| < 2^-40), HALF positive ones; the outermost take what lies
beyond.
"""


def index(x: Tensor) -> Tensor:
    """The bin of each value: float64 → int64 in [0, SIZE)."""
    bits = x.abs().contiguous().view(torch.int64) >> (52 - _PER_OCTAVE_BITS)
    step = bits - ((1023 + _LOW) << _PER_OCTAVE_BITS) + 1
    return HALF + torch.sign(x).to(torch.int64) * step.clamp(0, HALF)


def edges() -> Tensor:
    """The SIZE + 1 edges of the bins, rising, float64."""
    octave = torch.arange(_LOW, _HIGH, dtype=torch.float64)[:, None]
    within = 1 + torch.arange(_PER_OCTAVE, dtype=torch.float64)[None, :] / _PER_OCTAVE
    up = torch.cat(((2**octave * within).flatten(), torch.tensor([2.0**_HIGH], dtype=torch.float64)))
    return torch.cat((-up.flip(0), up))


def quantile(counts: Tensor, q: float) -> float:
    """The q-quantile, linear within a bin (relative error at most 1/32); NaN when nothing was binned."""
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
