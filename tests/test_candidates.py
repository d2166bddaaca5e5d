"""Honest causes are named where the dump records them; else the causes that fit are listed, without a fix."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from drawn import html, markdown, terminal
from factory import make_summary
from faults import diagnosed
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.diagnosis import decide
from offpol_diag.diagnosis.candidates import evidence
from offpol_diag.diagnosis.metadata import FLOORS, PLAIN, QUANTISED, Metadata
from offpol_diag.diagnosis.profile import Common, Profile
from offpol_diag.diagnosis.registry import BY_ID, CAUSES
from offpol_diag.diagnosis.rows import Rows
from offpol_diag.gate import judged, required
from offpol_diag.number import Number
from offpol_diag.report.gate import junit as render_junit
from offpol_diag.result import CandidateCause, Diagnosis, loads
from tests.reading import analyze

SAMPLES = Path(__file__).parents[1] / "sample_data"
PROMPTS, ANSWERS, TOKENS, WORDS = 32, 4, 40, 6
S = PROMPTS * ANSWERS
VERDICTS = {one.id: one.verdict for one in CAUSES}

# ---------------------------------------------------------------- dumps

FP8, BF16 = {"rollout_dtype": "bfloat16, linear weights float8_e4m3fn"}, {"rollout_dtype": "bfloat16"}
MOE, AWQ = {"model": "Qwen3-30B-A3B"}, {"quantization": "awq"}


SHAPE = {"size": 0.1, "common": 0.15, "lags": None, "steps": 1, "by_lag": None, "by_step": None}
SHAPE |= {"provenance": None, "versions": False, "ids": True, "outliers": 0.0}


def made(tmp_path, **how):
    """Diagnose a dump with noise of size · (1 − π) in log π, a share `common` of it by kind of token.

    `by_lag` and `by_step` multiply the size of a row; `lags` are repeated over the rows. `outliers` is the
    share of tokens that are off by 0.7.
    """
    given = SHAPE | how
    common, chance, shape = given["common"], np.random.default_rng(5), (S, TOKENS)
    kind = chance.integers(0, WORDS, shape)
    before = np.pad(kind, ((0, 0), (1, 0)), constant_values=WORDS)[:, :-1]
    shift = chance.normal(size=(PROMPTS, WORDS + 1, WORDS))[np.arange(S)[:, None] // ANSWERS, before, kind]
    step = np.arange(S) % given["steps"]
    lag = np.resize(given["lags"] or [0], S)
    times = np.array(given["by_step"] or [1.0] * given["steps"], float)[step]
    times *= np.array([given["by_lag"][one] if given["by_lag"] else 1.0 for one in lag])
    q = -chance.exponential(1, shape) - 0.03
    wide = given["size"] * times[:, None] * -np.expm1(q)
    delta = wide * (np.sqrt(common) * shift + np.sqrt(1 - common) * chance.normal(size=shape)) - wide**2 / 2
    far = chance.random(shape) < given["outliers"]
    delta = np.where(far, np.where(chance.random(shape) < 1 / (1 + np.exp(0.7)), 0.7, -0.7), delta)
    columns = {"rollout_log_probs": list(q), "old_log_probs": list(np.minimum(q + delta, -1e-6))}
    columns |= {"group_id": np.arange(S) // ANSWERS, "step": step}
    columns |= {"token_ids": list(kind)} if given["ids"] else {}
    if given["versions"]:
        columns |= {"train_version": np.full(S, 9), "rollout_version": 9 - lag}
    elif given["lags"]:
        columns |= {"policy_lag": lag}
    return diagnosed(tmp_path, columns, recorded=given["provenance"])


RISING, FLAT = {0: 0.1, 1: 1.0, 2: 2.0}, {0: 1.0, 1: 1.0, 2: 1.0}
GROWTH = (0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
LATE = (0.03, 1.0, 1.0, 1.1, 1.2, 1.4, 1.4, 1.3)
"""Of an engine that gets no weights: rounding at the first step, and nearly level from the second on."""
SAW = (1e-5, 1.0, 1.5, 2.0, 1e-5, 1.0, 1.5, 2.0)
GROWS = {"steps": 8, "by_step": GROWTH}

NAMED = {
    "fp8 in the metadata": ("quantized_rollout", {"provenance": FP8}),
    "a quantisation in the metadata": ("quantized_rollout", {"provenance": AWQ, "size": 0.3}),
    "K3 rises with the lag": ("stale", {"lags": [0, 1, 2], "by_lag": RISING}),
    "K3 rises with the versions": ("stale", {"lags": [0, 1, 2], "by_lag": RISING, "versions": True}),
    "no row at lag 0": ("stale", {"lags": [1, 2, 4], "by_lag": {1: 1.0, 2: 2.0, 4: 4.0}}),
    "a quantised rollout, and K3 rises": ("stale", {"lags": [0, 1, 2], "by_lag": RISING, "provenance": FP8}),
    "noise of single tokens": ("numerics", {"size": 0.12, "common": 0.0}),
    "noise of single tokens, all behind": ("numerics", {"size": 0.12, "common": 0.0, "lags": [1]}),
    "outliers of experts": (
        "moe_outliers",
        {"size": 0.02, "outliers": 0.01, "provenance": MOE, "ids": False},
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_cause_is_named_that_the_dump_records_or_that_has_a_shape_of_its_own(tmp_path, case):
    cause, how = NAMED[case]
    found = made(tmp_path, **how)
    assert (found.verdict, [one.id for one in found.causes]) == ("honest_mismatch", [cause])
    assert (found.candidates, found.decide) == ([], "")


UNSYNCED = {
    "growth": ("since step 3", {"by_step": (0.02, 0.05, 0.1, 2.0, 2.5, 3.0, 3.5, 4.0)}),
    "from the second step on": ("since step 1", {"by_step": LATE, "size": 0.3}),
    "a saw-tooth": ("at 6 of 8 steps (in sync again at step 4)", {"by_step": SAW, "size": 0.3}),
}


@pytest.mark.parametrize("case", UNSYNCED)
def test_a_level_that_rises_from_rounding_at_lag_0_is_weights_that_do_not_arrive(tmp_path, case):
    since, how = UNSYNCED[case]
    found = made(tmp_path, lags=[0], steps=8, **how)
    assert (found.verdict, [one.id for one in found.causes]) == ("bug", ["weights_not_synced"])
    assert since in found.headline
    assert "the same weights leave up to 0.06" in found.causes[0].statistic


@pytest.mark.parametrize(
    "how",
    [
        {"lags": [2], "by_step": GROWTH},
        {"by_step": GROWTH},
        {"lags": [0], "by_step": [1.0] * 8},
        {"lags": [0], "by_step": [1, 1, 1, 1, 1, 1, 1, 2]},
        {"lags": [0], "by_step": [0.1] * 3 + [3.0] + [0.1] * 4},
    ],
    ids=["at a constant lag", "no lag", "level", "never at rounding", "one odd step"],
)
def test_weights_are_not_said_not_to_arrive_where_larger_updates_or_few_bits_look_the_same(tmp_path, how):
    found = made(tmp_path, steps=8, **how)
    assert "weights_not_synced" not in [one.id for one in found.causes]


OPEN = {
    "broad": (["quantized_rollout", "stale"], {}),
    "broad, and bf16 in the metadata": (["stale"], {"provenance": BF16}),
    "broad, and fp8 of the trainer": (["quantized_rollout"], {"provenance": {"trainer_dtype": "fp8"}}),
    "wide": (["stale", "weights_not_synced"], {"size": 0.4, "common": 0.4}),
    "flat over the lag": (["quantized_rollout"], {"lags": [0, 1, 2], "by_lag": FLAT}),
    "all behind": (["stale"], {"lags": [2]}),
    "all in sync": (["quantized_rollout"], {"lags": [0]}),
    "all in sync, and wide": (["weights_not_synced"], {"lags": [0], "size": 0.4, "common": 0.4}),
    "all in sync, and noise": ([], {"lags": [0], "size": 0.3, "common": 0.0}),
    "growth, no lag": (["stale", "weights_not_synced"], GROWS),
    "growth at lag 2": (["stale"], {**GROWS, "lags": [2]}),
    "growth, and fp8": (["quantized_rollout", "stale"], {**GROWS, "provenance": FP8}),
    "a saw-tooth": (["weights_not_synced"], {"steps": 8, "by_step": SAW}),
    "outliers": (["moe_outliers"], {"size": 0.02, "outliers": 0.01, "ids": False}),
    "a usual token at rounding, and K3 not": (
        ["moe_outliers"],
        {"size": 0.02, "outliers": 0.01, "common": 0.0},
    ),
    "rises with the lag, ten times that of bf16 at lag 0": (
        ["weights_not_synced"],
        {"lags": [0, 1, 2], "by_lag": {0: 0.5, 1: 1.0, 2: 2.0}, "size": 0.6, "provenance": BF16},
    ),
    "more than 4 bits explain": (["weights_not_synced"], {"provenance": AWQ, "size": 1.6}),
    "more than fp8 explains": (["stale"], {"provenance": FP8, "size": 1.2, "common": 0.2}),
}
"""Case → causes that nothing rules out, and the dump."""
DECIDE = {
    "broad": "Write policy_lag (or",
    "all behind": "right after a sync",
    "all in sync": "in bf16, eager, without prefix cache",
    "all in sync, and wide": "an engine that has just loaded",
    "all in sync, and noise": "twice with the trainer",
    "outliers": "twice with the trainer",
}
"""The measurement that tells the first candidate from another."""


@pytest.mark.parametrize("case", OPEN)
def test_else_the_causes_that_fit_are_listed_with_a_sentence_for_and_against_and_what_decides(tmp_path, case):
    ids, how = OPEN[case]
    found = made(tmp_path, **how)
    assert (found.verdict, found.causes) == ("cannot_tell", [])
    assert set(ids) <= {one.id for one in found.candidates}
    assert 1 <= len(found.candidates) <= 3
    assert [one.kind for one in found.candidates] == [VERDICTS[one.id] for one in found.candidates]
    assert all(len(side) <= 1 for one in found.candidates for side in (one.for_, one.against))
    assert " if " in found.decide or "with stale weights" in found.decide
    assert DECIDE.get(case, "") in found.decide
    assert found.headline.startswith("Cannot tell from this dump: the columns line up")
    assert found.headline.endswith(("causes fit.", "one cause fits."))
    assert ("-fold over the steps" in found.headline) is (case in ("growth, no lag", "growth at lag 2"))


@pytest.mark.parametrize(
    ("without", "how"),
    [
        ("stale", {"lags": [0]}),
        ("quantized_rollout", {"steps": 8, "by_step": SAW}),
        ("moe_outliers", {}),
        ("numerics", {"size": 0.4, "common": 0.4}),
    ],
)
def test_what_the_dump_rules_out_is_no_candidate(tmp_path, without, how):
    assert without not in {one.id for one in made(tmp_path, **how).candidates}


@pytest.mark.parametrize(
    ("usual", "common", "fits"),
    [
        (0.07, Common.OPEN, True),
        (0.1, Common.OPEN, False),  # wider than kernels leave it
        (0.1, Common.ROUNDING, True),
        (0.07, Common.SYSTEMATIC, False),
    ],
)
def test_kernels_fit_a_small_level_or_one_that_tokens_of_a_kind_do_not_share(usual, common, fits):
    course = SimpleNamespace(back=False)
    profile = SimpleNamespace(usual=usual, common=common, partly=False, course=course)
    assert BY_ID["numerics"].fits(profile) is fits


@pytest.mark.parametrize(
    ("causes", "how"),
    [(["numerics"], {"size": 0.02, "common": 0.0}), ([], {"size": 0.06, "common": 0.5, "steps": 8})],
)
def test_a_small_mismatch_is_healthy_and_no_cause_contradicts_what_tokens_share(tmp_path, causes, how):
    found = made(tmp_path, **how)
    assert (found.verdict, [one.id for one in found.causes], found.candidates) == ("healthy", causes, [])


@pytest.mark.parametrize(
    ("ratio", "off"),
    [
        (Number(value=0.982, interval=(0.980, 0.983)), True),
        (Number(value=1.02, interval=(1.01, 1.04)), True),
        (Number(value=0.982, interval=(0.960, 0.995)), False),  # the 99.9% interval holds 1
        (Number(value=0.996, interval=(0.9955, 0.9965)), False),  # as far as rounding may move it
        (Number(value=0.982, interval=(0.980, 0.983), note="unreliable: k̂ 0.9"), False),
        (Number(value=0.982), False),
    ],
)
def test_e_of_r_is_off_only_by_more_than_rounding_beyond_its_wider_interval_and_where_it_can_be_estimated(
    ratio, off
):
    assert decide.off_centre(ratio) is off


def test_the_sampling_is_the_logged_one_only_where_that_could_be_tested(tmp_path):
    tested = made(tmp_path)
    table = pq.read_table(SAMPLES / "stale.parquet").drop_columns(["policy_lag"])
    pq.write_table(table, tmp_path / "heavy.parquet")
    heavy = analyze([str(tmp_path / "heavy.parquet")], presets=())
    assert "the columns line up and the sampling is the logged one, but" in tested.headline
    assert heavy.whole["mean_ratio"].note.startswith("unreliable")  # E[r] has too heavy a tail
    assert "the columns line up, but" in heavy.diagnosis.headline


def test_more_uncertain_tokens_are_no_growth(tmp_path):
    """K3 grows with the share of uncertain tokens alone: |Δ|/(1 − π) is the same at every step."""
    chance, rows = np.random.default_rng(1), []
    for step in range(8):
        for _ in range(40):
            q = np.where(chance.random(40) < 0.02 + 0.1 * step, -1.5, -0.021)
            rows.append((step, q, q + 0.12 * -np.expm1(q) * chance.normal(size=40)))
    given = {"step": [r[0] for r in rows], "rollout_log_probs": [r[1] for r in rows], "policy_lag": [0] * 320}
    found = diagnosed(tmp_path, given | {"old_log_probs": [r[2] for r in rows]})
    assert "weights_not_synced" not in {one.id for one in found.causes}
    assert "-fold" not in found.headline


def test_every_row_has_a_source_a_range_and_a_known_number_format():
    assert len(FLOORS) >= 9
    assert all(one.source and one.regime and 0 <= one.low < one.high for one in FLOORS)
    assert {one.precision for one in FLOORS} <= {*QUANTISED, *PLAIN}
    assert all(word == word.lower() for one in FLOORS for word in one.says)


@pytest.mark.parametrize(
    ("provenance", "most"),
    [
        (BF16, 0.01),
        (BF16 | {"trainer": "prime-rl"}, 0.01),
        (BF16 | {"model": "Mixtral-8x7B"}, 0.3),
        ({"quantization": "fp8"}, 0.15),
        ({"quantization": "awq"}, 0.3),
        ({"quantization": "nvfp4"}, 0.3),
        ({}, 0.3),
    ],
)
def test_ten_times_what_is_published_of_a_format_is_excused_and_of_none_more_than_0_3(provenance, most):
    assert Metadata.of(provenance).ceiling == pytest.approx(most)


def test_evidence_is_of_known_names_and_each_a_sentence():
    used = {name for one in CAUSES for name in (*one.speaks_for, *one.speaks_against)}
    q = np.full(64, -1.0)
    known = evidence(Profile(Rows(q, q - 0.1, np.array([0, 64]), np.arange(64))))
    assert used == {name for name, _, _ in known}
    assert all(text.endswith(".") for *_, text in known)


# ---------------------------------------------------------------- how it is shown

STALE = CandidateCause(
    id="stale",
    kind="honest",
    statement="Stale weights: the engine's are older than the trainer's.",
    for_=["K3 grows 36-fold over the steps."],
)
OTHER = CandidateCause(id="weights_not_synced", kind="bug", statement="Other weights at every step.")
UNDECIDED = Diagnosis(
    verdict="cannot_tell",
    headline="Cannot tell from this dump: the columns line up, but K3 grows 36-fold; two causes fit.",
    candidates=[STALE, OTHER],
    decide="Write policy_lag into the next dump.",
)


def undecided():
    return make_summary(diagnosis=UNDECIDED, recommendation=None, gates=[])


def gated(summary):
    return summary.model_copy(update={"gates": list(judged(summary, required(fail_on="bug")))})


FORMS = {
    "short": terminal,
    "verbose": partial(terminal, verbose=True),
    "markdown": markdown,
    "html": html,
    "junit": lambda summary: render_junit(gated(summary)),
    "json": lambda summary: summary.to_json(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_shows_the_candidates_what_speaks_for_them_and_the_measurement_and_no_fix(form):
    text = " ".join(FORMS[form](undecided()).replace("&#39;", "'").replace("\\u2019", "'").split()).lower()
    name = "weights_not_synced" if form in ("junit", "json") else "other weights"
    shown = ["write policy_lag into the next dump", name]
    shown += ["36-fold"] * (form != "junit")
    assert [said for said in shown if said not in text] == []
    assert "fix:" not in text
    assert not any(row.fix and row.fix.lower() in text for row in CAUSES)


def test_the_json_says_for_and_reads_it_back():
    text = undecided().to_json()
    assert json.loads(text)["diagnosis"]["candidates"][0]["for"] == STALE.for_
    assert loads(text, "d.json") == undecided()


@pytest.mark.parametrize(
    ("fails", "lag", "code"),
    [("bug", None, 2), ("bug", 2, 2), ("cannot_tell", None, 1)],
)
def test_the_gate_cannot_say_whether_it_is_a_bug_where_one_fits_and_says_what_would_decide(
    tmp_path, fails, lag, code
):
    made(tmp_path, **GROWS, lags=lag and [lag])
    args = ["gate", str(tmp_path / "d.parquet"), "--fail-on", fails, "--junit", str(tmp_path / "j.xml")]
    ran = CliRunner().invoke(app, args)
    assert ran.exit_code == code, ran.output
    for said in (" ".join(ran.stdout.split()), (tmp_path / "j.xml").read_text()):
        assert "weights_not_synced" in said
        assert "to decide, write policy_lag" in said
