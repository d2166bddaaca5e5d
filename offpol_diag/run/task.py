"""Define jobs, engines and shard tasks, and the engine of a single process.

The division of a dump and the order of merging depend on the dump alone, so neither the number of workers nor
their speed changes a bit of the result.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
from threadpoolctl import threadpool_limits

from offpol_diag.batch import Batch
from offpol_diag.readers import Dump
from offpol_diag.readers.dump import Findings

T = TypeVar("T")


class State(Protocol):
    """What a job leaves of a part of a dump."""

    def merge(self, other: Self) -> Self:
        """Merge what is left of two parts."""
        ...


M = TypeVar("M", bound=State)
Job = Callable[[Batch], M]
"""A pure function of one batch; a frozen dataclass, so that it can be pickled."""
Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


TOKENS = 1 << 20
"""Tokens per batch, a balance between the fixed cost of a batch and memory."""


@dataclass(frozen=True)
class Each(Generic[M]):
    """A hook that sees every batch's result before it is merged.

    Attributes:
        pick: extracts data from a result in the process of the job; a picklable function.
        use: called with these data in this process, in the order of the rows.
    """

    pick: Callable[[M], Any]
    use: Callable[[Any], None]


@dataclass
class Clock:
    """Time spent in seconds; parallel workers are summed."""

    started: float = field(default_factory=time.perf_counter)
    read: float = 0.0
    compute: float = 0.0

    def seconds(self) -> dict[str, float]:
        """Return the seconds in total, waiting for the reader (decoding included), and computing."""
        total = time.perf_counter() - self.started
        return {"total": total, "read": self.read, "compute": self.compute}


class Engine(Protocol):
    """Protocol of engines, which run jobs over the batches of a dump and merge their results."""

    clock: Clock

    @property
    def device(self) -> str:
        """Where presets are computed."""
        ...

    @property
    def name(self) -> str:
        """Name of the engine in a report."""
        ...

    @property
    def beside(self) -> int:
        """Peak memory of its local processes in bytes, without this process."""
        ...

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """Run `job` on every batch in one pass over the dump, and merge the results in row order.

        Afterwards the dump holds the findings of the pass. Returns None when it has no batch.

        Raises:
            DumpError: the dump cannot be read.
        """
        ...


# ---------------------------------------------------------------- one process


@dataclass
class Local:
    """Engine of one process.

    Attributes:
        device: where presets are computed, for the record.
        beside_reading: whether reading and computing overlap, in two threads.
    """

    device: str = "cpu"
    beside_reading: bool = True
    progress: Progress | None = None
    clock: Clock = field(default_factory=Clock)
    name = "local"
    beside = 0

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`."""
        (found,) = self.over([dump], job, each)
        return found

    def over(self, dumps: Sequence[Dump], job: Job[M], each: Each[M] | None = None) -> Iterator[M | None]:
        """Yield `reduce` of each dump; reading the next overlaps with computing."""
        merged: M | None = None
        at = 0
        for which, seen in self._results(dumps, job):
            while at < which:
                yield merged
                merged, at = None, at + 1
            if each:
                each.use(each.pick(seen))
            merged = seen if merged is None else merged.merge(seen)
        for _ in dumps[at:]:
            yield merged
            merged = None

    def _results(self, dumps: Sequence[Dump], job: Job[M]) -> Iterator[tuple[int, M]]:
        """Yield results in order, each with the index of its dump; reading is one batch ahead."""

        def ready(at: int, batch: Batch) -> Callable[[], tuple[int, M]]:
            return partial(self._run, job, at, batch)

        calls = starmap(ready, self._batches(dumps))
        if self.beside_reading:
            with one_thread(), ThreadPoolExecutor(1, "offpol-diag") as pool:
                yield from in_order(pool, calls, 1)
        else:
            for call in calls:
                found = call()
                del call  # frees its batch before the next one is read
                yield found

    def _run(self, job: Job[M], at: int, batch: Batch) -> tuple[int, M]:
        before = time.perf_counter()
        try:
            with np.errstate(all="ignore"):  # of a thread's own
                return at, job(batch)
        finally:
            self.clock.compute += time.perf_counter() - before

    def _batches(self, dumps: Sequence[Dump]) -> Iterator[tuple[int, Batch]]:
        """Yield every batch, with the index of its dump."""
        done, rows = 0, sum(dump.rows for dump in dumps)

        def count(some: int) -> None:
            nonlocal done
            done += some
            if self.progress:
                self.progress(done, rows)

        for at, dump in enumerate(dumps):
            batches = dump.batches(count)
            while True:
                before = time.perf_counter()
                batch = next(batches, None)
                self.clock.read += time.perf_counter() - before
                if batch is None:
                    break
                yield at, batch
                del batch


def in_order(pool: Executor, calls: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """Run calls in a pool and yield their results in order, with at most `most` + 1 calls pending."""
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            del call  # frees its batch before the next one is read
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS to one thread within the block, so that other workers keep their cores."""
    with threadpool_limits(1, user_api="blas"):
        yield


def be_one_thread() -> None:
    """Limit this process to one thread per library for good, so that other workers keep their cores."""
    pa.set_cpu_count(1)
    threadpool_limits(1, user_api="blas")


_worker = 0


def be_worker(number: int) -> None:
    """Let this process know which of the workers it is."""
    global _worker
    _worker = number


def own(devices: Sequence[str]) -> str:
    """Return the device of this worker among those of a run."""
    return devices[_worker % len(devices)]


# ---------------------------------------------------------------- one shard of a dump


@dataclass(frozen=True)
class Order:
    """A job to run on every shard of a dump; `pick` extracts further data from each batch's result."""

    dump: Dump
    job: Job[Any]
    pick: Callable[[Any], Any] | None


@dataclass(frozen=True)
class Report:
    """A worker's report on its shard, small whatever its size; seconds of reading and computing."""

    findings: Findings
    rows: int
    read: float
    compute: float


Result = tuple[bytes, list[Any], Report]
"""The merged state, packed; the data picked from every batch, in order; the report."""


@np.errstate(all="ignore")
def read_shard(order: Order, shard: Dump, engine: Local) -> Result:
    """Read one shard and merge its results."""
    picked: list[Any] = []
    rows = shard.rows
    state = engine.reduce(shard, order.job, Each(order.pick, picked.append) if order.pick else None)
    return packed(state), picked, Report(shard.findings(), rows, engine.clock.read, engine.clock.compute)


def taken(result: Result, each: Each[M] | None, clock: Clock) -> tuple[M | None, Findings]:
    """Unpack a shard's state and reader findings; use its picked data and add its times to the clock."""
    data, picked, report = result
    for one in picked:
        if each:
            each.use(one)
    clock.read += report.read
    clock.compute += report.compute
    return unpacked(data), report.findings


def merged(shards: Iterable[tuple[M | None, Findings]], dump: Dump) -> M | None:
    """Merge the states of all shards in order, and their readers' findings into the dump."""
    found: M | None = None
    findings = []
    for state, notes in shards:
        found = merge(found, state)
        findings.append(notes)
    dump.merge_findings(findings)
    return found


def merge(one: M | None, two: M | None) -> M | None:
    """Merge two states; None stands for a dump without batches."""
    return two if one is None else one if two is None else one.merge(two)


def packed(thing: object) -> bytes:
    """Pickle a job, dump or state."""
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    """Unpickle a `packed` object; the bytes come only from processes of the same run."""
    return pickle.loads(data)
