"""One process on this machine: the dump is read in one thread while others compute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from threadpoolctl import threadpool_limits

from offpol_diag.batch import Batch
from offpol_diag.engines.engine import Clock, Each, Job, M, Progress
from offpol_diag.engines.fitting import Fit
from offpol_diag.engines.room import cores
from offpol_diag.engines.staging import Staged, staging
from offpol_diag.readers import Dump
from offpol_diag.readers.ahead import ahead

Placed = tuple[int, Batch]

WORKERS = 1
"""Batches computed at once on a CPU. With many presets a second worker mostly waits for the interpreter's
lock, and it holds as much memory again: more cores are used by more processes (`processes.py`).
"""
READERS = 8
"""Threads that read for one GPU at most: each holds a batch."""


@dataclass
class Local:
    """One process on one device.

    Attributes:
        device: where the jobs run.
        workers: batches that are computed at once; with 0 the thread that reads computes as well.
        readers: threads that read, where the device is a GPU; with 0 the dump is read as for a CPU.
        progress: called as rows are read.
        clock: told where the time goes.
    """

    device: torch.device
    workers: int = 1
    readers: int = 0
    progress: Progress | None = None
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def on(cls, device: torch.device, progress: Progress | None = None) -> Local:
        """With `WORKERS`; a GPU is kept busy by one queue, and by all cores that read for it."""
        if device.type == "cpu":
            return cls(device, WORKERS, progress=progress)
        return cls(device, 1, min(cores(), READERS), progress)

    @property
    def name(self) -> str:
        """What a report says of it."""
        return "local"

    @property
    def beside(self) -> int:
        """`Engine.beside`: none."""
        return 0

    @cached_property
    def _fit(self) -> Fit:
        return Fit(staging(self.device))

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`."""
        (found,) = self.over([dump], job, each)
        return found

    def over(self, dumps: Sequence[Dump], job: Job[M], each: Each[M] | None = None) -> Iterator[M | None]:
        """`reduce` of one dump after the other; the next is begun while one is computed."""
        merged: M | None = None
        at = 0
        for which, seen in self._results(self._batches(dumps), job):
            while at < which:
                yield merged
                merged, at = None, at + 1
            if each:
                each(seen)
            merged = seen if merged is None else merged.merge(seen)
        for _ in dumps[at:]:
            yield merged
            merged = None

    def _batches(self, dumps: Sequence[Dump]) -> Iterator[Placed]:
        """Every batch, with the number of its dump."""
        done, rows = 0, sum(dump.rows for dump in dumps)

        def count(some: int) -> None:
            nonlocal done
            done += some
            if self.progress:
                self.progress(done, rows)

        return self._timed((at, batch) for at, dump in enumerate(dumps) for batch in self._read(dump, count))

    def _read(self, dump: Dump, count: Callable[[int], None]) -> Iterator[Batch]:
        return ahead(dump, self.readers, count) if self.readers else dump.batches(count, even=True)

    def _timed(self, batches: Iterator[Placed]) -> Iterator[Placed]:
        while True:
            before = time.perf_counter()
            found = next(batches, None)
            self.clock.read += time.perf_counter() - before
            if found is None:
                return
            yield found

    def _results(self, batches: Iterator[Placed], job: Job[M]) -> Iterator[tuple[int, M]]:
        """In order, each with the number of its dump."""
        if self.workers:
            yield from self._beside(batches, job)
            return
        for at, batch in batches:
            for seen in self._run(job, self._fit.staging.put(batch)):
                yield at, seen

    def _beside(self, batches: Iterator[Placed], job: Job[M]) -> Iterator[tuple[int, M]]:
        """Computed in threads of their own; reading runs ahead by no more than one batch for each."""
        with one_thread_each(self.workers) as pool:
            waiting: deque[tuple[int, Future[list[M]]]] = deque()
            try:
                for at, batch in batches:
                    waiting.append((at, pool.submit(self._run, job, self._fit.staging.put(batch))))
                    del batch
                    if len(waiting) > self.workers:
                        yield from _taken(waiting)
                while waiting:
                    yield from _taken(waiting)
            finally:
                for _, future in waiting:
                    future.cancel()

    def _run(self, job: Job[M], staged: Staged) -> list[M]:
        before = time.perf_counter()
        try:
            return self._fit.results(job, staged)
        finally:
            self.clock.compute += time.perf_counter() - before


def _taken(waiting: deque[tuple[int, Future[list[M]]]]) -> Iterator[tuple[int, M]]:
    at, future = waiting.popleft()
    return ((at, seen) for seen in future.result())


@contextmanager
def one_thread_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads take one core each: torch's own threads would fight over the same cores."""
    with one_thread(), ThreadPoolExecutor(workers, "offpol-diag", torch.set_num_threads, (1,)) as pool:
        yield pool


@contextmanager
def one_thread() -> Iterator[None]:
    """Here too: where all cores are busy, a small sum that is shared out waits for them.

    The threads of numpy's products are those of all threads here, and keep a core busy while they wait.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
