"""Run a job over a dump: threads compute its batches, and their states are merged in the order of the dump.

Batches are cut by the dump alone and merged one after another, so neither the number of threads nor their
speed changes a bit of the result. NumPy's functions of large arrays leave the interpreter's lock
to other threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import Dump
from offpol_diag.run.devices import ON_CPU, Choice

T = TypeVar("T")
TOKENS = 1 << 19
"""Tokens per batch, a balance between its fixed cost, memory, and an even share for each thread."""
THREAD = 300 << 20
"""Peak memory of a computing thread in bytes, with its batch."""
GROUP, MEMORY = Path("/sys/fs/cgroup"), Path("/proc/meminfo")
Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


class State(Protocol):
    """What a job leaves of a part of a dump."""

    def merge(self, other: Self) -> Self:
        """Merge what is left of this part and of a later one."""
        ...


M = TypeVar("M", bound=State)
Job = Callable[[Batch], M]
"""A pure function of one batch; a frozen dataclass, so that a cluster can pickle it."""


@dataclass(frozen=True)
class Each(Generic[M]):
    """A hook that sees every batch's result before it is merged.

    Attributes:
        pick: extracts data from a result where the job ran; a picklable function.
        use: called with these data in this process, in the order of the rows.
    """

    pick: Callable[[M], Any]
    use: Callable[[Any], None]


@dataclass
class Clock:
    """Time spent in seconds; parallel work is summed."""

    started: float = field(default_factory=time.perf_counter)
    read: float = 0.0
    compute: float = 0.0

    def seconds(self) -> dict[str, float]:
        """Return the seconds in total, reading (decoding included), and computing."""
        total = time.perf_counter() - self.started
        return {"total": total, "read": self.read, "compute": self.compute}


class Engine(Protocol):
    """What runs jobs over the batches of a dump and merges their results."""

    clock: Clock

    @property
    def device(self) -> str:
        """Where presets are computed."""
        ...

    @property
    def name(self) -> str:
        """Name of the engine in a report."""
        ...

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """Run `job` on every batch in one pass over the dump, and merge the results in row order.

        Afterwards the dump holds what the pass has seen. Returns None when it has no batch.
        """
        ...


@dataclass
class Threads:
    """Engine of this process: this thread reads and merges, others compute.

    Attributes:
        threads: how many compute; None for one per core, as memory allows.
        choice: where presets are computed.
    """

    threads: int | None = None
    progress: Progress | None = None
    choice: Choice = ON_CPU
    clock: Clock = field(default_factory=Clock)

    @property
    def name(self) -> str:
        """Name of the engine in a report."""
        return f"local; {self.choice.unused}" if self.choice.unused else "local"

    @property
    def device(self) -> str:
        """Where presets are computed."""
        return self.choice.name

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One pass, see `Engine.reduce`."""
        if sys.platform == "linux":
            with suppress(AttributeError, OSError):  # one heap: what a thread has freed another can use
                ctypes.CDLL(None).mallopt(-8, 1)
        threads, state = self.threads or room(), None
        with threadpool_limits(1, user_api="blas"), numbered(threads) as pool:  # BLAS would take their cores
            for found in in_order(pool, self._calls(dump, job), threads):
                if each:
                    each.use(each.pick(found))
                state = found if state is None else state.merge(found)
        return state

    def _calls(self, dump: Dump, job: Job[M]) -> Iterator[Callable[[], M]]:
        """Yield the job on each batch, not yet called."""
        done, before = 0, time.perf_counter()

        def add(rows: int) -> None:
            nonlocal done
            done += rows
            if self.progress:
                self.progress(done, dump.rows)

        for batch in dump.batches(add):
            self.clock.read += time.perf_counter() - before
            call = partial(self._timed, job, batch)
            del batch  # frees it before the next one is read
            yield call
            del call
            before = time.perf_counter()

    def _timed(self, job: Job[M], batch: Batch) -> M:
        before = time.perf_counter()
        try:
            with np.errstate(all="ignore"):  # of a thread's own
                return job(batch)
        finally:
            self.clock.compute += time.perf_counter() - before


def in_order(pool: Executor, calls: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """Run calls in a pool and yield their results in order, with at most `most` + 1 calls pending."""
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            del call
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


_local = threading.local()


def numbered(threads: int) -> ThreadPoolExecutor:
    """Return a pool whose threads are numbered."""
    numbers = count()
    return ThreadPoolExecutor(threads, "offpol-diag", lambda: setattr(_local, "number", next(numbers)))


def own(devices: Sequence[str]) -> str:
    """Return the device of this thread among those of a run."""
    return devices[getattr(_local, "number", 0) % len(devices)]


# ---------------------------------------------------------------- the machine


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def cores() -> int:
    """Return the number of cores this process may use, by CPU affinity and cgroup quota."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words(GROUP / "cpu.max")
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]):
        there = min(there, -(-int(quota[0]) // int(quota[1])))
    return max(1, there)


def room() -> int:
    """Return the number of threads that compute: one per core, as free memory allows, at least one."""
    return max(1, min(cores(), available() // THREAD))


def available() -> int:
    """Return the free memory of this process in bytes; very much where that is unknown."""
    free, cache = (
        next((int(x) for key, x in pairwise(text) if key == name), None)
        for text, name in (
            (_words(MEMORY), "MemAvailable:"),
            (_words(GROUP / "memory.stat"), "file"),
        )
    )
    limits = [1 << 62] if free is None else [1024 * free]
    most, taken = _words(GROUP / "memory.max"), _words(GROUP / "memory.current")
    if most and taken and most[0].isdecimal():  # a cache can be reclaimed, so it counts as free
        limits.append(int(most[0]) - int(taken[0]) + (cache or 0))
    return min(limits)


def _words(path: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return path.read_text().split()
    return []
