"""What every engine shares: a job, one process that runs it over a dump, and one shard's share of the work.

Where a dump is cut and in which order results are merged depends on the dump alone, so neither the number of
workers nor which of them was faster changes a bit of the result.
"""

from __future__ import annotations

import io
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine.accumulators import State
from offpol_diag.readers import Dump
from offpol_diag.readers.dump import Noticed
from offpol_diag.readers.shards import ahead
from offpol_diag.run.gpu import Fit, send

T = TypeVar("T")
M = TypeVar("M", bound=State)
Job = Callable[[Batch], M]
"""A pure function of one batch on the device it is to run on; a frozen dataclass, which can be pickled."""
Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True)
class Each(Generic[M]):
    """What is done with every batch's result before it is merged.

    Attributes:
        pick: what is wanted of a result, taken where the job ran; a function that can be pickled.
        use: called with that in this process, in the order of the rows.
    """

    pick: Callable[[M], Any]
    use: Callable[[Any], None]

    def __call__(self, seen: M) -> None:
        """Both, where the job ran here."""
        self.use(self.pick(seen))


@dataclass
class Clock:
    """Where the time went, in seconds; what runs at once is counted once for each that runs."""

    started: float = field(default_factory=time.perf_counter)
    read: float = 0.0
    compute: float = 0.0

    def seconds(self) -> dict[str, float]:
        """Total, waiting for the reader (decoding included), computing."""
        total = time.perf_counter() - self.started
        return {"total": total, "read": self.read, "compute": self.compute}


class Engine(Protocol):
    """Runs jobs over the batches of a dump and merges their results.

    Attributes:
        device: where the jobs run.
        clock: knows where the time went.
    """

    device: torch.device
    clock: Clock

    @property
    def name(self) -> str:
        """What a report says of it."""
        ...

    @property
    def beside(self) -> int:
        """Bytes of this machine that its processes took at most, beside this one."""
        ...

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading of the dump: `job` on every batch, merged in the order of the rows.

        Args:
            dump: afterwards it knows what the reading skipped and noted.
            job: what to do with a batch.
            each: what is done with every batch's result before it is merged.

        Returns:
            The merged result; None when the dump has no batch.

        Raises:
            DumpError: the dump cannot be read.
        """
        ...


# ---------------------------------------------------------------- one process


@dataclass
class Local:
    """One process on one device.

    Attributes:
        device: where the jobs run.
        beside_reading: whether a thread computes while another reads.
        readers: threads that read, where the device is a GPU; with 0 the dump is read as for a CPU.
        progress: called as rows are read.
        clock: knows where the time went.
    """

    device: torch.device
    beside_reading: bool = True
    readers: int = 0
    progress: Progress | None = None
    clock: Clock = field(default_factory=Clock)
    name = "local"
    beside = 0

    def __post_init__(self) -> None:
        self._fit = Fit(self.device)

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`."""
        (found,) = self.over([dump], job, each)
        return found

    def over(self, dumps: Sequence[Dump], job: Job[M], each: Each[M] | None = None) -> Iterator[M | None]:
        """`reduce` of one dump after the other; the next is begun while one is computed."""
        merged: M | None = None
        at = 0
        for which, seen in self._results(dumps, job):
            while at < which:
                yield merged
                merged, at = None, at + 1
            if each:
                each(seen)
            merged = seen if merged is None else merged.merge(seen)
        for _ in dumps[at:]:
            yield merged
            merged = None

    def _results(self, dumps: Sequence[Dump], job: Job[M]) -> Iterator[tuple[int, M]]:
        """Results in order, each with the number of its dump; reading runs ahead by one batch."""
        calls = (partial(self._run, job, at, send(batch, self.device)) for at, batch in self._batches(dumps))
        if self.beside_reading:
            with one_thread(), ThreadPoolExecutor(1, "offpol-diag", torch.set_num_threads, (1,)) as pool:
                for found in in_order(pool, calls, 1):
                    yield from found
        else:
            for call in calls:
                yield from call()

    def _run(self, job: Job[M], at: int, sent: Any) -> list[tuple[int, M]]:
        before = time.perf_counter()
        try:
            return [(at, found) for found in self._fit.results(job, sent)]
        finally:
            self.clock.compute += time.perf_counter() - before

    def _batches(self, dumps: Sequence[Dump]) -> Iterator[tuple[int, Batch]]:
        """Every batch, with the number of its dump."""
        done, rows = 0, sum(dump.rows for dump in dumps)

        def count(some: int) -> None:
            nonlocal done
            done += some
            if self.progress:
                self.progress(done, rows)

        for at, dump in enumerate(dumps):
            batches = ahead(dump, self.readers, count) if self.readers else dump.batches(count, even=True)
            while True:
                before = time.perf_counter()
                batch = next(batches, None)
                self.clock.read += time.perf_counter() - before
                if batch is None:
                    break
                yield at, batch


