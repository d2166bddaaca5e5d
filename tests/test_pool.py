"""Worker processes: the same bits however many there are, the same errors, and nothing left behind."""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from multiprocessing import connection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_jobs import Ids, Look, Place, Threads, length
from threadpoolctl import threadpool_info, threadpool_limits
from typer.testing import CliRunner

from offpol_diag.analysis.first_pass import FirstPass, Needs, read_ahead
from offpol_diag.analysis.study import Study
from offpol_diag.analyze import Observe, analyze
from offpol_diag.cli import app, running
from offpol_diag.engine.scope import NO_FITS
from offpol_diag.errors import DumpError, UsageError, WorkerError
from offpol_diag.presets import catalogue
from offpol_diag.readers import open_dump, shards
from offpol_diag.requests import Doctor
from offpol_diag.run import devices, pool
from offpol_diag.run.pool import Processes
from offpol_diag.run.task import Each, Local

SAMPLE = "sample_data/stale.parquet"
PRESETS = "token_is,geo_rs,seq_mis,areal_m2po"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


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


@pytest.fixture(scope="module")
def two_workers():
    """Start two workers for all tests that leave them as they are; 16 pieces, some of one row group."""
    with Processes.on(2) as engine:
        engine.least = 1
        yield engine


def many(workers):
    return Processes(workers, least=1)


def seen(engine, path, presets=PRESETS, **how):
    dump = open_dump([path], **how)
    study = Study.of(dump.info.columns, catalogue.load().resolve(presets), (), 0)
    asked = Needs.of(study.presets, rewards=False)
    found = read_ahead(engine, dump, asked) if asked else FirstPass(NO_FITS, None)
    return engine.reduce(dump, Observe(study, found, rows=False)).tally, dump


def arrays(thing, at=""):
    """Return every array of numbers inside, by its place."""
    if isinstance(thing, np.ndarray):
        return {at: thing} if thing.dtype.kind in "fi" else {}
    inside = thing if isinstance(thing, dict) else dict(getattr(thing, "__dict__", {}))
    return {place: x for key, value in inside.items() for place, x in arrays(value, f"{at}/{key}").items()}


def ids_of(engine, path, folder, **look):
    return engine.reduce(open_dump([path]), Look(folder, **look))


def processes(engine):
    return [] if engine._pool is None else [*engine._pool._executor._processes.values()]


def failing(act, kind=DumpError):
    with pytest.raises(kind) as caught:
        act()
    return caught.value


# ---------------------------------------------------------------- the numbers


def test_the_number_of_workers_changes_no_bit_and_one_process_alone_agrees(two_workers):
    (two, dump), (one, _) = seen(two_workers, SAMPLE), seen(many(1), SAMPLE)
    three = many(3)
    try:
        others = [arrays(states) for states in (one, seen(three, SAMPLE)[0])]
    finally:
        three.close()
    found = arrays(two)
    assert len(found) > 20
    for other in others:
        assert found.keys() == other.keys()
        assert all(np.array_equal(x, other[at], equal_nan=True) for at, x in found.items())
    alone, whole = seen(Local(), SAMPLE)
    assert np.allclose(*(x.whole.sums["columns"] for x in (two, alone)), rtol=1e-9, atol=1e-12)
    assert dump.info == whole.info
    assert dump.findings().tokens == whole.findings().tokens
    assert (two_workers.name, many(1).name) == ("local, 2 processes", "local")
    assert two_workers.beside > 0


def test_an_analysis_says_the_same_with_workers_and_names_them(tmp_path, monkeypatch):
    begun = Processes.__init__
    monkeypatch.setattr(Processes, "__init__", lambda *how: begun(*how) or setattr(how[0], "least", 1))
    presets = catalogue.load().resolve("token_is,geo_rs")
    one, two = (
        analyze([SAMPLE], presets=presets, device="cpu", workers=n, sequences=tmp_path / f"{n}.parquet")
        for n in (1, 2)
    )
    assert (one.run.engine, two.run.engine) == ("local", "local, 2 processes")
    assert one.model_copy(update={"run": two.run}) == two
    assert pq.read_table(tmp_path / "1.parquet").equals(pq.read_table(tmp_path / "2.parquet"))


