"""Hashes of 64-bit words, the same on every machine. Needs numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
INCREMENT = np.uint64(0x9E3779B97F4A7C15)
"""Distance of SplitMix64's counters: its n-th word is `mix` of seed + n · INCREMENT, modulo 2⁶⁴."""


def mix(x: Words) -> Words:
    """Scatter 64-bit words, [N] → [N]: SplitMix64's finaliser (Steele et al. 2014), a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Words = x ^ (x >> np.uint64(31))
    return result