def in_order(pool: Executor, calls: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """The results of calls in their order; when one more than `most` wait, the first is waited for."""
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            del call  # it holds a batch, and the next one is about to be read
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block torch and numpy's products take one thread: other cores have work of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def be_one_thread() -> None:
    """The whole process has one core: threads of libraries would take those of other workers."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    threadpool_limits(1, user_api="blas")


# ---------------------------------------------------------------- one shard of a dump


@dataclass(frozen=True)
class Order:
    """What is to be done with every shard of a dump.

    Attributes:
        dump: the whole.
        job: done with every batch.
        pick: what of a batch's result goes back beside the merged state; None for nothing.
    """

    dump: Dump
    job: Job[Any]
    pick: Callable[[Any], Any] | None


@dataclass(frozen=True)
class Report:
    """What a worker says of its shard; small, whatever the shard.

    Attributes:
        noticed: by the reader.
        rows: of the files.
        read: seconds.
        compute: seconds.
    """

    noticed: Noticed
    rows: int
    read: float
    compute: float


Result = tuple[bytes, list[Any], Report]
"""The merged state, packed; what was picked of every batch, in order; the report."""


def read_shard(order: Order, shard: Dump, engine: Local) -> Result:
    """One shard, read and merged."""
    picked: list[Any] = []
    rows = shard.rows
    state = engine.reduce(shard, order.job, Each(order.pick, picked.append) if order.pick else None)
    return packed(state), picked, Report(shard.noticed(), rows, engine.clock.read, engine.clock.compute)


def taken(result: Result, each: Each[M] | None, clock: Clock) -> tuple[M | None, Noticed]:
    """A shard's state, and what its reader noticed; what was picked is used, and its seconds are counted."""
    data, picked, report = result
    for one in picked:
        if each:
            each.use(one)
    clock.read += report.read
    clock.compute += report.compute
    return unpacked(data), report.noticed


def merged(shards: Iterable[tuple[M | None, Noticed]], dump: Dump) -> M | None:
    """The states of all shards, merged in their order; the dump is told what their readers noticed."""
    found: M | None = None
    noticed = []
    for state, notes in shards:
        found = merge(found, state)
        noticed.append(notes)
    dump.notice(noticed)
    return found


def merge(one: M | None, two: M | None) -> M | None:
    """Both; None stands for a dump without batches."""
    return two if one is None else one if two is None else one.merge(two)


class _Packer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return torch.from_numpy, (obj.detach().cpu().contiguous().numpy(),)
        return NotImplemented


def packed(thing: object) -> bytes:
    """A job, a dump or a state, pickled, with tensors as plain arrays of the host.

    A state that was made on a GPU can so be merged where there is none, and a view of a large tensor takes no
    more than what it shows.
    """
    out = io.BytesIO()
    _Packer(out, pickle.HIGHEST_PROTOCOL).dump(thing)
    return out.getvalue()


def unpacked(data: bytes) -> Any:
    """The same again, tensors on the CPU; bytes come only from processes of the same run."""
    return pickle.loads(data)
