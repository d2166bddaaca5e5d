"""The recommendation: one row per rule, what it decides and what it saw."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from drawn import html, markdown, terminal

from offpol_diag.advice.prescription import expressible, prescribed
from offpol_diag.advice.recommend import ADDS_UP, ALERTS, NOISE, RULES, VISIBLE, advised, recommend
from offpol_diag.analyze import analyze
from offpol_diag.engine.formula import Z
from offpol_diag.metrics import METRICS
from offpol_diag.number import Number
from offpol_diag.presets import catalogue
from offpol_diag.presets.candidates import CANDIDATES, DEFAULT, ICEPOP, NOTHING
from offpol_diag.report import answered
from offpol_diag.report.analyze import TIED, headline, ranking
from offpol_diag.report.remedy import LABELS, UNRANKED, WEIGHTS, certainty, tie
from offpol_diag.result import MARGIN, CandidateCause, Cause, Decision, Diagnosis, Label, Lengths, loads
from offpol_diag.trainers import TRAINERS
from tests import oracles
from tests.factory import dump_facts, make_summary, with_numbers

GROUPED = {name: name for name in ("rollout_log_probs", "old_log_probs", "group_id")}
BARE = {name: name for name in GROUPED if name != "group_id"}
BUG = Diagnosis(verdict="bug", headline="off by one")
FINE = Diagnosis(verdict="honest_mismatch", headline="fine")
OPEN = Diagnosis(
    verdict="cannot_tell",
    headline="two causes fit",
    candidates=[CandidateCause(id=one, statement=one) for one in ("stale", "numerics")],
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
WEIGHED = {one.name: {"ess_tokens": Number(value=0.8 + at / 100)} for at, one in enumerate(CANDIDATES)}
A_BIT = 1e-6
"""Less than what any threshold is rounded to."""


def given(diagnosis=FINE, prefix="", note=None, facts=None, share=None, errors=None, over=None, **values):
    """Make a summary with some numbers set: `note` is of those in `values`, `facts` of the dump.

    Args:
        diagnosis: without its systematic share.
        prefix: '' for drift 1, 'total.' for a dump of two policies.
        share: interval of the systematic share of r.
        errors: standard errors by which the surrogate gain lies above 0.
        over: (candidate, other) → interval of the share by which its estimated error is above the other's.
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
    more = {"by": {}, "gates": [], "weights": weights}
    return make_summary(dump=facts, metrics=metrics, diagnosis=diagnosis, **more)


def without(summary, *names):
    """Return the summary with these metrics unknown."""
    return with_numbers(summary, "dump", summary.whole | {name: Number() for name in names})


METHOD = "METHOD at THRESHOLD"
TIS = "token_is"
ALIKE = (0.0, NOISE - A_BIT)
"""An interval of the systematic share that is noise."""
APART = (0.2, 0.4)
"""One that is not rounding."""
NONE, ICE, TOKEN = NOTHING.name, ICEPOP.name, DEFAULT.name


def above(one, other, low, high):
    """Make both differences of a pair: the error of `one` is above that of `other` by this interval."""
    return {(one, other): (low, high), (other, one): (1 / (1 + high) - 1, 1 / (1 + low) - 1)}


WON = above(NONE, TOKEN, MARGIN + A_BIT, 0.1)
"""Token TIS is significantly better than no correction."""
ICE_WON = WON | above(NONE, ICE, 0.1, 0.2) | above(TOKEN, ICE, 0.03, 0.1)
NO, FEW = "no correction needed", "not enough data"
ALIGNED = "no difference detected"

