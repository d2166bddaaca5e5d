"""Reductions over runs of a packed tensor.

A packed tensor `x [T]` holds the tokens of all sequences one after the other; `offsets [S+1]` says where
each run starts and ends. Empty runs are allowed: their sum is 0, their maximum -inf, their minimum +inf.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(offsets: Tensor) -> Tensor:
    """Tokens per run, [S] int64."""
    return offsets[1:] - offsets[:-1]


def total(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each run: [T] float64 → [S] float64, 0 for an empty run."""
    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0)


def largest(x: Tensor, offsets: Tensor) -> Tensor:
    """Maximum over each run: [T] float64 → [S] float64, -inf for an empty run."""
    return torch.segment_reduce(x, "max", offsets=offsets, initial=-torch.inf)


def smallest(x: Tensor, offsets: Tensor) -> Tensor:
    """Minimum over each run: [T] float64 → [S] float64, +inf for an empty run."""
    return torch.segment_reduce(x, "min", offsets=offsets, initial=torch.inf)


def mean(x: Tensor, offsets: Tensor) -> Tensor:
    """Mean over each run: [T] float64 → [S] float64, 0 for an empty run."""
    return total(x, offsets) / lengths(offsets).clamp(min=1)


def spread(x: Tensor, offsets: Tensor) -> Tensor:
    """Give every token its run's value: [S] → [T]."""
    return torch.repeat_interleave(x, lengths(offsets))


def any_in(x: Tensor, offsets: Tensor) -> Tensor:
    """Whether any token of each run is true: [T] bool → [S] bool, false for an empty run."""
    return count(x, offsets) > 0


def count(x: Tensor, offsets: Tensor) -> Tensor:
    """True tokens per run: [T] bool → [S] float64."""
    return total(x.to(torch.float64), offsets)
