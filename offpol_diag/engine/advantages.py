"""Advantages computed from rewards where a dump has none: normalised within the group, as GRPO does.

A = (reward − mean of the group) / (standard deviation of the group + 1e-6), the deviation with n − 1; a group
is the sequences of one prompt in one step, and a group of one has the reward itself.

Source: Shao et al. 2024 (DeepSeekMath); the constants are verl's compute_grpo_outcome_advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import blake2b

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import accumulators, scope, segments
from offpol_diag.engine.segments import sent

EPS = 1e-6


@dataclass(frozen=True)
class GroupRewards:
    """Rewards by group, mergeable.

    Attributes:
        keys: [G] int64, sorted, distinct.
        count: number of sequences, [G] float64.
        mean: mean reward, [G].
        away: Σ (reward − mean)², [G].
    """

    keys: Tensor
    count: Tensor
    mean: Tensor
    away: Tensor

    @classmethod
    def of(cls, batch: Batch) -> GroupRewards:
        """Collect the groups of one batch, which must have rewards."""
        assert batch.rewards is not None
        ones = torch.ones_like(batch.rewards)
        return cls._of(_keys(batch), ones, batch.rewards, torch.zeros_like(ones))

    @classmethod
    def _of(cls, keys: Tensor, count: Tensor, mean: Tensor, away: Tensor) -> GroupRewards:
        """Combine parts with the same key (Chan, Golub, LeVeque 1979)."""
        distinct, which = torch.unique(keys, return_inverse=True)
        empty = count.new_zeros(len(distinct))
        total = empty.index_add(0, which, count)
        middle = empty.index_add(0, which, count * mean) / total
        apart = count * (mean - middle[which]).square()
        return cls(distinct, total, middle, empty.index_add(0, which, away + apart))

    def merge(self, other: GroupRewards) -> GroupRewards:
        """Merge the groups of two parts of a dump."""
        mine, theirs = ((one.keys, one.count, one.mean, one.away) for one in (self, other))
        keys, count, mean, away = (torch.cat(pair) for pair in zip(mine, theirs, strict=True))
        return GroupRewards._of(keys, count, mean, away)

    def advantages(self, batch: Batch) -> Tensor:
        """Compute the advantage of every token, [T] float64; the batch must be of the same dump."""
        assert batch.rewards is not None
        keys, count, mean, away = self._on(batch.rewards.device)
        at = torch.searchsorted(keys, _keys(batch))
        alone = count[at] == 1
        deviation = torch.sqrt(away[at] / (count[at] - 1).clamp(min=1))
        grouped = (batch.rewards - mean[at]) / (deviation + EPS)
        return segments.spread(torch.where(alone, batch.rewards / (1 + EPS), grouped), batch.cu_seqlens)

    def _on(self, device: torch.device) -> list[Tensor]:
        """Move the fields to a batch's device: those of several GPUs were merged on the host."""
        found: list[Tensor] = [getattr(self, field.name) for field in fields(self)]
        return found if self.keys.device == device else [sent(x, device) for x in found]


def _keys(batch: Batch) -> Tensor:
    """Hash prompt and step of each sequence to the key of its group, [S] int64."""
    found, which = scope.codes(batch)
    steps = sent(torch.tensor([_word(label) for label in found], dtype=torch.int64), which.device)
    return accumulators.mix(batch.key ^ steps[which])


def _word(label: str) -> int:
    return int.from_bytes(blake2b(label.encode(), digest_size=8).digest(), "little", signed=True)
