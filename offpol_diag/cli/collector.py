"""The collector of garbage, in a process that runs one command and ends.

By its own settings it looks through all that was imported again and again, and once more when the process
ends: a fifth of the time of a small analysis. Nothing large waits for it, since what a batch took is let go
of without it.
"""

from __future__ import annotations

import atexit
import gc

SELDOM = 500_000
"""New objects, less those that went by themselves, after which it looks; a small analysis makes half."""


def rest() -> None:
    """Let it look seldom from now on, and at the end at nothing."""
    gc.set_threshold(SELDOM)
    atexit.register(gc.freeze)
