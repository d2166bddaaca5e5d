"""Worlds so small that dynamic programming gives the exact policy gradient.

The logits of the next token depend on the prompt and the token before it. There are two families:

    table    logits of their own for each prompt and previous token; a response ends by chance
    network  logits = tanh(E[prompt] + F[previous] + c) W + bias; token 0 ends a response

One of four rewards is given:

    found    one token in many leads to the goal, and one in more leads away again: 1 at the end, or 0
    ladder   three such steps are needed, and none leads away: 1 at the end, or 0
    dense    every bigram has a reward of its own, 0 on average over the policy
    drifting the same, not centred: most of it says nothing about a single token

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
Family = Literal["table", "network"]
Reward = Literal["found", "ladder", "dense", "drifting"]
Generator = np.random.Generator

EPSILON = 1e-6
"""Constant that trainers add to a standard deviation."""


@dataclass(frozen=True)
class World:
    """A policy in training and its environment: Q prompts, V tokens, M states of the environment.

    Attributes:
        params: parameters of the policy in training, [P].
        prompts: Q.
        vocabulary: V; the previous token of the first one is V.
        hidden: units of the hidden layer; 0 for the family `table`.
        moves: probability of the next state by prompt, state and token, [Q, M, V, M].
        goal: reward of the state at the end, [Q, M].
        dense: reward of a bigram, [Q, V + 1, V]; None where only the end is rewarded.
        ends: probability that the response ends after each token, whatever the token, [T].
        group: samples of one prompt.
    """

    params: Array
    prompts: int
    vocabulary: int
    hidden: int
    moves: Array
    goal: Array
    dense: Array | None
    ends: Array
    group: int = 8

    def at(self, params: Array) -> World:
        """Return the same world with other parameters."""
        return replace(self, params=params)

    def logits(self) -> Array:
        """Return the logits of the policy in training, [Q, V + 1, V]."""
        if not self.hidden:
            return self.params.reshape(self.prompts, self.vocabulary + 1, self.vocabulary)
        *_, output, bias = self.layers()
        return self.activations() @ output + bias

    def log_probs(self) -> Array:
        """Return the log-probs of the policy in training, [Q, V + 1, V]."""
        return log_softmax(self.logits())

    def layers(self) -> list[Array]:
        """Split parameters by layer: [Q, H], [V + 1, H], [H], [H, V], [V]; for a table its logits alone."""
        q, v, h = self.prompts, self.vocabulary, self.hidden
        shapes = [(q, h), (v + 1, h), (h,), (h, v), (v,)] if h else [(q, v + 1, v)]
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(self.params, cuts), shapes, strict=True)]

    def activations(self) -> Array:
        """Return the activations of the hidden layer, [Q, V + 1, H]."""
        prompt, previous, offset, *_ = self.layers()
        return np.tanh(prompt[:, None] + previous + offset)

    def pullback(self, slopes: Array, prompt: Ints) -> Array:
        """Apply the chain rule: slopes by one prompt's logits each [N, V + 1, V] → by parameters [N, P]."""
        n, each = len(slopes), np.arange(len(slopes))
        if not self.hidden:
            found = np.zeros((n, self.prompts, slopes[0].size))
            found[each, prompt] = slopes.reshape(n, -1)
            return found.reshape(n, -1)
        units, output = self.activations()[prompt], self.layers()[3]
        inner = (slopes @ output.T) * (1 - units**2)
        by_prompt = np.zeros((n, self.prompts, self.hidden))
        by_prompt[each, prompt] = inner.sum(1)
        layers = (by_prompt, inner, inner.sum(1), units.transpose(0, 2, 1) @ slopes, slopes.sum(1))
        return np.concatenate([layer.reshape(n, -1) for layer in layers], 1)


def make(
    family: Family,
    longest: int,
    reward: Reward,
    seed: int,
    vocabulary: int,
    prompts: int = 4,
    hidden: int = 0,
) -> World:
    """Draw a world; responses have 3/4 of `longest` tokens on average, those of a network 1/2."""
    rng = np.random.default_rng(seed)
    q, v, h = prompts, vocabulary, hidden
    if family == "table":
        params, length, ends = 1.5 * rng.normal(size=q * (v + 1) * v), 0.75 * longest, _ends(longest)
    else:
        sizes = ((0.8, (q, h)), (1.0, (v + 1, h)), (0.3, (h,)), (2.2 / math.sqrt(h), (h, v)), (0.3, (v,)))
        params = np.concatenate([size * rng.normal(size=shape).ravel() for size, shape in sizes])
        length, ends = 0.5 * longest, np.eye(longest)[-1]
    world = World(params, q, v, h, np.ones((q, 1, v, 1)), np.zeros((q, 1)), None, ends)
    if family == "network":
        world = _ending(world, length)
    if reward in ("dense", "drifting"):
        rewards, policy = rng.normal(size=(q, v + 1, v)), np.exp(world.log_probs())
        mean = (policy * rewards).sum(-1, keepdims=True)
        return replace(world, dense=rewards - mean if reward == "dense" else 0.5 * rewards)
    moves, goal = _found(rng, q, v, length) if reward == "found" else _ladder(rng, q, v, length)
    return replace(world, moves=moves, goal=goal)


