"""Several workers of this machine: a process for each core of the CPU, or a thread for each GPU.

Two threads on the CPU would wait for the interpreter's lock most of the time. This process holds no batch:
only what was merged so far, and the results of pieces that wait for an earlier one.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing as mp
import os
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch

from offpol_diag.errors import OffpolError, WorkerError
from offpol_diag.readers import Dump
from offpol_diag.readers.dump import Noticed
from offpol_diag.readers.shards import BYTES, LEAST, Span, cut, of_batches, pieces
from offpol_diag.run.task import (
    Clock,
    Each,
    Engine,
    Job,
    Local,
    M,
    Order,
    Progress,
    Result,
    be_one_thread,
    in_order,
    merged,
    one_thread,
    packed,
    read_shard,
    taken,
    unpacked,
)

WORTH = 2_500_000
"""Tokens from which on more than one worker is faster, their start counted.

Whole commands with every preset on two cores (`benchmarks/workers.py`): with two workers 2.1 M tokens take
as long as with one, 4.2 M 0.90 of that, 8.4 M 0.87.
"""
AHEAD = 2
"""Pieces that may be begun before the first of them is done, for each worker."""
OFTEN = 0.1
"""Seconds between two looks at how far workers are, where somebody wants to know."""
READERS = 8
"""Threads that read for one GPU at most: each holds a batch."""
CPU = torch.device("cpu")


def on(found: Sequence[torch.device], progress: Progress | None = None) -> Engine:
    """The engine for GPUs of this machine: several have a thread each, for one alone all cores read."""
    if len(found) > 1:
        return Devices(tuple(found), progress)
    return Local(found[0], readers=0 if found[0] == CPU else min(cores(), READERS), progress=progress)


# ---------------------------------------------------------------- processes


@dataclass
class Processes:
    """The CPU of this machine: each worker process takes the next piece of the dump as soon as it is free.

    One worker is this process itself.

    Attributes:
        workers: processes, at most; None for as many as there is room for, where they are worth their start.
        progress: called as rows are read.
        unused: why no GPU was taken, where there is one.
        clock: knows what all workers spent.
        least: tokens of the smallest piece.
        device: the CPU.
        used: workers that were started.
        beside: bytes that workers took at most, beside this process.
    """

    workers: int | None = None
    progress: Progress | None = None
    unused: str = ""
    clock: Clock = field(default_factory=Clock)
    least: int = LEAST
    device: torch.device = CPU
    used: int = 1
    beside: int = 0
    _pool: _Pool | None = None

    @classmethod
    @contextmanager
    def on(
        cls, workers: int | None, progress: Progress | None = None, unused: str = ""
    ) -> Iterator[Processes]:
        """An engine whose workers end with the block."""
        global _forked
        engine = cls(workers, progress, unused)
        engine._pool, _forked = _forked, None
        try:
            yield engine
        finally:
            engine.close()

    @property
    def name(self) -> str:
        """What a report says of it."""
        many = f"local, {self.used} processes" if self.used > 1 else "local"
        return f"{many}; {self.unused}" if self.unused else many

    def close(self) -> None:
        """End the workers at once."""
        if self._pool:
            self._pool.end()
        self._pool = None

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`.

        Raises:
            WorkerError: workers cannot be started, or are killed again and again.
        """
        cuts = pieces(dump, self.least)
        many = 1 if self.workers is None and dump.tokens < WORTH else min(len(cuts), self._most())
        alone = Local(self.device, progress=self.progress, clock=self.clock)
        if len(cuts) == 1:
            return alone.reduce(dump, job, each)
        with one_thread():
            if many > 1:
                return merged(self._by_workers(many, cuts, dump, job, each), dump)
            parts = [cut(dump, span) for span in cuts]
            states = zip(parts, alone.over(parts, job, each), strict=True)
            return merged(((state, part.noticed()) for part, state in states), dump)

    def _most(self) -> int:
        """Workers, at most; memory that they take already does not count against them."""
        return self._pool.workers if self._pool else self.workers or room()

    def _by_workers(
        self, many: int, cuts: Sequence[Span], dump: Dump, job: Job[M], each: Each[M] | None
    ) -> Iterator[tuple[M | None, Noticed]]:
        """Every piece by workers, in order."""
        self.used = max(self.used, many)
        order = packed(Order(dump, job, each.pick if each else None))
        try:
            for answer in self._answers(many, cuts, order, dump.rows):
                yield taken(answer.result, each, self.clock)
        except BaseException:
            self.close()
            raise

    def _answers(self, many: int, cuts: Sequence[Span], order: bytes, rows: int) -> Iterator[Answer]:
        """Every piece's answer, in order; few wait for an earlier one.

        When a worker is killed, a new pool does its work, once, with one worker fewer: memory may be short.

        Raises:
            WorkerError: workers cannot be started, or were killed twice while the same piece was waited for.
        """
        ahead, lost, done, told = AHEAD * many, -1, 0, 0
        waiting: dict[int, Future[Answer]] = {}
        for first in range(len(cuts)):
            answer: Answer | None = None
            while answer is None:
                pool = self._pool = self._pool or _Pool(self._most(), AHEAD * self._most())
                try:
                    for at in range(first, min(first + ahead, len(cuts))):
                        if at not in waiting:
                            waiting[at] = pool.submit(order, cuts[at], at % ahead)
                    import_module(LATER)
                    wait([waiting[first]], OFTEN if self.progress else None)
                    if waiting[first].done():
                        answer = waiting[first].result()
                except BrokenProcessPool as error:
                    ended = pool.end()
                    self._pool = _Pool(max(1, pool.workers - 1), len(pool.rows))
                    if lost == first:
                        raise _killed(ended) from error
                    lost = first
                    waiting = {at: one for at, one in waiting.items() if not _lost(one)}
                if self.progress:
                    told = max(told, done + sum(pool.rows[at % ahead] for at in waiting))
                    self.progress(told, rows)
            del waiting[first]
            self.beside = max(self.beside, pool.grown(answer))
            done += answer.result[2].rows
            yield answer


