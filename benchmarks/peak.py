"""Measure seconds and peak memory of a command and all processes it starts.

Run as a script it starts the command itself: a process inherits the peak of the one that started it, so that
must be small, and a process that has imported torch is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in what `ru_maxrss` counts."""
PAUSE = 0.2
"""Seconds between two looks at all processes: a look takes some milliseconds of a core."""
PROC = Path("/proc")


class Spent(NamedTuple):
    """Time and memory of one run of a command.

    Attributes:
        wall: seconds by the clock.
        cpu: seconds of processor, of all its processes.
        peak: bytes resident of its largest process, at most.
        together: bytes of all its processes, what several share counted once (PSS), at most, as far as it was
            seen; None where the system does not say.
    """

    wall: float
    cpu: float
    peak: int
    together: int | None


def run(command: Sequence[str]) -> Spent:
    """Run a command to its end; its stdout is discarded.

    Raises:
        subprocess.CalledProcessError: it did not exit with 0.
    """
    launcher = [sys.executable, "-I", "-S", __file__, *command]
    return Spent(*json.loads(subprocess.run(launcher, stdout=subprocess.PIPE, check=True).stdout))


def offpol_diag(*arguments: str) -> Spent:
    """Run our command line."""
    return run([sys.executable, "-m", "offpol_diag", *arguments])


# ---------------------------------------------------------------- what Linux says of processes


def below(root: int) -> list[int]:
    """List the processes that a process started, and theirs in turn; none on systems without /proc."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*"):
        if fields := _stat(int(path.name)):
            children.setdefault(int(fields[1]), []).append(int(path.name))
    found, todo = list[int](), children.get(root, [])
    while todo:
        found += todo
        todo = [child for one in todo for child in children.get(one, [])]
    return found


def processor(pids: Iterable[int]) -> float:
    """Return CPU seconds of some processes, and of their children that have ended."""
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(sum(map(int, fields[11:15])) for pid in pids if (fields := _stat(pid))) / ticks


def _stat(pid: int) -> list[str]:
    """Return the fields after the name in /proc/PID/stat (state, parent, …); empty if it has ended."""
    return _text(pid, "stat").rpartition(")")[2].split()


def _kilobytes(pid: int, file: str, key: str) -> int:
    lines = (line.split() for line in _text(pid, file).splitlines())
    return next((int(line[1]) for line in lines if line[0] == key), 0)


def _text(pid: int, file: str) -> str:
    try:
        return (PROC / str(pid) / file).read_text()
    except OSError:
        return ""


# ---------------------------------------------------------------- the script


class _Watch:
    """Sampler of the memory of a process and those below it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.together = self.peak = 0
        self.cpu = 0.0

    def look(self) -> None:
        """Take a sample."""
        others = below(self._pid)
        pss = sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in (self._pid, *others))
        self.together = max(self.together, 1024 * pss)
        largest = max((_kilobytes(pid, "status", "VmHWM:") for pid in others), default=0)
        self.peak = max(self.peak, 1024 * largest)
        self.cpu = max(self.cpu, processor(others))


def _launch(command: Sequence[str]) -> None:
    """Start a command, sample it until it ends, and print the result; exit with its code."""
    before = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    watch = _Watch(child.pid)
    status, usage = _ended(child.pid, watch.look)
    wall = time.perf_counter() - before
    peak = max(usage.ru_maxrss * UNIT, watch.peak)
    cpu = usage.ru_utime + usage.ru_stime + watch.cpu
    print(json.dumps(Spent(wall, cpu, peak, watch.together or None)))
    sys.exit(os.waitstatus_to_exitcode(status))


def _ended(child: int, look: Callable[[], None]) -> tuple[int, Any]:
    """Wait for the end of a process, calling `look` again and again."""
    seen = time.perf_counter() - PAUSE
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage
        if time.perf_counter() - seen >= PAUSE:
            look()
            seen = time.perf_counter()
        time.sleep(0.005)


if __name__ == "__main__":
    _launch(sys.argv[1:])
