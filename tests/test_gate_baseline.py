"""An earlier result as the bound: which way is worse, what is tolerated, and what cannot be compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from offpol_diag.analyze import analyze
from offpol_diag.cli import app
from offpol_diag.cli.defaults import sample
from offpol_diag.directions import GAP, PRESET, WATCHED_GAP, WATCHED_PRESET
from offpol_diag.errors import UsageError
from offpol_diag.gate import requirements
from offpol_diag.gate.baseline import Baseline, compare, difference, not_compared
from offpol_diag.gate.bounds import Name, Tolerance, comparable, named_tolerance, tolerance
from offpol_diag.presets import catalogue
from offpol_diag.summary import GateVerdict, Number, Summary
from tests.factory import make_summary
from tests.test_gate_steps import along

NONE = Tolerance()


def with_number(name: str, number: Number) -> Summary:
    summary = make_summary()
    preset, _, metric = name.rpartition(".")
    numbers = summary.presets[preset].metrics if preset in summary.presets else summary.metrics
    numbers[metric if preset in summary.presets else name] = number
    return summary


def compared(name: str, now: Number, base: Number, allowed: Tolerance = NONE, **more: Any) -> GateVerdict:
    asked = Baseline(only=(Name(name),), default=allowed, **more)
    (verdict,) = compare(with_number(name, now), with_number(name, base), asked)
    return verdict


def at(value: float, half: float = 0.001) -> Number:
    return Number(value=value, interval=(value - half, value + half))


# ---------------------------------------------------------------- which way is worse


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
        ("seq_mis.loss_scale_removed", 1.0, 0.7, False),
        ("drift2.ess_tokens", 0.9, 0.5, False),
    ],
)
def test_each_metric_knows_which_way_is_worse(name: str, base: float, now: float, passed: bool) -> None:
    assert compared(name, at(now), at(base)).passed is passed


def test_every_metric_of_a_result_has_its_way() -> None:
    summary = analyze([str(sample())], presets=catalogue.load().resolve("token_is"), workers=1)

    assert {name.rpartition(".")[2] for name in summary.metrics} == set(GAP)
    assert set(summary.presets["token_is"].metrics) == set(PRESET)
    assert set(WATCHED_GAP) <= set(GAP)
    assert set(WATCHED_PRESET) <= set(PRESET)


# ---------------------------------------------------------------- the evidence


@pytest.mark.parametrize(
    ("now", "base", "allowed", "passed", "opened"),
    [
        (at(1.2, 0.01), at(1.0, 0.01), "10%", False, False),
        (at(1.2, 0.2), at(1.0, 0.01), "10%", True, True),  # wide: no evidence
        (at(1.2, 0.01), at(1.0, 0.2), "10%", True, True),  # the baseline's interval counts as much
        (at(1.05, 0.01), at(1.0, 0.01), "10%", True, False),
        (at(1.2, 0.01), at(1.0, 0.01), "0.3", True, False),
        (at(1.2, 0.01), at(1.0, 0.01), "10%+0.2", True, False),
        (Number(value=1.2), at(1.0), "10%", False, False),  # no interval: the values
        (at(1.2), Number(value=1.0), "30%", True, False),
        (Number(value=1.1), Number(value=1.0), "0.1", False, False),  # 1.1 − 1.0 > 0.1 in floating point
        (Number(value=1.5), Number(value=1.0), "0.5", True, False),  # on what is allowed
        (Number(value=0.0), Number(value=0.0), "10%", True, False),
        (at(0.02, 0.001), at(0.0, 0.0), "10%", False, False),  # a tenth of nothing is nothing
    ],
)
def test_a_comparison_fails_only_where_the_whole_interval_of_the_difference_is_beyond(
    now: Number, base: Number, allowed: str, passed: bool, opened: bool
) -> None:
    verdict = compared("k3", now, base, tolerance(allowed))

    assert (verdict.passed, verdict.open) == (passed, opened)


@pytest.mark.parametrize(
    ("name", "now", "base", "allowed", "said"),
    [
        ("k3", at(1.5, 0.03), at(1.0, 0.04), "0.1", "worse by 0.5 [0.45, 0.55], 0.1 allowed; the whole 95%"),
        ("k3", at(1.5, 0.03), at(1.0, 0.04), "0.5", "worse by 0.5 [0.45, 0.55], 0.5 allowed"),
        ("k3", at(0.5, 0.03), at(1.0, 0.04), "0.1", "better by 0.5 [0.45, 0.55], 0.1 allowed"),
        ("ess_tokens", at(0.5, 0.03), at(1.0, 0.04), "1", "worse by 0.5 [0.45, 0.55], 1 allowed"),
        ("mean_ratio", at(0.5, 0.03), at(1.0, 0.0), "1", "worse by 0.5 [0.47, 0.53], 1 allowed"),
        ("ppl_train", at(0.5, 0.03), at(1.0, 0.04), "1", "changed by -0.5 [-0.55, -0.45], 1 allowed"),
        ("k3", Number(value=1.5), at(1.0), "1", "worse by 0.5, 1 allowed; no interval"),
        (
            "ess_tokens",
            Number(value=0.5, interval=(0.4, 0.52)),
            at(1.0, 0.0),
            "1",
            "worse by 0.5 [0.48, 0.6], 1",  # the end that is worse stays the far one
        ),
        (
            "mean_ratio",
            Number(value=1.001, interval=(0.99, 1.012)),
            at(1.0, 0.0),
            "1",
            "worse by 0.001 [0, 0.012], 1",  # no distance is below 0
        ),
        ("k3", at(1.0, 0.03), at(1.0, 0.04), "0", "worse by 0 [-0.05, 0.05], 0 allowed"),
    ],
)
def test_the_reason_says_by_how_much_and_how_sure_that_is(
    name: str, now: Number, base: Number, allowed: str, said: str
) -> None:
    assert compared(name, now, base, tolerance(allowed)).reason.startswith(said)


def test_each_end_of_a_difference_is_made_of_the_ends_that_make_it_likely() -> None:
    one, other = Number(value=5.0, interval=(4.0, 8.0)), Number(value=1.0, interval=(-3.0, 3.0))
    assert difference(one, other).interval == pytest.approx((4 - math.hypot(1, 2), 4 + math.hypot(3, 4)))

    normal = difference(at(3.0, 1.96 * 0.3), at(2.0, 1.96 * 0.4))  # two normal means: the textbook interval
    assert normal.interval == pytest.approx((1 - 1.96 * 0.5, 1 + 1.96 * 0.5), rel=1e-12)


def test_of_two_runs_that_are_alike_one_in_forty_is_called_worse() -> None:
    """16,000 pairs of skewed numbers (e^z), each with its own interval: 2.5%, within 0.5 points."""
    draw = np.random.default_rng(11)
    spread = 0.3
    now, base = draw.normal(0, spread, (2, 16_000))
    found = [difference(_skewed(x, spread), _skewed(y, spread)) for x, y in zip(now, base, strict=True)]

    worse = sum(one.interval is not None and one.interval[0] > 0 for one in found) / len(found)

    assert worse == pytest.approx(0.025, abs=0.005)


def _skewed(z: float, spread: float) -> Number:
    reach = 1.96 * spread
    return Number(value=math.exp(z), interval=(math.exp(z - reach), math.exp(z + reach)))


@pytest.mark.parametrize(
    ("name", "bound", "limit", "centre"),
    [
        ("k3", "max", 1.1, None),
        ("ess_tokens", "min", 0.9, None),
        ("mean_ratio", "within", 0.0, 1.0),
        ("ppl_train", "within", 0.1, 1.0),
    ],
)
def test_a_verdict_says_what_the_value_was_held_compare(
    name: str, bound: str, limit: float, centre: float | None
) -> None:
    verdict = compared(name, at(1.0), at(1.0), tolerance("10%"), label="base.json")

    assert (verdict.bound, verdict.limit, verdict.centre) == (bound, pytest.approx(limit), centre)
    assert (verdict.baseline, verdict.baseline_interval) == (1.0, (0.999, 1.001))
    assert (verdict.tolerance, verdict.source) == ("10%", "base.json")


def test_a_distance_from_one_is_compared_as_a_distance() -> None:
    across = compared("mean_ratio", Number(value=1.001, interval=(0.99, 1.012)), at(1.0, 0.002))
    verdict = compared("mean_ratio", at(1.05), at(1.02), tolerance("10%"))

    assert (across.passed, across.open, verdict.passed) == (True, True, False)
    assert verdict.limit == pytest.approx(0.022)  # a tenth of the distance, not of the value


# ---------------------------------------------------------------- what cannot be compared


HEAVY = Number(value=1.0, interval=(0.5, 1.5), note="unreliable: k̂ = 0.8 is above 0.70")


@pytest.mark.parametrize(
    ("now", "base", "said"),
    [
        (Number(unknown="missing column old_log_probs"), at(1.0), "missing column"),
        (at(1.0), Number(unknown="missing column old_log_probs"), "base.json: missing column"),
        (HEAVY, at(1.0), "unreliable: k̂"),
        (at(1.0), HEAVY, "base.json: unreliable: k̂"),
        (Number(log10=400.0), at(1.0), "overflows"),
        (at(1.0), Number(log10=400.0), "base.json: the value overflows"),
        (Number.model_construct(value=math.nan), at(1.0), "not a number"),
    ],
)
@pytest.mark.parametrize("judge", ["interval", "point"])
def test_what_is_not_known_on_both_sides_is_never_said_to_be_no_worse(
    now: Number, base: Number, said: str, judge: Any
) -> None:
    verdict = compared("k3", now, base, tolerance("1000%"), label="base.json", judge=judge)

    assert verdict.passed is None
    assert said in verdict.reason


@pytest.mark.parametrize(
    ("name", "now", "base", "passed"),
    [
        ("mean_ratio", at(19.0, 5.0), 1.0, False),
        ("mean_ratio", at(0.5, 0.1), 1.0, None),  # with the hidden weights it might be 1
        ("mean_ratio", at(1.05, 0.1), 1.0, None),
        ("chi2_token", at(9.0, 1.0), 1.0, False),
        ("chi2_token", at(0.1, 0.01), 1.0, None),
        ("ess_tokens", at(0.1, 0.05), 0.9, False),
        ("ess_tokens", at(0.9, 0.05), 0.1, None),
        ("k3", at(9.0, 1.0), 1.0, None),
        ("mean_ratio", Number(value=19.0), 1.0, None),
    ],
)
@pytest.mark.parametrize("judge", ["interval", "point"])
def test_a_heavy_tail_leaves_no_doubt_that_it_is_worse_than_a_baseline_without(
    name: str, now: Number, base: float, passed: bool | None, judge: Any
) -> None:
    heavy = now.model_copy(update={"note": HEAVY.note})

    verdict = compared(name, heavy, at(base), tolerance("10%"), judge=judge)

    assert verdict.passed is passed
    assert "k̂ = 0.8" in verdict.reason


def test_a_name_that_one_side_lacks_is_said() -> None:
    now, base = make_summary(), make_summary()
    del base.metrics["k3"]
    del base.presets["seq_mis"]
    asked = Baseline("base.json", only=(Name("k3"), Name("seq_mis.k3"), Name("k33"), Name("token_is.nope")))

    found = compare(now, base, asked)

    assert [one.passed for one in found] == [None] * 4
    assert 'base.json: no metric "k3"' in found[0].reason
    assert "base.json has no preset seq_mis; it has disabled, token_is" in found[1].reason
    assert "did you mean k3" in found[2].reason
    assert 'no metric "nope" of token_is' in found[3].reason


def test_a_preset_that_is_another_method_in_the_baseline_or_not_in_it_is_not_compared() -> None:
    now, base = make_summary(), make_summary()
    base.presets["seq_mis"].method = "weight sum truncate ≤ 3"
    (found,) = compare(now, base, Baseline("base.json", only=(Name("seq_mis.ess_tokens"),)))
    assert found.passed is None
    assert "seq_mis is another method in base.json: weight sum truncate ≤ 3 there" in found.reason

    base.presets = {"token_is": base.presets["token_is"]}
    asked = Baseline("base.json", presets=("seq_mis", "token_tis"))
    both = {one.name: one for one in compare(now, base, asked)}
    assert both["seq_mis.ess_tokens"].passed is None
    assert "base.json has no preset seq_mis; it has token_is" in both["seq_mis.ess_tokens"].reason
    assert both["token_tis.ess_tokens"].passed is True


def test_what_is_watched_by_default_is_what_the_baseline_can_be_trusted_with() -> None:
    now, base = make_summary(), make_summary()
    base.metrics["ess_tokens"] = HEAVY
    now.metrics["pearson"] = HEAVY  # got worse since: that is told

    found = {one.name: one.passed for one in compare(now, base, Baseline())}

    assert "ess_tokens" not in found
    assert found["pearson"] is None
    assert found["k3"] is True
    assert not any(name.startswith(("drift2.", "total.", "seq_mis.")) for name in found)
    assert "ess_tokens: unreliable in the baseline" in not_compared(now, base, Baseline())
    assert "name them with --presets" in not_compared(now, base, Baseline())
    every = Baseline(presets=("all",))
    named = {one.name.split(".")[0] for one in compare(now, base, every) if "." in one.name}
    assert named >= {"token_is", "seq_mis", "geo_rs"}
    assert "presets" not in not_compared(now, base, every)


def test_of_two_policies_the_total_is_compared() -> None:
    def two() -> Summary:
        summary = make_summary()
        known = {f"total.{name}": one for name, one in summary.metrics.items() if "." not in name}
        absent = {name: Number(unknown="missing column old_log_probs") for name in summary.metrics}
        summary.metrics = absent | known
        return summary

    found = [one.name for one in compare(two(), two(), Baseline())]

    assert "total.k3" in found
    assert "k3" not in found


def test_numbers_named_with_a_tolerance_are_compared_besides_and_only_leaves_out_the_rest() -> None:
    besides = Baseline(tolerances={Name("khat_tokens"): Tolerance(amount=0.1)})
    alone = Baseline(only=(Name("k3"),), tolerances={Name("f_2"): Tolerance(0.5)})
    summary = make_summary()

    names = [one.name for one in compare(summary, summary, besides)]
    assert names[0] == "khat_tokens"
    assert "k3" in names
    twice = compare(summary, summary, Baseline(tolerances={Name("k3"): Tolerance(0.5)}))
    assert [one.tolerance for one in twice if one.name == "k3"] == ["50%"]
    found = compare(summary, summary, alone)
    assert [(one.name, one.tolerance) for one in found] == [("k3", "10%"), ("f_2", "50%")]
    assert not_compared(summary, summary, alone) == ""


def test_a_quantifier_is_compared_over_the_steps_of_each_run() -> None:
    now, base = along(0.01, 0.02, 0.09), along(0.01, 0.01)

    found = compare(now, base, Baseline(only=(Name("k3", "median"), Name("k3", "last"))))

    assert [(one.name, one.value, one.baseline, one.passed) for one in found] == [
        ("median:k3", 0.02, 0.01, False),
        ("last:k3", 0.09, 0.01, False),
    ]


# ---------------------------------------------------------------- tolerances


@pytest.mark.parametrize(
    ("text", "share", "amount"),
    [
        ("10%", 0.1, 0.0),
        ("0.001", 0.0, 0.001),
        ("0.001+10%", 0.1, 0.001),
        ("1e+2", 0.0, 100.0),
        ("5%+1e+2", 0.05, 100.0),
        ("250%", 2.5, 0.0),
    ],
)
def test_a_tolerance_is_a_share_an_amount_or_both(text: str, share: float, amount: float) -> None:
    found = tolerance(text)

    assert (found.share, found.amount) == (pytest.approx(share), pytest.approx(amount))
    assert tolerance(str(found)) == found


BAD = ("", "%", "-1", "-5%", "nan", "inf%", "10%%", "1+2", "5%+6%", "a", "1%+", "+1", "k3=1=2")


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_tolerance_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        named_tolerance(text)

    assert caught.value.message.startswith("--tolerance")
    assert caught.value.hint


def test_a_tolerance_is_of_one_number_or_of_all_but_not_of_every_step() -> None:
    assert named_tolerance("10%") == (None, Tolerance(0.1))
    assert named_tolerance("seq_mis.k3 = 0.5") == (Name("seq_mis.k3"), Tolerance(amount=0.5))
    assert named_tolerance("median:k3=5%") == (Name("k3", "median"), Tolerance(0.05))
    with pytest.raises(UsageError, match="different steps"):
        comparable("step:k3")


# ---------------------------------------------------------------- hostile files


RUN = CliRunner()


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "now.json").write_text(make_summary().to_json())
    return tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read as a result"),
        ("", "not a result"),
        ('{"format": 7}', "result format 7, this version reads format 1"),
        ('{"format": 1}', "Field required"),
        ('{"format": 1, "dump": NaN}', "dump"),
    ],
)
def test_a_baseline_that_is_none_is_refused_and_named(results: Path, text: str | None, said: str) -> None:
    if text is not None:
        (results / "base.json").write_text(text)

    ran = RUN.invoke(app, ["gate", "now.json", "--baseline", "base.json", "--json", "out.json"])

    assert ran.exit_code == 2
    assert ran.stderr.startswith("error: base.json:")
    assert said in ran.stderr
    assert not Path("out.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tolerance", "5%"], "no baseline"),
        (["--only", "k3"], "no baseline"),
        (["--baseline", "now.json", "--only", "step:k3"], "different steps"),
        (["--baseline", "now.json", "--json", "now.json"], "is what is read"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(results: Path, options: list[str], said: str) -> None:
    (results / "base.json").write_text(make_summary().to_json())

    ran = RUN.invoke(app, ["gate", "now.json", *options])

    assert ran.exit_code == 2
    assert said in ran.stderr


def test_what_is_asked_over_steps_is_had_by_step(results: Path) -> None:
    asked = requirements(
        ["step:tv=1", "k3=1"], [], None, results / "now.json", ["last:f_5=1"], "p90:k2", "a", False
    )

    assert asked.by_step == ("tv", "k2", "f_5")
    assert asked.baseline is not None
    assert asked.baseline.presets == ("a",)


@pytest.mark.parametrize(
    ("k3", "options", "code"),
    [
        (at(2.03e-3, 1e-4), [], 0),
        (at(9e-3, 1e-4), [], 1),
        (at(3e-3, 2e-3), ["--only", "k3"], 0),
        (at(3e-3, 2e-3), ["--only", "k3", "--point"], 1),
        (at(9e-3, 1e-4), ["--tolerance", "1000%"], 0),
        (at(9e-3, 1e-4), ["--only", "f_2"], 0),
        (at(2.03e-3, 1e-4), ["--presets", "nobody"], 2),
        (at(2.03e-3, 1e-4), ["--only", "drift2.k3"], 2),
        (at(9e-3, 1e-4), ["--only", "drift2.k3,k3"], 1),
    ],
)
def test_a_comparison_ends_in_an_exit_code(results: Path, k3: Number, options: list[str], code: int) -> None:
    (results / "base.json").write_text(make_summary().to_json())
    (results / "now.json").write_text(with_number("k3", k3).to_json())

    ran = RUN.invoke(app, ["gate", "now.json", "--baseline", "base.json", *options])

    assert ran.exit_code == code, ran.output
    assert "baseline" in ran.stdout
