"""Exact order statistics of a statistic, without keeping all values.

The histogram of the first pass gives the bin of each rank. The next pass collects the values in that bin; if
there are too many, further passes first narrow it down by finer histograms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import loglattice
from offpol_diag.engine.accumulators import Bins
from offpol_diag.engine.scene import Scene
from offpol_diag.readers import Dump
from offpol_diag.run.task import Engine
from offpol_diag.sweep.evaluate import Plan, statistic

HELD = 1 << 20
"""Most values of a bracket that are collected; a bracket with more is narrowed down first if it can be."""
FINER = 4096
ROUNDS = 4


class AtRank(NamedTuple):
    """The value at a rank, its neighbours (±inf if none), and the counts of smaller and of equal values."""

    under: float
    value: float
    over: float
    before: int
    equal: int


@dataclass(frozen=True)
class Bracket:
    """An interval low ≤ x < high that contains a rank, with `inside` values in it and `below` smaller ones.

    Attributes:
        parts: whether values are rounded down to the edges of `FINER` equal bins rather than kept exactly.
    """

    low: float
    high: float
    below: float
    inside: float
    parts: bool = False

    @property
    def finite(self) -> bool:
        """Return whether both ends are finite, so that it can be cut into equal bins."""
        return math.isfinite(self.high - self.low)


@dataclass(frozen=True)
class Gathered:
    """The distinct values in a bracket with their counts, and the nearest values below and above it."""

    values: Tensor
    counts: Tensor
    under: float
    over: float

    @classmethod
    def of(cls, x: Tensor, bracket: Bracket) -> Gathered:
        """Collect the values of one batch."""
        below, above = x[x < bracket.low], x[x >= bracket.high]
        inside = x[(x >= bracket.low) & (x < bracket.high)]
        if bracket.parts:
            edges = _edges(bracket).to(x.device)
            inside = edges[(torch.searchsorted(edges, inside, right=True) - 1).clamp(0, FINER - 1)]
        values, counts = torch.unique(inside, return_counts=True)
        return cls(
            values.cpu(),
            counts.to(torch.float64).cpu(),
            float(below.max()) if len(below) else -math.inf,
            float(above.min()) if len(above) else math.inf,
        )

    def merge(self, other: Gathered) -> Gathered:
        """Merge."""
        values, at = torch.unique(torch.cat((self.values, other.values)), return_inverse=True)
        counts = torch.zeros(len(values), dtype=torch.float64)
        counts.index_add_(0, at, torch.cat((self.counts, other.counts)))
        return Gathered(values, counts, max(self.under, other.under), min(self.over, other.over))

    def at(self, rank: int, below: float) -> AtRank:
        """Return the value at a rank (1 is the smallest); `below` values lie under the bracket."""
        upto = below + torch.cumsum(self.counts, 0)
        at = int(torch.searchsorted(upto, torch.tensor(float(rank), dtype=torch.float64)))
        around = [self.under, *self.values.tolist(), self.over]
        equal = round(float(self.counts[at]))
        under, value, over = around[at : at + 3]
        return AtRank(under, value, over, round(float(upto[at])) - equal, equal)


def _edges(bracket: Bracket) -> Tensor:
    return torch.linspace(bracket.low, bracket.high, FINER + 1, dtype=torch.float64)


@dataclass(frozen=True)
class Each:
    """The collected values of each bracket."""

    found: tuple[Gathered, ...]

    def merge(self, other: Each) -> Each:
        """Merge."""
        return Each(tuple(one.merge(two) for one, two in zip(self.found, other.found, strict=True)))


@dataclass(frozen=True)
class Gather:
    """The job of one pass: collect the values of one batch in each bracket."""

    plan: Plan
    brackets: tuple[Bracket, ...]

    def __call__(self, batch: Batch) -> Each:
        """Collect the values of one batch."""
        scene = Scene.of(self.plan.found.filled(batch), 0, 1, self.plan.found.settled)
        x = statistic(scene, self.plan)
        assert x is not None
        scene.forget()
        return Each(tuple(Gathered.of(x, one) for one in self.brackets))


def at_ranks(engine: Engine, dump: Dump, plan: Plan, bins: Bins, ranks: Sequence[int]) -> list[AtRank]:
    """Find the value at each rank (1 is the smallest) and its neighbours."""
    brackets = [_bracket(bins, rank) for rank in ranks]
    for left in range(ROUNDS, -1, -1):
        brackets = [replace(one, parts=left > 0 and one.inside > HELD and one.finite) for one in brackets]
        each = engine.reduce(dump, Gather(plan, tuple(brackets)))
        assert each is not None
        found = [one.at(rank, at.below) for one, rank, at in zip(each.found, ranks, brackets, strict=True)]
        if not any(one.parts for one in brackets):
            break
        brackets = [
            _finer(one, value) if one.parts else one for one, value in zip(brackets, found, strict=True)
        ]
    return found


def _finer(bracket: Bracket, found: AtRank) -> Bracket:
    """Return the bin of the bracket whose lower edge was found at the rank."""
    edges = _edges(bracket)
    value = torch.tensor(found.value, dtype=torch.float64)
    at = int(torch.searchsorted(edges, value, right=True)) - 1  # of equal edges the last
    low, high = edges[at : at + 2].tolist()
    return Bracket(low, high, found.before, found.equal)


def _bracket(bins: Bins, rank: int) -> Bracket:
    """Return the histogram bin of a rank; bins of negative values are (low, high], so both ends move up."""
    upto = torch.cumsum(bins.counts, 0)
    at = int(torch.searchsorted(upto, torch.tensor(float(rank), dtype=torch.float64)))
    low, high = loglattice.edges()[at : at + 2].tolist()
    inside = float(bins.counts[at])
    if at < loglattice.HALF:  # (low, high]
        low, high = math.nextafter(low, math.inf), math.nextafter(high, math.inf)
    elif at == loglattice.HALF:  # (low, high)
        low = math.nextafter(low, math.inf)
    low, high = -math.inf if at == 0 else low, math.inf if at == loglattice.SIZE - 1 else high
    return Bracket(low, high, float(upto[at]) - inside, inside)