WELL, TOTAL, FORCED = {"diagnosis": HEALTHY}, {"prefix": "total."}, "bypass_pg_token_is"
SHORT, LONG = ({"facts": {"mean_length": ADDS_UP / (PLAIN["k3"] * APART[0]) + by}} for by in (-0.1, 0.1))
"""Responses over which a share of `APART` adds up to less, and to more, than is still small."""
RULED = {  # rule → its decision, and its label
    "bug": ("fix the bug first", None),
    "few": (FEW, None),
    "identical": (FEW, None),
    "unknown": (FEW, None),
    "aligned": (NO, ALIGNED),
    "healthy": (NO, ALIGNED),
    "adds up": (METHOD, "default"),
    "hopeless": ("no method helps", None),
    "better": (METHOD, "measured"),
    "undecided": (METHOD, "default"),
    "default": (METHOD, "default"),
}
ROWS = [
    # the first rule that holds, the method, and of which summaries
    ("bug", None, {"diagnosis": BUG}, {"diagnosis": BUG, "facts": {"groups": 3}}),
    ("bug", None, {"diagnosis": BUG, "k3": 9e-7, "share": ALIKE}),
    ("few", None, *({"facts": {"groups": 19}, **more} for more in ({}, {"k3": 9e-7}, {"share": ALIKE}))),
    ("few", None, *({"facts": few} for few in ({"sequences": 49}, {"tokens": 999}))),
    ("few", None, {"facts": {"sequences": 319, "columns": BARE}}),
    ("identical", None, {"k3": 0.0, "log_ratio_min": 0.0, "log_ratio_max": 0.0}),
    ("unknown", None, {"k3": None}, {"k3": None, "f_2": 0.6}),
    ("aligned", None, {"k3": 0.0, "log_ratio_min": 0.0, "log_ratio_max": 1e-9}),
    ("aligned", None, {"k3": 9e-7}, {"k3": 9e-7, "f_2": 0.6}, {"k3": 9e-7, "errors": 9.0}),
    ("aligned", None, WELL | {"k3": 9e-7, "over": WON}),
    ("healthy", None, *(WELL | more for more in ({}, TOTAL, {"share": ALIKE}, {"share": (NOISE, 0.9)}))),
    ("healthy", None, WELL | {"errors": -9.0}, WELL | SHORT | {"share": APART, "errors": 9.0}),
    ("adds up", TIS, WELL | LONG | {"share": APART}, WELL | LONG | {"share": APART, "errors": -9.0}),
    ("adds up", FORCED, WELL | LONG | TOTAL | {"share": APART}),
    ("better", TIS, WELL | LONG | {"share": APART, "over": WON}),
    ("healthy", None, WELL | {"over": above(NONE, TOKEN, MARGIN - A_BIT, 0.1)}),
    ("healthy", None, WELL | {"over": above(NONE, TOKEN, 0.001, 0.002)}),
    ("healthy", None, WELL | {"over": above(TOKEN, NONE, 0.05, 0.1)}),
    ("better", TIS, WELL | {"over": WON}, WELL | {"over": WON | above(NONE, ICE, 0.03, 0.1)}),
    ("better", "decoupled_token_icepop", WELL | {"over": ICE_WON}),
    ("better", FORCED, WELL | TOTAL | {"over": WON}),
    ("hopeless", None, *({"f_2": 0.51, **more} for more in ({}, {"share": ALIKE}, TOTAL))),
    ("undecided", TIS, *({"diagnosis": OPEN, **more} for more in ({}, {"share": ALIKE}, {"over": WON}))),
    ("undecided", FORCED, {"diagnosis": OPEN} | TOTAL),
    ("hopeless", None, {"diagnosis": OPEN, "f_2": 0.51}),
    ("few", None, {"diagnosis": OPEN, "facts": {"groups": 19}}),
    ("default", TIS, *({"share": ALIKE, **more} for more in ({}, {"errors": -9.0}, {"over": WON}))),
    ("default", TIS, *({"facts": one} for one in ({"groups": 20}, {"sequences": 50}, {"tokens": 1000}))),
    ("default", TIS, {"facts": {"sequences": 320, "columns": BARE}}, {"diagnosis": None}),
    ("default", TIS, {"over": WON}, {"over": above(TOKEN, NONE, 0.05, 0.1)}),
    ("default", TIS, {"k3": 1.1e-6}, {"k3": 1.01}, {"f_2": 0.5}, {"errors": 9.0}, {"ess_tokens": 0.01}),
    ("default", TIS, {"share": (0.0, NOISE)}, {"share": ALIKE, "errors": VISIBLE + A_BIT}, {"share": APART}),
    ("default", FORCED, TOTAL, TOTAL | {"share": ALIKE}),
]
CASES = [(rule, method, change) for rule, method, *changes in ROWS for change in changes]


