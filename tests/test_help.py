"""`--help` is instant: it imports nothing that a command needs, and neither does the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from factory import make_summary
from typer.testing import CliRunner

from offpol_diag.cli import app

HEAVY = frozenset({"torch", "polars", "pyarrow", "numpy", "jinja2", "scipy", "ray"})


def imported(*command):
    """Return the top-level modules that a Python command imports."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True
    )
    names = (
        line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")
    )
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("command", ["--help", "analyze --help", "gate --help", "--version"])
def test_nothing_heavy_is_imported(command):
    """Not even pydantic, but where typer itself reads a command's options with it."""
    names = imported("-m", "offpol_diag", *command.split())

    assert "offpol_diag" in names
    assert names & HEAVY == set()
    assert "pydantic" not in names or " " in command


def test_the_package_and_its_writer_import_what_they_need():
    assert imported("-c", "import offpol_diag") & (HEAVY | {"pydantic"}) == set()
    assert imported("-c", "from offpol_diag import DumpWriter") & HEAVY == {"pyarrow", "numpy"}
    for command in (("presets",), ("presets", "seq_mis")):
        assert imported("-m", "offpol_diag", *command) & {"torch", "polars", "pyarrow"} == set()


@pytest.mark.parametrize(
    ("command", "drawing"),
    [
        (("report", "r.json", "--md", "r.md"), {"jinja2", "numpy"}),
        (("gate", "r.json", "--max", "k3=9"), set()),
        (("gate", "r.json", "--baseline", "r.json", "--md", "-", "--junit", "g.xml"), set()),
    ],
)
def test_a_result_is_drawn_and_judged_without_what_reads_dumps(command, drawing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text(make_summary().to_json(), encoding="utf-8")

    assert imported("-m", "offpol_diag", *command) & HEAVY == drawing


def test_a_paragraph_of_a_commands_help_fills_its_lines():
    shown = CliRunner().invoke(app, ["analyze", "-h"])

    assert "With --json - or --md -" in " ".join(shown.stdout.split())
    assert "With --json -\n" not in "\n".join(line.strip() for line in shown.stdout.splitlines())


def test_the_package_exports_what_it_declares():
    code = """
import offpol_diag.sweep
from offpol_diag import sweep
assert callable(sweep), sweep
assert offpol_diag.__all__ == sorted(offpol_diag.__all__)
from offpol_diag import *
import offpol_diag.sweep
assert callable(sweep) and callable(offpol_diag.sweep), sweep
assert DumpWriter.__module__ == "offpol_diag.dump.writer"
assert Result.__module__ == "offpol_diag.result.whole"
assert __version__
try:
    offpol_diag.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise SystemExit("no AttributeError")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
