"""Honest causes are named where the dump records them; else the causes that fit are listed, without a fix."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawn import html, markdown, terminal
from factory import make_summary, recommendation
from rich.cells import cell_len
from typer.testing import CliRunner

from offpol_diag.advice import advised
from offpol_diag.cli import app
from offpol_diag.diagnosis import decide
from offpol_diag.diagnosis.recorded import Recorded, recorded
from offpol_diag.diagnosis.registry import CAUSES
from offpol_diag.diagnosis.seen import grown
from offpol_diag.gate import judged, required
from offpol_diag.number import Number
from offpol_diag.report import answered
from offpol_diag.report.charts import by_lag
from offpol_diag.report.gate import junit as render_junit
from offpol_diag.report.terminal import LINES
from offpol_diag.result import CandidateCause, Diagnosis, loads
from tests.factory import DumpFile
from tests.reading import analyze

SAMPLES = Path(__file__).parents[1] / "sample_data"
PROMPTS, ANSWERS, TOKENS, WORDS = 32, 4, 40, 6
S = PROMPTS * ANSWERS
GROWING = (4e-5, 0.037, 0.040, 0.047, 0.053, 0.075, 0.078, 0.068)
"""K3 by step of an engine that gets no weights, which the medians of thirds miss."""


VERDICTS = {one.id: one.verdict for one in CAUSES}

# ---------------------------------------------------------------- dumps

FP8, BF16 = {"rollout_dtype": "bfloat16, linear weights float8_e4m3fn"}, {"rollout_dtype": "bfloat16"}
MOE = {"model": "Qwen3-30B-A3B"}


def made(
    tmp_path,
    size=0.1,
    common=0.15,
    lags=None,
    steps=1,
    by_lag=None,
    by_step=None,
    provenance=None,
    versions=False,
    ids=True,
    outliers=0.0,
    along=0.0,
):
    """Diagnose a dump with noise of size · (1 − π) in log π, a share `common` of it by kind of token.

    `by_lag` and `by_step` multiply the size of a row; `lags` are repeated over the rows. `outliers` is the
    share of tokens that are off by 0.7, `along` moves the log-probs along the advantages.
    """
    chance = np.random.default_rng(5)
    shape = (S, TOKENS)
    kind = chance.integers(0, WORDS, shape)
    before = np.pad(kind, ((0, 0), (1, 0)), constant_values=WORDS)[:, :-1]
    shift = chance.normal(size=(PROMPTS, WORDS + 1, WORDS))[np.arange(S)[:, None] // ANSWERS, before, kind]
    step = np.arange(S) % steps
    lag = None if lags is None else np.resize(lags, S)
    times = np.ones(S)
    if by_step is not None:
        times = times * np.array(by_step, float)[step]
    if by_lag is not None:
        times = times * np.array([by_lag[one] for one in lag])
    q = -chance.exponential(1, shape) - 0.03
    wide = size * times[:, None] * -np.expm1(q)
    delta = wide * (np.sqrt(common) * shift + np.sqrt(1 - common) * chance.normal(size=shape)) - wide**2 / 2
    far = chance.random(shape) < outliers
    delta = np.where(far, np.where(chance.random(shape) < 1 / (1 + np.exp(0.7)), 0.7, -0.7), delta)
    advantages = chance.normal(size=S)
    columns = {
        "rollout_log_probs": list(q),
        "old_log_probs": list(np.minimum(q + delta + along * advantages[:, None] * -np.expm1(q), -1e-6)),
        "group_id": np.arange(S) // ANSWERS,
        "step": step,
    }
    columns |= {"token_ids": list(kind)} if ids else {}
    columns |= {"advantages": advantages} if along else {}
    if lag is not None and versions:
        columns |= {"train_version": np.full(S, 9), "rollout_version": 9 - lag}
    elif lag is not None:
        columns |= {"policy_lag": lag}
    table = pa.table(columns)
    if provenance:
        table = table.replace_schema_metadata({"offpol_diag": json.dumps(provenance)})
    pq.write_table(table, tmp_path / "d.parquet")
    return analyze([str(tmp_path / "d.parquet")], presets=()).diagnosis


RISING, FLAT = {0: 0.1, 1: 1.0, 2: 2.0}, {0: 1.0, 1: 1.0, 2: 1.0}
GROWTH = (0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
LATE = (0.03, 1.0, 1.0, 1.1, 1.2, 1.4, 1.4, 1.3)
"""Sizes whose squares, and so K3, are as those of `GROWING`."""
SAW = (1e-5, 1.0, 1.5, 2.0, 1e-5, 1.0, 1.5, 2.0)

NAMED = {
    "fp8 in the metadata": ("quantized_rollout", {"provenance": FP8}),
    "a quantisation in the metadata": (
        "quantized_rollout",
        {"provenance": {"quantization": "awq"}, "size": 0.3},
    ),
    "K3 rises with the lag": ("stale", {"lags": [0, 1, 2], "by_lag": RISING}),
    "K3 rises with the versions": ("stale", {"lags": [0, 1, 2], "by_lag": RISING, "versions": True}),
    "K3 rises with the lag, no row at lag 0": (
        "stale",
        {"lags": [1, 2, 4], "by_lag": {1: 1.0, 2: 2.0, 4: 4.0}},
    ),
    "a quantised rollout, and K3 rises": ("stale", {"lags": [0, 1, 2], "by_lag": RISING, "provenance": FP8}),
    "noise of single tokens": ("numerics", {"size": 0.12, "common": 0.0}),
    "noise of single tokens, all behind": ("numerics", {"size": 0.12, "common": 0.0, "lags": [1]}),
    "outliers of experts in the metadata": (
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
    "growth, no lag": (["stale", "weights_not_synced"], {"steps": 8, "by_step": GROWTH}),
    "growth at lag 2": (["stale"], {"steps": 8, "by_step": GROWTH, "lags": [2]}),
    "growth, and fp8 in the metadata": (
        ["quantized_rollout", "stale"],
        {"steps": 8, "by_step": GROWTH, "provenance": FP8},
    ),
    "a saw-tooth": (["weights_not_synced"], {"steps": 8, "by_step": SAW}),
    "a trainer that moved along its advantages": (["stale"], {"along": 0.1}),
    "moved along its advantages, and fp8": (
        ["quantized_rollout", "stale"],
        {"along": 0.1, "provenance": FP8},
    ),
    "outliers": (["moe_outliers"], {"size": 0.02, "outliers": 0.01, "ids": False}),
    "a usual token at rounding, and K3 not": (
        ["moe_outliers"],
        {"size": 0.02, "outliers": 0.01, "common": 0.0},
    ),
    "K3 rises with the lag, and is ten times that of bf16 at lag 0": (
        ["weights_not_synced"],
        {"lags": [0, 1, 2], "by_lag": {0: 0.5, 1: 1.0, 2: 2.0}, "size": 0.6, "provenance": BF16},
    ),
    "more than 4 bits explain": (
        ["weights_not_synced"],
        {"provenance": {"quantization": "awq"}, "size": 1.6},
    ),
    "more than fp8 explains": (["stale"], {"provenance": FP8, "size": 1.2, "common": 0.2}),
}
"""Case → causes that nothing rules out, and the dump."""


@pytest.mark.parametrize("case", OPEN)
def test_else_the_causes_that_fit_are_listed_and_what_decides(tmp_path, case):
    ids, how = OPEN[case]
    found = made(tmp_path, **how)
    assert (found.verdict, found.causes) == ("cannot_tell", [])
    assert set(ids) <= {one.id for one in found.candidates}
    assert 1 <= len(found.candidates) <= 3
    against = [
        len(one.against) - any("The dump says" in said for said in one.for_) for one in found.candidates
    ]
    assert against == sorted(against)
    assert [one.kind for one in found.candidates] == [VERDICTS[one.id] for one in found.candidates]
    assert found.decide
    assert found.headline.startswith("Cannot tell from this dump: the columns line up")
    assert found.headline.endswith(("causes fit.", "one cause fits."))


def test_where_no_candidate_fits_by_its_own_condition_two_are_left(tmp_path):
    """In sync, K3 small, and the few uncertain tokens of a confident model off by more than a factor of 2."""
    draw = np.random.default_rng(0)
    shape = (800, 400)
    q = -1e-5 * draw.uniform(0.5, 1.5, shape)
    p = q * draw.uniform(0.99, 1.01, shape)
    uncertain, first = draw.random(shape) < 0.0032, draw.random(shape) < 0.66
    much = draw.normal(0, 0.01, shape)
    q = np.where(uncertain, np.log(np.where(first, 0.66 + much, 0.34 - much)), q)
    p = np.where(uncertain, np.log(np.where(first, 0.30 + much, 0.70 - much)), p)
    with DumpFile(tmp_path / "d.parquet", dtype="float64") as dump:
        dump.write(
            rollout_log_probs=q,
            old_log_probs=p,
            response_mask=np.ones(shape),
            policy_lag=np.zeros(800, int),
            step=np.repeat(np.arange(2), 400),
            group_id=np.arange(800) // 8,
        )
    found = analyze([str(tmp_path / "d.parquet")], presets=()).diagnosis
    assert len(found.candidates) >= 2
    assert found.decide


@pytest.mark.parametrize(
    ("without", "how"),
    [
        ("stale", {"lags": [0]}),
        ("quantized_rollout", {"steps": 8, "by_step": SAW}),
        ("moe_outliers", {}),
        ("numerics", {"size": 0.4, "common": 0.4}),
        ("wrong_context", {}),
    ],
)
def test_what_the_dump_rules_out_is_no_candidate(tmp_path, without, how):
    assert without not in {one.id for one in made(tmp_path, **how).candidates}


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


def test_a_trainer_that_moved_along_its_advantages_is_evidence_and_no_name(tmp_path):
    first = made(tmp_path, along=0.1).candidates[0]
    assert any("the trainer has moved along its advantages" in said for said in first.for_)


def test_the_sampling_is_the_logged_one_only_where_that_could_be_tested(tmp_path):
    tested = made(tmp_path)
    heavy = analyze(["sample_data/stale.parquet"], presets=())  # E[r] has too heavy a tail there
    table = pq.read_table("sample_data/stale.parquet").drop_columns(["policy_lag"])
    pq.write_table(table, tmp_path / "heavy.parquet")
    untested = analyze([str(tmp_path / "heavy.parquet")], presets=())
    assert "the columns line up and the sampling is the logged one, but" in tested.headline
    assert heavy.whole["mean_ratio"].note.startswith("unreliable")
    assert "the columns line up, but" in untested.diagnosis.headline


def test_too_few_tokens_have_neither_causes_nor_candidates(tmp_path):
    columns = {"rollout_log_probs": [[-1.0, -2.0]] * 40, "old_log_probs": [[-3.0, -0.1]] * 40}
    pq.write_table(pa.table(columns | {"policy_lag": [i % 2 for i in range(40)]}), tmp_path / "d.parquet")
    found = analyze([str(tmp_path / "d.parquet")], presets=()).diagnosis
    assert found.verdict != "cannot_tell" or (found.causes, found.candidates) == ([], [])


# ---------------------------------------------------------------- growth over the steps


@pytest.mark.parametrize(
    ("k3", "found"),
    [
        (GROWING, True),
        ((1e-4, 2e-3, 4e-3, 8e-3, 0.016, 0.03), True),
        ((0.01, 0.02, 0.01, 0.02, 0.015, 0.01), False),
        ((6e-13, 0.025, 0.062, 0.093, 6e-13, 0.03, 0.06, 0.09), False),
        ((3e-4, 2e-3, 3e-4, 4e-4, 2e-4, 4e-4, 2e-3, 1e-3), False),
        ((1e-9, 1e-8, 1e-7, 1e-6), False),
    ],
)
def test_growth_is_seen_from_thirds_and_from_a_step_on(k3, found):
    assert (grown(k3) is not None) is found


def test_more_uncertain_tokens_are_no_growth(tmp_path):
    """K3 grows with the share of uncertain tokens alone: |Δ|/(1 − π) is the same at every step."""
    chance, rows = np.random.default_rng(1), []
    for step in range(8):
        for _ in range(40):
            q = np.where(chance.random(40) < 0.02 + 0.1 * step, -1.5, -0.021)
            rows.append((step, q, q + 0.12 * -np.expm1(q) * chance.normal(size=40)))
    given = {"step": [r[0] for r in rows], "rollout_log_probs": [r[1] for r in rows], "policy_lag": [0] * 320}
    pq.write_table(pa.table(given | {"old_log_probs": [r[2] for r in rows]}), tmp_path / "d.parquet")
    found = analyze([str(tmp_path / "d.parquet")], presets=()).diagnosis
    assert "weights_not_synced" not in {one.id for one in found.causes}


# ---------------------------------------------------------------- what metadata says


@pytest.mark.parametrize(
    ("provenance", "quantised"),
    [
        ({"rollout_dtype": "fp8"}, True),
        ({"engine": "vLLM", "quantization": "compressed-tensors W8A8"}, True),
        ({"model": "Qwen/Qwen3-8B-AWQ"}, True),
        ({"regime": {"quantize": True}}, True),
        ({"engine": {"kv_cache_dtype": "fp8_e5m2"}}, True),
        ({"actor_rollout_ref.rollout.quantization": "fp8"}, True),
        ({"rollout_dtype": ["bfloat16", "int8"]}, True),
        ({"regime": {"quantize": False}}, False),
        ({"quantization": None}, False),
        ({"trainer_dtype": "fp8"}, False),
        ({"trainer": {"optimizer": "adamw_8bit int8"}}, False),
        ({"actor_rollout_ref.actor.dtype": "fp8"}, False),
        ({"note": "not quantised, no fp8"}, False),
        ({"commit": "deadfp8"}, False),
        ({}, False),
    ],
)
def test_metadata_says_of_the_engine_whether_it_is_quantised(provenance, quantised):
    assert bool(recorded(provenance).quantised) is quantised


def test_metadata_says_the_number_format_and_experts():
    said = recorded({"rollout_dtype": "bfloat16", "trainer_dtype": "float32", "model": "Mixtral-8x7B"})
    assert said == Recorded("", "rollout_dtype: bfloat16", "model: Mixtral-8x7B")
    assert recorded({"num_experts": 64}).experts == "num_experts: 64"
    assert recorded({"num_experts": 1, "model": "Qwen3-8B"}).experts == ""


@pytest.mark.parametrize(
    ("said", "precision"),
    [
        ("nvfp4", "NVFP4"),
        ("nvfp4 W4A4", "W4A4"),
        ("awq", "W4A16"),
        ("mxfp4", "W4A16"),
        ("bfloat16, linear weights float8_e4m3fn", "fp8"),
        ("W8A8", "int8"),
        ("bfloat16", "bf16"),
        ("bitsandbytes", ""),
    ],
)
def test_metadata_says_one_number_format(said, precision):
    assert recorded({"rollout_dtype": said}).precision == precision


# ---------------------------------------------------------------- the list


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({}, "Write policy_lag (or"),
        ({"lags": [2]}, "right after a sync"),
        ({"lags": [0]}, "in bf16, eager, without prefix cache"),
        ({"lags": [0], "size": 0.4, "common": 0.4}, "an engine that has just loaded"),
        ({"size": 0.02, "outliers": 0.01, "ids": False}, "twice with the trainer"),
        ({"lags": [0], "size": 0.3, "common": 0.0}, "twice with the trainer"),
    ],
    ids=["no lag", "all behind", "in sync", "in sync and wide", "outliers", "noise"],
)
def test_the_measurement_tells_the_first_candidate_from_another_and_each_outcome_is_said(tmp_path, how, text):
    found = made(tmp_path, **how)
    assert text in found.decide
    assert " if " in found.decide or "with stale weights" in found.decide


def test_candidates_have_no_fix_and_no_percentages_of_their_own():
    assert "fix" not in CandidateCause.model_fields
    assert [name for name, field in CandidateCause.model_fields.items() if field.annotation is float] == []


# ---------------------------------------------------------------- how it is shown

STALE = CandidateCause(
    id="stale",
    kind="honest",
    statement="Stale weights: the engine's are older than the trainer's.",
    for_=["K3 grows 36-fold over the steps.", "|Δ|/(1 − q) is 0.3 for a usual token."],
    against=["No move of the trainer shows."],
)
OTHER = CandidateCause(id="weights_not_synced", kind="bug", statement="Other weights at every step.")
ASKED = "Write policy_lag into the next dump."
UNDECIDED = Diagnosis(
    verdict="cannot_tell",
    headline="Cannot tell from this dump: the columns line up, but K3 grows 36-fold; two causes fit.",
    candidates=[STALE, OTHER],
    decide=ASKED,
    ruled_out=["permuted rows"],
    sequences=64,
    tokens=2000,
)
TIS = recommendation().model_copy(
    update={
        "title": "token TIS at 2.0",
        "numbers": {"token TIS at 2.0": {"ess_tokens": Number(value=0.994, unit="fraction")}},
    }
)


def undecided(**more):
    return make_summary(**{"diagnosis": UNDECIDED, "recommendation": TIS, "gates": []} | more)


def facts(**more):
    return {one.label: one for one in answered(undecided(**more)).facts}


def test_the_page_says_each_candidate_at_its_place_and_how_a_trainer_makes_the_measurement():
    page = html(
        undecided(diagnosis=UNDECIDED.model_copy(update={"decide_by": {"verl": "enforce_eager=True"}}))
    )
    for said in ("1. Stale weights", "2. Other weights", "enforce_eager=True"):
        assert said in page


def gated(summary):
    return summary.model_copy(update={"gates": list(judged(summary, required(fail_on=["bug"])))})


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
    shown = [
        "the columns line up",
        "36-fold",
        *(["no move of the trainer shows"] if form not in ("junit", "short") else []),  # for want of room
        "write policy_lag into the next dump",
    ]
    shown += ["weights_not_synced" if form in ("junit", "json") else "other weights at every step"]
    for said in shown:
        assert said in text, said
    assert "fix:" not in text
    assert "at the source" not in text
    assert '"causes": []' in text or form != "json"
    assert not any(row.fix and row.fix.lower() in text for row in CAUSES)


def test_the_terminal_has_the_form_of_bug_candidates_decide_and_what_to_do():
    labels = [line.split("  ")[0] for line in terminal(undecided()).splitlines()]
    at = [labels.index(label) for label in ("Bug?", "Candidates", "Decide", "What to do")]
    assert at == sorted(at)
    assert "How sure" not in labels
    assert "Cause" not in labels


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_a_short_answer_with_three_candidates_stays_within_its_lines_and_width(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    long = STALE.model_copy(update={"for_": ["K3 grows."] * 40, "against": ["No trainer moves."] * 20})
    given = UNDECIDED.model_copy(update={"candidates": [long] * 3, "decide": "Measure it again. " * 30})
    lines = terminal(undecided(diagnosis=given)).splitlines()
    assert max(cell_len(line) for line in lines if "offpol-diag " not in line) <= width
    assert width < 80 or len(lines) <= LINES


def test_what_limits_the_harm_is_offered_after_the_measurement_and_not_as_what_to_do():
    found = facts()["What to do"]
    assert found.title == "Measure first; until the cause is known, token TIS at 2.0"
    assert found.lines[0].text.startswith("First: write policy_lag into the next dump. ")
    said = "Measure first. Until the cause is known, token TIS at 2.0 limits the harm: ESS"
    assert found.sentence.startswith(said)


def test_a_dump_without_a_recommendation_still_says_what_decides():
    found = facts(recommendation=None)
    assert (found["Decide"].sentence, "What to do" in found) == (ASKED, False)


def test_the_page_has_a_card_of_candidates():
    page = html(undecided())
    card = page[page.index("2 fit, the least contradicted first") :]
    card = card[: card.index("</article>")]
    assert card.count("<li>") == 2
    assert "For and against: nothing in this dump." in card
    assert f"To decide:</b> {ASKED}" in card


@pytest.mark.parametrize(
    ("columns", "prompts", "lacks"),
    [
        (["token_ids"], "prompt_ids", ""),
        (["token_ids"], "", "with prompt_ids in the dump"),
        ([], "", "with token_ids and prompt_ids in the dump"),
    ],
)
def test_scoring_again_is_offered_with_the_time_of_the_sample_and_what_that_rests_on(columns, prompts, lacks):
    """16 of 100 prompts with 1,000 tokens each: 18 passes over 16,000 tokens at 14 GFLOP, 10 s of an H100."""
    summary = undecided()
    known = {one: one for one in (*columns, "rollout_log_probs", "old_log_probs")}
    dump = {"tokens": 100_000, "groups": 100, "columns": known, "prompts": prompts}
    summary = summary.model_copy(update={"dump": summary.dump.model_copy(update=dump)})
    (found,) = [one for one in answered(summary).facts if one.label == "Rescore"]
    assert "which side is off" in found.sentence
    assert found.sentence.endswith("about 10 s for a 7B model on one H100.")
    assert lacks in found.sentence
    assert ("in the dump" in found.sentence) is bool(lacks)
    assert "18 passes × 16,000 tokens × 2 × 7·10⁹ FLOP, at 40% of 989 TFLOP/s" in found.lines[0].text
    for form in (html, partial(terminal, verbose=True), markdown):
        assert "18 passes × 16,000 tokens" in " ".join(form(summary).split())


def test_scoring_again_is_not_offered_between_kernels_and_routing():
    noise = [
        CandidateCause(id=one, kind="honest", statement="Noise.") for one in ("moe_outliers", "numerics")
    ]
    assert "Rescore" in facts()
    assert "Rescore" not in facts(diagnosis=UNDECIDED.model_copy(update={"candidates": noise}))
    assert "Rescore" not in facts(diagnosis=make_summary().diagnosis)


def test_the_page_and_verbose_text_show_the_command_that_explains_each_candidate():
    page, text = html(undecided()), terminal(undecided(), verbose=True)
    for one in (STALE, OTHER):
        assert f"<code>offpol-diag doctor --explain {one.id}</code>" in page
        assert f"explain offpol-diag doctor --explain {one.id}\n" in text


def test_the_chart_of_the_lag_names_no_stale_weights_that_are_not_established():
    summary = analyze(["sample_data/collapse.parquet"], presets=())
    other = summary.model_copy(update={"diagnosis": UNDECIDED})
    assert "Stale" in by_lag(summary).title
    assert by_lag(other).title.startswith("At lag 0, K3 is")


def test_the_json_says_for_and_reads_it_back():
    text = undecided().to_json()
    assert json.loads(text)["diagnosis"]["candidates"][0]["for"] == STALE.for_
    assert loads(text, "d.json") == undecided()


def test_an_older_result_without_candidates_still_draws(tmp_path):
    result = json.loads(make_summary().to_json())
    del result["diagnosis"]["candidates"], result["diagnosis"]["decide"]
    (tmp_path / "old.json").write_text(json.dumps(result))
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "old.json"), "-v"])
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize(
    ("fails", "lag", "code"),
    [("bug", None, 2), ("bug", 2, 2), ("cannot_tell", None, 1), ("honest_mismatch", None, 0)],
)
def test_the_gate_cannot_say_whether_it_is_a_bug_where_one_fits_and_says_what_would_decide(
    tmp_path, fails, lag, code
):
    made(tmp_path, steps=8, by_step=GROWTH, lags=lag and [lag])
    args = ["gate", str(tmp_path / "d.parquet"), "--fail-on", fails, "--junit", str(tmp_path / "j.xml")]
    ran = CliRunner().invoke(app, args)
    assert ran.exit_code == code, ran.output
    said = " ".join(ran.stdout.split())
    assert "stale" in said
    assert "weights_not_synced" in said
    assert "to decide, write policy_lag" in said
    assert "to decide, write policy_lag" in (tmp_path / "j.xml").read_text()
    assert ("this dump cannot tell: " in said) is (code == 2)


def test_the_recommendation_is_the_default_until_the_cause_is_known(tmp_path):
    made(tmp_path, steps=8, by_step=GROWTH)
    found = advised(analyze([str(tmp_path / "d.parquet")], presets=["token_is"])).recommendation
    assert (found.rule, found.title) == ("undecided", "token TIS at 2.0")
    assert "until the cause is known" in found.sentence


def test_both_runs_of_a_comparison_show_their_candidates(tmp_path):
    made(tmp_path, steps=8, by_step=GROWTH)
    path = str(tmp_path / "d.parquet")
    said = " ".join(
        CliRunner().invoke(app, ["compare", path, "sample_data/stale.parquet", "-qv"]).stdout.split()
    )
    assert "A, bug? Cannot tell from this dump: the columns line up" in said
    assert "1. Stale weights" in said
    assert "To decide: Write policy_lag" in said


LAG = "policy_lag: it decides between stale weights and weights that do not arrive"
GROUP = "group_id: intervals are too narrow where a prompt was sampled more than once"


def analysed(name, without, tmp_path, *options):
    """Return what `analyze` prints of a sample without some of its columns, a line per paragraph."""
    path = tmp_path / "dump.parquet"
    pq.write_table(pq.read_table(SAMPLES / name).drop(without), path)
    command = ["analyze", str(path), "--presets", "token_is", "--no-html", *options]
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, command)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_short_answer_to_stale_weights_without_a_lag_says_what_the_lag_would_decide(tmp_path):
    said = analysed("stale.parquet", ["policy_lag"], tmp_path)

    decide = said.partition(" Decide ")[2].partition(" What to do ")[0]
    assert decide.startswith("Write policy_lag (or rollout_version and train_version) into the next dump")
    assert "with stale weights K3 rises with the lag and is as small as rounding at lag 0; with" in decide
    assert "weights that do not arrive, or any other cause, it is larger at lag 0 too" in decide
    assert " Missing " not in said, "the lag is named already, and prompts are there"


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        ([], ""),
        (["policy_lag"], f"{LAG}."),
        (["group_id"], f"{GROUP}."),
        (["policy_lag", "group_id"], f"{LAG}; {GROUP}."),
    ],
)
def test_the_short_answer_names_the_lag_or_prompt_that_is_missing_and_what_it_would_decide(
    tmp_path, without, missing
):
    said = analysed("healthy.parquet", without, tmp_path)

    assert (f" Missing {missing}" in said) if missing else (" Missing " not in said)


def test_where_the_lag_is_named_as_decisive_only_the_prompt_is_said_to_be_missing(tmp_path):
    said = analysed("stale.parquet", ["policy_lag", "group_id"], tmp_path)

    assert f" Missing {GROUP}." in said
    assert said.count("policy_lag") == 1


def test_all_forms_say_what_a_lag_and_a_prompt_would_decide(tmp_path):
    json_file = tmp_path / "result.json"
    said = analysed("healthy.parquet", ["policy_lag", "group_id"], tmp_path, "-v", "--json", str(json_file))

    undecidable = "stale weights or weights that do not arrive: needs the column policy_lag"
    assert f"Not testable on this dump: {undecidable}" in said
    assert f" Missing {LAG}; {GROUP}." in said
    result = loads(json_file.read_text(encoding="utf-8"), "result.json")
    assert result.diagnosis.undecidable == [undecidable]


def test_advantages_that_are_made_of_rewards_are_nowhere_said_to_be_needed(tmp_path):
    said = analysed("healthy.parquet", ["advantages"], tmp_path, "-v")

    assert "there are no advantages: they are made of the rewards" in said
    assert "needs the column advantages" not in said


def test_versions_of_both_sides_are_a_lag(tmp_path):
    table = pq.read_table(SAMPLES / "healthy.parquet")
    versions = table.rename_columns(
        [name.replace("policy_lag", "rollout_version") for name in table.schema.names]
    )
    path = tmp_path / "dump.parquet"
    pq.write_table(versions.append_column("train_version", versions["rollout_version"]), path)
    done = CliRunner().invoke(app, ["analyze", str(path), "--presets", "token_is", "--no-html", "-v"])

    assert " Missing " not in " ".join(done.output.split())
    assert "weights that do not arrive: needs" not in " ".join(done.output.split())


def test_a_bug_is_told_before_what_is_missing(tmp_path):
    table = pq.read_table(SAMPLES / "healthy.parquet").drop(["policy_lag"])
    values = np.roll(table["old_log_probs"].combine_chunks().values.to_numpy(zero_copy_only=False), 1)
    lists = pa.ListArray.from_arrays(table["old_log_probs"].combine_chunks().offsets, values)
    at = table.schema.get_field_index("old_log_probs")
    path = tmp_path / "dump.parquet"
    pq.write_table(table.set_column(at, "old_log_probs", lists), path)
    done = CliRunner().invoke(app, ["analyze", str(path), "--presets", "token_is", "--no-html"])

    assert "BUG" in done.output
    assert "Missing" not in done.output
