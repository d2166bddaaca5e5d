"""First pass over the dump: quantities of a whole trainer batch that must be known before tokens are judged.

Batch-wide rejection rules (M2PO) need the cut from which on tokens are dropped, advantages made of rewards
the mean and deviation of each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from offpol_diag.core.formulas import batch_cut
from offpol_diag.core.steps import rule as rule_of
from offpol_diag.dump import schema as columns
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import Dump
from offpol_diag.engine import scope, segments
from offpol_diag.engine.advantages import GroupRewards
from offpol_diag.engine.context import evaluator
from offpol_diag.engine.scope import BatchFits, Label
from offpol_diag.engine.segments import Array
from offpol_diag.errors import DumpError
from offpol_diag.presets import Policy, Preset, Reject
from offpol_diag.run.ray import Engine
from offpol_diag.run.threads import Job, State

MOST_TOKENS = 1 << 26
"""Most tokens of a dump for rules on trainer batches: their values are held until each is sorted."""


class TooManyTokens(DumpError):
    """The dump has more tokens than values are held of."""


def split(batch: Batch, values: Array) -> Iterator[tuple[Label, Array]]:
    """Yield each trainer batch with the values [T] of its tokens, in order."""
    labels, codes = scope.codes(batch)
    codes = segments.spread(codes, batch.cu_seqlens)
    if (codes[1:] < codes[:-1]).any():  # else the dump is in the order of its steps
        order = np.argsort(codes, kind="stable")
        codes, values = codes[order], values[order]
    ends = np.cumsum(np.bincount(codes, minlength=len(labels)))
    yield from zip(labels, np.split(values, ends), strict=False)  # after the last end nothing is left


Cut = tuple[Policy, Reject]
M = TypeVar("M", bound=State)


@dataclass(frozen=True)
class Needs:
    """Quantities of each trainer batch that the presets depend on.

    Attributes:
        cuts: batch-wide rejection rules, each with the numerator of its ratio.
        rewards: whether advantages must be computed from rewards.
    """

    cuts: tuple[Cut, ...]
    rewards: bool

    @classmethod
    def of(cls, presets: Sequence[Preset], rewards: bool) -> Needs:
        """Collect them from the presets that will be applied."""
        cuts = ((preset.policy, rule) for preset in presets for rule in preset.reject if rule.over == "batch")
        return cls(tuple(dict.fromkeys(cuts)), rewards)

    def __bool__(self) -> bool:
        return bool(self.cuts or self.rewards)

    def narrow(self, dump: Dump) -> Dump:
        """Restrict a dump to the columns needed; all of them where rewards are needed."""
        roles = {columns.STEP, *(f"{policy}_log_probs" for policy, _ in self.cuts)}
        return dump if self.rewards else dump.only(roles)


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


@dataclass(frozen=True)
class Seen:
    """Statistics of some batches.

    Attributes:
        values: rule → trainer batch → the statistic of its tokens, in any number of arrays.
        rewards: of groups, only where advantages are computed from them.
    """

    values: dict[Cut, dict[Label, list[Array]]]
    rewards: GroupRewards | None = None

    @np.errstate(all="ignore")
    def merge(self, other: Seen) -> Seen:
        """Merge the statistics of two parts of a dump.

        Raises:
            TooManyTokens: they have more tokens than `MOST_TOKENS`.
            TooManySteps: they have more steps than an analysis takes.
        """
        rewards = self.rewards.merge(other.rewards) if self.rewards and other.rewards else None
        values: dict[Cut, dict[Label, list[Array]]] = {}
        for cut, mine in self.values.items():
            theirs = other.values[cut]
            values[cut] = {label: mine.get(label, []) + theirs.get(label, []) for label in mine | theirs}
            scope.refuse_steps(len(values[cut]), 0)
            if sum(len(part) for parts in values[cut].values() for part in parts) > MOST_TOKENS:
                raise TooManyTokens(
                    f"the dump has more than {MOST_TOKENS >> 20} M tokens, and a rule over the trainer batch "
                    "(M2PO) sorts those of each step in memory",
                    "leave such presets out, or analyze the dump in parts of whole steps",
                )
        return Seen(values, rewards)


@dataclass(frozen=True)
class Look:
    """The job of the first pass: collect the quantities asked for."""

    asked: Needs

    def __call__(self, batch: Batch) -> Seen:
        """Collect the statistics of one batch."""
        scope.refuse_steps(scope.count(batch), 0)
        tokens = evaluator(batch)
        values = {
            (policy, rule): {label: [x] for label, x in split(batch, tokens.judged(rule_of(policy, rule)))}
            for policy, rule in self.asked.cuts
        }
        return Seen(values, GroupRewards.of(batch) if self.asked.rewards else None)


def _cut(values: Array, rule: Reject) -> float:
    assert rule.upper is not None
    return float(batch_cut(values, rule.upper)) if len(values) else math.inf


def of_batch(batch: Batch, presets: Sequence[Preset], rewards: bool = False) -> FirstPass:
    """Return what presets need of a dump that is one batch; `rewards`: advantages are made of rewards."""
    return _first_pass(lambda _, job: job(batch), Needs.of(presets, rewards))


def read_ahead(engine: Engine, dump: Dump, asked: Needs) -> FirstPass:
    """Read the dump for what is asked."""
    return _first_pass(partial(_read, engine, dump), asked)


@np.errstate(all="ignore")
def _first_pass(read: Callable[[Needs, Job[Any]], Any], asked: Needs) -> FirstPass:
    seen: Seen = read(asked, Look(asked)) or Seen({})
    cuts = {
        (policy, rule): {label: _cut(np.concatenate(parts), rule) for label, parts in by_label.items()}
        for (policy, rule), by_label in seen.values.items()
    }
    return FirstPass(BatchFits(cuts), seen.rewards)


def _read(engine: Engine, dump: Dump, asked: Needs, job: Job[M]) -> M | None:
    """Read only the columns needed; after an error read all, to name the first bad row of the whole dump."""
    narrow = asked.narrow(dump)
    try:
        return engine.reduce(narrow, job)
    except DumpError as error:
        if narrow is dump or isinstance(error, TooManyTokens | scope.TooManySteps):
            raise
        return engine.reduce(dump, job)
