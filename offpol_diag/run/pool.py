"""Run an analysis with several local workers: processes, which share the GPUs if there are any.

Threads on the CPU would mostly wait for the interpreter's lock. The main process holds no batches, only the
result merged so far and results of parts that wait for an earlier one.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing as mp
import os
import resource
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from offpol_diag.errors import OffpolError, WorkerError
from offpol_diag.readers import Dump
from offpol_diag.readers.shards import LEAST, Span, cut, pieces
from offpol_diag.run.devices import ON_CPU, Choice
from offpol_diag.run.task import (
    Clock,
    Each,
    Job,
    Local,
    M,
    Order,
    Progress,
    Result,
    be_one_thread,
    be_worker,
    merged,
    one_thread,
    packed,
    read_shard,
    taken,
    unpacked,
)

WORTH = 2_500_000
"""Minimum tokens for which several workers are faster, including their start-up.

Whole commands with every preset on two cores (`benchmarks/workers.py`): with two workers 2.1 M tokens take
as long as with one, 4.2 M 0.90 of that, 8.4 M 0.87.
"""
AHEAD = 2
"""Parts of the dump submitted per worker before the first of them is done."""
OFTEN = 0.1
"""Seconds between progress updates."""

# ---------------------------------------------------------------- processes


@dataclass
class Processes:
    """Engine of local processes; each takes the next part of the dump as soon as it is free.

    With one worker, the work is done in this process.

    Attributes:
        workers: maximum number of processes; None to use one per core, as memory allows, for large dumps.
        choice: where presets are computed.
        least: minimum tokens per part.
        used: number of workers used.
    """

    workers: int | None = None
    progress: Progress | None = None
    choice: Choice = ON_CPU
    clock: Clock = field(default_factory=Clock)
    least: int = LEAST
    used: int = 1
    beside: int = 0
    _pool: _Pool | None = None

    @classmethod
    @contextmanager
    def on(
        cls, workers: int | None, progress: Progress | None = None, choice: Choice = ON_CPU
    ) -> Iterator[Processes]:
        """Yield an engine whose workers are terminated at the end of the block."""
        global _forked
        engine = cls(workers, progress, choice)
        engine._pool, _forked = _forked, None
        try:
            yield engine
        finally:
            engine.close()

    @property
    def name(self) -> str:
        """Name of the engine in a report."""
        many = f"local, {self.used} processes" if self.used > 1 else "local"
        return f"{many}; {self.choice.unused}" if self.choice.unused else many

    @property
    def device(self) -> str:
        """Where presets are computed."""
        return self.choice.name

    def close(self) -> None:
        """Kill the workers."""
        if self._pool:
            self._pool.end()
        self._pool = None

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`.

        Raises:
            WorkerError: workers cannot be started, or are killed repeatedly.
        """
        cuts = pieces(dump, self.least)
        # A running pool keeps its number of workers, whatever memory it uses.
        most = self._pool.workers if self._pool else self.workers or room()
        many = 1 if self.workers is None and dump.tokens < WORTH else min(len(cuts), most)
        if many > 1 and not self._pool:
            try:
                self._pool = self._new(most, AHEAD * most)
            except WorkerError:
                if self.workers:
                    raise
                many = 1
        alone = Local(progress=self.progress, clock=self.clock)
        if len(cuts) == 1:
            return alone.reduce(dump, job, each)
        with one_thread():
            if many == 1:
                parts = [cut(dump, span) for span in cuts]
                states = zip(parts, alone.over(parts, job, each), strict=True)
                return merged(((state, part.findings()) for part, state in states), dump)
            self.used = max(self.used, many)
            order = packed(Order(dump, job, each.pick if each else None))
            try:
                answers = self._answers(many, most, cuts, order, dump.rows)
                return merged((taken(answer.result, each, self.clock) for answer in answers), dump)
            except BaseException:
                self.close()
                raise

    def _new(self, workers: int, slots: int) -> _Pool:
        return _Pool(workers, slots, gpu=not self.choice.on_cpu)

    def _answers(
        self, many: int, most: int, cuts: Sequence[Span], order: bytes, rows: int
    ) -> Iterator[Answer]:
        """Yield every part's answer in order; the number waiting for an earlier one is bounded.

        When a worker is killed, its work is retried once in a new pool with one worker fewer, in case memory
        ran out.
        """
        ahead, lost, done, reported = AHEAD * many, -1, 0, 0
        waiting: dict[int, Future[Answer]] = {}
        for first in range(len(cuts)):
            answer: Answer | None = None
            while answer is None:
                pool = self._pool = self._pool or self._new(most, AHEAD * most)
                try:
                    for at in range(first, min(first + ahead, len(cuts))):
                        if at not in waiting:
                            waiting[at] = pool.submit(order, cuts[at], at % ahead)
                    wait([waiting[first]], OFTEN)
                    if waiting[first].done():
                        answer = waiting[first].result()
                    elif pool.lost():
                        raise BrokenProcessPool
                except BrokenProcessPool as error:
                    ended = pool.end()
                    self._pool = self._new(max(1, pool.workers - 1), len(pool.rows))
                    if lost == first:
                        raise WorkerError(
                            f"worker processes were ended from outside ({ended}), twice at the same rows of "
                            "the dump",
                            "most often memory ran short: say --workers 1, or leave more memory free",
                        ) from error
                    lost = first
                    for at, one in [*waiting.items()]:
                        if one.cancelled() or isinstance(one.exception(), BrokenProcessPool):
                            del waiting[at]  # to be read again
                if self.progress:
                    reported = max(reported, done + sum(pool.rows[at % ahead] for at in waiting))
                    self.progress(reported, rows)
            del waiting[first]
            pool.grown[answer.pid] = answer.grown
            self.beside = max(self.beside, sum(pool.grown.values()))
            done += answer.result[2].rows
            yield answer


