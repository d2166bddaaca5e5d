"""A job whose batches can fail, for threads and for a cluster, whose workers import it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from threadpoolctl import threadpool_info

from offpol_diag.errors import DumpError


@dataclass(frozen=True)
class Ids:
    """State that holds the ids of sequences, how they were merged, and the threads of BLAS meanwhile."""

    ids: tuple[int, ...]
    merges: str = "."
    blas: frozenset[int] = frozenset()

    def merge(self, other: Ids) -> Ids:
        return Ids(self.ids + other.ids, f"({self.merges}{other.merges})", self.blas | other.blas)


@dataclass(frozen=True)
class Look:
    """Job that takes `seconds`, leaves a file in `folder`, and fails at a sequence, always or once."""

    folder: Path
    at: int = -1
    trouble: str = ""
    once: bool = False
    seconds: float = 0.0

    def __call__(self, batch):
        ids = tuple(batch.scalars["sequence_id"])
        mark = self.folder / f"{ids[0]}"
        first = not mark.exists()
        mark.touch()
        if self.at in ids and (first or not self.once):
            trouble(self.trouble)
        time.sleep(self.seconds)
        return Ids(ids, blas=blas())


def trouble(what):
    match what:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "refused":
            raise DumpError("a bad row", "mend it")
        case "bug":
            raise ZeroDivisionError("a bug")


def blas():
    return frozenset(one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas")
