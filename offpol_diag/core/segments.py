"""Packed tokens: reductions over runs of them and back, on numpy or torch by one text.

A packed array [T] holds the tokens of all sequences one after the other. This module is the only one of the
core that knows numpy from torch. All others use its functions, operators, and the few names that both
libraries spell alike and that take a tensor and numbers: abs, clip, copysign, exp, expm1, log, ones_like,
where, and maximum of two arrays. torch is imported by those who hand in its tensors, and to copy to a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from offpol_diag.errors import MemoryShortage
from offpol_diag.run.devices import CPU

Array = Any  # numpy.ndarray or torch.Tensor


def namespace(x: Array) -> Any:
    """Return the module whose functions take `x`: numpy or torch."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def floats(flags: Array) -> Array:
    """Convert flags to float64: 1 where set, else 0. Sums multiply by them, at a tenth of `where`'s time."""
    return flags.astype(np.float64) if isinstance(flags, np.ndarray) else flags.double()


def sort(x: Array) -> Array:
    """Sort [N], the smallest first."""
    return np.sort(x) if isinstance(x, np.ndarray) else x.sort().values


def extremes(x: Array) -> tuple[float, float]:
    """Return the smallest and largest number, of numpy's; (inf, −inf) of none."""
    return float(x.min(initial=math.inf)), float(x.max(initial=-math.inf))


@dataclass(frozen=True, eq=False)
class Segments:
    """Consecutive runs of tokens: sequences, or turns.

    Attributes:
        offsets: where each run begins, and the end of the last, [S + 1] int64. A run may be empty.
        tokens: how many tokens there are, T: a number that the host has, so that no GPU must be asked.
    """

    offsets: Array
    tokens: int

    @cached_property
    def lengths(self) -> Array:
        """Tokens of each run, [S] int64."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def n(self) -> Array:
        """Tokens of each run, [S] float64."""
        return floats(self.lengths)

    @cached_property
    def at_least_1(self) -> Array:
        """The same, and 1 of an empty run: what sums are divided by, [S] float64."""
        return namespace(self.n).clip(self.n, 1.0, None)

    @cached_property
    def filled(self) -> Array:
        """Whether a run has a token, [S] bool."""
        return self.lengths > 0

    def sum(self, x: Array) -> Array:
        """Sum over each run, [T] → [S] float64; 0 of an empty one."""
        return self._reduced(x, "add", "sum", 0.0)

    def mean(self, x: Array) -> Array:
        """Mean over each run, [T] → [S] float64; 0 of an empty one."""
        return self.sum(x) / self.at_least_1

    def max(self, x: Array) -> Array:
        """Largest of each run, [T] → [S] float64; −inf of an empty one."""
        return self._reduced(x, "maximum", "max", -math.inf)

    def min(self, x: Array) -> Array:
        """Smallest of each run, [T] → [S] float64; inf of an empty one."""
        return self._reduced(x, "minimum", "min", math.inf)

    def count(self, flags: Array) -> Array:
        """Count the set flags of each run, [T] bool → [S] float64."""
        if isinstance(flags, np.ndarray):
            return self._reduced(flags.view(np.int8), "add", "sum", 0, np.int64).astype(np.float64)
        return self.sum(flags.double())

    def spread(self, x: Array) -> Array:
        """Give every token its run's number, [S] → [T]."""
        if isinstance(x, np.ndarray):
            return np.repeat(x, self.lengths)
        return x.repeat_interleave(self.lengths, output_size=self.tokens)

    def _reduced(self, x: Array, ufunc: str, how: str, empty: float, dtype: Any = np.float64) -> Array:
        """Reduce each run by the function that numpy, and torch, calls so."""
        if not isinstance(x, np.ndarray):
            reduce = sys.modules["torch"].segment_reduce
            return reduce(x, how, offsets=self.offsets, initial=empty, unsafe=True)
        reduceat, starts = getattr(np, ufunc).reduceat, self.offsets[:-1]
        if len(starts) and self.filled.all():
            return reduceat(x, starts, dtype=dtype)
        result = np.full(len(starts), empty, dtype)
        if self.tokens:
            result[self.filled] = reduceat(x, starts[self.filled], dtype=dtype)
        return result


# ---------------------------------------------------------------- to a GPU and back


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
