"""README.md and docs/guides/: what they tell a user to run is run, and ends as they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.presets import catalogue

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guides" / "my-run-collapsed.md"
FAILS = ["gate sample_data/collapse.parquet --max step:k3=0.015"]
"""Commands whose exit code is 1."""


def fenced(page, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(page):
    lines = (line for text in fenced(page, "sh") for line in text.splitlines())
    return [line.removeprefix("offpol-diag ") for line in lines if line.startswith("offpol-diag ")]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Work in a folder that has the samples, as a clone has them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFPOL_DIAG_WORKERS", "1")
    Path("sample_data").symlink_to(ROOT / "sample_data")


@pytest.mark.parametrize("command", commands(GUIDE))
def test_a_command_of_the_guide_ends_as_it_says(clone, command):
    ran = CliRunner().invoke(app, shlex.split(command, comments=True))
    assert ran.exit_code == (1 if command in FAILS else 0), ran.output


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in commands(page)}))
def test_a_command_of_a_page_has_options_and_presets_that_there_are(line):
    name, *rest = shlex.split(line, comments=True)
    given = get_command(app).commands[name].make_context(name, rest).params
    named = given.get("presets") or given.get("preset") or given.get("name")
    assert catalogue.load().resolve(named) if named else given


def test_the_guide_names_the_page_that_its_first_command_writes(clone):
    (first, *_) = commands(GUIDE)
    CliRunner().invoke(app, shlex.split(first))
    assert Path("offpol-diag-collapse.html").exists()
    assert "`offpol-diag-collapse.html`" in GUIDE.read_text(encoding="utf-8")


def test_without_the_lag_the_guides_sample_names_no_cause(clone):
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table("sample_data/collapse.parquet").drop_columns(["policy_lag"]), "d.parquet")
    found = offpol_diag.analyze("d.parquet", presets=(), progress=False).diagnosis
    assert (found.verdict, found.candidates[0].id) == ("cannot_tell", "stale")
    assert found.decide.startswith("Write policy_lag")


def test_the_readmes_writer_writes_a_dump_that_is_analysed(clone):
    (block,) = fenced(ROOT / "README.md", "python")
    draw = torch.Generator().manual_seed(0)
    rollout = -torch.rand((32, 16), generator=draw) - 0.1
    names = {
        "step": 4,
        "rollout": rollout,
        "old": rollout + 0.01 * torch.randn((32, 16), generator=draw),
        "mask": torch.ones(32, 16),
        "ids": torch.randint(0, 99, (32, 16), generator=draw),
        "prompt_id": [f"p{i // 4}" for i in range(32)],
        "sampled_with": 3,
        "rewards": [float(i % 2) for i in range(32)],
    }
    exec(compile(block, "README.md", "exec"), names)

    found = offpol_diag.analyze("dumps", presets=(), progress=False)
    assert (found.dump.sequences, found.dump.groups) == (32, 8)
    assert "policy_lag" in found.dump.columns
    assert found.diagnosis.verdict != "bug"
