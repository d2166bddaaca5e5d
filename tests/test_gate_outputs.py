"""What the gate writes: to a terminal, as JSON, JUnit XML, Markdown and HTML, and to GitHub."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.gate import beyond
from offpol_diag.report.render.annotations import annotated
from offpol_diag.report.render.junit import render_junit
from offpol_diag.report.sections.gate import bound, gate, holds
from offpol_diag.summary import GateVerdict, loads
from tests.factory import make_summary

RUN = CliRunner()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "now.json").write_text(make_summary().to_json())
    return tmp_path


def verdict(**changes: Any) -> GateVerdict:
    given: dict[str, Any] = {"name": "k3", "bound": "max", "limit": 0.002, "value": 0.001, "passed": True}
    return GateVerdict(**(given | changes))


FAILED = verdict(value=0.5, passed=False, reason="0.5 is not ≤ 0.002")
SILENT = verdict(name="drift2.k3", value=None, passed=None, reason="missing column current_log_probs")
WARNED = verdict(name="tv", value=0.5, passed=False, level="warn", reason="0.5 is not ≤ 0.002")
HUSHED = verdict(name="tv2", value=None, passed=None, level="warn", reason="no metric")
OPEN = verdict(
    name="f_2", value=0.003, interval=(0.001, 0.005), open=True, reason="holds values on both sides"
)
NEAR = verdict(
    name="f_5", value=0.001, interval=(0.0005, 0.005), open=True, reason="holds values on both sides"
)
FINE = verdict(name="pearson")
ALL = [FAILED, SILENT, WARNED, HUSHED, OPEN, NEAR, FINE]
BAD = ("--max", "k3=1e-9", "--max", "drift2.k3=1", "--max", "tv=1", "--max", "f_2=1")

# ---------------------------------------------------------------- the terminal


def terminal(width: int, *arguments: str) -> list[str]:
    env = {"COLUMNS": str(width), "NO_COLOR": "1"}
    return RUN.invoke(app, ["gate", *arguments], env=env).stdout.splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_verdict_table_fits_a_terminal_without_colour(width: int) -> None:
    lines = terminal(
        width, "now.json", *BAD, "--min", "seq_mis.sequences_dropped=0.2", "--baseline", "now.json"
    )

    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "\x1b" not in text
    assert "✗ Failed:" in text
    assert "0.0020 [0.0019, 0.0022]" in text
    assert "seq_mis.sequences_dropped ≥ 0.2" in text
    assert "Left out" not in text


def test_what_is_not_plainly_passed_is_explained_failures_first() -> None:
    head, table = gate([FINE, NEAR, OPEN, HUSHED, WARNED, SILENT, FAILED]).blocks

    assert [line.split(":")[0] for line in head.detail] == [  # type: ignore[union-attr]
        "✗ failed",
        "? could not say",
        "✓ open",
        "✗ failed (warn)",
        "? could not say (warn)",
    ]
    assert [row[0] for row in table.rows][:3] == ["✓ passed", "✓ open", "✓ open"]  # type: ignore[union-attr]
    assert "open: the 95% interval" in table.notes[0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (ALL, "3 of 7 bounds hold (2 open); 1 failed; 1 could not be judged; 2 warned"),
        ([FINE], "1 of 1 bounds hold"),
        ([FINE, WARNED], "1 of 2 bounds hold; 1 warned"),
    ],
)
def test_the_head_counts_what_became_of_the_bounds(verdicts: list[GateVerdict], said: str) -> None:
    assert gate(verdicts).blocks[0].text == said  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (verdict(), "k3 ≤ 0.002"),
        (verdict(bound="min", limit=0.5), "k3 ≥ 0.5"),
        (
            verdict(name="step:k3", steps="10..", where="step 12"),
            "step:k3 (steps 10..) ≤ 0.002, worst at step 12",
        ),
        (verdict(name="last:k3", where="step 12"), "last:k3 ≤ 0.002, at step 12"),
        (verdict(baseline=0.5, tolerance="10%"), "k3 ≤ baseline 0.5 + 10%"),
        (verdict(bound="min", baseline=0.5, tolerance="10%"), "k3 ≥ baseline 0.5 − 10%"),
        (verdict(bound="within", centre=0.5, baseline=0.5, tolerance="10%"), "k3 baseline 0.5 ± 10%"),
        (
            verdict(bound="within", centre=1.0, baseline=0.5, tolerance="10%"),
            "k3 no farther from 1 than baseline 0.5 by 10%",
        ),
        (verdict(passed=None, value=None, tolerance="10%"), "k3 ≤ baseline + 10%"),
    ],
)
def test_what_must_hold_is_one_line(one: GateVerdict, said: str) -> None:
    assert holds(one) == said
    assert bound(one) in said


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (verdict(value=0.001), False),
        (verdict(value=0.003), True),
        (verdict(value=0.002), False),
        (verdict(bound="min", value=0.001), True),
        (verdict(bound="within", centre=1.0, limit=0.1, value=0.85), True),
        (verdict(bound="within", centre=1.0, limit=0.1, value=1.05), False),
        (verdict(value=None), False),
    ],
)
def test_a_value_lies_beyond_its_bound_whatever_its_interval_allows(one: GateVerdict, said: bool) -> None:
    assert beyond(one) is said


# ---------------------------------------------------------------- JUnit


def test_junit_lists_every_bound_as_a_test(folder: Path) -> None:
    suites = JUnitXml.fromstring(render_junit(make_summary(gates=ALL)).encode())
    (suite,) = suites

    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (7, 1, 1, 2)
    assert suite.time == make_summary().run.seconds["total"]
    kinds = {case.name.split()[0]: [type(one) for one in case.result] for case in suite}
    assert kinds == {
        "k3": [Failure],
        "drift2.k3": [Error],
        "tv": [Skipped],
        "tv2": [Skipped],
        "f_2": [],
        "f_5": [],
        "pearson": [],
    }
    failure = next(iter(suite)).result[0]
    assert failure.message == "k3: 0.5 is not ≤ 0.002"
    assert "value: 0.5" in failure.text
    assert "95% interval: none" in failure.text


def test_junit_holds_whatever_a_gate_file_says_and_is_xml() -> None:
    nasty = 'a < b && "c" ]]> \x00\x1b[31m \ud7ff\ufffe é\n<!-- -->'
    xml = render_junit(make_summary(gates=[verdict(passed=False, note=nasty, reason="r")]))

    (case,) = next(iter(JUnitXml.fromstring(xml.encode())))
    assert r'a < b && "c" ]]> \x00\x1b[31m' in case.result[0].text
    assert ElementTree.fromstring(xml.encode()).tag == "testsuites"


@pytest.mark.parametrize("target", ["report.xml", "-"])
def test_junit_is_written_to_a_file_or_to_stdout_alone(folder: Path, target: str) -> None:
    ran = RUN.invoke(app, ["gate", "now.json", *BAD, "--junit", target])

    text = ran.stdout if target == "-" else Path(target).read_text(encoding="utf-8")
    (suite,) = JUnitXml.fromstring(text.encode())
    assert ran.exit_code == 1
    assert (suite.tests, suite.failures, suite.errors) == (4, 1, 2)  # this result has no tv


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--junit", "no/where.xml"], "does not exist"),
        (["--junit", "same", "--json", "same"], "one file"),
        (["--junit", "-", "--md", "-"], "stdout"),
    ],
)
def test_a_place_that_cannot_take_the_results_is_refused_first(options: list[str], said: str) -> None:
    ran = RUN.invoke(app, ["gate", "gone.parquet", "--max", "k3=1", *options])

    assert ran.exit_code == 2
    assert said in ran.stderr


# ---------------------------------------------------------------- JSON, HTML, Markdown


def test_the_result_holds_every_verdict_and_is_drawn_again(folder: Path) -> None:
    ran = RUN.invoke(app, ["gate", "now.json", *BAD, "--json", "out.json", "-o", "gate.html"])

    gates = loads(Path("out.json").read_text(), "out.json").gates
    assert ran.exit_code == 1
    assert [(one.name, one.passed) for one in gates[:2]] == [("k3", False), ("drift2.k3", None)]
    assert "missing column" in Path("gate.html").read_text()
    again = RUN.invoke(app, ["report", "out.json", "-o", "again.html"])
    assert again.exit_code == 0
    assert "drift2.k3" in Path("again.html").read_text()


def test_markdown_begins_with_the_gate_and_says_it_once(folder: Path) -> None:
    RUN.invoke(app, ["gate", "now.json", *BAD, "--md", "out.md"])

    text = Path("out.md").read_text(encoding="utf-8")
    assert text.index("## Gate") < text.index("❌ **Failed**") < text.index("<details>")
    assert text.count("gates passed") == 1
    assert "| ✗ failed | k3 | ≤ 1e-9 |" in text


# ---------------------------------------------------------------- GitHub


def test_a_job_summary_is_appended_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")

    RUN.invoke(app, ["gate", "now.json", "--max", "k3=1"])
    RUN.invoke(app, ["gate", "now.json", *BAD, "--md", "own.md"])

    text = (folder / "summary.md").read_text(encoding="utf-8")
    assert text.startswith("before\n\n# offpol-diag\n")
    assert text.count("## Gate") == 2
    assert text.endswith((folder / "own.md").read_text(encoding="utf-8"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no/such/place.md")  # which changes no verdict
    ran = RUN.invoke(app, ["gate", "now.json", "--max", "k3=1"])
    assert ran.exit_code == 0
    assert "GITHUB_STEP_SUMMARY: no/such/place.md cannot be written" in ran.stderr


def unescaped(text: str) -> str:
    """As the runner reads a message back."""
    for code, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, char)
    return text


def test_verdicts_are_annotated_by_their_weight() -> None:
    lines = list(annotated(ALL))

    assert [line.split(" ")[0] for line in lines] == [
        "::error",
        "::warning",
        "::notice",
        "::error",
        "::warning",
    ]
    assert lines[0] == "::error title=offpol-diag gate%3A k3 failed::k3: 0.5 is not ≤ 0.002"
    assert not any("pearson" in line or "f_5" in line for line in lines)


def test_nothing_in_a_text_ends_an_annotation_or_its_title() -> None:
    nasty = "100%,: ::error::\r\n::stop-commands::x%0A"
    (line,) = annotated([verdict(name=nasty, passed=False, reason=nasty, value=None)])

    found = re.fullmatch(r"::error title=([^:,\r\n]*)::([^\r\n]*)", line)
    assert found is not None
    nasty = nasty.replace("\r\n", r"\r\n")
    assert unescaped(found[1]) == f"offpol-diag gate: {nasty} failed"
    assert unescaped(found[2]) == f"{nasty}: {nasty}"


def test_more_annotations_than_github_shows_are_counted_in_the_last() -> None:
    lines = list(annotated([FAILED] * 13 + [WARNED] * 10))

    assert len(lines) == 20
    assert lines[9].endswith("(3 more like this: see the log)")
    assert not lines[-1].endswith("see the log)")


@pytest.mark.parametrize(
    ("env", "options", "stream"),
    [
        ({"GITHUB_ACTIONS": "true"}, [], "stdout"),
        ({"GITHUB_ACTIONS": "true"}, ["--json", "-"], "stderr"),
        ({"GITHUB_ACTIONS": "true", "OFFPOL_DIAG_QUIET": "1"}, [], "stdout"),
        ({"GITHUB_ACTIONS": "false"}, [], None),
        ({}, [], None),
    ],
)
def test_a_run_is_annotated_where_github_reads_it_and_no_result_is_spoiled(
    env: dict[str, str], options: list[str], stream: str | None
) -> None:
    ran = RUN.invoke(app, ["gate", "now.json", "--max", "k3=1e-9", *options], env=env)

    texts = {"stdout": ran.stdout, "stderr": ran.stderr}
    assert ran.exit_code == 1
    for name, text in texts.items():
        said = [line for line in text.splitlines() if line.startswith("::error title=")]
        assert len(said) == (1 if name == stream else 0)
    if options:
        assert loads(ran.stdout, "stdout").gates[0].passed is False
