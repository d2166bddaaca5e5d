"""Whom a preset drops: kept tokens by length quartile, and groups that lose every sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import resample
from offpol_diag.accumulators import GroupSample
from offpol_diag.metrics.formula import plain
from offpol_diag.metrics.stack import Stack
from offpol_diag.summary import Numbers

LENGTH_BINS = 256
"""Eight to an octave: lengths below 12 are told apart exactly, longer ones to 9 %."""


@dataclass(frozen=True)
class Grid:
    """Sequences, tokens and each preset's kept tokens by length: [LENGTH_BINS, 2 + P]."""

    values: Tensor

    def merge(self, other: Grid) -> Grid:
        """Add."""
        return Grid(self.values + other.values)


def length_bin(lengths: Tensor) -> Tensor:
    """The bin of each length (in tokens, at least 1)."""
    return (
        (torch.log2(lengths.clamp(min=1).to(torch.float64)) * 8)
        .floor()
        .to(torch.int64)
        .clamp(max=LENGTH_BINS - 1)
    )


def by_length(stack: Stack) -> Grid:
    """Bin the batch by length."""
    there = (stack.n > 0).to(torch.float64)
    stacked = torch.cat((there[None], stack.n[None], stack.kept_tokens)).T
    at = length_bin(stack.batch.lengths)
    grid = stacked.new_zeros(LENGTH_BINS, stacked.shape[1]).index_add_(0, at, stacked)
    return Grid(_of_every(stack, grid))


def by_group(stack: Stack) -> GroupSample:
    """Sequences, and each preset's sequences with a token left, by group."""
    there = stack.n > 0
    columns = torch.cat((there[None], stack.kept_tokens > 0)).T.to(torch.float64)
    found = GroupSample.of(resample.mix(stack.batch.key), columns)
    return GroupSample(found.keys, _of_every(stack, found.values), found.full)


def _of_every(stack: Stack, x: Tensor) -> Tensor:
    """A column for every preset in place of one for all that are alike: the last R of [N, k + R]."""
    if stack.which is None:
        return x
    shared = x.shape[1] - len(stack.items)
    at = [*range(shared), *(shared + row for row in stack.which)]
    return x[:, torch.tensor(at, device=x.device)]


def numbers(grid: Grid, groups: GroupSample, at: int) -> Numbers:
    """The numbers of the preset in column `at`."""
    values = grid.values.cpu()
    shares = _quartile_shares(values[:, 0], values[:, 1], values[:, 2 + at])
    text = "kept share of the tokens in this quartile of sequence length (binned, 8 bins to an octave)"
    found = {f"kept_length_q{i}": plain(x, "fraction", "tokens", text) for i, x in enumerate(shares, 1)}
    table = groups.values.cpu()
    there = table[:, 0] > 0
    lost = float(((table[:, 1 + at] == 0) & there).sum()) / max(int(there.sum()), 1)
    found["groups_lost"] = plain(
        lost, "fraction", "groups", "share of groups (prompts) with no sequence left"
    )
    return found


def _quartile_shares(sequences: Tensor, tokens: Tensor, kept: Tensor) -> list[float]:
    """Kept share in each quarter of the sequences by length."""
    parts = quartile_parts(sequences)
    whole, left = (parts @ torch.stack((tokens, kept), dim=1)).T.tolist()
    return [one / all_ if all_ > 0 else float("nan") for one, all_ in zip(left, whole, strict=True)]


def quartile_parts(sequences: Tensor) -> Tensor:
    """Which part of each length bin lies in which quarter of the sequences: [bins] → [4, bins].

    A bin on a border is split in proportion.
    """
    total = float(sequences.sum())
    before = torch.cumsum(sequences, 0) - sequences
    borders = total * torch.arange(5, dtype=sequences.dtype)[:, None] / 4
    inside = (before + sequences).clamp(max=borders[1:]) - before.clamp(min=borders[:-1])
    part = inside.clamp(min=0) / sequences.clamp(min=1e-300)
    return torch.where(sequences > 0, part, 0.0)
