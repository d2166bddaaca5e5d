"""Threads and devices: the same bits however many there are, the first error, what a device's name means."""

import os
import sys
import time
from pathlib import Path
from threading import Barrier

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag.errors import DumpError, UsageError
from offpol_diag.run import devices as named
from offpol_diag.run import threads as machine
from offpol_diag.run.threads import Threads
from tests.factory import write
from tests.jobs import Ids, Look, dump
from tests.reading import analyze, opened
from tests.test_read import sequences

SAMPLE = str(Path("sample_data/stale.parquet").absolute())

# ---------------------------------------------------------------- threads


def test_the_number_of_threads_changes_no_bit(tmp_path):
    results = []
    for threads in (1, 2, 3, 20):
        rows = tmp_path / f"{threads}.parquet"
        how = {"presets": "token_is,geo_rs,seq_mis,m2po", "batch_tokens": 4000, "sequences": rows}
        found = analyze(SAMPLE, threads=threads, device="cpu", **how)
        results.append((found.model_copy(update={"run": None}), pq.read_table(rows)))
    assert all(found == results[0][0] and rows.equals(results[0][1]) for found, rows in results[1:])


def test_states_are_merged_in_the_order_of_the_rows_whichever_is_done_first(tmp_path):
    waits, picked, reported = iter(np.random.default_rng(0).uniform(0, 0.05, 12)), [], []

    def slow(batch):
        time.sleep(next(waits, 0))
        return Look(tmp_path)(batch)

    threads = Threads(3, lambda *how: reported.append(how))
    found = threads.reduce(
        opened(dump(tmp_path), batch_tokens=50), slow, lambda ids: picked.extend(ids) or ids
    )
    assert [*found] == picked == [row["sequence_id"] for row in sequences()]
    assert (reported, reported[-1]) == (sorted(reported), (40, 40))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_first_bad_row_of_the_dump_or_the_error_of_a_job_is_raised(tmp_path, threads):
    with pytest.raises(DumpError, match=r"row group 5, row 23, column 'old_log_probs': token 0 is nan"):
        Threads(threads).reduce(opened(dump(tmp_path, bad=(23, 24, 39)), batch_tokens=50), Look(tmp_path))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        Threads(threads).reduce(
            opened(dump(tmp_path), batch_tokens=50), Look(tmp_path, "s30", ZeroDivisionError("a bug"))
        )


def test_there_are_as_many_threads_as_cores_and_memory_is_that_of_the_cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 3 kB\n")
    assert machine.available() == 3072
    for name, text in (("memory.current", "500"), ("memory.max", "2000")):
        (tmp_path / name).write_text(text)
    assert machine.available() == 1500
    for text, cores in (("150000 100000", 2), ("max 100000", 8), ("what", 8)):
        (tmp_path / "cpu.max").write_text(text)
        assert machine.cores() == cores


# ---------------------------------------------------------------- devices


def gpus(monkeypatch, count, broken=()):
    """Let so many names of GPUs be there; on broken ones others hold all the memory."""
    plain = torch.ones

    def ones(*args, device="cpu", **how):
        if torch.device(device).index in broken:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 MiB.")
        return plain(*args, **how)

    monkeypatch.setattr(named, "NODES", "dev/null" if count else "dev/nothing")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch, "ones", ones)


def answered(name, **how):
    try:
        found = named.devices(name, **how)
    except UsageError as error:
        return f"{error.message}, {error.hint}"
    return " ".join(found.devices) + f", {found.unused}" * bool(found.unused)


FULL, ON_CPU = "CUDA out of memory.", "use --device cpu"
NAMES = [  # name, how many GPUs are there, which are broken, the answer
    ("auto", 0, (), "cpu"),
    ("auto", 3, (), "cuda:0 cuda:1 cuda:2"),
    ("auto", 2, (1,), "cuda:0"),
    ("auto", 2, (0, 1), f"cpu, no GPU is used: {FULL}"),
    ("cuda", 2, (), "cuda:0 cuda:1"),
    ("cuda:1", 1, (), f"device 'cuda:1': there are 1 CUDA devices here, {ON_CPU}"),
    ("cuda", 2, (1,), f"device 'cuda': {FULL}, {ON_CPU}"),
    ("tpu", 1, (), "device 'tpu' is not known, give auto, cpu, cuda or cuda:N"),
]


@pytest.mark.parametrize(("name", "count", "broken", "answer"), NAMES)
def test_a_name_means_the_devices_that_are_there_and_work(name, count, broken, answer, monkeypatch):
    gpus(monkeypatch, count, broken)
    assert answered(name) == answer


def test_auto_starts_no_gpu_for_a_small_dump_or_that_is_hidden_or_without_torch(monkeypatch):
    gpus(monkeypatch, 1)
    assert [answered(one, tokens=1e5, presets=207) for one in ("auto", "cuda")] == ["cpu", "cuda:0"]
    assert answered("auto", tokens=1e7, presets=207) == "cuda:0"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert answered("auto").startswith("cpu, no GPU is used: import of torch halted")
    assert answered("cuda").startswith("device 'cuda': import of torch halted")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert answered("auto") == "cpu"


def test_a_report_says_why_no_gpu_was_taken(monkeypatch):
    gpus(monkeypatch, 1, (0,))
    monkeypatch.setattr(named, "WORTH_STARTING", 0)
    run = analyze(SAMPLE, presets="token_is").run
    assert (run.device, run.engine) == ("cpu", f"local; no GPU is used: {FULL}")


def test_threads_take_gpus_in_turn(tmp_path):
    barrier = Barrier(3, timeout=60)  # so that each thread has one of the three batches

    def job(_):
        barrier.wait()
        return Ids([machine.device_of_thread(("cuda:0", "cuda:1"))])

    found = Threads(3).reduce(opened(write(tmp_path / "a.parquet"), batch_tokens=2), job)
    assert sorted(found) == ["cuda:0", "cuda:0", "cuda:1"]
