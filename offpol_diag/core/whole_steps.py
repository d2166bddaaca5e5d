"""What needs the rows of a training step together, before a token of it can be judged.

M2PO's cut looks at all tokens of the trainer batch, and advantages that are made of rewards at all responses
to a prompt. For presets with either, the dump is read once before its pass (`read_whole_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from offpol_diag.core.evaluate import Rule
from offpol_diag.core.formulas import batch_cut
from offpol_diag.core.gap import Tokens
from offpol_diag.core.state import Array, groups_of
from offpol_diag.core.study import Study
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import Dump
from offpol_diag.errors import DumpError
from offpol_diag.run.ray import Engine

MADE = (
    "there are no advantages: they are made of the rewards, normalised within each group (prompt) of a step "
    "as GRPO does"
)
"""The note on a dump whose advantages are made."""
MOST_VALUES = 1 << 26
"""Most values of one step that are held in memory to be sorted."""
MOST_STEPS = 1 << 14
"""Most training steps of a dump; sums are kept of each."""
GRPO_EPS = 1e-6
"""Added to a group's standard deviation: that of verl's compute_grpo_outcome_advantage."""


class TooMany(DumpError):
    """The dump has more steps, or more values of a step, than are kept."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "name the column that numbers the trainer batches with --columns step=NAME")


def refuse_steps(steps: int) -> None:
    """Raise `TooMany` for more than `MOST_STEPS` training steps."""
    if steps > MOST_STEPS:
        raise TooMany(f"column 'step': more than {MOST_STEPS} training steps, and sums are kept of each")


class Values(NamedTuple):
    """Values of a rule's statistic in one step.

    M2PO drops the largest values until the mean of the rest is below the rule's `upper`. What is below it
    never has to go, so that its number and sum are enough; all others are held.
    """

    below: int = 0  # number of values below `upper`
    total: float = 0.0  # their sum
    others: tuple[Array, ...] = ()  # all other values, in parts


@dataclass(frozen=True)
class StepValues:
    """What the first reading leaves of a part of a dump.

    Attributes:
        values: of each rule over a trainer batch and step.
        rewards: group and reward of sequences, [S] each, in parts; none where advantages are not made.
    """

    values: dict[tuple[Rule, str], Values]
    rewards: tuple[tuple[Array, Array], ...] = ()

    @classmethod
    def of(cls, study: Study, batch: Batch) -> StepValues:
        """Collect them from one batch."""
        steps, step = np.unique(batch.steps, return_inverse=True)
        refuse_steps(len(steps))
        tokens, values = Tokens.of(batch), dict[tuple[Rule, str], Values]()
        of_tokens = tokens.sequences.spread(step)
        order = np.argsort(of_tokens, kind="stable")
        ends = np.cumsum(np.bincount(of_tokens, minlength=len(steps)))[:-1]
        for rule in study.batch_rules:
            x = tokens.judged(rule)[order]
            for name, of_step in zip(steps.tolist(), np.split(x, ends), strict=True):
                below = of_step < rule.reject.upper
                values[rule, name] = Values(int(below.sum()), float(of_step[below].sum()), (of_step[~below],))
        if not study.makes_advantages or batch.rewards is None:
            return cls(values)
        return cls(values, ((groups_of(batch.key, batch.steps), batch.rewards),))

    def merge(self, other: StepValues) -> StepValues:
        """Merge with what is left of another part.

        Raises:
            TooMany: there are too many steps, or too many values of one to be sorted in memory.
        """
        values = dict(self.values)
        for key, theirs in other.values.items():
            ours = values.get(key, Values())
            others = ours.others + theirs.others
            values[key] = Values(ours.below + theirs.below, ours.total + theirs.total, others)
            if sum(map(len, others)) > MOST_VALUES:
                many = f"more than {MOST_VALUES >> 20} M tokens above the bound of M2PO"
                raise TooMany(f"a step has {many}, which sorts them in memory")
        refuse_steps(len({step for _, step in values}))
        return StepValues(values, self.rewards + other.rewards)


@dataclass(frozen=True)
class WholeSteps:
    """What is known of whole steps before their tokens are judged.

    Attributes:
        cuts: rule → step → the value from which on tokens are dropped.
        groups: hashes of groups, rising, [G]; None where advantages are not made of rewards.
        mean: mean reward of each, [G]: an advantage is (reward − mean) / scale.
        scale: standard deviation, with n − 1, and 1e-6 more; a group of one keeps its reward over 1 + 1e-6.
            Source: Shao et al. 2024 (DeepSeekMath).
    """

    cuts: Mapping[Rule, Mapping[str, float]]
    groups: Array | None = None
    mean: Array | None = None
    scale: Array | None = None

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, read: StepValues) -> WholeSteps:
        """Find the cuts, mean and deviation."""
        cuts: dict[Rule, dict[str, float]] = {}
        for (rule, step), (below, total, others) in read.values.items():
            x, upper = np.concatenate(others), rule.reject.upper or 0.0
            cut = float(batch_cut(x, upper, below, total)) if len(x) else math.inf
            cuts.setdefault(rule, {})[step] = cut
        if not read.rewards:
            return cls(cuts)
        every, rewards = (np.concatenate(x) for x in zip(*read.rewards, strict=True))
        groups, at = np.unique(every, return_inverse=True)
        n = np.bincount(at)
        mean = np.bincount(at, rewards) / n
        deviation = np.sqrt(np.bincount(at, np.square(rewards - mean[at])) / np.maximum(n - 1, 1))
        alone = n == 1
        return cls(cuts, groups, np.where(alone, 0.0, mean), np.where(alone, 1.0, deviation) + GRPO_EPS)

    @classmethod
    def of_batch(cls, study: Study, batch: Batch) -> WholeSteps:
        """Return what is known of a dump that is one batch."""
        return cls.of(StepValues.of(study, batch))

    def cut(self, batch: Batch, rule: Rule, _: Array) -> Array:
        """Return the value from which on a rule drops tokens, for every token of a batch, [T]."""
        cuts = self.cuts[rule]
        return np.repeat(np.array([cuts[step] for step in batch.steps], np.float64), batch.lengths)

    def filled(self, batch: Batch) -> Batch:
        """Add advantages to a batch, where they are made of rewards."""
        if self.groups is None or self.mean is None or self.scale is None:
            return batch
        at = np.searchsorted(self.groups, groups_of(batch.key, batch.steps))
        advantages = (batch.rewards - self.mean[at]) / self.scale[at]
        return replace(batch, advantages=np.repeat(advantages, batch.lengths))


def read_whole_steps(engine: Engine, dump: Dump, study: Study) -> WholeSteps:
    """Read the dump for what presets need of whole steps; it is not read where they need nothing."""
    if not study.batch_rules and not study.makes_advantages:
        return WholeSteps({})
    return WholeSteps.of(engine.reduce(dump, partial(StepValues.of, study)) or StepValues({}))
