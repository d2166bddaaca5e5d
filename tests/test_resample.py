"""The bootstrap: Poisson(1) draws that depend on the group alone, and intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from offpol_diag.analyze import analyze
from offpol_diag.engine import bootstrap, method
from offpol_diag.engine.formula import (
    ANYWHERE,
    FEWEST_GROUPS,
    POSITIVE,
    SHARE,
    Formula,
    Range,
    Reader,
    effective,
    mean,
)
from offpol_diag.presets import catalogue

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sizes that overflow

KEYS = np.arange(3000, dtype=np.int64) * 7919 - 10_000_000
MEAN = Formula("x", "", "tokens", "", mean("x"))


def poisson_p_value(draws: np.ndarray) -> float:
    """Compute the p-value of the chi-square test against Poisson(1), counts of 5 and more taken together."""
    seen = np.bincount(draws.astype(int).clip(max=5).ravel(), minlength=6)
    chance = [math.exp(-1) / math.factorial(k) for k in range(5)]
    return float(stats.chisquare(seen, np.array([*chance, 1 - sum(chance)]) * seen.sum()).pvalue)


@pytest.mark.parametrize("seed", [0, -7])
def test_each_replicate_and_each_key_is_poisson_with_mean_one_on_its_own(seed):
    draws = bootstrap.draws(KEYS, seed)
    by_replicate = [poisson_p_value(draws[:, b]) for b in range(draws.shape[1])]
    by_key = [poisson_p_value(bootstrap.draws(KEYS[i : i + 1], seed, 3000)) for i in range(50)]

    assert min(by_replicate) > 1e-3 / len(by_replicate)
    assert min(by_key) > 1e-3 / len(by_key)


def test_a_draw_is_a_function_of_key_seed_and_replicate():
    whole = bootstrap.draws(KEYS, 3, 64)
    order = np.random.default_rng(0).permutation(len(KEYS))

    assert np.array_equal(bootstrap.draws(KEYS[order], 3, 64), whole[order])
    assert np.array_equal(
        np.concatenate([bootstrap.draws(part, 3, 64) for part in np.array_split(KEYS, 5)]), whole
    )
    assert np.array_equal(bootstrap.draws(KEYS, 3, 33), whole[:, :33])
    assert bootstrap.draws(KEYS[:0], 3, 64).shape == (0, 64)
    assert not np.array_equal(bootstrap.draws(KEYS, 4, 64), whole)


def test_replicates_keys_and_seeds_are_uncorrelated():
    draws = bootstrap.draws(KEYS, 0, 128)
    across_replicates = np.corrcoef(draws.T) - np.eye(128)
    across_keys = np.corrcoef(bootstrap.draws(KEYS[:128], 0, 3000)) - np.eye(128)
    other = bootstrap.draws(KEYS, 1, 128)
    across_seeds = [np.corrcoef(draws[:, b], other[:, b])[0, 1] for b in range(128)]

    # 8128 correlations of 3000 pairs: each has a standard error of 1/√3000, the largest of them stays
    # below 5 of it.
    for correlations in (across_replicates, across_keys, np.array(across_seeds)):
        assert abs(correlations).max() < 5 / math.sqrt(3000)


def test_keys_that_differ_in_one_bit_are_drawn_apart():
    near = np.array([1 << bit for bit in range(63)] + [0, -1], dtype=np.int64)
    correlations = np.corrcoef(bootstrap.draws(near, 0, 3000)) - np.eye(len(near))

    assert abs(correlations).max() < 5 / math.sqrt(3000)


WORDS = np.array([0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63), 0x5EED0F0F, -77, 12345, 3, 8])
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

    mixed = bootstrap.mix(x)

    assert mixed.shape == x.shape
    assert [a % 2**64 for a in mixed.flatten().tolist()] == [splitmix(a) for a in x.flatten().tolist()]
    assert np.array_equal(x, before)


def test_an_interval_needs_a_few_groups_and_defined_replicates():
    draws = bootstrap.draws(KEYS[:40], 0)
    x = np.random.default_rng(0).standard_normal(40)
    read = dict(zip(("x", "tokens"), bootstrap.resampled(np.stack((x, np.ones(40))), draws), strict=True))

    assert Reader(read, FEWEST_GROUPS).number(MEAN).interval is not None
    assert Reader(read, FEWEST_GROUPS - 1).number(MEAN).interval is None
    lone = dict.fromkeys(("x", "tokens"), bootstrap.resampled(np.ones((1, 1)), draws[:1])[0])
    assert (
        Reader(lone, 60).number(MEAN).interval is None
    )  # the only sequence is drawn 0 times in 37% of replicates


def number(values: np.ndarray, groups: int = 60, within: Range = ANYWHERE, **sizes: np.ndarray):
    """Return the interval of [1+B] values among so many groups, all of one size unless `tokens` is given."""
    return Reader(sizes, groups).number(Formula("x", "", "", "", lambda get: values, within)).interval


def t_times(groups: float, replicates: int) -> float:
    """Compute half a width in standard deviations of the replicates, by scipy."""
    freedom = 1 / (1 / (groups - 1) + 1 / (replicates - 1))
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(groups / (groups - 1))


@pytest.mark.parametrize("groups", [5, 8, 32, 1000])
def test_an_interval_is_a_t_interval_with_what_the_bootstrap_lacks_of_the_variance(groups):
    drawn = np.random.default_rng(4).standard_normal(256) + 3
    half = t_times(groups, 256) * float(drawn.std(ddof=1))

    assert number(np.concatenate((np.array([3.0]), drawn)), groups) == pytest.approx(
        (3 - half, 3 + half), rel=1e-2
    )


@pytest.mark.parametrize(
    ("value", "within", "scale", "back", "slope"),
    [
        (0.02, POSITIVE, math.log, math.exp, 1 / 0.02),
        (0.5, Range(low=-1.0), math.log1p, math.expm1, 1 / 1.5),
        (0.98, SHARE, lambda x: math.log(x / (1 - x)), lambda y: 1 / (1 + math.exp(-y)), 1 / (0.98 * 0.02)),
        (0.9, Range(-1.0, 1.0), math.atanh, math.tanh, 1 / (1 - 0.81)),
    ],
)
def test_an_interval_stays_in_the_range_by_the_scale_that_has_no_end(value, within, scale, back, slope):
    drawn = value + 0.006 * np.random.default_rng(2).standard_normal(256)
    half = slope * t_times(60, 256) * float(drawn.std(ddof=1))
    found = number(np.concatenate((np.array([value]), drawn)), within=within)

    assert found == pytest.approx((back(scale(value) - half), back(scale(value) + half)), rel=2e-3)
    assert within.low < found[0] < value < found[1] < within.high


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_share_at_an_end_that_replicates_leave_is_cut_off_there(value):
    drawn = value + np.array([0.2, -0.2, 0.1, -0.1] * 16)
    low, high = number(np.concatenate((np.array([value]), drawn)), within=SHARE)

    assert (low == 0 < high < 1) if value == 0 else (0 < low < 1 == high)


def test_groups_of_unequal_size_count_as_fewer():
    """One prompt with half of all tokens among 101: (2·100)² / (100² + 100) in effect, not 101."""
    sizes = np.array([100.0] + [1.0] * 100)
    drawn = bootstrap.draws(KEYS[:101], 0, 20_000).T @ sizes
    tokens = np.concatenate(([sizes.sum()], drawn))

    assert effective(tokens, 101) == pytest.approx(200**2 / (100**2 + 100), rel=0.05)
    assert effective(np.concatenate((np.array([101.0]), np.full((9,), 101.0))), 101) == 101
    drawn = np.random.default_rng(0).standard_normal(257)
    assert wide(number(drawn, 101, tokens=tokens)) > 1.5 * wide(number(drawn, 101))


def wide(interval: tuple[float, float] | None) -> float:
    assert interval is not None
    return interval[1] - interval[0]


def test_a_dump_that_is_one_prompt_in_effect_has_no_interval():
    sizes = np.array([1000.0] + [1.0] * 100)
    tokens = np.concatenate(([sizes.sum()], bootstrap.draws(KEYS[:101], 0).T @ sizes))

    assert number(np.random.default_rng(0).standard_normal(257), 101, tokens=tokens) is None


def share(seen: float, units: float, counts: bool = True) -> tuple[float, float] | None:
    read = {"x": np.full((65,), seen), "sequences": np.full((65,), units)}
    return (
        Reader(read, 60)
        .number(Formula("x", "fraction", "", "", mean("x", "sequences"), counts=counts))
        .interval
    )


def test_no_event_among_n_is_no_proof_that_there_is_none():
    """Clopper–Pearson: the share at which seeing none has a chance of 2.5%."""
    expected = stats.binomtest(0, 1000).proportion_ci(0.95).high

    assert share(0, 1000) == pytest.approx((0, expected))
    assert share(1000, 1000) == pytest.approx((1 - expected, 1))
    assert share(0, 1000, counts=False) == (0, 0)
    assert share(500, 1000) == (0.5, 0.5)


def test_events_that_a_preset_cannot_cause_are_exactly_zero():
    rows = catalogue.load()

    assert {"tokens_rejected", "vetoed", "truncated_low"} <= method.idle(rows["token_is"])
    assert not {"truncated_high"} & method.idle(rows["token_is"])
    assert not {"tokens_rejected", "sequences_dropped", "tokens_weighted"} & method.idle(rows["geo_rs"])
    assert "tokens_weighted" in method.idle(rows["token_is"])
    assert not {"tokens_weighted"} & method.idle(rows["token_icepop"])
    assert "truncated_high" in method.idle(rows["recompute"])


def test_a_result_tells_what_cannot_happen_from_what_was_not_seen():
    """No token of this dump is vetoed: under one preset it could have been, under the other not."""
    rows = catalogue.load()
    found = analyze(["sample_data/healthy.parquet"], presets=[rows["token_is"], rows["geo_rs"]])
    never, unseen = (found.preset(name)["vetoed"] for name in ("token_is", "geo_rs"))

    assert (never.value, never.interval) == (0, (0, 0))
    assert unseen.value == 0
    assert unseen.interval == pytest.approx((0, stats.binomtest(0, 512).proportion_ci(0.95).high))


@pytest.mark.parametrize("sizes", [[1e300, 1e300, 3e300], [1e152, -1e160, 1e160], [1.7e308, -1.7e308, 0.0]])
def test_sizes_whose_squares_overflow_are_no_crash(sizes):
    found = effective(np.array(sizes, dtype=np.float64), 50)

    assert math.isnan(found) or 0 <= found <= 50
