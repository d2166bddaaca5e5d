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
from cluster_jobs import Look, blas
from threadpoolctl import threadpool_limits

from offpol_diag import analyze
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.run import threads as machine
from offpol_diag.run.threads import Threads

SAMPLE = str(Path("sample_data/stale.parquet").absolute())


@pytest.fixture
def small(tmp_path):
    """Write 120 sequences of 10 tokens; a NaN in some of the values of `bad` rows."""

    def write(*bad):
        logs = -np.random.default_rng(0).exponential(0.5, (120, 10))
        old = logs * 1.1
        old[list(bad), 3] = np.nan
        table = pa.table({"rollout_log_probs": logs.tolist(), "old_log_probs": old.tolist()})
        pq.write_table(table, tmp_path / "small.parquet", row_group_size=40)
        return open_dump([str(tmp_path / "small.parquet")], batch_tokens=50)

    return write


def test_the_number_of_threads_changes_no_bit(tmp_path):
    results = []
    for threads in (1, 2, 3, 20):
        rows = tmp_path / f"{threads}.parquet"
        how = {"presets": "token_is,geo_rs,seq_mis,m2po", "batch_tokens": 4000, "sequences": rows}
        found = analyze(SAMPLE, threads=threads, device="cpu", **how)
        results.append((found.model_copy(update={"run": None}), pq.read_table(rows)))
    assert all(found == results[0][0] and rows.equals(results[0][1]) for found, rows in results[1:])


def test_states_are_merged_in_the_order_of_the_rows_whichever_is_done_first(small, tmp_path):
    waits, picked, reported = iter(np.random.default_rng(0).uniform(0, 0.05, 12)), [], []

    def slow(batch):
        time.sleep(next(waits, 0))
        return Look(tmp_path)(batch)

    with threadpool_limits(2, user_api="blas"):
        threads = Threads(3, lambda *how: reported.append(how))
        found = threads.reduce(small(), slow, (lambda state: state.ids, picked.extend))
        assert blas() == {2}
    assert found.blas == {1}, "BLAS takes no core of a thread"
    assert found == Threads(1).reduce(small(), Look(tmp_path))
    assert [*found.ids] == picked == [*range(120)]
    assert (reported, reported[-1]) == (sorted(reported), (120, 120))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_first_bad_row_of_the_dump_or_the_error_of_a_job_is_raised(small, tmp_path, threads):
    with pytest.raises(DumpError, match=r"row group 0, row 33, column 'old_log_probs': token 3 is nan"):
        Threads(threads).reduce(small(33, 41, 119), Look(tmp_path))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        Threads(threads).reduce(small(), Look(tmp_path, at=70, trouble="bug"))


def test_there_are_as_many_threads_as_cores_and_memory_is_that_of_the_cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    for text, expected in (("150000 100000", 2), ("max 100000", 8), ("what", 8)):
        (tmp_path / "cpu.max").write_text(text)
        assert machine.cores() == expected
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 3 kB\n")
    assert machine.available() == 3072
    for name, text in {"memory.max": "2000", "memory.current": "500"}.items():
        (tmp_path / name).write_text(text)
    assert machine.available() == 1500
    with pytest.raises(UsageError, match="--threads 2"):
        analyze(SAMPLE, threads=2, engine="ray")


SCRIPT = """
import signal, sys
sys.path[:0] = ["tests", "."]
from cluster_jobs import Look
from pathlib import Path
from offpol_diag.shell import exit_codes, terminated
from offpol_diag.dump.read import open_dump
from offpol_diag.run.threads import Threads
signal.signal(signal.SIGTERM, terminated)
with exit_codes():
    Threads(2).reduce(open_dump([sys.argv[1]], batch_tokens=50), Look(Path(sys.argv[2]), seconds=0.3))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_after_the_batches_under_way(small, tmp_path, number, code):
    (seen := tmp_path / "seen").mkdir()
    command = [sys.executable, "-c", SCRIPT, small().info.files[0], str(seen)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while not list(seen.iterdir()) and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(number)
    _, said = running.communicate(timeout=20)
    assert (running.returncode, said) == (code, "interrupted\n" if code == 130 else "")
    assert len(list(seen.iterdir())) < 10
