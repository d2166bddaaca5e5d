"""Whose logged numbers are computed: of what can be recommended and of the trainer, or of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from offpol_diag.analyze import analyze

SAMPLE = Path(__file__).parents[1] / "sample_data" / "healthy.parquet"
NAMES = "token_is,slime_mis,areal_decoupled,recompute,bypass_pg_token_is"
BYPASS = "bypass_pg_token_is"
"""What would be recommended for a dump without π_old; this one has it."""


def logged(summary):
    found = {name for name, one in summary.presets.items() if one.as_logged}
    left_out = set(summary.run.logs_left_out)
    assert not found & left_out
    return found, left_out


@pytest.mark.parametrize(
    ("how", "found", "left_out"),
    [
        ({}, {"token_is", "slime_mis", "areal_decoupled", BYPASS}, set()),
        ({"every_log": False, "trainer": "slime"}, {"token_is", "slime_mis"}, {"areal_decoupled", BYPASS}),
        ({"every_log": False, "trainer": "areal"}, {"token_is", "areal_decoupled"}, {"slime_mis", BYPASS}),
        ({"every_log": False}, {"token_is"}, {"slime_mis", "areal_decoupled", BYPASS}),
    ],
    ids=["every log", "slime", "areal", "that of the provenance"],
)
def test_logs_that_nobody_reads_are_left_out_and_named(how, found, left_out):
    summary = analyze([str(SAMPLE)], presets=NAMES, **how)
    assert logged(summary) == (found, left_out)
