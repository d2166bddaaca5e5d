"""A batch that does not fit is cut in two, and so on, down to one sequence."""

from __future__ import annotations

import torch

from offpol_diag.engines.engine import Job, M
from offpol_diag.engines.staging import Staged, Staging
from offpol_diag.errors import MemoryShortage


def results(job: Job[M], staged: Staged, staging: Staging) -> list[M]:
    """What the job leaves of the batch, or of its parts, in order, where memory is short.

    Raises:
        MemoryShortage: one sequence alone does not fit.
    """
    try:
        return [job(staging.take(staged))]
    except torch.OutOfMemoryError as error:
        _refuse(staged, error)
    # Only here is what the job held let go of: the error knew its frames.
    halves = staged.host.halves()
    del staged
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [found for half in halves for found in results(job, Staged(half, None), staging)]


def _refuse(staged: Staged, error: torch.OutOfMemoryError) -> None:
    if staged.host.sequences > 1:
        return
    tokens = staged.host.tokens
    raise MemoryShortage(
        f"one sequence of {tokens:,} tokens does not fit in the memory of the device",
        "use --device cpu, or a device whose memory nobody else holds",
    ) from error