@pytest.mark.parametrize(("rule", "method", "change"), CASES, ids=str)
def test_the_first_rule_that_holds_decides(rule, method, change):
    longest = Number(value=42.0, interval=(23.0, 181.0), unit="tokens")
    measured = given(**change).model_copy(update={"lengths": Lengths(longest=longest, curve=[])})
    found = recommend(measured)

    assert (found.rule, found.method, (found.decision, found.label)) == (rule, method, RULED[rule])
    assert found.longest_response == longest
    assert found.fired[0].rule == rule
    assert [one.level for one in found.fired].count("decision") == 1
    assert found.sentence == next(one.sentence for one in RULES if one.name == rule)


def test_a_method_for_a_small_mismatch_comes_with_its_reason():
    said = {}
    for verdict in (HEALTHY, FINE):
        facts = answered(advised(given(diagnosis=verdict, share=APART, **LONG))).facts
        said[verdict.verdict] = next(one.sentence for one in facts if one.label == "What to do")
    reason = next(rule.sentence for rule in RULES if rule.name == "adds up")
    assert [one.startswith("Token TIS at 2.0: ESS ") for one in said.values()] == [True, True]
    assert [verdict for verdict, one in said.items() if reason in one] == ["healthy"]


def test_every_rule_every_decision_and_every_label_has_a_row():
    decisions, labels = zip(*RULED.values(), strict=True)
    assert set(RULED) == {rule for rule, *_ in ROWS} == {rule.name for rule in RULES}
    assert (set(decisions), {*labels} - {None}) == (set(get_args(Decision)), set(get_args(Label)))
    names = [
        *(rule.name for rule in (*RULES, *ALERTS)),
        *(level.name for one in METRICS.values() for level in one.levels),
    ]
    assert len(set(names)) == len(names)
    assert [rule.name for rule in (*RULES, *ALERTS) if not rule.source] == ["unknown"]
    assert RULES[-1].name == "default"


@pytest.mark.parametrize(("many", "rule"), [(4, "few"), (5, "healthy")])
def test_that_a_mismatch_is_small_is_said_of_few_prompts(many, rule):
    small = given(diagnosis=HEALTHY, facts={"groups": many}, f_2=1e-3)
    k3 = Number(value=5e-4, interval=(1e-4, 1e-3))
    assert recommend(with_numbers(small, "dump", small.whole | {"k3": k3})).rule == rule


@pytest.mark.parametrize("where", ["", "engine = 3"])
def test_a_bug_of_one_group_comes_with_the_sequences_to_leave_out(where):
    cause = Cause(id="off_by_one", statement="Shifted.", statistic="counted", where=where)
    found = recommend(given(diagnosis=BUG.model_copy(update={"causes": [cause]})))
    said = "Until then, leave out the sequences with engine = 3."
    assert found.sentence == RULES[0].sentence + (f" {said}" if where else "")


# ---------------------------------------------------------------- what it says


