"""Ten dumps rebuilt from public threads: what is said of each, and whether a gate lets it pass.

`tests/field/labels.json` says what is true of them. A bug is never called honest; where its name is not found
the answer is `cannot_tell`, or another bug.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offpol_diag.gate import judged, required
from offpol_diag.report import answered
from tests.reading import analyze

FIELD = Path(__file__).parent / "field"
LABELS = json.loads((FIELD / "labels.json").read_text(encoding="utf-8"))
NAMED = {
    "n01_cp_zigzag": ("bug", "segment_order"),
    "n03c_control_lag1": ("honest_mismatch", "stale"),
    "n10_packed_order": ("bug", "row_permutation"),
    "n11_bf16_positions": ("bug", "long_context"),
    "n13c_nvfp4_control": ("honest_mismatch", "quantized_rollout"),
    "n15a_pd_first_end": ("bug", "off_by_one"),
}
"""Dumps whose cause is found; the gate passes what is honest."""
OPEN = {
    "n02_cp_label_roll": ("E[r] is 0.982 [0.980, 0.983] and not 1", "twice with the trainer"),
    "n12_tool_unattended": ("some tokens differ by a lot", "Write policy_lag"),
    "n17_dropout": ("the noise of single tokens is larger than rounding explains", "twice with the trainer"),
    "n20_adapter_switch": ("some tokens differ by a lot", "the trainer's checkpoint"),
}
"""Dumps of which only that they may have a bug is said, why, and what would decide."""


@pytest.fixture(scope="module")
def found():
    return {name: analyze([str(FIELD / f"{name}.parquet")], presets=()) for name in LABELS}


@pytest.mark.parametrize("name", NAMED)
def test_a_cause_that_is_established_is_named(found, name):
    verdict, cause = NAMED[name]
    diagnosis = found[name].diagnosis
    assert (diagnosis.verdict, [one.id for one in diagnosis.causes]) == (verdict, [cause])


@pytest.mark.parametrize("name", OPEN)
def test_a_mismatch_that_no_honest_cause_explains_is_open_and_a_bug_is_among_what_fits(found, name):
    diagnosis = found[name].diagnosis
    assert diagnosis.verdict == "cannot_tell"
    assert OPEN[name][0] in diagnosis.headline
    assert "bug" in {one.kind for one in diagnosis.candidates}
    assert OPEN[name][1] in diagnosis.decide
    assert "numerics" not in {one.id for one in diagnosis.candidates}


def test_what_is_mended_agrees_to_rounding(found):
    for name in ("n01_cp_zigzag", "n11_bf16_positions"):
        assert found[name].diagnosis.causes[0].after.k3 < 5e-4


def test_a_place_is_said_in_prompt_and_response_and_neither_side_is_accused(found):
    cause = found["n11_bf16_positions"].diagnosis.causes[0]
    said = "Beyond about token 256 of prompt and response, engine and trainer compute different things."
    assert cause.statement == said
    assert "stands alone" in cause.confirm


def test_where_an_adapter_switches_weights_are_the_first_that_fit(found):
    diagnosis = found["n20_adapter_switch"].diagnosis
    assert diagnosis.candidates[0].id == "weights_not_synced"
    assert diagnosis.where


@pytest.mark.parametrize("name", LABELS)
def test_a_bug_is_never_called_honest_and_no_gate_passes_it(found, name):
    honest = LABELS[name]["is"] == "honest"
    assert (found[name].diagnosis.verdict in ("healthy", "honest_mismatch")) is honest
    (verdict,) = judged(found[name], required(fail_on="bug"))
    assert (verdict.passed is True) is honest
    said = " ".join(fact.text for fact in answered(found[name]).facts)
    assert ("no sign of a bug" in said) is honest