def _ending(world: World, length: float) -> World:
    """Set the bias of token 0 so that responses have `length` tokens on average."""
    low, high = -15.0, 15.0
    for _ in range(14):
        middle = (low + high) / 2
        params = world.params.copy()
        params[-world.vocabulary] = middle
        longer = visits(world.at(params), np.exp(world.at(params).log_probs())).sum() > length * world.prompts
        low, high = (middle, high) if longer else (low, middle)
    return world.at(params)


def _ends(longest: int) -> Array:
    """Compute the chance to end at each length, uniform between half of the longest and the longest."""
    lengths = np.arange(max(longest // 2, 1), longest + 1)
    chance = np.zeros(longest + 1)
    chance[lengths] = 1 / len(lengths)
    longer = chance[::-1].cumsum()[::-1]
    return np.minimum(chance[1:] / longer[1:], 1.0)


def _found(rng: Generator, prompts: int, vocabulary: int, length: float) -> tuple[Array, Array]:
    """Build an environment with three states: searching, found, failed."""
    up, down = (_hazard(rng, prompts, vocabulary, times / length) for times in (2.5, 1.0))
    moves = np.zeros((prompts, 3, vocabulary, 3))
    moves[:, 0, :, 1], moves[:, 0, :, 0] = up, 1 - up
    moves[:, 1, :, 2], moves[:, 1, :, 1] = down, 1 - down
    moves[:, 2, :, 2] = 1
    return moves, np.tile([0.0, 1.0, 0.0], (prompts, 1))


def _ladder(rng: Generator, prompts: int, vocabulary: int, length: float) -> tuple[Array, Array]:
    """Build an environment of three steps up."""
    moves = np.zeros((prompts, 4, vocabulary, 4))
    for step in range(3):
        up = _hazard(rng, prompts, vocabulary, 5.0 / length)
        moves[:, step, :, step + 1], moves[:, step, :, step] = up, 1 - up
    moves[:, 3, :, 3] = 1
    return moves, np.tile([0.0, 0.0, 0.0, 1.0], (prompts, 1))


def _hazard(rng: Generator, prompts: int, vocabulary: int, rate: float) -> Array:
    """Draw the hazard of each token; a few tokens hold most of it."""
    return np.minimum(rate * rng.gamma(0.6, 1, size=(prompts, vocabulary)), 0.9)


def log_softmax(logits: Array) -> Array:
    """Compute the log-softmax over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


# ---------------------------------------------------------------- advantages


def advantages(world: World, rewards: Array) -> Array:
    """Compute advantages of samples in adjacent groups, [N] → [N]."""
    groups = rewards.reshape(-1, world.group)
    apart = groups - groups.mean(1, keepdims=True)
    if world.dense is None:
        apart = apart / (groups.std(1, ddof=1, keepdims=True) + EPSILON)
    return apart.reshape(-1)


def mean_advantages(chance: float, group: int) -> tuple[float, float]:
    """Compute E[A | this sample succeeds] and E[A | it fails], where the others succeed with that chance."""
    others = [math.comb(group - 1, k) * chance**k * (1 - chance) ** (group - 1 - k) for k in range(group)]

    def advantage(successes: int, reward: int) -> float:
        mean = successes / group
        return (reward - mean) / (math.sqrt(group * mean * (1 - mean) / (group - 1)) + EPSILON)

    succeeds = sum(weight * advantage(k + 1, 1) for k, weight in enumerate(others))
    fails = sum(weight * advantage(k, 0) for k, weight in enumerate(others))
    return succeeds, fails


# ---------------------------------------------------------------- dynamic programming


def visits(world: World, policy: Array) -> Array:
    """Compute the expected tokens sampled after each previous one, [Q, V + 1], of a [Q, V + 1, V] policy."""
    there, _ = _forward(world, policy)
    return there.sum((0, 3))


def values(world: World, policy: Array) -> tuple[Array, Array]:
    """Compute the expected reward after each token, [T, Q, M, V], and of a whole response, [Q]."""
    value = np.zeros((world.prompts, world.vocabulary + 1, world.goal.shape[1]))
    bonus = 0.0 if world.dense is None else (policy * world.dense).sum(-1)[:, :, None]
    after = np.zeros((len(world.ends), world.prompts, world.goal.shape[1], world.vocabulary))
    moves = world.moves.transpose(0, 2, 1, 3)  # [Q, V, M, M]
    for place in range(len(world.ends) - 1, -1, -1):
        goes_on = _goes_on(world, place)[:, None]
        then = goes_on * value[:, :-1] + (1 - goes_on) * world.goal[:, None]
        after[place] = (moves @ then[..., None])[..., 0].transpose(0, 2, 1)
        value = policy @ after[place].transpose(0, 2, 1) + bonus
    return after, value[:, -1, 0]


def credit(world: World, policy: Array, mean: Array | None = None) -> Array:
    """Compute Σ_t P(previous token at t) E[A | previous token, token at t], [Q, V + 1, V].

    Times the probability and the weight of a token it is the coefficient of ∇log π in the expected gradient.

    Args:
        world: its rewards count; its parameters do not.
        policy: who samples this response, [Q, V + 1, V].
        mean: mean reward of the others in its group, [Q]; None: they have the same policy.
    """
    after, start = values(world, policy)
    level, slope = _advantage_of_reward(world, start if mean is None else mean)
    there, past = _forward(world, policy)
    q, v = world.prompts, world.vocabulary
    joined = there.transpose(1, 2, 0, 3).reshape(q, v + 1, -1) @ after.transpose(1, 0, 2, 3).reshape(q, -1, v)
    seen = there.sum((0, 3))[..., None]
    reward = past.sum(0)[..., None] + joined + (0.0 if world.dense is None else seen * world.dense)
    return level[:, None, None] * seen + slope[:, None, None] * reward


def gradient(world: World, coefficients: Array | None = None) -> Array:
    """Compute Σ coefficient × ∇log π(token), mean over prompts, by parameters [P].

    Args:
        world: its parameters are those of π.
        coefficients: by prompt, previous token and token, [Q, V + 1, V]; None: the exact on-policy gradient.
    """
    policy = np.exp(world.log_probs())
    if coefficients is None:
        coefficients = policy * credit(world, policy)
    slopes = coefficients - coefficients.sum(-1, keepdims=True) * policy
    return world.pullback(slopes, np.arange(world.prompts)).sum(0) / world.prompts


def _advantage_of_reward(world: World, mean: Array) -> tuple[Array, Array]:
    """Fit E[A | reward of this response] = level + slope × reward, by prompt, [Q] each."""
    if world.dense is None:
        both = np.array([mean_advantages(float(np.clip(p, 0, 1)), world.group) for p in mean])
        return both[:, 1], both[:, 0] - both[:, 1]
    slope = np.full(len(mean), 1 - 1 / world.group)
    return -slope * mean, slope


def _forward(world: World, policy: Array) -> tuple[Array, Array]:
    """Compute P(previous token, state) [T, Q, V + 1, M], and E[reward so far; previous token] likewise."""
    q, v, m = world.prompts, world.vocabulary, world.goal.shape[1]
    there, past = np.zeros((len(world.ends), q, v + 1, m)), np.zeros((len(world.ends), q, v + 1))
    there[0, :, v, 0] = 1
    moves = world.moves.transpose(0, 2, 1, 3)
    across = policy.transpose(0, 2, 1)
    earned = None if world.dense is None else (policy * world.dense).transpose(0, 2, 1)
    for place in range(len(world.ends) - 1):
        goes_on = _goes_on(world, place)
        arrived = ((across @ there[place])[:, :, None, :] @ moves)[:, :, 0]
        there[place + 1, :, :v] = goes_on[:, None] * arrived
        if earned is not None:
            gained = across @ past[place][..., None] + earned @ there[place]
            past[place + 1, :, :v] = goes_on * gained[..., 0]
    return there, past


def _goes_on(world: World, place: int) -> Array:
    """Compute the probability that the response goes on after each token at a place, [V]."""
    goes_on = np.full(world.vocabulary, 1 - world.ends[place])
    if world.hidden:
        goes_on[0] = 0
    return goes_on