def _lost(future: Future[Any]) -> bool:
    """Whether a piece has to be read again."""
    return future.cancelled() or isinstance(future.exception(), BrokenProcessPool)


def _killed(ended: str) -> OffpolError:
    return WorkerError(
        f"worker processes were ended from outside ({ended}), twice at the same rows of the dump",
        "most often memory ran short: say --workers 1, or leave more memory free",
    )


METHOD = "forkserver" if sys.platform == "linux" else "spawn"
"""How workers are started. Elsewhere forking is missing or unsafe, and each worker imports for itself."""
PRELOAD = "offpol_diag.run.preload"
HINT = "say --workers 1 to do without them"
LATER = "pyro.ops.stats"
"""Needed when a reading ends: imported while workers are busy."""
_forked: _Pool | None = None
"""Workers that wait for the first reading of a command."""


def fork(workers: int | None) -> None:
    """Fork workers from this process as it stands, if that is safe; an engine will take them.

    They have all that was imported by now, and what was imported lies in memory once. A process that has
    threads cannot be forked: children would find their locks in whatever state they are.
    """
    global _forked
    if sys.platform == "linux" and threading.active_count() == 1 and _forked is None:
        gc.freeze()  # the collector writes to what it looks at, and a page that is written to is copied
        many = workers or room()
        pool = _Pool(many, AHEAD * many, "fork")
        with warnings.catch_warnings():  # pyarrow has a thread, whose locks it sets right in a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pool.start()
            except OSError:  # the engine will try it with a server, and tell the error of that
                pool.end()
                return
        _forked = pool


class _Pool:
    """Worker processes, started as pieces come.

    Attributes:
        workers: at most.
        rows: read so far of each piece under way, by its slot.
    """

    def __init__(self, workers: int, slots: int, method: str = "") -> None:
        context: Any = mp.get_context(method or METHOD)
        self._served = (method or METHOD) == "forkserver"
        self.workers = workers
        self.rows = context.RawArray("q", slots)
        self._grown: dict[int, int] = {}
        given = dict(os.environ), self.rows
        self._executor = ProcessPoolExecutor(workers, context, _begin, given)

    def submit(self, order: bytes, span: Span, slot: int) -> Future[Answer]:
        """Give the workers a piece.

        Raises:
            WorkerError: the system does not start them.
            BrokenProcessPool: one was killed.
        """
        self.rows[slot] = 0
        try:
            if self._served:
                serve()
            with apart():
                return self._executor.submit(_work, order, span, slot)
        except (OSError, EOFError) as error:
            said = str(error) or "the server of worker processes has ended"
            raise WorkerError(f"a worker process cannot be started ({said})", HINT) from error

    def start(self) -> None:
        """Start all workers at once, where they are forked from this process."""
        with apart():
            self._executor.submit(os.getpid)

    def grown(self, answer: Answer) -> int:
        """Bytes that all workers took at most beyond what they began with."""
        self._grown[answer.pid] = answer.grown
        return sum(self._grown.values())

    def end(self) -> str:
        """Kill the workers, which hold nothing that has to be put away; how one of them ended before."""
        processes = [*(self._executor._processes or {}).values()]
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        self._executor.shutdown(cancel_futures=True)
        own = [code for code in codes if code not in (None, 0, -signal.SIGTERM)]  # the executor terminates
        return next((f"signal {-code}" if code < 0 else f"exit code {code}" for code in own), "unknown how")


def serve() -> None:
    """Start the server, if there is none, and do not wait until it has imported."""
    from multiprocessing import forkserver, resource_tracker

    mp.set_forkserver_preload([PRELOAD])
    resource_tracker.ensure_running()  # it unblocks signals, so it goes first
    with apart():
        forkserver.ensure_running()


@contextmanager
def apart() -> Iterator[None]:
    """What is started in the block never hears Ctrl-C, and does not run the caller's script again."""
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
    """What comes back of a piece: the result, which process has it, and bytes by which that grew at most."""

    result: Result
    pid: int
    grown: int


_rows: Any = None
_before = 0


