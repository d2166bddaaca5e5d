"""Ways in which the sampling policy, and its logged log-probs, differ from the policy in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.advice.judge import Part, Rollout, facts, sampled_gradient
from benchmarks.advice.worlds import Array, Generator, World, gradient, log_softmax

DRAWS = 8
"""Perturbed policies of which one is drawn at every token where the numerics differ from token to token."""


Made = tuple[World, Rollout]
"""The world with the policy in training, and its sampling policies."""
Make = Callable[[World, Generator, float], Made]
"""Function that makes them from a world and a magnitude."""


def scaled(make: Make, world: World, rng: Generator, size: float, k3: float, power: float) -> Made:
    """Find the magnitude, near `size`, at which k3 is as given; k3 grows with that power of the magnitude."""
    seed = int(rng.integers(2**31))
    for _ in range(3):
        found = make(world, np.random.default_rng(seed), size)
        now = facts(*found)[0]
        if abs(math.log(now / k3)) < 0.25:
            break
        size *= (k3 / now) ** (1 / power)
    return found


# ---------------------------------------------------------------- the same weights, other numerics


def per_token(world: World, rng: Generator, size: float, freedom: float | None = None) -> Made:
    """Add independent noise at every token: normal logits, or Student's t."""
    return world, Rollout((_noisy(world, rng, size, freedom),))


def experts(world: World, rng: Generator, size: float, rate: float) -> Made:
    """Leave most tokens exact and put few far off, as where another expert was chosen."""
    far = _noisy(world, rng, size)
    tables = np.concatenate([world.log_probs()[None], far.sampled])
    chance = np.array([1 - rate, *(rate * far.chance)])
    return world, Rollout((Part(1.0, chance, tables, tables),))


def per_context(world: World, rng: Generator, size: float) -> Made:
    """Add the same error whenever the context is the same."""
    return world, _one(world.logits() + size * rng.normal(size=world.logits().shape))


def rounded(world: World, rng: Generator, size: float, bits: int) -> Made:
    """Round logits, and hidden activations too, to `bits` of mantissa."""
    if not world.hidden:
        return world, _one(_mantissa(world.logits(), bits))
    *_, output, bias = world.layers()
    return world, _one(_mantissa(_mantissa(world.activations(), bits) @ output + bias, bits))


def quantised(world: World, rng: Generator, size: float, bits: int) -> Made:
    """Round parameters to integers of `bits`, with one scale for each row of a layer."""
    top = 2 ** (bits - 1) - 1
    layers = world.layers()
    scales = [np.abs(layer).max(-1, keepdims=True) / top for layer in layers]
    found = [np.round(layer / scale) * scale for layer, scale in zip(layers, scales, strict=True)]
    return world, _one(world.at(np.concatenate([layer.ravel() for layer in found])).logits())


# ---------------------------------------------------------------- other weights


def stale(
    world: World, rng: Generator, size: float, steps: int, sampled: bool = False, noise: float = 0.0
) -> Made:
    """Sample from the weights some updates ago; the magnitude is the learning rate."""
    now = world.at(adam(world, steps, size, rng if sampled else None)[-1])
    return now, Rollout((_noisy(world, rng, noise) if noise else _exact(world),))


def replay(world: World, rng: Generator, size: float, steps: Sequence[int]) -> Made:
    """Sample groups at different numbers of updates ago."""
    path = adam(world, max(steps), size, rng)
    parts = tuple(replace(_exact(world.at(path[-1 - ago])), share=1 / len(steps)) for ago in steps)
    return world.at(path[-1]), Rollout(parts, by_group=True)


def hosts(world: World, rng: Generator, size: float, share: float, steps: int, noise: float = 0.03) -> Made:
    """Let a share of the sequences come from hosts that missed the last updates; all have own noise."""
    now = world.at(adam(world, steps, size, rng)[-1])
    parts = [(now, 1 - share), (world, share)]
    return now, Rollout(tuple(replace(_noisy(at, rng, noise), share=s) for at, s in parts), hosts=True)


