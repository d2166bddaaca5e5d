"""What mutants got away with: one test for each line that could be broken without any other test noticing."""

from __future__ import annotations

from typing import Any

import pytest

from offpol_diag.blocks import Section, Table
from offpol_diag.crosswalk.verl.parts import GENERATIONS, reject_parts
from offpol_diag.diagnose import diagnose
from offpol_diag.gate import Bound, judge
from offpol_diag.presets import Preset, Reject
from offpol_diag.recommend import recommend
from offpol_diag.render.terminal import sparkline
from offpol_diag.sections import sections
from offpol_diag.summary import Diagnosis, Location, Number, Place, PresetResult, Summary
from tests.factory import dump_facts, make_summary


def numbered(**numbers: Number) -> Summary:
    """The factory's Summary with some metrics replaced."""
    summary = make_summary()
    return summary.model_copy(update={"metrics": summary.metrics | numbers})


def about(value: float, target: float, errors: float) -> Number:
    """A number whose interval puts it that many standard errors away from `target`."""
    half = 1.96 * abs(value - target) / errors
    return Number(value=value, interval=(value - half, value + half))


def along(axis: str, *k3: float) -> dict[str, Location]:
    """k3 along an axis, each within 1 %."""
    places = [
        Place(
            key=str(i),
            order=i,
            tokens=9000,
            sequences=90,
            metrics={"k3": Number(value=x, interval=(0.99 * x, 1.01 * x))},
        )
        for i, x in enumerate(k3)
    ]
    return {axis: Location(axis=axis, title=axis, numeric=True, places=places)}


def table(name: str, of: Section) -> Table:
    return next(block for block in of.blocks if isinstance(block, Table) and block.id == name)


def section(name: str, summary: Summary) -> Section:
    return next(one for one in sections(summary) if one.id == name)


# ---------------------------------------------------------------- the diagnosis


@pytest.mark.parametrize(
    ("change", "bug"),
    [
        ({"mean_ratio": about(1.01, 1.0, 3.5)}, False),  # not sure enough
        ({"mean_ratio": about(1.01, 1.0, 4.5)}, True),
        ({"mean_ratio": about(0.99, 1.0, 3.5)}, False),
        ({"mean_ratio": about(1.0015, 1.0, 20.0)}, False),  # sure, and too small to be called one
        ({"mean_ratio": about(1.0025, 1.0, 20.0)}, True),
        ({"k1": about(-5e-6, 0.0, 20.0)}, False),
        ({"k1": about(-2e-5, 0.0, 20.0)}, True),
        ({"k1": about(-2e-3, 0.0, 3.5)}, False),
    ],
)
def test_an_identity_is_broken_only_beyond_its_error_and_what_kernels_round(
    change: dict[str, Number], bug: bool
) -> None:
    assert (diagnose(numbered(**change)).verdict == "bug") is bug


@pytest.mark.parametrize(("times", "ids"), [(5.0, []), (20.0, ["boundary"])])
def test_one_position_is_a_boundary_only_at_ten_times_every_other(times: float, ids: list[str]) -> None:
    summary = make_summary(by=along("position", times * 3e-3, 3e-3, 2.9e-3, 3e-3))

    assert [cause.id for cause in diagnose(summary).causes] == ids


@pytest.mark.parametrize(("tokens", "told"), [(999, False), (1000, True)])
def test_few_tokens_cannot_tell(tokens: int, told: bool) -> None:
    assert (diagnose(make_summary(dump=dump_facts(tokens=tokens))).verdict != "cannot_tell") is told


def test_of_two_causes_with_one_id_the_first_is_told() -> None:
    found = diagnose(numbered(k1=about(-0.01, 0.0, 9.0), mean_ratio=about(1.01, 1.0, 9.0)))

    assert [cause.id for cause in found.causes] == ["rollout_raw_logprobs"]
    assert found.causes[0].statement in found.headline
    assert "k1 = -0.01" in found.causes[0].statistic


def test_what_a_heavy_tail_forbids_to_test_is_not_ruled_out() -> None:
    heavy = numbered(mean_ratio=Number(value=1.0, interval=(0.99, 1.01), note="unreliable: k̂ = 0.80"))

    assert any("E[r]" in line for line in diagnose(make_summary()).ruled_out)
    assert not any("E[r]" in line for line in diagnose(heavy).ruled_out)
    assert any("k1 < 0" in line for line in diagnose(heavy).ruled_out)


# ---------------------------------------------------------------- the recommendation


