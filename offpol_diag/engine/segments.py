"""Packed arrays: reductions over runs.

A packed array `x [T]`, or `[K, T]`, holds the tokens of all sequences one after the other; `offsets [S+1]`
are the indices where each run starts and ends. Empty runs are allowed: sum 0, maximum -inf, minimum +inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Array = npt.NDArray[Any]


def index(rows: Sequence[int]) -> slice | Array:
    """Return an index of rising rows: a slice, which copies nothing, where they are adjacent."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return np.array(rows, np.int64)


def by_key(keys: Iterable[T]) -> dict[T, list[int]]:
    """Return the rows of each key, rising; keys in order of appearance."""
    result: dict[T, list[int]] = {}
    for row, key in enumerate(keys):
        result.setdefault(key, []).append(row)
    return result


def lengths(offsets: Array) -> Array:
    """Return the number of tokens of each run: [S + 1] → [S]."""
    return offsets[1:] - offsets[:-1]


def reduced(
    x: Array, offsets: Array, kernel: np.ufunc, empty: float, dtype: type[np.integer[Any]] | None = None
) -> Array:
    """Reduce each run by a function of numpy, in numbers of a type: [..., T] → [..., S].

    Args:
        x: numbers of tokens.
        offsets: where runs begin, and the end.
        kernel: np.add, np.maximum, np.minimum.
        empty: the result of an empty run.
        dtype: the type of sums; None for that of x.
    """
    filled = lengths(offsets) > 0
    if filled.all() and len(filled):
        values: Array = kernel.reduceat(x, offsets[:-1], axis=-1, dtype=dtype)
        return values
    result = np.empty((*x.shape[:-1], len(filled)))
    result.fill(empty)  # half the time of numpy's `full`
    if filled.any():
        result[..., filled] = kernel.reduceat(x, offsets[:-1][filled], axis=-1, dtype=dtype)
    return result


def total(x: Array, offsets: Array) -> Array:
    """Sum over each run: [..., T] float64 → [..., S] float64, 0 for an empty run."""
    return reduced(x, offsets, np.add, 0.0)


def largest(x: Array, offsets: Array) -> Array:
    """Maximum over each run: [..., T] float64 → [..., S] float64, -inf for an empty run."""
    return reduced(x, offsets, np.maximum, -math.inf)


def smallest(x: Array, offsets: Array) -> Array:
    """Minimum over each run: [..., T] float64 → [..., S] float64, +inf for an empty run."""
    return reduced(x, offsets, np.minimum, math.inf)


def spans(offsets: Array, wanted: int) -> list[tuple[int, int]]:
    """Whole runs, about `wanted` tokens at a time: (first, one past the last)."""
    cuts = np.arange(wanted, max(int(offsets[-1]), wanted), wanted)
    return list(pairwise(sorted({0, *np.searchsorted(offsets, cuts).tolist(), len(offsets) - 1})))


def mean(x: Array, offsets: Array) -> Array:
    """Mean over each run: [T] float64 → [S] float64, 0 for an empty run."""
    return total(x, offsets) / np.maximum(lengths(offsets), 1)


def spread(x: Array, offsets: Array) -> Array:
    """Give every token its run's value: [..., S] → [..., T]."""
    return np.repeat(x, lengths(offsets), -1)


def count(x: Array, offsets: Array) -> Array:
    """Count true tokens per run: [T] bool → [S] float64."""
    return numbers(reduced(x.view(np.int8), offsets, np.add, 0.0, np.int64))  # half the time of floats


def numbers(flags: Array) -> Array:
    """Convert flags to float64: 1 where set, 0 elsewhere."""
    return flags.astype(np.float64)


# ---------------------------------------------------------------- by code


def runs(codes: Array) -> Array:
    """Return the starts of runs of equal codes, and the end: [T] int64 → [R+1]."""
    if not len(codes):
        return np.zeros(1, np.int64)
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    return np.concatenate(([0], changes, [len(codes)]))


def count_by(codes: Array, size: int) -> Array:
    """Count how often each code occurs: [T] int64 in [0, size) → [size] float64."""
    return np.bincount(codes, minlength=size).astype(np.float64)


def sum_by(codes: Array, size: int, x: Array) -> Array:
    """Sum x [T] float64 by code: [T] int64 in [0, size) → [size] float64."""
    return np.bincount(codes, x, size).astype(np.float64, copy=False)  # whole numbers, if there are none


LANES = 4
"""Sums of each code kept apart, so that an addition need not wait for the one before it; a power of 2."""


def sums_by(codes: Array, size: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Sum several x [T] float64 by code, in lanes: [T] int64 in [0, size) → [size] float64 by name."""
    lanes = codes * LANES + (np.arange(len(codes)) & (LANES - 1))
    return {name: sum_by(lanes, size * LANES, x).reshape(-1, LANES).sum(1) for name, x in arrays.items()}


def extremes(x: Array, there: Array | None = None) -> tuple[float, float]:
    """Return the smallest and largest element where `there` is true; (+inf, -inf) where it nowhere is."""
    where = True if there is None else there
    return x.min(initial=math.inf, where=where), x.max(initial=-math.inf, where=where)
