"""The way of a batch to where it is computed: on a GPU its copy runs beside the work on the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from offpol_diag.batch import Batch


@dataclass(frozen=True)
class Staged:
    """A batch on its way.

    Attributes:
        host: as it was read.
        there: on the device, perhaps not yet whole; None where it had no room when it was sent.
        ready: the event after which it is whole; None where nothing need be waited for.
    """

    host: Batch
    there: Batch | None
    ready: Any = None


FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What CUDA and its libraries say where memory is short that torch did not ask for itself."""


def full(error: RuntimeError) -> bool:
    """Whether memory was short, of the device or that from which it copies."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in FULL)


class Staging(Protocol):
    """Sends batches to one device."""

    def put(self, batch: Batch) -> Staged:
        """Send a batch, and do not wait."""
        ...

    def take(self, staged: Staged) -> Batch:
        """The batch on the device, whole for all that is queued from now on.

        Raises:
            RuntimeError: it has no room there; see `full`.
        """
        ...


class Here:
    """The host's own memory: there is no way."""

    def put(self, batch: Batch) -> Staged:
        """The batch itself."""
        return Staged(batch, batch)

    def take(self, staged: Staged) -> Batch:
        """The batch itself."""
        return staged.host


class Pinned:
    """A GPU: through pinned memory, on a stream of its own.

    Args:
        device: which.
        cuda: `torch.cuda`, or what stands for it.
        pin: copies a tensor to pinned memory.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        pin: Callable[[Tensor], Tensor] = lambda x: x.pin_memory(),
    ) -> None:
        self._device, self._cuda, self._pin = device, cuda, pin
        self._stream = cuda.Stream(device=device)

    def put(self, batch: Batch) -> Staged:
        """Queue the copies of a batch and an event behind them.

        The thread turns to the device before it turns to the stream: leaving the stream of another device it
        would wake the first one, which others may hold.
        """
        try:
            with self._cuda.device(self._device), self._cuda.stream(self._stream):
                there = batch.over(self._pin).to(self._device, non_blocking=True)
                ready = self._cuda.Event()
                ready.record(self._stream)
        except RuntimeError as error:
            if not full(error):
                raise
            return Staged(batch, None)
        return Staged(batch, there, ready)

    def take(self, staged: Staged) -> Batch:
        """Let the stream of this thread wait for the copies; the host does not."""
        if staged.there is None:
            return staged.host.to(self._device)
        current = self._cuda.current_stream(self._device)
        current.wait_event(staged.ready)
        staged.there.over(lambda x: self._held(x, current))
        return staged.there

    def _held(self, x: Tensor, stream: Any) -> Tensor:
        """The memory of x is not given away before what that stream does with it is done."""
        x.record_stream(stream)
        return x


@cache
def staging(device: torch.device) -> Staging:
    """How batches get to a device; on one stream, since memory let go of on one does not serve another."""
    return Pinned(device) if device.type == "cuda" else Here()
