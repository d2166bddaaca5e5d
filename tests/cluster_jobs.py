"""Jobs for a cluster whose workers fail once: a file marks that a failure has happened."""

from __future__ import annotations

import os
import signal
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from offpol_diag.errors import DumpError
from offpol_diag.run import task


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


def half_sent_once(first):
    def half(self, buffer):
        os.write(self._handle, struct.pack("!i", len(buffer)) + bytes(buffer)[: len(buffer) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    if first:
        Connection._send_bytes = half


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


def broken_pipe(first):
    raise BrokenPipeError("of the job's own")


class Strange(Exception):
    """An object that cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(one)


def strange(first):
    raise Strange(1, 2)


TROUBLES = {
    one.__name__: one
    for one in (
        killed_once,
        killed_always,
        half_sent_once,
        unread_once,
        unread_always,
        absent,
        refused_once,
        bug,
        broken_pipe,
        strange,
    )
}


def length(seen: Ids) -> int:
    """Return the number of ids in a batch's result."""
    return len(seen.ids)


@dataclass(frozen=True)
class Place:
    """Job that returns which worker runs it; it takes a while, so that all workers have parts."""

    def __call__(self, batch):
        time.sleep(0.05)
        return Ids((int(task.own(("0", "1", "2"))),))
