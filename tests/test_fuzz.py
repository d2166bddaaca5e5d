"""Odd arguments and damaged files of every command; the judge of their answers finds what is planted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from offpol_diag.errors import UsageError
from tests.fuzz.commands import KINDS
from tests.fuzz.runner import Input, answer, problems


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_is_answered_badly(kind: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", kind, "--inputs=120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert 120 == found["inputs"] > found["refused"] > 0


@pytest.mark.parametrize(
    ("fault", "says"),
    {
        "raise ValueError('planted')": "a traceback",
        "raise MemoryError": "it takes all the memory there is",
        "sys.stdout.write('\\x1b[2J')": "a control character is printed: U+001B",
        "sys.stdout.write('x\\n::error::planted\\n')": "a line of the log is a command of GitHub Actions",
        "raise SystemExit(1)": "exit code 1",
        "raise UsageError('no hint')": "exit code 2, and 1 errors with a hint each are printed",
        "raise SystemExit(2)": "exit code 2, and 0 errors with a hint each are printed",
        "Path('left').touch(); raise UsageError('no', 'do')": "refused, and files are left or changed",
        "sys.stderr.write('error: x\\n\\nhint: y\\n')": "an error is printed, and the exit code is 0",
        "warnings.warn('planted')": "a warning of Python: UserWarning",
        "Path('.x.tmp').touch()": "a temporary file is left",
        "Path('x.json').write_text('{\"a\": }')": "a damaged .json: JSONDecodeError Expecting value",
        "Path('x.html').write_text('<planted>')": "a damaged .html: ValueError a name is markup",
        "time.sleep(5)": "a traceback: ['TimeoutError: it takes longer than 1 s'",
    }.items(),
)
def test_a_bad_answer_is_told(fault: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"sys": sys, "time": time, "warnings": warnings, "Path": Path, "UsageError": UsageError}
    monkeypatch.setattr("tests.fuzz.runner.SECONDS", 1)
    monkeypatch.setattr("tests.fuzz.runner.read", lambda *names: exec(fault, known))
    assert any(one.startswith(says) for one in problems(answer(Input(("read", "x"))))), says


def test_a_good_answer_is_not_called_bad() -> None:
    sample = Path("sample_data/healthy.parquet").read_bytes()
    found = answer(Input(("analyze", "a.parquet", "--json", "r.json", "-o", "r.html"), {"a.parquet": sample}))
    assert (found.code, {*found.changed}, [*problems(found)]) == (0, {"r.json", "r.html"}, [])