def _begin(environ: Mapping[str, str], rows: Any) -> None:
    """Before the first piece: one thread, no Ctrl-C, and an end when the process that has the pool ends."""
    global _rows, _before
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by which the executor ends workers
    os.environ.update(environ)
    gc.enable()  # the server has none, and a command has it seldom
    gc.set_threshold(700, 10, 10)
    be_one_thread()
    _keep_memory()
    _rows, _before = rows, _peak()


def _end_with_parent() -> None:
    """At once, whatever is under way: nobody waits for it any more."""
    parent = mp.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _keep_memory() -> None:
    """Give no memory back to the system, which clears every page before it gives it out again.

    A tenth of a worker's time goes there otherwise. It takes no more at most, and keeps that until it ends.
    Nothing happens where there is another allocator than GNU's.
    """
    trim, maps = -1, -4
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            library = ctypes.CDLL(None)
            library.mallopt(maps, 0)
            library.mallopt(trim, (1 << 31) - 1)


def _peak() -> int:
    """Bytes that this process has taken at most."""
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


@lru_cache(maxsize=1)
def _order(data: bytes) -> Order:
    """The order of a reading, unpacked once: what its job learns of the dump serves its later pieces."""
    found: Order = unpacked(data)
    return found


def _work(data: bytes, span: Span, slot: int) -> Answer:
    """One piece, read and merged."""
    order = _order(data)

    def count(done: int, rows: int) -> None:
        _rows[slot] = done

    try:
        result = read_shard(order, cut(order.dump, span), Local(CPU, beside_reading=False, progress=count))
    except OffpolError:
        raise
    except Exception as error:
        raise _portable(error) from error.__cause__
    return Answer(result, os.getpid(), max(0, _peak() - _before))


def _portable(error: Exception) -> Exception:
    """An error that survives its way: one that cannot be unpickled would look like the loss of a worker."""
    try:
        unpacked(packed(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


# ---------------------------------------------------------------- GPUs


@dataclass
class Devices:
    """A thread for each GPU, which takes the next shard of the dump as soon as it is free.

    Attributes:
        devices: where the jobs run.
        progress: called as rows are read.
        clock: knows what all devices spent.
        shard: bytes of the files that a device takes at once, at least.
        device: of what kind they are.
    """

    devices: tuple[torch.device, ...]
    progress: Progress | None = None
    clock: Clock = field(default_factory=Clock)
    shard: int = BYTES
    device: torch.device = field(init=False)
    beside = 0

    def __post_init__(self) -> None:
        self.device = torch.device(self.devices[0].type)

    @property
    def name(self) -> str:
        """What a report says of it."""
        return f"local, {len(self.devices)} devices"

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`."""
        order, lock, read = Order(dump, job, each.pick if each else None), Lock(), dict[int, int]()
        free: SimpleQueue[torch.device] = SimpleQueue()
        for device in self.devices:
            free.put(device)

        def run(at: int, shard: Dump) -> Result:
            def count(done: int, rows: int) -> None:
                with lock:
                    read[at] = done
                    if self.progress:
                        self.progress(sum(read.values()), dump.rows)

            device = free.get()
            try:
                return read_shard(order, shard, Local(device, progress=count))
            finally:
                free.put(device)

        calls = (partial(run, at, shard) for at, shard in enumerate(of_batches(dump, self.shard)))
        with ThreadPoolExecutor(len(self.devices), "offpol-diag-device") as pool:
            results = in_order(pool, calls, 2 * len(self.devices))
            return merged((taken(result, each, self.clock) for result in results), dump)


# ---------------------------------------------------------------- what this process may use of the machine

WORKER = 850 << 20
"""Bytes that a worker takes of its own at most, beyond what it shares with the server it was forked from.

Measured (`VmHWM`) with every preset and batches of `gpu.TOKENS`: 410 MB with three log-probs, 840 MB with
every column per token and many tokens far from on-policy.
"""
GROUP = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")


def cores() -> int:
    """How many cores this process may use: by its affinity and the quota of its control group."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words("cpu.max") or _words("cpu/cpu.cfs_quota_us") + _words("cpu/cpu.cfs_period_us")
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]):
        there = min(there, -(-int(quota[0]) // int(quota[1])))
    return max(1, there)


def room() -> int:
    """Workers: one for each core, as far as the memory reaches; at least one."""
    known = [found for found in (_free_in_machine(), _free_in_group()) if found is not None]
    return max(1, min([cores(), *(found // WORKER for found in known)]))


def _free_in_machine() -> int | None:
    lines = (line.split() for line in _text(MEMORY).splitlines())
    return next((1024 * int(line[1]) for line in lines if line[0] == "MemAvailable:"), None)


def _free_in_group() -> int | None:
    """The cache of files counts as taken there, but is given back when memory is needed."""
    most, taken = _words("memory.max"), _words("memory.current")
    if not most or not taken or not most[0].isdecimal():
        return None
    lines = (line.split() for line in _text(GROUP / "memory.stat").splitlines())
    cache = next((int(line[1]) for line in lines if line[0] == "file"), 0)
    return max(0, int(most[0]) - int(taken[0]) + cache)


def _words(name: str) -> list[str]:
    return _text(GROUP / name).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
