"""Intervals of numbers: from replicates, groups and the range of what is measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from offpol_diag.core.intervals import (
    ABOVE_ONE,
    ANYWHERE,
    FEWEST_GROUPS,
    POSITIVE,
    SHARE,
    Formula,
    Groups,
    Range,
    Reader,
    intervals,
    mean,
)
from offpol_diag.core.preset_numbers import idle
from offpol_diag.core.state import Table
from offpol_diag.presets import catalogue
from tests.reading import analyze

MEAN = Formula("x", "", mean("x"))


def test_an_interval_needs_a_few_groups_and_defined_replicates():
    def read(many):
        columns = {"x": np.random.default_rng(0).standard_normal(many), "tokens": np.ones(many)}
        return Reader.of(Table.of(columns, np.arange(many, dtype=np.uint64)), 0, many)

    assert read(FEWEST_GROUPS).number(MEAN).interval is not None
    assert read(FEWEST_GROUPS - 1).number(MEAN).interval is None
    lone = replace(read(1), groups=Groups(60, 60.0))
    assert lone.number(MEAN).interval is None  # the only one is drawn 0 times in 37% of replicates


def number(values: np.ndarray, groups: float = 60, within: Range = ANYWHERE):
    """Return the interval of [1+B] values among groups of which so many count in effect."""
    return intervals(values[None], Groups(101, groups), [within])[0]


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


@pytest.mark.parametrize(
    ("within", "value", "half"),
    [(ANYWHERE, 1.7e308, 1e308), (POSITIVE, 1e308, 2e308), (ABOVE_ONE, 1e300, 1e303)],
)
def test_an_end_of_an_interval_that_overflows_is_the_largest_float(within, value, half):
    low, high = within.around(value, half)
    assert within.low < low < value < high == sys.float_info.max


def test_groups_of_unequal_size_count_as_fewer():
    """One prompt with half of all tokens among 101: (2·100)² / (100² + 100) in effect, not 101."""
    halved = sized([50.0, 50.0] + [1.0] * 100, [0, *range(101)])  # in two rows
    drawn = np.random.default_rng(0).standard_normal(513)

    assert halved == Groups(101, pytest.approx(200**2 / (100**2 + 100)))
    assert sized([3.0] * 101) == Groups(101, 101.0)
    wide, narrow = (number(drawn, groups) for groups in (halved.effective, 101.0))
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])
    assert not sized([1000.0] + [1.0] * 100).enough  # one prompt, in effect
    assert sized([0.0] * 9) == Groups(9, 9.0)


def sized(tokens: list[float], groups: Sequence[int] | None = None) -> Groups:
    """Return the groups of a table of rows of so many tokens."""
    keys = np.array(groups if groups is not None else range(len(tokens)), np.uint64)
    return Groups.of(Table.of({"tokens": np.array(tokens)}, keys), len(set(keys.tolist())))


def share(seen: float, units: float, counts: bool = True) -> tuple[float, float] | None:
    read = {"x": np.full((65,), seen), "sequences": np.full((65,), units)}
    row = Formula("x", "", mean("x", "sequences"), "fraction", counts=counts)
    return Reader(read, Groups(60, 60.0)).number(row).interval


def test_no_event_among_n_is_no_proof_that_there_is_none():
    """Clopper–Pearson: the share at which seeing none has a chance of 2.5%."""
    expected = stats.binomtest(0, 1000).proportion_ci(0.95).high

    assert share(0, 1000) == pytest.approx((0, expected))
    assert share(1000, 1000) == pytest.approx((1 - expected, 1))
    assert share(0, 1000, counts=False) == (0, 0)
    assert share(500, 1000) == (0.5, 0.5)


def test_what_a_preset_cannot_cause_is_exactly_zero_and_what_was_not_seen_is_not():
    """No token of this dump is vetoed: under one preset it could have been, under the other not."""
    rows = {name: idle(preset) for name, preset in catalogue.load().items()}
    assert {"tokens_rejected", "vetoed", "truncated_low", "tokens_weighted"} <= rows["token_is"]
    assert "truncated_high" not in rows["token_is"]
    assert not {"tokens_rejected", "sequences_dropped", "tokens_weighted"} & rows["geo_rs"]
    assert "tokens_weighted" not in rows["token_icepop"]
    assert "truncated_high" in rows["recompute"]

    found = analyze(["sample_data/healthy.parquet"], presets="token_is,geo_rs")
    never, unseen = (found.preset(name)["vetoed"] for name in ("token_is", "geo_rs"))
    assert (never.value, never.interval, unseen.value) == (0, (0, 0), 0)
    assert unseen.interval == pytest.approx((0, stats.binomtest(0, 512).proportion_ci(0.95).high))
