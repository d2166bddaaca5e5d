"""Numbers, texts and configurations are what they were when they were frozen (`tests/frozen/`)."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.frozen import __main__ as frozen
from tests.frozen.cases import CASES, DUMPS, SAMPLES, TRAINERS, Case

QUICK = ("forty", "verl")


def some(names: object) -> list[object]:
    """Mark as slow what is not quick."""
    return [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in names]  # type: ignore[attr-defined]


def of(dump: str) -> list[Case]:
    return [case for case in CASES if case.dump == dump]


@pytest.mark.parametrize("dump", some(DUMPS))
def test_every_value_of_a_dump_is_what_it_was(dump: str) -> None:
    found = [line for case in of(dump) if case.numbers for line in frozen.of_values(case)]

    assert not found, "\n".join(found[:40])
    assert sum(len(frozen.frozen(case.name)) for case in of(dump)) > 900


@pytest.mark.parametrize("dump", some(DUMPS))
def test_every_interval_of_a_dump_is_what_it_was(dump: str) -> None:
    found = [line for case in of(dump) if case.numbers for line in frozen.of_intervals(case)]

    assert not found, "\n".join(found[:40])


@pytest.mark.parametrize("dump", some(DUMPS))
def test_what_commands_show_of_a_dump_is_what_was_reviewed(dump: str) -> None:
    found = [line for case in of(dump) if case.text for line in frozen.of_output(case)]

    assert not found, "\n".join(found)


@pytest.mark.parametrize("dump", some(DUMPS))
def test_what_trainers_log_of_a_dump_is_what_it_was(dump: str) -> None:
    found = frozen.of_logged(dump)

    assert not found, "\n".join(found[:40])


@pytest.mark.parametrize("trainer", some(TRAINERS))
def test_the_configuration_for_a_trainer_is_what_it_was(trainer: str) -> None:
    found = frozen.of_presets(trainer)

    assert not found, "\n".join(found)


def test_every_text_has_its_command() -> None:
    names = {case.name for case in CASES if case.text} | {f"presets-{one}" for one in TRAINERS}

    assert {path.stem for path in frozen.TEXTS.iterdir()} == names


def test_a_planted_difference_and_a_lost_number_are_named() -> None:
    old = frozen.frozen("every-stale")
    new = old | {("preset/token_is", "ess_tokens"): old["preset/token_is", "ess_tokens"] * (1 + 2e-9)}
    del new["dump@step/6", "k3"]

    differs, missing = frozen.differing(old, new)

    assert differs.startswith("differs  preset/token_is ess_tokens: ")
    assert missing.startswith("missing  dump@step/6 k3: ")


@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_what_is_frozen_of_a_pipe(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    unset = ("OFFPOL_DIAG_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    settings = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    line = f"doctor {SAMPLES / 'stale.parquet'} --md result.md --json result.json"
    running = subprocess.Popen(
        [sys.executable, "-m", "offpol_diag", *line.split()],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=settings | {"TERM": "xterm-256color", "OFFPOL_DIAG_DEVICE": "cpu"},
        cwd=tmp_path,
    )
    os.close(theirs)
    sent = b""
    try:
        while chunk := os.read(ours, 65536):
            sent += chunk
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    text = (frozen.TEXTS / "doctor-stale.txt").read_text(encoding="utf-8")
    expected = re.split(r"\n======== \w+\n", text)[1].rstrip("\n")

    assert running.wait() == 0
    assert "\x1b[" in sent.decode()
    assert re.sub(r"\x1b\[[0-9;]*m", "", sent.decode()).replace("\r\n", "\n").rstrip("\n") == expected
