"""Run a job over a dump: threads compute its batches, and their states are merged in the order of the dump.

Batches are cut by the dump alone and merged one after another, so neither the number of threads nor their
speed changes a bit of the result. NumPy's functions of large arrays leave the interpreter's lock to other
threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np

from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import Dump, Progress

GROUP, MEMORY = Path("/sys/fs/cgroup"), Path("/proc/meminfo")
ONE_HEAP = (-8, 1)
"""glibc's M_ARENA_MAX, and its value with which another thread can use what one has freed."""


class State(Protocol):
    """What a job leaves of a part of a dump."""

    def merge(self, other: Self) -> Self:
        """Merge what is left of this part and of a later one."""
        ...


M = TypeVar("M", bound=State)
Job = Callable[[Batch], M]
"""A pure function of one batch; a frozen dataclass, so that a cluster can pickle it."""
Each = Callable[[M], M]
"""Takes from a state, in this process and in the order of the rows, what need not be merged."""


@dataclass
class Threads:
    """Engine of this process: this thread reads and merges, others compute.

    Attributes:
        threads: how many compute; None for one per core.
    """

    threads: int | None = None
    progress: Progress | None = None
    name = "local"

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """Run `job` on every batch in one pass over the dump, and merge the states in the order of the rows.

        Afterwards the dump holds what the pass has seen. Returns None when it has no batch.
        """
        with suppress(AttributeError, OSError):  # where the C library is another
            ctypes.CDLL(None).mallopt(*ONE_HEAP)
        state: M | None = None
        for found in self._states(dump, job):
            found = each(found) if each else found
            state = found if state is None else state.merge(found)
        return state

    def _states(self, dump: Dump, job: Job[M]) -> Iterator[M]:
        """Yield the states of all batches in order; at most `threads` batches are held."""
        threads, numbers, waiting = self.threads or cores(), count(), deque[Future[M]]()
        compute = np.errstate(all="ignore")(job)  # each thread has a state of its own
        with ThreadPoolExecutor(
            threads, "offpol-diag", lambda: setattr(_thread, "number", next(numbers))
        ) as pool:
            try:
                for batch in dump.batches(self.progress):
                    waiting.append(pool.submit(compute, batch))
                    del batch  # frees it before the next one is read
                    if len(waiting) >= threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)


_thread = threading.local()


def device_of_thread(devices: Sequence[str]) -> str:
    """Return the device of this thread: threads take those of a run in turn."""
    return devices[getattr(_thread, "number", 0) % len(devices)]


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def cores() -> int:
    """Return the number of cores this process may use, by CPU affinity and the quota of its cgroup."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words(GROUP / "cpu.max")  # microseconds of CPU time, or "max", in a period
    limited = len(quota) == 2 and quota[0].isdecimal()
    return max(1, min(there, -(-int(quota[0]) // int(quota[1])))) if limited else there


def available() -> int:
    """Return the bytes free for this process, in the machine and in its cgroup; very many where unknown."""
    machine, free = _words(MEMORY), [1 << 62]
    if "MemAvailable:" in machine:
        free.append(1024 * int(machine[machine.index("MemAvailable:") + 1]))
    limit = [*_words(GROUP / "memory.max"), *_words(GROUP / "memory.current")]
    if len(limit) == 2 and limit[0].isdecimal():
        free.append(int(limit[0]) - int(limit[1]))
    return min(free)


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []
