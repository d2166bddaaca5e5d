"""Hostile inputs, disks, streams, signals and killed processes: each answer is in the docs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)  # 90 commands, most in a process of their own
def test_every_attack_has_the_answer_that_the_docs_say() -> None:
    script = [sys.executable, Path(__file__).with_name("attacks.py"), "--short"]
    ran = subprocess.run(script, capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
