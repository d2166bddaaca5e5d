"""The recommendation: one row per rule, what it decides and what it saw."""

import math

import pytest

from offpol_diag import catalogue
from offpol_diag.analyze import analyze
from offpol_diag.diagnose import diagnose
from offpol_diag.recommend import ALERTS, RULES, recommend
from offpol_diag.summary import Diagnosis, Number

BUG = Diagnosis(verdict="bug", headline="off by one")
FINE = Diagnosis(verdict="honest_mismatch", headline="fine")


@pytest.fixture(scope="module")
def real():
    return analyze(["sample_data/stale.parquet"])


def changed(summary, diagnosis=FINE, groups=64, prefix="", note=None, **values):
    """The summary with some metrics set to what a row of the table says."""
    numbers = {prefix + name: Number(value=value, note=note) for name, value in values.items()}
    base = {
        "k3": 5e-3,
        "f_2": 5e-3,
        "f_10": 0.0,
        "k3_top1_share": 0.3,
        "ess_tokens": 0.95,
        "ess_sequences": 0.2,
    }
    base |= {
        "mean_ratio": 1.0,
        "k1": 0.005,
        "chi2_token": 0.05,
        "prob_diff_mean": 0.004,
        "mult_prob_error": 1.01,
    }
    metrics = {prefix + name: Number(value=value) for name, value in base.items()} | numbers
    facts = summary.dump.model_copy(update={"groups": groups})
    return summary.model_copy(update={"metrics": metrics, "dump": facts, "diagnosis": diagnosis, "by": {}})


@pytest.mark.parametrize(
    ("change", "decision", "method"),
    [
        ({"diagnosis": BUG}, "fix the bug first", None),
        ({"diagnosis": BUG, "groups": 3}, "fix the bug first", None),
        ({"groups": 19}, "not enough data", None),
        ({"groups": 20}, "METHOD at THRESHOLD", "token_is"),
        ({"k3": 9e-7}, "no correction needed", None),
        ({"k3": 9e-4, "f_2": 0.0}, "no correction needed", None),
        ({"k3": 9e-4, "f_2": 2e-3}, "METHOD at THRESHOLD", "token_is"),
        ({"k3": 5e-3}, "METHOD at THRESHOLD", "token_is"),
        ({"k3": 5e-3, "k3_top1_share": 0.98, "f_10": 2e-4}, "METHOD at THRESHOLD", "decoupled_token_icepop"),
        ({"k3": 5e-3, "k3_top1_share": 0.98, "f_10": 0.0}, "METHOD at THRESHOLD", "token_is"),
        ({"k3": 0.05, "ess_sequences": 0.6}, "METHOD at THRESHOLD", "seq_is"),
        ({"k3": 0.05, "ess_sequences": 0.6, "note": "unreliable"}, "METHOD at THRESHOLD", "token_is"),
        ({"k3": 0.05, "ess_sequences": 0.1}, "METHOD at THRESHOLD", "token_is"),
        ({"k3": 0.2, "ess_sequences": 0.1}, "METHOD at THRESHOLD", "token_is"),
        ({"k3": 1.5}, "no method helps", None),
        ({"ess_tokens": 0.01}, "no method helps", None),
        ({"prefix": "total.", "k3": 5e-3}, "METHOD at THRESHOLD", "bypass_ppo_clip"),
    ],
)
def test_the_first_rule_that_holds_decides(real, change, decision, method):
    found = recommend(changed(real, **change))

    assert (found.decision, found.method) == (decision, method)


def test_a_dump_whose_gap_is_unknown_is_not_enough(real):
    assert recommend(real.model_copy(update={"metrics": {}, "diagnosis": FINE})).decision == "not enough data"


@pytest.mark.parametrize(
    ("values", "alert"),
    [
        ({"mean_ratio": 0.4}, "weights off centre"),
        ({"ess_tokens": 0.29}, "low ESS"),
        ({"k1": -0.11}, "large KL"),
        ({"chi2_token": 1.1}, "large χ²"),
        ({"k3": 0.016}, "above the merge gate"),
        ({"prob_diff_mean": 0.011}, "probability difference"),
        ({"mult_prob_error": 1.06}, "multiplicative error"),
        ({"ess_sequences": 0.09}, "product ratios unusable"),
    ],
)
def test_each_alert_fires_on_its_side_of_the_line_with_the_number_it_saw(real, values, alert):
    fired = {one.rule: one for one in recommend(changed(real, **values)).fired}
    quiet = {one.rule for one in recommend(changed(real)).fired}

    assert alert in fired
    assert alert not in quiet
    assert next(iter(values.values())) in fired[alert].saw.values()
    assert fired[alert].source


def test_a_run_whose_mismatch_grows_is_told_so():
    summary = analyze(["sample_data/collapse.parquet"])
    steady = analyze(["sample_data/healthy.parquet"])

    saw = next(one.saw for one in recommend(summary).fired if one.rule == "growing")
    first, last = saw["first third, median k3"], saw["last third, median k3"]
    assert last > 5 * first > 0
    assert "growing" not in [one.rule for one in recommend(steady).fired]


def test_real_dumps_get_what_their_making_calls_for():
    for name, decision in (("healthy", "no correction needed"), ("stale", "METHOD at THRESHOLD")):
        summary = analyze([f"sample_data/{name}.parquet"])
        found = recommend(summary.model_copy(update={"diagnosis": diagnose(summary)}))

        assert found.decision == decision


def test_every_recommended_method_is_a_preset_and_every_rule_has_a_source():
    known = catalogue.load()
    methods = [method for rule in RULES for method in (rule.method, rule.runner_up) if method]

    assert all(name in known for method in methods for name, _ in (method.decoupled, method.bypass))
    assert all(rule.source for rule in (*RULES, *ALERTS) if rule.name != "unknown")
    assert all(rule.method for rule in RULES if rule.decision == "METHOD at THRESHOLD")


def test_the_bound_that_is_named_is_the_one_that_the_preset_applies():
    """Where a preset has no weight, the PPO clip of its loss is what bounds the ratio."""
    known = catalogue.load()
    methods = [method for rule in RULES for method in (rule.method, rule.runner_up) if method]
    for name, bound in {pair for method in methods for pair in (method.decoupled, method.bypass)}:
        weight, own = known[name].weight, known[name].clip
        clip = f"{1 - own.low:g}–{1 + own.high:g}"
        lower, upper = (weight.lower, weight.upper) if weight else (None, None)
        applied = f"{lower}–{upper}" if lower is not None else str(upper)
        assert bound == (applied if weight else clip), name


def test_no_rule_holds_because_a_number_is_unknown(real):
    unknown = {name: Number(unknown="missing") for name in real.metrics}
    empty = real.model_copy(update={"metrics": unknown, "diagnosis": FINE, "by": {}})

    assert [one.rule for one in recommend(empty).fired] == ["unknown"]
    assert all(
        value is None or math.isfinite(value) for one in recommend(empty).fired for value in one.saw.values()
    )
