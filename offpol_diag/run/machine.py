"""How many cores and how much memory this process may use."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

THREAD = 300 << 20
"""Peak memory of a computing thread in bytes, with its batch."""
GROUP = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def share_heap() -> None:
    """Let all threads allocate from one heap: what one has freed another can use. No effect without glibc."""
    arena_max = -8
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(arena_max, 1)


def cores() -> int:
    """Return the number of cores this process may use, by CPU affinity and cgroup quota."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words("cpu.max") or _words("cpu/cpu.cfs_quota_us") + _words("cpu/cpu.cfs_period_us")
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]):
        there = min(there, -(-int(quota[0]) // int(quota[1])))
    return max(1, there)


def room() -> int:
    """Return the number of threads that compute: one per core, as free memory allows, at least one."""
    return max(1, min(cores(), available() // THREAD))


def available() -> int:
    """Return the free memory of this process in bytes; very much where that is unknown."""
    limits = [1 << 62]
    if (free := _named(MEMORY, "MemAvailable:")) is not None:
        limits.append(1024 * free)
    most, taken = _words("memory.max"), _words("memory.current")
    if most and taken and most[0].isdecimal():
        cache = _named(GROUP / "memory.stat", "file") or 0  # it can be reclaimed, so it counts as free
        limits.append(int(most[0]) - int(taken[0]) + cache)
    return min(limits)


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
