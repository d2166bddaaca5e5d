"""Sums by code: how many tokens, or how much of a column, each code has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from offpol_diag import segments


def count(codes: Tensor, size: int) -> Tensor:
    """How often each code occurs: [T] int64 in [0, size) → [size] float64."""
    if codes.device.type == "cpu":
        return torch.bincount(codes, minlength=size).to(torch.float64)
    return total(codes, size, torch.ones(codes.shape, dtype=torch.float64, device=codes.device))


def total(codes: Tensor, size: int, x: Tensor) -> Tensor:
    """The sum of x [T] float64 by code: [T] int64 in [0, size) → [size] float64."""
    if codes.device.type == "cpu":
        return torch.bincount(codes, weights=x, minlength=size)
    return x.new_zeros(size).index_add_(0, codes, x)  # bincount would look for the largest code on the host


def by_code(codes: Tensor, size: int, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """How often each code occurs, and the sums of every column by code, [size] each."""
    counts = count(codes, size)
    if codes.device.type == "cpu" and not bool((codes[1:] < codes[:-1]).any()):
        ends = torch.cumsum(counts.to(torch.int64), 0)
        runs = torch.cat((ends.new_zeros(1), ends))
        return counts, {name: segments.total(x, runs) for name, x in columns.items()}
    return counts, {name: total(codes, size, x) for name, x in columns.items()}
