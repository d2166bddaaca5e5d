"""A job whose batches can fail, for threads and for a cluster, whose workers import it; and a dump for it."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


def dump(folder, column="old_log_probs", value=float("nan"), bad=()):
    """Write a dump of 40 sequences in 10 row groups; the first token of bad ones has some value."""
    from tests.test_read import parquet, sequences

    rows = sequences(2)
    for i in bad:
        rows[i]["response_mask"][0], rows[i][column][0] = True, value
    return parquet(4)(folder, rows)


class Ids(tuple):
    """State that holds what batches left, in the order in which they were merged."""

    __slots__ = ()

    def merge(self, other):
        return Ids((*self, *other))


@dataclass(frozen=True)
class Look:
    """Job that leaves a file in `folder`; at a sequence it raises `error`, or is killed, always or once."""

    folder: Path
    at: str = ""
    error: Exception | None = None
    once: bool = False
    seconds: float = 0.0

    def __call__(self, batch):
        ids = batch.scalars["sequence_id"]
        mark = self.folder / ids[0]
        first = not mark.exists()
        mark.touch()
        if self.at in ids and (first or not self.once):
            if self.error:
                raise self.error
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return Ids(ids)
