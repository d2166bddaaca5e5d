"""The bootstrap: Poisson draws of groups of sequences, and sums of resampled sequences.

Each group of sequences (a prompt) is drawn Poisson(1) times in each replicate. The draw is a pure function
of the group's key, the replicate's number and the seed (a counter-based hash), so cutting a dump into files,
merging shards and reordering rows change nothing, and all sequences of a group are drawn together: tokens
within a sequence, and samples of one prompt, are dependent.

References: Hanley & MacGibbon 2006 (Poisson bootstrap); Steele et al. 2014, SplittableRandom (the mixer).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from offpol_diag.engine import segments
from offpol_diag.engine.segments import Array, runs

T = TypeVar("T")

REPLICATES = 256
CACHED = 256
"""Sequences drawn at a time, so that their bits stay in the core's cache."""


def mix(x: Array) -> Array:
    """Apply SplitMix64's finaliser to int64 (wrapping arithmetic): a bijection that scatters its input."""
    x = x.view(np.uint64)
    result = np.asarray(x >> np.uint64(30))
    result ^= x
    result *= np.uint64(0xBF58476D1CE4E5B9)
    moved = np.asarray(result >> np.uint64(27))
    result ^= moved
    result *= np.uint64(0x94D049BB133111EB)
    result ^= np.right_shift(result, np.uint64(31), out=moved)
    return result.view(np.int64)


def draws(key: Array, seed: int, replicates: int = REPLICATES) -> Array:
    """Draw each sequence's group Poisson(1) times: key [S] int64 → counts [S, replicates] float64."""
    begins = runs(key)  # adjacent sequences of one group are drawn once
    drawn = _draws(key[begins[:-1]], seed, replicates)
    return drawn if len(drawn) == len(key) else np.repeat(drawn, segments.lengths(begins), axis=0)


def _draws(key: Array, seed: int, replicates: int) -> Array:
    """Draw Poisson(1) times by uniform 32-bit numbers: the halves of 64 bits, the lower one first."""
    counters = np.arange((replicates + 1) // 2, dtype=np.int64)
    lanes = mix((counters + 1) * -0x61C8864680B583EB + mix(np.array([seed], np.int64)))
    result = np.empty((len(key), replicates))
    for at in range(0, len(key), CACHED):
        words = mix(mix(key[at : at + CACHED])[:, None] ^ lanes)
        result[at : at + CACHED] = _poisson(words.astype("<i8", copy=False).view("<u4")[:, :replicates])
    return result


def _poisson(uniform: Array) -> Array:
    """Turn uniform 32-bit numbers into Poisson(1) draws; a few comparisons cost a fifth of a search."""
    reached = np.zeros(uniform.shape, np.uint8)
    for step in _poisson_steps():
        reached += uniform >= np.uint32(step)
    return reached


@lru_cache(maxsize=1)
def _poisson_steps() -> list[int]:
    """Return the 32-bit thresholds at which a uniform number becomes 1, 2, 3 … draws."""
    total, steps = 0.0, []
    for k in range(14):
        total += math.exp(-1.0) / math.factorial(k)
        steps.append(round(total * 2**32))
    return [step for step in steps if step < 2**32]


# ---------------------------------------------------------------- resampled sums


def resampled(rows: Array | Sequence[Array], draws: Array, key: Array | None = None) -> Array:
    """Sum rows [R, S], in one array or several, under draws [S, B]: [R, 1+B], the sums and their replicates.

    Adjacent sequences with equal keys [S], whose draws are equal, are added before they are multiplied.
    """
    parts = (rows,) if isinstance(rows, np.ndarray) else rows
    whole = np.concatenate([part.sum(axis=1) for part in parts])
    begins = runs(key)[:-1] if key is not None and len(key) else None
    if begins is not None and 2 * len(begins) <= len(draws):
        parts, draws = [np.add.reduceat(part, begins, axis=1) for part in parts], draws[begins]
    result = np.empty((len(whole), 1 + draws.shape[1]))
    result[:, 0] = whole
    first = 0
    for part in parts:
        drawn = result[first : first + len(part), 1:]
        filled = part.any(axis=1)
        if filled.all():
            np.matmul(part, draws, out=drawn)
        else:  # rows of zeros, which short sequences have many of, are skipped
            drawn[~filled] = 0.0
            drawn[filled] = part[filled] @ draws
        first += len(part)
    return result


def log_resampled(x: Array, draws: Array) -> Array:
    """Sum e^x of x [..., S] under draws [S, B]: log Σ e^x with its replicates, [..., 1+B]; −inf for no x."""
    top = np.maximum(x.max(axis=-1, initial=-np.inf, keepdims=True), -1e300)
    scaled = np.exp(x - top)
    both = np.concatenate((scaled.sum(axis=-1, keepdims=True), scaled @ draws), axis=-1)
    result: Array = np.log(both) + top
    return result


def resampled_by(
    members: Mapping[T, slice | Array | Sequence[int]], rows: Array, draws: Array, key: Array | None = None
) -> Array:
    """Sum rows [R, S] over the sequences of each of N places: [N, R, 1+B]; see `resampled`."""
    result = np.empty((len(members), len(rows), 1 + draws.shape[1]))
    for place, at in enumerate(members.values()):
        result[place] = resampled(rows[:, at], draws[at], None if key is None else key[at])
    return result
