"""Damaged dumps: read, or refused by one error; nothing half-written, below 2 GB."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.mutants import answer, problems

SLOW = [pytest.param(seed, 4000, marks=pytest.mark.slow) for seed in (1, 2)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is set as on Linux")
@pytest.mark.parametrize(("seed", "inputs"), [(0, 1000), *SLOW])
def test_a_damaged_input_is_read_or_refused(seed: int, inputs: int) -> None:
    command = [sys.executable, "-m", "tests.mutants", str(seed), str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bad"] == {}
    assert inputs / 4 < found["refused"] < inputs * 3 / 4, "mutants are neither all harmless nor all broken"
    assert found["peak"] < 2 << 30


def test_a_bad_answer_is_told() -> None:
    error, x = "error: a\n\nhint: b\n", {"x": b""}
    for code, said, changed in [(0, "", {}), (0, "", x), (2, error, {}), (2, "a\n" + error, {})]:
        assert [*problems(code, said, changed)] == []
    wrong = [(1, "", {}), (2, "", {}), (2, "error: a\n", {}), (2, error + error, {}), (2, error, x)]
    wrong += [(0, "Traceback (most recent call last)\n", {}), (0, "\x1b[2J", {}), (0, "", {".x.tmp": b""})]
    for code, said, changed in wrong:
        assert [*problems(code, said, changed)], (code, said)
    assert answer(("read", "a.parquet"), {"a.parquet": b"x"})[0] == 2
