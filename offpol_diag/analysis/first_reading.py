"""First pass over the dump: quantities of a whole trainer batch that must be known before tokens are judged.

Batch-wide rejection rules (M2PO) need the cut from which on tokens are dropped, smoothed weights (PSIS) the
tail that is replaced, and advantages made of rewards the mean and deviation of each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import loglattice, scope
from offpol_diag.engine.accumulators import Bins, Places, State
from offpol_diag.engine.advantages import GroupRewards
from offpol_diag.engine.correction import statistic
from offpol_diag.engine.ratios import Level, Ratios
from offpol_diag.engine.scope import Label, Settled
from offpol_diag.engine.tails import Tail, smooth
from offpol_diag.errors import DumpError
from offpol_diag.presets import Policy, Preset, Reject, Weight
from offpol_diag.readers import Dump, columns
from offpol_diag.run.task import Engine, Job


@dataclass(frozen=True)
class Spans:
    """Sequences of a batch by trainer batch.

    Attributes:
        rows: trainer batch → runs of adjacent sequences, each as (first, one past the last).
        starts: sequence index → its first token, for the ends of all runs.
        filled: sequences with at least one token, [S] bool; None where all have one.
    """

    rows: dict[Label, list[tuple[int, int]]]
    starts: dict[int, int]
    filled: Tensor | None

    @classmethod
    def of(cls, batch: Batch) -> Spans:
        """Group a batch's sequences by their labels."""
        rows: dict[Label, list[tuple[int, int]]] = {}
        last = 0
        for label, run in groupby(scope.labels(batch)):
            first, last = last, last + sum(1 for _ in run)
            rows.setdefault(label, []).append((first, last))
        ends = sorted({end for runs in rows.values() for run in runs for end in run})
        starts = batch.cu_seqlens[ends].tolist()
        filled = batch.lengths > 0
        return cls(rows, dict(zip(ends, starts, strict=True)), None if bool(filled.all()) else filled)

    def split(self, level: Level) -> Iterator[tuple[Label, Tensor]]:
        """Yield each trainer batch with its values; sequences without a token are left out."""
        for label, runs in self.rows.items():
            parts = [self._part(level, *run) for run in runs]
            yield label, parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, level: Level, begin: int, end: int) -> Tensor:
        if level.per == "token":
            return level.values[self.starts[begin] : self.starts[end]]
        x = level.values[begin:end]
        return x if self.filled is None else x[self.filled[begin:end]]


Cut = tuple[Policy, Reject]
Smoothed = tuple[Policy, Weight]


@dataclass(frozen=True)
class Asked:
    """Quantities of each trainer batch that the presets depend on.

    Attributes:
        cuts: batch-wide rejection rules, each with the numerator of its ratio.
        tails: Pareto-smoothed weights, each with the numerator of its ratio.
        rewards: whether advantages must be computed from rewards.
    """

    cuts: tuple[Cut, ...]
    tails: tuple[Smoothed, ...]
    rewards: bool

    @classmethod
    def of(cls, presets: Sequence[Preset], rewards: bool) -> Asked:
        """Collect them from the presets that will be applied."""
        cuts = ((rule.policy or p.policy, rule) for p in presets for rule in p.reject if rule.over == "batch")
        tails = ((p.policy, p.weight) for p in presets if p.weight and p.weight.action == "psis")
        return cls(tuple(dict.fromkeys(cuts)), tuple(dict.fromkeys(tails)), rewards)

    def __bool__(self) -> bool:
        return bool(self.cuts or self.tails or self.rewards)

    @property
    def roles(self) -> frozenset[str]:
        """Columns needed, by canonical name; the rollout log-probs are always read."""
        policies = {policy for policy, _ in (*self.cuts, *self.tails)} - {"rollout"}
        return frozenset({columns.STEP} | {f"{policy}_log_probs" for policy in policies})

    def narrow(self, dump: Dump) -> Dump:
        """Restrict a dump to the columns needed; all of them where rewards or turns are needed."""
        turns = any(weight.over == "segment" for _, weight in self.tails)
        return dump if self.rewards or turns else dump.only(self.roles)


@dataclass(frozen=True)
class Found:
    """Results of the first pass; rewards only where advantages are computed from them."""

    settled: Settled
    rewards: GroupRewards | None

    def filled(self, batch: Batch) -> Batch:
        """Add advantages computed from rewards to a batch, where they were requested."""
        if self.rewards is None:
            return batch
        return replace(batch, advantages=self.rewards.advantages(batch))


K = TypeVar("K")
M = TypeVar("M", bound=State)


@dataclass(frozen=True)
class Seen:
    """Statistics of some batches; rewards only where advantages are computed from them."""

    bins: dict[Cut, dict[Label, Bins]]
    tails: dict[Smoothed, dict[Label, Tail]]
    rewards: GroupRewards | None

    def merge(self, other: Seen) -> Seen:
        """Merge the statistics of two parts of a dump."""
        rewards = other.rewards if self.rewards is None else self.rewards.merge(_there(other.rewards))
        return Seen(_merged(self.bins, other.bins), _merged(self.tails, other.tails), rewards)


