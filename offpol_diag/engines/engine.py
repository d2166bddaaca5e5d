"""What runs a job over a dump: the same job, the same number, wherever it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from offpol_diag.accumulators import State
from offpol_diag.batch import Batch
from offpol_diag.readers import Dump

M = TypeVar("M", bound=State)
Job = Callable[[Batch], M]
"""A pure function of one batch on the device it is to run on; a frozen dataclass, so that it can travel."""
Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True)
class Each(Generic[M]):
    """What is done with every batch's result before it is merged.

    Attributes:
        pick: what is wanted of a result, taken where the job ran; a function that can travel.
        use: told that, here, in the order of the rows.
    """

    pick: Callable[[M], Any]
    use: Callable[[Any], None]

    def __call__(self, seen: M) -> None:
        """Both, where the job ran here."""
        self.use(self.pick(seen))


class Engine(Protocol):
    """Runs jobs over the batches of a dump and merges what they leave.

    Attributes:
        device: where the jobs run.
        clock: knows where the time went.
    """

    device: torch.device
    clock: Clock

    @property
    def name(self) -> str:
        """What a report says of it."""
        ...

    @property
    def beside(self) -> int:
        """Bytes of this machine that its processes took at most, beside this one."""
        ...

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading of the dump: `job` on every batch, merged in the order of the rows.

        Args:
            dump: afterwards it knows what the reading skipped and noted.
            job: what to do with a batch.
            each: what is done with every batch's result before it is merged.

        Returns:
            The merged result; None when the dump has no batch.

        Raises:
            DumpError: the dump cannot be read.
        """
        ...


@dataclass
class Clock:
    """Where the time went, in seconds; what runs at once is counted once for each that runs."""

    started: float = field(default_factory=time.perf_counter)
    read: float = 0.0
    compute: float = 0.0

    def seconds(self) -> dict[str, float]:
        """Total, waiting for the reader (decoding included), computing."""
        total = time.perf_counter() - self.started
        return {"total": total, "read": self.read, "compute": self.compute}
