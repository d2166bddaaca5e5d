"""This machine: the dump is read in one thread while others compute."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from offpol_diag.batch import Batch
from offpol_diag.engines.engine import Clock, Each, Job, M, Progress
from offpol_diag.engines.fitting import results
from offpol_diag.engines.staging import Staged, Staging, staging
from offpol_diag.readers import Dump

WORKERS = 1
"""Batches computed at once on a CPU. With many presets a second worker mostly waits for the interpreter's
lock, and it holds as much memory again: more cores are used by more processes (`ray.py`).
"""


@dataclass
class Local:
    """One process on one device.

    Attributes:
        device: where the jobs run.
        workers: batches that are computed at once.
        progress: called as rows are read.
        clock: told where the time goes.
    """

    device: torch.device
    workers: int = 1
    progress: Progress | None = None
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def on(cls, device: torch.device, progress: Progress | None = None) -> Local:
        """With `WORKERS`; a GPU is kept busy by one queue."""
        return cls(device, WORKERS if device.type == "cpu" else 1, progress)

    @property
    def name(self) -> str:
        """What a report says of it."""
        return "local"

    @cached_property
    def _staging(self) -> Staging:
        return staging(self.device)

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`."""
        merged: M | None = None
        for seen in self._results(self._batches(dump), job):
            if each:
                each(seen)
            merged = seen if merged is None else merged.merge(seen)
        return merged

    def _batches(self, dump: Dump) -> Iterator[Batch]:
        done = 0

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            if self.progress:
                self.progress(done, dump.rows)

        return self._timed(dump.batches(count))

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.clock.read += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def _results(self, batches: Iterator[Batch], job: Job[M]) -> Iterator[M]:
        """In order; reading runs ahead by no more than one batch for each worker."""
        with one_thread_each(self.workers) as pool:
            waiting: deque[Future[list[M]]] = deque()
            try:
                for batch in batches:
                    waiting.append(pool.submit(self._run, job, self._staging.put(batch)))
                    del batch
                    if len(waiting) > self.workers:
                        yield from waiting.popleft().result()
                while waiting:
                    yield from waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _run(self, job: Job[M], staged: Staged) -> list[M]:
        before = time.perf_counter()
        try:
            return results(job, staged, self._staging)
        finally:
            self.clock.compute += time.perf_counter() - before


@contextmanager
def one_thread_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads take one core each: torch's own threads would fight over the same cores."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "offpol-diag", torch.set_num_threads, (1,))
    try:
        with pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
