"""docs/ci.md: every command line on it is run, its workflow files and its gate file are the ones used."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from junitparser import JUnitXml
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.cli.settings import sample
from offpol_diag.gate import Baseline, Bound, FailOn
from offpol_diag.metrics import WATCHED_GAP
from offpol_diag.result import load

PAGE = Path(__file__).parents[1] / "docs" / "ci.md"
RUN = CliRunner()


def fenced(language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def workflow(name):
    (text,) = [text for text in fenced("yaml") if text.startswith(f"# {name}")]
    return yaml.safe_load(text)


def commands():
    """List every command line of the page, those of the workflow files among them."""
    shell = [line for text in fenced("sh") for line in text.splitlines()]
    steps = workflow(".github/workflows/mismatch.yml")["jobs"]["gate"]["steps"]
    lines = [*shell, *(step["run"] for step in steps if "run" in step)]
    lines += workflow(".gitlab-ci.yml")["mismatch"]["script"]
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words[:1] == ["offpol-diag"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the sample, the page's gate file, and a job summary."""
    path = tmp_path_factory.mktemp("ci")
    shutil.copy(sample(), path / "sample.parquet")
    (path / "dumps").mkdir()
    shutil.copy(sample(), path / "dumps")
    (path / "gates.toml").write_text(fenced("toml")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("OFFPOL_DIAG_WORKERS", "1")
        patch.setenv("GITHUB_ACTIONS", "true")
        patch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
        yield path


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_line_of_the_page_passes_on_the_sample(folder, words):
    """In the order of the page: the baseline is made by one of them."""
    ran = RUN.invoke(app, words[1:])

    assert ran.exit_code == 0, ran.output


def test_the_artifacts_of_the_workflows_are_there(folder):
    steps = workflow(".github/workflows/mismatch.yml")["jobs"]["gate"]["steps"]
    upload = next(step for step in steps if "upload-artifact" in step.get("uses", ""))
    gitlab = workflow(".gitlab-ci.yml")["mismatch"]["artifacts"]

    assert upload["if"] == "always()"
    assert gitlab["when"] == "always"
    for name in [*upload["with"]["path"].split(), *gitlab["paths"], gitlab["reports"]["junit"]]:
        assert (folder / name).stat().st_size > 0
    assert sum(suite.tests for suite in JUnitXml.fromfile(str(folder / "gate.xml"))) == 2


def test_the_result_holds_what_the_gate_file_asks(folder):
    gates = load(folder / "gates.json").gates

    files = {f"gates.toml: [[bound]] {i}" for i in range(1, 5)}
    assert {one.source for one in gates} == {*files, "gates.toml: [diagnosis]", "base.json"}


def test_the_job_summary_has_a_report_of_every_gate(folder):
    gated = sum(words[1] == "gate" for words in commands())

    assert (folder / "summary.md").read_text(encoding="utf-8").count("# offpol-diag gate\n") == gated


def test_the_page_shows_every_key_of_a_gate_file():
    table = tomllib.loads(fenced("toml")[0])
    used = {key for row in table["bound"] for key in row}

    assert used == set(Bound.model_fields)
    assert set(table["diagnosis"]) == set(FailOn.model_fields)
    shown = set(table["baseline"]) | ({"only"} if "# only = " in fenced("toml")[0] else set())
    assert shown == set(Baseline.model_fields)


def test_the_page_names_what_is_watched():
    text = PAGE.read_text(encoding="utf-8")

    for name in WATCHED_GAP:
        assert name in text or name.startswith("ess_")
