"""The gate as a truth table."""

from __future__ import annotations

import math

import pytest

from offpol_diag.errors import UsageError
from offpol_diag.gate import Bound, apart, judge, outcome, parse, presets_named
from offpol_diag.summary import GateVerdict, Number
from tests.factory import make_summary

NAN = Number.model_construct(value=math.nan)

TRUTH = [
    # number, kind, limit, passed
    (Number(value=0.5), "max", 0.6, True),
    (Number(value=0.6), "max", 0.6, True),  # on the bound
    (Number(value=math.nextafter(0.6, 1)), "max", 0.6, False),  # displays as 0.6
    (Number(value=0.5), "min", 0.6, False),
    (Number(value=0.6), "min", 0.6, True),  # on the bound
    (Number(value=math.nextafter(0.6, 0)), "min", 0.6, False),  # displays as 0.6
    (Number(value=0.0), "max", 0.0, True),
    (Number(value=-0.0), "min", 0.0, True),
    (Number(value=-1.0), "max", 0.0, True),
    (NAN, "max", 1e9, None),  # NaN never passes
    (NAN, "min", -1e9, None),
    (Number(unknown="missing column"), "max", 1e9, None),  # unknown never passes
    (Number(unknown="missing column"), "min", -1e9, None),
    (Number(), "max", 1e9, None),
    (Number(log10=400.0), "max", 1e300, False),  # larger than any float
    (Number(log10=400.0), "min", 1e300, True),
    (Number(log10=400.0), "max", 0.0, False),
    (Number(log10=400.0), "max", -1.0, False),
    (Number(log10=400.0), "min", -1.0, True),
    (Number(log10=2.0), "max", 100.0, True),  # on the bound
    (Number(log10=2.0), "min", 100.0, True),
]


def gate(number: Number, kind: str, limit: float) -> GateVerdict:
    summary = make_summary()
    summary.metrics["k3"] = number
    return judge(summary, [Bound("k3", kind, limit)])[0]


@pytest.mark.parametrize(("number", "kind", "limit", "passed"), TRUTH)
def test_a_bound_holds_or_fails_or_cannot_be_judged(
    number: Number, kind: str, limit: float, passed: bool | None
) -> None:
    assert gate(number, kind, limit).passed is passed


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        ([True], "passed"),
        ([True, True], "passed"),
        ([True, False], "failed"),
        ([True, None], "could not say"),
        ([None], "could not say"),
        ([False, None], "failed"),  # a failure is certain whatever the rest would have said
        ([], "could not say"),  # nothing judged is not a pass
    ],
)
def test_a_failure_beats_could_not_say_and_that_beats_passed(said: list[bool | None], whole: str) -> None:
    verdicts = [GateVerdict(name="k3", bound="max", limit=1, value=None, passed=passed) for passed in said]

    assert outcome(verdicts) == whole


def test_a_value_that_displays_like_its_bound_is_printed_with_enough_digits() -> None:
    verdict = gate(Number(value=0.60000001), "max", 0.6)

    assert verdict.reason == "0.60000001 is not ≤ 0.6; no interval"


@pytest.mark.parametrize("value", [0.1 + 0.2, math.nextafter(1.0, 2), 1e300, -2.5e-300])
def test_two_different_numbers_are_never_written_alike(value: float) -> None:
    written = apart(value, math.nextafter(value, math.inf))

    assert written[0] != written[1]


def test_an_unknown_value_says_why() -> None:
    assert (
        gate(Number(unknown="missing column old_log_probs"), "max", 1).reason
        == "missing column old_log_probs"
    )


def test_a_caution_that_belongs_to_the_number_stands_in_the_reason() -> None:
    assert "unreliable" in gate(Number(value=1.0, note="unreliable: k̂ exceeds 0.7"), "max", 2).reason


def test_an_interval_across_the_bound_is_mentioned_but_does_not_decide() -> None:
    verdict = gate(Number(value=1.0, interval=(0.5, 1.5)), "max", 1.2)

    assert verdict.passed is True
    assert "both sides" in verdict.reason


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("k33", "did you mean k3"),
        ("K3", "did you mean k3"),
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


def test_a_preset_is_found_by_its_alias_and_in_any_spelling() -> None:
    summary = make_summary()
    summary.presets["token_is"].aliases.append("token_tis")

    for name in ("token_is.ess_tokens", "Token-IS.ess_tokens", "token_tis.ess_tokens"):
        assert judge(summary, [Bound(name, "min", 0.0)])[0].passed is True


def test_only_the_presets_that_bounds_name_need_computing() -> None:
    names = ("k3", "drift2.k3", "total.tv", "a.ess_tokens", "a.vetoed", "b.1.ess_tokens", "nobody.k3")
    bounds = [Bound(name, "max", 1) for name in names]

    assert presets_named(bounds, {"a", "b.1"}) == ("a", "b.1", "nobody")


def test_a_bound_is_a_name_and_a_number() -> None:
    assert parse(" k3 = 2e-3 ", "max") == Bound("k3", "max", 0.002)


@pytest.mark.parametrize(
    "text", ["k3", "k3=", "=1", "", "k3=abc", "k3=nan", "k3=inf", "k3=-inf", "k3=1=2", "k3:1"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "min")

    assert caught.value.hint.startswith("write --min")
