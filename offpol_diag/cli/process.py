"""The process that runs one command and ends: what a library sets up for long lives costs it a third.

The collector of garbage would look through all that was imported again and again, and once more at the end.
Nothing large waits for it, since what a batch took is let go of without it. The threads of numpy's products
would keep other cores busy while they wait for the next one; ours are small.
"""

from __future__ import annotations

import atexit
import gc
import os
import re

SELDOM = 500_000
"""New objects, less those that went by themselves, after which it looks; a small analysis makes half."""
SIZES, SIZE = ("COLUMNS", "LINES", "TERMINAL_WIDTH"), re.compile("[1-9][0-9]{1,3}")
"""What says how large a terminal is, and what it may say: 10 to 9,999."""
THREADS = "OPENBLAS_NUM_THREADS"
"""Read when numpy is imported, here and in the processes that this one starts."""


def settle() -> None:
    """Before anything is imported for a command; what the user says of threads stands.

    A width that is none would end in rich with a traceback.
    """
    for name in SIZES:
        if not SIZE.fullmatch(os.environ.get(name, "")):
            os.environ.pop(name, None)
    os.environ.setdefault(THREADS, "1")
    gc.set_threshold(SELDOM)
    atexit.register(gc.freeze)
