"""The recommendation: one row per rule, what it decides and what it saw."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from typing import get_args

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from faults import dump

from offpol_diag.advice.prescription import expressible, prescribed
from offpol_diag.advice.recommend import (
    ALERTS,
    NOISE,
    RULES,
    VISIBLE,
    advised,
    recommend,
)
from offpol_diag.analyze import analyze
from offpol_diag.engine.formula import Z
from offpol_diag.presets import catalogue
from offpol_diag.presets.candidates import CANDIDATES, DEFAULT, ICEPOP, MASK, NOTHING
from offpol_diag.report.sections.answer import WEIGHTS, headline, tie
from offpol_diag.report.sections.presets import UNSEEN, ranking
from offpol_diag.summary import MARGIN, Cause, Decision, Diagnosis, Label, Lengths, Number, loads
from offpol_diag.trainers import TRAINERS
from tests import oracles
from tests.factory import dump_facts, make_summary

GROUPED = {name: name for name in ("rollout_log_probs", "old_log_probs", "group_id")}
BARE = {name: name for name in GROUPED if name != "group_id"}
BUG = Diagnosis(verdict="bug", headline="off by one")
FINE = Diagnosis(verdict="honest_mismatch", headline="fine")
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
WEIGHED = {one.name: {"ess_tokens": Number(value=0.8 + at / 100)} for at, one in enumerate(CANDIDATES)}
A_BIT = 1e-6
"""Less than what any threshold is rounded to."""


def given(diagnosis=FINE, prefix="", note=None, facts=None, share=None, errors=None, over=None, **values):
    """A summary with some numbers set to what a row of the table says.

    Args:
        diagnosis: without its systematic share.
        prefix: '' for drift 1, 'total.' for a dump of two policies.
        note: of the numbers in `values`.
        facts: of the dump.
        share: interval of the systematic share of r.
        errors: standard errors by which the surrogate gain lies above 0.
        over: (candidate, other) → interval of the share by which its estimated error is above the other's.
        values: of metrics.
    """
    metrics = {prefix + name: Number(value=value) for name, value in PLAIN.items()}
    metrics[prefix + "f_2"] = Number(value=PLAIN["f_2"], unit="fraction")
    metrics |= {prefix + name: Number(value=value, note=note) for name, value in values.items()}
    if errors is not None:
        gain, ends = 0.01 * errors, (0.01 * (errors - Z), 0.01 * (errors + Z))
        metrics[prefix + "surrogate_gain"] = Number(value=gain, interval=ends)
    if share is not None:
        value = Number(value=sum(share) / 2, interval=share, unit="fraction")
        diagnosis = diagnosis.model_copy(update={"systematic": value})
    facts = dump_facts(**{"columns": GROUPED, **(facts or {})})
    weights = {name: dict(numbers) for name, numbers in WEIGHED.items()}
    for (one, other), ends in (over or {}).items():
        weights[one][f"error_above.{other}"] = Number(value=sum(ends) / 2, interval=ends, unit="fraction")
    return make_summary(dump=facts, metrics=metrics, diagnosis=diagnosis, by={}, weights=weights)


def without(summary, *names):
    """The same summary, with these metrics unknown."""
    return summary.model_copy(update={"metrics": summary.metrics | {name: Number() for name in names}})


METHOD = "METHOD at THRESHOLD"
TIS, MASKED = "token_is", "verl_2026_01_rs_token_k1"
ALIKE = (0.0, NOISE - A_BIT)
"""An interval of the systematic share that is noise."""
APART = (0.2, 0.4)
"""One that is not rounding."""
NONE, ICE, TOKEN = NOTHING.name, ICEPOP.name, DEFAULT.name


def above(one, other, low, high):
    """Both differences of a pair: the error of `one` is above that of `other` by this interval."""
    return {(one, other): (low, high), (other, one): (1 / (1 + high) - 1, 1 / (1 + low) - 1)}


WON = above(NONE, TOKEN, MARGIN + A_BIT, 0.1)
"""Token TIS is significantly better than no correction."""
NO = "no correction needed"

ROWS = [
    # the first rule that holds, its decision, the method
    ({"diagnosis": BUG}, "bug", "fix the bug first", None),
    ({"diagnosis": BUG, "facts": {"groups": 3}}, "bug", "fix the bug first", None),
    ({"diagnosis": BUG, "k3": 9e-7, "share": ALIKE}, "bug", "fix the bug first", None),
    ({"diagnosis": None}, "default", METHOD, TIS),
    ({"facts": {"groups": 19}}, "few", "not enough data", None),
    ({"facts": {"groups": 20}}, "default", METHOD, TIS),
    ({"facts": {"groups": 19}, "k3": 9e-7}, "few", "not enough data", None),
    ({"facts": {"groups": 19}, "share": ALIKE}, "few", "not enough data", None),
    ({"facts": {"sequences": 49}}, "few", "not enough data", None),
    ({"facts": {"sequences": 50}}, "default", METHOD, TIS),
    ({"facts": {"tokens": 999}}, "few", "not enough data", None),
    ({"facts": {"tokens": 1000}}, "default", METHOD, TIS),
    ({"facts": {"sequences": 320, "columns": BARE}}, "default", METHOD, TIS),
    ({"facts": {"sequences": 319, "columns": BARE}}, "few", "not enough data", None),
    ({"k3": 0.0, "log_ratio_min": 0.0, "log_ratio_max": 0.0}, "identical", "not enough data", None),
    ({"k3": 0.0, "log_ratio_min": 0.0, "log_ratio_max": 1e-9}, "aligned", NO, None),
    ({"k3": None}, "unknown", "not enough data", None),
    ({"k3": None, "f_2": 0.6}, "unknown", "not enough data", None),
    ({"k3": 9e-7}, "aligned", NO, None),
    ({"k3": 9e-7, "f_2": 0.6}, "aligned", NO, None),
    ({"k3": 9e-7, "errors": 9.0}, "aligned", NO, None),
    ({"k3": 1.1e-6}, "default", METHOD, TIS),
    ({"diagnosis": HEALTHY}, "healthy", NO, None),
    ({"diagnosis": HEALTHY, "share": ALIKE}, "healthy", NO, None),
    ({"diagnosis": HEALTHY, "share": APART}, "healthy", NO, None),
    ({"diagnosis": HEALTHY, "share": APART, "errors": 9.0}, "healthy", NO, None),
    ({"diagnosis": HEALTHY, "errors": -9.0}, "healthy", NO, None),
    ({"diagnosis": HEALTHY, "over": above(NONE, TOKEN, MARGIN - A_BIT, 0.1)}, "healthy", NO, None),
    ({"diagnosis": HEALTHY, "over": above(NONE, TOKEN, 0.001, 0.002)}, "healthy", NO, None),
    ({"diagnosis": HEALTHY, "over": above(TOKEN, NONE, 0.05, 0.1)}, "healthy", NO, None),
    ({"diagnosis": HEALTHY, "over": WON}, "better", METHOD, TIS),
    ({"diagnosis": HEALTHY, "over": WON | above(NONE, ICE, 0.03, 0.1)}, "better", METHOD, TIS),
    (
        {"diagnosis": HEALTHY, "over": WON | above(NONE, ICE, 0.1, 0.2) | above(TOKEN, ICE, 0.03, 0.1)},
        "better",
        METHOD,
        "decoupled_token_icepop",
    ),
    ({"diagnosis": HEALTHY, "over": above(NONE, MASK.name, 0.03, 0.1)}, "better", METHOD, MASKED),
    ({"diagnosis": HEALTHY, "over": WON, "k3": 9e-7}, "aligned", NO, None),
    ({"diagnosis": HEALTHY, "over": WON, "prefix": "total."}, "better", METHOD, "bypass_pg_token_is"),
    ({"over": WON}, "default", METHOD, TIS),
    ({"over": WON, "share": ALIKE}, "noise", METHOD, MASKED),
    ({"over": above(DEFAULT.name, NONE, 0.05, 0.1)}, "default", METHOD, TIS),
    ({"prefix": "total.", "diagnosis": HEALTHY}, "healthy", NO, None),
    ({"f_2": 0.51}, "hopeless", "no method helps", None),
    ({"f_2": 0.51, "share": ALIKE}, "hopeless", "no method helps", None),
    ({"prefix": "total.", "f_2": 0.51}, "hopeless", "no method helps", None),
    ({"f_2": 0.5}, "default", METHOD, TIS),
    ({"share": ALIKE}, "noise", METHOD, MASKED),
    ({"share": (-0.1, -0.01)}, "noise", METHOD, MASKED),
    ({"share": (0.0, NOISE)}, "default", METHOD, TIS),
    ({"share": ALIKE, "errors": VISIBLE - A_BIT}, "noise", METHOD, MASKED),
    ({"share": ALIKE, "errors": VISIBLE + A_BIT}, "default", METHOD, TIS),
    ({"share": ALIKE, "errors": -9.0}, "noise", METHOD, MASKED),
    ({"share": APART}, "default", METHOD, TIS),
    ({"errors": 9.0}, "default", METHOD, TIS),
    ({"k3": 1.01}, "default", METHOD, TIS),
    ({"ess_tokens": 0.01}, "default", METHOD, TIS),
    ({"prefix": "total."}, "default", METHOD, "bypass_pg_token_is"),
    ({"prefix": "total.", "share": ALIKE}, "default", METHOD, "bypass_pg_token_is"),
]
LABELS = {
    "aligned": "no difference detected",
    "healthy": "no difference detected",
    "better": "measured",
    "noise": "measured",
    "default": "default",
}


@pytest.mark.parametrize(("change", "rule", "decision", "method"), ROWS, ids=str)
def test_the_first_rule_that_holds_decides(change, rule, decision, method):
    longest = Number(value=42.0, interval=(23.0, 181.0), unit="tokens")
    measured = given(**change).model_copy(update={"lengths": Lengths(longest=longest, curve=[])})
    found = recommend(measured)

    assert (found.rule, found.decision, found.method) == (rule, decision, method)
    assert found.longest_response == longest
    assert found.label == LABELS.get(rule)
    assert found.fired[0].rule == rule
    assert [one.level for one in found.fired].count("decision") == 1
    assert found.sentence == next(one.sentence for one in RULES if one.name == rule)


def test_every_rule_every_decision_and_every_label_has_a_row():
    assert {rule for _, rule, _, _ in ROWS} == {rule.name for rule in RULES}
    assert {decision for _, _, decision, _ in ROWS} == set(get_args(Decision))
    assert {LABELS[rule] for _, rule, _, _ in ROWS if rule in LABELS} == set(get_args(Label))
    assert len({rule.name for rule in (*RULES, *ALERTS)}) == len(RULES) + len(ALERTS)
    assert [rule.name for rule in (*RULES, *ALERTS) if not rule.source] == ["unknown"]
    assert RULES[-1].name == "default"


@pytest.mark.parametrize(("many", "rule"), [(4, "few"), (5, "healthy")])
def test_that_a_mismatch_is_small_is_said_of_few_prompts(many, rule):
    small = given(diagnosis=HEALTHY, facts={"groups": many}, f_2=1e-3)
    k3 = Number(value=5e-4, interval=(1e-4, 1e-3))

    assert recommend(small.model_copy(update={"metrics": small.metrics | {"k3": k3}})).rule == rule


def test_a_dump_of_which_nothing_is_known_is_not_enough():
    bare = make_summary(metrics={}, by={}, diagnosis=FINE)
    assert (recommend(bare).decision, recommend(bare).rule) == ("not enough data", "unknown")


@pytest.mark.parametrize("where", ["", "engine = 3"])
def test_a_bug_of_one_group_comes_with_the_sequences_to_leave_out(where):
    cause = Cause(id="off_by_one", statement="Shifted.", statistic="counted", where=where)
    found = recommend(given(diagnosis=BUG.model_copy(update={"causes": [cause]})))

    said = "Until then, leave out the sequences with engine = 3."
    assert found.sentence == RULES[0].sentence + (f" {said}" if where else "")


# ---------------------------------------------------------------- what it says


@pytest.mark.parametrize(
    ("change", "one", "runner_up"),
    [({}, DEFAULT, ICEPOP), ({"share": ALIKE}, MASK, DEFAULT), ({"prefix": "total."}, DEFAULT, ICEPOP)],
)
def test_a_method_comes_with_its_threshold_its_settings_and_the_runner_up(change, one, runner_up):
    found = recommend(given(**change))
    policy = "current" if "prefix" in change else "old"

    assert (found.title, found.method) == (one.title, one.preset_name(policy))
    assert (found.threshold, found.settings) == (one.threshold, one.changes(policy))
    assert found.runner_up == runner_up.title
    assert [(title, numbers["ess_tokens"].value) for title, numbers in found.numbers.items()] == [
        (shown.title, WEIGHED[shown.name]["ess_tokens"].value) for shown in (one, runner_up, NOTHING)
    ]


def test_the_mask_says_what_of_its_preset_is_set_otherwise():
    found = recommend(given(share=ALIKE))
    assert found.settings == {"reject.lower": "0.5", "reject.upper": "2.0"}


@pytest.mark.parametrize("change", [{"diagnosis": HEALTHY}, {"k3": 9e-7}])
def test_no_correction_has_no_method_and_the_default_beside_it(change):
    found = recommend(given(**change))

    assert (found.title, found.method, found.threshold, found.settings) == (None, None, None, {})
    assert found.runner_up is None
    assert list(found.numbers) == [NOTHING.title, DEFAULT.title]
    assert found.reasons
    assert found.unknown


@pytest.mark.parametrize("change", [{"diagnosis": BUG}, {"facts": {"groups": 3}}, {"k3": None}, {"f_2": 0.6}])
def test_other_decisions_have_neither_method_nor_reasons(change):
    found = recommend(given(**change))

    assert (found.title, found.method, found.threshold, found.settings) == (None, None, None, {})
    assert (found.label, found.runner_up, found.reasons, found.unknown) == (None, None, [], [])
    assert (found.numbers, found.longest_response) == ({}, None)
    assert advised(given(**change), "verl").recommendation.config is None


def ranked(**change):
    """A recommendation with the errors of its candidates, in their order: 1.0, 1.05, …"""
    summary = given(**change)
    for at, one in enumerate(CANDIDATES):
        summary.weights[one.name]["error"] = Number(value=1 + at / 20)
    return recommend(summary)


@pytest.mark.parametrize("change", [{}, {"diagnosis": HEALTHY}])
def test_the_candidates_are_ranked_by_their_estimated_error(change):
    found = ranked(over=above(ICE, TOKEN, 0.01, 0.03) | above(ICE, NONE, 0.0, 0.01), **change)
    chosen = NOTHING if change else DEFAULT

    assert [one.title for one in found.ranking] == [one.title for one in CANDIDATES]
    assert [one.score for one in found.ranking] == pytest.approx([100, 100 / 1.05, 100 / 1.1, 100 / 1.15])
    assert [one.title for one in found.ranking if one.behind is None] == [chosen.title]
    assert found.ranking[2].behind.interval == ((0.0, 0.01) if change else (0.01, 0.03))


def test_the_table_of_the_ranking_says_why_the_recommended_one_may_not_be_first():
    table = ranking(ranked(over=above(ICE, TOKEN, -0.01, 0.03) | above(MASK.name, TOKEN, 0.03, 0.1)))
    healthy = ranking(ranked(diagnosis=HEALTHY))

    assert [row[0] for row in table.rows] == [one.title for one in CANDIDATES]
    assert [row[-1] for row in table.rows] == ["–", "–", "toss-up", "–"]
    assert (table.rows[1][2], table.rows[0][1]) == ("recommended", "100")
    assert (table.notes, healthy.notes) == ((UNSEEN,), ())
    assert not ranking(recommend(given())).rows


@pytest.mark.parametrize("decision", [BUG, FINE])
def test_without_errors_nothing_is_ranked_and_no_toss_up_claimed(decision):
    found = recommend(given(diagnosis=decision))
    assert found.ranking == []
    assert tie(found) == (["The runner-up is token IcePop 0.5–5.0."] if decision is FINE else [])


TIES = [
    # interval of the runner-up's error above the chosen one's: whether it is a toss-up, and the sentence
    ((-0.01, 0.02), True, "A toss-up with {}, whose estimated error is within 2%: so the simpler one."),
    ((0.001, 0.002), True, "A toss-up with {}, whose estimated error is within 2%: so the simpler one."),
    (
        (-0.01, 0.05),
        True,
        "A toss-up with {}, whose estimated error is 2% [-1%, 5%] higher: so the simpler one.",
    ),
    (
        (-0.05, 0.01),
        True,
        "A toss-up with {}, whose estimated error is 2% [-1%, 5%] lower: so the simpler one.",
    ),
    ((0.03, 0.05), False, "The runner-up, {}, is behind: its estimated error is 4% [3%, 5%] higher."),
    ((-0.05, -0.03), False, "The runner-up, {}, is ahead: its estimated error is 4% [3%, 5%] lower."),
]


@pytest.mark.parametrize(("ends", "toss_up", "said"), TIES, ids=str)
def test_a_runner_up_is_a_toss_up_unless_the_interval_lies_beyond_the_margin(ends, toss_up, said):
    found = ranked(over={(ICE, TOKEN): ends})
    (other,) = (one for one in found.ranking if one.title == ICEPOP.title)

    assert (found.runner_up, other.tie) == (other.title, toss_up)
    assert [line.replace(".0%", "%") for line in tie(found)] == [said.format(other.title)]


def test_no_correction_is_compared_with_the_default():
    found = ranked(diagnosis=HEALTHY, over=above(TOKEN, NONE, -0.001, 0.001))
    assert tie(found) == [
        "A toss-up with token TIS at 2.0, whose estimated error is within 2%: so the simpler one."
    ]


MEASURED = "Mismatch: K3 = 0.0050 nats; 0.50% of the tokens differ by more than 2×."
REASONS = [
    ({}, []),
    (
        {"errors": VISIBLE + 0.1},
        ["Staleness visible in the advantages: cov(A, min(r, 2)) is 3.1 standard errors above 0."],
    ),
    (
        {"errors": VISIBLE - 0.1},
        ["Staleness not visible in the advantages: cov(A, min(r, 2)) is 2.9 standard errors above 0."],
    ),
    (
        {"errors": -VISIBLE - 0.5},
        ["Staleness not visible in the advantages: cov(A, min(r, 2)) is 3.5 standard errors below 0."],
    ),
    (
        {"share": (0.2, 0.3)},
        ["Dependence on the token: 25% [20%, 30%] of the variance of r is common to tokens of one kind; "],
    ),
]


@pytest.mark.parametrize(("change", "said"), REASONS)
@pytest.mark.parametrize("prefix", ["", "total."])
def test_the_reasons_are_the_mismatch_staleness_and_dependence_on_the_token(prefix, change, said):
    first, *others = recommend(given(prefix=prefix, **change)).reasons

    assert first == MEASURED
    assert len(others) == len(said)
    assert all(one.startswith(start) for one, start in zip(others, said, strict=True))


GRADIENTS = "How far the gradient is off without a correction: a dump holds no gradients."
STALENESS = "Whether staleness shows: needs the column advantages."
DEPENDENCE = "Whether the mismatch is noise or depends on the token: "
FEW = "too few tokens repeat among a prompt's responses."


@pytest.mark.parametrize(
    ("columns", "change", "said"),
    [
        ((), {}, [GRADIENTS, STALENESS, DEPENDENCE + "needs token_ids."]),
        (("advantages",), {"errors": 1.0}, [GRADIENTS, DEPENDENCE + "needs token_ids."]),
        (("token_ids",), {"share": APART}, [GRADIENTS, STALENESS]),
        (("token_ids",), {}, [GRADIENTS, STALENESS, DEPENDENCE + FEW]),
        (("advantages", "token_ids"), {"errors": 1.0, "share": APART}, [GRADIENTS]),
        (("-group_id",), {}, [GRADIENTS, STALENESS, DEPENDENCE + "needs token_ids and group_id."]),
    ],
)
def test_what_the_dump_cannot_say_names_the_column_that_would(columns, change, said):
    known = BARE if "-group_id" in columns else GROUPED
    facts = {"columns": {**known, **{name: name for name in columns if name[0] != "-"}}}
    assert recommend(given(facts=facts, **change)).unknown == said


SAW = {"k3": 5e-3, "f_2": 5e-3}
SHARE = ("systematic share of r, lower end", "systematic share of r, upper end")


@pytest.mark.parametrize(
    ("change", "saw"),
    [
        ({"diagnosis": BUG}, {"mean_ratio": 1.0, "k1": 0.005, "k3": 5e-3}),
        ({"facts": {"groups": 3}}, {"groups": 3, "sequences": 5120, "tokens": 2412345}),
        ({"k3": 9e-7}, {"k3": 9e-7}),
        ({"f_2": 0.6}, {"f_2": 0.6, "k3": 5e-3}),
        ({"prefix": "total.", "f_2": 0.6}, {"total.f_2": 0.6, "total.k3": 5e-3}),
        ({"k3": None}, {}),
        ({}, SAW | dict.fromkeys(SHARE) | {"staleness, standard errors": None}),
        (
            {"share": (0.0, 0.1), "errors": 2.0},
            SAW | dict(zip(SHARE, (0.0, 0.1), strict=True)) | {"staleness, standard errors": 2.0},
        ),
    ],
)
def test_a_rule_prints_what_it_saw_under_its_name(change, saw):
    found = recommend(given(**change)).fired[0].saw

    assert list(found) == [name for name in found if name in saw]
    assert set(found) == set(saw)
    for name, value in saw.items():
        assert found[name] == (value if value is None else pytest.approx(value)), name


# ---------------------------------------------------------------- trainers


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("change", [{}, {"share": ALIKE}, {"prefix": "total."}], ids=str)
def test_a_trainer_is_recommended_what_it_can_say(trainer, change):
    """Where it cannot say even the default, the configuration is a comment that says so."""
    found = advised(given(**change), trainer).recommendation
    policy = "current" if "prefix" in change else "old"

    def can(one):
        name = one.preset_name(policy)
        return name is not None and expressible(name, one.changes(policy), trainer)

    wanted = MASK if "share" in change and can(MASK) else DEFAULT
    other = ICEPOP if wanted is DEFAULT else DEFAULT
    assert (found.title, found.rule) == (wanted.title, "noise" if wanted is MASK else "default")
    assert found.label == LABELS[found.rule]
    assert found.runner_up == (other.title if can(other) else None)
    assert found.config.startswith(f"# {trainer} cannot say") is not can(wanted)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, ("rollout_is: token", "rollout_is_threshold: 2.0", "bypass_mode: false")),
        (
            {"prefix": "total."},
            ("rollout_is: token", "rollout_is_threshold: 2.0", "bypass_mode: true"),
        ),
        ({"k3": 9e-7}, ("# recompute for verl",)),
        ({"k3": 9e-7, "prefix": "total."}, ("# ppo_is for verl",)),
    ],
)
def test_a_decision_is_said_in_the_trainers_own_syntax(change, lines):
    config = advised(given(**change), "verl").recommendation.config

    assert all(line in config for line in lines)
    assert ("rollout_is: token" in config) is ("k3" not in change)
    assert advised(given(**change)).recommendation.config is None


def test_a_config_of_a_method_that_the_trainer_cannot_say_says_so():
    said = prescribed(recommend(given(share=ALIKE)), "trl")
    assert said.startswith("# trl cannot say verl_2026_01_rs_token_k1")


# ---------------------------------------------------------------- alerts


@pytest.mark.parametrize(
    ("values", "alerts"),
    [
        ({"k3": 1.01}, ["configuration", "above the merge gate"]),
        ({"k3": 0.016}, ["above the merge gate"]),
        ({"k3": 1.0}, ["above the merge gate"]),
        ({"mean_ratio": 0.49}, ["weights off centre"]),
        ({"mean_ratio": 1.51}, ["weights off centre"]),
        ({"ess_tokens": 0.29}, ["low ESS"]),
        ({"k1": -0.11}, ["large KL"]),
        ({"k1": 0.11}, ["large KL"]),
        ({"chi2_token": 1.1}, ["large χ²"]),
        ({"prob_diff_mean": 0.011}, ["probability difference"]),
        ({"mult_prob_error": 1.06}, ["multiplicative error"]),
        ({"ess_sequences": 0.09}, ["product ratios unusable"]),
    ],
)
@pytest.mark.parametrize("prefix", ["", "total."])
def test_each_alert_fires_on_its_side_of_the_line_with_the_number_it_saw(values, alerts, prefix):
    fired = recommend(given(prefix=prefix, **values)).fired[1:]
    (name, value), *_ = values.items()

    assert [one.rule for one in fired] == alerts
    for one in fired:
        assert one.saw[prefix + name] == value
        assert one.level == "alert"
        assert one.source


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean_ratio", 0.51),
        ("mean_ratio", 1.49),
        ("ess_tokens", 0.31),
        ("k1", -0.09),
        ("chi2_token", 0.99),
        ("k3", 0.0149),
        ("prob_diff_mean", 0.0099),
        ("mult_prob_error", 1.049),
        ("ess_sequences", 0.11),
    ],
)
def test_no_alert_fires_on_the_other_side(name, value):
    assert len(recommend(given(**{name: value})).fired) == 1


def test_a_heavy_tail_is_alerted_by_the_note_of_the_mean_that_hangs_on_it():
    (alert,) = recommend(given(ess_tokens=0.95, note="unreliable: k̂ = 0.9 is above 0.7")).fired[1:]
    assert (alert.rule, list(alert.saw)) == ("heavy tail", ["khat_tokens"])


def test_alerts_stand_beside_every_decision():
    for change in ({"diagnosis": BUG}, {"facts": {"groups": 3}}, {"k3": 9e-7}, {"share": ALIKE}, {}):
        assert [one.rule for one in recommend(given(chi2_token=1.1, **change)).fired[1:]] == ["large χ²"]


def test_no_rule_holds_because_a_number_is_unknown():
    empty = without(given(), *PLAIN)

    assert [one.rule for one in recommend(empty).fired] == ["unknown"]
    for name in PLAIN:
        found = recommend(without(given(), name))
        assert len(found.fired) == 1
        assert found.rule == ("unknown" if name == "k3" else "default")
        assert all(value is None or math.isfinite(value) for value in found.fired[0].saw.values())


# ---------------------------------------------------------------- real dumps


@cache
def sample(name):
    return advised(analyze([f"sample_data/{name}.parquet"], device="cpu"))


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_with_other_noise_needs_no_correction(seed, tmp_path):
    """256 rows of `healthy` with noise of single tokens, as of bfloat16."""
    rng, base = np.random.default_rng(seed), pq.read_table("sample_data/healthy.parquet")
    table = base.take(rng.integers(0, len(base), 256) if seed % 2 else np.arange(256) + seed * 20)
    rollout = [np.array(logs) for logs in table["rollout_log_probs"].to_pylist()]
    noise = [0.01 * rng.normal(size=len(x)) * (1 + rng.exponential(size=len(x))) for x in rollout]
    old = [np.minimum(x + np.minimum(np.abs(x), 1) * e, 0) for x, e in zip(rollout, noise, strict=True)]
    place = table.column_names.index("old_log_probs")
    pq.write_table(table.set_column(place, "old_log_probs", [old]), tmp_path / "d.parquet")
    found = advised(analyze([str(tmp_path / "d.parquet")], device="cpu"))

    assert found.diagnosis.verdict == "healthy"
    assert (found.recommendation.decision, found.recommendation.rule) == (NO, "healthy")


@pytest.mark.parametrize("name", ["healthy", "quantized", "stale", "collapse"])
def test_a_small_mismatch_needs_no_correction_and_a_stale_run_the_default(name):
    summary, stale = sample(name), name in ("stale", "collapse")
    found, again = summary.recommendation, loads(summary.to_json(), "again")

    assert (found.decision, found.rule) == ((METHOD, "default") if stale else (NO, "healthy"))
    assert (found.title, found.label) == ((DEFAULT.title, "default") if stale else (None, LABELS["healthy"]))
    wanted = (DEFAULT, ICEPOP, NOTHING) if stale else (NOTHING, DEFAULT)
    assert list(found.numbers) == [one.title for one in wanted]
    assert found.method in (catalogue.load() if stale else (None,))
    assert advised(again) == summary
    growing = [one.saw for one in found.fired if one.rule == "growing"]
    assert bool(growing) is (name == "collapse")
    assert all(saw["last third, median k3"] > 5 * saw["first third, median k3"] > 0 for saw in growing)


def test_two_equal_columns_are_the_same_numbers_twice(tmp_path):
    table = pq.read_table("sample_data/healthy.parquet")
    place = table.column_names.index("old_log_probs")
    pq.write_table(
        table.set_column(place, "old_log_probs", table["rollout_log_probs"]), tmp_path / "d.parquet"
    )
    found = advised(analyze([str(tmp_path / "d.parquet")], device="cpu"))

    assert (found.diagnosis.verdict, found.recommendation.rule) == ("cannot_tell", "identical")
    assert headline(found)[0] == "THE SAME NUMBERS TWICE: was one column copied from the other?"


def test_one_token_that_is_logged_too_low_is_no_bug_and_changes_no_decision(tmp_path):
    """By 7 nats, in the trainer's column or in the engine's."""
    base = pq.read_table("sample_data/healthy.parquet")
    for column in ("old_log_probs", "rollout_log_probs"):
        rows = base[column].to_pylist()
        mask = base["response_mask"].to_pylist()[100]
        at = [i for i, seen in enumerate(mask) if seen][3]
        rows[100][at] -= 7
        pq.write_table(
            base.set_column(base.column_names.index(column), column, [rows]), tmp_path / "d.parquet"
        )
        found = advised(analyze([str(tmp_path / "d.parquet")], device="cpu"))

        assert found.diagnosis.verdict == "healthy", column
        assert found.recommendation.decision == sample("healthy").recommendation.decision, column


@pytest.mark.parametrize("side", ["old", "current"])
def test_what_is_said_of_a_candidate_is_what_an_analysis_of_its_preset_says(side, tmp_path):
    table = pq.read_table("sample_data/collapse.parquet")
    pq.write_table(table if side == "old" else table.drop_columns("old_log_probs"), tmp_path / "d.parquet")
    rows = [one for one in CANDIDATES if one.preset_name(side)]
    found = analyze([str(tmp_path / "d.parquet")], presets=[one.preset(side) for one in rows], device="cpu")

    assert list(found.weights) == [one.name for one in rows]
    for one in rows:
        metrics = found.presets[one.preset(side).name].metrics
        said = {key: x for key, x in found.weights[one.name].items() if not key.startswith("error")}
        assert said == {key: metrics[key].model_copy(update={"clamped": None}) for key in said}
        assert set(said) == {*dict(WEIGHTS), "weight_min"}


@pytest.mark.parametrize(
    ("name", "prompts"),
    [("healthy", 4), ("healthy", 9), ("healthy", 64), ("stale", 16), ("stale", 24), ("stale", 40)],
)
def test_the_same_rows_with_and_without_group_id_get_no_opposite_answers(tmp_path, name, prompts):
    """Without, more rows are needed before anything is said; that nothing is wrong is said either way."""
    table = pq.read_table(f"sample_data/{name}.parquet")
    groups = list(dict.fromkeys(table["group_id"].to_pylist()))[:prompts]
    table = table.filter(pc.field("group_id").isin(groups))
    found = []
    for columns in (table, table.drop_columns("group_id")):
        pq.write_table(columns, tmp_path / "d.parquet")
        summary = analyze([str(tmp_path / "d.parquet")], device="cpu")
        assert summary.diagnosis.verdict == ("healthy" if name == "healthy" else "honest_mismatch")
        found.append(recommend(summary).decision)

    sure, least = (NO, 5) if name == "healthy" else (METHOD, 20)
    assert len(table) == 8 * prompts
    assert found == [sure if many >= least else "not enough data" for many in (prompts, len(table) // 16)]


OPTIONAL = ("advantages", "token_ids", "group_id")


@pytest.mark.parametrize(
    ("name", "decision", "there"),
    [
        (name, decision, there)
        for at, there in enumerate(product((True, False), repeat=3))
        for name, decision in [("healthy", NO), ("stale", METHOD)][at % 2 :: 2]
    ],
    ids=str,
)
def test_columns_that_are_missing_turn_no_answer_into_its_opposite(tmp_path, name, decision, there):
    table = pq.read_table(f"sample_data/{name}.parquet")
    lacking = [column for column, kept in zip(OPTIONAL, there, strict=True) if not kept]
    pq.write_table(table.drop_columns(lacking), tmp_path / "d.parquet")
    found = advised(analyze([str(tmp_path / "d.parquet")], device="cpu")).recommendation

    assert found.decision == decision
    assert name != "stale" or found.label != "measured"
    assert any(STALENESS in one for one in found.unknown) is ("advantages" in lacking)
    assert any(DEPENDENCE in one for one in found.unknown) is bool({"token_ids", "group_id"} & {*lacking})


@pytest.mark.parametrize("fault", ["shift", "raw"])
def test_a_bug_is_to_be_fixed_first(tmp_path, fault):
    summary = analyze([dump(tmp_path / "d.parquet", fault=fault, noise=0.02)], device="cpu")
    found = advised(summary).recommendation

    assert (found.decision, found.rule, found.method) == ("fix the bug first", "bug", None)


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("old_log_probs", 1e30, "bug"),
        ("old_log_probs", 1e300, "bug"),
        ("advantages", 1e30, None),
        ("advantages", 1e300, None),
    ],
)
def test_a_value_that_no_honest_run_has_leaves_a_recommendation(tmp_path, column, value, rule):
    """What overflows is unknown; nothing crashes, warns or is printed as NaN."""
    rows = oracles.make_rows(0.1, many=100)
    rows[0][column][0] = value
    summary = analyze([oracles.write(rows, tmp_path / "d.parquet")], device="cpu")
    found = advised(summary)

    assert rule in (None, found.recommendation.rule)
    assert loads(found.to_json(), "x").recommendation == found.recommendation
    assert "nan" not in " ".join(found.recommendation.reasons)
