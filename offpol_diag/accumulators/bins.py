"""Counts and sums by size of the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from offpol_diag import loglattice, tables
from offpol_diag.accumulators.fields import COUNTS, Floats, Saved
from offpol_diag.host import here


def _count_(counts: Tensor, at: Tensor) -> None:
    """Add how often each place occurs."""
    if here(at):
        counts.numpy()[:] += np.bincount(at.numpy(), minlength=len(counts))
    else:
        counts.add_(tables.count(at, len(counts)))


@dataclass(frozen=True)
class Counts(Saved):
    """Counts on the lattice of `loglattice` (relative width 1/32)."""

    counts: Annotated[Tensor, Floats(loglattice.SIZE, rule=COUNTS)]

    @classmethod
    def none(cls, device: torch.device) -> Counts:
        """Of no value."""
        return cls(torch.zeros(loglattice.SIZE, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, x: Tensor) -> Counts:
        """Bin the values of a tensor."""
        found = cls.none(x.device)
        found.add_(x)
        return found

    def add_(self, x: Tensor) -> None:
        """Bin the values of a tensor too, in place."""
        _count_(self.counts, loglattice.index(x))

    def merge(self, other: Counts) -> Counts:
        """Add."""
        return Counts(self.counts + other.counts)


@dataclass(frozen=True)
class Bins(Saved):
    """Counts on the lattice of `loglattice` (relative width 1/32), and the sum within each bin."""

    counts: Annotated[Tensor, Floats(loglattice.SIZE, rule=COUNTS)]
    sums: Annotated[Tensor, Floats(loglattice.SIZE)]

    @classmethod
    def none(cls, device: torch.device) -> Bins:
        """Of no value."""
        counts, sums = torch.zeros(2, loglattice.SIZE, dtype=torch.float64, device=device)
        return cls(counts, sums)

    @classmethod
    def of(cls, x: Tensor) -> Bins:
        """Bin the values of a tensor."""
        found = cls.none(x.device)
        found.add_(x)
        return found

    def add_(self, x: Tensor) -> None:
        """Bin the values of a tensor too, in place."""
        at = loglattice.index(x)
        _count_(self.counts, at)
        self.sums.scatter_add_(0, at, x)

    def plus(self, at: int, x: Tensor) -> Bins:
        """With the values of a tensor put into one bin."""
        counts, sums = self.counts.clone(), self.sums.clone()
        counts[at] += x.numel()
        sums[at] += x.sum()
        return Bins(counts, sums)

    def merge(self, other: Bins) -> Bins:
        """Add."""
        return Bins(self.counts + other.counts, self.sums + other.sums)
