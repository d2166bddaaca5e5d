"""Choose the GPUs that compute presets; torch is imported only where there may be one."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from offpol_diag.errors import UsageError

CPU = "cpu"
NODES = "dev/nvidia[0-9]*"
"""Device files of NVIDIA's driver."""
WORTH_STARTING = 700_000_000
"""Tokens times presets, and `ALONE` more, from which `auto` starts a GPU: torch takes seconds a worker."""
ALONE = 20
"""How many presets cost what else is computed of a token."""


@dataclass(frozen=True)
class Choice:
    """The devices to compute presets on, at least one, of one kind; and why a GPU is unused, or empty."""

    devices: tuple[str, ...] = (CPU,)
    unused: str = ""


def devices(name: str, tokens: float = math.inf, presets: int = 0) -> Choice:
    """Return the devices of a name.

    Args:
        name: auto (all working GPUs; the CPU without any, or for little work), cpu, cuda (all) or cuda:N.
        tokens: of the dump.
        presets: how many are computed of each.

    Raises:
        UsageError: an unknown name, or a GPU that is not there or does not work.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"device {name!r} is not known", "give auto, cpu, cuda or cuda:N")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    little = tokens * (presets + ALONE) < WORTH_STARTING
    if name == CPU or (name == "auto" and (hidden or little or not any(Path("/").glob(NODES)))):
        return Choice()
    working, fault = list[str](), ""
    try:
        import torch

        there = [f"cuda:{at}" for at in range(torch.cuda.device_count())]
        wanted = there if name in ("auto", "cuda") else [name]
        if not wanted or not {*wanted} <= {*there}:
            raise RuntimeError(f"there are {len(there)} CUDA devices here")
        for device in wanted:
            float(torch.ones(1, dtype=torch.float64, device=device).exp())
            working.append(device)
    except (ImportError, RuntimeError) as error:  # no torch, no such GPU, no free memory
        fault = str(error).partition("\n")[0]
    if fault and name != "auto":
        raise UsageError(f"device {name!r}: {fault}", "use --device cpu")
    return Choice(tuple(working)) if working else Choice(unused=f"no GPU is used: {fault}")
