"""Copies to a GPU and back; only here does torch appear by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from offpol_diag.core.segments import Array
from offpol_diag.errors import MemoryShortage

CPU = "cpu"


def sent(x: Array, device: str) -> Array:
    """Copy an array to a device without waiting, through pinned memory; as it is for the CPU."""
    if device == CPU:
        return x
    import torch

    tensor = torch.from_numpy(x)
    if device.startswith("cuda"):
        tensor = tensor.pin_memory()  # a copy from other memory would wait
    return tensor.to(device, non_blocking=True)


def to_host(columns: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Copy arrays of one shape, by name, to the host: at once, and so that those that are one stay one.

    Of a GPU's this waits for all of them; numpy's are returned as they are.
    """
    distinct = {id(x): x for x in columns.values()}
    if all(isinstance(x, np.ndarray) for x in distinct.values()):
        return dict(columns)
    import torch

    host = dict(zip(distinct, torch.stack([*distinct.values()]).cpu().numpy(), strict=True))
    return {name: host[id(x)] for name, x in columns.items()}


@contextmanager
def memory_of(device: str) -> Iterator[None]:
    """Refuse what does not fit into a GPU's memory.

    Raises:
        MemoryShortage: it does not.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        raise MemoryShortage(
            f"the memory of {device} is too small for the presets, or others hold it",
            "use --device cpu, fewer presets, or a device whose memory nobody else holds",
        ) from error
