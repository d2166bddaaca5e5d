"""The process of a command: nothing that long lives need is in its way, and other programs are left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offpol_diag.cli import defaults, exits

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
import gc, os
before = gc.get_threshold(), dict(os.environ)
import offpol_diag.__main__, offpol_diag.cli
print((gc.get_threshold(), dict(os.environ)) == before, gc.get_freeze_count())
"""

THREADS = """
import atexit, sys
from threadpoolctl import threadpool_info
numpys = lambda: {one["num_threads"] for one in threadpool_info() if one["internal_api"] == "openblas"}
atexit.register(lambda: print(*numpys()))
sys.argv = ["offpol-diag", *sys.argv[1:]]
from offpol_diag.__main__ import main
main()
"""


def said(code: str, *arguments: str, folder: Path | None = None, **env: str) -> list[str]:
    """The last line's words."""
    limits = (exits.THREADS, "OMP_NUM_THREADS")
    given = {name: value for name, value in os.environ.items() if name not in limits}
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**given, **env},
    )
    return ran.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("command", [("--version",), ("analyze", "no-such-file.parquet")])
def test_a_command_looks_for_garbage_seldom_and_at_its_end_at_nothing(command: tuple[str, ...]) -> None:
    threshold, frozen, _ = map(int, said(RUN, *command))

    assert threshold == exits.SELDOM
    assert frozen > 1000


def test_a_small_analysis_is_done_before_garbage_is_looked_for_at_all(tmp_path: Path) -> None:
    sample = str(defaults.sample())

    assert said(RUN, "analyze", sample, "-q", folder=tmp_path)[2] == "0"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="ONE CORE HERE: threads of products were not tested")
def test_products_take_one_thread_unless_the_user_says_otherwise() -> None:
    command = ("analyze", "no-such-file.parquet")

    assert said(THREADS, *command) == ["1"]
    assert said(THREADS, *command, **{exits.THREADS: "2"}) == ["2"]


def test_a_program_that_imports_us_keeps_its_own_settings() -> None:
    assert said(IMPORT) == ["True", "0"]


def test_a_signal_leaves_no_temporary_dump(tmp_path: Path) -> None:
    """A conversion that is under way is terminated."""
    source, place = tmp_path / "a.jsonl", tmp_path / "temporary"
    place.mkdir()
    row = {"rollout_log_probs": [-0.5] * 20, "old_log_probs": [-0.5] * 20}
    source.write_text((json.dumps(row) + "\n") * 20_000)
    command = [sys.executable, "-m", "offpol_diag", "analyze", str(source), "--no-html", "-q"]
    environment = os.environ | {"TMPDIR": str(place)}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        while not list(place.iterdir()):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 143
    assert list(place.iterdir()) == []
