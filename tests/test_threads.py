"""Threads: the same bits however many there are, and the first error of the dump."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_jobs import Look, length
from cluster_jobs import Threads as ThreadsOfBlas
from threadpoolctl import threadpool_info, threadpool_limits
from typer.testing import CliRunner

from offpol_diag import analyze
from offpol_diag.cli import app
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.run import threads as machine
from offpol_diag.run.threads import Each, Threads

SAMPLE = "sample_data/stale.parquet"
PRESETS = "token_is,geo_rs,seq_mis,m2po"


def table(count=120, tokens=10, seed=0):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(0.5, (count, tokens)) - 0.01
    new = np.minimum(old + rng.normal(0, 0.1, old.shape), 0)
    return pa.table({"rollout_log_probs": old.tolist(), "old_log_probs": new.tolist()})


def write(path, found, group=40):
    pq.write_table(found, path, row_group_size=group)
    return str(path)


@pytest.fixture
def small(tmp_path):
    return write(tmp_path / "small.parquet", table())


# ---------------------------------------------------------------- the numbers


def test_the_number_of_threads_changes_no_bit(tmp_path):
    results = []
    for threads in (1, 2, 3, 20):
        rows = tmp_path / f"{threads}.parquet"
        how = {"presets": PRESETS, "batch_tokens": 4000, "sequences": rows}
        found = analyze(SAMPLE, threads=threads, device="cpu", **how).summary
        results.append((found.model_copy(update={"run": None}), pq.read_table(rows)))
    for other, rows in results[1:]:
        assert other == results[0][0]
        assert rows.equals(results[0][1])


def test_states_are_merged_in_the_order_of_the_rows_whichever_is_done_first(small, tmp_path):
    waits, picked = iter(np.random.default_rng(0).uniform(0, 0.05, 12)), []

    def slow(batch):
        time.sleep(next(waits, 0))
        return Look(tmp_path)(batch)

    found = Threads(3).reduce(open_dump([small], batch_tokens=100), slow, Each(length, picked.append))
    assert found == Threads(1).reduce(open_dump([small], batch_tokens=100), Look(tmp_path))
    assert found.ids == tuple(range(120))
    assert sum(picked) == 120
    assert len(picked) > 5


def test_progress_rises_and_ends_with_all_rows(small, tmp_path):
    reported = []
    engine = Threads(2, progress=lambda *how: reported.append(how))
    engine.reduce(open_dump([small], batch_tokens=50), Look(tmp_path, seconds=0.01))
    done = [rows for rows, _ in reported]
    assert done == sorted(done)
    assert reported[-1] == (120, 120)
    assert engine.clock.compute > 0


def test_blas_has_one_thread_within_a_run_and_all_of_them_after(small):
    with threadpool_limits(2, user_api="blas"):
        seen = Threads(2).reduce(open_dump([small], batch_tokens=100), ThreadsOfBlas())
        after = {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}
    assert set(seen.ids) == {1}
    assert after == {2}


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 8),
        ({"meminfo": f"MemTotal: 99 kB\nMemAvailable: {machine.THREAD * 5 // 2 // 1024} kB\n"}, 2),
        ({"meminfo": "MemAvailable: 10 kB\n"}, 1),
        ({"memory.max": str(machine.THREAD * 6), "memory.current": str(machine.THREAD * 2)}, 4),
        ({"cpu.max": "what", "memory.max": "x", "memory.current": "y", "meminfo": "?\n"}, 8),
    ],
)
def test_there_are_as_many_threads_as_cores_and_memory_allow(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.room() == expected


@pytest.mark.parametrize("said", ["0", "-1", "2.5", "many", "", "²"])
def test_invalid_numbers_of_threads_are_refused(said):
    result = CliRunner().invoke(app, ["analyze", SAMPLE, "--threads", said])
    assert result.exit_code == 2
    assert "--threads" in result.output
    assert "auto" in result.output


def test_threads_of_a_cluster_are_refused():
    with pytest.raises(UsageError, match="--threads 2"):
        analyze(SAMPLE, threads=2, engine="ray")


def test_the_environment_and_a_file_say_how_many_threads(tmp_path, monkeypatch):
    reported, dump = [], str(Path(SAMPLE).absolute())
    module = sys.modules["offpol_diag.analyze"]
    monkeypatch.setattr(module, "examine", lambda *_, threads, **__: reported.append(threads) or 1 / 0)
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    runner.invoke(app, ["analyze", "-q"])
    runner.invoke(app, ["compare", "-q"], env={"OFFPOL_DIAG_THREADS": "3"})
    runner.invoke(app, ["compare", "-q", "--threads=5"])
    Path("offpol-diag.toml").write_text("threads = 7\n")
    runner.invoke(app, ["gate", dump, "--max", "k3=1", "-q"])
    assert reported == [None, 3, 5, 7]


# ---------------------------------------------------------------- errors and signals


def test_the_first_bad_row_of_the_dump_is_the_error(tmp_path):
    found = table()
    values = found.column("old_log_probs").to_pylist()
    for row in (33, 41, 119):
        values[row][3] = float("nan")
    path = write(tmp_path / "bad.parquet", found.set_column(1, "old_log_probs", pa.array(values)))
    for threads in (1, 2, 4):
        with pytest.raises(DumpError, match=r"row group 0, row 33, column 'old_log_probs': token 3 is nan"):
            Threads(threads).reduce(open_dump([path], batch_tokens=50), Look(tmp_path))


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_a_job_is_raised_as_it_is(small, tmp_path, threads):
    with pytest.raises(ZeroDivisionError, match="a bug"):
        Threads(threads).reduce(open_dump([small], batch_tokens=50), Look(tmp_path, at=70, trouble="bug"))


SCRIPT = """
import signal, sys
sys.path[:0] = ["tests", "."]
from cluster_jobs import Look
from pathlib import Path
from offpol_diag.cli.exits import exit_codes, terminator
from offpol_diag.dump.read import open_dump
from offpol_diag.run.threads import Threads
signal.signal(signal.SIGTERM, terminator())
with exit_codes():
    Threads(2).reduce(open_dump([sys.argv[1]], batch_tokens=50), Look(Path(sys.argv[2]), seconds=0.3))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_after_the_batches_under_way(small, tmp_path, number, code):
    (tmp_path / "seen").mkdir()
    command = [sys.executable, "-c", SCRIPT, small, str(tmp_path / "seen")]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while not list((tmp_path / "seen").iterdir()) and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(number)
    _, said = running.communicate(timeout=20)
    assert running.returncode == code
    assert said == ("interrupted\n" if code == 130 else "")
    assert len(list((tmp_path / "seen").iterdir())) < 10