def _there(rewards: GroupRewards | None) -> GroupRewards:
    assert rewards is not None
    return rewards


def _merged(one: dict[K, dict[Label, M]], two: dict[K, dict[Label, M]]) -> dict[K, dict[Label, M]]:
    return {key: Places(one.get(key, {})).merge(Places(found)).sums for key, found in two.items()}


@dataclass(frozen=True)
class Look:
    """The job of the first pass: collect the quantities asked for."""

    asked: Asked

    def __call__(self, batch: Batch) -> Seen:
        """Collect the statistics of one batch."""
        ratios, asked, spans = Ratios(batch, "rollout"), self.asked, Spans.of(batch)
        bins = {cut: {at: Bins.of(x) for at, x in spans.split(values_of(ratios, cut))} for cut in asked.cuts}
        tails = {key: {at: Tail.of(x) for at, x in spans.split(_logs(ratios, key))} for key in asked.tails}
        rewards = GroupRewards.of(batch) if asked.rewards else None
        ratios.forget()
        return Seen(bins, tails, rewards)


def values_of(ratios: Ratios, cut: Cut) -> Level:
    """Compute the statistic that a batch-wide rule is applied to."""
    return statistic(ratios.of(cut[0]), cut[1])


def _logs(ratios: Ratios, key: Smoothed) -> Level:
    policy, weight = key
    return ratios.of(policy).log_ratio(weight.over, weight.safety, weight.safety_at)


def bin_of(bins: Bins, rule: Reject) -> int:
    """Find the bin of the cut; 0 where nothing need be dropped (no unsigned value has that bin)."""
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
    """Values that share the bin of a cut, by rule and trainer batch."""

    parts: dict[tuple[Cut, Label], Tensor]

    def merge(self, other: _Values) -> _Values:
        both = dict(self.parts)
        for key, values in other.parts.items():
            both[key] = torch.cat((both[key], values)) if key in both else values
        return _Values(both)


@dataclass(frozen=True)
class Gather:
    """The job of the second pass; `bins` has the bin in which each cut falls."""

    bins: dict[Cut, dict[Label, int]]

    def __call__(self, batch: Batch) -> _Values:
        """Collect the values of one batch in those bins."""
        ratios, spans, parts = Ratios(batch, "rollout"), Spans.of(batch), {}
        for cut, wanted in self.bins.items():
            for label, values in spans.split(values_of(ratios, cut)):
                parts[cut, label] = values[loglattice.index(values) == wanted[label]]
        ratios.forget()
        return _Values(parts)


def falls_at(bins: Bins, at: int, inside: Tensor | None, rule: Reject) -> float:
    """Find the smallest value dropped, going down the bin until the mean of the rest is below `upper`."""
    if not at or inside is None or not len(inside):
        return math.inf
    assert rule.upper is not None
    rising = torch.sort(inside).values
    counts = bins.counts[:at].sum() + torch.arange(len(rising), device=rising.device)
    sums = bins.sums[:at].sum() + torch.cumsum(torch.cat((rising.new_zeros(1), rising[:-1])), 0)
    enough = (counts > 0) & (sums < rule.upper * counts)  # if this value and all above it are dropped
    if not bool(enough.any()):
        return math.nextafter(float(rising[0]), math.inf)  # never drop everything: keep the smallest
    return float(rising[int(torch.nonzero(enough)[-1])])


def settle(engine: Engine, dump: Dump, asked: Asked) -> Found:
    """Read the dump, and once more where a cut falls inside a bin of the lattice."""
    seen = _read(engine, dump, asked, Look(asked)) or Seen({}, {}, None)
    bins = {cut: {label: bin_of(one, cut[1]) for label, one in seen.bins[cut].items()} for cut in asked.cuts}
    inside = _inside(engine, dump, {cut: found for cut, found in bins.items() if any(found.values())})
    cuts = {
        cut: {
            label: falls_at(seen.bins[cut][label], at, inside.get((cut, label)), cut[1])
            for label, at in found.items()
        }
        for cut, found in bins.items()
    }
    tails = {key: {at: smooth(tail) for at, tail in seen.tails[key].items()} for key in asked.tails}
    return Found(Settled(cuts, tails), seen.rewards)


def _read(engine: Engine, dump: Dump, asked: Asked, job: Job[M]) -> M | None:
    """Read only the columns needed; after an error read all, to name the first bad row of the whole dump."""
    narrow = asked.narrow(dump)
    try:
        return engine.reduce(narrow, job)
    except DumpError:
        if narrow is dump:
            raise
        return engine.reduce(dump, job)


def _inside(engine: Engine, dump: Dump, bins: dict[Cut, dict[Label, int]]) -> dict[tuple[Cut, Label], Tensor]:
    """Collect all values that share the bin of a cut; without such a bin the dump is not read."""
    found = _read(engine, dump, Asked(tuple(bins), (), rewards=False), Gather(bins)) if bins else None
    return found.parts if found else {}
