"""Run a job over a dump: threads compute its batches, and their states are merged in the order of the dump.

Batches are cut by the dump alone and merged one after another, so neither the number of threads nor their
speed changes a bit of the result. The compiled pass and NumPy's large arrays leave the interpreter's lock
to other threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from offpol_diag.batch import Batch
from offpol_diag.readers import Dump
from offpol_diag.run.devices import ON_CPU, Choice
from offpol_diag.run.machine import room, share_heap

T = TypeVar("T")
TOKENS = 1 << 19
"""Tokens per batch, a balance between its fixed cost, memory, and an even share for each thread."""
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

        Raises:
            DumpError: the dump cannot be read.
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
        share_heap()
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


# ---------------------------------------------------------------- threads and GPUs

_local = threading.local()


def numbered(threads: int) -> ThreadPoolExecutor:
    """Return a pool whose threads are numbered."""
    numbers = count()
    return ThreadPoolExecutor(threads, "offpol-diag", lambda: setattr(_local, "number", next(numbers)))


def own(devices: Sequence[str]) -> str:
    """Return the device of this thread among those of a run."""
    return devices[getattr(_local, "number", 0) % len(devices)]
