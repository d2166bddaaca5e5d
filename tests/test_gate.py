"""The gate: evidence, names, steps, an earlier result, the diagnosis, files and all that is written."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from junitparser import Error, Failure, JUnitXml
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import EXITS, app
from offpol_diag.core import breakdowns
from offpol_diag.gate import ORDER, Limit, difference, judged, outcome, required
from offpol_diag.number import Number
from offpol_diag.presets import catalogue
from offpol_diag.report.gate import answer, junit
from offpol_diag.result import CandidateCause, Cause, Diagnosis, GateVerdict, Place, loads
from tests import factory, oracles
from tests.drawn import markdown
from tests.factory import Location, make_summary, number, put
from tests.reading import analyze

HEAVY = "unreliable: k̂ = 0.75 is above 0.70"
MAX, MIN = "max", "min"
PASSED, FAILED, SILENT, OPEN = (True, False), (False, False), (None, False), (True, True)


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


EVIDENCE = [
    # number, kind, (passed, open); the limit is 1
    *((between(*ends), MAX, ruling) for ends, ruling in (((0.2, 0.8), PASSED), ((1.2, 1.8), FAILED))),
    *((between(0.5, 1.4), kind, OPEN) for kind in (MAX, MIN)),
    *((between(*ends), MAX, ruling) for ends, ruling in (((0.5, 1.0), PASSED), ((1.0, 1.5), OPEN))),
    (between(math.nextafter(1, 2), 1.5), MAX, FAILED),
    (between(0.5, math.nextafter(1, 0)), MIN, FAILED),
    (between(0.5, 0.9, value=1.1), MAX, PASSED),  # a value outside of its interval
    *((Number(value=1.0), kind, PASSED) for kind in (MAX, MIN)),  # no interval: the value
    (Number(value=math.nextafter(1, 2)), MAX, FAILED),
    *((Number(log10=400.0), kind, ruling) for kind, ruling in ((MIN, PASSED), (MAX, FAILED))),
    *((between(*ends, note=HEAVY), MAX, SILENT) for ends in ((0.2, 0.8), (1.2, 1.8))),
    (between(0.2, 0.8, note="a few tokens decide it: k̂ = 0.75"), MAX, PASSED),
    *((Number(x, ends), MAX, SILENT) for x, ends in ((math.nan, None), (0.5, (math.nan, 0.6)))),
    (Number(unknown="missing column old_log_probs"), MAX, SILENT),
]


@pytest.mark.parametrize(("one", "kind", "evidence"), EVIDENCE)
def test_the_interval_decides_and_the_plain_value_only_where_it_is_alone(one, kind, evidence):
    found = judge(having("k3", one), "k3", kind)
    assert (found.passed, found.open) == evidence
    assert ("no interval" in found.reason) is (one.interval is None and found.passed is not None)
    assert found.passed is not None or found.reason


@pytest.mark.parametrize("gap", ["", "drift2.", "total."])
def test_a_heavy_tail_leaves_no_doubt_of_what_it_can_only_have_hidden(gap):
    above, below, around = (between(*ends, note=HEAVY) for ends in ((1.2, 1.8), (0.2, 0.8), (0.9, 1.2)))
    sure = [(name, above, MAX) for name in ("mean_ratio", "chi2_token", "chi2_sequence")]
    sure += [(name, below, MIN) for name in ("ess_tokens", "ess_sequences")]
    ones = (above, below, around, Number(log10=400.0, note=HEAVY), Number(value=1.5, note=HEAVY))
    for name, one, kind in product(("k3", *(name for name, *_ in sure)), ones, (MAX, MIN)):
        found = judge(having(f"{gap}{name}", one), f"{gap}{name}", kind)
        assert found.passed is (False if (name, one, kind) in sure else None)
        assert "k̂ = 0.75" in found.reason


def test_a_failure_beats_could_not_say_and_that_beats_passed():
    said = {(True, True): "passed", (True, False): "failed", (True, None): "could not say"}
    said |= {(False, None): "failed", (): "could not say"}  # nothing judged is not a pass
    for each, whole in said.items():
        assert outcome([verdict(passed=one) for one in each]) == whole
    assert EXITS == {"passed": 0, "failed": 1, "could not say": 2}


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("step:total.k3", Limit("total.k3", step=True)),
        ("step:seq_mis.ess_tokens", Limit("ess_tokens", "seq_mis", True)),
        ("Token-TIS@2.50.ess_tokens", Limit("ess_tokens", "token_is@2.5")),
        ("geo_rs@veto.lower=0.1.k3", Limit("k3", "geo_rs@veto.lower=0.1")),
        ("step:rollout_corr/k3_kl", Limit("k3", step=True)),  # names that trainers log
        ("token_is.rollout_corr/rollout_rs_masked_fraction", Limit("tokens_rejected", "token_is")),
        ("token_is.rollout_corr/kl", Limit("rollout_corr/kl", "token_is")),  # of no preset
    ],
)
def test_a_name_may_be_of_each_step_and_ends_at_its_last_dot_and_a_bound_at_its_last_equals_sign(text, limit):
    for kind in (MAX, MIN):
        (found,) = required(**{kind: [f"{text} = 1e-3 "]}).limits
        assert found == replace(limit, kind=kind, value=0.001)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("k33", "did you mean k3"),
        ("nothing_like_it_at_all_here", 'no number "nothing'),
        ("step:token_is.k3", "steps are in this result"),
        ("step:drift2.k3", "missing column"),
        ("ppo_is.ess_tokens", "needs current_log_probs"),
    ],
)
def test_a_name_that_is_no_number_is_answered_and_never_passes(name, said):
    summary = make_summary()
    summary.presets["ppo_is"] = summary.presets["ppo_is_bypass"]
    verdict = judge(summary, name, MAX, 1e9)
    assert verdict.passed is None
    assert said in verdict.reason


def along(*values, **more):
    """Return a result with a k3 at each of some steps, with an interval of ±0.001."""
    numbers = [Number(unknown="undefined") if x is None else number(x, 0.001, "nats") for x in values]
    places = [Place(str(at), 100, 64, {"k3": one}) for at, one in enumerate(numbers)]
    return make_summary(by={"step": Location(title="step", places=places, **more)})


WORSE = along(0.01, 0.05, 0.09, 0.07)


@pytest.mark.parametrize(
    ("summary", "bound", "ruling", "where", "said"),
    [
        (WORSE, (MAX, 0.06), FAILED, "step 2", "2 of 4 steps fail"),
        (WORSE, (MIN, 0.06), FAILED, "step 0", "2 of 4 steps fail"),
        (along(0.0, 0.0205, 0.0195), (MAX, 0.02), OPEN, "step 1", "2 of 3 steps are open"),
        (along(0.01, None, 0.01), (MAX, 0.02), SILENT, "step 1", "1 of 3 steps cannot be judged"),
        (along(0.01, None, 0.09), (MAX, 0.02), FAILED, "step 2", ""),  # it hides no failure
        (along(0.01, 0.01, left_out=7), (MAX, 0.02), SILENT, "", "only 2 of 9 steps"),  # can fail, not pass
        (along(0.01, 0.09, left_out=7), (MAX, 0.02), FAILED, "step 1", ""),
        (along(), (MAX, 1.0), SILENT, "", "no row of this dump has a step"),
    ],
)
def test_a_bound_over_steps_is_judged_by_the_worst_which_is_named(summary, bound, ruling, where, said):
    verdict = judge(summary, "step:k3", *bound)
    assert ((verdict.passed, verdict.open), verdict.where) == (ruling, where)
    assert said in verdict.reason


def test_steps_are_unreliable_where_the_dump_is_and_rows_without_a_step_are_none():
    doubted, nameless = along(0.01, 0.01), along(0.01, 0.01)
    doubted.whole["k3"] = Number(value=0.01, note=HEAVY)
    assert (judge(doubted, "step:k3").passed, "k̂ = 0.75" in judge(doubted, "step:k3").reason) == (None, True)
    row = Place(key="∅", tokens=1, sequences=64, numbers={"k3": number(9.0, 0.001)})
    put(nameless, "step", Location("step", [*nameless.at("step"), row]))
    assert judge(nameless, "step:k3", MAX, 0.02).passed is True


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Make three steps of twelve sequences, three policies, advantages."""
    rows = oracles.make_rows(0.2, seed=5, many=36)
    for at, row in enumerate(rows):
        row |= {"step": at // 12, "group_id": f"{at // 12}-{at // 2}"}
    return oracles.write(rows, tmp_path_factory.mktemp("steps") / "dump.parquet")


def test_any_sum_is_had_at_every_step_as_if_it_were_the_dump_and_changes_nothing(dump, tmp_path, monkeypatch):
    rows = catalogue.load()
    normal = next(one for one in rows.values() if one.weight and one.weight.normalize)
    how = {"presets": (*rows.resolve("token_is,seq_mis"), normal), "threads": 1}
    names = {"drift2.k3", "f_1_1", "token_is.ess_tokens", "seq_mis.pg_loss", f"{normal.name}.weight_mean"}
    monkeypatch.setattr(breakdowns, "MOST_LISTED", 2)
    found = analyze([dump], by_step=(*names, "khat_tokens", "token_is.weight_max", "nobody.k3"), **how)
    plain, whole = analyze([dump], **how), pq.read_table(dump)

    assert (found.whole, found.presets) == (plain.whole, plain.presets)
    assert (found.axes["step"].left_out, plain.axes["step"].left_out) == (0, 1)
    for step in ("0", "1", "2"):
        pq.write_table(whole.filter(pc.equal(whole["step"], int(step))), tmp_path / "part.parquet")
        alone = analyze([str(tmp_path / "part.parquet")], **how).values()
        asked = {name: x for name, x in found.of(f"dump@step/{step}").items() if name in names}
        for one in found.presets:
            asked |= {f"{one}.{name}": x for name, x in found.of(f"preset/{one}@step/{step}").items()}
        assert {*asked} == names
        for name, one in asked.items():
            assert one.value == pytest.approx(alone[name], rel=1e-9), name


DOUBTED, UNKNOWN = between(0.5, 1.5, note=HEAVY), Number(unknown="missing column")


def compared(name, now, base, allowed=0.0):
    """Compare one number of two results."""
    preset = name.rpartition(".")[0]
    asked = required(baseline="b.json", tolerance=allowed, presets=[preset] if preset == "seq_mis" else [])
    found = judged(having(name, now), asked, having(name, base))
    return next(one for one in found if one.name == name)


def near(x, note=None):
    return number(x, 0.001, note=note)


@pytest.mark.parametrize(
    ("name", "base", "now", "allowed", "ruling", "said"),
    [
        # which way is worse
        ("k3", near(0.1), near(0.2), 0, FAILED, "beyond"),
        ("k3", near(0.2), near(0.1), 0, PASSED, "worse by −0.10"),
        ("mean_ratio", near(1.01), near(1.2), 0, FAILED, ""),
        ("mean_ratio", near(1.01), near(0.8), 0, FAILED, ""),
        ("mean_ratio", near(0.8), near(1.1), 0, PASSED, ""),  # on the other side, and nearer
        ("mean_ratio", number(1.0, 0.002), between(0.99, 1.012, 1.001), 0, OPEN, ""),
        ("seq_mis.ess_tokens", near(0.9), near(0.5), 0, FAILED, ""),
        ("seq_mis.tokens_rejected", near(0.5), near(0.1), 0, PASSED, ""),
        # by how much, and how sure that is
        ("k3", number(1.0, 0.01), number(1.2, 0.01), 0.1, FAILED, ""),
        ("k3", number(1.0, 0.01), number(1.2, 0.2), 0.1, OPEN, ""),  # wide: no evidence
        ("k3", number(1.0, 0.2), number(1.2, 0.01), 0.1, OPEN, ""),  # the baseline's interval counts as much
        ("k3", near(1.0), number(1.2), 0.1, FAILED, "no interval"),
        *(("k3", number(x), number(1.5 * x), 0.5, PASSED, "") for x in (0.0, 1.0)),  # on what is allowed
        ("k3", number(0.0, 0.0), near(0.02), 0.1, FAILED, ""),  # a tenth of nothing is nothing
        # what is not known now
        ("k3", near(1.0), UNKNOWN, 0.1, SILENT, "missing column"),
        ("k3", near(1.0), DOUBTED, 0.1, SILENT, "unreliable: k̂"),
        ("k3", near(1.0), Number(log10=400.0), 0.1, SILENT, "overflows"),
        ("mean_ratio", near(1.0), near(19.0, HEAVY), 0.1, FAILED, "heavy tail hides"),
        ("mean_ratio", near(1.0), near(0.5, HEAVY), 0.1, SILENT, "k̂"),  # with what is hidden it may be 1
        ("ess_tokens", near(0.9), near(0.1, HEAVY), 0.1, FAILED, "heavy tail hides"),
        ("ess_tokens", near(0.1), near(0.9, HEAVY), 0.1, SILENT, "k̂"),
    ],
)
def test_a_number_may_be_worse_than_the_baseline_by_what_is_allowed(name, base, now, allowed, ruling, said):
    found = compared(name, now, base, allowed)
    assert (found.passed, found.open) == ruling
    assert said in found.reason.replace("-", "−")


@pytest.mark.parametrize(
    ("name", "base", "limit"),
    [("k3", 0.2, 0.22), ("ess_tokens", 0.9, 0.81), ("mean_ratio", 1.2, 0.22), ("mean_ratio", 0.8, 0.22)],
)
def test_the_limit_against_a_baseline_is_a_tenth_worse_or_a_tenth_farther_from_the_target(name, base, limit):
    assert compared(name, near(base), near(base), 0.1).limit == pytest.approx(limit)


def test_of_two_runs_that_are_alike_one_in_forty_is_called_worse():
    """16,000 pairs of skewed numbers (e^z), each with its own interval: 2.5%, within 0.5 points."""
    drawn, reach = np.random.default_rng(11).normal(0, 0.3, (2, 16_000)), 1.96 * 0.3
    now, base = ([between(*map(math.exp, (z - reach, z + reach, z))) for z in row] for row in drawn)
    worse = [difference(*pair).interval[0] > 0 for pair in zip(now, base, strict=True)]
    assert np.mean(worse) == pytest.approx(0.025, abs=0.005)


def test_numbers_watched_are_those_reliable_in_the_baseline_and_those_of_presets_that_are_named():
    now, base = make_summary(), having("ess_tokens", DOUBTED)
    now.whole["pearson"] = DOUBTED  # got worse since: that is told
    del base.presets["seq_mis"], base.subjects["preset/seq_mis"]
    for presets in ((), ("seq_mis", "token_tis")):
        found = {one.name: one for one in judged(now, required(baseline="b.json", presets=presets), base)}
        assert [found[name].passed for name in ("pearson", "k3", "diagnosis")] == [None, True, True]
        assert not any(name.startswith(("ess_tokens", "drift2.", "total.")) for name in found)
        assert ("seq_mis.k3" in found) is bool(presets)
    assert found["token_is.ess_tokens"].passed is True
    assert "the baseline: no number" in found["seq_mis.k3"].reason


CAUSE = Cause(id="off_by_one", statement="A token late.", statistic="all of 512", fix="Drop the first.")
FIT = [
    CandidateCause(id="stale", kind="honest", statement="Old weights."),
    CandidateCause(id="weights_not_synced", kind="bug", statement="Weights that do not arrive."),
]
NOTHING, SEVERAL, A_BUG = "no diagnosis", "one of several causes", "one of several causes, among them a bug"
TRUTH = {  # verdict → (passed, open) where cannot_tell, and where bug fails
    "healthy": [PASSED, PASSED],
    "honest_mismatch": [PASSED, PASSED],
    SEVERAL: [FAILED, OPEN],
    A_BUG: [FAILED, SILENT],
    "cannot_tell": [FAILED, SILENT],
    "bug": [FAILED, FAILED],
    NOTHING: [SILENT, SILENT],
}


def diagnosis(verdict, **dump):
    """Return a result with that diagnosis, or without one."""
    fit = {SEVERAL: FIT[:1], A_BUG: FIT}.get(verdict, [])
    causes, decide = [CAUSE] if verdict == "bug" else [], "Score it twice." if fit else ""
    one = {"verdict": "cannot_tell" if fit else verdict, "headline": "What it is.", "causes": causes}
    found = None if verdict == NOTHING else Diagnosis(**one, candidates=fit, decide=decide)
    summary = make_summary(diagnosis=found)
    return summary.model_copy(update={"dump": summary.dump.model_copy(update=dump)})


@pytest.mark.parametrize("verdict", TRUTH)
def test_a_diagnosis_fails_what_names_it_or_a_milder_one(verdict):
    for fails, said in zip(("cannot_tell", "bug"), TRUTH[verdict], strict=True):
        (found,) = judged(diagnosis(verdict), required(fail_on=fails))
        assert (found.passed, found.open) == said


def test_a_dump_that_is_too_small_to_show_a_bug_is_not_judged_unless_it_fails():
    grouped = {"sequences": 16, "columns": {"group_id": "uid"}}
    few, enough = ({"sequences": 15}, grouped | {"groups": 3}), (grouped | {"groups": 4}, {"sequences": 16})
    for dump in few + enough:
        for said in ("healthy", SEVERAL):
            (found,) = judged(diagnosis(said, **dump), required(fail_on="bug"))
            assert (found.passed is None) is (dump in few) is ("needs 16 sequences and 4" in found.reason)
        assert judged(diagnosis("bug", **dump), required(fail_on="bug"))[0].passed is False


def test_a_diagnosis_may_not_become_worse_than_the_baselines():
    for base in ORDER:
        for now in (*ORDER, NOTHING):
            found = judged(diagnosis(now), required(baseline="b.json"), diagnosis(base))[-1]
            assert found.name == "diagnosis"
            assert found.passed is (None if now == NOTHING else ORDER.index(now) <= ORDER.index(base))
    names = [one.name for one in judged(make_summary(), required(baseline="b.json"), diagnosis(NOTHING))]
    assert "diagnosis" not in names


@pytest.mark.parametrize("differ", [0, 1, 30])
def test_the_share_of_tokens_that_differ_is_an_exact_count_and_one_fails(tmp_path, differ):
    """Of 128 × 64 tokens; in some one bit differs."""
    rollout = -np.random.default_rng(0).random((128, 64))
    train = rollout.copy()
    train[:differ, 9] = np.nextafter(train[:differ, 9], -1)
    columns = {"rollout_log_probs": rollout.tolist(), "old_log_probs": train.tolist(), "step": [1] * 128}
    path = factory.write(tmp_path / "a.parquet", **columns)
    for one in offpol_diag.gate(path, max={"tokens_differ": 0, "step:tokens_differ": 0}).gates:
        assert (one.number.value, one.number.interval, one.passed) == (differ / 8192, None, differ == 0)


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
    ("text", "line", "code", "said"),
    [
        (K3 + "1", FILE, 0, ""),
        (K3 + "1e-9", FILE, 1, ""),
        ('[max]\n"step:k3" = 1\n[min]\n"token_is.ess_tokens" = 0', FILE + "--max k3=1", 0, ""),
        (K3 + "1e-9", FILE + "--max k3=1", 0, ""),  # the option goes before
        (K3 + "1", FILE + "--max f_2=1e-9", 1, ""),  # options and file together
        ("baseline = '../base.json'\ntolerance = 0.05", FILE, 0, ""),  # beside the file
        ("baseline = 'gone.json'", FILE + AGAINST, 0, ""),
        ("", "--fail-on bug --max nobody=1 --max k3=0", 1, ""),
        ("", FILE, 2, "no bound is given"),  # what cannot be meant
        ("k3 =", FILE, 2, "ci/gates.toml: no gate file"),
        ("mx = 1", FILE, 2, "ci/gates.toml: no gate file: mx: Extra inputs are not permitted"),
        ("[max]\nk3 = nan", FILE, 2, "max.k3: "),
        ("max = 3", FILE + "--max k3=1", 2, "max: "),
        ("fail_on = 'fire'", FILE, 2, "'bug' or 'cannot_tell'"),
        ("", AGAINST + "--tolerance -1", 2, "--tolerance: "),
        ("", "--baseline ci/gates.toml", 2, "ci/gates.toml: this is not a result"),
    ],
)
def test_options_and_a_file_end_in_an_exit_code_or_in_one_error_with_a_hint(folder, text, line, code, said):
    Path("ci/gates.toml").write_text(text)
    ran = run(line)
    assert ran.exit_code == code, ran.output
    assert said in ran.stderr.replace("\n", " ")
    assert (ran.stderr.count("error: "), ran.stderr.count("hint: "), not ran.stdout) == (bool(said),) * 3


