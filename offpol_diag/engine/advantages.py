"""Advantages computed from rewards where a dump has none: normalised within the group, as GRPO does.

A = (reward − mean of the group) / (standard deviation of the group + 1e-6), the deviation with n − 1; a group
is the sequences of one prompt in one step, and a group of one has the reward itself.

Source: Shao et al. 2024 (DeepSeekMath); the constants are verl's compute_grpo_outcome_advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import bootstrap, scope, segments
from offpol_diag.engine.segments import Array

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

    keys: Array
    count: Array
    mean: Array
    away: Array

    @classmethod
    def of(cls, batch: Batch) -> GroupRewards:
        """Collect the groups of one batch, which must have rewards."""
        assert batch.rewards is not None
        ones = np.ones_like(batch.rewards)
        return cls._of(_keys(batch), ones, batch.rewards, np.zeros_like(ones))

    @classmethod
    def _of(cls, keys: Array, count: Array, mean: Array, away: Array) -> GroupRewards:
        """Combine parts with the same key (Chan, Golub, LeVeque 1979)."""
        distinct, which = np.unique(keys, return_inverse=True)
        total = np.bincount(which, count)
        middle = np.bincount(which, count * mean) / total
        apart = count * np.square(mean - middle[which])
        return cls(distinct, total, middle, np.bincount(which, away + apart))

    def merge(self, other: GroupRewards) -> GroupRewards:
        """Merge the groups of two parts of a dump."""
        mine, theirs = ((one.keys, one.count, one.mean, one.away) for one in (self, other))
        keys, count, mean, away = (np.concatenate(pair) for pair in zip(mine, theirs, strict=True))
        return GroupRewards._of(keys, count, mean, away)

    def advantages(self, batch: Batch) -> Array:
        """Compute the advantage of every token, [T] float64; the batch must be of the same dump."""
        assert batch.rewards is not None
        at = np.searchsorted(self.keys, _keys(batch))
        count = self.count[at]
        deviation = np.sqrt(self.away[at] / np.maximum(count - 1, 1))
        grouped = (batch.rewards - self.mean[at]) / (deviation + EPS)
        return segments.spread(np.where(count == 1, batch.rewards / (1 + EPS), grouped), batch.cu_seqlens)


def _keys(batch: Batch) -> Array:
    """Hash prompt and step of each sequence to the key of its group, [S] int64."""
    result, which = scope.codes(batch)
    steps = np.array([_word(label) for label in result], np.int64)
    return bootstrap.mix(batch.key ^ steps[which])


def _word(label: str) -> int:
    return int.from_bytes(blake2b(label.encode(), digest_size=8).digest(), "little", signed=True)
