"""The gate: evidence, names, training steps, comparison with an earlier result, and the diagnosis."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offpol_diag.cli import EXITS
from offpol_diag.cli import SAMPLE as DUMP
from offpol_diag.core import breakdowns
from offpol_diag.dump.batch import joined
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import UsageError
from offpol_diag.gate import ORDER, Lookup, Name, difference, name, outcome, required, rule, tolerance
from offpol_diag.gate import judged as judged_by
from offpol_diag.gate import not_compared as remark
from offpol_diag.metrics import METRICS, WATCHED_GAP, WATCHED_PRESET
from offpol_diag.number import Number
from offpol_diag.numerals import distinct_digits
from offpol_diag.presets import catalogue
from offpol_diag.report.gate import title
from offpol_diag.result import CandidateCause, Cause, Diagnosis, GateVerdict, Place
from offpol_diag.trainers.logged import GENERATIONS, LOGS, log_of, steps_of
from offpol_diag.trainers.ours import rows
from tests import oracles
from tests.factory import Location, make_summary, number, put
from tests.factory import presets as made_presets
from tests.reading import analyze
from tests.trainers import BUILT_IN

HEAVY = "unreliable: k̂ = 0.75 is above 0.70"
MAX, MIN = "max", "min"
EXIT = {True: 0, False: 1, None: 2}


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


def judge(summary, *limits):
    """Judge limits: name, kind, value."""
    asked = {kind: [f"{name}={value!r}" for name, of, value in limits if of == kind] for kind in (MAX, MIN)}
    return judged_by(summary, required(**asked))


def compare(now, base, **asked):
    return judged_by(now, required(**{"baseline": "base.json"} | asked), base)


def not_compared(base, **asked):
    return remark(base, required(baseline="base.json", **asked))


def judged(one, kind, name="k3", value=1.0):
    return judge(having(name, one), (name, kind, value))[0]


# ---------------------------------------------------------------- the evidence


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        ([True, True], "passed"),
        ([True, False], "failed"),
        ([True, None], "could not say"),
        ([False, None], "failed"),  # a failure is certain whatever the rest would have said
        ([], "could not say"),  # nothing judged is not a pass
    ],
)
def test_a_failure_beats_could_not_say_and_that_beats_passed(said, whole):
    verdicts = [GateVerdict(name="k3", bound="max", limit=1, value=None, passed=passed) for passed in said]
    assert outcome(verdicts) == whole


@pytest.mark.parametrize("value", [0.1 + 0.2, math.nextafter(1.0, 2), 1e300, -2.5e-300])
def test_two_different_numbers_are_never_written_alike(value):
    assert len(set(distinct_digits(value, math.nextafter(value, math.inf)))) == 2


EVIDENCE = [
    # number, kind, (passed, open); the limit is 1
    (between(0.2, 0.8), MAX, (True, False)),
    (between(1.2, 1.8), MAX, (False, False)),
    (between(0.5, 1.4), MAX, (True, True)),
    (between(0.5, 1.4), MIN, (True, True)),  # the value is below, the evidence is not
    (between(0.6, 1.5), MAX, (True, True)),
    (between(0.6, 1.5), MIN, (True, True)),
    (between(0.5, 1.0), MAX, (True, False)),  # an end on the bound
    (between(1.0, 1.5), MIN, (True, False)),
    (between(1.0, 1.5), MAX, (True, True)),  # one point of it keeps to the bound
    (between(0.5, 1.0), MIN, (True, True)),
    (between(math.nextafter(1, 2), 1.5), MAX, (False, False)),
    (between(0.5, math.nextafter(1, 0)), MIN, (False, False)),
    (between(1.0, 1.0), MAX, (True, False)),  # without width
    (between(2.0, 2.0), MAX, (False, False)),
    (between(0.5, 0.9, value=1.1), MAX, (True, False)),  # a value outside of its interval
    (Number(value=0.5), MAX, (True, False)),  # no interval: the value
    (Number(value=1.5), MAX, (False, False)),
    (Number(value=1.0), MIN, (True, False)),
    (Number(value=math.nextafter(1, 2)), MAX, (False, False)),  # displays as 1
    (Number(log10=0.0), MAX, (True, False)),  # on the bound
    (Number(log10=0.0), MIN, (True, False)),
    (Number(log10=400.0), MIN, (True, False)),
    (between(0.2, 0.8, note=HEAVY), MAX, (None, False)),  # unreliable never passes
    (between(1.2, 1.8, note=HEAVY), MAX, (None, False)),  # nor is it evidence of a failure
    (between(1.2, 1.8, note=HEAVY), MIN, (None, False)),
    (Number(log10=400.0, note=HEAVY), MIN, (None, False)),
    (between(0.2, 0.8, note="a few tokens decide it: k̂ = 0.75"), MAX, (True, False)),
    (Number(value=math.nan), MAX, (None, False)),
    (Number(value=0.5, interval=(math.nan, 0.6)), MAX, (None, False)),
    (Number(value=math.nan, interval=(0.1, 0.2)), MAX, (None, False)),
    (Number(log10=math.nan), MIN, (None, False)),
    (Number(unknown="missing column old_log_probs"), MAX, (None, False)),
    (Number(unknown="overflows float64, and so does its log10"), MIN, (None, False)),
]


@pytest.mark.parametrize(("one", "kind", "evidence"), EVIDENCE)
def test_the_interval_decides_and_the_plain_value_only_where_it_is_alone(one, kind, evidence):
    verdict = judged(one, kind)

    assert (verdict.passed, verdict.open) == evidence
    assert EXITS[outcome([verdict, judged(Number(value=0.0), MAX)])] == EXIT[evidence[0]]


@pytest.mark.parametrize("gap", ["", "drift2.", "total."])
def test_a_heavy_tail_leaves_no_doubt_of_what_it_can_only_have_hidden(gap):
    above, below, around = (between(*ends, note=HEAVY) for ends in ((1.2, 1.8), (0.2, 0.8), (0.9, 1.2)))
    alone = [(Number(log10=400.0, note=HEAVY), MAX), (Number(value=1.5, note=HEAVY), MAX)]
    hidden = dict.fromkeys(("mean_ratio", "chi2_token", "chi2_sequence"), (above, MAX))
    hidden |= dict.fromkeys(("ess_tokens", "ess_sequences"), (below, MIN))
    for metric, sure in hidden.items():
        for case in [*((one, kind) for one in (above, below, around) for kind in (MAX, MIN)), *alone]:
            verdict = judged(*case, f"{gap}{metric}")
            assert verdict.passed is (False if case == sure else None)
            if case == sure:
                assert "k̂ = 0.75" in verdict.reason
                assert verdict.judged_on == "interval"


SIDES = "0.80 ≤ 1; the 95% interval holds values on both sides"
REASONS = [
    (between(1.2, 1.8), "1.5 is not ≤ 1; the whole 95% interval lies beyond it, from 1.2"),
    (between(0.2, 1.4), SIDES),
    (Number(value=0.5), "0.50 ≤ 1; no interval"),
    (Number(value=1.00000001), "1.00000001 is not ≤ 1; no interval"),
    (Number(log10=45.2), "10^45.2 is not ≤ 1; no interval"),
    (between(0.2, 0.8, note=HEAVY), HEAVY),
    (between(0.2, 0.8, note="a few tokens decide it"), "0.50 ≤ 1; a few tokens decide it"),
]


@pytest.mark.parametrize(("one", "said"), REASONS)
def test_the_reason_says_what_decided(one, said):
    verdict = judged(one, MAX)

    assert verdict.reason.startswith(said)
    alone = "" if verdict.passed is None else "value"
    assert verdict.judged_on == ("interval" if one.interval and verdict.passed is not None else alone)


@given(*[st.floats(-1e6, 1e6)] * 2, *[st.floats(0, 1e6)] * 2, st.sampled_from([MAX, MIN]))
def test_a_bound_never_fails_while_its_interval_has_a_value_that_keeps_to_it(
    value, limit, below, above, kind
):
    ruling = rule(between(value - below, value + above, value), kind, limit)

    keeps = [end <= limit if kind == MAX else end >= limit for end in (value - below, value + above)]
    assert ruling.passed is any(keeps)
    assert ruling.open is (any(keeps) and not all(keeps))


# ---------------------------------------------------------------- names and tolerances


@pytest.mark.parametrize(
    ("text", "number", "by_step"),
    [
        ("k3", "k3", False),
        ("step:k3", "k3", True),
        ("step: seq_mis.ess_tokens", "seq_mis.ess_tokens", True),
        # names that trainers log keep their gap, preset and step
        ("kl", "k1", False),
        ("step:rollout_corr/k3_kl", "k3", True),
        ("total.mismatch/k3_kl", "total.k3", False),
        ("drift2.kl", "drift2.k1", False),
        ("token_is.actor/ppo_kl", "token_is.ppo_kl", False),
        ("step:token_is.rollout_is_eff_sample_size", "token_is.ess_tokens", True),
        ("my.tis.tis_seq_clip_high_ratio", "my.tis.truncated_high", False),
        ("drift2.mismatch_kl/all/mean", "drift2.mismatch_kl/all/mean", False),  # it has a gap of its own
    ],
)
def test_a_name_may_be_of_each_step_and_has_a_gap_and_a_preset(text, number, by_step):
    logged = text.rpartition(":")[2].strip()
    said = "" if logged == number else logged

    assert (name(text), name(text).said) == (Name(number, by_step), said)
    (found,) = required(max=[f"{text} = 1e-3 "]).limits
    assert found == (name(text), MAX, 0.001, "--max")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("k33", "did you mean k3"),
        ("icepop.ess_tokens", "analyze the dump with --presets icepop"),
        ("drift2.k33", "drift2.k3"),
        ("tokenis.k3", "did you mean token_is.k3"),
        ("token_is.ess_token", "did you mean ess_tokens"),
        ("ppo_is_bypass.ess_tokens", "needs current_log_probs"),
        # what only a trainer has, or nobody
        ("rollout_rs_masked_fraction", "name one, PRESET.tokens_rejected"),
        ("rollout_corr/k3kl", "did you mean rollout_corr/k3_kl"),
        ("sampling/sampling_logp_difference/max", "did you mean"),
        ("rollout_corr/nothing_like_it_at_all_here", 'no metric "rollout_corr/nothing'),
    ],
)
def test_a_name_that_is_no_number_is_answered_and_never_passes(name, said):
    (verdict,) = judge(make_summary(), (name, MAX, 1e9))

    assert verdict.passed is None
    assert said in verdict.reason


def test_a_preset_is_found_by_its_alias_in_any_spelling_and_only_those_named_are_computed():
    for said in ("token_is.ess_tokens", "Token-IS.ess_tokens", "token_tis.ess_tokens"):
        assert judge(make_summary(), (said, MIN, 0.0))[0].passed is True

    names = ("k3", "drift2.k3", "total.tv", "a.ess_tokens", "b.1.ess_tokens", "a@2.5.ess_tokens")
    assert [Name(one).preset for one in names] == ["", "", "", "a", "b.1", "a@2.5"]


@pytest.mark.parametrize(
    ("text", "number", "stepwise", "by_step"),
    [
        ("token_is@2.5.ess_tokens", "token_is@2.5.ess_tokens", False, []),
        ("step:token_is@2.5.ess_tokens", "token_is@2.5.ess_tokens", True, ["token_is@2.5.ess_tokens"]),
        ("step:tis@2.50.ess_tokens", "tis@2.50.ess_tokens", True, ["token_is@2.5.ess_tokens"]),
        (
            "step:trl_default.k3",
            "trl_default.k3",
            True,
            ["seq_icepop@inf..3.k3"],
        ),
        (
            "step:seq_mis@2..0.4..2.5:veto.lower=1e-4.tokens_rejected",
            "seq_mis@2..0.4..2.5:veto.lower=1e-4.tokens_rejected",
            True,
            ["seq_mis@2..0.4..2.5:veto.lower=0.0001.tokens_rejected"],
        ),
    ],
)
def test_a_name_with_thresholds_ends_at_its_last_dot_and_a_bound_at_its_last_equals_sign(
    text, number, stepwise, by_step
):
    known = catalogue.load()
    must = required(min=[f"{text}=0.5"])
    preset = known[number.rpartition(".")[0]]

    assert must.limits == [(Name(number, stepwise), MIN, 0.5, "--min")]
    assert must.to_compute(known) == (preset,)
    assert list(must.by_step(known)) == by_step
    summary = make_summary(presets={preset.name: made_presets()["token_is"]})
    assert Lookup(summary).preset_of(number)[0] == preset.name


REFUSED = [
    *(
        ("max", f"k3{rest}", "write --max")
        for rest in ("", "=", "=abc", "=nan", "=inf", "=-inf", "=1=2", ":1")
    ),
    *(("max", text, "names no number") for text in ("=1", "")),
    *(("max", f"{word}:k3=1", "only step: may stand") for word in ("steps", "median", "p90", "")),
    ("max", "step:=1", "step:k3"),
    ("min", "seq_mis:ess_tokens=1", "only step:"),
    *(
        ("tolerance", text, "no tolerance")
        for text in ("", "%", "-1", "-5%", "nan", "inf%", "10%%", "1+2", "5%+6%", "a", "1%+", "+1")
    ),
    ("tolerance", "k3=1=2", "names no number"),
    ("tolerance", "step:k3=1", "different steps"),
    ("only", "step:k3", "different steps; compare k3"),
    ("fail_on", "healthy", "it is not honest_mismatch, cannot_tell or bug"),
]


@pytest.mark.parametrize(("option", "text", "said"), REFUSED)
def test_options_that_cannot_be_meant_are_refused_with_an_example(option, text, said):
    with pytest.raises(UsageError) as caught:
        required(baseline=Path("base.json"), **{option: [text]})

    flag = f"--{option.replace('_', '-')}"
    assert caught.value.message.startswith(flag)
    assert caught.value.hint.startswith(f"write {flag} ")
    assert said in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("text", "of", "share", "amount"),
    [
        ("10%", None, 0.1, 0.0),
        ("seq_mis.k3 = 0.001", Name("seq_mis.k3"), 0.0, 0.001),
        ("k3=0.001+10%", Name("k3"), 0.1, 0.001),
        ("kl=1e+2", Name("k1"), 0.0, 100.0),
        ("5%+1e+2", None, 0.05, 100.0),
        ("250%", None, 2.5, 0.0),
    ],
)
def test_a_tolerance_is_a_share_an_amount_or_both_of_one_number_or_of_all(text, of, share, amount):
    asked = required(baseline=Path("base.json"), tolerance=[text])
    found = asked.tolerances[of] if of else asked.tolerance

    assert (found.share, found.amount) == (pytest.approx(share), pytest.approx(amount))
    assert tolerance(str(found)) == found


# ---------------------------------------------------------------- names that trainers log

ROWS = sorted(rows().items())


@cache
def logged():
    """Return preset → what any generation of its trainer logs of the sample dump."""
    dump = open_dump([str(DUMP)])
    batch, presets = joined([*dump.batches()]), [*BUILT_IN.values()]
    found = {}
    for one in steps_of(batch, presets, dump.info.columns):
        trainer = one.preset.source.partition(" ")[0].lower()
        logs = {log_of(trainer, generation, one.preset) for generation in GENERATIONS} & LOGS.keys()
        found[one.preset.name] = {word: x for log in sorted(logs) for word, x in LOGS[log](one).items()}
    return found


EQUAL = [(name, row, ours) for name, row in ROWS for ours in {row.gap, row.preset} if ours]


@pytest.fixture(scope="module")
def everything():
    return analyze([str(DUMP)], presets=tuple(BUILT_IN.values()), threads=1)


def logging(word, ours):
    """List presets whose trainer logs that word, of the policies of our number."""
    policies = ("current",) if ours.startswith("total.") else ("old", "current") if "." in ours else ("old",)
    if word.startswith("policy/minibatch"):
        policies = ("old", "current")
    return [
        one
        for one, found in logged().items()
        if BUILT_IN[one].policy in policies and math.isfinite(found.get(word, math.nan))
    ]


def spaced(word):
    """Return the names that verl logs in a namespace for a word without one, or with another one."""
    bare = word.rpartition("/")[2].removeprefix("mismatch_")
    every = {one for found in logged().values() for one in found}
    return [one for space in ("rollout_corr/", "training/") if (one := f"{space}{bare}") in every]


def test_a_row_is_of_a_name_that_is_logged_and_ours_come_first():
    every = {one for found in logged().values() for one in found}
    for word, row in ROWS:
        assert word in every or any(rows()[one] == row for one in spaced(word)), word
        assert row.near or word not in METRICS
        assert all(ours.rpartition(".")[2] in {*METRICS, ""} for ours in row[:3])


@pytest.mark.parametrize(("word", "row", "ours"), EQUAL)
def test_a_logged_name_is_that_of_a_number_which_equals_what_is_logged(everything, word, row, ours):
    found = logging(word, ours)
    if not found:
        assert any(rows()[one] == row for one in spaced(word)), "no preset of the catalogue logs it"
    for one in found if not row.unlike else ():
        number = everything.whole[ours] if ours == row.gap else everything.preset(one)[ours]
        assert number.value is not None
        assert math.isclose(logged()[one][word], number.value, rel_tol=1e-6, abs_tol=1e-12)


@pytest.mark.parametrize(("logged", "ours"), [(name, row.near) for name, row in ROWS if row.near])
def test_names_that_equal_no_number_are_refused_with_the_nearest(logged, ours):
    (verdict,) = judge(make_summary(), (logged, MAX, 1.0))

    assert (verdict.name, verdict.said, verdict.passed) == (logged, "", None)
    assert "a trainer logs it" in verdict.reason
    assert f"the nearest of ours is {ours}" in verdict.reason


def test_a_verdict_on_a_logged_name_says_as_what_it_was_taken():
    (verdict,) = judge(make_summary(), ("kl", MAX, 1.0))
    (against,) = compare(make_summary(), make_summary(), only=["mismatch/k3_kl"])
    (bounded,) = judge(make_summary(), ("token_is.rollout_is_eff_sample_size", MIN, 0.0))

    assert (verdict.name, verdict.said, verdict.passed) == ("k1", "kl", True)
    assert title(verdict) == "kl, taken as k1"
    assert (against.name, against.said) == ("k3", "mismatch/k3_kl")
    assert "verl bounds the weights" in bounded.reason


# ---------------------------------------------------------------- over training steps

NARROW = 0.001
around = partial(number, spread=NARROW, unit="nats")


def along(*values, sequences=64, first=0, **more):
    """Return a result with a k3 at each of some steps, with an interval of ±NARROW."""
    numbers = [Number(unknown="undefined") if value is None else around(value) for value in values]
    places = [
        Place(key=str(step), order=step, tokens=100, sequences=sequences, numbers={"k3": one})
        for step, one in enumerate(numbers, first)
    ]
    return make_summary(by={"step": Location(title="step", numeric=True, places=places, **more)})


def one(summary, value, kind=MAX):
    (verdict,) = judge(summary, ("step:k3", kind, value))
    return verdict


UNLISTED, WORSE = along(0.01, 0.01, left_out=7), along(0.01, 0.05, 0.09, 0.07)
PASSED, FAILED, SILENT, UNDECIDED = (True, False), (False, False), (None, False), (True, True)


@pytest.mark.parametrize(
    ("summary", "bound", "ruling", "where", "said"),
    [
        (WORSE, (0.06,), FAILED, "step 2", "0.090 is not ≤ 0.06"),
        (WORSE, (0.06,), FAILED, "step 2", "2 of 4 steps fail: 2, 3"),
        (along(0.01, 0.05, 0.03), (0.04, MIN), FAILED, "step 0", "2 of 3 steps fail: 0, 2"),
        (along(0.0, 0.0205, 0.0195), (0.02,), UNDECIDED, "step 1", "2 of 3 steps hold values"),
        (along(0.01, None, 0.01), (0.02,), SILENT, "step 1", "1 of 3 steps cannot be judged: 1"),
        (along(0.01, None, 0.09), (0.02,), FAILED, "step 2", ""),  # it hides no failure
        (along(*[1.0] * 9), (0.5,), FAILED, "step 0", "9 of 9 steps fail: 0, 1, 2, 3, 4 and 4 more"),
        (along(0.0205, sequences=4), (0.02,), FAILED, "step 0", "no interval"),
        (along(0.0205, sequences=5), (0.02,), UNDECIDED, "step 0", ""),
        # a result that lists only some steps can fail but not pass
        (UNLISTED, (0.02,), SILENT, "", "only 2 of 9 steps"),
        (along(0.01, 0.09, left_out=7), (0.02,), FAILED, "step 1", ""),
    ],
)
def test_a_bound_over_steps_is_judged_by_the_worst_which_is_named(summary, bound, ruling, where, said):
    verdict = one(summary, *bound)

    assert ((verdict.passed, verdict.open), verdict.where) == (ruling, where)
    assert said in verdict.reason


def test_steps_that_are_unreliable_over_the_dump_that_have_no_number_and_that_overflow():
    doubted, nameless, huge = along(0.01, 0.01), along(0.01, 0.01), along(0.01, 0.01)
    doubted.whole["k3"] = Number(value=0.01, note=HEAVY)
    assert (one(doubted, 1.0).passed, "k̂ = 0.75" in one(doubted, 1.0).reason) == (None, True)

    row = Place(key="∅", order=9.0, tokens=1, sequences=64, numbers={"k3": around(9.0)})
    put(nameless, "step", Location("step", False, [*nameless.at("step"), row]))
    assert one(nameless, 0.02).passed is True

    huge.at("step")[1].numbers["k3"] = Number(log10=400.0)  # the largest
    assert (one(huge, 1.0).passed, one(huge, 1.0).log10) == (False, 400.0)


@pytest.mark.parametrize(
    ("summary", "name", "said"),
    [
        (make_summary(by={}), "k3", "no column step"),
        (along(0.01), "k33", "did you mean k3"),
        (along(0.01), "token_is.k3", "is not listed by step in this result; gate the dump itself"),
        (along(0.01), "drift2.k3", "missing column"),
        (along(0.01), "ppo_is_bypass.k3", "needs current_log_probs"),
        (along(0.01), "nobody.k3", "nobody"),
        (along(), "k3", "no row of this dump has a step"),
    ],
)
def test_numbers_missing_by_step_are_reported_and_never_pass(summary, name, said):
    (verdict,) = judge(summary, (f"step:{name}", MAX, 1.0))

    assert verdict.passed is None
    assert said in verdict.reason


def test_the_steps_of_a_dump_of_two_policies_are_those_of_the_total():
    summary = along(0.01, 0.09)
    summary.numbers["dump"] |= {
        "total.k3": around(0.05),
        "k3": Number(unknown="missing column old_log_probs"),
    }
    total, first = judge(summary, *((f"step:{name}", MAX, 0.02) for name in ("total.k3", "k3")))

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
    assert len({place.numbers["f_1_1"].value for place in found.at("step")}) == 3
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


def compared(name, now, base, allowed="0"):
    (verdict,) = compare(having(name, now), having(name, base), only=[name], tolerance=[allowed])
    return verdict


@pytest.mark.parametrize(
    ("name", "base", "now", "passed"),
    [
        ("k3", 0.1, 0.2, False),
        ("k3", 0.2, 0.1, True),
        ("ess_tokens", 0.9, 0.5, False),
        ("mean_ratio", 1.01, 1.2, False),
        ("mean_ratio", 1.01, 0.8, False),
        ("mean_ratio", 0.8, 1.1, True),  # on the other side, and nearer
        ("k1", 0.1, -0.2, False),
        ("ppl_train", 2.0, 2.5, False),  # neither way is worse: any change counts
        ("ppl_train", 2.0, 2.0, True),
        ("seq_mis.ess_tokens", 0.9, 0.5, False),
        ("seq_mis.tokens_rejected", 0.5, 0.1, True),
        ("seq_mis.weight_mean", 1.0, 0.7, False),
        ("drift2.ess_tokens", 0.9, 0.5, False),
    ],
)
def test_each_metric_knows_which_way_is_worse(name, base, now, passed):
    assert compared(name, number(now, 0.001), number(base, 0.001)).passed is passed


def test_a_distance_from_one_is_compared_as_a_distance():
    across = compared("mean_ratio", between(0.99, 1.012, 1.001), number(1.0, 0.002))
    verdict = compared("mean_ratio", number(1.05, 0.001), number(1.02, 0.001), "10%")

    assert (across.passed, across.open, verdict.passed) == (True, True, False)
    assert verdict.limit == pytest.approx(0.022)  # a tenth of the distance, not of the value


def test_every_metric_of_a_result_has_its_way(everything):
    of_pairs = {name.rpartition(".")[2] for name in everything.whole}
    assert set(METRICS) > of_pairs > set(WATCHED_GAP)
    of_presets = set(everything.preset("token_is"))
    assert set(METRICS) == of_pairs | of_presets | {"kept_at_lag_0"}  # which a sweep adds
    assert of_presets > set(WATCHED_PRESET)


@pytest.mark.parametrize(
    ("now", "base", "allowed", "ruling"),
    [
        (number(1.2, 0.01), number(1.0, 0.01), "10%", FAILED),
        (number(1.2, 0.2), number(1.0, 0.01), "10%", UNDECIDED),  # wide: no evidence
        (number(1.2, 0.01), number(1.0, 0.2), "10%", UNDECIDED),  # the baseline's interval counts as much
        (number(1.05, 0.01), number(1.0, 0.01), "10%", PASSED),
        (number(1.2, 0.01), number(1.0, 0.01), "0.3", PASSED),
        (number(1.2, 0.01), number(1.0, 0.01), "10%+0.2", PASSED),
        (number(1.2), number(1.0, 0.001), "10%", FAILED),  # no interval: the values
        (number(1.2, 0.001), number(1.0), "30%", PASSED),
        (number(1.1), number(1.0), "0.1", FAILED),  # 1.1 − 1.0 > 0.1 in floating point
        (number(1.5), number(1.0), "0.5", PASSED),  # on what is allowed
        (number(0.0), number(0.0), "10%", PASSED),
        (number(0.02, 0.001), number(0.0, 0.0), "10%", FAILED),  # a tenth of nothing is nothing
    ],
)
def test_a_comparison_fails_only_where_the_whole_interval_of_the_difference_is_beyond(
    now, base, allowed, ruling
):
    verdict = compared("k3", now, base, allowed)
    assert (verdict.passed, verdict.open) == ruling


@pytest.mark.parametrize(
    ("name", "now", "base", "allowed", "said"),
    [
        ("k3", number(1.5, 0.03), 0.04, "0.1", "worse by 0.50 [0.45, 0.55], 0.1 allowed; the whole 95%"),
        (
            "k3",
            number(1.5, 0.03),
            0.04,
            "0.123456789",
            "worse by 0.50 [0.45, 0.55], 0.1235 allowed; the whole",
        ),
        ("k3", number(1.5, 0.03), 0.04, "0.5", "worse by 0.5 [0.45, 0.55], 0.5 allowed"),
        ("k3", number(0.5, 0.03), 0.04, "0.1", "better by 0.50 [0.45, 0.55], 0.1 allowed"),
        ("ess_tokens", number(0.5, 0.03), 0.04, "1", "worse by 0.50 [0.45, 0.55], 1 allowed"),
        ("mean_ratio", number(0.5, 0.03), 0.0, "1", "worse by 0.50 [0.47, 0.53], 1 allowed"),
        ("ppl_train", number(0.5, 0.03), 0.04, "1", "changed by -0.50 [-0.55, -0.45], 1 allowed"),
        ("k3", number(1.5), 0.001, "1", "worse by 0.50, 1 allowed; no interval"),
        # the end that is worse stays the far one, and no distance is below 0
        ("ess_tokens", between(0.4, 0.52, 0.5), 0.0, "1", "worse by 0.50 [0.48, 0.60], 1"),
        ("mean_ratio", between(0.99, 1.012, 1.001), 0.0, "1", "worse by 0.0010 [0, 0.012], 1"),
        ("k3", number(1.0, 0.03), 0.04, "0", "worse by 0 [-0.050, 0.050], 0 allowed"),
    ],
)
def test_the_reason_says_by_how_much_and_how_sure_that_is(name, now, base, allowed, said):
    assert compared(name, now, number(1.0, base), allowed).reason.startswith(said)


def test_each_end_of_a_difference_is_made_of_the_ends_that_make_it_likely():
    one, other = between(4.0, 8.0, 5.0), between(-3.0, 3.0, 1.0)
    assert difference(one, other).interval == pytest.approx((4 - math.hypot(1, 2), 4 + math.hypot(3, 4)))

    normal = difference(number(3.0, 1.96 * 0.3), number(2.0, 1.96 * 0.4))  # the textbook interval
    assert normal.interval == pytest.approx((1 - 1.96 * 0.5, 1 + 1.96 * 0.5), rel=1e-12)


def test_of_two_runs_that_are_alike_one_in_forty_is_called_worse():
    """16,000 pairs of skewed numbers (e^z), each with its own interval: 2.5%, within 0.5 points."""
    drawn = np.random.default_rng(11).normal(0, 0.3, (2, 16_000))
    reach = 1.96 * 0.3
    now, base = ([between(*map(math.exp, (z - reach, z + reach, z))) for z in row] for row in drawn)
    worse = [difference(*pair).interval[0] > 0 for pair in zip(now, base, strict=True)]

    assert np.mean(worse) == pytest.approx(0.025, abs=0.005)


@pytest.mark.parametrize(
    ("name", "bound", "limit", "centre"),
    [
        ("k3", "max", 1.1, None),
        ("ess_tokens", "min", 0.9, None),
        ("mean_ratio", "within", 0.0, 1.0),
        ("ppl_train", "within", 0.1, 1.0),
    ],
)
def test_a_verdict_says_what_the_value_was_compared_with(name, bound, limit, centre):
    verdict = compared(name, number(1.0, 0.001), number(1.0, 0.001), "10%")

    assert (verdict.bound, verdict.limit, verdict.centre) == (bound, pytest.approx(limit), centre)
    assert (verdict.baseline, verdict.baseline_interval) == (1.0, (0.999, 1.001))
    assert (verdict.tolerance, verdict.source) == ("10%", "base.json")


DOUBTED, SOUND, UNKNOWN = between(0.5, 1.5, note=HEAVY), number(1.0, 0.001), Number(unknown="missing column")


@pytest.mark.parametrize(
    ("now", "base", "said"),
    [
        (UNKNOWN, SOUND, "missing column"),
        (SOUND, UNKNOWN, "base.json: missing column"),
        (DOUBTED, SOUND, "unreliable: k̂"),
        (SOUND, DOUBTED, "base.json: unreliable: k̂"),
        (Number(log10=400.0), SOUND, "overflows"),
        (SOUND, Number(log10=400.0), "base.json: the value overflows"),
        (Number(value=math.nan), SOUND, "not a number"),
    ],
)
def test_numbers_unknown_on_one_side_are_never_called_no_worse(now, base, said):
    verdict = compared("k3", now, base, "1000%")

    assert verdict.passed is None
    assert said in verdict.reason


@pytest.mark.parametrize(
    ("name", "now", "base", "passed"),
    [
        ("mean_ratio", number(19.0, 5.0), 1.0, False),
        ("mean_ratio", number(0.5, 0.1), 1.0, None),  # with the hidden weights it might be 1
        ("mean_ratio", number(1.05, 0.1), 1.0, None),
        ("chi2_token", number(9.0, 1.0), 1.0, False),
        ("chi2_token", number(0.1, 0.01), 1.0, None),
        ("ess_tokens", number(0.1, 0.05), 0.9, False),
        ("ess_tokens", number(0.9, 0.05), 0.1, None),
        ("k3", number(9.0, 1.0), 1.0, None),
        ("mean_ratio", number(19.0), 1.0, None),
    ],
)
def test_a_heavy_tail_leaves_no_doubt_that_it_is_worse_than_a_baseline_without(name, now, base, passed):
    heavy = replace(now, note=HEAVY)
    verdict = compared(name, heavy, number(base, 0.001), "10%")

    assert verdict.passed is passed
    assert "k̂ = 0.75" in verdict.reason


def test_a_name_that_one_side_lacks_and_a_preset_that_is_another_method_there_are_said():
    now, base = make_summary(), make_summary()
    del base.whole["k3"], base.presets["seq_mis"]
    base.presets["geo_rs"].method = "weight sum truncate ≤ 3"
    said = {
        "k3": 'base.json: no metric "k3"',
        "seq_mis.k3": "base.json has no preset seq_mis; it has disabled, token_is",
        "k33": "did you mean k3",
        "token_is.nope": 'no metric "nope" of token_is',
        "geo_rs.k3": "geo_rs is another method in base.json: weight sum truncate ≤ 3 there",
    }
    for one in compare(now, base, only=list(said)):
        assert one.passed is None
        assert said[one.name] in one.reason

    both = {one.name: one for one in compare(now, base, presets=["seq_mis", "token_tis"])}
    assert both["seq_mis.k3"].passed is None
    assert "base.json has no preset seq_mis; it has disabled" in both["seq_mis.k3"].reason
    assert both["token_tis.ess_tokens"].passed is True


def test_numbers_watched_by_default_are_those_reliable_in_the_baseline():
    now, base = make_summary(), having("ess_tokens", DOUBTED)
    now.whole["pearson"] = DOUBTED  # got worse since: that is told

    found = {one.name: one.passed for one in compare(now, base)}
    assert "ess_tokens" not in found
    assert (found["pearson"], found["k3"]) == (None, True)
    assert not any(name.startswith(("drift2.", "total.", "seq_mis.")) for name in found)
    assert "ess_tokens: unreliable in base.json" in not_compared(base)
    assert "name them with --presets" in not_compared(base)
    every = {"presets": ["all"]}
    named = {one.name.split(".")[0] for one in compare(now, base, **every) if "." in one.name}
    assert named >= {"token_is", "seq_mis", "geo_rs"}
    assert "presets" not in not_compared(base, **every)

    own = {name: one for name, one in base.whole.items() if "." not in name}
    base.numbers["dump"] = dict.fromkeys(own, UNKNOWN) | {f"total.{name}": one for name, one in own.items()}
    names = [one.name for one in compare(base, base)]  # of two policies
    assert ("total.k3" in names, "k3" in names) == (True, False)


def test_numbers_named_with_a_tolerance_are_compared_besides_and_only_leaves_out_the_rest():
    summary = make_summary()
    alone = {"only": ["k3"], "tolerance": ["f_2=50%"]}

    found = compare(summary, summary, tolerance=["khat_tokens=0.1", "k3=50%"])
    assert found[0].name == "khat_tokens"
    assert [one.tolerance for one in found if one.name == "k3"] == ["50%"]
    found = compare(summary, summary, **alone)
    assert [(one.name, one.tolerance) for one in found] == [("k3", "10%"), ("f_2", "50%")]
    assert not_compared(summary, **alone) == ""


# ---------------------------------------------------------------- the diagnosis

CAUSE = Cause(
    id="off_by_one",
    statement="Each log-prob belongs to the token before it.",
    statistic="all of 512 sequences",
    fix="Drop the first log-prob of the rollout, e.g. with [1:]. Then log the position as well.",
)
NOTHING = "no diagnosis"


def judge_diagnosis(summary, *fails):
    return judged_by(summary, required(fail_on=fails))


def diagnosis(verdict):
    """Return a result with that diagnosis, or without one."""
    if verdict == NOTHING:
        return make_summary(diagnosis=None)
    causes = [CAUSE] if verdict == "bug" else []
    fit = [CandidateCause(id="stale", kind="honest", statement="Old weights.")]
    fit += [CandidateCause(id="weights_not_synced", kind="bug", statement="Weights that do not arrive.")]
    fit = {SEVERAL: fit[:1], A_BUG: fit}.get(verdict, [])
    verdict = "cannot_tell" if fit else verdict
    found = Diagnosis(verdict=verdict, headline="What it is.", causes=causes, candidates=fit)
    return make_summary(diagnosis=found)


SEVERAL, A_BUG = "one of several causes", "one of several causes, among them a bug"
TRUTH = {  # verdict → (passed, open) where honest_mismatch, cannot_tell and bug fail
    "healthy": [PASSED, PASSED, PASSED],
    "honest_mismatch": [FAILED, PASSED, PASSED],
    SEVERAL: [UNDECIDED, FAILED, UNDECIDED],
    A_BUG: [UNDECIDED, FAILED, SILENT],
    "cannot_tell": [SILENT, FAILED, SILENT],
    "bug": [FAILED, FAILED, FAILED],
    NOTHING: [SILENT, SILENT, SILENT],
}


@pytest.mark.parametrize("verdict", TRUTH)
def test_a_diagnosis_fails_what_names_it_or_a_milder_one(verdict):
    for fails, said in zip(ORDER[1:], TRUTH[verdict], strict=True):
        (found,) = judge_diagnosis(diagnosis(verdict), fails)

        assert (found.passed, found.open) == said
        named = {NOTHING: None, SEVERAL: "cannot_tell", A_BUG: "cannot_tell"}.get(verdict, verdict)
        assert (found.diagnosis, found.diagnosis_fails) == (named, fails)
        assert EXITS[outcome([found])] == EXIT[said[0]]


GROUPED = {"columns": {"group_id": "uid"}}


@pytest.mark.parametrize(
    ("dump", "said"),
    [
        ({"sequences": 15}, "that needs 16 sequences, and there are 15"),
        ({"sequences": 16, "groups": 3} | GROUPED, "that needs 4 prompts, and there are 3"),
        ({"sequences": 16, "groups": 4} | GROUPED, ""),
        ({"sequences": 16, "groups": 1}, ""),
    ],
)
def test_a_dump_that_is_too_small_to_show_a_bug_is_not_judged_unless_it_fails(dump, said):
    def small(verdict):
        summary = diagnosis(verdict)
        return summary.model_copy(update={"dump": summary.dump.model_copy(update=dump)})

    for verdict in ("healthy", SEVERAL):
        (found,) = judge_diagnosis(small(verdict), "bug")
        assert (found.passed is None) is bool(said)
        assert said in found.reason
    (found,) = judge_diagnosis(small("bug"), "bug")
    assert found.passed is False


@pytest.mark.parametrize("base", [one for one in TRUTH if one not in (SEVERAL, A_BUG)])
@pytest.mark.parametrize("now", [one for one in TRUTH if one not in (SEVERAL, A_BUG)])
def test_a_diagnosis_may_not_become_worse_than_the_baselines(now, base):
    (found,) = compare(diagnosis(now), diagnosis(base), only=["diagnosis"])

    known = NOTHING not in (now, base)
    assert found.passed is (ORDER.index(now) <= ORDER.index(base) if known else None)
    assert found.source == "base.json"
    assert (f"it was {base.replace('_', ' ')} in base.json" in found.reason) is (found.passed is False)


def test_a_baseline_with_a_diagnosis_watches_it_unless_only_names_others():
    def names(base, **how):
        return [one.name for one in compare(make_summary(), base, **how)]

    assert names(make_summary())[-1] == "diagnosis"
    assert "diagnosis" not in names(diagnosis(NOTHING))
    assert names(make_summary(), only=["k3"]) == ["k3"]


def test_the_reason_names_the_cause_and_what_to_change_first():
    bug, honest, unsure, perhaps = (
        judge_diagnosis(summary, "bug")[0].reason
        for summary in (diagnosis("bug"), make_summary(), diagnosis(SEVERAL), diagnosis(A_BUG))
    )
    assert bug == (
        "bug (off_by_one): Each log-prob belongs to the token before it; "
        "fix: Drop the first log-prob of the rollout, e.g. with [1:]"
    )
    assert honest.startswith("honest mismatch: The two engines disagree")
    assert "--fail-on cannot_tell fails for that" in unsure
    assert perhaps.endswith("whether it is a bug, this dump cannot tell: weights_not_synced would be one")
    assert [*required(fail_on=["bug", " Cannot-Tell ", "honest_mismatch"]).fail_on] == list(ORDER[:0:-1])
