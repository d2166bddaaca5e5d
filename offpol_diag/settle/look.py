"""What the first reading sees of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from offpol_diag import loglattice
from offpol_diag.accumulators import Bins, Floor, Places, State, Tail
from offpol_diag.advantages import GroupRewards
from offpol_diag.batch import Batch
from offpol_diag.correction import statistic
from offpol_diag.host import here
from offpol_diag.presets import Reject
from offpol_diag.ratios import Level, Ratios
from offpol_diag.scope import Label
from offpol_diag.settle.asked import Asked, Cut, Smoothed
from offpol_diag.settle.spans import Spans

K = TypeVar("K")
M = TypeVar("M", bound=State)


@dataclass(frozen=True)
class Seen:
    """What is asked of some batches; rewards only where they were asked for."""

    bins: dict[Cut, dict[Label, Bins]]
    tails: dict[Smoothed, dict[Label, Tail]]
    rewards: GroupRewards | None

    def merge(self, other: Seen) -> Seen:
        """Of both."""
        rewards = other.rewards if self.rewards is None else self.rewards.merge(_there(other.rewards))
        return Seen(_merged(self.bins, other.bins), _merged(self.tails, other.tails), rewards)


def _there(rewards: GroupRewards | None) -> GroupRewards:
    assert rewards is not None
    return rewards


def _merged(one: dict[K, dict[Label, M]], two: dict[K, dict[Label, M]]) -> dict[K, dict[Label, M]]:
    return {key: Places(one.get(key, {})).merge(Places(found)).sums for key, found in two.items()}


@dataclass(frozen=True)
class Look:
    """The job of the first reading.

    Attributes:
        asked: what is wanted.
        floors: of each tail, below what no value counts any more; they rise while the dump is read.
    """

    asked: Asked
    floors: dict[tuple[Smoothed, Label], Floor] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple[type[Look], tuple[Asked]]:
        return Look, (self.asked,)

    def __call__(self, batch: Batch) -> Seen:
        """What is asked of one batch."""
        ratios, asked, spans = Ratios(batch, "rollout"), self.asked, Spans.of(batch)
        bins = {
            cut: {at: _bins(x, cut[1]) for at, x in spans.split(values_of(ratios, cut))} for cut in asked.cuts
        }
        tails = {
            key: {at: Tail.of(x, self._floor(key, at)) for at, x in spans.split(_logs(ratios, key))}
            for key in asked.tails
        }
        rewards = GroupRewards.of(batch) if asked.rewards else None
        ratios.forget()
        return Seen(bins, tails, rewards)

    def _floor(self, key: Smoothed, label: Label) -> Floor:
        return self.floors.setdefault((key, label), Floor())


def values_of(ratios: Ratios, cut: Cut) -> Level:
    """What a rule judges a whole trainer batch by."""
    return statistic(ratios.of(cut[0]), cut[1])


def _logs(ratios: Ratios, key: Smoothed) -> Level:
    policy, weight = key
    return ratios.of(policy).log_ratio(weight.over, weight.safety, weight.safety_at)


def _bins(x: Tensor, rule: Reject) -> Bins:
    """Bins from where on the rule may cut.

    A mean of values below `upper` is below `upper`, so none of them goes: all that lie below its bin are put
    into one. On a GPU every value is binned: the host would wait to learn how few are large.
    """
    assert rule.upper is not None
    if not here(x):
        return Bins.of(x)
    first = int(loglattice.index(x.new_tensor([rule.upper])))
    values = x.numpy()
    large = values >= float(loglattice.edges()[first])
    at = np.flatnonzero(large)
    rest = values[~large] if len(at) else values
    return Bins.of(x[at]).plus(max(first - 1, 0), torch.from_numpy(rest))
