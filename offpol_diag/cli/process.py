"""Tune the interpreter for a process that runs one command, which saves a third of its time.

The garbage collector would repeatedly scan all imported modules, and once more at exit; memory of batches is
freed without it. BLAS threads would keep other cores busy while idle, and our matrix products are small.
"""

from __future__ import annotations

import atexit
import gc
import os
import re

SELDOM = 500_000
"""Net number of new objects that triggers a collection; a small analysis makes half as many."""
SIZES, SIZE = ("COLUMNS", "LINES", "TERMINAL_WIDTH"), re.compile("[1-9][0-9]{1,3}")
"""Environment variables of the terminal's size, and their valid values: 10 to 9,999."""
THREADS = "OPENBLAS_NUM_THREADS"
"""Environment variable read when numpy is imported, here and in child processes."""


def settle() -> None:
    """Configure the process before a command's imports; the user's number of threads is kept.

    Invalid terminal sizes are removed, since rich would raise on them.
    """
    for name in SIZES:
        if not SIZE.fullmatch(os.environ.get(name, "")):
            os.environ.pop(name, None)
    os.environ.setdefault(THREADS, "1")
    gc.set_threshold(SELDOM)
    atexit.register(gc.freeze)
