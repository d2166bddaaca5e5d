"""The gate: evidence, names, steps, an earlier result, the diagnosis, files and all that is written."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import EXITS, app
from offpol_diag.core import breakdowns
from offpol_diag.errors import UsageError
from offpol_diag.gate import ORDER, Limit, difference, find, judged, outcome, required, rule
from offpol_diag.metrics import METRICS, WATCHED_GAP, WATCHED_PRESET
from offpol_diag.number import Number
from offpol_diag.presets import catalogue
from offpol_diag.report.gate import answer
from offpol_diag.report.gate import junit as render_junit
from offpol_diag.report.page import page as render_html
from offpol_diag.result import CandidateCause, Cause, Diagnosis, GateVerdict, Place, loads
from tests import factory, oracles
from tests.drawn import markdown as render_markdown
from tests.factory import Location, make_summary, number, put
from tests.reading import analyze

HEAVY = "unreliable: k̂ = 0.75 is above 0.70"
MAX, MIN = "max", "min"
PASSED, FAILED, SILENT, UNDECIDED = (True, False), (False, False), (None, False), (True, True)


def between(low, high, value=None, note=None):
    return Number(value=(low + high) / 2 if value is None else value, interval=(low, high), note=note)


def having(name, one):
    """Return a result in which the named number is this one."""
    summary = make_summary()
    preset, _, metric = name.rpartition(".")
    if preset in summary.presets:
        summary.preset(preset)[metric] = one
    else:
        summary.whole[name] = one
    return summary


def judge(summary, name, kind=MAX, value=1.0):
    (verdict,) = judged(summary, required(**{kind: [f"{name}={value!r}"]}))
    return verdict


# ---------------------------------------------------------------- the evidence


EVIDENCE = [
    # number, kind, (passed, open); the limit is 1
    (between(0.2, 0.8), MAX, PASSED),
    (between(1.2, 1.8), MAX, FAILED),
    *((between(0.5, 1.4), kind, UNDECIDED) for kind in (MAX, MIN)),
    (between(0.5, 1.0), MAX, PASSED),  # an end on the bound
    (between(1.0, 1.5), MAX, UNDECIDED),  # one point of it keeps to the bound
    (between(math.nextafter(1, 2), 1.5), MAX, FAILED),
    (between(0.5, math.nextafter(1, 0)), MIN, FAILED),
    (between(0.5, 0.9, value=1.1), MAX, PASSED),  # a value outside of its interval
    (Number(value=0.5), MAX, PASSED),  # no interval: the value
    (Number(value=1.0), MIN, PASSED),
    (Number(value=math.nextafter(1, 2)), MAX, FAILED),
    (Number(log10=400.0), MIN, PASSED),
    (Number(log10=400.0), MAX, FAILED),
    *((between(*ends, note=HEAVY), MAX, SILENT) for ends in ((0.2, 0.8), (1.2, 1.8))),
    (Number(log10=400.0, note=HEAVY), MAX, SILENT),
    (between(0.2, 0.8, note="a few tokens decide it: k̂ = 0.75"), MAX, PASSED),
    (Number(value=math.nan), MAX, SILENT),
    (Number(value=0.5, interval=(math.nan, 0.6)), MAX, SILENT),
    (Number(value=math.nan, interval=(0.1, 0.2)), MAX, SILENT),
    (Number(unknown="missing column old_log_probs"), MAX, SILENT),
]


@pytest.mark.parametrize(("one", "kind", "evidence"), EVIDENCE)
def test_the_interval_decides_and_the_plain_value_only_where_it_is_alone(one, kind, evidence):
    verdict = judge(having("k3", one), "k3", kind)

    assert (verdict.passed, verdict.open) == evidence
    assert ("no interval" in verdict.reason) is (one.interval is None and verdict.passed is not None)
    assert verdict.passed is not None or verdict.reason


@given(*[st.floats(-1e6, 1e6)] * 2, *[st.floats(0, 1e6)] * 2, st.sampled_from([MAX, MIN]))
def test_a_bound_never_fails_while_its_interval_has_a_value_that_keeps_to_it(
    value, limit, below, above, kind
):
    one = between(value - below, value + above, value)
    ruling = rule(one, high=limit) if kind == MAX else rule(one, low=limit)

    keeps = [end <= limit if kind == MAX else end >= limit for end in one.interval]
    assert (ruling.passed, ruling.open) == (any(keeps), any(keeps) and not all(keeps))


@pytest.mark.parametrize("gap", ["", "drift2.", "total."])
def test_a_heavy_tail_leaves_no_doubt_of_what_it_can_only_have_hidden(gap):
    above, below, around = (between(*ends, note=HEAVY) for ends in ((1.2, 1.8), (0.2, 0.8), (0.9, 1.2)))
    hidden = dict.fromkeys(("mean_ratio", "chi2_token", "chi2_sequence"), (above, MAX))
    hidden |= dict.fromkeys(("ess_tokens", "ess_sequences"), (below, MIN))
    for metric, sure in hidden.items():
        cases = [(one, kind) for one in (above, below, around) for kind in (MAX, MIN)]
        for case in [*cases, (Number(log10=400.0, note=HEAVY), MAX), (Number(value=1.5, note=HEAVY), MAX)]:
            verdict = judge(having(f"{gap}{metric}", case[0]), f"{gap}{metric}", case[1])
            assert verdict.passed is (False if case == sure else None)
            assert "k̂ = 0.75" in verdict.reason


@pytest.mark.parametrize(
    ("said", "whole", "code"),
    [
        ([True, True], "passed", 0),
        ([True, False], "failed", 1),
        ([True, None], "could not say", 2),
        ([False, None], "failed", 1),  # a failure is certain whatever the rest would have said
        ([], "could not say", 2),  # nothing judged is not a pass
    ],
)
def test_a_failure_beats_could_not_say_and_that_beats_passed(said, whole, code):
    verdicts = [GateVerdict(name="k3", bound="max", must="≤ 1", limit=1, passed=passed) for passed in said]
    assert (outcome(verdicts), EXITS[outcome(verdicts)]) == (whole, code)


# ---------------------------------------------------------------- names and steps


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("k3", Limit("k3")),
        ("step:total.k3", Limit("total.k3", step=True)),
        ("step:seq_mis.ess_tokens", Limit("ess_tokens", "seq_mis", True)),
        ("token_is@2.5.ess_tokens", Limit("ess_tokens", "token_is@2.5")),
        ("geo_rs@veto.lower=0.1.k3", Limit("k3", "geo_rs@veto.lower=0.1")),
        ("step:rollout_corr/k3_kl", Limit("k3", step=True)),  # names that trainers log
        ("total.kl", Limit("total.k1")),
        ("mismatch_kl/all/mean", Limit("total.k3")),
        ("token_is.rollout_corr/rollout_rs_masked_fraction", Limit("tokens_rejected", "token_is")),
        ("token_is.rollout_corr/kl", Limit("rollout_corr/kl", "token_is")),  # of no preset
    ],
)
def test_a_name_may_be_of_each_step_and_ends_at_its_last_dot_and_a_bound_at_its_last_equals_sign(text, limit):
    (found,) = required(max=[f"{text} = 1e-3 "]).limits
    assert found == replace(limit, high=0.001)


def test_presets_that_are_named_are_computed_and_numbers_by_step_are_asked_for():
    gates = required(max=["step:tv=1", "k3=1"], min=["step:tis@2.50.ess_tokens=0.5"], presets=["seq_mis"])
    presets, steps = gates.to_compute(catalogue.load())
    assert ([one.name for one in presets], steps) == (
        ["token_is@2.5", "seq_mis"],
        ("tv", "token_is@2.5.ess_tokens"),
    )
    for said in ("token_is.ess_tokens", "Token-IS.ess_tokens", "token_tis.ess_tokens"):
        assert judge(make_summary(), said, MIN, 0.0).passed is True


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("k33", "did you mean k3"),
        ("drift2.k33", "drift2.k3"),
        ("tokenis.k3", "did you mean token_is.k3"),
        ("token_is.ess_token", "did you mean token_is.ess_tokens"),
        ("nothing_like_it_at_all_here", 'no number "nothing'),
        ("step:k33", "did you mean k3"),
        ("step:token_is.k3", "steps are in this result"),
        ("step:drift2.k3", "missing column"),
    ],
)
def test_a_name_that_is_no_number_is_answered_and_never_passes(name, said):
    verdict = judge(make_summary(), name, MAX, 1e9)
    assert verdict.passed is None
    assert said in verdict.reason


def test_a_preset_that_could_not_be_computed_says_what_it_needs():
    assert "needs current_log_probs" in find(make_summary(), Limit("ess_tokens", "ppo_is_bypass")).unknown


def along(*values, sequences=64, **more):
    """Return a result with a k3 at each of some steps, with an interval of ±0.001."""
    numbers = [Number(unknown="undefined") if x is None else number(x, 0.001, "nats") for x in values]
    places = [Place(str(at), 100, sequences, {"k3": one}) for at, one in enumerate(numbers)]
    return make_summary(by={"step": Location(title="step", places=places, **more)})


WORSE = along(0.01, 0.05, 0.09, 0.07)


@pytest.mark.parametrize(
    ("summary", "bound", "ruling", "where", "said"),
    [
        (WORSE, (MAX, 0.06), FAILED, "step 2", "2 of 4 steps fail"),
        (WORSE, (MIN, 0.06), FAILED, "step 0", "2 of 4 steps fail"),
        (along(0.0, 0.0205, 0.0195), (MAX, 0.02), UNDECIDED, "step 1", "2 of 3 steps are open"),
        (along(0.01, None, 0.01), (MAX, 0.02), SILENT, "step 1", "1 of 3 steps cannot be judged"),
        (along(0.01, None, 0.09), (MAX, 0.02), FAILED, "step 2", ""),  # it hides no failure
        (along(0.0205, sequences=4), (MAX, 0.02), FAILED, "step 0", "no interval"),
        (along(0.0205, sequences=5), (MAX, 0.02), UNDECIDED, "step 0", ""),
        (along(0.01, 0.01, left_out=7), (MAX, 0.02), SILENT, "", "only 2 of 9 steps"),  # can fail, not pass
        (along(0.01, 0.09, left_out=7), (MAX, 0.02), FAILED, "step 1", ""),
        (along(), (MAX, 1.0), SILENT, "", "no row of this dump has a step"),
        (make_summary(by={}), (MAX, 1.0), SILENT, "", "no row of this dump has a step"),
    ],
)
def test_a_bound_over_steps_is_judged_by_the_worst_which_is_named(summary, bound, ruling, where, said):
    verdict = judge(summary, "step:k3", *bound)
    assert ((verdict.passed, verdict.open), verdict.where) == (ruling, where)
    assert said in verdict.reason


def test_steps_that_are_unreliable_over_the_dump_that_have_no_number_and_that_overflow():
    doubted, nameless, huge = along(0.01, 0.01), along(0.01, 0.01), along(0.01, 0.01)
    doubted.whole["k3"] = Number(value=0.01, note=HEAVY)
    assert (judge(doubted, "step:k3").passed, "k̂ = 0.75" in judge(doubted, "step:k3").reason) == (None, True)

    row = Place(key="∅", tokens=1, sequences=64, numbers={"k3": number(9.0, 0.001)})
    put(nameless, "step", Location("step", [*nameless.at("step"), row]))
    assert judge(nameless, "step:k3", MAX, 0.02).passed is True

    huge.at("step")[1].numbers["k3"] = Number(log10=400.0)  # the largest
    assert (judge(huge, "step:k3").passed, judge(huge, "step:k3").log10) == (False, 400.0)


def test_the_steps_of_a_dump_of_two_policies_are_those_of_the_total():
    summary = along(0.01, 0.09)
    summary.subjects["dump"] |= {
        "total.k3": number(0.05, 0.001),
        "k3": Number(unknown="missing column old_log_probs"),
    }
    total, first = (judge(summary, f"step:{name}", MAX, 0.02) for name in ("total.k3", "k3"))
    assert (total.passed, total.where, first.passed) == (False, "step 1", None)
    assert "missing column old_log_probs" in first.reason


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Make three steps of twelve sequences, three policies, advantages."""
    rows = oracles.make_rows(0.2, seed=5, many=36)
    for at, row in enumerate(rows):
        row |= {"step": at // 12, "group_id": f"{at // 12}-{at // 2}"}
    return oracles.write(rows, tmp_path_factory.mktemp("steps") / "dump.parquet")


def test_any_sum_is_had_by_step_as_if_the_step_were_the_dump_and_changes_no_other_number(dump, tmp_path):
    rows = catalogue.load()
    normal = next(one for one in rows.values() if one.weight and one.weight.normalize)
    presets = (*rows.resolve("token_is,seq_mis"), normal)
    names = {"drift2.k3", "f_1_1", "token_is.ess_tokens", "seq_mis.tokens_rejected", "seq_mis.pg_loss"}
    names |= {f"{normal.name}.weight_mean"}
    nowhere = ("khat_tokens", "ess_sequences", "token_is.weight_max", "no", "token_is.no", "nobody.k3")
    found = analyze([dump], presets=presets, by_step=(*names, *nowhere), threads=1)
    plain, whole = analyze([dump], presets=presets, threads=1), pq.read_table(dump)

    assert (found.whole, found.presets) == (plain.whole, plain.presets)
    own = {one: found.at("step", f"preset/{one}") for one in found.presets}
    for i, place in enumerate(found.at("step")):
        asked = {f"{one}.{name}": x for one, places in own.items() for name, x in places[i].numbers.items()}
        asked |= {name: one for name, one in place.numbers.items() if name in names}
        part = tmp_path / f"{place.key}.parquet"
        pq.write_table(whole.filter(pc.equal(whole["step"], int(place.key))), part)
        alone = analyze([str(part)], presets=presets, threads=1)
        flat = alone.whole | {
            f"{row}.{name}": one for row in alone.presets for name, one in alone.preset(row).items()
        }
        assert set(asked) == names
        for key in names:
            assert asked[key].value == pytest.approx(flat[key].value, rel=1e-9)


def test_asking_by_step_lists_every_step(dump, monkeypatch):
    monkeypatch.setattr(breakdowns, "MOST_LISTED", 2)
    for asked, left_out in (((), 1), (("k3",), 0)):
        assert analyze([dump], by_step=asked, threads=1).axes["step"].left_out == left_out


# ---------------------------------------------------------------- against an earlier result


def compared(name, now, base, allowed=0.0):
    """Compare one number of two results."""
    preset = name.rpartition(".")[0]
    asked = required(baseline="b.json", tolerance=allowed, presets=[preset] if preset == "seq_mis" else [])
    found = judged(having(name, now), asked, having(name, base))
    return next(one for one in found if one.name == name)


@pytest.mark.parametrize(
    ("name", "base", "now", "passed"),
    [
        ("k3", 0.1, 0.2, False),
        ("k3", 0.2, 0.1, True),
        ("ess_tokens", 0.9, 0.5, False),
        ("mean_ratio", 1.01, 1.2, False),
        ("mean_ratio", 1.01, 0.8, False),
        ("mean_ratio", 0.8, 1.1, True),  # on the other side, and nearer
        ("seq_mis.ess_tokens", 0.9, 0.5, False),
        ("seq_mis.tokens_rejected", 0.5, 0.1, True),
        ("drift2.ess_tokens", 0.9, 0.5, False),
    ],
)
def test_each_metric_knows_which_way_is_worse(name, base, now, passed):
    assert compared(name, number(now, 0.001), number(base, 0.001)).passed is passed


@pytest.mark.parametrize(
    ("now", "base", "allowed", "ruling"),
    [
        (number(1.2, 0.01), number(1.0, 0.01), 0.1, FAILED),
        (number(1.2, 0.2), number(1.0, 0.01), 0.1, UNDECIDED),  # wide: no evidence
        (number(1.2, 0.01), number(1.0, 0.2), 0.1, UNDECIDED),  # the baseline's interval counts as much
        (number(1.05, 0.01), number(1.0, 0.01), 0.1, PASSED),
        (number(1.2), number(1.0, 0.001), 0.1, FAILED),  # no interval: the values
        (number(1.5), number(1.0), 0.5, PASSED),  # on what is allowed
        (number(0.0), number(0.0), 0.1, PASSED),
        (number(0.02, 0.001), number(0.0, 0.0), 0.1, FAILED),  # a tenth of nothing is nothing
    ],
)
def test_a_comparison_fails_only_where_the_whole_interval_of_the_difference_is_beyond(
    now, base, allowed, ruling
):
    verdict = compared("k3", now, base, allowed)
    assert (verdict.passed, verdict.open) == ruling


def test_a_verdict_says_what_the_value_was_compared_with_and_by_how_much_it_is_worse():
    verdict = compared("k3", number(1.5, 0.03), number(1.0, 0.04), 0.1)
    assert (verdict.must, verdict.bound, verdict.limit) == ("no worse than 1 by more than 10%", "max", 1.1)
    assert verdict.reason == "worse by 0.50 [0.45, 0.55], 0.1 allowed; the whole 95% interval lies beyond it"
    assert compared("ess_tokens", *[number(1.0, 0.001)] * 2, 0.1).limit == pytest.approx(0.9)
    away = compared("mean_ratio", number(1.05, 0.001), number(1.02, 0.001), 0.1)
    assert (away.passed, away.limit) == (
        False,
        pytest.approx(0.022),
    )  # a tenth of the distance, not of the value
    across = compared("mean_ratio", between(0.99, 1.012, 1.001), number(1.0, 0.002))
    assert (across.passed, across.open) == UNDECIDED


def test_each_end_of_a_difference_is_made_of_the_ends_that_make_it_likely():
    one, other = between(4.0, 8.0, 5.0), between(-3.0, 3.0, 1.0)
    assert difference(one, other).interval == pytest.approx((4 - math.hypot(1, 2), 4 + math.hypot(3, 4)))


def test_of_two_runs_that_are_alike_one_in_forty_is_called_worse():
    """16,000 pairs of skewed numbers (e^z), each with its own interval: 2.5%, within 0.5 points."""
    drawn, reach = np.random.default_rng(11).normal(0, 0.3, (2, 16_000)), 1.96 * 0.3
    now, base = ([between(*map(math.exp, (z - reach, z + reach, z))) for z in row] for row in drawn)
    worse = [difference(*pair).interval[0] > 0 for pair in zip(now, base, strict=True)]
    assert np.mean(worse) == pytest.approx(0.025, abs=0.005)


DOUBTED, SOUND, UNKNOWN = between(0.5, 1.5, note=HEAVY), number(1.0, 0.001), Number(unknown="missing column")


@pytest.mark.parametrize(
    ("name", "now", "base", "passed", "said"),
    [
        ("k3", UNKNOWN, SOUND, None, "missing column"),
        ("k3", DOUBTED, SOUND, None, "unreliable: k̂"),
        ("k3", Number(log10=400.0), SOUND, None, "overflows"),
        ("k3", Number(value=math.nan), SOUND, None, "not a number"),
        ("mean_ratio", replace(number(19.0, 5.0), note=HEAVY), SOUND, False, "heavy tail hides"),
        (
            "mean_ratio",
            replace(number(0.5, 0.1), note=HEAVY),
            SOUND,
            None,
            "k̂",
        ),  # with what is hidden it may be 1
        ("ess_tokens", replace(number(0.1, 0.05), note=HEAVY), number(0.9, 0.001), False, "heavy tail hides"),
        ("ess_tokens", replace(number(0.9, 0.05), note=HEAVY), number(0.1, 0.001), None, "k̂"),
    ],
)
def test_what_is_not_known_now_is_never_called_no_worse(name, now, base, passed, said):
    verdict = compared(name, now, base, 0.1)
    assert verdict.passed is passed
    assert said in verdict.reason


def test_numbers_watched_are_those_reliable_in_the_baseline_and_those_of_presets_that_are_named():
    now, base = make_summary(), having("ess_tokens", DOUBTED)
    now.whole["pearson"] = DOUBTED  # got worse since: that is told
    found = {one.name: one.passed for one in judged(now, required(baseline="b.json"), base)}
    assert "ess_tokens" not in found
    assert (found["pearson"], found["k3"], found["diagnosis"]) == (None, True, True)
    assert not any(name.startswith(("drift2.", "total.", "seq_mis.")) for name in found)

    del base.presets["seq_mis"], base.subjects["preset/seq_mis"]
    base.presets["geo_rs"].method = "weight sum truncate ≤ 3"
    asked = required(baseline="b.json", presets=["seq_mis", "token_tis", "geo_rs"])
    both = {one.name: one for one in judged(now, asked, base)}
    assert both["token_is.ess_tokens"].passed is True
    assert "the baseline: no number" in both["seq_mis.k3"].reason
    assert "another method in the baseline: weight sum truncate ≤ 3" in both["geo_rs.k3"].reason

    own = {name: one for name, one in base.whole.items() if "." not in name}
    base.subjects["dump"] = dict.fromkeys(own, UNKNOWN) | {f"total.{name}": one for name, one in own.items()}
    names = [one.name for one in judged(base, required(baseline="b.json"), base)]  # of two policies
    assert ("total.k3" in names, "k3" in names) == (True, False)


def test_every_metric_of_a_result_has_its_way():
    found = analyze(["sample_data/stale.parquet"], presets=["token_is"], threads=1)
    of_pairs, of_presets = {name.rpartition(".")[2] for name in found.whole}, set(found.preset("token_is"))
    assert set(METRICS) > of_pairs > set(WATCHED_GAP)
    assert set(METRICS) == of_pairs | of_presets | {"kept_at_lag_0"}  # which a sweep adds
    assert of_presets > set(WATCHED_PRESET)


# ---------------------------------------------------------------- the diagnosis

CAUSE = Cause(
    id="off_by_one", statement="A token late.", statistic="all of 512 sequences", fix="Drop the first."
)
FIT = [
    CandidateCause(id="stale", kind="honest", statement="Old weights."),
    CandidateCause(id="weights_not_synced", kind="bug", statement="Weights that do not arrive."),
]
NOTHING, SEVERAL, A_BUG = "no diagnosis", "one of several causes", "one of several causes, among them a bug"
TRUTH = {  # verdict → (passed, open) where cannot_tell, and where bug fails
    "healthy": [PASSED, PASSED],
    "honest_mismatch": [PASSED, PASSED],
    SEVERAL: [FAILED, UNDECIDED],
    A_BUG: [FAILED, SILENT],
    "cannot_tell": [FAILED, SILENT],
    "bug": [FAILED, FAILED],
    NOTHING: [SILENT, SILENT],
}


def diagnosis(verdict, **dump):
    """Return a result with that diagnosis, or without one."""
    summary = make_summary(diagnosis=None)
    fit = {SEVERAL: FIT[:1], A_BUG: FIT}.get(verdict, [])
    found = (
        Diagnosis(
            verdict="cannot_tell" if fit else verdict,
            headline="What it is.",
            causes=[CAUSE] if verdict == "bug" else [],
            candidates=fit,
            decide="Score it twice." if fit else "",
        )
        if verdict != NOTHING
        else None
    )
    return summary.model_copy(update={"diagnosis": found, "dump": summary.dump.model_copy(update=dump)})


@pytest.mark.parametrize("verdict", TRUTH)
def test_a_diagnosis_fails_what_names_it_or_a_milder_one(verdict):
    for fails, said in zip(("cannot_tell", "bug"), TRUTH[verdict], strict=True):
        (found,) = judged(diagnosis(verdict), required(fail_on=fails))
        assert (found.passed, found.open) == said


@pytest.mark.parametrize(
    ("dump", "few"),
    [
        ({"sequences": 15}, True),
        ({"sequences": 16, "groups": 3, "columns": {"group_id": "uid"}}, True),
        ({"sequences": 16, "groups": 4, "columns": {"group_id": "uid"}}, False),
        ({"sequences": 16, "groups": 1}, False),
    ],
)
def test_a_dump_that_is_too_small_to_show_a_bug_is_not_judged_unless_it_fails(dump, few):
    for verdict in ("healthy", SEVERAL):
        (found,) = judged(diagnosis(verdict, **dump), required(fail_on="bug"))
        assert (found.passed is None) is few is ("needs 16 sequences and 4 prompts" in found.reason)
    assert judged(diagnosis("bug", **dump), required(fail_on="bug"))[0].passed is False


def test_a_diagnosis_may_not_become_worse_than_the_baselines():
    for base in ORDER:
        for now in (*ORDER, NOTHING):
            found = judged(diagnosis(now), required(baseline="b.json"), diagnosis(base))[-1]
            assert found.name == "diagnosis"
            assert found.passed is (None if now == NOTHING else ORDER.index(now) <= ORDER.index(base))
    names = [one.name for one in judged(make_summary(), required(baseline="b.json"), diagnosis(NOTHING))]
    assert "diagnosis" not in names


def test_the_reason_names_the_cause_and_what_to_change_first_or_what_decides():
    bug, unsure, perhaps = (
        judged(diagnosis(one), required(fail_on="bug"))[0].reason for one in ("bug", SEVERAL, A_BUG)
    )
    assert bug == "off_by_one: A token late; fix: Drop the first"
    assert unsure == "which cause it is, this dump cannot tell; stale; to decide, score it twice"
    assert "not all that fits is honest; stale, weights_not_synced; to decide" in perhaps


# ---------------------------------------------------------------- equal to the last bit


def equal(path, differ=0, **more):
    """Write a dump of 128 × 64 tokens in which one bit of so many differs."""
    rollout = -np.random.default_rng(0).random((128, 64))
    train = rollout.copy()
    for i in range(differ):
        train[i, 40 - i] = np.nextafter(train[i, 40 - i], -1)
    columns = {"rollout_log_probs": rollout.tolist(), "group_id": [i // 4 for i in range(128)]}
    return factory.write(path, **columns | {"old_log_probs": train.tolist()} | more)


@pytest.mark.parametrize("differ", [0, 1, 30])
def test_the_share_of_tokens_that_differ_is_an_exact_count_and_one_fails(tmp_path, differ):
    path = equal(tmp_path / "a.parquet", differ, step=[1] * 128)
    for name in ("tokens_differ", "step:tokens_differ"):
        found = offpol_diag.gate(path, max={name: 0}, progress=False)
        (one,) = found.gates
        assert (one.value, one.interval, one.passed) == (differ / 8192, None, differ == 0)


def test_equal_columns_pass_where_equality_is_asked_and_are_no_copies_then(tmp_path):
    path, few = (
        equal(tmp_path / "a.parquet"),
        factory.write(tmp_path / "f.parquet", rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]]),
    )
    assert not offpol_diag.gate(path, fail_on="bug", progress=False).passed, "one may be a copy of the other"
    assert offpol_diag.gate(path, max={"tokens_differ": 0}, fail_on="cannot_tell", progress=False).passed
    assert not offpol_diag.gate(few, max={"tokens_differ": 0}, fail_on="bug", progress=False).passed


# ---------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write two results into a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("now.json", "base.json"):
        Path(name).write_text(make_summary().to_json())
    Path("ci").mkdir()


def run(line, source="now.json", **env):
    return CliRunner().invoke(app, ["gate", *source.split(), *line.split()], env=env)


FILE, AGAINST = "--gates ci/gates.toml ", "--baseline base.json "
K3 = "[max]\nk3 = "


@pytest.mark.parametrize(
    ("text", "line", "code"),
    [
        (K3 + "1", FILE, 0),
        (K3 + "1e-9", FILE, 1),
        ("[max]\nk33 = 1", FILE, 2),
        ('[max]\n"step:k3" = 1\n[min]\n"token_is.ess_tokens" = 0', FILE + "--max k3=1", 0),
        (K3 + "1e-9", FILE + "--max k3=1", 0),  # the option goes before
        (K3 + "1", FILE + "--max f_2=1e-9", 1),  # options and file together
        ("baseline = '../base.json'\ntolerance = 0.05", FILE, 0),  # beside the file
        ("baseline = 'gone.json'", FILE, 2),
        ("baseline = 'gone.json'", FILE + AGAINST, 0),
        ("", AGAINST + "--presets nobody", 2),
        ("", AGAINST + "--presets token_is --tolerance 0.2", 0),
        ("", "--fail-on bug --max nobody=1", 2),
        ("", "--fail-on bug --max nobody=1 --max k3=0", 1),
    ],
)
def test_options_and_a_file_end_in_an_exit_code(folder, text, line, code):
    Path("ci/gates.toml").write_text(text)
    ran = run(line)
    assert ran.exit_code == code, ran.output


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", "", "no bound is given"),
        ("", FILE, "no bound is given"),
        ("", "--gates gone.toml", "gone.toml: no gate file"),
        ("k3 =", FILE, "ci/gates.toml: no gate file"),
        ("mx = 1", FILE, "ci/gates.toml: mx: Extra inputs are not permitted"),
        ("[max]\nk3 = 'low'", FILE, "ci/gates.toml: max.k3: "),
        ("[max]\nk3 = nan", FILE, "ci/gates.toml: max.k3: "),
        ("fail_on = 'fire'", FILE, "'bug' or 'cannot_tell'"),
        ("", "--fail-on fire", "'fire' is not one of"),
        ("", "--max k3", "--max: "),
        ("", "--max k3=x", "--max.k3: "),
        ("", AGAINST + "--tolerance much", "invalid value for '--tolerance'"),
        ("", AGAINST + "--tolerance -1", "--tolerance: "),
        ("", "--max k3=1 --json now.json", "is what is read"),
        ("", "--max k3=1 --junit no/where.xml", "does not exist"),
        ("", "--max k3=1 --junit - --md -", "stdout"),
        ("[min]\n'token_iss.ess_tokens' = 0", FILE, 'unknown preset "token_iss"'),
        ("", "--baseline ci/gates.toml", "ci/gates.toml: this is not a result"),
    ],
)
def test_what_cannot_be_meant_is_one_error_with_a_hint_and_writes_nothing(folder, text, line, said):
    Path("ci/gates.toml").write_text(text)
    equal(Path("dump.parquet"))
    ran = run(line, source="dump.parquet" if "token_iss" in text else "now.json")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert said in ran.stderr.replace("\n", " ")
    assert (ran.stderr.count("error: "), ran.stderr.count("hint: ")) == (1, 1)


