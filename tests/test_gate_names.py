"""Names that trainers log, where a number is named: each against what the trainer logs for a dump."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from offpol_diag.analyze import analyze
from offpol_diag.cli.defaults import sample
from offpol_diag.directions import GAP, PRESET
from offpol_diag.gate import aliases, judge, parse, requirements
from offpol_diag.gate.baseline import Baseline, compare
from offpol_diag.gate.bounds import Name, comparable, name, named_tolerance
from offpol_diag.gate.file import read
from offpol_diag.presets import catalogue
from offpol_diag.report.sections.gate import title
from offpol_diag.summary import PresetResult, Summary
from offpol_diag.trainers import LOGS
from tests.factory import make_summary

LOGGED = {one for log in LOGS.values() for one in log.names()}
ROWS = [(one, ours, GAP) for one, ours in aliases.GAP.items()]
ROWS += [(one, ours, PRESET) for one, ours in aliases.PRESET.items()]


@pytest.fixture(scope="module")
def everything() -> Summary:
    return analyze([str(sample())], presets=tuple(catalogue.load().values()), workers=1)


def logging(summary: Summary, logged: str, ours: str) -> list[PresetResult]:
    """Presets whose trainer logs that name, of the policies that our number is of."""
    policies = ("current",) if ours.startswith("total.") else ("old", "current") if "." in ours else ("old",)
    if logged.startswith(("policy/minibatch", "debug/")):
        policies = ("old", "current")
    rows = summary.presets.values()
    return [row for row in rows if row.policy in policies and row.as_logged.get(logged) is not None]


@pytest.mark.parametrize(("logged", "ours", "table"), ROWS)
def test_a_name_is_that_of_a_number_which_equals_what_is_logged(
    everything: Summary, logged: str, ours: str, table: dict[str, object]
) -> None:
    bare = ours.rpartition(".")[2] if table is GAP else ours
    assert bare in table
    assert logged not in table  # ours come first
    if logged not in LOGGED:  # verl's words without their namespace, and under that of 2025-10
        spaces = ("", "mismatch/", "rollout_corr/", "training/")
        word = logged.rpartition("/")[2].removeprefix("mismatch_")
        mapping = aliases.GAP if table is GAP else aliases.PRESET
        assert any(mapping.get(f"{one}{word}") == ours for one in spaces if f"{one}{word}" in LOGGED)
        return
    rows = logging(everything, logged, ours)
    assert rows, "no preset of the catalogue logs it"
    for row in rows if not aliases.unlike(logged) else ():
        number = everything.metrics[ours] if table is GAP else row.metrics[ours]
        assert number.value is not None
        assert math.isclose(row.as_logged[logged] or 0.0, number.value, rel_tol=1e-6, abs_tol=1e-12)


@pytest.mark.parametrize(("logged", "ours"), aliases.NEAREST.items())
def test_what_equals_no_number_of_ours_is_refused_with_its_meaning_and_the_nearest(
    logged: str, ours: str
) -> None:
    (verdict,) = judge(make_summary(), [parse(f"{logged}=1", "max")])

    assert logged in LOGGED
    assert ours.rpartition(".")[2] in GAP
    assert (verdict.name, verdict.said, verdict.passed) == (logged, "", None)
    assert "logs it: " in verdict.reason
    assert f"the nearest of ours is {ours}" in verdict.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rollout_rs_masked_fraction", "name one, PRESET.tokens_rejected"),
        ("rollout_corr/k3kl", "did you mean rollout_corr/k3_kl"),
        ("sampling/sampling_logp_difference/max", "trl logs it: "),
        ("rollout_corr/nothing_like_it_at_all_here", 'no metric "rollout_corr/nothing'),
    ],
)
def test_a_name_that_nobody_or_only_a_trainer_has_is_answered(given: str, said: str) -> None:
    (verdict,) = judge(make_summary(), [parse(f"{given}=1", "max")])

    assert verdict.passed is None
    assert said in verdict.reason


@pytest.mark.parametrize(
    ("given", "number", "over"),
    [
        ("kl", "k1", ""),
        ("p90:rollout_corr/k3_kl", "k3", "p90"),
        ("total.mismatch/k3_kl", "total.k3", ""),
        ("drift2.kl", "drift2.k1", ""),
        ("token_is.actor/ppo_kl", "token_is.ppo_kl", ""),
        ("step:token_is.rollout_is_eff_sample_size", "token_is.ess_tokens", "step"),
        ("my.tis.val/rho_clipfrac", "my.tis.truncated_high", ""),
        ("drift2.mismatch_kl/all/mean", "drift2.mismatch_kl/all/mean", ""),  # it has a gap of its own
    ],
)
def test_a_name_keeps_its_gap_preset_and_quantifier(given: str, number: str, over: str) -> None:
    found = name(given)

    assert found == Name(number, over)
    logged = given.rpartition(":")[2]
    assert found.said == ("" if logged == number else logged)


def test_it_is_understood_wherever_a_number_is_named_and_the_verdict_says_as_what(tmp_path: Path) -> None:
    file = tmp_path / "gates.toml"
    file.write_text(
        "[[bound]]\nname = 'step:rollout_corr/k3_kl'\nmax = 1\n"
        "[[bound]]\nname = 'rollout_rs_masked_fraction'\nmax = 1\npresets = ['seq_mis']\n"
        "[baseline]\nonly = ['rollout_corr/kl']\n[baseline.tolerances]\n'mismatch/k3_kl' = 1\n"
    )
    bounds = read(file).bounds
    assert [(one.name, one.said) for one in bounds] == [
        ("k3", "rollout_corr/k3_kl"),
        ("seq_mis.tokens_rejected", "seq_mis.rollout_rs_masked_fraction"),
    ]
    asked = requirements(["kl=1"], [], file, tmp_path / "b.json", ["chi2_seq=5%"], None, "", False)
    assert asked.by_step == ("k3",)
    assert asked.baseline is not None
    assert asked.baseline.named == (Name("k1"), Name("k3"), Name("chi2_sequence"))
    assert (comparable("kl"), named_tolerance("kl=1")[0]) == (Name("k1"), Name("k1"))

    summary = make_summary()
    (verdict,) = judge(summary, asked.bounds[:1])
    assert (verdict.name, verdict.said, verdict.passed) == ("k1", "kl", True)
    assert title(verdict) == "kl, taken as k1"
    (against,) = compare(summary, summary, Baseline(only=(name("mismatch/k3_kl"),)))
    assert (against.name, against.said) == ("k3", "mismatch/k3_kl")
    (bounded,) = judge(summary, [parse("token_is.rollout_is_eff_sample_size=0", "min")])
    assert "verl bounds the weights" in bounded.reason
