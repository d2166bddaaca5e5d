"""Groups of sequences, of which a sample is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from offpol_diag.accumulators.fields import COUNTS, RISING, Floats, Ints, Saved, require

SAMPLE = 4096
"""Groups kept for counts that are not sums; exact up to that many."""


@dataclass(frozen=True)
class GroupSample(Saved):
    """A sample of groups, chosen by hash: the `SAMPLE` smallest keys.

    Exact while there are no more groups than that.

    Attributes:
        keys: [G] int64, sorted, distinct.
        values: [G, C] float64, per-group sums of C columns.
        full: whether groups had to be left out.
    """

    keys: Annotated[Tensor, Ints("groups", rule=RISING)]
    values: Annotated[Tensor, Floats("groups", "C", rule=COUNTS)]
    full: bool = False

    def check(self) -> None:
        """Refuse more groups than are kept, and fewer where some were left out."""
        require(len(self.keys) <= SAMPLE, f"there are at most {SAMPLE} keys")
        require(not self.full or len(self.keys) == SAMPLE, f"a full sample has {SAMPLE} keys")

    @classmethod
    def of(cls, keys: Tensor, columns: Tensor) -> GroupSample:
        """Sum columns [S, C] by key [S] (mixed, so that its order is random)."""
        distinct, inverse = torch.unique(keys, return_inverse=True)
        values = torch.zeros(len(distinct), columns.shape[1], dtype=columns.dtype, device=columns.device)
        values.index_add_(0, inverse, columns)
        return cls(distinct[:SAMPLE], values[:SAMPLE], len(distinct) > SAMPLE)

    def merge(self, other: GroupSample) -> GroupSample:
        """Sum where both know a group; keep the smallest keys."""
        keys = torch.unique(torch.cat((self.keys, other.keys)))
        values = self.values.new_zeros(min(len(keys), SAMPLE), self.values.shape[1])
        for one in (self, other):  # each knows a group once
            at = torch.searchsorted(keys, one.keys)
            kept = int((at < len(values)).sum())
            values[at[:kept]] += one.values[:kept]
        return GroupSample(keys[: len(values)], values, self.full or other.full or len(keys) > SAMPLE)

    @property
    def groups(self) -> int:
        """How many groups there are: exact unless `full`, else estimated from how dense the keys are."""
        if not self.full:
            return len(self.keys)
        share = (float(self.keys[-1]) + 2.0**63) / 2.0**64
        return round((len(self.keys) - 1) / share)
