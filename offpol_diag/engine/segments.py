"""Packed tensors: reductions over runs, transfers between host and device, e^x, and a cache of values.

A packed tensor `x [T]` holds the tokens of all sequences one after the other; `offsets [S+1]` are the indices
where each run starts and ends. Empty runs are allowed: sum 0, maximum -inf, minimum +inf.

In host memory a number can be read at no cost, and numpy can work on it. On a GPU reading one waits for all
queued work, so code that runs there takes shapes that do not depend on values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
Floats = npt.NDArray[np.float64]

WIDE = ("X86_V4", "AVX512")
"""Prefixes of numpy's names for kernels that process eight float64 at once."""


class Memo(dict[object, object]):
    """Cached values by key."""

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        found = self.get(key, self)  # looked up once: keys are long, and most are cached
        if found is self:
            found = self[key] = make()
        return found  # type: ignore[return-value]


# ---------------------------------------------------------------- host and device


def on_host(x: Tensor) -> bool:
    """Return whether a tensor lies in host memory."""
    return x.device.type == "cpu"


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting for the copy.

    The copy goes through pinned memory: a copy from pageable memory would block.
    """
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)


def exp(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute e^x, optionally into `out`, which may be x."""
    return _quick(x, np.exp, torch.exp, out)


def expm1(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute e^x − 1, optionally into `out`, which may be x."""
    return _quick(x, np.expm1, torch.expm1, out)


def _quick(x: Tensor, ours: np.ufunc, theirs: Callable[..., Tensor], out: Tensor | None) -> Tensor:
    """Compute by numpy where it is twice as fast as torch: on processors for which it has a wide kernel."""
    if x.requires_grad or x.ndim == 0 or not on_host(x) or not wide(ours.__name__):
        return theirs(x, out=out)
    with np.errstate(all="ignore"):
        return torch.from_numpy(ours(x.numpy(), out=None if out is None else out.numpy()))


@cache
def wide(name: str) -> bool:
    """Return whether numpy has a wide float64 kernel of a function for this processor."""
    try:
        found = np.lib.introspect.opt_func_info(func_name=f"^{name}$", signature="float64")
    except AttributeError:  # numpy before 2.2 cannot report it
        return False
    kernels = [kind.get("current", "") for kinds in found.values() for kind in kinds.values()]
    return any(kernel.startswith(WIDE) for kernel in kernels)


# ---------------------------------------------------------------- reductions


def lengths(offsets: Tensor) -> Tensor:
    """Number of tokens per run, [S] int64."""
    return offsets[1:] - offsets[:-1]


def index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index of rising rows: a slice, which copies nothing, where they are adjacent."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return sent(torch.tensor(rows, dtype=torch.int64), device)


def by_key(keys: Iterable[T]) -> dict[T, list[int]]:
    """Return the rows of each key, rising; keys in order of appearance."""
    found: dict[T, list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return found


def total(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each run: [T] float64 → [S] float64, 0 for an empty run."""
    return _reduced(x, offsets, np.add, "sum", 0.0)


def largest(x: Tensor, offsets: Tensor) -> Tensor:
    """Maximum over each run: [T] float64 → [S] float64, -inf for an empty run."""
    return _reduced(x, offsets, np.maximum, "max", -math.inf)


def smallest(x: Tensor, offsets: Tensor) -> Tensor:
    """Minimum over each run: [T] float64 → [S] float64, +inf for an empty run."""
    return _reduced(x, offsets, np.minimum, "min", math.inf)


def _reduced(x: Tensor, offsets: Tensor, kernel: np.ufunc, name: str, empty: float) -> Tensor:
    # On a CPU numpy's reduceat takes a ninth of the time of torch's segment_reduce, and sums pairwise.
    if x.requires_grad or not on_host(x):
        return torch.segment_reduce(x, name, offsets=offsets, initial=empty)
    with np.errstate(all="ignore"):  # inf − inf is a NaN, which readers of sums handle
        return torch.from_numpy(_of_array(x.numpy(), offsets, kernel, empty))


def _of_array(x: Floats, offsets: Tensor, kernel: np.ufunc, empty: float) -> Floats:
    """Reduce each run of every row."""
    starts, filled, runs = _filled(offsets)
    if filled is None and runs:
        values: Floats = kernel.reduceat(x, starts, axis=-1)
        return values
    found = np.empty((*x.shape[:-1], runs))
    found.fill(empty)  # half the time of numpy's `full`
    if len(starts):
        at = filled if x.ndim == 1 else (..., filled)
        found[at] = kernel.reduceat(x, starts, axis=-1)
    return found


Reduce = Callable[[Tensor, Tensor], Tensor]


def of_rows(reduce: Reduce, x: Tensor, offsets: Tensor) -> Tensor:
    """Apply a reduction of this module to each run of every row: [K, T] → [K, S]."""
    if on_host(x):
        return reduce(x, offsets)  # numpy takes all rows at once
    return reduce(x.flatten(), _in_rows(offsets, *x.shape)).view(len(x), len(offsets) - 1)


_ROWS: MutableMapping[Tensor, dict[tuple[int, int], Tensor]] = WeakTensorKeyDictionary()


def _in_rows(offsets: Tensor, rows: int, tokens: int) -> Tensor:
    """Return the offsets of the runs of all rows laid end to end, [K·S+1], computed once per size."""
    if rows == 1:
        return offsets
    known, size = _ROWS.setdefault(offsets, {}), (rows, tokens)
    if size not in known:
        every = offsets + tokens * torch.arange(rows, device=offsets.device)[:, None]
        known[size] = torch.cat((every[:, :-1].flatten(), every[-1, -1:]))
    return known[size]


Filled = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None, int]


