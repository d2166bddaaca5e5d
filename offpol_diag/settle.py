"""The reading that goes before the analysis: what every trainer batch settles, and rewards by group.

It is made only when a preset looks beyond a sequence, or when advantages have to be made of rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag import loglattice, pareto, scope
from offpol_diag.accumulators import Bins, Places, State, Tail
from offpol_diag.advantages import GroupRewards
from offpol_diag.batch import Batch
from offpol_diag.correction import statistic
from offpol_diag.engines import Engine
from offpol_diag.presets import Policy, Preset, Reject, Weight
from offpol_diag.ratios import Ratios
from offpol_diag.readers import Dump
from offpol_diag.scope import Label, Settled

K = TypeVar("K")
M = TypeVar("M", bound=State)
T = TypeVar("T")
Cut = tuple[Policy, Reject]
Smoothed = tuple[Policy, Weight]


@dataclass(frozen=True)
class Asked:
    """What the presets want to know of a trainer batch.

    Attributes:
        cuts: batch-wide rules, each with its numerator.
        tails: weights that are smoothed, each with its numerator.
        rewards: whether advantages have to be made of rewards.
    """

    cuts: tuple[Cut, ...]
    tails: tuple[Smoothed, ...]
    rewards: bool

    @classmethod
    def of(cls, presets: Sequence[Preset], rewards: bool) -> Asked:
        """Collected from presets that will be applied."""
        cuts = ((rule.policy or p.policy, rule) for p in presets for rule in p.reject if rule.over == "batch")
        tails = ((p.policy, p.weight) for p in presets if p.weight and p.weight.action == "psis")
        return cls(tuple(dict.fromkeys(cuts)), tuple(dict.fromkeys(tails)), rewards)

    def __bool__(self) -> bool:
        return bool(self.cuts or self.tails or self.rewards)


@dataclass(frozen=True)
class Found:
    """What the reading found; rewards only where they were asked for."""

    settled: Settled
    rewards: GroupRewards | None

    def filled(self, batch: Batch) -> Batch:
        """The batch, with advantages made of rewards where they were asked for."""
        if self.rewards is None:
            return batch
        return replace(batch, advantages=self.rewards.advantages(batch))


def settle(engine: Engine, dump: Dump, asked: Asked) -> Found:
    """Read the dump, and once more where a cut falls inside a bin of the lattice."""
    seen = engine.reduce(dump, Look(asked)) or _Seen({}, {}, None)
    bins = {cut: {label: _bin(one, cut[1]) for label, one in seen.bins[cut].items()} for cut in asked.cuts}
    inside = _inside(engine, dump, {cut: found for cut, found in bins.items() if any(found.values())})
    cuts = {
        cut: {
            label: _cut(seen.bins[cut][label], at, inside.get((cut, label)), cut[1])
            for label, at in found.items()
        }
        for cut, found in bins.items()
    }
    tails = {key: {at: pareto.smooth(tail) for at, tail in seen.tails[key].items()} for key in asked.tails}
    return Found(Settled(cuts, tails), seen.rewards)


# ---------------------------------------------------------------- what one reading sees


@dataclass(frozen=True)
class _Seen:
    bins: dict[Cut, dict[Label, Bins]]
    tails: dict[Smoothed, dict[Label, Tail]]
    rewards: GroupRewards | None

    def merge(self, other: _Seen) -> _Seen:
        rewards = other.rewards if self.rewards is None else self.rewards.merge(_there(other.rewards))
        return _Seen(_merged(self.bins, other.bins), _merged(self.tails, other.tails), rewards)


def _there(rewards: GroupRewards | None) -> GroupRewards:
    assert rewards is not None
    return rewards


def _merged(one: dict[K, dict[Label, M]], two: dict[K, dict[Label, M]]) -> dict[K, dict[Label, M]]:
    return {key: Places(one.get(key, {})).merge(Places(found)).sums for key, found in two.items()}


@dataclass(frozen=True)
class Look:
    """The job of the first reading."""

    asked: Asked

    def __call__(self, batch: Batch) -> _Seen:
        """What is asked of one batch."""
        ratios, asked = Ratios(batch, "rollout"), self.asked
        bins = {cut: _by_label(batch, *_values(ratios, cut), Bins.of) for cut in asked.cuts}
        tails = {key: _by_label(batch, *_logs(ratios, key), Tail.of) for key in asked.tails}
        rewards = GroupRewards.of(batch) if asked.rewards else None
        ratios.forget()
        return _Seen(bins, tails, rewards)


def _values(ratios: Ratios, cut: Cut) -> tuple[Tensor, str]:
    found = statistic(ratios.of(cut[0]), cut[1])
    return found.values, found.per


def _logs(ratios: Ratios, key: Smoothed) -> tuple[Tensor, str]:
    policy, weight = key
    found = ratios.of(policy).log_ratio(weight.over, weight.safety, weight.safety_at)
    return found.values, found.per


def _by_label(batch: Batch, x: Tensor, per: str, make: Callable[[Tensor], T]) -> dict[Label, T]:
    """A state of the values of each trainer batch; sequences without a token have none."""
    found, which = scope.codes(batch)
    which = scope.of_units(which, per, batch)
    there = torch.ones_like(which, dtype=torch.bool) if per == "token" else batch.lengths > 0
    return {label: make(x[there & (which == at)]) for at, label in enumerate(found)}


# ---------------------------------------------------------------- where the cut falls


def _bin(bins: Bins, rule: Reject) -> int:
    """The bin in which the cut falls; 0 where nothing need be dropped (no unsigned value has that bin)."""
    assert rule.upper is not None
    counts, sums = torch.cumsum(bins.counts, 0), torch.cumsum(bins.sums, 0)
    below = (counts > 0) & (sums < rule.upper * counts)
    if bool(below[-1]) or not float(counts[-1]):
        return 0
    lowest = int(torch.nonzero(counts > 0)[0])
    left = torch.nonzero(below)
    return int(left[-1]) + 1 if len(left) else lowest


@dataclass(frozen=True)
class _Values:
    """All values that share the bin of a cut, by rule and trainer batch."""

    parts: dict[tuple[Cut, Label], Tensor]

    def merge(self, other: _Values) -> _Values:
        both = dict(self.parts)
        for key, values in other.parts.items():
            both[key] = torch.cat((both[key], values)) if key in both else values
        return _Values(both)


@dataclass(frozen=True)
class Gather:
    """The job of the second reading: `bins` says in which bin each cut falls."""

    bins: dict[Cut, dict[Label, int]]

    def __call__(self, batch: Batch) -> _Values:
        """The values of one batch in those bins."""
        ratios, parts = Ratios(batch, "rollout"), {}
        for cut, wanted in self.bins.items():
            x, per = _values(ratios, cut)
            for label, values in _by_label(batch, x, per, lambda v: v).items():
                parts[cut, label] = values[loglattice.index(values) == wanted[label]]
        ratios.forget()
        return _Values(parts)


def _inside(engine: Engine, dump: Dump, bins: dict[Cut, dict[Label, int]]) -> dict[tuple[Cut, Label], Tensor]:
    """All values that share the bin of a cut; the dump is not read when there is none."""
    found = engine.reduce(dump, Gather(bins)) if bins else None
    return found.parts if found else {}


def _cut(bins: Bins, at: int, inside: Tensor | None, rule: Reject) -> float:
    """The smallest value that goes, from the top of the bin down until the mean of the rest is below."""
    if not at or inside is None or not len(inside):
        return math.inf
    assert rule.upper is not None
    rising = torch.sort(inside).values
    counts = bins.counts[:at].sum() + torch.arange(len(rising), device=rising.device)
    sums = bins.sums[:at].sum() + torch.cumsum(torch.cat((rising.new_zeros(1), rising[:-1])), 0)
    enough = (counts > 0) & (sums < rule.upper * counts)  # of dropping this value and all above it
    if not bool(enough.any()):
        return math.nextafter(float(rising[0]), math.inf)  # never everything: the smallest stay
    return float(rising[int(torch.nonzero(enough)[-1])])
