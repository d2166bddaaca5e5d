"""Exact gradients by dynamic programming over prompt, last token, environment and place.

With A the advantage a trainer would give, the gradient is E[Σ_t w_t A ∇log π(a_t)] under the rollout, where
w = 1 and the rollout is π for the true one. E[A | state, token] is linear in the value of what follows, and
for dense rewards in what came before. Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.advice.worlds import Array, World, log_softmax, mean_advantages


def gradient(world: World) -> Array:
    """The true on-policy gradient, [Q, V + 1, V]."""
    policy = np.exp(log_softmax(world.theta))
    return expected(world, policy, {"": policy})[""]


def expected(world: World, rollout: Array, weighed: Mapping[str, Array]) -> dict[str, Array]:
    """Expected gradients of methods whose weights are of single tokens.

    Args:
        world: its policy is the one in training.
        rollout: mean probabilities of who samples, [Q, V + 1, V].
        weighed: by method, E[rollout probability × weight], [Q, V + 1, V].

    Returns:
        By method, [Q, V + 1, V].
    """
    values = backward(world, rollout)
    told = _Told.of(world, values.start)
    sums = {name: np.zeros_like(world.theta) for name in weighed}
    for reached in _forward(world, rollout, values.tokens, told):
        for name, weights in weighed.items():
            sums[name] += weights * reached
    policy = np.exp(log_softmax(world.theta))
    return {name: (one - one.sum(-1, keepdims=True) * policy) / len(policy) for name, one in sums.items()}


@dataclass(frozen=True)
class Values:
    """What is expected from here on.

    Attributes:
        tokens: at each place, of state and token, [T] of [Q, V + 1, M, V].
        start: of each prompt, [Q].
    """

    tokens: list[Array]
    start: Array


def backward(world: World, rollout: Array) -> Values:
    """Values under a policy [Q, V + 1, V]."""
    prompts, states, vocabulary = rollout.shape
    value, found = np.zeros((prompts, states, world.goal.shape[1])), []
    for end in world.ends[::-1]:
        after = (1 - end) * value[:, :vocabulary] + end * world.goal[:, None, :]
        of_token = np.einsum("qmvn,qvn->qmv", world.moves, after)[:, None]
        of_token = np.repeat(of_token, states, 1)
        if world.dense is not None:
            of_token = of_token + world.dense[:, :, None, :]
        value = np.einsum("qpv,qpmv->qpm", rollout, of_token)
        found.append(of_token)
    return Values(found[::-1], value[:, vocabulary, 0])


@dataclass(frozen=True)
class _Told:
    """E[A] = level + slope × what is expected of the response, by prompt, [Q, 1, 1, 1] each."""

    level: Array
    slope: Array

    @classmethod
    def of(cls, world: World, start: Array) -> _Told:
        if world.sparse:
            both = np.array([mean_advantages(float(np.clip(p, 0, 1)), world.group) for p in start])
            level, slope = both[:, 1], both[:, 0] - both[:, 1]
        else:
            slope = np.full(len(start), 1 - 1 / world.group)
            level = -slope * start
        return cls(level[:, None, None, None], slope[:, None, None, None])


def _forward(world: World, rollout: Array, values: list[Array], told: _Told):  # type: ignore[no-untyped-def]
    """At each place: probability of a state times E[A | it, token], summed over the environment."""
    prompts, states, vocabulary = rollout.shape
    there = np.zeros((prompts, states, world.goal.shape[1]))
    there[:, vocabulary, 0] = 1
    past = np.zeros_like(there)  # E[reward so far; being there]
    for place, end in enumerate(world.ends):
        reached = told.level * there[..., None] + told.slope * (
            past[..., None] + there[..., None] * values[place]
        )
        yield reached.sum(2)
        if world.dense is not None:
            past = _moved(
                world, rollout, past[..., None] + there[..., None] * world.dense[:, :, None, :], end
            )
        there = _moved(world, rollout, np.repeat(there[..., None], vocabulary, -1), end)


def _moved(world: World, rollout: Array, mass: Array, end: float) -> Array:
    """One token on: mass of state and token [Q, V + 1, M, V] → of state [Q, V + 1, M]."""
    arrived = np.einsum("qpmv,qmvn->qvn", mass * rollout[:, :, None, :], world.moves)
    return (1 - end) * np.concatenate([arrived, np.zeros((len(mass), 1, mass.shape[2]))], 1)
