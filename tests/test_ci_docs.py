"""docs/ci.md: every command line on it is run, its workflow and its gate file are the ones used."""

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
TEXT = PAGE.read_text(encoding="utf-8")
FENCED = {
    name: re.findall(rf"^```{name}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for name in ("sh", "toml", "yaml")
}
STEPS = yaml.safe_load(FENCED["yaml"][0])["jobs"]["gate"]["steps"]
LINES = [*"".join(FENCED["sh"]).splitlines(), *(step["run"] for step in STEPS if step.get("name") == "gate")]
GH = """#!/bin/sh
echo "$@" >> calls
case "$*" in *--paginate*) cat ids;; *) cp comment.md posted.md;; esac
"""
"""A stand-in for GitHub's client: keeps what it is called with, and lists the comments of `ids`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the sample, the page's gate file, and a job summary."""
    path = tmp_path_factory.mktemp("ci")
    (path / "dumps").mkdir()
    for place in ("sample.parquet", "dumps/sample.parquet"):
        shutil.copy(DUMP, path / place)
    (path / "gates.toml").write_text(FENCED["toml"][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
        yield path


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_of_the_page_passes_on_the_sample(folder, line):
    """In the order of the page: the baseline is made by one of them."""
    ran = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
    assert ran.exit_code == 0, ran.output


def test_what_the_commands_write_is_there_and_holds_what_the_gate_file_asks(folder):
    upload = STEPS[-1]
    assert (upload["if"], "upload-artifact" in upload["uses"]) == ("always()", True)
    assert all((folder / name).stat().st_size > 0 for name in upload["with"]["path"].split())
    assert sum(suite.tests for suite in JUnitXml.fromfile(str(folder / "gate.xml"))) == 2
    gates = load(folder / "gates.json").gates
    assert {one.name for one in gates} >= {"diagnosis", "k3", "step:k3", "token_is.ess_tokens", "token_is.k3"}
    assert any("no worse than" in one.must for one in gates)
    reports = (folder / "summary.md").read_text(encoding="utf-8").count("# offpol-diag gate\n")
    assert reports == sum(line.startswith("offpol-diag gate") for line in LINES)


def test_the_page_shows_every_key_of_a_gate_file_and_names_what_is_watched():
    assert set(tomllib.loads(FENCED["toml"][0])) == set(Gates.model_fields)
    assert all(name in TEXT for name in WATCHED_GAP if not name.startswith("ess_"))


@pytest.mark.parametrize(
    ("ids", "call"),
    [("", "-X POST repos/a/b/issues/7/comments"), ("5\n9\n", "-X PATCH repos/a/b/issues/comments/9")],
)
def test_the_shell_of_the_job_gates_and_keeps_one_comment(folder, ids, call):
    """The steps `gate` and `comment` as they stand on the page, with dumps that fail and that pass."""
    steps, tools = {one["name"]: one["run"] for one in STEPS if "name" in one}, folder / "tools"
    tools.mkdir(exist_ok=True)
    command = f'#!/bin/sh\nexec {sys.executable} -m offpol_diag "$@"\n'
    for name, text in (("gh", GH), ("offpol-diag", command)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "ids").write_text(ids)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(PAGE.parents[1])}
    env |= {"GITHUB_REPOSITORY": "a/b", "ISSUE": "7"}
    for limit, code in (("k3=1e-9", 1), ("k3=0.015", 0)):
        (folder / "calls").unlink(missing_ok=True)
        ran = [
            subprocess.run(["bash", "-e", "-c", step], cwd=folder, env=env).returncode
            for step in (steps["gate"].replace("k3=0.015", limit), steps["comment"])
        ]
        assert ran == [code, 0]
        assert (folder / "calls").read_text().splitlines()[-1] == f"api {call} -F body=@comment.md"
        posted = (folder / "posted.md").read_text(encoding="utf-8")
        assert posted.startswith("<!-- offpol-diag gate -->\n# offpol-diag gate\n")
        assert ("Failed: k3" in posted) is bool(code)