def test_the_python_function_takes_a_report_and_refuses_what_the_command_does(folder):
    report = having("k3", number(9e-3, 1e-4))
    assert offpol_diag.gate(report, baseline="base.json", tolerance=10).passed
    found = offpol_diag.gate(report, baseline="base.json", presets="token_is", max={"k3": 1})
    assert (found.passed, any(one.name == "token_is.ess_tokens" for one in found.gates)) == (False, True)
    for how in (
        {"max": {"k3": "x"}},
        {"fail_on": "bugs"},
        {"tolerance": "much", "baseline": "base.json"},
        {},
    ):
        with pytest.raises(UsageError):
            offpol_diag.gate(report, **how)


# ---------------------------------------------------------------- what is written


def verdict(**changes):
    usual = {"name": "k3", "bound": "max", "must": "≤ 0.002", "limit": 0.002, "value": 0.001, "passed": True}
    return GateVerdict(**usual | changes)


BAD = verdict(value=0.5, passed=False, reason="no interval")
ABSENT = verdict(name="drift2.k3", value=None, passed=None, reason="missing column current_log_probs")
OPEN = verdict(name="f_2", value=0.003, interval=(0.001, 0.005), open=True, reason="values on both sides")
FINE = verdict(name="pearson")
SHORT = verdict(
    name="ess_tokens", must="≥ 99%", unit="fraction", value=0.96, interval=(0.9, 0.98), passed=False
)


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([FINE], "Passed: 1 bound: 1 passed"),
        ([FINE, OPEN, FINE], "Passed: 3 bounds: 1 open, 2 passed"),
        ([SHORT], "Failed: ess_tokens is 96% [90%, 98%], must be ≥ 99%"),
        (
            [FINE, ABSENT, SHORT],
            "Failed: ess_tokens is 96% [90%, 98%], must be ≥ 99% (1 failed, 1 could not say, 1 passed)",
        ),
        ([ABSENT], "Could not say: drift2.k3 is not known, must be ≤ 0.002"),
        ([verdict(passed=False, where="step 7")], "Failed: k3 is 0.0010 at step 7, must be ≤ 0.002"),
    ],
)
def test_the_headline_is_true_and_says_what_failed(verdicts, said):
    assert answer(make_summary(gates=verdicts)).headline == said


