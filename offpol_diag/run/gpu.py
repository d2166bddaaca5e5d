"""GPUs: which of them compute, how batches get there, and what to do where memory is short."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.errors import MemoryShortage, UsageError

T = TypeVar("T")

# ---------------------------------------------------------------- which device

HINT = "give auto, cpu, cuda or cuda:N"


@dataclass(frozen=True)
class Choice:
    """Where to compute.

    Attributes:
        devices: at least one, of one kind.
        unused: why no GPU was taken though there is one; empty where that is not so.
    """

    devices: tuple[torch.device, ...]
    unused: str = ""


def devices(name: str) -> Choice:
    """What a name means here: auto is all GPUs that work, or the CPU where none does; cuda is all GPUs.

    Raises:
        UsageError: no such device, or it does not work.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = tuple(torch.device("cuda", at) for at in range(there))
    if name == "auto":
        return _working(every)
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not known", HINT) from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported", HINT)
    if found.type == "cuda" and (found.index or 0) >= there:
        raise UsageError(f"device {name!r}: there are {there} CUDA devices here", "use --device cpu")
    chosen = every if found.type == "cuda" and found.index is None else (found,)
    for device in chosen:
        if why := trouble(device):
            raise UsageError(f"device {str(device)!r} does not work: {why}", "use --device cpu")
    return Choice(chosen)


def _working(every: Sequence[torch.device]) -> Choice:
    """The GPUs that work, else the CPU."""
    why = {device: trouble(device) for device in every}
    fine = tuple(device for device in every if not why[device])
    unused = "; ".join(f"{device} does not work: {said}" for device, said in why.items() if said)
    return Choice(fine) if fine else Choice((torch.device("cpu"),), unused)


def trouble(device: torch.device) -> str:
    """Why a device cannot compute: its driver is too old, others hold all its memory; empty where it can."""
    try:
        float(torch.ones(1, dtype=torch.float64, device=device).exp())
    except RuntimeError as error:
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return ""


# ---------------------------------------------------------------- how much at once

TOKENS = 1 << 20
"""Of a batch on a CPU: many, since a batch has a price of its own; few, for the memory."""
MOST = 1 << 23
"""Of a batch on a GPU, where thousands of kernels are started for each, however small it is."""
BYTES = 3200
"""Of a GPU's memory for each token of a batch: twice what its tensors take with every preset."""
UNSEEN = {"cuda": 1 << 22}
"""Of a batch on a device of another machine, by its kind: such a GPU is believed to have 16 GB."""


def at_once(devices: Sequence[torch.device]) -> int:
    """Tokens to a batch that all of some devices have room for."""
    return min(map(_tokens, devices))


def elsewhere(kind: str) -> int:
    """Tokens to a batch on a device that is not seen from here: auto, cpu or cuda."""
    return UNSEEN.get(kind, TOKENS)


def _tokens(device: torch.device) -> int:
    """A power of two, so that GPUs that differ by little give the same bits."""
    if device.type != "cuda":
        return TOKENS
    room = torch.cuda.get_device_properties(device).total_memory // BYTES
    return min(max(1 << (max(room, 1).bit_length() - 1), TOKENS), MOST)


# ---------------------------------------------------------------- the copy to the device


@dataclass(frozen=True)
class Sent:
    """A batch on its way to a device.

    Attributes:
        host: as it was read.
        there: on the device, perhaps not yet whole; None where it is still to be sent.
        ready: the CUDA event after which it is whole; None where nothing need be waited for.
    """

    host: Batch
    there: Batch | None = None
    ready: Any = None


@cache
def _stream(device: torch.device) -> Any:
    """The one stream for copies: memory that is freed on one stream does not serve another."""
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def send(batch: Batch, device: torch.device) -> Sent:
    """Begin the copy of a batch, through pinned memory and beside the work on the batch before.

    The thread turns to the device before it turns to the stream: leaving the stream of another device it
    would wake the first one, which others may hold.
    """
    if device.type != "cuda":
        return Sent(batch, batch)
    try:
        with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
            there = batch.over(lambda x: x.pin_memory()).to(device, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(_stream(device))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return Sent(batch)
    return Sent(batch, there, ready)


def receive(sent: Sent, device: torch.device) -> Batch:
    """The batch on the device, whole for all that is queued from now on; the host does not wait.

    Raises:
        RuntimeError: it has no room there; see `out_of_memory`.
    """
    if sent.there is None:
        return sent.host.to(device)
    if sent.ready is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(sent.ready)
        sent.there.over(partial(_kept_for, current))
    return sent.there


def _kept_for(stream: Any, x: Tensor) -> Tensor:
    """The memory of x is not given away before what that stream does with it is done."""
    x.record_stream(stream)
    return x


# ---------------------------------------------------------------- memory

FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What CUDA and its libraries say where memory is short that torch did not ask for itself."""


def out_of_memory(error: RuntimeError) -> bool:
    """Whether memory was short, of the device or that from which it copies."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in FULL)


@dataclass
class Fit:
    """Runs jobs on a device; a batch that does not fit is cut in two, and so on, down to one sequence.

    Attributes:
        device: where.
        short: the fewest tokens that did not fit; batches nearly as large are not tried.
    """

    device: torch.device
    short: float = float("inf")

    def results(self, job: Callable[[Batch], T], sent: Sent) -> list[T]:
        """The job's result for the batch, or for its parts, in order, where memory is short.

        Raises:
            MemoryShortage: one sequence alone does not fit.
        """
        host = sent.host
        may_fit = host.sequences == 1 or host.tokens < 0.75 * self.short
        if may_fit and (found := self._tried(job, sent)):
            return found
        del sent
        if may_fit:  # only out here: within `except`, the error still holds the frames of the job
            gc.collect()  # what was computed of a batch may be in reference cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return [found for half in host.halves() for found in self.results(job, Sent(half))]

    def _tried(self, job: Callable[[Batch], T], sent: Sent) -> list[T]:
        """The job's result for the batch; nothing where memory is short."""
        try:
            return [job(receive(sent, self.device))]
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if sent.host.sequences == 1:
                raise MemoryShortage(
                    f"one sequence of {sent.host.tokens:,} tokens does not fit in the memory of the device",
                    "use --device cpu, or a device whose memory nobody else holds",
                ) from error
        self.short = min(self.short, sent.host.tokens)
        return []
