"""The diagnosis as a bound of the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from typer.testing import CliRunner

from offpol_diag import api
from offpol_diag.cli import app
from offpol_diag.cli.gate import EXITS
from offpol_diag.errors import GateFileError, UsageError
from offpol_diag.gate import outcome, requirements
from offpol_diag.gate.baseline import Baseline, compare
from offpol_diag.gate.bounds import Name
from offpol_diag.gate.diagnosis import ORDER, FailOn, diagnosed, judge_diagnosis
from offpol_diag.gate.file import read
from offpol_diag.report.render.annotations import annotated
from offpol_diag.report.render.html import render_html
from offpol_diag.report.render.junit import render_junit
from offpol_diag.report.render.markdown import render_markdown
from offpol_diag.summary import Cause, Diagnosis, Summary
from tests.factory import make_summary

RUN = CliRunner()
CAUSE = Cause(
    id="off_by_one",
    statement="Each log-prob belongs to the token before it.",
    statistic="all of 512 sequences",
    fix="Drop the first log-prob of the rollout, e.g. with [1:]. Then log the position as well.",
)
NOTHING = "no diagnosis"


def having(verdict: Any) -> Summary:
    """A result with that diagnosis, or without one."""
    if verdict == NOTHING:
        return make_summary(diagnosis=None)
    causes = [CAUSE] if verdict == "bug" else []
    return make_summary(diagnosis=Diagnosis(verdict=verdict, headline="What it is.", causes=causes))


TRUTH = {  # verdict → (passed, open) where honest_mismatch, cannot_tell and bug fail
    "healthy": [(True, False), (True, False), (True, False)],
    "honest_mismatch": [(False, False), (True, False), (True, False)],
    "cannot_tell": [(True, True), (False, False), (True, True)],
    "bug": [(False, False), (False, False), (False, False)],
    NOTHING: [(None, False), (None, False), (None, False)],
}


@pytest.mark.parametrize("level", ["error", "warn"])
@pytest.mark.parametrize(
    ("verdict", "fails", "said"),
    [
        (row, fails, said)
        for row, cells in TRUTH.items()
        for fails, said in zip(ORDER[1:], cells, strict=True)
    ],
)
def test_a_diagnosis_fails_what_names_it_or_a_milder_one(
    verdict: Any, fails: Any, said: tuple[bool | None, bool], level: Any
) -> None:
    (found,) = judge_diagnosis(having(verdict), [FailOn(fails, level)])

    assert (found.passed, found.open) == said
    assert (found.diagnosis, found.diagnosis_fails) == (None if verdict == NOTHING else verdict, fails)
    code = {True: 0, False: 1, None: 2}[said[0]]
    assert EXITS[outcome([found])] == (code if level == "error" or code == 2 else 0)


@pytest.mark.parametrize("level", ["error", "warn"])
@pytest.mark.parametrize("base", [*ORDER, NOTHING])
@pytest.mark.parametrize("now", [*ORDER, NOTHING])
def test_a_diagnosis_may_not_become_worse_than_the_baselines(now: Any, base: Any, level: Any) -> None:
    (found,) = compare(having(now), having(base), Baseline("base.json", (Name("diagnosis"),), level=level))

    known = NOTHING not in (now, base)
    assert found.passed is (ORDER.index(now) <= ORDER.index(base) if known else None)
    assert (found.level, found.source) == (level, "base.json")
    if found.passed is False:
        assert f"it was {base.replace('_', ' ')} in base.json" in found.reason


def test_a_baseline_with_a_diagnosis_watches_it_unless_only_names_others() -> None:
    def names(base: Summary, **how: Any) -> list[str]:
        return [one.name for one in compare(make_summary(), base, Baseline(**how))]

    assert names(make_summary())[-1] == "diagnosis"
    assert "diagnosis" not in names(having(NOTHING))
    assert names(make_summary(), only=(Name("k3"),)) == ["k3"]


def test_the_reason_names_the_cause_and_what_to_change_first() -> None:
    (bug,) = judge_diagnosis(having("bug"), [FailOn("bug")])
    (honest,) = judge_diagnosis(make_summary(), [FailOn("bug")])
    (unsure,) = judge_diagnosis(having("cannot_tell"), [FailOn("bug")])

    assert bug.reason == (
        "bug (off_by_one): Each log-prob belongs to the token before it; "
        "fix: Drop the first log-prob of the rollout, e.g. with [1:]"
    )
    assert honest.reason.startswith("honest mismatch: The two engines disagree")
    assert "--fail-on cannot_tell fails for that" in unsure.reason


def test_every_output_shows_the_diagnosis() -> None:
    asked = [FailOn("bug", note="agreed"), FailOn("cannot_tell", "warn")]
    summary = having("bug")
    summary.gates = list(judge_diagnosis(summary, asked))

    error, warning = annotated(summary.gates)
    assert error.startswith("::error title=offpol-diag gate%3A diagnosis failed::diagnosis: bug (off_by_one)")
    assert error.endswith("[1:]; agreed")
    assert warning.startswith("::warning")
    first, _ = next(iter(JUnitXml.fromstring(render_junit(summary).encode())))
    assert first.name == "diagnosis not bug"
    assert "fix: Drop the first" in first.result[0].message
    assert "| ✗ failed | diagnosis | not bug | bug |" in render_markdown(summary)
    page = render_html(summary)
    assert "not cannot tell or worse" in page
    assert "fix: Drop the first" in page
    unsure = having("cannot_tell")
    assert next(annotated(list(judge_diagnosis(unsure, asked[:1])))).startswith("::notice")


def test_a_gate_file_and_options_say_which_diagnoses_fail(tmp_path: Path) -> None:
    file = tmp_path / "gates.toml"
    file.write_text("[diagnosis]\nfail_on = ['bug', 'cannot-tell']\nlevel = 'warn'\nnote = 'agreed'\n")

    asked = requirements([], [], file, None, [], None, "", False, ["honest_mismatch"])

    place = "gates.toml: [diagnosis]"
    assert asked.fail_on == (
        FailOn("honest_mismatch"),
        FailOn("bug", "warn", place, "agreed"),
        FailOn("cannot_tell", "warn", place, "agreed"),
    )
    assert (asked.bounds, asked.baseline) == ((), None)
    file.write_text("[defaults]\nlevel = 'warn'\n[diagnosis]\nfail_on = ['bug']\n")
    assert read(file).fail_on[0].level == "warn"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fail_on = ['bugs']", 'fail_on: "bugs" is no diagnosis to fail on; did you mean bug?'),
        ("fail_on = ['healthy']", "it is bug, cannot_tell or honest_mismatch"),
        ("fail_on = []", "fail_on: it is empty"),
        ("fail_on = 'bug'", "fail_on: it must be a list"),
        ("level = 'warn'", "fail_on: it is missing"),
        ("fail_on = ['bug']\nfailon = 1", "did you mean fail_on?"),
    ],
)
def test_a_slip_in_the_table_is_told(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "gates.toml"
    file.write_text(f"[diagnosis]\n{text}\n")

    with pytest.raises(GateFileError) as caught:
        read(file)

    assert said in f"{caught.value}"


def test_the_option_refuses_what_is_no_diagnosis() -> None:
    assert [diagnosed(one) for one in ("bug", " Cannot-Tell ", "honest_mismatch")] == list(ORDER[:0:-1])
    with pytest.raises(UsageError, match='--fail-on "healthy" is no diagnosis'):
        requirements([], [], None, None, [], None, "", False, ["healthy"])


def test_the_python_function_takes_one_or_several() -> None:
    found = api.gate(api.Report(having("bug")), fail_on="bug")

    assert (found.passed, [one.diagnosis for one in found.gates]) == (False, ["bug"])
    assert len(api.gate(found, fail_on=["bug", "cannot_tell"], max={"kl": 1}).gates) == 3
    assert api.gate(api.Report(having("healthy")), fail_on="bug").passed


@pytest.mark.parametrize(
    ("verdict", "options", "code"),
    [
        ("healthy", ["--fail-on", "bug"], 0),
        ("bug", ["--fail-on", "bug"], 1),
        ("cannot_tell", ["--fail-on", "bug"], 0),
        ("cannot_tell", ["--fail-on", "bug", "--fail-on", "cannot_tell"], 1),
        (NOTHING, ["--fail-on", "bug"], 2),
        ("healthy", ["--fail-on", "fire"], 2),
        ("bug", ["--fail-on", "bug", "--max", "nobody=1"], 1),
        ("bug", ["--baseline", "base.json"], 1),
    ],
)
def test_the_exit_code_is_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, options: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("now.json").write_text(having(verdict).to_json())
    Path("base.json").write_text(make_summary().to_json())

    ran = RUN.invoke(app, ["gate", "now.json", *options])

    assert ran.exit_code == code, ran.output