def test_verdicts_other_than_passed_are_explained_failures_first_in_every_form():
    summary = make_summary(gates=[FINE, OPEN, ABSENT, BAD])
    found = answer(summary)
    assert [fact.label for fact in found.facts] == ["Failed", "Could not say", "Open", "Bug?"]
    assert found.facts[0].sentence == "k3 is 0.50, must be ≤ 0.002; no interval"
    assert [row[0] for row in found.tables[0].rows] == ["✓ passed", "~ open", "? could not say", "✗ failed"]
    for drawn in (render_markdown(summary), render_html(summary)):
        assert "missing column current_log_probs" in drawn


def test_the_markdown_of_many_bounds_has_60_lines_with_the_failures_first_and_the_page_has_all():
    many = [verdict(name=f"n{at}") for at in range(60)] + [BAD] * 15 + [ABSENT] * 15 + [OPEN] * 9
    summary = make_summary(gates=many)
    text = render_markdown(summary)
    assert text.count("\n") <= 60
    assert text.count("| ✗ failed |") == 15
    assert "83 more bounds: --json and --junit have all." in text
    assert "n59" in render_html(summary)
    assert len(next(iter(JUnitXml.fromstring(render_junit(summary).encode())))) == len(many)


def test_junit_lists_every_bound_as_a_test_and_holds_whatever_a_name_says():
    nasty = 'a < b && "c" ]]> \x00\x1b[31m \ud7ff\ufffe é\n<!-- -->'
    xml = render_junit(make_summary(gates=[replace_reason(BAD, nasty), ABSENT, OPEN, FINE]))
    (suite,) = JUnitXml.fromstring(xml.encode())
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 1, 1, 0)
    assert suite.time == make_summary().run.seconds["total"]
    assert [(case.name.split()[0], *map(type, case.result)) for case in suite] == [
        ("k3", Failure),
        ("drift2.k3", Error),
        ("f_2",),
        ("pearson",),
    ]
    message = next(iter(suite)).result[0].message
    assert message.startswith("k3 is 0.50, must be ≤ 0.002; a < b")
    assert ElementTree.fromstring(xml.encode()).tag == "testsuites"


