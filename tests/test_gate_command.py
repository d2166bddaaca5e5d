"""The command `gate`: files of bounds with every slip in its place, exit codes, and all that it writes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from junitparser import Error, Failure, JUnitXml
from typer.testing import CliRunner

from offpol_diag import api
from offpol_diag.cli import app
from offpol_diag.errors import GateFileError, UsageError
from offpol_diag.gate import Name, Tolerance, beyond, read, required
from offpol_diag.number import Number
from offpol_diag.presets import catalogue
from offpol_diag.report.gate import answer, bound, holds
from offpol_diag.report.gate import junit as render_junit
from offpol_diag.report.page import page as render_html
from offpol_diag.result import GateVerdict, loads
from tests.drawn import markdown as render_markdown
from tests.drawn import terminal
from tests.factory import make_summary, number
from tests.test_gate import A_BUG, NOTHING, SEVERAL, compare, diagnosis, having, judge_diagnosis

GATES, NOW, BASE = (Path(name) for name in ("gates.toml", "now.json", "base.json"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    for path in (NOW, BASE):
        path.write_text(make_summary().to_json())


def gates(text):
    GATES.write_text(text, encoding="utf-8")
    return read(GATES)


def run(*arguments, source=NOW, **env):
    return CliRunner().invoke(app, ["gate", str(source), *arguments], env=env)


# ---------------------------------------------------------------- gate files

WHOLE = """
fail_on = ["bug", "cannot-tell"]
baseline = "base.json"
tolerance = ["5% + 0.1", "k3=0.001", "seq_mis.ess_tokens=20%"]
only = ["k3", "f_2"]
presets = ["token_is"]

[max]
"step:k3" = 0.002
"rollout_corr/kl" = 1