METHOD = "forkserver" if sys.platform == "linux" else "spawn"
"""Start method of workers. Outside Linux, forking is missing or unsafe, and each worker imports anew."""
PRELOAD = "offpol_diag.run.preload"
HINT = "say --workers 1 to do without them"
SILENT = "ignore::UserWarning:multiprocessing.resource_tracker"
"""Python's tracker of semaphores would print a line on stderr when this process is killed."""
_forked: _Pool | None = None
"""Workers forked in advance for the first pass of a command."""


def fork(workers: int | None) -> None:
    """Fork workers from this process, if that is safe; the next engine uses them.

    They share the memory of modules imported so far. A process with threads cannot be forked safely: locks
    held by other threads would stay locked in the children.
    """
    global _forked
    if sys.platform == "linux" and threading.active_count() == 1 and _forked is None:
        gc.freeze()  # the collector writes to objects it visits, which would copy shared pages
        many = workers or room()
        try:
            pool = _Pool(many, AHEAD * many, "fork")
        except WorkerError:
            return
        with warnings.catch_warnings():  # pyarrow has a thread, but resets its locks in a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pool.start()
            except OSError:  # the engine tries the fork server instead, and reports its error
                pool.end()
                return
        _forked = pool


class _Pool:
    """A pool of worker processes, started as parts are submitted; `rows` are those read of a slot's part.

    Raises:
        WorkerError: there is no shared memory, or too few open files are allowed.
    """

    def __init__(self, workers: int, slots: int, method: str = "", gpu: bool = False) -> None:
        context: Any = mp.get_context(method or METHOD)
        self._gpu = gpu
        self._served = (method or METHOD) == "forkserver"
        self.workers = workers
        self.grown: dict[int, int] = {}
        try:
            if self._served:
                sys.warnoptions.append(SILENT)
                try:
                    resource_tracker.ensure_running()
                finally:
                    sys.warnoptions.remove(SILENT)
            self.rows = context.RawArray("q", slots)
            shared = dict(os.environ), self.rows, context.Value("i", 0)
            self._executor = ProcessPoolExecutor(workers, context, _begin, shared)
        except OSError as error:
            raise WorkerError(f"worker processes cannot be started ({error})", HINT) from error

    def submit(self, order: bytes, span: Span, slot: int) -> Future[Answer]:
        """Submit a part to the workers."""
        self.rows[slot] = 0
        try:
            if self._served:
                serve(self._gpu)
            with shielded():
                return self._executor.submit(_work, order, span, slot)
        except (OSError, EOFError) as error:
            said = str(error) or "the server of worker processes has ended"
            raise WorkerError(f"a worker process cannot be started ({said})", HINT) from error

    def start(self) -> None:
        """Start all workers now, if they are forked from this process."""
        with shielded():
            self._executor.submit(os.getpid)

    def lost(self) -> bool:
        """Return whether a worker has ended; the executor misses it where a result was half sent."""
        return bool(_ended([*(self._executor._processes or {}).values()]))

    def end(self) -> str:
        """Kill the workers, which need no clean-up; return how a worker had ended before."""
        processes = [*(self._executor._processes or {}).values()]
        ended = _ended(processes)
        for process in processes:
            process.kill()
        # A thread of the executor may be reading what a worker had half sent: without writers it ends.
        results: Any = self._executor._result_queue
        if results:
            results._writer.close()
        self._executor.shutdown(cancel_futures=True)
        # One whose code the executor's thread was about to read did not look ended: then ask all.
        codes = [process.exitcode or 0 for process in ended or processes]
        own = [code for code in codes if code not in (0, -signal.SIGTERM)]  # the executor sends SIGTERM
        own.sort(key=lambda code: code == -signal.SIGKILL)  # sent above
        return next((f"signal {-code}" if code < 0 else f"exit code {code}" for code in own), "unknown how")


