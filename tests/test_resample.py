"""The bootstrap: Poisson(1) draws that depend on the group alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from offpol_diag.core import state

KEYS = (np.arange(3000) * 7919 - 10_000_000).view(np.uint64)


def poisson_p_value(draws: np.ndarray) -> float:
    """Compute the p-value of the chi-square test against Poisson(1), counts of 5 and more taken together."""
    seen = np.bincount(draws.astype(int).clip(max=5).ravel(), minlength=6)
    chance = [math.exp(-1) / math.factorial(k) for k in range(5)]
    return float(stats.chisquare(seen, np.array([*chance, 1 - sum(chance)]) * seen.sum()).pvalue)


@pytest.mark.parametrize("seed", [0, -7])
def test_each_replicate_and_each_key_is_poisson_with_mean_one_on_its_own(seed):
    draws = state.draws(KEYS, seed)
    by_replicate = [poisson_p_value(draws[:, b]) for b in range(draws.shape[1])]
    by_key = [poisson_p_value(state.draws(KEYS[i : i + 1], seed, 3000)) for i in range(50)]

    assert min(by_replicate) > 1e-3 / len(by_replicate)
    assert min(by_key) > 1e-3 / len(by_key)


def test_a_draw_is_a_function_of_key_seed_and_replicate():
    whole = state.draws(KEYS, 3, 64)
    order = np.random.default_rng(0).permutation(len(KEYS))

    assert np.array_equal(state.draws(KEYS[order], 3, 64), whole[order])
    assert np.array_equal(
        np.concatenate([state.draws(part, 3, 64) for part in np.array_split(KEYS, 5)]), whole
    )
    assert np.array_equal(state.draws(KEYS, 3, 33), whole[:, :33])
    assert state.draws(KEYS[:0], 3, 64).shape == (0, 64)
    assert not np.array_equal(state.draws(KEYS, 4, 64), whole)


def test_replicates_keys_and_seeds_are_uncorrelated():
    draws = state.draws(KEYS, 0, 128)
    across_replicates = np.corrcoef(draws.T) - np.eye(128)
    across_keys = np.corrcoef(state.draws(KEYS[:128], 0, 3000)) - np.eye(128)
    other = state.draws(KEYS, 1, 128)
    across_seeds = [np.corrcoef(draws[:, b], other[:, b])[0, 1] for b in range(128)]

    # 8128 correlations of 3000 pairs: each has a standard error of 1/√3000, the largest of them stays
    # below 5 of it.
    for correlations in (across_replicates, across_keys, np.array(across_seeds)):
        assert abs(correlations).max() < 5 / math.sqrt(3000)


def test_keys_that_differ_in_one_bit_are_drawn_apart():
    near = np.array([1 << bit for bit in range(64)] + [0, 2**64 - 1], np.uint64)
    correlations = np.corrcoef(state.draws(near, 0, 3000)) - np.eye(len(near))

    assert abs(correlations).max() < 5 / math.sqrt(3000)


WORDS = np.array([0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63), 0x5EED0F0F, -77, 12345, 3, 8])
WORDS = WORDS.view(np.uint64)
SHAPES = {
    "many": WORDS,
    "none": WORDS[:0],
    "one": WORDS[6:7],
    "across": WORDS.reshape(3, 4).T,
    "repeated": np.repeat(WORDS[:1], 4),
}


def splitmix(x: int) -> int:
    """Compute SplitMix64's finaliser, as published."""
    word = 2**64
    x %= word
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % word
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % word
    return x ^ (x >> 31)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mixer_is_the_published_one_and_leaves_its_input_alone(shape):
    x = SHAPES[shape]
    before = x.copy()

    mixed = state.mix(x)

    assert mixed.shape == x.shape
    assert [a % 2**64 for a in mixed.flatten().tolist()] == [splitmix(a) for a in x.flatten().tolist()]
    assert np.array_equal(x, before)
