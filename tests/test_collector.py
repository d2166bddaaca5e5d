"""The collector of garbage: out of the way of a command, and of nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offpol_diag.cli import collector, defaults

RUN = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count(), sum(looked)))
looked = []
sys.argv = ["offpol-diag", *sys.argv[1:]]
from offpol_diag.__main__ import main
gc.callbacks.append(lambda phase, _: looked.append(phase == "start"))
main()
"""
"""The command line; what was registered first is called last, when all is done."""

IMPORT = """
import gc
before = gc.get_threshold()
import offpol_diag.__main__, offpol_diag.cli
print(gc.get_threshold() == before, gc.get_freeze_count())
"""


def said(code: str, *arguments: str, folder: Path | None = None) -> list[str]:
    """The last line's words."""
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=folder)
    return ran.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("command", [("--version",), ("analyze", "no-such-file.parquet")])
def test_a_command_looks_for_garbage_seldom_and_at_its_end_at_nothing(command: tuple[str, ...]) -> None:
    threshold, frozen, _ = map(int, said(RUN, *command))

    assert threshold == collector.SELDOM
    assert frozen > 1000


def test_a_small_analysis_is_done_before_it_looks_at_all(tmp_path: Path) -> None:
    sample = str(defaults.sample())

    assert said(RUN, "analyze", sample, "-q", folder=tmp_path)[2] == "0"


def test_a_program_that_imports_us_keeps_its_own_settings() -> None:
    assert said(IMPORT) == ["True", "0"]
