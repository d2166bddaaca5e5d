"""A dump from standard input: kept on disk as long as the process, whatever becomes of it."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.errors import DumpError
from offpol_diag.readers.sources import stdin_copy

ROOT = Path(__file__).parents[1]
ROWS = [[-0.5, -1.0, -0.25], [-2.0, -0.5], [-0.125, -4.0]]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"rollout_log_probs": ROWS, "old_log_probs": ROWS}), path)
    return path


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


def start(*arguments, spool, cwd, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "offpol_diag", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(spool)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def run(*arguments, data, spool, cwd):
    process = start(*arguments, spool=spool, cwd=cwd, stdin=subprocess.PIPE)
    out, err = process.communicate(data, timeout=100)
    return process.returncode, out.decode(), err.decode()


def test_a_dump_is_read_from_a_pipe_and_nothing_of_it_is_left(dump, spool, tmp_path):
    arguments = ("analyze", "-", "--presets", "token_is", "--json", "-")
    code, out, err = run(*arguments, data=dump.read_bytes(), spool=spool, cwd=tmp_path)
    assert code == 0, err
    assert '"standard input"' in out
    assert list(spool.iterdir()) == []
    assert (tmp_path / "offpol-diag-stdin.html").is_file()


def test_a_pipe_and_a_file_are_one_dump(dump, spool, tmp_path):
    arguments = ("gate", "-", str(dump), "--max", "k3=1")
    code, _, err = run(*arguments, data=dump.read_bytes(), spool=spool, cwd=tmp_path)
    assert code == 0, err


@pytest.mark.parametrize(
    ("sources", "data", "says"),
    [
        (["-"], b"", "standard input: the file is empty (0 bytes)"),
        (["-"], b'{"rollout_log_probs": [-1.0]}\n', "standard input: not a Parquet file"),
        (["-"], b"PAR1 and no more", "standard input: the file is truncated"),
        (["-", "-"], b"", "-: standard input is named twice"),
    ],
)
def test_what_is_no_dump_is_refused(sources, data, says):
    stdin_copy.cache_clear()
    ran = CliRunner().invoke(app, ["analyze", *sources], input=data)
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert f"error: {says}" in ran.stderr
    assert ran.stderr.count("hint: ") == 1


def test_nothing_is_left_of_what_is_refused(spool, tmp_path):
    code, _, err = run("analyze", "-", data=b"PAR1 and no more", spool=spool, cwd=tmp_path)
    assert (code, err.count("hint: ")) == (2, 1)
    assert list(spool.iterdir()) == []
    assert list(tmp_path.glob("*.html")) == []


def test_standard_input_that_is_closed_is_refused(spool, tmp_path):
    command = f"exec {sys.executable} -m offpol_diag analyze - <&-"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(spool)}
    ran = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=100
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith(b"error: -: nothing is piped into standard input")


def test_a_terminal_is_not_waited_for(spool, tmp_path):
    ours, theirs = os.openpty()
    try:
        process = start("analyze", "-", spool=spool, cwd=tmp_path, stdin=theirs)
        _, err = process.communicate(timeout=100)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 2
    assert err.startswith(b"error: -: nothing is piped into standard input")


def test_a_disk_without_room_is_told(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"PAR1")))
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(DumpError, match="No space left on device") as caught:
        stdin_copy()
    assert "TMPDIR" in caught.value.hint


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(dump, spool, tmp_path, number):
    process = start("analyze", "-", spool=spool, cwd=tmp_path, stdin=subprocess.PIPE)
    process.stdin.write(dump.read_bytes())
    process.stdin.flush()
    until = time.monotonic() + 60
    while not list(spool.glob("offpol-diag-*")) and time.monotonic() < until:
        time.sleep(0.05)
    assert list(spool.glob("offpol-diag-*")), "nothing was spooled"
    process.send_signal(number)
    assert process.wait(30) in (130, 143)
    process.communicate()
    assert list(spool.iterdir()) == []
