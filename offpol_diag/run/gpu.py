"""Select GPUs, transfer batches to them, and handle shortage of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
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
    """The devices to compute on, at least one, of one kind; and why an existing GPU is unused, or empty."""

    devices: tuple[torch.device, ...]
    unused: str = ""


def devices(name: str) -> Choice:
    """Return the devices of a name: auto is all working GPUs, or the CPU without any; cuda is all GPUs."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = tuple(torch.device("cuda", at) for at in range(there))
    if name == "auto":
        faults = {device: trouble(device) for device in every}
        unused = "; ".join(f"{device} does not work: {said}" for device, said in faults.items() if said)
        fine = tuple(device for device in every if not faults[device])
        return Choice(fine) if fine else Choice((torch.device("cpu"),), unused)
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


def trouble(device: torch.device) -> str:
    """Return why a device cannot compute (say, too old a driver or no free memory); empty if it can."""
    try:
        float(torch.ones(1, dtype=torch.float64, device=device).exp())
    except RuntimeError as error:
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return ""


# ---------------------------------------------------------------- how much at once

TOKENS = 1 << 20
"""Tokens per batch on a CPU, a balance between the fixed cost of a batch and memory."""
MOST = 1 << 23
"""Maximum tokens per batch on a GPU, where each batch launches thousands of kernels whatever its size."""
BYTES = 3200
"""GPU memory per token of a batch: twice the size of its tensors with every preset."""


def at_once(devices: Sequence[torch.device]) -> int:
    """Return the tokens per batch that fit on all devices, a power of two so that similar GPUs agree."""
    if devices[0].type != "cuda":
        return TOKENS
    room = min(torch.cuda.get_device_properties(one).total_memory for one in devices) // BYTES
    return min(max(1 << (max(room, 1).bit_length() - 1), TOKENS), MOST)


def elsewhere(kind: str) -> int:
    """Return the tokens per batch on a remote device (auto, cpu or cuda); GPUs are assumed to have 16 GB."""
    return 1 << 22 if kind == "cuda" else TOKENS


# ---------------------------------------------------------------- the copy to the device


@dataclass(frozen=True)
class Sent:
    """A batch whose copy to a device has begun; `there` is None until then, `ready` the event of its end."""

    host: Batch
    there: Batch | None = None
    ready: Any = None


@cache
def _stream(device: torch.device) -> Any:
    """Return the device's only copy stream; the allocator does not reuse memory across streams."""
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def send(batch: Batch, device: torch.device) -> Sent:
    """Start copying a batch through pinned memory, overlapping with computation on the previous batch.

    The device is made current before the stream: otherwise, leaving the stream would initialise the first
    device, which other processes may use.
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
    """Return the batch on the device, complete for kernels queued from now on; the host does not wait."""
    if sent.there is None:
        return sent.host.to(device)
    if sent.ready is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(sent.ready)
        for x in vars(sent.there).values():
            if isinstance(x, Tensor):  # whose memory is not reused before the stream's work on it is done
                x.record_stream(current)
    return sent.there


# ---------------------------------------------------------------- memory

FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of out-of-memory errors from CUDA and its libraries that torch does not raise as its own."""


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that device or pinned memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in FULL)


@dataclass
class Fit:
    """Runner of jobs on a device that halves batches that do not fit, down to one sequence.

    `short` is the fewest tokens that did not fit; batches nearly as large are halved without a try.
    """

    device: torch.device
    short: float = float("inf")

    def results(self, job: Callable[[Batch], T], sent: Sent) -> list[T]:
        """Return the job's result for the batch, or, where memory is short, for its parts in order."""
        host = sent.host
        may_fit = host.sequences == 1 or host.tokens < 0.75 * self.short
        if may_fit and (found := self._tried(job, sent)):
            return found
        del sent
        if may_fit:  # not within `except`, where the error still holds the frames of the job
            gc.collect()  # results of a batch may be in reference cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return [found for half in host.halves() for found in self.results(job, Sent(half))]

    def _tried(self, job: Callable[[Batch], T], sent: Sent) -> list[T]:
        """Return the job's result for the batch; an empty list if memory is short."""
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
