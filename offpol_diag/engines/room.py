"""What this process may use of the machine: cores, and memory for workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

WORKER = 914 << 20
"""Bytes that a worker takes of its own at most, beyond what it shares with the server it was forked from.

Measured (`VmHWM`) with every preset and batches of `fitting.TOKENS`: 410 MB with three log-probs, 840
MB with every column per token and many tokens far from on-policy; and 64 MB that `readers.kept` may hold.
"""
GROUP = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")


def cores() -> int:
    """How many cores this process may use: those of its affinity, no more than the quota of its group."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(there, _quota() or there))


def workers() -> int:
    """One for each core, as far as the memory reaches; at least one."""
    free = _free()
    return cores() if free is None else max(1, min(cores(), free // WORKER))


def _quota() -> int | None:
    """Cores that a control group allows, rounded up; None for all."""
    found = _words(GROUP / "cpu.max") or _words(
        GROUP / "cpu/cpu.cfs_quota_us", GROUP / "cpu/cpu.cfs_period_us"
    )
    if len(found) != 2 or not found[0].isdecimal() or not int(found[1]):
        return None
    return -(-int(found[0]) // int(found[1])) or None


def _free() -> int | None:
    """Bytes that may still be taken, by the machine and by the control group; None where nobody says."""
    return min(_known(_of_machine(), _of_group()), default=None)


def _known(*found: int | None) -> Iterator[int]:
    return (one for one in found if one is not None)


def _of_machine() -> int | None:
    lines = (line.split() for line in _text(MEMORY).splitlines())
    return next((1024 * int(line[1]) for line in lines if line[0] == "MemAvailable:"), None)


def _of_group() -> int | None:
    """The cache of files counts as taken there, and is given back when it is needed: it is not counted."""
    most, taken = _words(GROUP / "memory.max"), _words(GROUP / "memory.current")
    if not most or not taken or not most[0].isdecimal():
        return None
    lines = (line.split() for line in _text(GROUP / "memory.stat").splitlines())
    cache = next((int(line[1]) for line in lines if line[0] == "file"), 0)
    return max(0, int(most[0]) - int(taken[0]) + cache)


def _words(*paths: Path) -> list[str]:
    return [word for path in paths for word in _text(path).split()]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
