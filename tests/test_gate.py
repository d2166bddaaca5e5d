"""The gate as a truth table."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offpol_diag.cli.gate import EXITS
from offpol_diag.errors import UsageError
from offpol_diag.gate import Bound, distinct_digits, judge, name, outcome, parse, span
from offpol_diag.gate.bounds import Name, presets_in
from offpol_diag.gate.verdicts import rule
from offpol_diag.summary import GateVerdict, Number
from tests.factory import make_summary

NAN = Number.model_construct(value=math.nan)


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
def test_a_failure_beats_could_not_say_and_that_beats_passed(said: list[bool | None], whole: str) -> None:
    verdicts = [GateVerdict(name="k3", bound="max", limit=1, value=None, passed=passed) for passed in said]

    assert outcome(verdicts) == whole


@pytest.mark.parametrize("value", [0.1 + 0.2, math.nextafter(1.0, 2), 1e300, -2.5e-300])
def test_two_different_numbers_are_never_written_alike(value: float) -> None:
    assert len(set(distinct_digits(value, math.nextafter(value, math.inf)))) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("k33", "did you mean k3"),
        ("icepop.ess_tokens", "analyze the dump with --presets icepop"),
        ("drift2.k33", "drift2.k3"),
        ("tokenis.k3", "did you mean token_is.k3"),
        ("token_is.ess_token", "did you mean ess_tokens"),
        ("ppo_is_bypass.ess_tokens", "needs current_log_probs"),
    ],
)
def test_a_name_that_is_no_number_is_answered_and_never_passes(name: str, said: str) -> None:
    verdict = judge(make_summary(), [Bound(name, "max", 1e9)])[0]

    assert verdict.passed is None
    assert said in verdict.reason


def test_a_preset_is_found_by_its_alias_in_any_spelling_and_only_those_named_are_computed() -> None:
    summary = make_summary()
    summary.presets["token_is"].aliases.append("token_tis")
    for said in ("token_is.ess_tokens", "Token-IS.ess_tokens", "token_tis.ess_tokens"):
        assert judge(summary, [Bound(said, "min", 0.0)])[0].passed is True

    names = ("k3", "drift2.k3", "total.tv", "a.ess_tokens", "a.vetoed", "b.1.ess_tokens", "nobody.k3")
    assert presets_in(names, {"a", "b.1"}) == ("a", "b.1", "nobody")


@pytest.mark.parametrize(
    "text", ["k3", "k3=", "=1", "", "k3=abc", "k3=nan", "k3=inf", "k3=-inf", "k3=1=2", "k3:1"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "min")

    assert caught.value.hint.startswith("write --min")


# ---------------------------------------------------------------- the evidence


def between(low: float, high: float, value: float | None = None, note: str | None = None) -> Number:
    return Number(value=(low + high) / 2 if value is None else value, interval=(low, high), note=note)


HEAVY = "unreliable: k̂ = 0.75 is above 0.70"
MAX, MIN = "max", "min"
EVIDENCE = [
    # number, kind, by the interval (passed, open), by the value; the limit is 1
    (between(0.2, 0.8), MAX, (True, False), True),
    (between(1.2, 1.8), MAX, (False, False), False),
    (between(0.5, 1.4), MAX, (True, True), True),
    (between(0.5, 1.4), MIN, (True, True), False),  # the value is below, the evidence is not
    (between(0.6, 1.5), MAX, (True, True), False),
    (between(0.6, 1.5), MIN, (True, True), True),
    (between(0.5, 1.0), MAX, (True, False), True),  # an end on the bound
    (between(1.0, 1.5), MIN, (True, False), True),
    (between(1.0, 1.5), MAX, (True, True), False),  # one point of it keeps to the bound
    (between(0.5, 1.0), MIN, (True, True), False),
    (between(math.nextafter(1, 2), 1.5), MAX, (False, False), False),
    (between(0.5, math.nextafter(1, 0)), MIN, (False, False), False),
    (between(1.0, 1.0), MAX, (True, False), True),  # without width
    (between(2.0, 2.0), MAX, (False, False), False),
    (between(0.5, 0.9, value=1.1), MAX, (True, False), False),  # a value outside of its interval
    (Number(value=0.5), MAX, (True, False), True),  # no interval: the value
    (Number(value=1.5), MAX, (False, False), False),
    (Number(value=1.0), MIN, (True, False), True),
    (Number(value=math.nextafter(1, 2)), MAX, (False, False), False),  # displays as 1
    (Number(log10=0.0), MAX, (True, False), True),  # on the bound
    (Number(log10=0.0), MIN, (True, False), True),
    (Number(log10=400.0), MIN, (True, False), True),
    (between(0.2, 0.8, note=HEAVY), MAX, (None, False), None),  # unreliable never passes
    (between(1.2, 1.8, note=HEAVY), MAX, (None, False), None),  # nor is it evidence of a failure
    (between(1.2, 1.8, note=HEAVY), MIN, (None, False), None),
    (Number(log10=400.0, note=HEAVY), MIN, (None, False), None),
    (between(0.2, 0.8, note="a few tokens decide it: k̂ = 0.75"), MAX, (True, False), True),
    (NAN, MAX, (None, False), None),
    (Number.model_construct(value=0.5, interval=(math.nan, 0.6)), MAX, (None, False), None),
    (Number.model_construct(value=math.nan, interval=(0.1, 0.2)), MAX, (None, False), None),
    (Number.model_construct(log10=math.nan), MIN, (None, False), None),
    (Number(unknown="missing column old_log_probs"), MAX, (None, False), None),
    (Number(unknown="overflows float64, and so does its log10"), MIN, (None, False), None),
]
EXIT = {True: 0, False: 1, None: 2}


UP, DOWN = ("mean_ratio", "chi2_token", "chi2_sequence"), ("ess_tokens", "ess_sequences")


@pytest.mark.parametrize("name", [f"{gap}{one}" for gap in ("", "drift2.", "total.") for one in UP + DOWN])
@pytest.mark.parametrize("judge_by", ["interval", "point"])
def test_a_heavy_tail_leaves_no_doubt_of_what_it_can_only_have_hidden(name: str, judge_by: Any) -> None:
    above, below, around = between(1.2, 1.8, note=HEAVY), between(0.2, 0.8, note=HEAVY), between(0.9, 1.2)
    cases = [(above, MAX), (above, MIN), (below, MAX), (below, MIN), (around, MAX), (around, MIN)]
    cases += [(Number(log10=400.0, note=HEAVY), MAX), (Number(value=1.5, note=HEAVY), MAX)]
    sure = (above, MAX) if name.rpartition(".")[2] in UP else (below, MIN)

    for number, kind in cases:
        summary = make_summary()
        summary.metrics[name] = number.model_copy(update={"note": HEAVY})
        (verdict,) = judge(summary, [Bound(name, kind, 1.0, judge=judge_by)])
        assert verdict.passed is (False if (number, kind) == sure else None)
        if verdict.passed is False:
            assert "k̂ = 0.75" in verdict.reason
            assert verdict.judged_on == "interval"


def judged(number: Number, kind: Any, **how: Any) -> GateVerdict:
    summary = make_summary()
    summary.metrics["k3"] = number
    return judge(summary, [Bound("k3", kind, 1.0, **how)])[0]


@pytest.mark.parametrize(("number", "kind", "evidence", "value"), EVIDENCE)
def test_the_interval_decides_and_the_plain_value_only_where_it_is_asked_or_alone(
    number: Number, kind: str, evidence: tuple[bool | None, bool], value: bool | None
) -> None:
    by_interval, by_value = judged(number, kind), judged(number, kind, judge="point")

    assert (by_interval.passed, by_interval.open) == evidence
    assert (by_value.passed, by_value.open) == (value, False)
    fine, warned = judged(Number(value=0.0), "max"), judged(number, kind, level="warn")
    assert EXITS[outcome([by_interval, fine])] == EXIT[evidence[0]]
    assert EXITS[outcome([warned, fine])] == 0  # only bounds of level error touch the exit code


def test_warnings_alone_that_could_say_nothing_are_no_pass() -> None:
    silent = judged(Number(unknown="missing column"), "max", level="warn")

    assert outcome([silent]) == "could not say"
    assert outcome([judged(Number(value=9.0), "max", level="warn")]) == "passed"


@pytest.mark.parametrize(
    ("number", "how", "said"),
    [
        (between(1.2, 1.8), "interval", "1.5 is not ≤ 1; the whole 95% interval lies beyond it, from 1.2"),
        (between(0.2, 1.4), "interval", "0.8 ≤ 1; the 95% interval holds values on both sides"),
        (between(0.2, 1.4), "point", "0.8 ≤ 1; the 95% interval holds values on both sides"),
        (Number(value=0.5), "interval", "0.5 ≤ 1; no interval"),
        (Number(value=1.00000001), "interval", "1.00000001 is not ≤ 1; no interval"),
        (Number(log10=45.2), "interval", "10^45.2 is not ≤ 1; no interval"),
        (between(0.2, 0.8, note=HEAVY), "point", HEAVY),
        (between(0.2, 0.8, note="a few tokens decide it"), "interval", "0.5 ≤ 1; a few tokens decide it"),
    ],
)
def test_the_reason_says_what_decided(number: Number, how: Any, said: str) -> None:
    verdict = judged(number, "max", judge=how)
    assert verdict.reason.startswith(said)
    alone = "" if verdict.passed is None else "value"
    assert verdict.judged_on == ("interval" if number.interval and how == "interval" else alone)


@given(
    st.floats(-1e6, 1e6),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(-1e6, 1e6),
    st.sampled_from([MAX, MIN]),
)
def test_a_bound_never_fails_while_its_interval_has_a_value_that_keeps_to_it(
    value: float, below: float, above: float, limit: float, kind: Any
) -> None:
    number = between(value - below, value + above, value)
    ends = (value - below, value + above)

    ruling = rule(number, kind, limit)

    keeps = [end <= limit if kind == "max" else end >= limit for end in ends]
    assert ruling.passed is any(keeps)
    assert ruling.open is (any(keeps) and not all(keeps))


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "number", "over"),
    [
        ("k3", "k3", ""),
        ("step:k3", "k3", "step"),
        ("p90:seq_mis.ess_tokens", "seq_mis.ess_tokens", "p90"),
        ("p99.9: k3", "k3", "p99.9"),
    ],
)
def test_a_name_may_be_quantified_over_steps(text: str, number: str, over: str) -> None:
    assert name(text) == Name(number, over)
    assert parse(f"{text} = 1e-3 ", "max") == Bound(number, "max", 0.001, over)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps:k3=1", "did you mean step"),
        ("Median:k3=1", "did you mean median"),
        ("avg:k3=1", "a quantifier is step, first, last"),
        ("p0:k3=1", "say min"),
        ("p100:k3=1", "say max"),
        ("p1000:k3=1", "a quantifier is"),
        (":k3=1", "a quantifier is"),
        ("median:=1", "median:k3"),
        ("seq_mis:ess_tokens=1", "quantifier"),
    ],
)
def test_a_quantifier_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "max")

    assert said in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.message.startswith("--max")


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("100..200", [100, 150, 200], [99, 201]),
        ("100..", [100, 1e9], [99]),
        ("..99", [-5, 99], [100]),
        ("7", [7], [6, 8]),
        (" 3 .. 4 ", [3, 4], [5]),
    ],
)
def test_a_span_of_steps_holds_both_its_ends(text: str, inside: list[float], outside: list[float]) -> None:
    found = span(text)

    assert all(step in found for step in inside)
    assert not any(step in found for step in [*outside, math.nan])
    assert span(str(found)) == found


@pytest.mark.parametrize("text", ["", "..", "a..b", "1-5", "5..1", "1.5..2", "1..2..3", "nan", "1e3"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        span(text)
