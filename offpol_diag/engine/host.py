"""Where values can be looked at for free.

In the host's own memory a number is there as soon as it is asked for, and numpy may work on it. On a GPU
asking waits for all that was queued before, so the code that runs there takes shapes that no value decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WIDE = ("X86_V4", "AVX512")
"""How numpy calls kernels that work on eight float64 at once."""


def here(x: Tensor) -> bool:
    """Whether a tensor lies in the host's memory."""
    return x.device.type == "cpu"


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; the host does not wait until it is there.

    A copy from memory that the system may move is waited for: this one goes through memory that it may not.
    """
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)


Array = TypeVar("Array", Tensor, NDArray[np.float64])


def exp(x: Array, out: NDArray[np.float64] | None = None) -> Array:
    """e^x; of an array of numpy's, into another, which may be the same."""
    return _quick(x, np.exp, torch.exp, out)


def expm1(x: Array, out: NDArray[np.float64] | None = None) -> Array:
    """e^x − 1; of an array of numpy's, into another, which may be the same."""
    return _quick(x, np.expm1, torch.expm1, out)


def _quick(x: Array, ours: np.ufunc, theirs: Callable[..., Tensor], out: NDArray[np.float64] | None) -> Array:
    """By numpy where that takes half the time of torch: on processors for which it has a wide kernel."""
    if isinstance(x, np.ndarray):
        if wide(ours.__name__):
            found: NDArray[np.float64] = ours(x, out=out)
            return found
        return theirs(torch.from_numpy(x), out=out if out is None else torch.from_numpy(out)).numpy()
    if not isinstance(x, Tensor) or x.requires_grad or x.ndim == 0 or not here(x) or not wide(ours.__name__):
        return theirs(x)  # also of what stands for a tensor (`series.py`)
    with np.errstate(all="ignore"):
        return torch.from_numpy(ours(x.numpy()))


@cache
def wide(name: str) -> bool:
    """Whether numpy has a wide kernel of a function of float64 for this processor."""
    try:
        found = np.lib.introspect.opt_func_info(func_name=f"^{name}$", signature="float64")
    except AttributeError:  # numpy before 2.2 does not tell
        return False
    kernels = [kind.get("current", "") for kinds in found.values() for kind in kinds.values()]
    return any(kernel.startswith(WIDE) for kernel in kernels)
