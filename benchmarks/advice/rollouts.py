"""How the policy that samples differs from the one that is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.advice import truth
from benchmarks.advice.worlds import Array, Generator, Ints, World, log_softmax

INTEGRATED = 3000
"""Draws of a random rollout policy that stand for all of them, at each state."""


class Rollout(Protocol):
    """A policy that samples; it may be random itself."""

    def start(self, rng: Generator, groups: int) -> Ints:
        """Which policy each group is sampled with, [groups]."""

    def log_probs(self, rng: Generator, which: Ints, q: Ints, before: Ints) -> Array:
        """Of every token at the states of n sequences, [n, V]."""

    def policies(self) -> list[Array]:
        """Log-probs of each policy that a group may be sampled with, as drawn K times, [Q, V + 1, K, V]."""


@dataclass(frozen=True)
class Fixed:
    """Tables of log-probs [Q, V + 1, V]; each group is sampled with one of them."""

    tables: tuple[Array, ...]

    def start(self, rng: Generator, groups: int) -> Ints:
        """Which table."""
        return rng.integers(0, len(self.tables), groups)

    def log_probs(self, rng: Generator, which: Ints, q: Ints, before: Ints) -> Array:
        """From the table."""
        if len(self.tables) == 1:
            return self.tables[0][q, before]
        return np.stack(self.tables)[which, q, before]

    def policies(self) -> list[Array]:
        """As they are."""
        return [table[:, :, None] for table in self.tables]


@dataclass(frozen=True)
class Noisy:
    """Logits with noise of their own at every token: rounding in another order, another expert.

    Attributes:
        theta: logits, [Q, V + 1, V].
        sigma: size of the noise.
        freedom: degrees of freedom of Student's t; None is a normal.
        corrupted: how often a token comes from a policy of its own that has nothing to do with the others.
        sharp: size of that policy's logits.
    """

    theta: Array
    sigma: float
    freedom: float | None = None
    corrupted: float = 0.0
    sharp: float = 0.0

    def start(self, rng: Generator, groups: int) -> Ints:
        """There is one."""
        return np.zeros(groups, np.int64)

    def log_probs(self, rng: Generator, which: Ints, q: Ints, before: Ints) -> Array:
        """Drawn anew."""
        logits = self.theta[q, before]
        noise = self._noise(rng, logits.shape)
        found = log_softmax(logits + self.sigma * noise)
        bad = np.flatnonzero(rng.random(len(q)) < self.corrupted)
        found[bad] = log_softmax(self.sharp * rng.normal(size=(len(bad), logits.shape[1])))
        return found

    def _noise(self, rng: Generator, shape: tuple[int, ...]) -> Array:
        if self.freedom is None:
            return rng.standard_normal(shape, np.float32).astype(np.float64)
        return np.clip(rng.standard_t(self.freedom, size=shape), -300, 300)

    def policies(self) -> list[Array]:
        """At every state, as often as is integrated over."""
        prompts, states, tokens = self.theta.shape
        q = np.repeat(np.arange(prompts), states * INTEGRATED)
        before = np.tile(np.repeat(np.arange(states), INTEGRATED), prompts)
        found = self.log_probs(np.random.default_rng(9), q, q, before)
        return [found.reshape(prompts, states, INTEGRATED, tokens)]


Make = Callable[[World, Generator], tuple[Array, Rollout]]
"""From a world to the logits that are trained, and who samples."""


def noise(sigma: float, freedom: float | None = None) -> Make:
    """The same policy, computed with other rounding."""
    return lambda world, rng: (world.theta, Noisy(world.theta, sigma, freedom))


def corrupted(rate: float, sigma: float, sharp: float) -> Make:
    """The same, and rarely a token from somewhere else."""
    return lambda world, rng: (world.theta, Noisy(world.theta, sigma, None, rate, sharp))


def quantised(size: float) -> Make:
    """Logits off by a fixed amount each."""
    return lambda world, rng: (world.theta, _one(world.theta + size * rng.normal(size=world.theta.shape)))


def temperature(at: float) -> Make:
    """Sampled at another temperature, with the log-probs of that."""
    return lambda world, rng: (world.theta, _one(world.theta / at))


def stale(steps: int, size: float = 0.2) -> Make:
    """The policy of some updates ago."""

    def made(world: World, rng: Generator) -> tuple[Array, Rollout]:
        path = ascent(world, steps, size)
        return path[-1], _one(path[0])

    return made


def replay(steps: int, every: int, size: float = 0.2) -> Make:
    """Groups of several earlier policies, and of this one."""

    def made(world: World, rng: Generator) -> tuple[Array, Rollout]:
        path = ascent(world, steps, size)
        return path[-1], Fixed(tuple(log_softmax(theta) for theta in path[::every]))

    return made


def both(*makers: Make) -> Make:
    """Staleness with noise: the logits of the last rollout policy, noisy."""

    def made(world: World, rng: Generator) -> tuple[Array, Rollout]:
        theta, old = makers[0](world, rng)
        _, noisy = makers[1](world.at(old.policies()[0][:, :, 0]), rng)
        return theta, noisy

    return made


def ascent(world: World, steps: int, size: float) -> list[Array]:
    """Policies along the true gradient, each step of that length."""
    path = [world.theta]
    for _ in range(steps):
        gradient = truth.gradient(world.at(path[-1]))
        path.append(path[-1] + size * gradient / np.linalg.norm(gradient))
    return path


def _one(theta: Array) -> Fixed:
    return Fixed((log_softmax(theta),))
