"""docs/ci.md: every command line on it is run, its workflow files and its gate file are the ones used."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from junitparser import JUnitXml
from typer.testing import CliRunner

from offpol_diag.cli import SAMPLE as DUMP
from offpol_diag.cli import app
from offpol_diag.gate import Gates
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
    shutil.copy(DUMP, path / "sample.parquet")
    (path / "dumps").mkdir()
    shutil.copy(DUMP, path / "dumps")
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

    assert {one.name for one in gates} >= {"diagnosis", "k3", "step:k3", "token_is.ess_tokens", "token_is.k3"}
    assert any("no worse than" in one.must for one in gates)


def test_the_job_summary_has_a_report_of_every_gate(folder):
    gated = sum(words[1] == "gate" for words in commands())

    assert (folder / "summary.md").read_text(encoding="utf-8").count("# offpol-diag gate\n") == gated


def test_the_page_shows_every_key_of_a_gate_file():
    assert set(tomllib.loads(fenced("toml")[0])) == set(Gates.model_fields)


GH = """#!/bin/sh
echo "$@" >> calls
case "$*" in *--paginate*) cat ids;; *) cp comment.md posted.md;; esac
"""
"""A stand-in for GitHub's client: keeps what it is called with, and lists the comments of `ids`."""


@pytest.mark.parametrize(
    ("ids", "call"),
    [("", "-X POST repos/a/b/issues/7/comments"), ("5\n9\n", "-X PATCH repos/a/b/issues/comments/9")],
)
def test_the_shell_of_the_job_gates_and_keeps_one_comment(folder, ids, call):
    """The steps `gate` and `comment` as they stand on the page, with dumps that fail and that pass."""
    steps = {
        one["name"]: one["run"]
        for one in workflow(".github/workflows/mismatch.yml")["jobs"]["gate"]["steps"]
        if "name" in one
    }
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (
        ("gh", GH),
        ("offpol-diag", f'#!/bin/sh\nexec {sys.executable} -m offpol_diag "$@"\n'),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "ids").write_text(ids)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(PAGE.parents[1])}
    env |= {"GITHUB_REPOSITORY": "a/b", "ISSUE": "7"}
    for limit, code in (("k3=1e-9", 1), ("k3=0.015", 0)):
        (folder / "calls").unlink(missing_ok=True)
        gate = steps["gate"].replace("k3=0.015", limit)
        ran = [
            subprocess.run(["bash", "-e", "-c", step], cwd=folder, env=env)
            for step in (gate, steps["comment"])
        ]

        assert [one.returncode for one in ran] == [code, 0]
        assert (folder / "calls").read_text().splitlines()[-1] == f"api {call} -F body=@comment.md"
        posted = (folder / "posted.md").read_text(encoding="utf-8")
        assert posted.startswith("<!-- offpol-diag gate -->\n# offpol-diag gate\n")
        assert ("Failed: k3" in posted) is bool(code)


def test_the_page_names_what_is_watched():
    text = PAGE.read_text(encoding="utf-8")

    for name in WATCHED_GAP:
        assert name in text or name.startswith("ess_")
