"""The bootstrap: Poisson(1) draws that depend on the group alone; intervals that cover what they promise."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from offpol_diag import resample
from offpol_diag.accumulators import Sums
from offpol_diag.metrics.formula import FEWEST_GROUPS, Formula, Reader, mean

KEYS = torch.arange(3000, dtype=torch.int64) * 7919 - 10_000_000
MEAN = Formula("x", "", "tokens", "", mean("x"))


def poisson_p_value(draws: np.ndarray) -> float:
    """Of the chi-square test against Poisson(1), counts of 5 and more taken together."""
    seen = np.bincount(draws.astype(int).clip(max=5).ravel(), minlength=6)
    chance = [math.exp(-1) / math.factorial(k) for k in range(5)]
    return float(stats.chisquare(seen, np.array([*chance, 1 - sum(chance)]) * seen.sum()).pvalue)


@pytest.mark.parametrize("seed", [0, 1, 12345, -7])
def test_draws_are_poisson_with_mean_one(seed):
    assert poisson_p_value(resample.draws(KEYS, seed).numpy()) > 1e-3


def test_each_replicate_and_each_key_is_poisson_on_its_own():
    draws = resample.draws(KEYS, 0).numpy()
    by_replicate = [poisson_p_value(draws[:, b]) for b in range(draws.shape[1])]
    by_key = [poisson_p_value(resample.draws(KEYS[i : i + 1], 0, 3000).numpy()) for i in range(50)]

    assert min(by_replicate) > 1e-3 / len(by_replicate)
    assert min(by_key) > 1e-3 / len(by_key)


def test_a_draw_is_a_function_of_key_seed_and_replicate():
    whole = resample.draws(KEYS, 3, 64)
    order = torch.randperm(len(KEYS), generator=torch.Generator().manual_seed(0))

    assert torch.equal(resample.draws(KEYS[order], 3, 64), whole[order])
    assert torch.equal(torch.cat([resample.draws(part, 3, 64) for part in KEYS.split(701)]), whole)
    assert torch.equal(resample.draws(KEYS, 3, 33), whole[:, :33])
    assert not torch.equal(resample.draws(KEYS, 4, 64), whole)


def test_sequences_of_one_group_are_drawn_together():
    draws = resample.draws(torch.tensor([5, 9, 5, 5]), 0)

    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[0], draws[3])
    assert not torch.equal(draws[0], draws[1])


def test_replicates_keys_and_seeds_are_uncorrelated():
    draws = resample.draws(KEYS, 0, 128).numpy()
    across_replicates = np.corrcoef(draws.T) - np.eye(128)
    across_keys = np.corrcoef(resample.draws(KEYS[:128], 0, 3000).numpy()) - np.eye(128)
    other = resample.draws(KEYS, 1, 128).numpy()
    across_seeds = [np.corrcoef(draws[:, b], other[:, b])[0, 1] for b in range(128)]

    # 8128 correlations of 3000 pairs: each has a standard error of 1/√3000, the largest of them stays
    # below 5 of it.
    for correlations in (across_replicates, across_keys, np.array(across_seeds)):
        assert abs(correlations).max() < 5 / math.sqrt(3000)


def test_keys_that_differ_in_one_bit_are_drawn_apart():
    near = torch.tensor([1 << bit for bit in range(63)] + [0, -1], dtype=torch.int64)
    correlations = np.corrcoef(resample.draws(near, 0, 3000).numpy()) - np.eye(len(near))

    assert abs(correlations).max() < 5 / math.sqrt(3000)


def test_no_draws_are_asked_for_nothing():
    assert resample.draws(KEYS[:0], 0).shape == (0, resample.REPLICATES)
    assert resample.draws(KEYS[:3], 0, 7).shape == (3, 7)


def test_the_mixer_is_a_bijection_that_moves_half_the_bits():
    x = torch.arange(-5000, 5000, dtype=torch.int64)
    mixed = resample.mix(x)
    assert len(torch.unique(mixed)) == len(x)
    moved = [bin((int(a) ^ int(b)) & (2**64 - 1)).count("1") for a, b in pairwise(mixed.tolist())]
    assert np.mean(moved) == pytest.approx(32, abs=0.3)


# ---------------------------------------------------------------- intervals


def dumps(seed: int, groups: int = 60, per_group: int = 4, tokens: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Token values with an effect of the prompt and one of the sequence; their true mean is 0.

    Returns the per-sequence sums and lengths, [groups, per_group].
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(tokens // 2, 2 * tokens, (groups, per_group))
    effect = rng.standard_normal((groups, 1)) + 0.5 * rng.standard_normal((groups, per_group))
    noise = rng.standard_normal((groups, per_group)) * np.sqrt(lengths)
    return effect * lengths + noise, lengths


def covers(sums: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> bool:
    """Whether the interval of the mean holds 0."""
    flat = torch.from_numpy(sums.ravel()), torch.from_numpy(lengths.ravel().astype(float))
    draws = resample.draws(torch.from_numpy(keys.ravel()), 0)
    read = Sums.of({"x": flat[0], "tokens": flat[1]}, draws).read()
    low, high = Reader(read, 60).number(MEAN).interval or (math.nan, math.nan)
    return low <= 0 <= high


def test_an_interval_covers_the_truth_about_95_times_in_100():
    """At 60 groups a percentile interval is a bit short: 91 to 98 % has room for that and for 400 tries."""
    rng = np.random.default_rng(1)
    hits = [covers(*dumps(i), np.repeat(rng.integers(0, 2**62, (60, 1)), 4, axis=1)) for i in range(400)]
    assert 0.91 <= np.mean(hits) <= 0.98


def test_drawing_sequences_or_tokens_apart_would_cover_far_too_seldom():
    """Why groups are drawn: samples of a prompt, and tokens of a sample, share an effect.

    Drawn one by one they look like many more observations than they are, and the interval is several times
    too short.
    """
    rng = np.random.default_rng(2)
    apart = [covers(*dumps(i), rng.integers(0, 2**62, (60, 4))) for i in range(200)]
    assert np.mean(apart) < 0.85

    iid = []
    for i in range(200):
        sums, lengths = dumps(i)
        n = lengths.sum()
        spread = np.sqrt(
            (((sums / lengths) ** 2 + 1) * lengths).sum() / n
        )  # of tokens, known exactly: noise has variance 1
        iid.append(abs(sums.sum() / n) <= 1.96 * spread / np.sqrt(n))
    assert np.mean(iid) < 0.5


def test_an_interval_needs_a_few_groups_and_defined_replicates():
    draws = resample.draws(KEYS[:40], 0)
    read = Sums.of({"x": torch.randn(40).double(), "tokens": torch.ones(40).double()}, draws).read()

    assert Reader(read, FEWEST_GROUPS).number(MEAN).interval is not None
    assert Reader(read, FEWEST_GROUPS - 1).number(MEAN).interval is None
    lone = Sums.of({"x": torch.ones(1).double(), "tokens": torch.ones(1).double()}, draws[:1]).read()
    assert (
        Reader(lone, 60).number(MEAN).interval is None
    )  # the only sequence is drawn 0 times in 37 % of replicates


def test_an_interval_is_the_central_95_percent_of_the_replicates():
    values = torch.cat((torch.tensor([50.0]), torch.arange(101.0))).double()
    read = {"x": values, "tokens": torch.ones(102).double()}

    assert Reader(read, 60).number(MEAN).interval == pytest.approx((2.5, 97.5))
