"""How much of a dump is held at once: by the memory of the device, and less where that was too much.

A batch that does not fit is cut in two, and so on, down to one sequence.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offpol_diag.engines.engine import Job, M
from offpol_diag.engines.staging import Staged, Staging, full
from offpol_diag.errors import MemoryShortage

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
    """A power of two, so that GPUs that differ by little leave the same bits."""
    if device.type != "cuda":
        return TOKENS
    room = torch.cuda.get_device_properties(device).total_memory // BYTES
    return min(max(1 << (max(room, 1).bit_length() - 1), TOKENS), MOST)


@dataclass
class Fit:
    """What a device has room for, as far as batches have shown.

    Attributes:
        staging: sends batches there.
        short: the fewest tokens that did not fit; batches nearly as large are not tried.
    """

    staging: Staging
    short: float = float("inf")

    def results(self, job: Job[M], staged: Staged) -> list[M]:
        """What the job leaves of the batch, or of its parts, in order, where memory is short.

        Raises:
            MemoryShortage: one sequence alone does not fit.
        """
        host = staged.host
        may_fit = host.sequences == 1 or host.tokens < 0.75 * self.short
        if may_fit and (found := self._tried(job, staged)):
            return found
        del staged
        if may_fit:
            _let_go()  # only here: the error knew the frames of the job, and what they held
        return [found for half in host.halves() for found in self.results(job, Staged(half, None))]

    def _tried(self, job: Job[M], staged: Staged) -> list[M]:
        """What the job leaves of the batch; nothing where memory is short."""
        try:
            return [job(self.staging.take(staged))]
        except RuntimeError as error:
            if not full(error):
                raise
            _refuse(staged, error)
        self.short = min(self.short, staged.host.tokens)
        return []


def _let_go() -> None:
    """What was computed of a batch may know itself, in a ring."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _refuse(staged: Staged, error: RuntimeError) -> None:
    if staged.host.sequences > 1:
        return
    tokens = staged.host.tokens
    raise MemoryShortage(
        f"one sequence of {tokens:,} tokens does not fit in the memory of the device",
        "use --device cpu, or a device whose memory nobody else holds",
    ) from error