[min]
"step:k3" = -1
seq_mis.ess_tokens = 0.9
"""


def test_a_file_has_the_keys_of_the_options():
    found = gates(WHOLE)

    assert [(str(one.name), one.name.said, *one[1:]) for one in found.limits] == [
        ("step:k3", "", "max", 0.002, "gates.toml: max"),
        ("k1", "rollout_corr/kl", "max", 1, "gates.toml: max"),
        ("step:k3", "", "min", -1, "gates.toml: min"),
        ("seq_mis.ess_tokens", "", "min", 0.9, "gates.toml: min"),
    ]
    assert found.fail_on == dict.fromkeys(("bug", "cannot_tell"), "gates.toml: fail_on")
    assert (found.baseline, found.presets, found.only) == (
        "base.json",
        ["token_is"],
        [Name("k3"), Name("f_2")],
    )
    assert found.tolerance == Tolerance(0.05, 0.1)
    assert found.tolerances == {
        Name("k3"): Tolerance(amount=0.001),
        Name("seq_mis.ess_tokens"): Tolerance(0.2),
    }


def test_options_go_before_the_file():
    GATES.write_text(WHOLE)
    asked = {"tolerance": ["1%", "k3=2%"], "only": ["k1"], "presets": ["all"], "fail_on": ["honest_mismatch"]}
    found = required(gates=GATES, baseline=NOW, max=["step:k3=0.1"], **asked)

    assert [(str(one.name), one.limit, one.source) for one in found.limits][:2] == [
        ("step:k3", 0.1, "--max"),
        ("k1", 1, "gates.toml: max"),
    ]
    assert next(iter(found.fail_on.items())) == ("honest_mismatch", "--fail-on")
    assert (len(found.fail_on), found.baseline, found.presets) == (3, str(NOW), ["all"])
    assert (found.tolerance, found.only) == (Tolerance(0.01), [Name("k1")])
    assert (found.tolerances[Name("k3")], len(found.tolerances)) == (Tolerance(0.02), 2)
    assert found.by_step(catalogue.load()) == ("k3",)


BOUND = "[max]\nk3 = 1\n"
SLIPS = [
    # what a file says, and what is said of it after its name
    ("[maxx]\nk3 = 1\n", "maxx: no such key; the keys are max, min"),
    ("[maxx]\nk3 = 1\n", "did you mean max"),
    ("expect = 'bitwise'\n" + BOUND, "expect: no such key"),
    ("max = 3\n", "max: it must be a table: a line NAME = NUMBER for each"),
    ("[[max]]\nk3 = 1\n", "max: it must be a table"),
    ("[fail_on]\nbug = 1\n", "fail_on: it must be a text or a list"),
    ("[max]\nk3 = 'x'\n", "max \"k3='x'\": it must be a number"),
    ("[max]\nk3 = nan\n", 'max "k3=nan": it must be a number'),
    ("[max]\nk3 = true\n", 'max "k3=True": it must be a number'),
    ("[max]\n'' = 1\n", 'max "=1": "" names no number'),
    ("[max]\n'avg:k3' = 1\n", "only step: may stand"),
    ("[max]\n'a=b.k3' = 1\n", "names no number"),
    ("[max]\nk1 = 1\nkl = 2\n", 'max "kl=2": one number has two limits'),
    ("[max]\nk3 = 1\n[min]\nk3 = 2\n", 'min "k3=2": min is above max'),
    (
        "baseline = 'base.json'\ntolerance = '5 percent'\n",
        'tolerance "5 percent": "5 percent" is no tolerance',
    ),
    ("tolerance = true\n", "is no tolerance"),
    ("only = ['step:k3']\n", 'only "step:k3": "step:k3": two runs have different steps'),
    ("tolerance = ['k3=x']\n", '"x" is no tolerance'),
    (
        "fail_on = ['bugs']",
        'fail_on "bugs": it is not honest_mismatch, cannot_tell or bug; did you mean bug?',
    ),
    ("fail_on = ['healthy']", "it is not honest_mismatch, cannot_tell or bug"),
    ("", "holds no bound"),
    ("# nothing\n", "holds no bound"),
    ("[max\n", "not TOML"),
    ("x = " + "[" * 5000, "not TOML"),
]


@pytest.mark.parametrize(("text", "said"), SLIPS)
def test_a_slip_is_told_with_its_file_and_key(text, said):
    with pytest.raises(GateFileError) as caught:
        gates(text)

    assert caught.value.message.startswith("gates.toml: ")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_every_slip_is_told_at_once_a_line_each_and_no_file_is_written_over():
    GATES.write_text("results = 'a'\nfail_on = 'bugs'\n[max]\nk3 = 'x'\n[min]\n'avg:k3' = 1\n")
    ran = run("--gates", "gates.toml", "--json", "out.json")

    head, *lines = ran.stderr.partition("\nhint: ")[0].strip().splitlines()
    assert (ran.exit_code, head) == (2, "error: gates.toml: 4 mistakes")
    assert [line.split(":")[1].split()[0] for line in lines] == ["results", "fail_on", "max", "min"]
    assert not Path("out.json").exists()
    GATES.write_text(BOUND)
    assert (run("--gates", "gates.toml", "--md", "gates.toml").exit_code, GATES.read_text()) == (2, BOUND)


def test_a_file_that_cannot_be_read_is_named():
    Path("bytes").write_bytes(b"\xff\xfe")
    for path, said in {
        "gone": "cannot be read (No such file",
        "bytes": "not TOML",
        ".": "cannot be read",
    }.items():
        with pytest.raises(GateFileError) as caught:
            read(Path(path))
        assert caught.value.message.startswith(f"{path}: {said}")
        assert caught.value.hint


# ---------------------------------------------------------------- exit codes

K3 = "[max]\nk3 = "


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        (BOUND, "", 0),
        (K3 + "1e-9\n", "", 1),
        ("[max]\nk33 = 1\n", "", 2),
        (K3 + "0.002\n", "", 0),  # 2.03e-3 ± 1.5e-4
        (BOUND, "--max k3=1e-9", 1),  # options and file together
        ("baseline = '../base.json'\n", "", 0),  # beside the file
        ("baseline = 'gone.json'\n", "", 2),
        ("tolerance = '5%'\n", "", 2),
        ("baseline = 'gone.json'\n", "--baseline now.json", 0),  # the option goes before
    ],
)
def test_a_file_is_judged_with_the_options(text, options, code):
    Path("ci").mkdir()
    Path("ci/gates.toml").write_text(text)
    ran = run("--gates", "ci/gates.toml", *options.split())
    assert ran.exit_code == code, ran.output


AGAINST, BUG = "--baseline base.json ", "--fail-on bug "


@pytest.mark.parametrize(
    ("now", "options", "code"),
    [
        ((2.03e-3, 1e-4), AGAINST, 0),
        ((9e-3, 1e-4), AGAINST, 1),
        ((3e-3, 2e-3), AGAINST + "--only k3", 0),
        ((9e-3, 1e-4), AGAINST + "--tolerance 1000%", 0),
        ((9e-3, 1e-4), AGAINST + "--only f_2", 0),
        ((2.03e-3, 1e-4), AGAINST + "--presets nobody", 2),
        ((2.03e-3, 1e-4), AGAINST + "--only drift2.k3", 2),
        ((9e-3, 1e-4), AGAINST + "--only drift2.k3,k3", 1),
        ("healthy", BUG, 0),
        ("bug", BUG, 1),
        (SEVERAL, BUG, 0),
        (A_BUG, BUG, 2),
        (A_BUG, BUG + "--fail-on cannot_tell", 1),
        ("cannot_tell", BUG, 2),
        ("cannot_tell", BUG + "--fail-on cannot_tell", 1),
        (NOTHING, BUG, 2),
        ("healthy", "--fail-on fire", 2),
        ("bug", BUG + "--max nobody=1", 1),
        ("bug", AGAINST, 1),
    ],
)
def test_a_comparison_and_a_diagnosis_end_in_an_exit_code(now, options, code):
    summary = diagnosis(now) if isinstance(now, str) else having("k3", number(*now))
    NOW.write_text(summary.to_json())
    ran = run(*options.split())

    assert ran.exit_code == code, ran.output
    assert AGAINST not in options or "baseline" in ran.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read as a result"),
        ("", "the file is empty"),
        ('{"format": 7}', "result format 7, this version reads format 2"),
        ('{"format": 1}', "result format 1, this version reads format 2"),
        ('{"format": 2}', "Field required"),
        ('{"format": 2, "dump": NaN}', "dump"),
    ],
)
def test_a_baseline_that_is_none_is_refused_and_named(text, said):
    BASE.unlink() if text is None else BASE.write_text(text)
    ran = run("--baseline", "base.json", "--json", "out.json")

    assert ran.exit_code == 2
    assert ran.stderr.startswith("error: base.json:")
    assert said in ran.stderr
    assert not Path("out.json").exists()


GONE = ("--max", "k3=1")


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (NOW, ["--tolerance", "5%"], "no baseline"),
        (NOW, ["--only", "k3"], "no baseline"),
        (NOW, ["--baseline", "now.json", "--only", "step:k3"], "different steps"),
        (NOW, ["--baseline", "now.json", "--json", "now.json"], "is what is read"),
        ("gone.parquet", [*GONE, "--junit", "no/where.xml"], "does not exist"),
        ("gone.parquet", [*GONE, "--junit", "same", "--json", "same"], "one file"),
        ("gone.parquet", [*GONE, "--junit", "-", "--md", "-"], "stdout"),
        (
            "gone.parquet",
            ["--gates", "gates.toml"],
            'error: gates.toml: min: unknown preset "token_iss"',
        ),
        ("gone.parquet", ["--gates", "gates.toml"], 'did you mean "token_is"'),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_read(source, options, said):
    GATES.write_text("[min]\ntoken_iss.ess_tokens = 0\n")
    ran = run(*options, source=source)

    assert ran.exit_code == 2
    assert said in ran.stderr


def test_bounds_over_steps_use_numbers_by_step():
    found = required(max=["step:tv=1", "k3=1"], min=["step:token_is.ess_tokens=0.5"])
    assert found.by_step(catalogue.load()) == ("tv", "token_is.ess_tokens")


def test_a_bug_that_could_not_be_looked_for_is_no_pass(tmp_path):
    """Columns that are copies, and a dump of 64 tokens."""
    draw = np.random.default_rng(0)
    logs, near = -draw.exponential(1, (20, 16)) - 0.1, draw.normal(0, 0.01, (20, 16))
    for name, rows, old in (("copies", 20, logs), ("few", 4, logs + near)):
        columns = {"rollout_log_probs": logs[:rows].tolist(), "old_log_probs": old[:rows].tolist()}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    for name, why in (("copies", "could not be tested"), ("few", "needs 16 sequences, and there are 4")):
        ran = run("--fail-on", "bug", "--max", "k3=1", source=tmp_path / f"{name}.parquet")
        assert ran.exit_code == 2, ran.output
        assert why in " ".join(ran.stdout.split())


def test_the_python_function_takes_one_diagnosis_or_several():
    found = api.gate(api.Report(diagnosis("bug")), fail_on="bug")

    assert (found.passed, [one.diagnosis for one in found.gates]) == (False, ["bug"])
    assert len(api.gate(found, fail_on=["bug", "cannot_tell"], max={"kl": 1}).gates) == 3
    assert api.gate(api.Report(diagnosis("healthy")), fail_on="bug").passed


def test_the_python_function_takes_and_refuses_what_the_command_does():
    report = api.Report(having("k3", number(9e-3, 1e-4)))
    for how in ({"tolerance": "1000%"}, {"tolerance": ["k3=1"], "only": "k3,k1"}, {"only": ["f_2"]}):
        assert api.gate(report, baseline="base.json", **how).passed, how
    found = api.gate(report, baseline="base.json", presets="token_is")
    assert (found.passed, any(one.name == "token_is.ess_tokens" for one in found.gates)) == (False, True)
    for how, *options in (
        ({"max": {"avg:k3": 1}}, "--max", "avg:k3=1"),
        ({"tolerance": "much", "baseline": "base.json"}, "--tolerance", "much", "--baseline", "base.json"),
        ({"only": "step:k3", "baseline": "base.json"}, "--only", "step:k3", "--baseline", "base.json"),
        ({"tolerance": "5%"}, "--tolerance", "5%"),
        ({"fail_on": "bugs"}, "--fail-on", "bugs"),
        ({},),
    ):
        with pytest.raises(UsageError) as caught:
            api.gate(report, **how)
        assert " ".join(f"{caught.value.message} {caught.value.hint}".split()) in " ".join(
            run(*options).stderr.replace("error: ", "").replace("\nhint: ", " ").split()
        )


# ---------------------------------------------------------------- what is written


def verdict(**changes):
    return GateVerdict(
        **({"name": "k3", "bound": "max", "limit": 0.002, "value": 0.001, "passed": True} | changes)
    )


STRADDLES = {"open": True, "reason": "holds values on both sides"}
FAILED = verdict(value=0.5, passed=False, reason="0.5 is not ≤ 0.002")
SILENT = verdict(name="drift2.k3", value=None, passed=None, reason="missing column current_log_probs")
OPEN = verdict(name="f_2", value=0.003, interval=(0.001, 0.005), **STRADDLES)
NEAR = verdict(name="f_5", value=0.001, interval=(0.0005, 0.005), **STRADDLES)
FINE = verdict(name="pearson")
ALL = [FAILED, SILENT, OPEN, NEAR, FINE]
BAD = ("--max", "k3=1e-9", "--max", "drift2.k3=1", "--max", "tv=1", "--max", "f_2=1")


@pytest.mark.parametrize("width", [80, 120])
def test_the_verdict_table_fits_a_terminal_without_colour(width):
    more = ("--min", "seq_mis.sequences_dropped=0.2", "--baseline", "now.json")
    out = run(*BAD, *more, COLUMNS=str(width), NO_COLOR="1").stdout

    assert max(map(len, out.splitlines())) <= width
    text = " ".join(out.split())
    for said in ("Failed:", "0.0020 [0.0019, 0.0022]", "seq_mis.sequences_dropped ≥ 20%"):
        assert said in text
    assert "\x1b" not in text
    assert "Left out" not in text


def test_verdicts_other_than_passed_are_explained_failures_first():
    found = answer(make_summary(gates=ALL[::-1]))
    (table,) = found.tables

    labels = ["Failed", "Could not say", "Open", "Bug?"]
    assert [fact.label for fact in found.facts] == labels
    assert [row[0] for row in table.rows][:3] == ["✓ passed", "~ open", "~ open"]
    assert "open: the 95% interval" in table.notes[0]


def test_the_markdown_of_many_bounds_has_60_lines_with_the_failures_first_and_the_page_has_all():
    many = [verdict(name=f"n{at}") for at in range(60)] + [FAILED] * 15 + [SILENT] * 15 + [OPEN] * 9
    summary = make_summary(gates=many, not_compared="Not compared: k1.")
    text = render_markdown(summary)

    assert text.count("\n") <= 60
    assert text.count("| ✗ failed |") == 15
    assert "83 more bounds: --json and --junit have all." in text
    assert "23 more such bounds: --json and --junit have all." in text
    assert render_html(summary).count("n59") > 0
    assert len(next(iter(JUnitXml.fromstring(render_junit(summary).encode())))) == len(many)


FALLS_SHORT = verdict(
    name="ess_tokens",
    bound="min",
    limit=0.99,
    unit="fraction",
    value=0.96,
    interval=(0.9, 0.98),
    passed=False,
    reason="96% is not ≥ 99%; the whole 95% interval lies beyond it, from 98%",
)


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([FINE], "the bound holds"),
        ([FINE, FINE], "all 2 bounds hold"),
        ([FINE, OPEN], "1 of 2 bounds holds, 1 is open"),
        ([FINE, FINE, OPEN, NEAR], "2 of 4 bounds hold, 2 are open"),
        ([FALLS_SHORT], "ess_tokens is 96% [90%, 98%], must be ≥ 99%"),
        (
            [FINE, FINE, FINE, OPEN, NEAR, FALLS_SHORT],
            "ess_tokens is 96% [90%, 98%], must be ≥ 99%. Of the others 3 hold, 2 are open",
        ),
        (
            [FALLS_SHORT, FAILED, SILENT],
            "2 of 3 bounds; the first: ess_tokens is 96% [90%, 98%], must be ≥ 99%. Of the others 1 could "
            "not be judged",
        ),
        ([SILENT], "drift2.k3: missing column current_log_probs"),
        ([SILENT, FINE], "drift2.k3: missing column current_log_probs. Of the others 1 holds"),
        (
            [verdict(name="step:k3", value=0.5, passed=False, where="step 7")],
            "step:k3 is 0.50 at step 7, must be ≤ 0.002",
        ),
        (
            [verdict(bound="within", centre=1.0, value=2.0, passed=False, baseline=1.0, tolerance="10%")],
            "k3 is 2, must be within baseline 1 ± 10%",
        ),
    ],
)
def test_the_headline_is_true_and_says_what_failed(verdicts, said):
    assert answer(make_summary(gates=verdicts)).sentence == said


def test_the_headline_of_a_diagnosis_says_what_it_is_and_may_not_be():
    (one,), (two,) = (judge_diagnosis(diagnosis("bug"), said) for said in ("bug", "cannot_tell"))
    assert answer(make_summary(gates=[one])).sentence == "the diagnosis is bug, must not be bug"
    assert (
        answer(make_summary(gates=[two])).sentence == "the diagnosis is bug, must not be cannot tell or worse"
    )


def test_every_output_has_the_headline_and_marks_what_is_open():
    bounds = [FINE, OPEN, FALLS_SHORT]
    said = "ess_tokens is 96% [90%, 98%], must be ≥ 99%"
    summary = make_summary(gates=bounds)
    drawn = " ".join(terminal(summary).split())
    assert f"Failed: {said}. Of the others 1 holds, 1 is open" in drawn
    assert "~ open f_2 ≤ 0.002 0.0030 [0.0010, 0.0050]" in drawn
    text = render_markdown(summary)  # the job summary, too
    assert f"❌ **Failed: {said}. Of the others" in text
    assert r"| \~ open | f_2" in text
    page = render_html(summary)
    heading = re.sub(r"<[^>]*>", "", re.search(r"<h1.*?</h1>", page, re.DOTALL)[0])
    assert heading == f"Failed: {said}. Of the others 1 holds, 1 is open"
    assert "~ open" in page
    xml = render_junit(summary)
    assert f'message="{said}; the whole 95% interval lies beyond it, from 98%"' in xml
    assert "~ open: f_2: holds values on both sides" in xml
    assert [f"value: {one}" in xml for one in ("96%", "0.96")] == [True, False]
    for drawing in (drawn, text, page, xml):
        assert "✓ open" not in drawing


def test_shares_are_written_as_percentages_wherever_analyze_does():
    found = run(
        "--min", "ess_tokens=0.99999", "--max", "f_2=1e-9", "--min", "ess_sequences=0.5", "--max", "k3=1"
    )
    text = " ".join(found.stdout.split())
    assert "ess_tokens ≥ 99.999%" in text
    assert re.search(r"ess_tokens is [\d.]+% \[[\d.]+%, [\d.]+%\], must be ≥ 99\.999%", text)
    assert all(said in text for said in ("f_2 ≤ 1e-7%", "ess_sequences ≥ 50%", "k3 ≤ 1 "))


def test_a_tolerance_beside_a_percentage_says_of_what_it_is():
    less = {"name": "ess_tokens", "bound": "min", "unit": "fraction", "baseline": 0.9}
    assert holds(verdict(tolerance="10%", **less)) == "ess_tokens ≥ baseline 90% − 10% of it"
    assert (
        holds(verdict(tolerance="10% + 0.02", **less)) == "ess_tokens ≥ baseline 90% − 10% of it + 2 points"
    )
    worse = compare(
        make_summary(metrics={"ess_tokens": Number(value=0.5, unit="fraction", interval=(0.48, 0.52))}),
        make_summary(metrics={"ess_tokens": Number(value=0.9, unit="fraction", interval=(0.88, 0.92))}),
        only=["ess_tokens"],
    )[0]
    assert worse.reason.startswith("worse by 40 points [37, 43], 9 points allowed; the whole 95% interval")
    assert (worse.unit, worse.passed) == ("fraction", False)


BASED = {"baseline": 0.5, "tolerance": "10%"}


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (verdict(), "k3 ≤ 0.002"),
        (verdict(bound="min", limit=0.5), "k3 ≥ 0.5"),
        (
            verdict(name="step:k3", where="step 12"),
            "step:k3 ≤ 0.002, worst at step 12",
        ),
        (verdict(**BASED), "k3 ≤ baseline 0.5 + 10%"),
        (verdict(bound="min", **BASED), "k3 ≥ baseline 0.5 − 10%"),
        (verdict(bound="within", centre=0.5, **BASED), "k3 baseline 0.5 ± 10%"),
        (verdict(bound="within", centre=1.0, **BASED), "k3 no farther from 1 than baseline 0.5 by 10%"),
        (verdict(passed=None, value=None, tolerance="10%"), "k3 ≤ baseline + 10%"),
    ],
)
def test_each_requirement_is_one_line(one, said):
    assert holds(one) == said
    assert bound(one) in said


def test_a_value_lies_beyond_its_bound_whatever_its_interval_allows():
    assert [beyond(verdict(value=value)) for value in (0.001, 0.002, 0.003, None)] == [
        False,
        False,
        True,
        False,
    ]
    assert beyond(verdict(bound="min", value=0.001))
    away = {"bound": "within", "centre": 1.0, "limit": 0.1}
    assert [beyond(verdict(value=value, **away)) for value in (0.85, 1.05)] == [True, False]


def test_junit_lists_every_bound_as_a_test():
    (suite,) = JUnitXml.fromstring(render_junit(make_summary(gates=ALL)).encode())

    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (5, 1, 1, 0)
    assert suite.time == make_summary().run.seconds["total"]
    assert [(case.name.split()[0], *map(type, case.result)) for case in suite] == [
        ("k3", Failure),
        ("drift2.k3", Error),
        ("f_2",),
        ("f_5",),
        ("pearson",),
    ]
    failure = next(iter(suite)).result[0]
    assert failure.message == "k3 is 0.50, must be ≤ 0.002"
    assert "value: 0.50" in failure.text
    assert "95% interval: none" in failure.text


def test_junit_holds_whatever_a_name_says_and_is_xml():
    nasty = 'a < b && "c" ]]> \x00\x1b[31m \ud7ff\ufffe é\n<!-- -->'
    xml = render_junit(make_summary(gates=[verdict(passed=False, reason=nasty)]))

    (case,) = next(iter(JUnitXml.fromstring(xml.encode())))
    assert r'a < b && "c" ]]> \x00\x1b[31m' in case.result[0].text
    assert ElementTree.fromstring(xml.encode()).tag == "testsuites"


def test_all_forms_are_written_say_who_asked_and_are_drawn_again():
    GATES.write_text("[max]\nk1 = 1\n")
    to = ("--json", "out.json", "-o", "gate.html", "--md", "out.md", "--junit", "out.xml")
    ran = run(*BAD, "--gates", "gates.toml", *to)

    assert ran.exit_code == 1
    first, second, *_, file = loads(Path("out.json").read_text(), "out.json").gates
    assert [(one.name, one.passed, one.source) for one in (first, second)] == [
        ("k3", False, "--max"),
        ("drift2.k3", None, "--max"),
    ]
    assert file.source == "gates.toml: max"
    assert "missing column" in Path("gate.html").read_text()
    assert CliRunner().invoke(app, ["report", "out.json", "-o", "again.html"]).exit_code == 0
    assert "drift2.k3" in Path("again.html").read_text()
    text = Path("out.md").read_text(encoding="utf-8")
    assert text.index("# offpol-diag gate") < text.index("❌ **Failed: ")
    assert "Of the others 2 hold" in text
    assert "| ✗ failed | k3 ≤ 1e-9 |" in text
    for xml in (Path("out.xml").read_text(encoding="utf-8"), run(*BAD, "--junit", "-").stdout):
        (suite,) = JUnitXml.fromstring(xml.encode())
        assert (suite.failures, suite.errors) == (1, 2)  # this result has no tv


def test_every_output_shows_the_diagnosis():
    summary = diagnosis("bug")
    summary.gates = [*judge_diagnosis(summary, "bug"), *judge_diagnosis(summary, "cannot_tell")]

    first, _ = next(iter(JUnitXml.fromstring(render_junit(summary).encode())))
    assert first.name == "diagnosis not bug"
    assert "fix: Drop the first" in first.result[0].message
    assert "| ✗ failed | diagnosis not bug | bug |" in render_markdown(summary)
    page = render_html(summary)
    assert "not cannot tell or worse" in page
    assert "fix: Drop the first" in page


# ---------------------------------------------------------------- GitHub


def test_a_job_summary_is_appended_to():
    Path("summary.md").write_text("before\n")
    run(*GONE, GITHUB_STEP_SUMMARY="summary.md")
    run(*BAD, "--md", "own.md", GITHUB_STEP_SUMMARY="summary.md")

    text = Path("summary.md").read_text(encoding="utf-8")
    assert text.startswith("before\n\n# offpol-diag gate\n")
    assert text.count("# offpol-diag gate") == 2
    assert text.endswith(Path("own.md").read_text(encoding="utf-8"))
    ran = run(*GONE, GITHUB_STEP_SUMMARY="no/such/place.md")  # which changes no verdict
    assert ran.exit_code == 0
    assert "GITHUB_STEP_SUMMARY: no/such/place.md cannot be written" in ran.stderr
