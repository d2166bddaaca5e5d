"""Choose the GPUs that compute presets; torch is imported only where there may be one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from offpol_diag.errors import UsageError

CPU = "cpu"
NODES = "dev/nvidia[0-9]*"
"""Device files of NVIDIA's driver."""
WORTH_STARTING = 700_000_000
"""Tokens times presets, and `ALONE` more, from which a GPU is started by itself: torch takes seconds."""
ALONE = 20
"""How many presets cost what else is computed of a token."""


@dataclass(frozen=True)
class Choice:
    """The devices to compute presets on, at least one, of one kind; and why a GPU is unused, or empty."""

    devices: tuple[str, ...] = (CPU,)
    unused: str = ""


ON_CPU = Choice()


def devices(name: str, worth: bool = True) -> Choice:
    """Return the devices of a name.

    Args:
        name: auto (all working GPUs, or the CPU without any), cpu, cuda (all GPUs) or cuda:N.
        worth: whether there is work enough for `auto` to start a GPU.

    Raises:
        UsageError: an unknown name, or a GPU that is not there or does not work.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"device {name!r} is not known", "give auto, cpu, cuda or cuda:N")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if name == CPU or (name == "auto" and (hidden or not worth or not any(Path("/").glob(NODES)))):
        return ON_CPU
    fine, fault = list[str](), ""
    try:
        import torch

        there = [f"cuda:{at}" for at in range(torch.cuda.device_count())]
        wanted = there if name in ("auto", "cuda") else [name]
        fault = "" if wanted and {*wanted} <= {*there} else f"there are {len(there)} CUDA devices here"
        for device in wanted * (not fault):
            float(torch.ones(1, dtype=torch.float64, device=device).exp())
            fine.append(device)
    except (ImportError, RuntimeError) as error:  # no torch, too old a driver, no free memory
        fault = str(error).partition("\n")[0]
    if fault and name != "auto":
        raise UsageError(f"device {name!r}: {fault}", "use --device cpu")
    return Choice(tuple(fine)) if fine else Choice(unused=f"no GPU is used: {fault}")


def worth_a_gpu(tokens: float, presets: int) -> bool:
    """Return whether there is work enough to start a GPU, which takes some seconds in every worker."""
    return tokens * (presets + ALONE) >= WORTH_STARTING
