"""Jobs for a cluster whose workers fail once: a file marks that a failure has happened."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from offpol_diag.errors import DumpError


@dataclass(frozen=True)
class Ids:
    """Job that collects the ids of the sequences in order, and a record of the merges."""

    ids: tuple[int, ...]
    shape: str = "."

    def merge(self, other: Ids) -> Ids:
        return Ids(self.ids + other.ids, f"({self.shape}{other.shape})")


@dataclass(frozen=True)
class Look:
    """Job that collects the ids of a batch and, when it looks at `at`, lets something happen.

    Attributes:
        folder: a file is left in it for each batch.
        at: an id.
        trouble: a name in `TROUBLES`.
        seconds: each batch takes.
    """

    folder: Path
    at: int = -1
    trouble: str = ""
    seconds: float = 0.0

    def __call__(self, batch):
        ids = tuple(batch.scalars["sequence_id"])
        again = self.folder / f"{ids[0]}"
        first = not again.exists()
        again.touch()
        if self.at in ids:
            TROUBLES[self.trouble](first)
        time.sleep(self.seconds)
        return Ids(ids)


@dataclass(frozen=True)
class Threads:
    """Job that reports the number of threads of numpy's matrix products while a batch is computed."""

    def __call__(self, batch):
        np.ones((2, 2)) @ np.ones((2, 2))
        return Ids(tuple(one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"))


def killed_once(first):
    if first:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_always(first):
    os.kill(os.getpid(), signal.SIGKILL)


def unread_once(first):
    if first:
        unread_always(first)


def unread_always(first):
    raise DumpError("the disk is away", "wait") from OSError("gone")


def absent(first):
    raise DumpError("the data cannot be read", "the file is damaged") from FileNotFoundError("x")


def refused_once(first):
    if first:
        raise DumpError("a bad row", "mend it")


def bug(first):
    raise ZeroDivisionError("a bug")


TROUBLES = {
    one.__name__: one
    for one in (
        killed_once,
        killed_always,
        unread_once,
        unread_always,
        absent,
        refused_once,
        bug,
    )
}


def length(seen: Ids) -> int:
    """Return the number of ids in a batch's result."""
    return len(seen.ids)
