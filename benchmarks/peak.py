"""Seconds and peak memory of one command, as the operating system counts them.

Run as a script it starts the command itself: a process inherits the peak of the one that started it, so that
must be small, and a process that has imported torch is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in what `ru_maxrss` counts."""


class Spent(NamedTuple):
    """What one run of a command took: seconds by the clock, seconds of processor, bytes at most."""

    wall: float
    cpu: float
    peak: int


def run(command: Sequence[str]) -> Spent:
    """Run a command to its end; its stdout is thrown away.

    Raises:
        subprocess.CalledProcessError: it did not exit with 0.
    """
    launcher = [sys.executable, "-I", "-S", __file__, *command]
    return Spent(*json.loads(subprocess.run(launcher, stdout=subprocess.PIPE, check=True).stdout))


def offpol_diag(*arguments: str) -> Spent:
    """Run our command line."""
    return run([sys.executable, "-m", "offpol_diag", *arguments])


def _launch(command: Sequence[str]) -> None:
    """Start, wait, print; the exit code is the command's."""
    before = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - before
    print(json.dumps(Spent(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * UNIT)))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _launch(sys.argv[1:])
