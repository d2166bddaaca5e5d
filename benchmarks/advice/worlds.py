"""Worlds small enough that the true policy gradient is known.

A policy is a table: the next token's logits given the prompt and the token before. A response's length is
uniform between half of the longest and the longest. What is rewarded is one of:

    found    one token in many leads to the goal, and one in more leads away again: 1 at the end, or 0
    ladder   three such steps are needed, and none leads away: 1 at the end, or 0
    dense    every bigram has a reward of its own, which is 0 on average over the policy
    drifting the same, not centred: most of it says nothing of a single token

Advantages are normalised within a group of samples of one prompt, as a trainer does: by mean and standard
deviation where the reward is sparse, by the mean where it is dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Reward = Literal["found", "ladder", "dense", "drifting"]
Generator = np.random.Generator
TINY = 1e-6
"""What a trainer adds to a standard deviation."""


@dataclass(frozen=True)
class World:
    """Q prompts, V tokens, an environment of M states.

    Attributes:
        theta: logits of the policy that is trained, [Q, V + 1, V]; the token before the first is V.
        moves: probability of the environment's next state by prompt, state and token, [Q, M, V, M].
        goal: reward of the state at the end, [Q, M].
        dense: reward of a bigram, [Q, V + 1, V]; None where only the end is rewarded.
        ends: probability that a response ends after each token, if it has not before, [T].
        group: samples of one prompt.
    """

    theta: Array
    moves: Array
    goal: Array
    dense: Array | None
    ends: Array
    group: int = 8

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return len(self.ends)

    @property
    def sparse(self) -> bool:
        """Whether only the end is rewarded."""
        return self.dense is None

    def at(self, theta: Array) -> World:
        """The same world with another policy in training."""
        return replace(self, theta=theta)


def make(longest: int, reward: Reward, seed: int, vocabulary: int = 8, prompts: int = 4) -> World:
    """A world drawn at random."""
    rng = np.random.default_rng(seed)
    theta = 1.5 * rng.normal(size=(prompts, vocabulary + 1, vocabulary))
    if reward in ("dense", "drifting"):
        moves, goal = np.ones((prompts, 1, vocabulary, 1)), np.zeros((prompts, 1))
        dense = _dense(rng, theta, reward == "dense")
    else:
        moves, goal = (_found if reward == "found" else _ladder)(rng, prompts, vocabulary, 0.75 * longest)
        dense = None
    return World(theta, moves, goal, dense, _ends(longest))


def _dense(rng: Generator, theta: Array, centred: bool) -> Array:
    rewards = rng.normal(size=theta.shape)
    mean = (np.exp(log_softmax(theta)) * rewards).sum(-1, keepdims=True)
    return rewards - mean if centred else 0.5 * rewards


def _found(rng: Generator, prompts: int, vocabulary: int, length: float) -> tuple[Array, Array]:
    """Searching, found, failed."""
    up, down = (_hazard(rng, prompts, vocabulary, times / length) for times in (2.5, 1.0))
    moves = np.zeros((prompts, 3, vocabulary, 3))
    moves[:, 0, :, 1], moves[:, 0, :, 0] = up, 1 - up
    moves[:, 1, :, 2], moves[:, 1, :, 1] = down, 1 - down
    moves[:, 2, :, 2] = 1
    return moves, _only(prompts, 3, 1)


def _ladder(rng: Generator, prompts: int, vocabulary: int, length: float) -> tuple[Array, Array]:
    """Three steps up."""
    moves = np.zeros((prompts, 4, vocabulary, 4))
    for step in range(3):
        up = _hazard(rng, prompts, vocabulary, 5.0 / length)
        moves[:, step, :, step + 1], moves[:, step, :, step] = up, 1 - up
    moves[:, 3, :, 3] = 1
    return moves, _only(prompts, 4, 3)


def _hazard(rng: Generator, prompts: int, vocabulary: int, rate: float) -> Array:
    """Of each token; a few tokens hold most of it."""
    return np.minimum(rate * rng.gamma(0.6, 1, size=(prompts, vocabulary)), 0.9)


def _only(prompts: int, states: int, rewarded: int) -> Array:
    goal = np.zeros((prompts, states))
    goal[:, rewarded] = 1
    return goal


def _ends(longest: int) -> Array:
    lengths = np.arange(max(longest // 2, 1), longest + 1)
    chance = np.zeros(longest + 1)
    chance[lengths] = 1 / len(lengths)
    left = chance[::-1].cumsum()[::-1]
    return np.minimum(chance[1:] / left[1:], 1.0)


def log_softmax(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def mean_advantages(chance: float, group: int) -> tuple[float, float]:
    """E[A | this sample succeeds], E[A | it fails], where each of the group succeeds with that chance."""
    others = [math.comb(group - 1, k) * chance**k * (1 - chance) ** (group - 1 - k) for k in range(group)]
    succeeds = sum(weight * _advantage(k + 1, 1, group) for k, weight in enumerate(others))
    fails = sum(weight * _advantage(k, 0, group) for k, weight in enumerate(others))
    return succeeds, fails


def _advantage(successes: int, reward: int, group: int) -> float:
    mean = successes / group
    spread = math.sqrt(group * mean * (1 - mean) / (group - 1))
    return (reward - mean) / (spread + TINY)


def advantages(world: World, rewards: Array) -> Array:
    """Of samples in groups, one after the other, [N] → [N]."""
    groups = rewards.reshape(-1, world.group)
    apart = groups - groups.mean(1, keepdims=True)
    if world.sparse:
        apart = apart / (groups.std(1, ddof=1, keepdims=True) + TINY)
    return apart.reshape(-1)