def test_results_are_picked_and_merged_in_the_order_of_the_rows(two_workers, small, tmp_path):
    picked = []
    dump = open_dump([small], batch_tokens=30)
    found = two_workers.reduce(dump, Look(tmp_path), Each(length, picked.append))
    assert found.ids == tuple(range(120))
    assert sum(picked) == 120
    assert set(picked) <= {1, 2, 3, 4}
    alone = many(1).reduce(open_dump([small], batch_tokens=30), Look(tmp_path))
    assert alone == found


def test_progress_rises_within_pieces_and_ends_with_all_rows(small, tmp_path):
    for workers in (1, 2):
        reported = []
        engine = Processes(workers, progress=lambda *how, reported=reported: reported.append(how), least=600)
        with closing(engine):
            dump = open_dump([small], batch_tokens=50)
            engine.reduce(dump, Look(tmp_path, seconds=0.05))
        done = [rows for rows, _ in reported]
        assert done == sorted(done)
        assert reported[-1] == (120, 120)
        assert len({*done}) > 2 * len(shards.pieces(dump, 600)) > 2
        assert engine.clock.compute > 0


def test_workers_are_kept_from_one_reading_to_the_next_and_end_with_the_engine(small, tmp_path):
    with Processes.on(2) as engine:
        engine.least = 1
        ids_of(engine, small, tmp_path)
        first = processes(engine)
        ids_of(engine, small, tmp_path)
        assert processes(engine) == first
        assert all(process.is_alive() for process in first)
    assert not any(process.is_alive() for process in first)


@pytest.mark.parametrize("workers", [1, 2])
def test_states_are_merged_by_one_thread_and_the_others_are_there_again_after(
    workers, small, tmp_path, monkeypatch
):
    seen, merge = [], Ids.merge
    monkeypatch.setattr(Ids, "merge", lambda *both: (seen.append(threads()), merge(*both))[1])
    with threadpool_limits(2, user_api="blas"), closing(many(workers)) as engine:
        engine.reduce(open_dump([small]), Look(tmp_path))
        after = threads()

    assert seen
    assert all(one == {1} for one in seen)
    assert after == {2}


def threads():
    """Return how many threads BLAS has."""
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


@pytest.mark.parametrize("workers", [1, 2])
def test_products_take_one_thread_of_each_process_and_the_others_are_there_again_after(workers, small):
    with threadpool_limits(2, user_api="blas"), closing(many(workers)) as engine:
        seen = engine.reduce(open_dump([small]), Threads())
        after = threads()

    assert set(seen.ids) == {1}
    assert after == {2}


def test_workers_are_numbered_so_that_each_has_a_gpu_of_its_own(small):
    with closing(many(2)) as engine:
        assert set(engine.reduce(open_dump([small]), Place()).ids) == {0, 1}


