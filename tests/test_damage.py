"""Damaged files of every form: read, or refused by one error; nothing half-written, below 2 GB."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("seed", "inputs"), [(0, 1000), *(pytest.param(seed, 4000, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_damaged_file_is_read_or_refused(seed: int, inputs: int) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "files", f"--seed={seed}", f"--inputs={inputs}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)
    assert found["bad"] == {}
    assert found["inputs"] == inputs
    assert inputs / 4 < found["refused"] < inputs * 3 / 4, "mutants are neither all harmless nor all broken"
    assert found["peak"] < 2 << 30