def replace_reason(one, reason):
    return one.model_copy(update={"reason": reason})


def test_all_forms_are_written_drawn_again_and_added_to_the_job_summary(folder):
    Path("summary.md").write_text("before\n")
    to = "--max k3=1e-9 --max drift2.k3=1 --json o.json -o g.html --md o.md --junit o.xml"
    ran = run(to, GITHUB_STEP_SUMMARY="summary.md", COLUMNS="80", NO_COLOR="1")
    assert ran.exit_code == 1
    assert max(map(len, ran.stdout.splitlines())) <= 80
    first, second = loads(Path("o.json").read_text(), "o.json").gates
    assert [(one.name, one.passed) for one in (first, second)] == [("k3", False), ("drift2.k3", None)]
    assert CliRunner().invoke(app, ["report", "o.json", "-o", "again.html"]).exit_code == 0
    assert "drift2.k3" in Path("again.html").read_text()
    text = Path("o.md").read_text(encoding="utf-8")
    assert text.startswith("# offpol-diag gate\n\n❌ **Failed: k3 is ")
    (suite,) = JUnitXml.fromfile("o.xml")
    assert (suite.failures, suite.errors) == (1, 1)
    assert Path("summary.md").read_text(encoding="utf-8") == f"before\n\n{text}"
    ran = run("--max k3=1", GITHUB_STEP_SUMMARY="no/such/place.md")  # which changes no verdict
    assert ran.exit_code == 0
