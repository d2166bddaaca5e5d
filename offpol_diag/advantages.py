"""Advantages made of rewards where a dump has none: normalised within the group, as GRPO does.

A = (reward − mean of the group) / (standard deviation of the group + 1e-6), the deviation with n − 1; a group
is the sequences of one prompt in one step, and a group of one has the reward itself.

Source: Shao et al. 2024 (DeepSeekMath); the constants are verl's compute_grpo_outcome_advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from offpol_diag import resample, scope, segments
from offpol_diag.batch import Batch

EPS = 1e-6


@dataclass(frozen=True)
class GroupRewards:
    """Rewards by group, mergeable.

    Attributes:
        keys: [G] int64, sorted, distinct.
        count: sequences, [G] float64.
        mean: of their rewards, [G].
        away: Σ (reward − mean)², [G].
    """

    keys: Tensor
    count: Tensor
    mean: Tensor
    away: Tensor

    @classmethod
    def of(cls, batch: Batch) -> GroupRewards:
        """The groups of one batch, which must have rewards."""
        assert batch.rewards is not None
        ones = torch.ones_like(batch.rewards)
        return cls._of(_keys(batch), ones, batch.rewards, torch.zeros_like(ones))

    @classmethod
    def _of(cls, keys: Tensor, count: Tensor, mean: Tensor, away: Tensor) -> GroupRewards:
        """Parts with the same key become one (Chan, Golub, LeVeque 1979)."""
        distinct, which = torch.unique(keys, return_inverse=True)
        empty = count.new_zeros(len(distinct))
        total = empty.index_add(0, which, count)
        middle = empty.index_add(0, which, count * mean) / total
        apart = count * (mean - middle[which]).square()
        return cls(distinct, total, middle, empty.index_add(0, which, away + apart))

    def merge(self, other: GroupRewards) -> GroupRewards:
        """The groups of both parts together."""
        mine, theirs = ((one.keys, one.count, one.mean, one.away) for one in (self, other))
        keys, count, mean, away = (torch.cat(pair) for pair in zip(mine, theirs, strict=True))
        return GroupRewards._of(keys, count, mean, away)

    def advantages(self, batch: Batch) -> Tensor:
        """Of every token, [T] float64; the batch must be of the same dump."""
        assert batch.rewards is not None
        at = torch.searchsorted(self.keys, _keys(batch))
        alone = self.count[at] == 1
        deviation = torch.sqrt(self.away[at] / (self.count[at] - 1).clamp(min=1))
        grouped = (batch.rewards - self.mean[at]) / (deviation + EPS)
        return segments.spread(torch.where(alone, batch.rewards / (1 + EPS), grouped), batch.cu_seqlens)


def _keys(batch: Batch) -> Tensor:
    """A key per sequence: its prompt's, told apart by step, [S] int64."""
    found, which = scope.codes(batch)
    steps = torch.tensor([_word(label) for label in found], dtype=torch.int64, device=which.device)
    return resample.mix(batch.key ^ steps[which])


def _word(label: str) -> int:
    return int.from_bytes(blake2b(label.encode(), digest_size=8).digest(), "little", signed=True)
