"""Sums by code: how many tokens, or how much of a column, each code has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from offpol_diag.engine import segments
from offpol_diag.engine.host import here


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


def by_sequence(
    at: Tensor, size: int, offsets: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """How many tokens of each sequence have each code, and their sums of every column, [S, size] each.

    Args:
        at: whole numbers in [0, size), of whatever width, [T].
        size: up to 63.
        offsets: where sequences begin, [S+1].
        columns: [T] float64 each.
    """
    many = (len(offsets) - 1) * size
    if here(at):
        tokens, sums = _by_run_or_lane(at, size, offsets, columns)
    else:
        codes = _firsts(offsets, size) + at
        tokens, sums = count(codes, many), {name: total(codes, many, x) for name, x in columns.items()}
    return tokens.view(-1, size), {name: x.view(-1, size) for name, x in sums.items()}


def _firsts(offsets: Tensor, size: int) -> Tensor:
    """Of every token, what the codes of its sequence begin with, [T]."""
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
    """Where runs of equal codes in a sequence begin, and the end, [R+1]."""
    values, ends = at.numpy(), offsets.numpy()
    begins = np.ones(len(values) + 1, np.bool_)
    np.not_equal(values[1:], values[:-1], out=begins[1:-1])
    begins[ends] = True
    return torch.from_numpy(np.flatnonzero(begins))


def few_by_sequence(at: Tensor, size: int, offsets: Tensor, which: Tensor) -> Tensor:
    """How many of some tokens, `which` [T] bool, each sequence has with each code, [S, size] float64."""
    many = (len(offsets) - 1) * size
    if not here(at):
        return total(_firsts(offsets, size) + at, many, which.to(torch.float64)).view(-1, size)
    few = torch.from_numpy(np.flatnonzero(which.numpy()))
    return count((torch.searchsorted(offsets, few, right=True) - 1) * size + at[few], many).view(-1, size)


def runs(codes: Tensor) -> Tensor:
    """Where runs of equal codes begin, and the end: [T] int64 on a CPU → [R+1]."""
    values = codes.numpy()
    begins = np.flatnonzero(values[1:] != values[:-1]) + 1
    return (
        torch.from_numpy(np.concatenate(([0], begins, [len(values)]))) if len(values) else codes.new_zeros(1)
    )


LANES = 4


def _in_lanes(
    at: Tensor, size: int, offsets: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Every fourth token has a table of its own: adding twice in a row to one place makes a core wait."""
    lane = np.tile(np.arange(LANES, dtype=np.uint8), len(at) // LANES + 1)[: len(at)]
    within = at.numpy().astype(np.uint8) * np.uint8(LANES) + lane  # narrow, and so at a fraction of the cost
    codes = _firsts(offsets, size * LANES).add_(torch.from_numpy(within.astype(np.int64)))
    wide = (len(offsets) - 1) * size * LANES
    sums = {name: total(codes, wide, x).view(-1, LANES).sum(dim=1) for name, x in columns.items()}
    return count(codes, wide).view(-1, LANES).sum(dim=1), sums
