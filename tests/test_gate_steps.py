"""Bounds over training steps: every step, one number of all, and numbers that are had by step when asked."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.engine import breakdowns
from offpol_diag.gate import Bound, Steps, judge
from offpol_diag.gate.bounds import Span
from offpol_diag.gate.numbers import pool, quantile
from offpol_diag.presets import catalogue
from offpol_diag.summary import GateVerdict, Location, Number, Place, Summary
from offpol_diag.writer import DumpWriter
from tests.factory import make_summary

NARROW = 0.001


def along(*values: float | None, sequences: int = 64, first: int = 0, **more: Any) -> Summary:
    """A result with a k3 at each of some steps, with an interval of ±NARROW."""
    places = [
        Place(
            key=str(step),
            order=step,
            tokens=100,
            sequences=sequences,
            metrics={"k3": Number(unknown="undefined") if value is None else around(value)},
        )
        for step, value in enumerate(values, first)
    ]
    location = Location(axis="step", title="training step", numeric=True, places=places, **more)
    return make_summary(by={"step": location})


def around(value: float, half: float = NARROW) -> Number:
    return Number(value=value, interval=(value - half, value + half), unit="nats")


def one(summary: Summary, over: str, limit: float, kind: Any = "max", **more: Any) -> GateVerdict:
    (verdict,) = judge(summary, [Bound("k3", kind, limit, over, **more)])
    return verdict


# ---------------------------------------------------------------- every step


def test_every_step_must_hold_and_the_worst_is_named() -> None:
    verdict = one(along(0.01, 0.05, 0.09, 0.07), "step", 0.06)

    assert (verdict.passed, verdict.where, verdict.value) == (False, "step 2", 0.09)
    assert "0.09 is not ≤ 0.06" in verdict.reason
    assert "2 of 4 steps fail: 2, 3" in verdict.reason
    lower = one(along(0.01, 0.05, 0.03), "step", 0.04, "min")
    assert (lower.passed, lower.where) == (False, "step 0")
    assert "2 of 3 steps fail: 0, 2" in lower.reason


def test_a_step_whose_interval_straddles_leaves_the_bound_open_and_is_named() -> None:
    verdict = one(along(0.01, 0.0205, 0.0195, 0.01), "step", 0.02)

    assert (verdict.passed, verdict.open, verdict.where) == (True, True, "step 1")
    assert "2 of 4 steps hold values on both sides: 1, 2" in verdict.reason
    assert one(along(0.01, 0.0205), "step", 0.02, judge="point").passed is False


def test_one_step_that_is_unknown_is_enough_not_to_pass_but_does_not_hide_a_failure() -> None:
    silent, failed = one(along(0.01, None, 0.01), "step", 0.02), one(along(0.01, None, 0.09), "step", 0.02)

    assert (silent.passed, silent.where) == (None, "step 1")
    assert "1 of 3 steps cannot be judged: 1" in silent.reason
    assert (failed.passed, failed.where) == (False, "step 2")


def test_many_failing_steps_are_counted_and_few_sequences_have_no_interval() -> None:
    assert "9 of 9 steps fail: 0, 1, 2, 3, 4 and 4 more" in one(along(*[1.0] * 9), "step", 0.5).reason
    few = one(along(0.0205, sequences=4), "step", 0.02)
    assert (few.passed, few.judged_on, few.interval) == (False, "value", None)
    assert one(along(0.0205, sequences=5), "step", 0.02).passed is True


def test_what_is_unreliable_over_the_dump_is_so_at_every_step() -> None:
    summary = along(0.01, 0.01)
    summary.metrics["k3"] = Number(value=0.01, note="unreliable: k̂ = 0.8 is above 0.70")

    for over in ("step", "median", "last"):
        verdict = one(summary, over, 1.0)
        assert verdict.passed is None
        assert "k̂ = 0.8" in verdict.reason


def test_rows_without_a_step_are_no_step() -> None:
    summary = along(0.01, 0.01)
    summary.by["step"].places.append(
        Place(key="∅", order=9.0, tokens=1, sequences=64, metrics={"k3": around(9.0)})
    )

    assert one(summary, "step", 0.02).passed is True
    assert one(summary, "last", 0.02).where == "step 1"


@pytest.mark.parametrize(
    ("summary", "bound", "said"),
    [
        (make_summary(by={}), Bound("k3", "max", 1.0, "step"), "no column step"),
        (along(0.01), Bound("k33", "max", 1.0, "step"), "did you mean k3"),
        (
            along(0.01),
            Bound("token_is.k3", "max", 1.0, "step"),
            "is not listed by step in this result; gate the dump itself",
        ),
        (along(0.01), Bound("drift2.k3", "max", 1.0, "step"), "missing column"),
        (along(0.01), Bound("ppo_is_bypass.k3", "max", 1.0, "step"), "needs current_log_probs"),
        (along(0.01), Bound("nobody.k3", "max", 1.0, "median"), "nobody"),
        (
            along(0.01),
            Bound("k3", "max", 1.0, "step", steps=Steps(Span(7, 9))),
            "no step of this dump is among 7..9",
        ),
        (along(), Bound("k3", "max", 1.0, "step"), "no row of this dump has a step"),
    ],
)
def test_what_is_not_there_by_step_is_said_and_never_passes(
    summary: Summary, bound: Bound, said: str
) -> None:
    (verdict,) = judge(summary, [bound])

    assert verdict.passed is None
    assert said in verdict.reason


def test_the_steps_of_a_dump_of_two_policies_are_those_of_the_total() -> None:
    summary = along(0.01, 0.09)
    summary.metrics["total.k3"] = around(0.05)
    summary.metrics["k3"] = Number(unknown="missing column old_log_probs")

    total, first = judge(summary, [Bound(name, "max", 0.02, "step") for name in ("total.k3", "k3")])

    assert (total.passed, total.where) == (False, "step 1")
    assert first.passed is None
    assert "missing column old_log_probs" in first.reason


def test_a_result_that_lists_only_some_steps_can_fail_but_not_pass() -> None:
    fine, bad = along(0.01, 0.01, left_out=7), along(0.01, 0.09, left_out=7)

    for over in ("step", "median", "max", "p90"):
        assert one(fine, over, 0.02).passed is None
        assert "only 2 of 9 steps" in one(fine, over, 0.02).reason
    assert one(bad, "step", 0.02).passed is False
    assert one(fine, "last", 0.02).passed is True  # the ends are always listed
    assert one(fine, "step", 0.02, steps=Steps(Span(1, 1))).passed is True  # of one step, none is left out


# ---------------------------------------------------------------- spans of steps


def test_a_span_of_steps_is_judged_alone() -> None:
    summary = along(0.09, 0.09, 0.01, 0.01, first=10)

    assert one(summary, "step", 0.02, steps=Steps(Span(12))).passed is True
    assert one(summary, "step", 0.02, steps=Steps(Span(11))).where == "step 11"
    assert one(summary, "median", 0.02, steps=Steps(Span(12))).value == 0.01
    assert one(summary, "step", 0.02, steps=Steps(Span(), (Span(last=11),))).steps == "except ..11"


def test_a_part_of_a_bound_without_steps_is_left_out_but_never_the_whole_bound() -> None:
    early = Bound("k3", "max", 1.0, "step", steps=Steps(Span(last=9)), source="f")
    late = Bound("k3", "max", 0.02, "step", steps=Steps(Span(10)), source="f")

    assert [one.limit for one in judge(along(0.01, first=20), [early, late])] == [0.02]
    assert [one.limit for one in judge(along(0.01, first=0), [early, late])] == [1.0]
    for summary in (make_summary(by={}), along(0.01, first=20)):
        assert [one.passed for one in judge(summary, [early])] == [None]


# ---------------------------------------------------------------- one number of all


@pytest.mark.parametrize(
    ("over", "value", "where"),
    [
        ("first", 0.03, "step 0"),
        ("last", 0.02, "step 4"),
        ("min", 0.01, "step 1"),
        ("max", 0.09, "step 3"),
        ("mean", statistics.fmean([0.03, 0.01, 0.05, 0.09, 0.02]), ""),
        ("median", 0.03, ""),
        ("p25", 0.02, ""),
        ("p90", 0.074, ""),
    ],
)
def test_a_quantifier_makes_one_number_of_all_steps(over: str, value: float, where: str) -> None:
    verdict = one(along(0.03, 0.01, 0.05, 0.09, 0.02), over, 1.0)

    assert verdict.value == pytest.approx(value, rel=1e-12)
    assert verdict.where == where
    assert verdict.interval == pytest.approx((value - NARROW, value + NARROW), rel=1e-9)


def test_a_quantifier_fails_only_where_that_of_the_lower_ends_is_beyond() -> None:
    numbers = (around(1.0, 0.5), around(2.0, 0.1), around(3.0, 1.5))

    pooled = pool(numbers, "median")

    assert (pooled.value, pooled.interval) == (2.0, (1.5, 2.1))
    assert pool((Number(value=1.0), Number(value=3.0)), "mean") == Number(value=2.0)
    assert pool((Number(value=1.0), around(3.0, 1.0)), "mean").interval == (1.5, 2.5)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_a_percentile_is_numpys(share: float) -> None:
    values = [3.0, -1.0, 7.5, 2.0, 2.0, 11.0]
    assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)


def test_one_unknown_step_makes_the_number_of_all_unknown_but_not_that_of_the_last() -> None:
    for over in ("mean", "median", "max", "p10"):
        verdict = one(along(0.01, None, 0.01), over, 1.0)
        assert verdict.passed is None
        assert "at step 1: undefined" in verdict.reason
    assert one(along(0.01, None, 0.01), "last", 1.0).passed is True
    assert one(along(0.01, None), "last", 1.0).passed is None


def test_a_step_that_overflows_is_the_largest() -> None:
    summary = along(0.01, 0.01)
    summary.by["step"].places[1].metrics["k3"] = Number(log10=400.0)

    assert one(summary, "max", 1.0).passed is False
    assert one(summary, "max", 1.0).log10 == 400.0
    assert one(summary, "min", 1.0).passed is True
    assert one(summary, "mean", 1.0).passed is None


# ---------------------------------------------------------------- asked for by step


STEPS, ROWS = 3, 8


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of eight sequences whose drift grows, three policies, advantages."""
    draw = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("steps") / "dump.parquet"
    with DumpWriter(path) as writer:
        for step in range(STEPS):
            lengths = draw.integers(2, 9, ROWS)
            rollout = [-draw.exponential(1.0, n) for n in lengths]
            old = [np.minimum(x + draw.normal(0, 0.1 * (step + 1), len(x)), 0.0) for x in rollout]
            current = [np.minimum(x + draw.normal(0, 0.05, len(x)), 0.0) for x in old]
            writer.write(
                rollout_log_probs=rollout,
                old_log_probs=old,
                current_log_probs=current,
                advantages=draw.normal(0, 1, ROWS),
                group_id=[f"{step}-{i // 2}" for i in range(ROWS)],
                step=[step] * ROWS,
            )
    return path


