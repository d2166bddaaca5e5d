"""A plan's sums on a GPU: the plain code on tensors, block after block; the host waits at the end alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from offpol_diag.errors import MemoryShortage
from offpol_diag.pipeline import namespaces
from offpol_diag.pipeline.block import Block, Columns
from offpol_diag.pipeline.plan import Plan
from offpol_diag.pipeline.tables import Sums, SumTables, beside


def started(plan: Plan, blocks: Iterable[Block], device: str) -> Callable[[], Sums]:
    """Queue the sums of a batch's blocks on a GPU.

    Returns: what to call for the sums of the batch, as numpy's arrays; it waits for the GPU.

    Raises:
        MemoryShortage: a block does not fit into the GPU's memory.
    """
    try:
        parts = [_functions(device).sums(plan, _sent(block, device)) for block in blocks]
    except torch.OutOfMemoryError as error:
        raise MemoryShortage(
            f"the memory of {device} is too small for the presets, or others hold it",
            "use --device cpu, fewer presets, or a device whose memory nobody else holds",
        ) from error
    whole = beside(parts, torch.cat)

    @cache
    def fetched() -> Sums:
        tables = SumTables._make(x.cpu().numpy() for x in whole.over_tokens)
        return Sums(tables, *(x.cpu().numpy() for x in whole[1:]))

    return fetched


@cache
def _functions(device: str) -> Any:
    return namespaces.on_torch(device)


def _sent(block: Block, device: str) -> Block:
    """Copy a block to a device without waiting, through pinned memory: pageable memory would block."""

    def sent(x: Any) -> torch.Tensor:
        tensor = torch.from_numpy(x)
        if device.startswith("cuda"):
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return Block(Columns(*map(sent, block.columns)), *map(sent, block[1:]))