def test_the_python_function_takes_a_result(folder):
    result = having("k3", number(9e-3, 1e-4))
    assert offpol_diag.gate(result, baseline="base.json", tolerance=10).passed
    found = offpol_diag.gate(result, baseline="base.json", presets="token_is", max={"k3": 1})
    assert (found.passed, any(one.name == "token_is.ess_tokens" for one in found.gates)) == (False, True)


def verdict(x=0.001, spread=None, **changes):
    usual = {"name": "k3", "must": "≤ 0.002", "number": number(x, spread), "passed": True}
    return GateVerdict(**usual | changes)


BAD = verdict(0.5, passed=False, reason="no interval")
ABSENT = verdict(name="drift2.k3", number=UNKNOWN, passed=None, reason="missing column")
BOTH = verdict(0.003, 0.002, name="f_2", open=True, reason="values on both sides")
FINE = verdict(name="pearson")


def test_what_did_not_pass_leads_and_is_explained():
    found = answer(make_summary(gates=[FINE, BOTH, ABSENT, BAD]))
    assert (
        found.headline == "Failed: k3 is 0.50, must be ≤ 0.002 (1 failed, 1 could not say, 1 open, 1 passed)"
    )
    assert [fact.label for fact in found.facts] == ["Failed", "Could not say", "Open", "Bug?"]
    assert found.facts[1].sentence == "drift2.k3 is not known, must be ≤ 0.002; missing column"
    assert answer(make_summary(gates=[FINE, BOTH])).headline == "Passed: 2 bounds: 1 open, 1 passed"