def _filled(offsets: Tensor) -> Filled:
    """Return the starts of the non-empty runs, their indices (None: all runs), and the number of runs.

    Cached on the offsets.
    """
    found: Filled | None = getattr(offsets, "_filled", None)
    if found is None:
        ends = offsets.numpy()
        there = np.flatnonzero(ends[1:] > ends[:-1])
        every, runs = ends[:-1], len(ends) - 1
        found = (every, None, runs) if len(there) == runs else (every[there], there, runs)
        offsets._filled = found  # type: ignore[attr-defined]
    return found


def spans(offsets: Tensor, wanted: int) -> list[tuple[int, int]]:
    """Whole runs, about `wanted` tokens at a time: (first, one past the last); of offsets on a CPU."""
    cuts = torch.arange(wanted, max(int(offsets[-1]), wanted), wanted)
    return list(pairwise(sorted({0, *torch.searchsorted(offsets, cuts).tolist(), len(offsets) - 1})))


def mean(x: Tensor, offsets: Tensor) -> Tensor:
    """Mean over each run: [T] float64 → [S] float64, 0 for an empty run."""
    return total(x, offsets) / lengths(offsets).clamp(min=1)


def spread(x: Tensor, offsets: Tensor) -> Tensor:
    """Give every token its run's value: [..., S] → [..., T]."""
    if x.requires_grad or not on_host(x):
        return torch.repeat_interleave(x, lengths(offsets), -1, output_size=tokens(offsets))
    return torch.from_numpy(np.repeat(x.numpy(), lengths(offsets).numpy(), -1))


_TOKENS: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()


def sized(offsets: Tensor, tokens: int) -> Tensor:
    """Return the same offsets after recording on the host how many tokens they cover."""
    _TOKENS[offsets] = tokens
    return offsets


def tokens(offsets: Tensor) -> int:
    """Return T, the last offset; read from a GPU only once."""
    if offsets not in _TOKENS:
        sized(offsets, int(offsets[-1]))
    return _TOKENS[offsets]


def count(x: Tensor, offsets: Tensor) -> Tensor:
    """Count true tokens per run: [T] bool → [S] float64."""
    return total(numbers(x), offsets)


def none(flags: Tensor) -> bool:
    """Return whether no flag is set; False on a GPU, which is not waited for."""
    return on_host(flags) and not flags.numpy().any()  # torch takes fifteen times as long


def numbers(flags: Tensor) -> Tensor:
    """Convert flags to float64: 1 where set, 0 elsewhere."""
    if not on_host(flags):
        return flags.to(torch.float64)
    return torch.from_numpy(flags.numpy().astype(np.float64))  # torch takes thrice the time
