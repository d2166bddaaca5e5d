"""What can be recommended: each row is the preset that it names, set as it says."""

from __future__ import annotations

import math
import re

import pytest

from offpol_diag.presets import catalogue
from offpol_diag.presets.candidates import CANDIDATES, DEFAULT, ICEPOP, MARK, MASK, NOTHING, presets
from offpol_diag.presets.formulas import method
from offpol_diag.presets.tuning import tuned

SHIPPED = catalogue.load()
SIDES = ("old", "current")
ON_SIDE = [
    pytest.param(one, side, id=f"{one.name}-{side}")
    for one in CANDIDATES
    for side in SIDES
    if one.preset_name(side)
]
"""A candidate and a train side that a preset has it for."""

FORMULAS = {
    "none": "no correction",
    "token_tis_2.0": "weight min(r_t, 2)",
    "token_icepop_0.5_5.0": "weight r_t where 0.5 ≤ r_t ≤ 5, else 0",
    "token_mask_0.5_2.0": "keep tokens with 0.5 ≤ r_t ≤ 2",
}


def bounds(preset):
    """Every number that bounds r."""
    parts = (preset.weight, *preset.reject, preset.veto)
    return {x for part in parts if part for x in (part.lower, part.upper) if x is not None}


def test_names_and_titles_are_unique():
    assert len({one.name for one in CANDIDATES}) == len({one.title for one in CANDIDATES}) == len(CANDIDATES)
    assert CANDIDATES == (NOTHING, DEFAULT, ICEPOP, MASK)


def test_only_the_mask_is_missing_for_dumps_without_old_log_probs():
    assert {one.name for one in CANDIDATES if one.preset_name("current") is None} == {MASK.name}
    assert [len(presets(side)) for side in SIDES] == [4, 3]


@pytest.mark.parametrize(("one", "side"), ON_SIDE)
def test_what_is_recommended_does_what_its_title_and_threshold_say_and_what_was_measured(one, side):
    """The preset that is named, set as is said, has the weights and rules of the row."""
    measured, shown = one.preset(side), tuned(SHIPPED[one.preset_name(side)], one.changes(side))
    assert (measured.name, measured.policy, measured.apply) == (MARK + one.name, side, True)
    assert method(measured) == FORMULAS[one.name]
    assert measured in presets(side)
    assert (shown.weight, shown.reject, shown.veto) == (measured.weight, measured.reject, measured.veto)

    said, applied = {float(x) for x in re.findall(r"\d+\.?\d*", one.threshold or "")}, bounds(shown)
    assert len(said) == len(applied)
    assert all(any(math.isclose(x, y) for y in applied) for x in said)


def test_a_setting_that_the_preset_has_anyway_is_not_repeated():
    assert DEFAULT.settings == (("weight.upper", "2.0"),)
    assert DEFAULT.changes("old") == DEFAULT.changes("current") == {}
    assert MASK.changes("old") == {"reject.lower": "0.5", "reject.upper": "2.0"}


def test_no_name_of_a_preset_could_be_that_of_a_candidate():
    assert not [name for name in SHIPPED if MARK in name]
