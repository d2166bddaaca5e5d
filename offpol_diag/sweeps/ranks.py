"""Bounds that keep an asked share, exactly: the values at two ranks, found without keeping the values.

The lattice of the first reading says in which bin a rank lies. Where many values share that bin it is cut
finer, with a reading each time; the last reading gathers what is left of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag import loglattice
from offpol_diag.accumulators import Bins, State
from offpol_diag.batch import Batch
from offpol_diag.engines import Engine
from offpol_diag.metrics.scene import Scene
from offpol_diag.readers import Dump
from offpol_diag.sweeps.columns import Plan, in_units, statistic

HELD = 1 << 20
"""Distinct values gathered at most, unless cutting finer does not part them."""
FINER = 4096
ROUNDS = 4
M = TypeVar("M", bound=State)


@dataclass(frozen=True)
class Near:
    """The values around a rank.

    Attributes:
        below: how many lie below all of `values`.
        values: distinct, rising; the one at the rank among them.
        counts: how often each occurs.
        under: the largest value below them; -inf where there is none.
        over: the smallest above them; inf where there is none.
    """

    below: float
    values: tuple[float, ...]
    counts: tuple[float, ...]
    under: float
    over: float

    def at(self, rank: int) -> tuple[float, float, float, float, float]:
        """Around the value at a rank (1 is the smallest).

        Returns:
            The next smaller value, the value, the next larger, how many are smaller, how many equal it.
        """
        before = self.below
        for place, (value, many) in enumerate(zip(self.values, self.counts, strict=True)):
            if before + many >= rank:
                down = self.values[place - 1] if place else self.under
                up = self.values[place + 1] if place + 1 < len(self.values) else self.over
                return down, value, up, before, many
            before += many
        raise AssertionError("the rank lies beyond the values gathered")


def around(engine: Engine, dump: Dump, plan: Plan, bins: Bins, ranks: tuple[int, ...]) -> list[Near]:
    """The values around each rank."""
    brackets = [_bracket(bins, rank) for rank in ranks]
    for _ in range(ROUNDS):
        if all(one.inside <= HELD for one in brackets):
            break
        found = _run(engine, dump, Cut(plan, tuple(brackets)))
        brackets = [
            one.finer(counts, rank) for one, counts, rank in zip(brackets, found.rows, ranks, strict=True)
        ]
    gathered = _run(engine, dump, Gather(plan, tuple(brackets)))
    return [one.near(part) for one, part in zip(brackets, gathered.parts, strict=True)]


def _run(engine: Engine, dump: Dump, job: Callable[[Batch], M]) -> M:
    found = engine.reduce(dump, job)
    assert found is not None
    return found


@dataclass(frozen=True)
class Bracket:
    """Where a rank lies: low <= x < high, with `inside` values, `below` of them smaller."""

    low: float
    high: float
    below: float
    inside: float

    @property
    def edges(self) -> Tensor:
        """`FINER` equal parts."""
        return torch.linspace(self.low, self.high, FINER + 1, dtype=torch.float64)

    def finer(self, counts: Tensor, rank: int) -> Bracket:
        """The part that has the rank."""
        if self.inside <= HELD:
            return self
        upto = self.below + torch.cumsum(counts, 0)
        at = int(torch.searchsorted(upto, torch.tensor(float(rank), dtype=torch.float64)))
        low, high = self.edges[at : at + 2].tolist()
        inside = float(counts[at])
        return Bracket(low, high, float(upto[at]) - inside, inside)

    def near(self, part: Part) -> Near:
        """With what was gathered."""
        return Near(
            self.below, tuple(part.values.tolist()), tuple(part.counts.tolist()), part.under, part.over
        )


def _bracket(bins: Bins, rank: int) -> Bracket:
    """The lattice bin of a rank, a float wider: bins of negative values hold their lower edge's neighbour."""
    counts = bins.counts.cpu()
    upto = torch.cumsum(counts, 0)
    at = int(torch.searchsorted(upto, torch.tensor(float(rank), dtype=torch.float64)))
    low, high = loglattice.edges()[at : at + 2].tolist()
    first, last = at == 0, at == loglattice.SIZE - 1
    inside = float(counts[at])
    below = float(upto[at]) - inside
    if at < loglattice.HALF:  # (low, high]
        low, high = math.nextafter(low, math.inf), math.nextafter(high, math.inf)
    elif at == loglattice.HALF:  # (low, high)
        low = math.nextafter(low, math.inf)
    return Bracket(-math.inf if first else low, math.inf if last else high, below, inside)


# ---------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Rows:
    """A tensor for each bracket."""

    rows: tuple[Tensor, ...]

    def merge(self, other: Rows) -> Rows:
        """Add."""
        return Rows(tuple(one + two for one, two in zip(self.rows, other.rows, strict=True)))


@dataclass(frozen=True)
class Cut:
    """How many values lie in each part of each bracket."""

    plan: Plan
    brackets: tuple[Bracket, ...]

    def __call__(self, batch: Batch) -> Rows:
        """Of one batch."""
        x = units(self.plan, batch)
        return Rows(tuple(_parts(x, one) for one in self.brackets))


def _parts(x: Tensor, bracket: Bracket) -> Tensor:
    inside = x[(x >= bracket.low) & (x < bracket.high)]
    at = torch.searchsorted(bracket.edges.to(x.device), inside, right=True) - 1
    return torch.bincount(at.clamp(0, FINER - 1), minlength=FINER).to(torch.float64).cpu()


@dataclass(frozen=True)
class Part:
    """Distinct values in a bracket, how often each, and the nearest on both sides."""

    values: Tensor
    counts: Tensor
    under: float
    over: float

    @classmethod
    def of(cls, x: Tensor, bracket: Bracket) -> Part:
        """Of one batch."""
        below, above = x[x < bracket.low], x[x >= bracket.high]
        values, counts = torch.unique(x[(x >= bracket.low) & (x < bracket.high)], return_counts=True)
        return cls(
            values.cpu(),
            counts.to(torch.float64).cpu(),
            float(below.max()) if len(below) else -math.inf,
            float(above.min()) if len(above) else math.inf,
        )

    def merge(self, other: Part) -> Part:
        """Of both."""
        values, at = torch.unique(torch.cat((self.values, other.values)), return_inverse=True)
        counts = torch.zeros(len(values), dtype=torch.float64)
        counts.index_add_(0, at, torch.cat((self.counts, other.counts)))
        return Part(values, counts, max(self.under, other.under), min(self.over, other.over))


@dataclass(frozen=True)
class Parts:
    """One for each bracket."""

    parts: tuple[Part, ...]

    def merge(self, other: Parts) -> Parts:
        """Of both."""
        return Parts(tuple(one.merge(two) for one, two in zip(self.parts, other.parts, strict=True)))


@dataclass(frozen=True)
class Gather:
    """The values in each bracket."""

    plan: Plan
    brackets: tuple[Bracket, ...]

    def __call__(self, batch: Batch) -> Parts:
        """Of one batch."""
        x = units(self.plan, batch)
        return Parts(tuple(Part.of(x, one) for one in self.brackets))


def units(plan: Plan, batch: Batch) -> Tensor:
    """The statistic of every token or of every sequence that has one."""
    batch = plan.found.filled(batch)
    scene = Scene.of(batch, 0, 1, plan.found.settled)
    level = statistic(scene, plan.preset, plan.dial)
    assert level is not None
    values = in_units(level, batch)
    scene.forget()
    return values
