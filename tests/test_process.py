"""Check that a command's process has its own settings, and that other programs are left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from offpol_diag import files

IMPORT = """
import gc, os
before = gc.get_threshold(), dict(os.environ)
import offpol_diag.__main__, offpol_diag.cli
print((gc.get_threshold(), dict(os.environ)) == before, gc.get_freeze_count())
"""


def test_a_program_that_imports_us_keeps_its_own_settings() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "0"]


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


def test_a_forked_child_leaves_the_temporary_folder_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with files.TemporaryFolder() as folder:
        if (child := os.fork()) == 0:
            folder.__exit__()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not folder.path.exists()