def test_the_markdown_of_many_bounds_has_60_lines_with_the_failures_first():
    many = [verdict(name=f"n{at}") for at in range(60)] + [BAD] * 15 + [ABSENT] * 15 + [BOTH] * 9
    text = markdown(make_summary(gates=many))
    assert text.count("\n") <= 60
    assert text.count("| ✗ failed |") == 15
    assert "83 more bounds: --json and --junit have all." in text
    assert len(next(iter(JUnitXml.fromstring(junit(make_summary(gates=many)).encode())))) == len(many)


def test_junit_lists_every_bound_as_a_test_and_holds_whatever_a_name_says():
    nasty = 'a < b && "c" ]]> \x00\x1b[31m \ud7ff\ud800\ufffe é\n<!-- -->'
    bad = BAD.model_copy(update={"reason": nasty})
    (suite,) = JUnitXml.fromstring(junit(make_summary(gates=[bad, ABSENT, BOTH, FINE])).encode())
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 1, 1, 0)
    assert suite.time == make_summary().run.seconds["total"]
    cases = [(case.name.split()[0], *map(type, case.result)) for case in suite]
    assert cases == [("k3", Failure), ("drift2.k3", Error), ("f_2",), ("pearson",)]
    assert next(iter(suite)).result[0].message.startswith("k3 is 0.50, must be ≤ 0.002; a < b")


