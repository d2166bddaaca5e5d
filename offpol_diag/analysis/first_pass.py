"""First pass over the dump: quantities of a whole trainer batch that must be known before tokens are judged.

Batch-wide rejection rules (M2PO) need the cut from which on tokens are dropped, smoothed weights (PSIS) the
tail that is replaced, and advantages made of rewards the mean and deviation of each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.engine import loglattice, scope
from offpol_diag.engine.advantages import GroupRewards
from offpol_diag.engine.evaluator import Evaluator, Packed
from offpol_diag.engine.scope import BatchFits, Label
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tails import TAIL, Tail, smooth
from offpol_diag.engine.tally import Arrays, ByKey, largest_of
from offpol_diag.errors import DumpError
from offpol_diag.presets import Policy, Preset, Reject, Weight
from offpol_diag.readers import Dump, columns
from offpol_diag.run.threads import Engine, Job, State


def split(batch: Batch, values: Array, on_tokens: bool) -> Iterator[tuple[Label, Array]]:
    """Yield each trainer batch with its values in order, of tokens [T] or sequences [S].

    Sequences without a token are left out.
    """
    labels, codes = scope.codes(batch)
    codes = scope.of_units(codes, on_tokens, batch)
    if not on_tokens:
        codes, values = codes[batch.lengths > 0], values[batch.lengths > 0]
    if (codes[1:] < codes[:-1]).any():  # else the dump is in the order of its steps
        order = np.argsort(codes, kind="stable")
        codes, values = codes[order], values[order]
    ends = np.cumsum(np.bincount(codes, minlength=len(labels)))
    yield from zip(labels, np.split(values, ends), strict=False)  # after the last end nothing is left


Cut = tuple[Policy, Reject]
Smoothed = tuple[Policy, Weight]
M = TypeVar("M", bound=State)


@dataclass(frozen=True)
class Needs:
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
    def of(cls, presets: Sequence[Preset], rewards: bool) -> Needs:
        """Collect them from the presets that will be applied."""
        cuts = ((rule.policy or p.policy, rule) for p in presets for rule in p.reject if rule.over == "batch")
        tails = ((p.policy, p.weight) for p in presets if p.weight and p.weight.action == "psis")
        return cls(tuple(dict.fromkeys(cuts)), tuple(dict.fromkeys(tails)), rewards)

    def __bool__(self) -> bool:
        return bool(self.cuts or self.tails or self.rewards)

    def narrow(self, dump: Dump) -> Dump:
        """Restrict a dump to the columns needed; all of them where rewards or turns are needed."""
        turns = any(weight.over == "segment" for _, weight in self.tails)
        policies = {policy for policy, _ in (*self.cuts, *self.tails)}
        roles = {columns.STEP} | {f"{policy}_log_probs" for policy in policies}
        return dump if self.rewards or turns else dump.only(roles)


@dataclass(frozen=True)
class FirstPass:
    """Results of the first pass; rewards only where advantages are computed from them."""

    fits: BatchFits
    rewards: GroupRewards | None

    def filled(self, batch: Batch) -> Batch:
        """Add advantages computed from rewards to a batch, where they were requested."""
        if self.rewards is None:
            return batch
        return replace(batch, advantages=self.rewards.advantages(batch))


BIN_BYTES = 16 * loglattice.SIZE
"""Bytes of the histogram of one trainer batch."""


@dataclass(frozen=True)
class Seen:
    """Statistics of some batches.

    Attributes:
        by_key: rule or weight → of each trainer batch: for a rule `bins`, the counts of its statistic and
            their sums on the lattice of `loglattice`, [N, 2, SIZE]; for a weight the largest log-weights
            `tail`, [N, TAIL], and how many there were, `n`, [N].
        rewards: of groups, only where advantages are computed from them.
    """

    by_key: dict[Cut | Smoothed, ByKey]
    rewards: GroupRewards | None = None

    @np.errstate(all="ignore")
    def merge(self, other: Seen) -> Seen:
        """Merge the statistics of two parts of a dump."""
        rewards = self.rewards.merge(other.rewards) if self.rewards and other.rewards else None
        by_key = {key: one.merge(other.by_key[key]) for key, one in self.by_key.items()}
        steps = max(map(len, by_key.values()), default=0)
        scope.refuse_steps(steps, BIN_BYTES * sum("bins" in one.arrays.sums for one in by_key.values()))
        return Seen(by_key, rewards)


@dataclass(frozen=True)
class Look:
    """The job of the first pass: collect the quantities asked for."""

    asked: Needs

    def __call__(self, batch: Batch) -> Seen:
        """Collect the statistics of one batch."""
        asked = self.asked
        scope.refuse_steps(scope.count(batch), BIN_BYTES * len(asked.cuts))
        evaluator, by_key = Evaluator(Packed(batch)), dict[Cut | Smoothed, ByKey]()
        for policy, rule in asked.cuts:
            parts = dict(split(batch, evaluator.statistic(rule, policy), True))
            bins = np.array([loglattice.binned(x) for x in parts.values()]).reshape(-1, 2, loglattice.SIZE)
            by_key[policy, rule] = ByKey.of(parts, Arrays(sums={"bins": bins}))
        for policy, weight in asked.tails:
            parts = dict(split(batch, evaluator.statistic(weight, policy), weight.on_tokens))
            n = np.array([float(len(x)) for x in parts.values()])
            tails = np.array([largest_of(x, TAIL) for x in parts.values()]).reshape(-1, TAIL)
            by_key[policy, weight] = ByKey.of(parts, Arrays(sums={"n": n}, largest={"tail": tails}))
        return Seen(by_key, GroupRewards.of(batch) if asked.rewards else None)


@dataclass(frozen=True)
class Inside:
    """The values in the bin in which each cut falls, by rule and trainer batch."""

    values: dict[tuple[Cut, Label], Array]

    def merge(self, other: Inside) -> Inside:
        """Concatenate."""
        none = np.empty(0)
        return Inside(
            {
                key: np.concatenate([one.values.get(key, none) for one in (self, other)])
                for key in self.values | other.values
            }
        )


@dataclass(frozen=True)
class Gather:
    """The job of the second pass: collect the values in the bin in which each cut falls."""

    bins: dict[tuple[Cut, Label], int]

    def __call__(self, batch: Batch) -> Inside:
        """Collect the values of one batch in those bins."""
        evaluator, result = Evaluator(Packed(batch)), dict[tuple[Cut, Label], Array]()
        for cut in dict.fromkeys(cut for cut, _ in self.bins):
            policy, rule = cut
            for label, x in split(batch, evaluator.statistic(rule, policy), True):
                if (cut, label) in self.bins:
                    result[cut, label] = x[loglattice.index(x) == self.bins[cut, label]]
        return Inside(result)


def bin_of(bins: Array, rule: Reject) -> int:
    """Find the bin of the cut; 0 where nothing need be dropped (no unsigned value has that bin)."""
    assert rule.upper is not None
    counts, sums = np.cumsum(bins, axis=1)
    below = (counts > 0) & (sums < rule.upper * counts)
    if below[-1] or not counts[-1]:
        return 0
    left = np.flatnonzero(below)
    return int(left[-1]) + 1 if len(left) else int(np.argmax(counts > 0))


def falls_at(bins: Array, at: int, inside: Array | None, rule: Reject) -> float:
    """Find the smallest value dropped, going down the bin until the mean of the rest is below `upper`."""
    if not at or inside is None or not len(inside):
        return math.inf
    assert rule.upper is not None
    rising = np.sort(inside)
    below, total = bins[:, :at].sum(axis=1)
    counts = below + np.arange(len(rising))
    sums = total + np.cumsum(np.concatenate(([0.0], rising[:-1])))
    enough = (counts > 0) & (sums < rule.upper * counts)  # if this value and all above it are dropped
    if not enough.any():
        return math.nextafter(float(rising[0]), math.inf)  # never drop everything: keep the smallest
    return float(rising[np.flatnonzero(enough)[-1]])


def of_batch(batch: Batch, presets: Sequence[Preset], rewards: bool = False) -> FirstPass:
    """Return what presets need of a dump that is one batch; `rewards`: advantages are made of rewards."""
    return _first_pass(lambda _, job: job(batch), Needs.of(presets, rewards))


def read_ahead(engine: Engine, dump: Dump, asked: Needs) -> FirstPass:
    """Read the dump, and once more where a cut falls inside a bin of the lattice."""
    return _first_pass(partial(_read, engine, dump), asked)


@np.errstate(all="ignore")
def _first_pass(read: Callable[[Needs, Job[Any]], Any], asked: Needs) -> FirstPass:
    seen: Seen = read(asked, Look(asked)) or Seen({})
    result: dict[tuple[Cut, Label], Array] = {
        (cut, label): one.sums["bins"] for cut in asked.cuts for label, one in _of(seen, cut)
    }
    bins = {key: bin_of(each, key[0][1]) for key, each in result.items()}
    within = {key: at for key, at in bins.items() if at}
    only = Needs(tuple(dict.fromkeys(cut for cut, _ in within)), (), rewards=False)
    inside: Inside | None = read(only, Gather(within)) if within else None
    cuts: dict[Cut, dict[Label, float]] = {cut: {} for cut in asked.cuts}
    for (cut, label), at in bins.items():
        values = inside.values[cut, label] if inside and at else None
        cuts[cut][label] = falls_at(result[cut, label], at, values, cut[1])
    tails = {
        key: {
            label: smooth(Tail.read(one.largest["tail"], float(one.sums["n"])))
            for label, one in _of(seen, key)
        }
        for key in asked.tails
    }
    return FirstPass(BatchFits(cuts, tails), seen.rewards)


def _of(seen: Seen, key: Cut | Smoothed) -> Iterator[tuple[Label, Arrays]]:
    """Yield each trainer batch and its statistics for a rule or weight; none of a dump without a row."""
    yield from seen.by_key[key].items() if key in seen.by_key else ()


def _read(engine: Engine, dump: Dump, asked: Needs, job: Job[M]) -> M | None:
    """Read only the columns needed; after an error read all, to name the first bad row of the whole dump."""
    narrow = asked.narrow(dump)
    try:
        return engine.reduce(narrow, job)
    except DumpError as error:
        if narrow is dump or isinstance(error, scope.TooManySteps):
            raise
        return engine.reduce(dump, job)
