"""What has to be known before the analysis, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offpol_diag.advantages import GroupRewards
from offpol_diag.batch import Batch
from offpol_diag.presets import Policy, Preset, Reject, Weight
from offpol_diag.readers import Dump, columns
from offpol_diag.scope import Settled

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

    @property
    def roles(self) -> frozenset[str]:
        """The columns it takes to tell, by our names; the log-probs of the sampler are always there."""
        policies = {policy for policy, _ in (*self.cuts, *self.tails)} - {"rollout"}
        return frozenset({columns.STEP} | {f"{policy}_log_probs" for policy in policies})

    def narrow(self, dump: Dump) -> Dump:
        """The dump without what is not asked for; all of it where positions, turns or prompts are."""
        turns = any(weight.over == "segment" for _, weight in self.tails)
        return dump if self.rewards or turns else dump.only(self.roles)


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