def test_all_forms_are_written_drawn_again_and_added_to_the_job_summary(folder):
    Path("summary.md").write_text("before\n")
    to = "--max k3=1e-9 --max drift2.k3=1 --json o.json -o g.html --md o.md --junit o.xml"
    ran = run(to, GITHUB_STEP_SUMMARY="summary.md", COLUMNS="80", NO_COLOR="1")
    assert (ran.exit_code, max(map(len, ran.stdout.splitlines())) <= 80) == (1, True)
    gates = loads(Path("o.json").read_text(), "o.json").gates
    assert [(one.name, one.passed) for one in gates] == [("k3", False), ("drift2.k3", None)]
    assert CliRunner().invoke(app, ["report", "o.json", "-o", "again.html"]).exit_code == 0
    assert Path("again.html").read_text() == Path("g.html").read_text()
    (suite,) = JUnitXml.fromfile("o.xml")
    assert (suite.failures, suite.errors) == (1, 1)
    text = Path("o.md").read_text(encoding="utf-8")
    assert text.startswith("# offpol-diag gate\n\n❌ **Failed: k3 is ")
    assert Path("summary.md").read_text(encoding="utf-8") == f"before\n\n{text}"
    assert run("--max k3=1", GITHUB_STEP_SUMMARY="no/such/place.md").exit_code == 0  # changes no verdict