@pytest.mark.parametrize(
    ("facts", "enough"),
    [
        ({"sequences": 49}, False),
        ({"sequences": 50}, True),
        ({"tokens": 999}, False),
        ({"tokens": 1000}, True),
    ],
)
def test_each_of_the_three_counts_can_be_too_small_to_choose(facts: dict[str, Any], enough: bool) -> None:
    given = recommend(make_summary(dump=dump_facts(**facts)))

    assert (given.rule != "few") is enough


def test_what_a_rule_saw_bears_the_name_of_the_drift_it_was_read_from() -> None:
    total = {
        f"total.{name}": Number(value=value)
        for name, value in {"k3": 5e-3, "f_2": 5e-3, "ess_tokens": 0.9, "ess_sequences": 0.2}.items()
    }
    summary = make_summary(metrics=total, diagnosis=Diagnosis(verdict="honest_mismatch", headline=""))

    saw = recommend(summary).fired[0].saw

    assert saw == {"total.k3": 5e-3, "total.ess_tokens": 0.9, "total.ess_sequences": 0.2}


@pytest.mark.parametrize(
    ("steps", "alarmed"),
    [
        ((1e-3, 1e-3, 4.9e-3), False),
        ((1e-3, 1e-3, 5.1e-3), True),
        ((1e-6, 1e-6, 9e-5), False),  # grows, and is still nothing
        ((1e-6, 1e-6, 1.1e-4), True),
        ((5.1e-3, 1e-3, 1e-3), False),
    ],
)
def test_growth_is_five_times_the_first_third_and_more_than_rounding(
    steps: tuple[float, ...], alarmed: bool
) -> None:
    fired = recommend(make_summary(by=along("step", *steps))).fired

    assert any(one.rule == "growing" for one in fired) is alarmed


# ---------------------------------------------------------------- the gate


@pytest.mark.parametrize(("kind", "passed"), [("max", False), ("min", True)])
def test_what_overflows_lies_above_any_bound_below_zero(kind: Any, passed: bool) -> None:
    summary = numbered(chi2_sequence=Number(log10=45.2))

    assert judge(summary, [Bound("chi2_sequence", kind, -1e50)])[0].passed is passed


def test_the_longest_preset_name_before_a_dot_is_the_one_meant() -> None:
    def result(k3: float) -> PresetResult:
        return make_summary().presets["disabled"].model_copy(update={"metrics": {"k3": Number(value=k3)}})

    summary = make_summary(presets={"a": result(1.0), "a.b": result(2.0)})

    assert judge(summary, [Bound("a.b.k3", "max", 9.0)])[0].value == 2.0


# ---------------------------------------------------------------- the crosswalk


def test_a_ratio_without_a_lower_bound_is_logged_down_to_the_inverse_of_its_upper_one() -> None:
    preset = Preset("p", "", reject=(Reject("ratio", "token", upper=4.0),), logs="verl-2025-11")

    parts = list(reject_parts(preset, GENERATIONS["verl-2025-11"]))

    assert [(part.spread.limits.low, part.spread.limits.high) for part in parts] == [(0.25, 4.0)]


# ---------------------------------------------------------------- what is shown


def test_a_long_sparkline_shows_all_of_its_curve() -> None:
    drawn = sparkline([0.0] * 40 + [1.0] * 40)

    assert len(drawn) <= 32
    assert set(drawn[: len(drawn) // 2]) == {"▁"}
    assert drawn[-1] == "█"


def test_a_ratio_that_lies_below_one_is_not_said_to_cover_it() -> None:
    text = str(section("numbers", numbered(mean_ratio=Number(value=0.98, interval=(0.97, 0.99)))).blocks[0])

    assert "ends at 0.99 and does not cover 1" in text


def test_a_gate_that_could_not_say_is_not_counted_as_passed() -> None:
    assert table("gates", section("verdict", make_summary())).caption == "1 of 3 gates passed"


def test_the_recommended_preset_is_the_first_of_the_table_after_the_raw_weights() -> None:
    titles = [str(row[0]) for row in table("presets", section("presets", make_summary())).rows]

    assert next(title for title in titles if "raw weights" not in title).startswith("token_is (recommended")


def test_a_column_that_only_some_of_the_worst_tokens_have_is_shown() -> None:
    shown = table("worst-tokens", section("worst", make_summary()))

    at = shown.header.index("token id")
    assert [row[at] for row in shown.rows[:2]] == ["not in the dump", "1338"]


@pytest.mark.parametrize(("exact", "label"), [(True, "groups"), (False, "groups (estimated)")])
def test_an_estimated_count_of_groups_says_so(exact: bool, label: str) -> None:
    rows = table("counts", section("dump", make_summary(dump=dump_facts(groups_exact=exact)))).rows

    assert label in [row[0] for row in rows]
