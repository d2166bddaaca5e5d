"""The recommendation: one row per rule, what it decides and what it saw."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from offpol_diag.advice import DEFAULT, RULES, advised, growth, recommend
from offpol_diag.number import Number
from offpol_diag.presets import catalogue
from offpol_diag.presets.catalogue import FAMILIES
from offpol_diag.report import answered
from offpol_diag.report.analyze import analysis, headline
from offpol_diag.report.compare import named
from offpol_diag.report.words import checks
from offpol_diag.result import (
    After,
    BySteps,
    CandidateCause,
    Cause,
    Charts,
    Decision,
    Diagnosis,
    LagEvidence,
    loads,
)
from offpol_diag.trainers import TRAINERS
from offpol_diag.trainers.translate import sayable
from tests import oracles
from tests.factory import dump_facts, make_summary, with_numbers
from tests.reading import analyze

GROUPED = {name: name for name in ("rollout_log_probs", "old_log_probs", "group_id")}
BARE = {name: name for name in GROUPED if name != "group_id"}
BUG = Diagnosis(verdict="bug", headline="off by one")
FINE = Diagnosis(verdict="honest_mismatch", headline="fine")
OPEN = Diagnosis(
    verdict="cannot_tell",
    headline="two causes fit",
    candidates=[CandidateCause(id=one, kind="honest", statement=one) for one in ("stale", "numerics")],
    decide="write policy_lag",
)
HEALTHY = Diagnosis(verdict="healthy", headline="as small as rounding")
PLAIN = {
    "k3": 5e-3,
    "f_2": 5e-3,
    "ess_tokens": 0.95,
    "ess_sequences": 0.2,
    "mean_ratio": 1.0,
    "k1": 0.005,
    "chi2_token": 0.05,
    "prob_diff_mean": 0.004,
    "mult_prob_error": 1.01,
}
A_BIT = 1e-6
"""Less than what any threshold is rounded to."""
GROWN = (0.001, 0.001, 0.3)
"""K3 of steps that grow beyond the merge gate."""


def given(diagnosis=FINE, prefix="", note=None, facts=None, steps=(), presets=None, **values):
    """Make a summary with some numbers set: `note` is of those in `values`, `facts` of the dump.

    Args:
        diagnosis: the diagnosis.
        prefix: '' for drift 1, 'total.' for a dump of two policies.
        steps: K3 of steps 0, 1, ...
        presets: rows of presets; none by default.
    """
    metrics = {prefix + name: Number(value=value) for name, value in PLAIN.items()}
    metrics |= {prefix + name: Number(value=value, note=note) for name, value in values.items()}
    facts = dump_facts(**{"columns": GROUPED, **(facts or {})})
    charts = Charts()
    if steps:
        at, series = [*range(len(steps))], {"k3": [Number(value=one) for one in steps]}
        charts = Charts(steps=BySteps(first=at, last=at, series=series))
    more = {"by": {}, "gates": [], "presets": presets or {}, "charts": charts}
    return make_summary(dump=facts, metrics=metrics, diagnosis=diagnosis, **more)


def without(summary, *names):
    """Return the summary with these metrics unknown."""
    return with_numbers(summary, "dump", summary.whole | {name: Number() for name in names})


METHOD, NO, FEW = "METHOD at THRESHOLD", "no correction needed", "not enough data"
TIS, BYPASS = "token_is", "bypass_pg_token_is"
WELL, TOTAL = {"diagnosis": HEALTHY}, {"prefix": "total."}
RULED = {  # rule → its decision
    "bug": "fix the bug first",
    "few": FEW,
    "identical": FEW,
    "unknown": FEW,
    "healthy": NO,
    "undecided": METHOD,
    "collapse": METHOD,
    "default": METHOD,
}
ROWS = [
    # the first rule that holds, the method, and of which summaries
    ("bug", None, {"diagnosis": BUG}, {"diagnosis": BUG, "facts": {"groups": 3}}),
    ("bug", None, {"diagnosis": BUG, "k3": 9e-7}, {"diagnosis": BUG, "steps": GROWN}),
    ("few", None, *({"facts": {"groups": 19}, **more} for more in ({}, {"k3": 9e-7}, {"steps": GROWN}))),
    ("few", None, *({"facts": few} for few in ({"sequences": 49}, {"tokens": 999}))),
    ("few", None, {"facts": {"sequences": 319, "columns": BARE}}),
    ("identical", None, {"k3": 0.0, "log_ratio_min": 0.0, "log_ratio_max": 0.0}),
    ("unknown", None, {"k3": None}, {"k3": None, "f_2": 0.6}),
    ("healthy", None, {"k3": 0.0, "log_ratio_min": 0.0, "log_ratio_max": 1e-9}),
    ("healthy", None, {"k3": 9e-7, "f_2": 0.6}, {"k3": 9e-7, "diagnosis": OPEN}),
    ("healthy", None, WELL, WELL | TOTAL, {"k3": 1e-3 - A_BIT}, {"k3": 9e-4, "diagnosis": None}),
    ("default", TIS, {"k3": 1e-3 + A_BIT}),
    (
        "undecided",
        TIS,
        {"diagnosis": OPEN},
        {"diagnosis": OPEN, "k3": 9e-4},
        {"diagnosis": OPEN, "steps": GROWN},
    ),
    ("undecided", BYPASS, {"diagnosis": OPEN} | TOTAL),
    ("few", None, {"diagnosis": OPEN, "facts": {"groups": 19}}),
    ("collapse", TIS, {"steps": GROWN}, {"steps": (*GROWN, 0.2, 0.4, 0.5)}),
    (
        "default",
        TIS,
        {"steps": (0.001, 0.001, 0.014)},
        {"steps": (0.02, 0.02, 0.3)},
        {"steps": (0.3, 0.3, 0.3)},
    ),
    ("default", TIS, *({"facts": one} for one in ({"groups": 20}, {"sequences": 50}, {"tokens": 1000}))),
    ("default", TIS, {"facts": {"sequences": 320, "columns": BARE}}, {"diagnosis": None}),
    ("default", TIS, {"k3": 1.01}, {"f_2": 0.6}, {"ess_tokens": 0.01}),
    ("default", BYPASS, TOTAL),
]
CASES = [(rule, method, change) for rule, method, *changes in ROWS for change in changes]


@pytest.mark.parametrize(("rule", "method", "change"), CASES, ids=str)
def test_the_first_rule_that_holds_decides(rule, method, change):
    found = recommend(given(**change))

    assert (found.rule, found.method, found.decision) == (rule, method, RULED[rule])
    assert (found.title, found.threshold) == ((DEFAULT, "2.0") if method else (None, None))
    assert found.sentence == next(one.sentence for one in RULES if one.name == rule)


@pytest.mark.parametrize(
    ("k3", "grows"),
    [
        ((1e-3, 1e-3, 4.9e-3), False),
        ((1e-3, 1e-3, 5.1e-3), True),
        ((1e-6, 1e-6, 9e-5), False),  # grows, and is still nothing
        ((1e-6, 1e-6, 1.1e-4), True),
        ((5.1e-3, 1e-3, 1e-3), False),
    ],
)
def test_growth_is_five_times_the_first_third_and_more_than_rounding(k3, grows):
    assert (growth(given(steps=k3)) is not None) is grows


def test_every_rule_and_every_decision_has_a_row():
    assert set(RULED) == {rule for rule, *_ in ROWS} == {rule.name for rule in RULES}
    assert set(RULED.values()) == set(get_args(Decision))
    assert [rule.name for rule in RULES if not rule.source] == ["unknown"]
    assert RULES[-1].name == "default"


@pytest.mark.parametrize(("many", "rule"), [(4, "few"), (5, "healthy")])
def test_that_a_mismatch_is_small_is_said_of_few_prompts(many, rule):
    small = given(diagnosis=HEALTHY, facts={"groups": many}, f_2=1e-3)
    k3 = Number(value=5e-4, interval=(1e-4, 1e-3))
    assert recommend(with_numbers(small, "dump", small.whole | {"k3": k3})).rule == rule


# ---------------------------------------------------------------- what it says


def test_a_method_has_one_of_each_other_family_beside_it_where_they_were_computed(tmp_path):
    rows = table("stale")
    for policy, dump in (("old", rows), ("current", rows.drop_columns("old_log_probs"))):
        found = advised(analyzed(tmp_path, dump, presets=[*FAMILIES["old"], *FAMILIES["current"]]))
        first, *others = FAMILIES[policy]
        assert (found.recommendation.method, found.recommendation.alternatives) == (first, others)
        (corrections,) = (one for one in answered(found).tables if one.id == "corrections")
        assert [row[0] for row in corrections.rows] == [first, *others]
        own = found.preset(first)
        assert corrections.rows[0][1:3] == (own["ess_tokens"], own["tokens_rejected"])
    bare = advised(analyzed(tmp_path, rows)).recommendation
    assert (bare.method, bare.alternatives) == (TIS, [])


@pytest.mark.parametrize("policy", FAMILIES)
def test_the_families_are_presets_of_their_numerator_and_the_default_is_what_its_words_say(policy):
    shipped = catalogue.load()
    assert {shipped[name].policy for name in FAMILIES[policy]} == {policy}
    weight = shipped[FAMILIES[policy][0]].weight
    assert (weight.over, weight.action, weight.upper, weight.lower) == ("token", "truncate", 2.0, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {},
            "In 117 simulated regimes with a known gradient nothing beat token TIS at 2.0 by more than 0.1%.",
        ),
        ({"steps": GROWN}, "In whole runs every correction lasted longer than none, and none saved a run"),
        ({"k3": 9e-7}, "Simulated with a known gradient, below a K3 of 0.001: updates without a correction"),
        ({"diagnosis": BUG}, None),
        ({"facts": {"groups": 3}}, None),
    ],
)
def test_an_answer_says_what_a_decision_rests_on_where_corrections_were_weighed_up(change, said):
    facts = {one.label: one.sentence for one in answered(advised(given(**change))).facts}
    assert "How sure" not in facts if said is None and change != {"diagnosis": BUG} else True
    assert said is None or facts["How sure"].startswith(said)


# ---------------------------------------------------------------- trainers


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("change", [{}, TOTAL], ids=str)
def test_a_trainer_that_cannot_say_the_default_gets_a_comment_that_says_so(trainer, change):
    found = advised(given(**change), trainer).recommendation
    policy = "current" if change else "old"
    able = trainer in sayable(catalogue.load()[FAMILIES[policy][0]])
    assert (found.title, found.rule) == (DEFAULT, "default")
    assert found.config.startswith(f"# {trainer} cannot say") is not able


AT_2 = ("rollout_is: token", "rollout_is_threshold: 2.0")


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, (*AT_2, "bypass_mode: false")),
        ({"prefix": "total."}, (*AT_2, "bypass_mode: true")),
        ({"k3": 9e-7}, ("# recompute for verl",)),
        ({"k3": 9e-7, "prefix": "total."}, ("# ppo_is for verl",)),
    ],
)
def test_a_decision_is_said_in_the_trainers_own_syntax(change, lines):
    config = advised(given(**change), "verl").recommendation.config
    assert all(line in config for line in lines)
    assert ("rollout_is: token" in config) is ("k3" not in change)
    assert advised(given(**change)).recommendation.config is None


def test_no_rule_holds_because_a_number_is_unknown():
    for empty in (without(given(), *PLAIN), make_summary(metrics={}, by={}, diagnosis=FINE)):
        assert recommend(empty).rule == "unknown"
    for name in PLAIN:
        assert recommend(without(given(), name)).rule == ("unknown" if name == "k3" else "default")


# ---------------------------------------------------------------- real dumps


SAMPLES = Path(__file__).parent.parent / "sample_data"
NAMES = ("healthy", "quantized", "stale", "collapse")


def table(name):
    return pq.read_table(SAMPLES / f"{name}.parquet")


def analyzed(tmp_path, rows, **options):
    """Analyze a table."""
    pq.write_table(rows, tmp_path / "d.parquet")
    return analyze([str(tmp_path / "d.parquet")], **{"presets": (), "device": "cpu", **options})


def with_column(rows, name, values):
    return rows.set_column(rows.column_names.index(name), name, values)


@cache
def sample(name):
    return advised(analyze([str(SAMPLES / f"{name}.parquet")], presets=(), device="cpu"))


def test_a_healthy_run_with_other_noise_needs_no_correction(tmp_path):
    """256 rows of `healthy` with noise of single tokens, as of bfloat16."""
    rng, rows = np.random.default_rng(0), table("healthy").slice(0, 256)
    rollout = [np.array(logs) for logs in rows["rollout_log_probs"].to_pylist()]
    noise = [0.01 * rng.normal(size=len(x)) * (1 + rng.exponential(size=len(x))) for x in rollout]
    old = [np.minimum(x + np.minimum(np.abs(x), 1) * e, 0) for x, e in zip(rollout, noise, strict=True)]
    found = advised(analyzed(tmp_path, with_column(rows, "old_log_probs", [old])))

    assert found.diagnosis.verdict == "healthy"
    assert (found.recommendation.decision, found.recommendation.rule) == (NO, "healthy")


@pytest.mark.parametrize("name", NAMES)
def test_a_small_mismatch_needs_no_correction_and_a_stale_run_the_default(name):
    summary, stale = sample(name), name in ("stale", "collapse")
    found, again = summary.recommendation, loads(summary.to_json(), "again")

    rule = {"stale": "default", "collapse": "collapse"}.get(name, "healthy")
    assert (found.decision, found.rule) == (METHOD if stale else NO, rule)
    assert found.method in (catalogue.load() if stale else (None,))
    assert advised(again) == summary


def test_two_equal_columns_are_the_same_numbers_twice(tmp_path):
    rows = table("healthy")
    found = advised(analyzed(tmp_path, with_column(rows, "old_log_probs", rows["rollout_log_probs"])))
    assert (found.diagnosis.verdict, found.recommendation.rule) == ("cannot_tell", "identical")
    assert headline(found)[1] == "THE SAME NUMBERS TWICE: was one column copied from the other?"


def test_one_token_that_is_logged_7_nats_too_low_is_no_bug_and_changes_no_decision(tmp_path):
    rows = table("healthy")
    values = rows["rollout_log_probs"].to_pylist()
    values[100][np.flatnonzero(rows["response_mask"][100].as_py())[3]] -= 7
    found = advised(analyzed(tmp_path, with_column(rows, "rollout_log_probs", [values])))
    assert (found.diagnosis.verdict, found.recommendation.decision) == ("healthy", NO)


@pytest.mark.parametrize(
    ("name", "prompts"),
    [("healthy", 4), ("healthy", 9), ("healthy", 10), ("stale", 24), ("stale", 40)],
)
def test_the_same_rows_with_and_without_group_id_get_no_opposite_answers(tmp_path, name, prompts):
    """Without, more rows are needed before anything is said; that nothing is wrong is said either way."""
    whole = table(name)
    groups = list(dict.fromkeys(whole["group_id"].to_pylist()))[:prompts]
    rows, found = whole.filter(pc.field("group_id").isin(groups)), []
    for columns in (rows, rows.drop_columns("group_id")):
        summary = analyzed(tmp_path, columns)
        assert summary.diagnosis.verdict == ("healthy" if name == "healthy" else "honest_mismatch")
        found.append(recommend(summary).decision)

    sure, least = (NO, 5) if name == "healthy" else (METHOD, 20)
    assert len(rows) == 8 * prompts
    assert found == [sure if many >= least else FEW for many in (prompts, len(rows) // 16)]


@pytest.mark.parametrize(("name", "decision"), [("healthy", NO), ("stale", METHOD)])
def test_columns_that_are_missing_turn_no_answer_into_its_opposite(tmp_path, name, decision):
    found = analyzed(tmp_path, table(name).drop_columns(["advantages", "token_ids"]))
    assert recommend(found).decision == decision


def test_a_value_that_no_honest_run_has_leaves_a_recommendation(tmp_path):
    """Numbers that overflow are unknown; nothing crashes, warns or is printed as NaN."""
    rows = oracles.make_rows(0.1, many=100)
    rows[0]["old_log_probs"][0] = 1e300
    found = advised(analyze([oracles.write(rows, tmp_path / "d.parquet")], presets=(), device="cpu"))
    assert found.recommendation.rule == "bug"
    assert loads(found.to_json(), "x").recommendation == found.recommendation


# ---------------------------------------------------------------- sentences that were false


def in_steps(lag, *k3):
    """Make a summary of steps 0, 1, … of one lag, with these K3."""
    at = [*range(len(k3))]
    series = {"k3": [Number(value=one) for one in k3], "policy_lag": [Number(value=lag)] * len(k3)}
    steps = BySteps(first=at, last=at, series=series)
    lag_0 = LagEvidence(in_sync=Number(value=0.27), in_sync_share=1.0)
    return make_summary(charts=Charts(steps=steps, lag=lag_0), gates=[])


def test_k3_in_sync_is_no_one_number_where_its_steps_differ():
    checked = [one.text for one in checks(in_steps(0.0, 0.0009, 0.1, 0.7))]
    assert "In sync (lag 0) K3 is 0.00090 (step 0) to 0.70 (step 2)" in checked
    assert "In sync (lag 0) K3 is 0.27" not in checked
    for alike in (in_steps(0.0, 0.2, 0.3, 0.4), in_steps(1.0, 0.0009, 0.1, 0.7)):
        assert "In sync (lag 0) K3 is 0.27" in [one.text for one in checks(alike)]


@pytest.mark.parametrize(("after", "told"), [(0.001, True), (0.0025, True), (0.0049, False)])
def test_k3_after_a_fix_is_told_where_the_fix_halves_it(after, told):
    size = After(what="undone", k3=after, mean_ratio=1.0, ess_tokens=1.0, tokens=9)
    cause = Cause(id="off_by_one", statement="Shifted.", statistic="counted", fix="shift it", after=size)
    summary = advised(given(diagnosis=BUG.model_copy(update={"causes": [cause]})))
    todo = next(one.sentence for one in answered(summary).facts if one.label == "What to do")
    assert ("After it, K3 is" in todo) is ("after the fix" in headline(summary)[4]) is told


def test_no_band_stands_beside_a_bug():
    of_bug, fine = ({one.band for one in answered(make_summary(diagnosis=one)).tiles} for one in (BUG, FINE))
    assert "elevated" in fine
    assert of_bug <= {"", "reliable", "unreliable"}  # the last two are of k̂


@pytest.mark.parametrize("exact", [True, False])
def test_a_dump_whose_cause_is_counted_is_not_called_too_small(exact):
    cause = Cause(id="stale", kind="honest", statement="Old.", statistic="counted", exact=exact)
    summary = given(diagnosis=FINE.model_copy(update={"causes": [cause]}), facts={"groups": 3})
    assert ("TOO LITTLE DATA" in headline(advised(summary))[0]) is not exact


def test_suggested_commands_name_what_was_given(tmp_path):
    for step in range(2):
        pq.write_table(table("healthy"), tmp_path / f"step_{step}.parquet")
    found = analyze([str(tmp_path)], presets=(), device="cpu")
    assert len(found.dump.files) == 2
    assert analysis(found.dump) == (("analyze", f"offpol-diag analyze {tmp_path}"),)


def test_two_runs_are_named_by_what_tells_their_paths_apart():
    one, two = (dump_facts(files=[f"runs/{run}/step_0.parquet", "x"]) for run in "ab")
    assert named(one, two) == ("a/step_0.parquet and 1 more", "b/step_0.parquet and 1 more")
    assert named(one, one) == ("step_0.parquet and 1 more",) * 2
    assert named(dump_facts(files=["c/d.parquet"]), two)[0] == "d.parquet"
