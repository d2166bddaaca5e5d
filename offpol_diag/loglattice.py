"""A fixed lattice of bins, fine everywhere: 32 bins to each power of two, both signs.

Log-ratios span 1e-8 to 1e3; bins of equal width would lose one end. The bin of a float64 is read off its
bits, so binning is a shift, and histograms of two dumps merge by adding.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from offpol_diag.host import here

_LOW, _HIGH, _PER_OCTAVE_BITS = -40, 96, 5  # k3 of a log-ratio of 66 nats is 2^96
_PER_OCTAVE = 1 << _PER_OCTAVE_BITS
HALF = (_HIGH - _LOW) * _PER_OCTAVE
SIZE = 2 * HALF + 1
"""Bins: HALF negative ones, one around zero (|x| < 2^-40), HALF positive ones; the outermost take what lies
beyond.
"""


def index(x: Tensor) -> Tensor:
    """The bin of each value: float64 → int64 in [0, SIZE)."""
    if here(x):
        bits = x.numpy().view(np.uint64) >> np.uint64(52 - _PER_OCTAVE_BITS)
        return torch.from_numpy(_bins(x.device).numpy().take(bits.view(np.int64)))
    leading = x.contiguous().view(torch.int64) >> (52 - _PER_OCTAVE_BITS)
    return _bins(x.device).index_select(0, leading.bitwise_and_(2 * _MAGNITUDES - 1))


_MAGNITUDES = 1 << (11 + _PER_OCTAVE_BITS)
"""How many numbers an exponent and the first bits of a fraction make; the sign is the bit above."""


@cache
def _bins(device: torch.device) -> Tensor:
    """The bin of every sign, exponent and first bits of a fraction."""
    step = torch.arange(_MAGNITUDES, device=device) - ((1023 + _LOW) << _PER_OCTAVE_BITS) + 1
    step = step.clamp(0, HALF)
    return torch.cat((HALF + step, HALF - step))


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
