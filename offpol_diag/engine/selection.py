"""Selection effects of a preset: kept tokens by length quartile, and groups that lose every sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from offpol_diag.engine import accumulators
from offpol_diag.engine.accumulators import GroupSample
from offpol_diag.engine.fields import COUNTS, Floats, Saved
from offpol_diag.engine.formula import plain
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Rows
from offpol_diag.summary import Numbers

LENGTH_BINS = 256
"""Eight bins to an octave: lengths below 12 have bins of their own, longer ones are binned to 9%."""


ROUNDING = 1e-12
"""Largest error of log2 of a power of two on a GPU; no length is that close below the end of a bin."""


@dataclass(frozen=True)
class Grid(Saved):
    """Sequences, tokens and each preset's kept tokens by length: [LENGTH_BINS, 2 + P]."""

    values: Annotated[Tensor, Floats(LENGTH_BINS, "C", rule=COUNTS)]

    def merge(self, other: Grid) -> Grid:
        """Add the counts."""
        return Grid(self.values + other.values)


def length_bin(lengths: Tensor) -> Tensor:
    """Return the bin of each length (in tokens, at least 1)."""
    return (
        (torch.log2(lengths.clamp(min=1).to(torch.float64)) * 8 + ROUNDING)
        .floor()
        .to(torch.int64)
        .clamp(max=LENGTH_BINS - 1)
    )


def by_length(sums: PresetSums) -> Grid:
    """Bin the batch by length."""
    there = (sums.n > 0).to(torch.float64)
    stacked = torch.cat((there[None], sums.n[None], sums.kept.values)).T
    at = length_bin(sums.batch.lengths)
    grid = stacked.new_zeros(LENGTH_BINS, stacked.shape[1]).index_add_(0, at, stacked)
    return Grid(_of_every(sums, grid))


def by_group(sums: PresetSums) -> GroupSample:
    """Count sequences, and each preset's sequences with a kept token, by group."""
    there = sums.n > 0
    columns = torch.cat((there[None], sums.kept.values > 0)).T.to(torch.float64)
    found = GroupSample.of(accumulators.mix(sums.batch.key), columns)
    return GroupSample(found.keys, _of_every(sums, found.values), found.full)


def _of_every(sums: PresetSums, x: Tensor) -> Tensor:
    """Expand the last R of k + R columns [N, k + R], shared by equal presets, to a column per preset."""
    shared = x.shape[1] - len(sums.kept.values)
    at = (*range(shared), *(shared + row for row in sums.kept.at))
    return Rows(x.T, at).all.T


def numbers(grid: Grid, groups: GroupSample) -> list[Numbers]:
    """Read the numbers of every preset, in their order."""
    shares, lost = _quartile_shares(grid.values.cpu()), _lost(groups.values.cpu())
    return [_of_one(*each) for each in zip(shares, lost, strict=True)]


def _of_one(shares: list[float], lost: float) -> Numbers:
    text = (
        "share not rejected of the tokens in this quartile of sequence length (binned, 8 bins to an octave)"
    )
    found = {f"kept_length_q{i}": plain(x, "fraction", "tokens", text) for i, x in enumerate(shares, 1)}
    found["groups_lost"] = plain(
        lost, "fraction", "groups", "share of groups (prompts) with no sequence left"
    )
    return found


def _quartile_shares(grid: Tensor) -> list[list[float]]:
    """Compute the kept share of tokens in each quarter of the sequences by length; NaN without tokens."""
    sums = by_quartile(grid)
    found: list[list[float]] = (sums[:, 2:] / sums[:, 1:2]).T.tolist()
    return found


def by_quartile(grid: Tensor) -> Tensor:
    """Sum the columns of a grid over each quarter of the sequences by length: [bins, C] → [4, C].

    A matrix product would round differently with the layout of the grid in memory, which depends on the
    number of workers.
    """
    return (quartile_parts(grid[:, 0])[:, :, None] * grid.contiguous()).sum(dim=1)


def _lost(groups: Tensor) -> list[float]:
    """Compute the share of groups without a kept sequence, for each preset."""
    there = groups[:, :1] > 0
    lost = ((groups[:, 1:] == 0) & there).sum(0) / there.sum().clamp(min=1).to(groups.dtype)
    found: list[float] = lost.tolist()
    return found


def quartile_parts(sequences: Tensor) -> Tensor:
    """Compute the part of each length bin that lies in each quarter of the sequences: [bins] → [4, bins].

    A bin on a border is split in proportion.
    """
    total = float(sequences.sum())
    before = torch.cumsum(sequences, 0) - sequences
    borders = total * torch.arange(5, dtype=sequences.dtype)[:, None] / 4
    inside = (before + sequences).clamp(max=borders[1:]) - before.clamp(min=borders[:-1])
    part = inside.clamp(min=0) / sequences.clamp(min=1e-300)
    return torch.where(sequences > 0, part, 0.0)
