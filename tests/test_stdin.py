"""A dump from standard input: kept on disk as long as the process, whatever becomes of it."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.errors import DumpError
from offpol_diag.readers.sources import _stdin_folder, stdin_copy
from tests.factory import write

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def data(tmp_path):
    return Path(write(tmp_path / "a.parquet")).read_bytes()


@pytest.fixture
def spool(tmp_path, monkeypatch):
    folder = tmp_path / "spool"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    _stdin_folder.cache_clear()
    return folder


def start(*arguments, spool):
    return subprocess.Popen(
        [sys.executable, "-m", "offpol_diag", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(spool)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs behind & ignore it
    )


def test_a_dump_is_read_from_a_pipe_and_nothing_of_it_is_left(data, spool):
    process = start("analyze", "-", "--presets", "token_is", "--json", "-", spool=spool)
    out, err = process.communicate(data, timeout=100)
    assert process.returncode == 0, err
    assert b'"standard input"' in out
    assert list(spool.iterdir()) == []
    assert Path("offpol-diag-stdin.html").is_file()


def test_a_pipe_and_a_file_are_one_dump(data, spool):
    ran = CliRunner().invoke(app, ["gate", "-", "a.parquet", "--max", "k3=1", "--json", "-"], input=data)
    assert ran.exit_code == 0, ran.stderr
    assert '"rows": 8' in ran.stdout


@pytest.mark.parametrize(
    ("sources", "data", "says"),
    [
        (["-"], b"", "standard input: the file is empty (0 bytes)"),
        (["-"], b'{"rollout_log_probs": [-1.0]}\n', "standard input: not a Parquet file"),
        (["-"], b"PAR1 and no more", "standard input: the file is truncated"),
        (["-", "-"], b"", "-: standard input is named twice"),
    ],
)
def test_other_input_than_a_dump_is_refused_and_nothing_of_it_is_left(spool, sources, data, says):
    ran = CliRunner().invoke(app, ["analyze", *sources], input=data)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert f"error: {says}" in ran.stderr
    assert ran.stderr.count("hint: ") == 1
    assert len(list(spool.iterdir())) == (len(sources) == 1)
    _stdin_folder.cache_clear()
    assert [*spool.iterdir(), *Path().glob("*.html")] == []


@pytest.mark.parametrize("what", ["none", "closed", "terminal"])
def test_a_terminal_is_not_waited_for_and_a_closed_stream_is_refused(spool, monkeypatch, what):
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as terminal:
        closed = io.TextIOWrapper(io.BytesIO())
        closed.close()
        monkeypatch.setattr("sys.stdin", {"none": None, "closed": closed, "terminal": terminal}[what])
        with pytest.raises(DumpError, match="-: nothing is piped into standard input"):
            stdin_copy()
    os.close(ours)


def test_a_disk_without_room_is_told(spool, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"PAR1")))
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(DumpError, match="No space left on device") as caught:
        stdin_copy()
    assert "TMPDIR" in caught.value.hint


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(data, spool, number):
    process = start("analyze", "-", spool=spool)
    process.stdin.write(data)
    process.stdin.flush()
    until = time.monotonic() + 60
    while not list(spool.glob("offpol-diag-*")) and time.monotonic() < until:
        time.sleep(0.05)
    assert list(spool.glob("offpol-diag-*")), "nothing was spooled"
    process.send_signal(number)
    code, (_, err) = process.wait(30), process.communicate()
    assert code in (130, 143), err
    assert list(spool.iterdir()) == []