def _ended(processes: Sequence[BaseProcess]) -> list[BaseProcess]:
    """Return the processes that have ended.

    Their exit codes are left to the executor's thread: of two threads that read one at a time, the second
    finds the pipe empty, and takes 255 for the code.
    """
    ready = {*connection.wait([process.sentinel for process in processes], 0)}
    return [process for process in processes if process.sentinel in ready]


def serve(gpu: bool = False) -> None:
    """Start the fork server if it is not running, without waiting for its imports, torch's too for a GPU."""
    from multiprocessing import forkserver

    mp.set_forkserver_preload([PRELOAD, *(["torch"] if gpu else [])])
    resource_tracker.ensure_running()  # first, since it unblocks signals
    with shielded():
        forkserver.ensure_running()


@contextmanager
def shielded() -> Iterator[None]:
    """Shield processes started in the block from Ctrl-C and from re-running the caller's script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    masks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}) if masks else None
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------- in a worker process


@dataclass(frozen=True)
class Answer:
    """The result of a part, the worker's process id, and the peak growth of its memory in bytes."""

    result: Result
    pid: int
    grown: int


_rows: Any = None
_before = 0


def _begin(environ: Mapping[str, str], rows: Any, begun: Any) -> None:
    """Initialise a worker: one thread, no Ctrl-C, and exit when the parent process ends."""
    global _rows, _before
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # sent by the executor to end workers
    os.environ.update(environ)
    gc.enable()  # off in the server, and rarely run in a command
    gc.set_threshold(700, 10, 10)
    be_one_thread()
    with begun.get_lock():
        be_worker(begun.value)
        begun.value += 1
    _keep_memory()
    _rows, _before = rows, peak_rss()


def _end_with_parent() -> None:
    """Exit at once when the parent process ends."""
    parent = mp.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _keep_memory() -> None:
    """Make malloc keep freed memory: the system would have to zero each page again.

    Saves a tenth of a worker's time. Peak memory stays the same, and is held until the worker ends. No effect
    with allocators other than glibc's.
    """
    trim, maps = -1, -4
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            library = ctypes.CDLL(None)
            library.mallopt(maps, 0)
            library.mallopt(trim, (1 << 31) - 1)


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


_order = lru_cache(maxsize=1)(unpacked)  # later parts of a pass reuse what its job has computed


def _work(data: bytes, span: Span, slot: int) -> Answer:
    """Read one part and merge its results."""
    order: Order = _order(data)

    def count(done: int, rows: int) -> None:
        _rows[slot] = done

    try:
        result = read_shard(order, cut(order.dump, span), Local(beside_reading=False, progress=count))
    except OffpolError:
        raise
    except Exception as error:
        raise _portable(error) from error.__cause__
    return Answer(result, os.getpid(), max(0, peak_rss() - _before))


def _portable(error: Exception) -> Exception:
    """Return a picklable form of an error: one that cannot be unpickled would look like a lost worker."""
    try:
        unpacked(packed(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


# ---------------------------------------------------------------- what this process may use of the machine

WORKER = 1000 << 20
"""Peak memory of a worker in bytes, without memory shared with the fork server.

Measured (`VmHWM`) with every preset and batches of `task.TOKENS`: 480 MB with three log-probs, 860 MB with
every column per token and a third of the tokens far from on-policy, 970 MB with all of them far.
"""
GROUP = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")


def cores() -> int:
    """Return the number of cores this process may use, by CPU affinity and cgroup quota."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words("cpu.max") or _words("cpu/cpu.cfs_quota_us") + _words("cpu/cpu.cfs_period_us")
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]):
        there = min(there, -(-int(quota[0]) // int(quota[1])))
    return max(1, there)


def room() -> int:
    """Return the number of workers: one per core, as free memory allows, at least one."""
    limits = [cores()]
    if (free := _named(MEMORY, "MemAvailable:")) is not None:
        limits.append(1024 * free // WORKER)
    most, taken = _words("memory.max"), _words("memory.current")
    if most and taken and most[0].isdecimal():
        cache = _named(GROUP / "memory.stat", "file") or 0  # it can be reclaimed, so it counts as free
        limits.append((int(most[0]) - int(taken[0]) + cache) // WORKER)
    return max(1, min(limits))


def _named(path: Path, name: str) -> int | None:
    """Return the number after a name in a file of lines, if it is there."""
    lines = (line.split() for line in _text(path).splitlines())
    return next((int(line[1]) for line in lines if line[0] == name), None)


def _words(name: str) -> list[str]:
    return _text(GROUP / name).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
