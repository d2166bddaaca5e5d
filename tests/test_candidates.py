"""What could be recommended: each row is the preset that it names, set as it says."""

from __future__ import annotations

import math
import re

import pytest

from offpol_diag import catalogue
from offpol_diag.candidates import CANDIDATES, DEFAULT, NOTHING, REFERENCE, presets
from offpol_diag.formulas import method
from offpol_diag.tuning import tuned

SHIPPED = catalogue.load()
SIDES = ("old", "current")
EACH = [pytest.param(one, id=one.name) for one in CANDIDATES]

FORMULAS = {
    "none": "no correction",
    "token_tis_1.5": "weight min(r_t, 1.5)",
    "token_tis_2.0": "weight min(r_t, 2)",
    "token_tis_3.0": "weight min(r_t, 3)",
    "token_tis_5.0": "weight min(r_t, 5)",
    "token_icepop_0.5_2.0": "weight r_t where 0.5 ≤ r_t ≤ 2, else 0",
    "token_icepop_0.5_5.0": "weight r_t where 0.5 ≤ r_t ≤ 5, else 0",
    "token_mask_0.5_2.0": "keep tokens with 0.5 ≤ r_t ≤ 2",
    "seq_tis_2.0": "weight min(∏r, 2)",
    "seq_mis_0.5_2.0": "weight min(∏r, 2); keep sequences with 0.5 ≤ ∏r ≤ 2",
    "geo_rs_0.1%": "keep sequences with 0.999001 ≤ (∏r)^(1/n) ≤ 1.001",
    "geo_rs_1%": "keep sequences with 0.99 ≤ (∏r)^(1/n) ≤ 1.01",
    "geo_rs_1%_token_tis_2.0": "weight min(r_t, 2); keep sequences with 0.99 ≤ (∏r)^(1/n) ≤ 1.01",
    "veto_token_tis_2.0": "weight min(r_t, 2); veto any r_t < 0.0001",
}
JUDGES = {"nothing": 1, "token": 7, "sequence": 6}


def acts(preset):
    """What a preset does to weights and masks."""
    return preset.weight, preset.reject, preset.veto


def bounds(preset):
    """Every number that bounds r."""
    parts = (preset.weight, *preset.reject, preset.veto)
    return {x for part in parts if part for x in (part.lower, part.upper) if x is not None}


def test_names_and_titles_are_unique():
    assert len({one.name for one in CANDIDATES}) == len({one.title for one in CANDIDATES}) == len(CANDIDATES)


def test_the_default_the_reference_and_no_correction_are_among_them():
    assert {NOTHING, DEFAULT, REFERENCE} <= set(CANDIDATES)
    assert (NOTHING.name, DEFAULT.name, REFERENCE.name) == ("none", "token_tis_2.0", "token_tis_5.0")


def test_there_is_one_formula_for_each_row():
    assert list(FORMULAS) == [one.name for one in CANDIDATES]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("one", EACH)
def test_a_row_is_what_its_title_says_on_either_train_side(one, side):
    preset = one.preset(side)

    assert (preset.name, preset.policy, preset.apply) == (one.name, side, True)
    assert method(preset) == FORMULAS[one.name]
    assert preset in presets(side)


@pytest.mark.parametrize("one", EACH)
def test_both_presets_exist_with_the_train_side_that_they_are_for(one):
    assert SHIPPED[one.decoupled].policy == "old"
    assert one.bypass is None or SHIPPED[one.bypass].policy == "current"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("one", EACH)
def test_what_would_be_recommended_does_what_was_measured(one, side):
    """The preset that is named, set as is said, has the weights and rules of the row."""
    name, _, settings = one.named(side)
    if name is None or (side == "current" and one.instead is not None):
        return
    assert acts(tuned(SHIPPED[name], settings)) == acts(one.preset(side))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("one", EACH)
def test_the_threshold_that_is_printed_is_the_bound_that_the_named_preset_applies(one, side):
    """Where a preset has no weight, the PPO clip of its loss is what bounds the ratio."""
    name, threshold, settings = one.named(side)
    if name is None:
        return
    preset = tuned(SHIPPED[name], settings)
    applied = bounds(preset)
    if not applied and threshold is not None:
        applied = {round(1 - preset.clip.low, 9), round(1 + preset.clip.high, 9)}
    said = {float(x) for x in re.findall(r"\d+\.?\d*(?:e-\d+)?", threshold or "")}
    if threshold == "±0.1%":
        said = {1 / 1.001, 1 / 0.999}
    assert len(said) == len(applied)
    assert all(any(math.isclose(x, y) for y in applied) for x in said)


def test_where_only_a_preset_like_it_is_there_the_row_says_what_bounds_r_instead():
    assert DEFAULT.named("current") == ("bypass_ppo_clip", "0.8–1.2", {})
    assert DEFAULT.named("old") == ("token_is", "2.0", {})  # the preset has it anyway
    assert NOTHING.named("current") == ("ppo_is", None, {})
    assert {one.judges for one in CANDIDATES if one.instead} == {"token"}


def test_every_row_says_what_is_judged():
    counts = {kind: sum(one.judges == kind for one in CANDIDATES) for kind in JUDGES}
    assert counts == JUDGES
    for one in CANDIDATES:
        preset = one.preset("old")
        whole = (
            preset.veto is not None
            or any(not rule.on_tokens for rule in preset.reject)
            or (preset.weight is not None and preset.weight.over != "token")
        )
        assert (one.judges == "sequence") is whole
        assert (one.judges == "nothing") is (method(preset) == "no correction")
