"""Sums by code: the number of tokens, or the sum of a column, for each code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from offpol_diag.engine import segments
from offpol_diag.engine.host import here


def count(codes: Tensor, size: int) -> Tensor:
    """Count how often each code occurs: [T] int64 in [0, size) → [size] float64."""
    if here(codes):
        return torch.bincount(codes, minlength=size).to(torch.float64)
    return total(codes, size, torch.ones(codes.shape, dtype=torch.float64, device=codes.device))


def total(codes: Tensor, size: int, x: Tensor) -> Tensor:
    """Sum x [T] float64 by code: [T] int64 in [0, size) → [size] float64."""
    if here(codes):
        return torch.bincount(codes, weights=x, minlength=size)
    return x.new_zeros(size).index_add_(0, codes, x)  # bincount would look for the largest code on the host


def by_sequence(
    at: Tensor, size: int, offsets: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Count tokens and sum columns for each sequence and code, [S, size] each.

    Args:
        at: code of each token, integers in [0, size) of any width, [T].
        size: number of codes, at most 63.
        offsets: where sequences start, [S+1].
        columns: columns to sum, [T] float64 each.
    """
    many = (len(offsets) - 1) * size
    if here(at):
        tokens, sums = _by_run_or_lane(at, size, offsets, columns)
    else:
        codes = _firsts(offsets, size) + at
        tokens, sums = count(codes, many), {name: total(codes, many, x) for name, x in columns.items()}
    return tokens.view(-1, size), {name: x.view(-1, size) for name, x in sums.items()}


def _firsts(offsets: Tensor, size: int) -> Tensor:
    """Return the first code of each token's sequence, [T]."""
    first = torch.arange(0, (len(offsets) - 1) * size, size, device=offsets.device)
    return segments.spread(first, offsets)


def _by_run_or_lane(
    at: Tensor, size: int, offsets: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    where = _runs_within(at, offsets)
    if len(where) > len(at) // 4:
        return _in_lanes(at, size, offsets, columns)
    many, heads = (len(offsets) - 1) * size, where[:-1]
    codes = (torch.searchsorted(offsets, heads, right=True) - 1) * size + at[heads]
    sums = {name: total(codes, many, segments.total(x, where)) for name, x in columns.items()}
    return total(codes, many, segments.lengths(where).to(torch.float64)), sums


def _runs_within(at: Tensor, offsets: Tensor) -> Tensor:
    """Return the starts of runs of equal codes within sequences, and the end, [R+1]."""
    values, ends = at.numpy(), offsets.numpy()
    begins = np.ones(len(values) + 1, np.bool_)
    np.not_equal(values[1:], values[:-1], out=begins[1:-1])
    begins[ends] = True
    return torch.from_numpy(np.flatnonzero(begins))


def few_by_sequence(at: Tensor, size: int, offsets: Tensor, which: Tensor) -> Tensor:
    """Count the tokens selected by `which` [T] bool for each sequence and code, [S, size] float64."""
    many = (len(offsets) - 1) * size
    if not here(at):
        return total(_firsts(offsets, size) + at, many, which.to(torch.float64)).view(-1, size)
    few = torch.from_numpy(np.flatnonzero(which.numpy()))
    return count((torch.searchsorted(offsets, few, right=True) - 1) * size + at[few], many).view(-1, size)


def runs(codes: Tensor) -> Tensor:
    """Return the starts of runs of equal codes, and the end: [T] int64 on a CPU → [R+1]."""
    values = codes.numpy()
    begins = np.flatnonzero(values[1:] != values[:-1]) + 1
    return (
        torch.from_numpy(np.concatenate(([0], begins, [len(values)]))) if len(values) else codes.new_zeros(1)
    )


LANES = 4


def _in_lanes(
    at: Tensor, size: int, offsets: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum in four interleaved tables: adding twice in a row to one address stalls a core."""
    lane = np.tile(np.arange(LANES, dtype=np.uint8), len(at) // LANES + 1)[: len(at)]
    within = at.numpy().astype(np.uint8) * np.uint8(LANES) + lane  # narrow, and so at a fraction of the cost
    codes = _firsts(offsets, size * LANES).add_(torch.from_numpy(within.astype(np.int64)))
    wide = (len(offsets) - 1) * size * LANES
    sums = {name: total(codes, wide, x).view(-1, LANES).sum(dim=1) for name, x in columns.items()}
    return count(codes, wide).view(-1, LANES).sum(dim=1), sums