def adam(world: World, steps: int, rate: float, rng: Generator | None = None) -> list[Array]:
    """Return the parameters after 0, 1, ... steps of Adam by the exact gradient or (`rng`) of 256 samples."""
    path, first, second = [world.params], np.zeros_like(world.params), np.zeros_like(world.params)
    for step in range(1, steps + 1):
        at = world.at(path[-1])
        slope = gradient(at) if rng is None else sampled_gradient(at, Rollout((_exact(at),)), 256, rng)
        first, second = 0.9 * first + 0.1 * slope, 0.95 * second + 0.05 * slope**2
        rms = np.sqrt(second / (1 - 0.95**step))
        path.append(path[-1] + rate * first / (1 - 0.9**step) / (rms + 1e-8))
    return path


# ---------------------------------------------------------------- sampled or logged in another way


def temperature(world: World, rng: Generator, size: float, raw: bool) -> Made:
    """Sample at temperature 1 + magnitude; with `raw`, log the log-probs at temperature 1."""
    return world, Rollout((_apart(world, rng, log_softmax(world.logits() / (1 + size)), raw),))


def top_p(world: World, rng: Generator, size: float, p: float, raw: bool) -> Made:
    """Sample from the likeliest tokens that hold p; with `raw`, log the log-probs over all tokens."""
    probs = np.exp(world.log_probs())
    order = np.argsort(-probs, -1)
    before = np.take_along_axis(probs, order, -1).cumsum(-1) - np.take_along_axis(probs, order, -1)
    kept = np.take_along_axis(before < p, np.argsort(order, -1), -1)
    with np.errstate(divide="ignore"):
        nucleus = np.log(np.where(kept, probs, 0.0) / (probs * kept).sum(-1, keepdims=True))
    return world, Rollout((_apart(world, rng, nucleus, raw),))


def corrupted(world: World, rng: Generator, size: float, rate: float, nats: float) -> Made:
    """Log few tokens wrongly, by up to so many nats either way; the others have noise."""
    near = _noisy(world, rng, size)
    wrong = near.logged + nats * rng.uniform(-1, 1, size=near.logged.shape)
    logged = np.concatenate([near.logged, np.minimum(wrong, -1e-4)])
    chance = np.concatenate([(1 - rate) * near.chance, rate * near.chance])
    return world, Rollout((Part(1.0, chance, np.concatenate([near.sampled] * 2), logged),))


# ---------------------------------------------------------------- parts


def _exact(world: World) -> Part:
    tables = world.log_probs()[None]
    return Part(1.0, np.ones(1), tables, tables)


def _one(logits: Array) -> Rollout:
    tables = log_softmax(logits)[None]
    return Rollout((Part(1.0, np.ones(1), tables, tables),))


def _noisy(world: World, rng: Generator, size: float, freedom: float | None = None) -> Part:
    """Add noise to logits that is 0 on average over the K policies."""
    shape = (DRAWS, *world.logits().shape)
    noise = rng.normal(size=shape) if freedom is None else np.clip(rng.standard_t(freedom, shape), -50, 50)
    tables = log_softmax(world.logits() + size * (noise - noise.mean(0)))
    return Part(1.0, np.full(DRAWS, 1 / DRAWS), tables, tables)


def _apart(world: World, rng: Generator, sampled: Array, raw: bool) -> Part:
    """Sample from another policy; log it with noise or, with `raw`, the one in training."""
    noise = _noisy(world, rng, 0.02).logged - world.log_probs()
    logged = np.minimum((world.log_probs() if raw else np.maximum(sampled, -60)) + noise, -1e-6)
    return Part(1.0, np.full(DRAWS, 1 / DRAWS), np.broadcast_to(sampled, logged.shape), logged)


def _mantissa(values: Array, bits: int) -> Array:
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