@pytest.mark.parametrize(
    ("change", "one", "runner_up"),
    [({}, DEFAULT, ICEPOP), ({"prefix": "total."}, DEFAULT, ICEPOP)],
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


@pytest.mark.parametrize(
    ("change", "needless"),
    [
        *(({"diagnosis": HEALTHY}, True), ({"k3": 9e-7}, True), ({"diagnosis": BUG}, False)),
        *(({"facts": {"groups": 3}}, False), ({"k3": None}, False), ({"f_2": 0.6}, False)),
    ],
)
def test_without_a_method_there_are_reasons_and_the_default_beside_it_if_none_is_needed(change, needless):
    found = recommend(given(**change))

    assert (found.title, found.method, found.threshold, found.settings) == (None, None, None, {})
    assert found.runner_up is None
    assert list(found.numbers) == ([NOTHING.title, DEFAULT.title] if needless else [])
    assert bool(found.reasons) is bool(found.unknown) is needless
    if not needless:
        assert (found.label, found.longest_response) == (None, None)
        assert advised(given(**change), "verl").recommendation.config is None


def ranked(**change):
    """Make a recommendation with the errors of its candidates, in their order: 1.0, 1.05, …"""
    summary = given(**change)
    for at, one in enumerate(CANDIDATES):
        summary.candidates[one.name]["error"] = Number(value=1 + at / 20)
    return recommend(summary)


@pytest.mark.parametrize("change", [{}, {"diagnosis": HEALTHY}])
def test_the_candidates_are_ranked_by_their_estimated_error(change):
    found = ranked(over=above(ICE, TOKEN, 0.01, 0.03) | above(ICE, NONE, 0.0, 0.01), **change)
    chosen = NOTHING if change else DEFAULT
    assert [one.title for one in found.ranking] == [one.title for one in CANDIDATES]
    assert [one.score for one in found.ranking] == pytest.approx([100, 100 / 1.05, 100 / 1.1])
    assert [one.title for one in found.ranking if one.behind is None] == [chosen.title]
    assert found.ranking[2].behind.interval == ((0.0, 0.01) if change else (0.01, 0.03))


def test_the_table_of_the_ranking_says_why_the_recommended_one_may_not_be_first():
    tied = above(NONE, TOKEN, -0.01, 0.01) | above(ICE, TOKEN, -0.01, 0.03)
    table = ranking(ranked(over=tied))
    healthy = ranking(ranked(diagnosis=HEALTHY))
    assert [row[0] for row in table.rows] == [one.title for one in CANDIDATES]
    assert [row[-1] for row in table.rows] == ["toss-up", "–", "toss-up"]
    assert (table.rows[1][2], table.rows[0][1]) == ("recommended", "100")
    assert (table.notes, healthy.notes) == ((TIED,), ())
    assert not ranking(recommend(given())).rows
    behind = ranked(over=above(TOKEN, NONE, 0.01, 0.03))
    assert ranking(behind).notes == certainty(behind)[:1]


@pytest.mark.parametrize("decision", [BUG, FINE])
def test_without_errors_nothing_is_ranked_and_no_toss_up_claimed(decision):
    found = recommend(given(diagnosis=decision))
    assert found.ranking == []
    assert tie(found) == (["The runner-up is token IcePop 0.5–5.0."] if decision is FINE else [])


TIE = "A toss-up with {}, whose estimated error is "
TIES = [
    # interval of the runner-up's error above the chosen one's: whether it is a toss-up, and the sentence
    ((-0.01, 0.02), True, TIE + "within 2%: so the simpler one."),
    ((0.001, 0.002), False, "The estimated error of {} is 0.15% [0.10%, 0.20%] higher."),
    ((-0.01, 0.05), True, TIE + "2% [-1%, 5%] higher: so the simpler one."),
    ((-0.05, 0.01), True, TIE + "2% [-1%, 5%] lower: so the simpler one."),
    ((0.03, 0.05), False, "The estimated error of {} is 4% [3%, 5%] higher."),
    ((-0.05, -0.03), False, ""),  # which is said before
    ((-0.002, -0.001), False, ""),
]


@pytest.mark.parametrize(("ends", "toss_up", "said"), TIES, ids=str)
def test_a_runner_up_is_a_toss_up_only_where_the_interval_includes_0(ends, toss_up, said):
    found = ranked(over={(ICE, TOKEN): ends})
    (other,) = (one for one in found.ranking if one.title == ICEPOP.title)
    assert (found.runner_up, other.tie) == (other.title, toss_up)
    assert [line.replace(".0%", "%") for line in tie(found)] == ([said.format(other.title)] if said else [])
    none = ranked(diagnosis=HEALTHY, over=above(TOKEN, NONE, -0.001, 0.001))  # compared with the default
    assert tie(none) == [TIES[0][2].format(DEFAULT.title)]


SURE = [
    # rule, what makes it hold, (candidate, interval of its error above the chosen one's), the first sentence
    (
        "default",
        {},
        [(NONE, (-0.0435, -0.0161))],
        "Without a correction the estimated error is 3.0% [1.6%, 4.3%] lower; token TIS at 2.0 is advised "
        "all the same, because a dump of this size hardly shows bias.",
    ),
    (
        "default",
        {},
        [(NONE, (-0.09, -0.07)), (ICE, (-0.002, -0.001))],
        "Estimated errors that are measurably lower: no correction (8.0% [7.0%, 9.0%]), token IcePop 0.5–5.0 "
        "(0.15% [0.10%, 0.20%]); token TIS at 2.0 is advised all the same, because a dump of this size "
        "hardly shows bias.",
    ),
    (
        "healthy",
        {"diagnosis": HEALTHY},
        [(TOKEN, (-0.002, -0.001))],
        "Token TIS at 2.0 has a 0.15% [0.10%, 0.20%] lower estimated error; no correction is advised all the "
        "same, because a usual token differs as little as rounding makes it.",
    ),
    ("default", {}, [(NONE, (-0.02, 0.001))], LABELS["default"]),
    ("better", WELL | {"over": WON}, [], LABELS["measured"]),
    ("healthy", {"diagnosis": HEALTHY}, [(TOKEN, (0.001, 0.02))], LABELS[ALIGNED]),
    ("default", {}, [], UNRANKED["default"]),
]
CHOSEN = {"default": TOKEN, "better": TOKEN, "healthy": NONE}


@pytest.mark.parametrize(("rule", "change", "over", "said"), SURE)
def test_how_sure_says_what_is_measured_and_why_the_method_is_advised_all_the_same(rule, change, over, said):
    found = ranked(**{"over": {(one, CHOSEN[rule]): ends for one, ends in over}} | change)
    assert found.rule == rule
    assert certainty(found)[0] == said


def test_every_rule_that_advises_says_why_it_does_so_against_a_lower_error():
    assert [rule.name for rule in RULES if rule.label and not rule.despite] == []
    assert not recommend(given(diagnosis=BUG)).despite


BETTER = re.compile(r"no \w+ has a measurably lower|nothing (was )?measured", re.IGNORECASE)
AHEAD = re.compile(r"lower estimated error;|error is [^;]* lower;|Estimated errors that are measurably lower")


def test_no_sentence_denies_a_lower_error_or_calls_an_interval_beside_0_a_toss_up():
    """Over many summaries: every rule that advises, and intervals of differences on, beside and around 0."""
    random, seen = np.random.default_rng(0), set()
    changes = ({}, {"share": ALIKE}, WELL, WELL | LONG | {"share": APART}, {"k3": 9e-7}, TOTAL)
    for place in range(240):
        middle, half = random.normal(0, 0.02, 6), abs(random.normal(0, 0.015, 6))
        pairs = [(a.name, b.name) for a in CANDIDATES for b in CANDIDATES if a is not b]
        over = {pair: (m - h, m + h) for pair, m, h in zip(pairs, middle, half, strict=True)}
        summary = given(over=over, **changes[place % len(changes)])
        for at, one in enumerate(CANDIDATES):
            summary.candidates[one.name]["error"] = Number(value=1 + at / 20)
        summary = advised(summary)
        found = summary.recommendation
        texts = [*certainty(found), *ranking(found).notes, found.sentence, *found.reasons, found.despite]
        if place < 12:  # all that is drawn
            texts += [terminal(summary, verbose=True), markdown(summary), html(summary)]
        text = " ".join(" ".join(one.split()) for one in texts)
        ahead = [one.title for one in found.ranking if one.behind and one.behind.interval[1] < 0]
        beside = [one.title for one in found.ranking if one.behind and not one.tie]
        assert not (ahead and BETTER.search(text)), text
        assert bool(AHEAD.search(text)) is bool(ahead), text
        assert not [title for title in beside if f"toss-up with {title}" in text.lower()], text
        rows = {row[0]: row[-1] for row in ranking(found).rows}
        assert [title for title, word in rows.items() if word == "toss-up" and title in beside] == []
        seen |= {(found.rule, bool(ahead))}
    assert {rule for rule, _ in seen} == {"default", "healthy", "better", "adds up", "aligned"}
    assert len({one for one in seen if one[1]}) == 5


MEASURED = "Mismatch: K3 = 0.0050 nats; 0.50% of the tokens differ by more than 2×."
SEEN = "visible in the advantages: cov(A, min(r, 2)) is "
KINDS = "Dependence on the token: 25% [20%, 30%] of the variance of r is common to tokens of one kind; "
REASONS = [
    ({}, []),
    ({"errors": VISIBLE + 0.1}, [f"Staleness {SEEN}3.1 standard errors above 0."]),
    ({"errors": VISIBLE - 0.1}, [f"Staleness not {SEEN}2.9 standard errors above 0."]),
    ({"errors": -VISIBLE - 0.5}, [f"Staleness not {SEEN}3.5 standard errors below 0."]),
    ({"share": (0.2, 0.3)}, [KINDS]),
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
WIDTH = "How wide the intervals are where a prompt was sampled more than once: needs group_id."
UNREPEATED = "too few tokens repeat among a prompt's responses."


@pytest.mark.parametrize(
    ("columns", "change", "said"),
    [
        ((), {}, [GRADIENTS, STALENESS, DEPENDENCE + "needs token_ids."]),
        (("advantages",), {"errors": 1.0}, [GRADIENTS, DEPENDENCE + "needs token_ids."]),
        (("token_ids",), {"share": APART}, [GRADIENTS, STALENESS]),
        (("token_ids",), {}, [GRADIENTS, STALENESS, DEPENDENCE + UNREPEATED]),
        (("advantages", "token_ids"), {"errors": 1.0, "share": APART}, [GRADIENTS]),
        (("-group_id",), {}, [GRADIENTS, STALENESS, DEPENDENCE + "needs token_ids and group_id.", WIDTH]),
    ],
)
def test_what_the_dump_cannot_say_names_the_column_that_would(columns, change, said):
    known = BARE if "-group_id" in columns else GROUPED
    facts = {"columns": {**known, **{name: name for name in columns if name[0] != "-"}}}
    assert recommend(given(facts=facts, **change)).unknown == said


SAW = {"k3": 5e-3, "f_2": 5e-3}
SEEN_OF = (
    *(f"systematic share of r, {end} end" for end in ("lower", "upper")),
    *("systematic KL of a response, nats", "staleness, standard errors"),
)


@pytest.mark.parametrize(
    ("change", "saw"),
    [
        ({"diagnosis": BUG}, {"mean_ratio": 1.0, "k1": 0.005, "k3": 5e-3}),
        ({"facts": {"groups": 3}}, {"groups": 3, "sequences": 5120, "tokens": 2412345}),
        ({"k3": 9e-7}, {"k3": 9e-7}),
        ({"f_2": 0.6}, {"f_2": 0.6, "k3": 5e-3}),
        ({"prefix": "total.", "f_2": 0.6}, {"total.f_2": 0.6, "total.k3": 5e-3}),
        ({"k3": None}, {}),
        ({}, SAW | dict.fromkeys(SEEN_OF)),
        ({"share": (0.0, 0.1), "errors": 2.0}, SAW | dict(zip(SEEN_OF, (0.0, 0.1, 0.0, 2.0), strict=True))),
        ({"share": (0.2, 0.4)}, SAW | dict(zip(SEEN_OF, (0.2, 0.4, 471.2 * 5e-3 * 0.2, None), strict=True))),
    ],
)
def test_a_rule_prints_what_it_saw_under_its_name(change, saw):
    found = recommend(given(**change)).fired[0].saw
    assert found == pytest.approx(saw)


# ---------------------------------------------------------------- trainers


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("change", [{}, {"prefix": "total."}], ids=str)
def test_a_trainer_is_recommended_what_it_can_say(trainer, change):
    """Where it cannot say even the default, the configuration is a comment that says so."""
    found = advised(given(**change), trainer).recommendation
    policy = "current" if "prefix" in change else "old"

    def can(one):
        return expressible(one.preset_name(policy), one.changes(policy), trainer)

    assert (found.title, found.rule, found.label) == (DEFAULT.title, "default", "default")
    assert found.runner_up == (ICEPOP.title if can(ICEPOP) else None)
    assert found.config.startswith(f"# {trainer} cannot say") is not can(DEFAULT)


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


def test_a_method_of_another_version_has_no_configuration():
    theirs = recommend(given()).model_copy(update={"method": "of_tomorrow"})
    assert (prescribed(theirs, "trl"), expressible("of_tomorrow", {}, "trl")) == (None, False)


# ---------------------------------------------------------------- alerts


GATE = "above the merge gate"
CROSSED = [
    # number, its value beyond the line, the alerts, and a value on the other side
    ("k3", 1.01, ["configuration", GATE], 0.0149),
    ("k3", 0.016, [GATE], None),
    ("k3", 1.0, [GATE], None),
    ("mean_ratio", 0.49, ["weights off centre"], 0.51),
    ("mean_ratio", 1.51, ["weights off centre"], 1.49),
    ("ess_tokens", 0.29, ["low ESS"], 0.31),
    ("k1", -0.11, ["large KL"], -0.09),
    ("k1", 0.11, ["large KL"], 0.09),
    ("chi2_token", 1.1, ["large χ²"], 0.99),
    ("prob_diff_mean", 0.011, ["probability difference"], 0.0099),
    ("mult_prob_error", 1.06, ["multiplicative error"], 1.049),
    ("ess_sequences", 0.09, ["product ratios unusable"], 0.11),
]


@pytest.mark.parametrize(("name", "value", "alerts", "fine"), CROSSED)
@pytest.mark.parametrize("prefix", ["", "total."])
def test_each_alert_fires_on_its_side_of_the_line_with_the_number_it_saw(name, value, alerts, fine, prefix):
    fired = recommend(given(prefix=prefix, **{name: value})).fired[1:]
    seen = [(one.rule, one.saw[prefix + name], one.level, bool(one.source)) for one in fired]
    assert seen == [(alert, value, "alert", True) for alert in alerts]
    assert fine is None or len(recommend(given(prefix=prefix, **{name: fine})).fired) == 1


def test_alerts_stand_beside_every_decision_and_a_heavy_tail_is_one_by_the_note_of_its_mean():
    for change in ({"diagnosis": BUG}, {"facts": {"groups": 3}}, {"k3": 9e-7}, {"share": ALIKE}, {}):
        assert [one.rule for one in recommend(given(chi2_token=1.1, **change)).fired[1:]] == ["large χ²"]
    (alert,) = recommend(given(ess_tokens=0.95, note="unreliable: k̂ = 0.9 is above 0.7")).fired[1:]
    assert (alert.rule, list(alert.saw)) == ("heavy tail", ["khat_tokens"])


def test_no_rule_holds_because_a_number_is_unknown():
    for empty in (without(given(), *PLAIN), make_summary(metrics={}, by={}, diagnosis=FINE)):
        assert [one.rule for one in recommend(empty).fired] == ["unknown"]
    for name in PLAIN:
        found = recommend(without(given(), name))
        assert len(found.fired) == 1
        assert found.rule == ("unknown" if name == "k3" else "default")
        assert all(value is None or math.isfinite(value) for value in found.fired[0].saw.values())


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

    assert (found.decision, found.rule) == ((METHOD, "default") if stale else (NO, "healthy"))
    assert (found.title, found.label) == ((DEFAULT.title, "default") if stale else (None, ALIGNED))
    wanted = (DEFAULT, ICEPOP, NOTHING) if stale else (NOTHING, DEFAULT)
    assert list(found.numbers) == [one.title for one in wanted]
    assert found.method in (catalogue.load() if stale else (None,))
    assert advised(again) == summary
    growing = [one.saw for one in found.fired if one.rule == "growing"]
    assert bool(growing) is (name == "collapse")
    assert all(saw["last third, median k3"] > 5 * saw["first third, median k3"] > 0 for saw in growing)


def test_two_equal_columns_are_the_same_numbers_twice(tmp_path):
    rows = table("healthy")
    found = advised(analyzed(tmp_path, with_column(rows, "old_log_probs", rows["rollout_log_probs"])))
    assert (found.diagnosis.verdict, found.recommendation.rule) == ("cannot_tell", "identical")
    assert headline(found)[1] == "THE SAME NUMBERS TWICE: was one column copied from the other?"


@pytest.mark.parametrize("column", ["old_log_probs", "rollout_log_probs"])
def test_one_token_that_is_logged_7_nats_too_low_is_no_bug_and_changes_no_decision(tmp_path, column):
    rows = table("healthy")
    values = rows[column].to_pylist()
    values[100][np.flatnonzero(rows["response_mask"][100].as_py())[3]] -= 7
    found = advised(analyzed(tmp_path, with_column(rows, column, [values])))
    assert (found.diagnosis.verdict, found.recommendation.decision) == ("healthy", NO)


@pytest.mark.parametrize("side", ["old", "current"])
def test_what_is_said_of_a_candidate_is_what_an_analysis_of_its_preset_says(side, tmp_path):
    collapse, rows = table("collapse"), CANDIDATES
    presets = [one.preset(side) for one in rows]
    dump = collapse if side == "old" else collapse.drop_columns("old_log_probs")
    found = analyzed(tmp_path, dump, presets=presets)

    assert list(found.candidates) == [one.name for one in rows]
    for one in rows:
        metrics = found.preset(one.preset(side).name)
        said = {key: x for key, x in found.candidates[one.name].items() if not key.startswith("error")}
        assert said == {key: replace(metrics[key], clamped=None) for key in said}
        assert set(said) == {*WEIGHTS, "weight_min"}


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


OPTIONAL = ["advantages", "token_ids", "group_id"]


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        *(("healthy", some) for some in ([], OPTIONAL[:1], OPTIONAL[1:2], OPTIONAL[:2])),
        *(("stale", some) for some in (OPTIONAL[2:], OPTIONAL)),
    ],
)
def test_columns_that_are_missing_turn_no_answer_into_its_opposite(tmp_path, name, lacking):
    found = advised(analyzed(tmp_path, table(name).drop_columns(lacking))).recommendation
    assert found.decision == (NO if name == "healthy" else METHOD)
    assert name != "stale" or found.label != "measured"
    unmade = {"advantages", "group_id"} <= set(lacking)  # else they are given, or made of the rewards
    assert any(one.startswith(STALENESS[:-1]) for one in found.unknown) is unmade
    assert any(DEPENDENCE in one for one in found.unknown) is bool({"token_ids", "group_id"} & {*lacking})


@pytest.mark.parametrize("value", [1e30, 1e300])
@pytest.mark.parametrize(("column", "rule"), [("old_log_probs", "bug"), ("advantages", None)])
def test_a_value_that_no_honest_run_has_leaves_a_recommendation(tmp_path, column, value, rule):
    """Numbers that overflow are unknown; nothing crashes, warns or is printed as NaN."""
    rows = oracles.make_rows(0.1, many=100)
    rows[0][column][0] = value
    found = advised(analyze([oracles.write(rows, tmp_path / "d.parquet")], presets=(), device="cpu"))
    assert rule in (None, found.recommendation.rule)
    assert loads(found.to_json(), "x").recommendation == found.recommendation
    assert "nan" not in " ".join(found.recommendation.reasons)