def test_any_sum_is_had_by_step_as_if_the_step_were_the_dump(dump: Path, tmp_path: Path) -> None:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    presets = catalogue.load().resolve("token_is,seq_mis")
    names = ("drift2.k3", "f_1_1", "token_is.ess_tokens", "seq_mis.tokens_rejected", "seq_mis.pg_loss")
    found = analyze([str(dump)], presets=presets, by_step=names, workers=1)
    whole = pq.read_table(dump)

    for place in found.by["step"].places:
        part = tmp_path / f"{place.key}.parquet"
        pq.write_table(whole.filter(pc.equal(whole["step"], int(place.key))), part)
        alone = analyze([str(part)], presets=presets, workers=1)
        flat = alone.metrics | {
            f"{row}.{name}": one
            for row, result in alone.presets.items()
            for name, one in result.metrics.items()
        }
        assert set(place.asked) == set(names)
        for name in names:
            assert place.asked[name].value == pytest.approx(flat[name].value, rel=1e-9)
    assert found.by["step"].places[0].asked["f_1_1"].value != found.by["step"].places[2].asked["f_1_1"].value


def test_a_preset_that_is_normalised_in_its_step_is_had_by_step_too(dump: Path) -> None:
    presets = [one for one in catalogue.load().values() if one.weight and one.weight.normalize and one.apply]
    name = f"{presets[0].name}.weight_mean"

    found = analyze([str(dump)], presets=presets[:1], by_step=(name,), workers=1)

    assert all(math.isfinite(place.asked[name].value or math.nan) for place in found.by["step"].places)


def test_what_is_no_sum_and_what_nobody_has_is_not_had_by_step(dump: Path) -> None:
    whole = ("khat_tokens", "ess_sequences", "token_is.weight_max")
    names = (*whole, "nonsense", "token_is.nonsense", "nobody.k3")
    presets = catalogue.load().resolve("token_is")

    found = analyze([str(dump)], presets=presets, by_step=names, workers=1)

    assert {name for place in found.by["step"].places for name in place.asked} == set()


def test_asking_by_step_changes_no_other_number_and_lists_every_step(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets = catalogue.load().resolve("token_is")
    plain = analyze([str(dump)], presets=presets, workers=1)
    asked = analyze([str(dump)], presets=presets, by_step=("token_is.k3",), workers=1)
    assert (asked.metrics, asked.presets) == (plain.metrics, plain.presets)

    monkeypatch.setattr(breakdowns, "MOST_LISTED", 2)
    assert analyze([str(dump)], workers=1).by["step"].left_out == 1
    assert analyze([str(dump)], by_step=("k3",), workers=1).by["step"].left_out == 0
