"""Dumps, as a trainer would write them, and what a trainer would make of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.advice import methods
from benchmarks.advice.rollouts import Rollout
from benchmarks.advice.worlds import Array, Generator, Ints, World, advantages, log_softmax

AT_ONCE = 2048
"""Sequences that are drawn together."""


@dataclass(frozen=True)
class Draw:
    """N sequences, padded.

    Attributes:
        prompt: [N].
        before, token: the token before and the one that was sampled, [N, T].
        rollout, train: log-probs of that, [N, T].
        there: where there is a token, [N, T] bool.
        advantage, reward: [N].
        group: [N].
    """

    prompt: Ints
    before: Ints
    token: Ints
    rollout: Array
    train: Array
    there: Array
    advantage: Array
    reward: Array
    group: Ints

    def rows(self, first: int, last: int) -> Draw:
        """Some of the sequences."""
        return Draw(**{f.name: getattr(self, f.name)[first:last] for f in fields(self)})

    @property
    def lengths(self) -> Ints:
        """Tokens, [N]."""
        return self.there.sum(1)

    @property
    def delta(self) -> Array:
        """Log-ratios, 0 where there is no token, [N, T]."""
        return np.where(self.there, self.train - self.rollout, 0.0)

    def weights(self) -> dict[str, Array]:
        """Of every method, [N, T]."""
        delta = self.delta
        ratio = np.exp(np.clip(delta, -20, 20))
        found = {name: of(ratio) for name, of in methods.TOKEN.items()}
        return found | methods.sequence(delta, self.lengths)


def pieces(world: World, rollout: Rollout, sequences: int, seed: int) -> Iterator[Draw]:
    """A dump, piece by piece, with groups counted on."""
    rng = np.random.default_rng(seed)
    for first in range(0, sequences, AT_ONCE):
        yield draw(world, rollout, min(AT_ONCE, sequences - first), rng, first // world.group)


def draw(world: World, rollout: Rollout, sequences: int, rng: Generator, first: int = 0) -> Draw:
    """Sequences of whole groups; `first` is the number of the first group."""
    groups = sequences // world.group
    group = np.repeat(np.arange(groups), world.group)
    prompt = rng.integers(0, len(world.theta), groups)[group]
    steps, reward = _steps(world, rollout, prompt, rollout.start(rng, groups)[group], rng)
    columns = {name: np.stack(column, 1) for name, column in steps.items()}
    return Draw(prompt, **columns, advantage=advantages(world, reward), reward=reward, group=group + first)


def _steps(
    world: World, rollout: Rollout, prompt: Ints, which: Ints, rng: Generator
) -> tuple[Mapping[str, list[Array]], Array]:
    each, n, vocabulary = np.arange(len(prompt)), len(prompt), world.theta.shape[2]
    policy, moves = log_softmax(world.theta), world.moves.cumsum(-1)
    before, state, there = np.full(n, vocabulary), np.zeros(n, np.int64), np.ones(n, bool)
    found: dict[str, list[Array]] = {name: [] for name in ("before", "token", "rollout", "train", "there")}
    reward = np.zeros(n)
    for end in world.ends:
        log_probs = rollout.log_probs(rng, which, prompt, before)
        token = (log_probs - np.log(rng.standard_exponential(log_probs.shape))).argmax(1)
        row = (before, token, log_probs[each, token], policy[prompt, before, token], there.copy())
        for column, value in zip(found.values(), row, strict=True):
            column.append(value)
        if world.dense is not None:
            reward += np.where(there, world.dense[prompt, before, token], 0)
        else:
            moved = (rng.random(n)[:, None] > moves[prompt, state, token]).sum(1)
            state = np.where(there, moved, state)
        there = there & (rng.random(n) >= end)
        before = token
    return found, reward if world.dense is not None else world.goal[prompt, state]


def gradients(world: World, drawn: Draw, weights: Mapping[str, Array]) -> dict[str, Array]:
    """What each group's gradient is by method, per sequence, [groups, Q (V + 1) V]."""
    groups, vocabulary = len(drawn.group) // world.group, world.theta.shape[2]
    size = world.theta.size
    code = (drawn.prompt[:, None] * (vocabulary + 1) + drawn.before) * vocabulary + drawn.token
    code = ((drawn.group - drawn.group[0])[:, None] * size + code)[drawn.there]
    score = np.broadcast_to(drawn.advantage[:, None], drawn.there.shape)[drawn.there] / world.group
    policy = np.exp(log_softmax(world.theta))
    found = {}
    for name, weight in weights.items():
        sums = np.bincount(code, weight[drawn.there] * score, minlength=groups * size)
        sums = sums.reshape(groups, *world.theta.shape)
        found[name] = (sums - sums.sum(-1, keepdims=True) * policy).reshape(groups, size)
    return found