def test_memory_of_a_batch_is_freed_without_garbage_collection():
    dump = open_dump([SAMPLE])
    study = Study.of(dump.info.columns, catalogue.load().resolve("all"), (), 0)
    job = Observe(
        study,
        read_ahead(Local(beside_reading=False), dump, Needs.of(study.presets, rewards=False)),
        rows=False,
    )
    batch = next(dump.batches())
    job(batch)
    gc.collect()
    gc.disable()
    try:
        job(batch)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [type(one) for one in gc.garbage if isinstance(one, np.ndarray)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# ---------------------------------------------------------------- when there are workers


def test_a_small_dump_has_no_worker_unless_it_is_told_to(small, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(pool, "room", lambda: 8)
    monkeypatch.setattr(pool, "_Pool", lambda workers, slots, gpu: started.append(workers) or 1 / 0)
    engine = Processes(None, least=1)
    ids_of(engine, small, tmp_path)
    assert engine.name == "local"
    monkeypatch.setattr(pool, "WORTH", 1000)
    for workers in (None, 3, 100):
        failing(lambda w=workers: ids_of(Processes(w, least=1), small, tmp_path), ZeroDivisionError)
    ids_of(Processes(4), small, tmp_path)  # one piece
    assert started == [8, 3, 100]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"meminfo": f"MemTotal: 99 kB\nMemAvailable: {pool.WORKER * 5 // 2 // 1024} kB\n"}, 2),
        ({"meminfo": "MemAvailable: 10 kB\n"}, 1),
        ({"memory.max": str(pool.WORKER * 6), "memory.current": str(pool.WORKER * 2)}, 4),
        (
            {
                "memory.max": str(pool.WORKER * 6),
                "memory.current": str(pool.WORKER * 5),
                "memory.stat": f"anon 5\nfile {pool.WORKER * 2}\n",
            },
            3,
        ),
        ({"memory.max": "max", "memory.current": "1"}, 8),
        ({"cpu.max": "what", "memory.max": "x", "memory.current": "y", "meminfo": "?\n"}, 8),
    ],
)
def test_there_are_as_many_workers_as_cores_and_memory_allow(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(pool, "GROUP", tmp_path)
    monkeypatch.setattr(pool, "MEMORY", tmp_path / "meminfo")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert pool.room() == expected


@pytest.mark.parametrize("said", ["0", "-1", "2.5", "many", "", "²"])
def test_invalid_numbers_of_workers_are_refused(said):
    result = CliRunner().invoke(app, ["analyze", SAMPLE, "--workers", said])
    assert result.exit_code == 2
    assert "--workers" in result.output
    assert "auto" in result.output


def test_workers_of_a_cluster_are_refused():
    assert "--workers 2" in failing(lambda: analyze([SAMPLE], workers=2, engine="ray"), UsageError).message


def test_the_environment_and_a_file_say_how_many_workers(tmp_path, monkeypatch):
    reported = []
    module = sys.modules["offpol_diag.analyze"]
    monkeypatch.setattr(module, "examine", lambda *_, workers, **__: reported.append(workers) or 1 / 0)
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    runner.invoke(app, ["analyze", "-q"])
    runner.invoke(app, ["compare", "-q"], env={"OFFPOL_DIAG_WORKERS": "3"})
    Path("offpol-diag.toml").write_text("workers = 5\n")
    runner.invoke(app, ["gate", "x.parquet", "--max", "k3=1", "-q"])
    assert reported == [None, 3, 5]


@pytest.mark.parametrize(
    ("size", "gpu", "options", "expected"),
    [
        (running.LARGE, False, {}, 1),
        (running.LARGE, False, {"workers": 4, "device": "cpu"}, 1),
        (running.LARGE, True, {"device": "cpu"}, 1),
        (running.LARGE, True, {}, 0),
        (running.LARGE, False, {"workers": 1}, 0),
        (running.LARGE, False, {"engine": "ray"}, 0),
        (running.LARGE, False, {"device": "cuda"}, 0),
        (running.LARGE - 1, False, {}, 0),
    ],
)
@pytest.mark.parametrize("folder", [True, False])
def test_a_command_forks_workers_where_workers_are_likely(
    size, gpu, options, expected, folder, tmp_path, monkeypatch
):
    path = tmp_path / "x.parquet"
    with path.open("wb") as file:
        file.truncate(size)
    started = []
    monkeypatch.setattr(pool, "fork", lambda workers: started.append(1))
    monkeypatch.setattr(devices, "present", lambda: gpu)
    one = Doctor(quiet=True, **options)
    named = [str(tmp_path if folder else path), "s3://a/b", str(tmp_path / "none")]
    with running.running(one, named):
        pass
    assert len(started) == expected


# ---------------------------------------------------------------- what is wrong with a dump


def bad(tmp_path, rows):
    found = table()
    values = found.column("old_log_probs").to_pylist()
    for row in rows:
        values[row][3] = float("nan")
    return write(tmp_path / "bad.parquet", found.set_column(1, "old_log_probs", pa.array(values)))


def test_the_first_bad_row_of_the_dump_is_the_error(small, tmp_path):
    path = bad(tmp_path, (33, 41, 119))
    errors = []
    for workers in (1, 2, 4):
        engine = many(workers)
        errors.append(failing(lambda engine=engine: ids_of(engine, path, tmp_path)))
        assert processes(engine) == []
        assert ids_of(engine, small, tmp_path).ids == tuple(range(120))
        engine.close()
    whole = failing(lambda: ids_of(Local(), path, tmp_path))
    assert "row 33," in whole.message
    assert {(error.message, error.hint) for error in errors} == {(whole.message, whole.hint)}


def test_bad_rows_are_skipped_and_told_as_by_one_process(two_workers, tmp_path):
    path = bad(tmp_path, (0, 33, 34, 41, 77, 119))
    dumps = [open_dump([path], on_bad_row="skip") for _ in range(2)]
    found = [
        engine.reduce(dump, Look(tmp_path))
        for engine, dump in zip((two_workers, Local()), dumps, strict=True)
    ]
    assert found[0].ids == found[1].ids
    assert dumps[0].skipped == dumps[1].skipped
    assert dumps[0].notes == dumps[1].notes
    assert dumps[0].info == dumps[1].info
    assert dumps[0].skipped.count == 6


# ---------------------------------------------------------------- workers that come to grief


@pytest.mark.parametrize("trouble", ["killed_once", "half_sent_once"])
def test_a_worker_that_is_killed_once_changes_nothing(small, tmp_path, trouble):
    reported = []
    with Processes.on(2, lambda *how: reported.append(how)) as engine:
        engine.least = 1
        found = ids_of(engine, small, tmp_path, at=55, trouble=trouble)
        assert len(processes(engine)) == 1  # memory may be short
        assert found == many(1).reduce(open_dump([small]), Look(tmp_path))
        assert ids_of(engine, small, tmp_path) == found
    assert reported == sorted(reported[: reported.index((120, 120))]) + reported[reported.index((120, 120)) :]


@pytest.mark.parametrize("seen", [True, False])
def test_rows_that_kill_every_worker_are_one_error_with_a_hint(small, tmp_path, monkeypatch, seen):
    """Also where a worker that has ended does not look so for a moment."""
    if not seen:
        monkeypatch.setattr(pool, "_ended", lambda processes: [])
    engine = many(2)
    error = failing(lambda: ids_of(engine, small, tmp_path, at=55, trouble="killed_always"), WorkerError)
    assert "signal 9" in error.message
    assert "memory" in error.hint
    assert "--workers 1" in error.hint
    assert engine._pool is None


def test_looking_for_ended_workers_leaves_their_exit_codes_to_be_read():
    worker = mp.get_context("forkserver").Process(target=signal.raise_signal, args=(signal.SIGKILL,))
    worker.start()
    connection.wait([worker.sentinel], 30)
    assert pool._ended([worker]) == [worker]
    assert worker._popen.returncode is None
    assert worker.exitcode == -signal.SIGKILL


def test_each_worker_imports_for_itself_where_forking_is_unsafe(small, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "METHOD", "spawn")
    with Processes.on(2) as engine:
        engine.least = 1
        assert ids_of(engine, small, tmp_path).ids == tuple(range(120))
        assert {type(process).__name__ for process in processes(engine)} == {"SpawnProcess"}


def test_a_worker_that_dies_between_readings_is_replaced(small, tmp_path):
    with Processes.on(2) as engine:
        engine.least = 1
        ids_of(engine, small, tmp_path)
        first = processes(engine)[0]
        os.kill(first.pid, signal.SIGKILL)
        first.join()
        assert ids_of(engine, small, tmp_path).ids == tuple(range(120))


@pytest.mark.parametrize(("trouble", "kind"), [("bug", ZeroDivisionError), ("broken_pipe", BrokenPipeError)])
def test_a_bug_is_raised_as_it_was_with_the_place_in_the_worker(small, tmp_path, trouble, kind):
    engine = many(2)
    error = failing(lambda: ids_of(engine, small, tmp_path, at=7, trouble=trouble), kind)
    assert "cluster_jobs.py" in str(error.__cause__)
    assert engine._pool is None


def test_an_error_that_cannot_be_unpickled_is_told_too(small, tmp_path):
    error = failing(lambda: ids_of(many(2), small, tmp_path, at=7, trouble="strange"), RuntimeError)
    assert "Strange" in str(error)
    assert "cluster_jobs.py" in str(error)


@LINUX
def test_a_worker_keeps_its_memory_from_one_batch_to_the_next():
    """Pages that the system gives for blocks that were there before."""
    text = """
        import resource, sys
        import numpy as np
        from offpol_diag.run import pool
        def pages():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for size in (1 << 20, 9 << 20, 40 << 20):
                held = [np.ones(size // 8) for _ in range(4)]
                del held
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        pages()
        print(pages())
        pool._keep_memory()
        pages()
        print(pages())
    """
    without, with_ = map(int, printed(text).split())
    assert with_ < without / 10


def printed(text):
    """Run a program in an interpreter of its own; return its output."""
    command = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout


def test_the_server_imports_without_the_collector_and_what_it_imported_stays_shared():
    printed("""
        import gc, sys
        before = gc.get_stats()[2]["collections"]
        import offpol_diag.run.preload
        assert gc.get_stats()[2]["collections"] <= before + 1
        assert gc.get_freeze_count() > 100_000
        assert "offpol_diag.analyze" in sys.modules
    """)


def test_workers_that_cannot_be_started_are_an_error_with_a_hint(small, tmp_path, monkeypatch):
    def refuse(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(pool, "serve", refuse)
    error = failing(lambda: ids_of(many(2), small, tmp_path), WorkerError)
    assert "temporarily unavailable" in error.message
    assert "--workers 1" in error.hint


COMMAND = """
from offpol_diag.cli import running
from offpol_diag.__main__ import main
from offpol_diag.run import pool

running.LARGE = 0
cut = pool.pieces
pool.pieces = lambda dump, least: cut(dump, 1)
main()
"""


@LINUX
def test_a_command_leaves_the_same_bits_with_workers_and_without_any(small, tmp_path):
    found = {}
    for workers in ("1", "2"):
        path = tmp_path / f"{workers}.json"
        given = ["analyze", small, "--presets", PRESETS, "--no-html", "-q", "--workers", workers]
        subprocess.run([sys.executable, "-c", COMMAND, *given, "--json", str(path)], check=True, timeout=60)
        found[workers] = json.loads(path.read_text())
    assert found["1"].pop("run")["engine"] == "local"
    assert found["2"].pop("run")["engine"] == "local, 2 processes"
    assert found["1"] == found["2"]


# ---------------------------------------------------------------- the process that has workers

SCRIPT = """
import sys
sys.path[:0] = {path!r}
from cluster_jobs import Look
from pathlib import Path
from offpol_diag.cli.exits import exit_codes, terminator
from offpol_diag.run.pool import Processes
from offpol_diag.readers import open_dump
from offpol_diag.run import pool
if {forked}:
    pool.fork(2)
    pool.METHOD = "none"  # nothing else starts a worker
import signal
signal.signal(signal.SIGTERM, terminator())
print("begun", flush=True)
with exit_codes(), Processes.on(2) as engine:
    engine.least = 1
    job = Look(Path({folder!r}), seconds={seconds})
    print(engine.reduce(open_dump([{dump!r}]), job).ids == tuple(range(120)), flush=True)
"""


def script(dump, folder, seconds, stdin=False, forked=False):
    """Run a script without a `__main__` guard, in a session of its own; it prints a line on each run."""
    text = SCRIPT.format(path=["tests", "."], folder=str(folder), dump=dump, seconds=seconds, forked=forked)
    path = folder / "script.py"
    path.write_text(text)
    with path.open() as text:
        return subprocess.Popen(
            [sys.executable, "-" if stdin else str(path)],
            stdin=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def in_session(of):
    """Return the processes of a session that are no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == of and state != "Z":
            found.append(int(path.parent.name))
    return found


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_a_program_needs_no_guard_and_no_file(small, tmp_path):
    with script(small, tmp_path, 0.0, stdin=True) as running:
        out, err = running.communicate(timeout=60)
    assert (out, err) == ("begun\nTrue\n", "")


@LINUX
def test_a_terminated_run_ends_at_once_and_leaves_nothing(small, tmp_path):
    cases = [
        (signal.SIGINT, True, 130, False),
        (signal.SIGTERM, True, 143, True),
        (signal.SIGKILL, False, -9, False),
        (signal.SIGKILL, False, -9, True),
    ]
    folders = [tmp_path / str(at) for at in range(len(cases))]
    for folder in folders:
        folder.mkdir()
    running = [
        script(small, folder, 30.0, forked=forked)
        for folder, (*_, forked) in zip(folders, cases, strict=True)
    ]
    for folder, one, (sent, to_all, code, _) in zip(folders, running, cases, strict=True):
        assert until(lambda at=folder: sum(name.name.isdecimal() for name in at.iterdir()) == 2, 60)
        before = time.monotonic()
        (os.killpg if to_all else os.kill)(one.pid, sent)
        out, err = one.communicate(timeout=20)
        assert (one.returncode, out) == (code, "begun\n")
        assert err == ("interrupted\n" if code == 130 else "")
        assert until(lambda session=one.pid: not in_session(session), 5)
        assert time.monotonic() - before < 5
