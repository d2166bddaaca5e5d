"""The recommendation: one row per rule, what it decides and rests on; and sentences that were false once."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

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
from offpol_diag.trainers.translate import trainers_for
from tests.factory import dump_facts, make_summary
from tests.reading import analyze

BARE = {name: name for name in ("rollout_log_probs", "old_log_probs")}
GROUPED = BARE | {"group_id": "group_id"}
BUG = Diagnosis(verdict="bug", headline="off by one")
FINE = Diagnosis(verdict="honest_mismatch", headline="fine")
FIT = [CandidateCause(id=one, kind="honest", statement=one) for one in ("stale", "numerics")]
OPEN = Diagnosis(verdict="cannot_tell", headline="two causes fit", candidates=FIT, decide="write policy_lag")
HEALTHY = Diagnosis(verdict="healthy", headline="as small as rounding")
GROWN = (0.001, 0.001, 0.3)
"""K3 of steps that grow beyond the merge gate."""


def by_step(*k3, **more):
    """Return the charts of steps 0, 1, … with these K3."""
    at, series = [*range(len(k3))], {"k3": [Number(value=one) for one in k3]}
    return Charts(steps=BySteps(first=at, last=at, series=series | more)) if k3 else Charts()


def given(diagnosis=FINE, prefix="", facts=None, steps=(), **values):
    """Make a result with numbers of the main pair; `facts` are of the dump, `steps` are K3 by step."""
    values = {"k3": 5e-3, "f_2": 5e-3, **values}
    metrics = {prefix + name: Number(value=value) for name, value in values.items()}
    facts = dump_facts(**{"columns": GROUPED, **(facts or {})})
    more = {"by": {}, "gates": [], "presets": {}, "charts": by_step(*steps)}
    return make_summary(dump=facts, metrics=metrics, diagnosis=diagnosis, **more)


METHOD, NO, FEW = "METHOD at THRESHOLD", "no correction needed", "not enough data"
TIS, BYPASS = "token_is", "bypass_pg_token_is"
WELL, TOTAL = {"diagnosis": HEALTHY}, {"prefix": "total."}
RULED = {  # rule → its decision
    **dict.fromkeys(("few", "identical", "unknown"), FEW),
    **dict.fromkeys(("undecided", "collapse", "default"), METHOD),
    "bug": "fix the bug first",
    "healthy": NO,
}
LITTLE, OPENED, STALE = {"facts": {"groups": 19}}, {"diagnosis": OPEN}, {"steps": GROWN}
ROWS = [
    # the first rule that holds, the method, and of which results
    ("bug", None, *({"diagnosis": BUG} | one for one in (LITTLE, {"k3": 9e-7}, STALE))),
    ("few", None, *(LITTLE | one for one in ({}, {"k3": 9e-7}, STALE, OPENED))),
    ("few", None, {"facts": {"sequences": 49}}, {"facts": {"tokens": 999}}),
    ("few", None, {"facts": {"sequences": 319, "columns": BARE}}),
    ("identical", None, {"k3": 0.0, "log_ratio_min": 0.0, "log_ratio_max": 0.0}),
    ("unknown", None, *({"k3": None, "f_2": x} for x in (5e-3, 0.6, None))),
    ("healthy", None, {"k3": 0.0, "log_ratio_min": 0.0, "log_ratio_max": 1e-9}),
    ("healthy", None, *({"k3": 9e-7} | one for one in ({"f_2": 0.6}, OPENED))),
    ("healthy", None, WELL, WELL | TOTAL, {"k3": 0.000999}, {"k3": 9e-4, "diagnosis": None}),
    ("undecided", TIS, OPENED, OPENED | {"k3": 9e-4}, OPENED | STALE),
    ("undecided", BYPASS, OPENED | TOTAL),
    ("collapse", TIS, STALE, {"steps": (*GROWN, 0.2, 0.4, 0.5)}),
    ("default", TIS, *({"steps": (k3, k3, last)} for k3, last in ((0.001, 0.014), (0.02, 0.3), (0.3, 0.3)))),
    ("default", TIS, *({"facts": one} for one in ({"groups": 20}, {"sequences": 50}, {"tokens": 1000}))),
    ("default", TIS, {"facts": {"sequences": 320, "columns": BARE}}, {"diagnosis": None}),
    ("default", TIS, {"k3": 0.001001}, {"k3": 1.01}, {"f_2": 0.6}, {"f_2": None}),
    ("default", BYPASS, TOTAL),
]
CASES = [(rule, method, change) for rule, method, *changes in ROWS for change in changes]


@pytest.mark.parametrize(("rule", "method", "change"), CASES, ids=str)
def test_the_first_rule_that_holds_decides(rule, method, change):
    found = recommend(given(**change))
    assert (found.rule, found.method, found.decision) == (rule, method, RULED[rule])
    assert (found.title, found.threshold) == ((DEFAULT, "2.0") if method else (None, None))
    assert found.sentence == next(one.sentence for one in RULES if one.name == rule)


def test_every_rule_and_every_decision_has_a_row():
    assert set(RULED) == {rule for rule, *_ in CASES} == {rule.name for rule in RULES}
    assert set(RULED.values()) == set(get_args(Decision))
    assert all(rule.source for rule in RULES if rule.decision in (METHOD, NO))


def test_growth_is_five_times_the_first_third_and_more_than_rounding():
    for first, last, grows in ((1e-3, 4.9e-3, False), (1e-3, 5.1e-3, True), (5.1e-3, 1e-3, False)):
        assert (growth(given(steps=(first, 1e-3, last))) is not None) is grows
    for last, grows in ((9e-5, False), (1.1e-4, True)):  # grows, and is still nothing
        assert (growth(given(steps=(1e-6, 1e-6, last))) is not None) is grows


@pytest.mark.parametrize(("many", "rule"), [(4, "few"), (5, "healthy")])
def test_that_a_mismatch_is_small_is_said_of_few_prompts(many, rule):
    small = given(diagnosis=HEALTHY, facts={"groups": many}, f_2=1e-3)
    small.whole["k3"] = Number(value=5e-4, interval=(1e-4, 1e-3))
    assert recommend(small).rule == rule


@pytest.mark.parametrize("policy", FAMILIES)
def test_the_families_are_presets_of_their_numerator_and_the_default_is_what_its_words_say(policy):
    shipped = catalogue.load()
    assert {shipped[name].policy for name in FAMILIES[policy]} == {policy}
    weight = shipped[FAMILIES[policy][0]].weight
    assert (weight.over, weight.action, weight.upper, weight.lower) == ("token", "truncate", 2.0, None)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, ("rollout_is: token", "rollout_is_threshold: 2.0", "bypass_mode: false")),
        (TOTAL, ("rollout_is: token", "rollout_is_threshold: 2.0", "bypass_mode: true")),
        ({"k3": 9e-7}, ("# recompute for verl",)),
        ({"k3": 9e-7} | TOTAL, ("# ppo_is for verl",)),
    ],
)
def test_a_decision_is_said_in_the_trainers_own_syntax_or_that_it_cannot_be(change, lines):
    config = advised(given(**change), "verl").recommendation.config
    assert all(line in config for line in lines)
    assert ("rollout_is: token" in config) is ("k3" not in change)
    assert advised(given(**change)).recommendation.config is None
    for trainer in TRAINERS if len(lines) == 3 else ():
        able = trainer in trainers_for(catalogue.load()[FAMILIES["current" if change else "old"][0]])
        config = advised(given(**change), trainer).recommendation.config
        assert config.startswith(f"# {trainer} cannot express") is not able


SAMPLES = Path(__file__).parent.parent / "sample_data"


def table(name):
    return pq.read_table(SAMPLES / f"{name}.parquet")


def analyzed(tmp_path, rows, presets=()):
    """Analyze a table, and add the recommendation."""
    pq.write_table(rows, tmp_path / "d.parquet")
    return advised(analyze([str(tmp_path / "d.parquet")], presets=presets, device="cpu"))


@pytest.mark.parametrize(
    ("name", "rule"),
    [("healthy", "healthy"), ("quantized", "healthy"), ("stale", "default"), ("collapse", "collapse")],
)
def test_a_small_mismatch_needs_no_correction_and_a_stale_run_the_default(name, rule, tmp_path):
    found = analyzed(tmp_path, table(name))
    assert (found.recommendation.rule, found.recommendation.alternatives) == (rule, [])
    assert advised(loads(found.to_json(), "again")) == found


def test_a_method_has_one_of_each_other_family_beside_it_where_they_were_computed(tmp_path):
    rows, presets = table("stale"), [*FAMILIES["old"], *FAMILIES["current"]]
    for policy, dump in (("old", rows), ("current", rows.drop_columns("old_log_probs"))):
        found = analyzed(tmp_path, dump, presets).recommendation
        assert [found.method, *found.alternatives] == [*FAMILIES[policy]]


def test_two_equal_columns_are_the_same_numbers_twice(tmp_path):
    rows = table("healthy").drop_columns("old_log_probs")
    found = analyzed(tmp_path, rows.append_column("old_log_probs", rows["rollout_log_probs"]))
    assert (found.diagnosis.verdict, found.recommendation.rule) == ("cannot_tell", "identical")
    assert headline(found)[1] == "THE SAME NUMBERS TWICE: was one column copied from the other?"


def test_k3_in_sync_is_no_one_number_where_its_steps_differ():
    def said(lag, *k3):
        charts = by_step(*k3, policy_lag=[Number(value=lag)] * len(k3))
        lag_0 = LagEvidence(in_sync=Number(value=0.27), in_sync_share=1.0)
        return [one.text for one in checks(make_summary(charts=charts.model_copy(update={"lag": lag_0})))]

    apart = said(0.0, 0.0009, 0.1, 0.7)
    assert "In sync (lag 0) K3 is 0.00090 (step 0) to 0.70 (step 2)" in apart
    assert "In sync (lag 0) K3 is 0.27" not in apart
    for alike in (said(0.0, 0.2, 0.3, 0.4), said(1.0, 0.0009, 0.1, 0.7)):
        assert "In sync (lag 0) K3 is 0.27" in alike


@pytest.mark.parametrize(("after", "told"), [(0.0025, True), (0.0049, False)])
def test_k3_after_a_fix_is_told_where_the_fix_halves_it(after, told):
    size = After(what="undone", k3=after, mean_ratio=1.0, ess_tokens=1.0, tokens=9)
    cause = Cause(id="off_by_one", statement="Shifted.", statistic="counted", fix="shift it", after=size)
    summary = advised(given(diagnosis=BUG.model_copy(update={"causes": [cause]})))
    todo = next(one.sentence for one in answered(summary).facts if one.label == "What to do")
    assert ("After it, K3 is" in todo) is ("after the fix" in headline(summary)[3]) is told


def test_no_band_but_those_of_khat_stands_beside_a_bug():
    of_bug, fine = ({one.band for one in answered(make_summary(diagnosis=one)).tiles} for one in (BUG, FINE))
    assert ("elevated" in fine, of_bug <= {"", "reliable", "unreliable"}) == (True, True)


@pytest.mark.parametrize("exact", [True, False])
def test_a_dump_whose_cause_is_counted_is_not_called_too_small(exact):
    cause = Cause(id="stale", kind="honest", statement="Old.", statistic="counted", exact=exact)
    summary = given(diagnosis=FINE.model_copy(update={"causes": [cause]}), facts={"groups": 3})
    assert ("TOO LITTLE DATA" in headline(advised(summary))[0]) is not exact


def test_suggested_commands_name_what_was_given_and_runs_by_what_tells_their_paths_apart(tmp_path):
    files = [f"{tmp_path}/step_{step}.parquet" for step in range(2)]
    for file in files:
        pq.write_table(table("healthy").slice(0, 8), file)
    found = analyze([str(tmp_path)], presets=(), device="cpu").dump
    assert (found.files, analysis(found)) == (files, (("analyze", f"offpol-diag analyze {tmp_path}"),))

    one, two = (dump_facts(files=[f"runs/{run}/step_0.parquet", "x"]) for run in "ab")
    assert named(one, two) == ("a/step_0.parquet and 1 more", "b/step_0.parquet and 1 more")
    assert named(one, one) == ("step_0.parquet and 1 more",) * 2
