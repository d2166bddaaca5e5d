"""Sums by code: how many tokens, or how much of a column, each code has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.host import here


def count(codes: Tensor, size: int) -> Tensor:
    """How often each code occurs: [T] int64 in [0, size) → [size] float64."""
    if here(codes):
        return torch.bincount(codes, minlength=size).to(torch.float64)
    return total(codes, size, torch.ones(codes.shape, dtype=torch.float64, device=codes.device))


def total(codes: Tensor, size: int, x: Tensor) -> Tensor:
    """The sum of x [T] float64 by code: [T] int64 in [0, size) → [size] float64."""
    if here(codes):
        return torch.bincount(codes, weights=x, minlength=size)
    return x.new_zeros(size).index_add_(0, codes, x)  # bincount would look for the largest code on the host


def by_code(codes: Tensor, size: int, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """How often each code occurs, and the sums of every column by code, [size] each."""
    if not here(codes):
        return count(codes, size), {name: total(codes, size, x) for name, x in columns.items()}
    where = runs(codes)
    if len(where) > len(codes) // 4:
        return _in_lanes(codes, size, columns)
    heads = codes[where[:-1]]
    sums = {name: total(heads, size, segments.total(x, where)) for name, x in columns.items()}
    return total(heads, size, segments.lengths(where).to(torch.float64)), sums


def runs(codes: Tensor) -> Tensor:
    """Where runs of equal codes begin, and the end: [T] int64 on a CPU → [R+1]."""
    values = codes.numpy()
    begins = np.flatnonzero(values[1:] != values[:-1]) + 1
    return (
        torch.from_numpy(np.concatenate(([0], begins, [len(values)]))) if len(values) else codes.new_zeros(1)
    )


LANES = 4


def _in_lanes(codes: Tensor, size: int, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Every fourth token has a table of its own: adding twice in a row to one place makes a core wait."""
    codes = codes * LANES
    for lane in range(1, LANES):
        codes[lane::LANES] += lane
    wide = size * LANES
    sums = {name: total(codes, wide, x).view(size, LANES).sum(dim=1) for name, x in columns.items()}
    return count(codes, wide).view(size, LANES).sum(dim=1), sums
