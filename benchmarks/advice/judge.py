"""How well each method's gradient points: alignment E[ĝ·g] / (|g| √E|ĝ|²), which no rescaling changes.

E ĝ is exact for weights of single tokens. For weights of sequences it is that of token TIS plus a mean
difference over the same samples. The variance of ĝ is always a mean over samples, the same for all methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.advice import draws, methods, truth
from benchmarks.advice.rollouts import Rollout
from benchmarks.advice.worlds import Array, World, log_softmax

BLOCKS = 16
SURE = 3.0
"""Standard errors below its estimate by which a sampled method counts as the best."""
NEAREST = "token_tis_2.0"
"""Whose samples the sequence-level methods are compared with."""


@dataclass(frozen=True)
class Moments:
    """Of one method's gradient.

    Attributes:
        along: E ĝ · g / |g|.
        square: |E ĝ|².
        noise: variance of one group's gradient, summed over coordinates.
    """

    along: float
    square: float
    noise: float

    def alignment(self, groups: float) -> float:
        """In a trainer's batch of so many groups."""
        whole = self.square + self.noise / groups
        return self.along / math.sqrt(whole) if whole > 0 else 0.0


@dataclass(frozen=True)
class Judgement:
    """All methods in one regime.

    Attributes:
        group: samples of one prompt.
        moments: by method.
        blocks: the same with one of `BLOCKS` parts of the samples left out, for methods that are not exact.
    """

    group: int
    moments: Mapping[str, Moments]
    blocks: Mapping[str, tuple[Moments, ...]]

    def alignment(self, method: str, batch: int) -> float:
        """In a trainer's batch of so many sequences."""
        return self.moments[method].alignment(batch / self.group)

    def error(self, method: str) -> float:
        """Standard error of `along`, by jackknife."""
        along = np.array([one.along for one in self.blocks[method]])
        return math.sqrt(float(np.square(along - along.mean()).sum()) * (BLOCKS - 1) / BLOCKS)

    def sure(self, method: str, batch: int) -> float:
        """The alignment that a method reaches for sure: what is sampled must stand out of its error."""
        found = self.moments[method]
        if method in methods.TOKEN:
            return found.alignment(batch / self.group)
        least = replace(found, along=found.along - SURE * self.error(method))
        return least.alignment(batch / self.group)

    def best(self, batch: int) -> tuple[str, float]:
        """In hindsight, and its alignment."""
        sure = {name: self.sure(name, batch) for name in methods.NAMES}
        name = max(sure, key=sure.__getitem__)
        return name, sure[name]

    def reached(self, method: str, batch: int) -> float:
        """As a fraction of the best; 1 at most."""
        return min(self.alignment(method, batch) / self.best(batch)[1], 1.0)


def judge(world: World, rollout: Rollout, sequences: int, seed: int) -> Judgement:
    """Every method; `sequences` samples for what is not exact."""
    true = truth.gradient(world).ravel()
    exact = expectations(world, rollout)
    blocks = [_block(world, drawn) for drawn in draws.pieces(world, rollout, sequences, seed)]
    samples = {name: np.concatenate([one[name] for one in blocks]) for name in methods.NAMES}
    direction = true / np.linalg.norm(true)
    parts = np.arange(len(samples[NEAREST])) * BLOCKS // len(samples[NEAREST])
    every = {name: _moments(name, exact, samples, direction, parts >= 0) for name in methods.NAMES}
    without = {
        name: tuple(_moments(name, exact, samples, direction, parts != part) for part in range(BLOCKS))
        for name in (NEAREST, *methods.SEQUENCE)
    }
    return Judgement(world.group, every, without)


def _block(world: World, drawn: draws.Draw) -> dict[str, Array]:
    return draws.gradients(world, drawn, drawn.weights())


def _moments(
    name: str, exact: Mapping[str, Array], samples: Mapping[str, Array], direction: Array, chosen: Array
) -> Moments:
    mine = samples[name][chosen]
    noise = float(mine.var(0, ddof=1).sum())
    if name in exact:
        mean, surplus = exact[name], 0.0
    else:
        apart = mine - samples[NEAREST][chosen]
        mean = exact[NEAREST] + apart.mean(0)
        surplus = float(apart.var(0, ddof=1).sum()) / len(apart)
    along = float(mean @ direction)
    return Moments(along, max(float(mean @ mean) - surplus, along**2), noise)


def expectations(world: World, rollout: Rollout) -> dict[str, Array]:
    """Exact expected gradients of the methods whose weights are of single tokens, [Q (V + 1) V]."""
    log_train = log_softmax(world.theta)[:, :, None]
    policies = rollout.policies()
    sums = {name: np.zeros(world.theta.size) for name in methods.TOKEN}
    for log_probs in policies:
        chance, ratio = np.exp(log_probs), np.exp(np.clip(log_train - log_probs, -20, 20))
        weighed = {name: (chance * of(ratio)).mean(2) for name, of in methods.TOKEN.items()}
        for name, found in truth.expected(world, chance.mean(2), weighed).items():
            sums[name] += found.ravel() / len(policies)
    return sums
