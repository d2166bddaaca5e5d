"""The table of numbers: names, directions, bands and published levels."""

import math
from itertools import pairwise

import pytest

from offpol_diag.metrics import BANDS, METRICS, band, better, crossed, start, start_of_next, worse
from offpol_diag.number import Number


def test_names_and_titles_are_unique():
    assert len({one.title for one in METRICS.values()}) == len(METRICS)


@pytest.mark.parametrize("name", BANDS)
def test_bands_follow_each_other_towards_the_worse(name):
    rows = BANDS[name]
    assert start(rows[0]) is None
    assert start_of_next(rows[-1]) is None
    for one, following in pairwise(rows):
        assert start_of_next(one) == start(following)
        inside = start_of_next(one) * (1.01 if worse(name).sign == "lower" else 0.99)
        assert band(name, Number(value=max(inside, 1.0) if name == "ppl_ratio" else inside)) == one


@pytest.mark.parametrize(
    ("name", "of"), [("k3", "k3"), ("total.k3", "k3"), ("seq_mis.k3", "k3"), ("drift2.k1", "k1")]
)
def test_a_prefix_changes_no_direction(name, of):
    assert worse(name) == METRICS[of].worse


@pytest.mark.parametrize(
    ("name", "value", "levels"),
    [
        ("k3", 0.015, []),
        ("k3", 0.02, ["above the merge gate"]),
        ("k3", 2.0, ["configuration", "above the merge gate"]),
        ("k1", -0.2, ["large KL"]),
        ("mean_ratio", 1.6, ["weights off centre"]),
        ("mean_ratio", 0.4, ["weights off centre"]),
        ("mean_ratio", 1.2, []),
        ("ess_tokens", 0.2, ["low ESS"]),
        ("ess_tokens", 0.4, []),
        ("ess_sequences", 0.05, ["product ratios unusable"]),
        ("prob_diff_mean", math.nan, []),
        ("weight_min", -5.0, []),
    ],
)
def test_a_level_is_crossed_in_the_worse_direction(name, value, levels):
    assert [one.name for one in crossed(METRICS[name], value)] == levels


def test_better_is_said_of_ranked_numbers_alone():
    words = {
        "ess_tokens": "higher",
        "weight_max": "lower",
        "weight_mean": "neither",
        "update_kept": "neither",
    }
    assert {name: better(name) for name in words} == words


@pytest.mark.parametrize(
    ("value", "log10", "name"), [(None, 400.0, "high"), (None, None, None), (1.5, None, "elevated")]
)
def test_a_value_beyond_float64_has_the_worst_band(value, log10, name):
    found = band("chi2_token", Number(value=value, log10=log10))
    assert (found and found.name) == name
