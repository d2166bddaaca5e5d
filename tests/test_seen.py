"""What the commands print is what was reviewed (`tests/frozen/seen/`)."""

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

from tests.frozen import seen
from tests.frozen.dumps import sample


@pytest.mark.parametrize("name", seen.COMMANDS)
def test_what_a_command_shows_is_what_was_reviewed(name: str) -> None:
    found = seen.difference(seen.frozen(name), seen.seen(name))

    assert not found, f"{found}\nIf that is meant: {seen.accept(name)}"


def test_every_frozen_text_has_its_command_and_its_dump() -> None:
    files = {f"{name}-{dump}.txt" for name, one in seen.COMMANDS.items() for dump in (*one.lines, "keys")}

    assert {path.name for path in seen.FOLDER.iterdir()} == files


def test_every_command_is_seen_on_four_dumps_at_least_and_with_every_exit_code() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in seen.FOLDER.iterdir()}
    codes = {
        name.partition("-")[0] + text[at.start() : at.end()].removeprefix("exit code")
        for name, text in texts.items()
        if (at := re.search(r"^exit code \d", text, re.MULTILINE))
    }

    assert all(len(one.lines) >= 4 for name, one in seen.COMMANDS.items() if name != "analyze_verbose")
    assert {"gate 0", "gate 1", "gate 2", "analyze 0", "analyze 1", "check 0", "check 1"} <= codes


def test_a_terminal_of_80_columns_shows_what_is_frozen_of_80_columns(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, seen.WIDTH, 0, 0))
    unset = ("OFFPOL_DIAG_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    settings = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    command = [sys.executable, "-m", "offpol_diag", "doctor", str(sample("stale"))]
    running = subprocess.Popen(
        command,
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
    frozen = (seen.FOLDER / "doctor-stale.txt").read_text(encoding="utf-8")
    expected = frozen.partition("80 columns, without options for files\n")[2].partition("\n========")[0]

    assert running.wait() == 0
    assert "\x1b[" in sent.decode()
    assert re.sub(r"\x1b\[[0-9;]*m", "", sent.decode()).replace("\r\n", "\n") == expected


def test_a_word_that_changes_is_shown_as_a_diff_with_the_command_that_accepts_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {name: text.replace("No sign of one", "No trace") for name, text in seen.frozen("doctor").items()}
    monkeypatch.setattr(seen, "seen", lambda name: now)

    assert seen.main(["--only", "doctor"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^-.*No sign of one.*\n\+.*No trace", said, re.MULTILINE)
    assert "--- frozen/doctor-stale.txt\n" in said
    assert "If that is meant: python tests/frozen/seen.py --update --only doctor\n" in said
