"""The regimes: a world, and how its rollout differs. Those held out took no part in choosing the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.advice import rollouts, worlds
from benchmarks.advice.rollouts import Make, Rollout
from benchmarks.advice.worlds import Reward, World

BATCHES = (64, 256, 1024)
"""Sequences in one update of the trainer."""


@dataclass(frozen=True)
class Kind:
    """How a rollout differs.

    Attributes:
        name: of the row.
        kind: the word of the issue.
        make: world → policy in training, rollout.
    """

    name: str
    kind: str
    make: Make


@dataclass(frozen=True)
class Regime:
    """One row of the table.

    Attributes:
        kind: how the rollout differs.
        longest: tokens.
        reward: what is rewarded.
        seed: of the world.
        vocabulary: tokens there are.
        held_out: whether the rule was chosen without it.
    """

    kind: Kind
    longest: int
    reward: Reward
    seed: int
    vocabulary: int
    held_out: bool

    @property
    def sequences(self) -> int:
        """Of its dump, and of the samples it is judged by: fewer where responses are long."""
        return 16_384 if self.longest < 256 else 4096

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.longest} {self.reward} {self.kind.name} {self.seed}"

    def made(self) -> tuple[World, Rollout]:
        """The world with the policy in training, and who samples."""
        world = worlds.make(self.longest, self.reward, self.seed, self.vocabulary)
        theta, rollout = self.kind.make(world, np.random.default_rng(self.seed + 5))
        return world.at(theta), rollout


TUNED = (
    Kind("noise 0.01", "precision noise", rollouts.noise(0.01)),
    Kind("noise 0.05", "precision noise", rollouts.noise(0.05)),
    Kind("noise 0.2", "precision noise", rollouts.noise(0.2)),
    Kind("t₂ noise 0.05", "heavy tails", rollouts.noise(0.05, 2.0)),
    Kind("t₁.₅ noise 0.1", "heavy tails", rollouts.noise(0.1, 1.5)),
    Kind("quantised 0.05", "quantisation", rollouts.quantised(0.05)),
    Kind("quantised 0.15", "quantisation", rollouts.quantised(0.15)),
    Kind("quantised 0.4", "quantisation", rollouts.quantised(0.4)),
    Kind("1 step old", "staleness", rollouts.stale(1)),
    Kind("4 steps old", "staleness", rollouts.stale(4)),
    Kind("10 steps old", "staleness", rollouts.stale(10)),
    Kind("replay of 6 steps", "replay", rollouts.replay(6, 2)),
    Kind("replay of 12 steps", "replay", rollouts.replay(12, 3)),
    Kind("temperature 0.9", "temperature", rollouts.temperature(0.9)),
    Kind("temperature 0.8", "temperature", rollouts.temperature(0.8)),
    Kind("temperature 1.1", "temperature", rollouts.temperature(1.1)),
    Kind("temperature 1.25", "temperature", rollouts.temperature(1.25)),
    Kind("1 in 1000 corrupted", "corrupted tokens", rollouts.corrupted(0.001, 0.02, 3.0)),
    Kind("1 in 100 corrupted", "corrupted tokens", rollouts.corrupted(0.01, 0.02, 3.0)),
    Kind("3 in 1000 uniform", "corrupted tokens", rollouts.corrupted(0.003, 0.05, 0.0)),
)
HELD_OUT = (
    Kind("noise 0.02", "precision noise", rollouts.noise(0.02)),
    Kind("noise 0.12", "precision noise", rollouts.noise(0.12)),
    Kind("noise 0.3", "precision noise", rollouts.noise(0.3)),
    Kind("t₁.₈ noise 0.04", "heavy tails", rollouts.noise(0.04, 1.8)),
    Kind("t₂ noise 0.15", "heavy tails", rollouts.noise(0.15, 2.0)),
    Kind("quantised 0.08", "quantisation", rollouts.quantised(0.08)),
    Kind("quantised 0.25", "quantisation", rollouts.quantised(0.25)),
    Kind("2 steps old", "staleness", rollouts.stale(2)),
    Kind("6 large steps old", "staleness", rollouts.stale(6, 0.3)),
    Kind("3 steps old, noise 0.05", "staleness", rollouts.both(rollouts.stale(3), rollouts.noise(0.05))),
    Kind("replay of 4 large steps", "replay", rollouts.replay(4, 1, 0.3)),
    Kind("replay of 9 steps", "replay", rollouts.replay(9, 3)),
    Kind("temperature 0.85", "temperature", rollouts.temperature(0.85)),
    Kind("temperature 0.95", "temperature", rollouts.temperature(0.95)),
    Kind("temperature 1.15", "temperature", rollouts.temperature(1.15)),
    Kind("1 in 500 corrupted", "corrupted tokens", rollouts.corrupted(0.002, 0.03, 4.0)),
    Kind("1 in 30 uniform", "corrupted tokens", rollouts.corrupted(0.03, 0.01, 0.0)),
)


SIZES = (1024, 4096, 16_384)
"""Sequences of a dump."""
TIMES = 4
"""Dumps of one size that are looked at, at most; they share no sequence."""


def regimes() -> Iterator[Regime]:
    """All of them; beyond 256 tokens each kind has one reward only, in turn."""
    yield from _crossed(TUNED, (8, 64, 256, 1000), ("found", "dense"), 8, False)
    yield from _crossed(HELD_OUT, (12, 96, 384, 1000), ("ladder", "drifting"), 12, True)


def _crossed(
    kinds: tuple[Kind, ...],
    lengths: tuple[int, ...],
    rewards: tuple[Reward, ...],
    vocabulary: int,
    held_out: bool,
) -> Iterator[Regime]:
    for longest in lengths:
        for at, reward in enumerate(rewards):
            seed = longest + 7 * at + (5000 if held_out else 0)
            for kind in kinds if longest <= 256 else kinds[at :: len(rewards)]:
                yield Regime(kind, longest, reward, seed, vocabulary, held_out)
