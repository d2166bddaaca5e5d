"""Whose logged numbers are computed: of presets that are named, and of the trainer that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import offpol_diag

SAMPLE = Path(__file__).parents[1] / "sample_data" / "healthy.parquet"


@pytest.mark.parametrize(
    ("how", "logged"),
    [
        ({}, set()),
        ({"trainer": "slime"}, {"token_is_veto", "slime_mis"}),
        ({"presets": "token_is,slime_mis,recompute"}, {"token_is", "slime_mis"}),
    ],
    ids=["by default", "a trainer", "presets by name"],
)
def test_only_what_is_asked_for_is_computed_of_what_trainers_log(how, logged):
    found = offpol_diag.analyze(SAMPLE, device="cpu", **how).summary

    assert {name for name, one in found.presets.items() if one.as_logged} == logged
