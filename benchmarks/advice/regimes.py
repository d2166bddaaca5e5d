"""The regimes: a world and how its rollout differs; the final ones took no part in choosing the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from benchmarks.advice import mismatch, worlds
from benchmarks.advice.mismatch import Made, Make
from benchmarks.advice.worlds import Family, Generator, Reward, World

Split = Literal["development", "final"]


@dataclass(frozen=True)
class Place:
    """A world: its family, tokens of the longest response, reward, and sizes.

    Attributes:
        sequences: of a dump.
        judged: sequences by which what is not exact is judged.
    """

    family: Family
    longest: int
    reward: Reward
    vocabulary: int
    prompts: int
    hidden: int
    sequences: int
    judged: int


@dataclass(frozen=True)
class Kind:
    """A way in which a rollout differs.

    Attributes:
        kind, name: in words.
        make: one of `mismatch`, with its options.
        size: the magnitude, or a first guess of it.
        k3: by which the magnitude is found; None: it is `size`.
    """

    kind: str
    name: str
    make: Make
    size: float
    k3: float | None

    def made(self, world: World, rng: Generator) -> Made:
        """Build the world with the policy in training, and its sampling policies."""
        if self.k3 is None:
            return self.make(world, rng, self.size)
        power = 1.5 if self.kind == "heavy tails" else 2.0
        return mismatch.scaled(self.make, world, rng, self.size, self.k3, power)


def row(
    k3: float | None, kind: str, name: str, make: Callable[..., Made], size: float = 0.1, **options: Any
) -> Kind:
    """Build a kind with a given k3, or with a given magnitude."""
    return Kind(kind, name if k3 is None else f"{name}, k3 {k3:g}", partial(make, **options), size, k3)


RATE = 0.01
"""First guess of the learning rate."""
DEVELOPMENT = (
    Place("table", 8, "found", 12, 4, 0, 4096, 8192),
    Place("table", 64, "dense", 8, 4, 0, 2048, 8192),
    Place("table", 256, "found", 8, 4, 0, 2048, 4096),
    Place("table", 1000, "dense", 10, 4, 0, 1024, 2048),
    Place("network", 8, "dense", 32, 16, 16, 4096, 8192),
    Place("network", 24, "found", 200, 8, 16, 2048, 2048),
    Place("network", 64, "dense", 64, 8, 24, 2048, 4096),
    Place("network", 128, "found", 40, 8, 16, 2048, 4096),
    Place("network", 320, "dense", 24, 4, 12, 1024, 4096),
    Place("network", 1000, "found", 16, 4, 16, 1024, 2048),
)
DEVELOPMENT_KINDS = (
    row(0.0005, "numerics", "noise", mismatch.per_token),
    row(0.003, "numerics", "noise", mismatch.per_token),
    row(0.015, "numerics", "noise", mismatch.per_token),
    row(0.003, "heavy tails", "t noise of 2", mismatch.per_token, freedom=2.0),
    row(0.015, "heavy tails", "t noise of 1.5", mismatch.per_token, freedom=1.5),
    row(0.001, "per context", "fixed noise", mismatch.per_context),
    row(0.008, "per context", "fixed noise", mismatch.per_context),
    row(None, "rounded", "fp8", mismatch.rounded, bits=3),
    row(None, "quantised", "int4", mismatch.quantised, bits=4),
    row(None, "quantised", "int5", mismatch.quantised, bits=5),
    row(None, "quantised", "int8", mismatch.quantised, bits=8),
    row(0.003, "experts", "2% of tokens far off", mismatch.experts, 0.5, rate=0.02),
    row(0.015, "experts", "5% of tokens far off", mismatch.experts, 0.5, rate=0.05),
    row(0.001, "stale", "1 step", mismatch.stale, RATE, steps=1),
    row(0.004, "stale", "2 steps", mismatch.stale, RATE, steps=2),
    row(0.012, "stale", "4 steps", mismatch.stale, RATE, steps=4),
    row(0.04, "stale", "8 steps", mismatch.stale, RATE, steps=8),
    row(0.003, "stale", "1 sampled step", mismatch.stale, RATE, steps=1, sampled=True),
    row(0.015, "stale", "4 sampled steps", mismatch.stale, RATE, steps=4, sampled=True),
    row(0.006, "stale and numerics", "2 steps and noise", mismatch.stale, RATE, steps=2, noise=0.05),
    row(0.1, "stale and numerics", "8 steps and noise", mismatch.stale, RATE, steps=8, noise=0.1),
    row(0.01, "replay", "0, 2, 4 steps", mismatch.replay, RATE, steps=(0, 2, 4)),
    row(0.05, "replay", "1, 4, 8 steps", mismatch.replay, RATE, steps=(1, 4, 8)),
    row(0.01, "stale hosts", "25% 4 steps", mismatch.hosts, RATE, share=0.25, steps=4),
    row(0.02, "stale hosts", "50% 2 steps", mismatch.hosts, RATE, share=0.5, steps=2),
    row(None, "corrupted", "0.2% of tokens by 4 nats", mismatch.corrupted, 0.03, rate=0.002, nats=4.0),
    row(None, "corrupted", "1% of tokens by 3 nats", mismatch.corrupted, 0.03, rate=0.01, nats=3.0),
    row(0.006, "temperature", "higher", mismatch.temperature, raw=False),
    row(None, "temperature", "1.1, logged at 1", mismatch.temperature, raw=True),
    row(None, "top-p", "0.95", mismatch.top_p, p=0.95, raw=False),
    row(None, "top-p", "0.98, logged in full", mismatch.top_p, p=0.98, raw=True),
)
FINAL = (
    Place("table", 12, "ladder", 10, 4, 0, 4096, 8192),
    Place("table", 96, "drifting", 14, 3, 0, 2048, 4096),
    Place("table", 384, "ladder", 7, 4, 0, 1024, 4096),
    Place("network", 12, "drifting", 24, 12, 12, 4096, 8192),
    Place("network", 20, "ladder", 160, 6, 12, 2048, 2048),
    Place("network", 48, "drifting", 80, 8, 32, 2048, 4096),
    Place("network", 200, "ladder", 32, 6, 24, 1536, 4096),
    Place("network", 420, "drifting", 20, 5, 10, 1024, 4096),
    Place("network", 800, "ladder", 13, 6, 8, 1024, 2048),
)
FINAL_KINDS = (
    row(0.001, "numerics", "noise", mismatch.per_token),
    row(0.006, "numerics", "noise", mismatch.per_token),
    row(0.006, "heavy tails", "t noise of 1.8", mismatch.per_token, freedom=1.8),
    row(0.0004, "per context", "fixed noise", mismatch.per_context),
    row(0.004, "per context", "fixed noise", mismatch.per_context),
    row(0.02, "per context", "fixed noise", mismatch.per_context),
    row(None, "rounded", "4 bits of mantissa", mismatch.rounded, bits=4),
    row(None, "quantised", "int3", mismatch.quantised, bits=3),
    row(None, "quantised", "int6", mismatch.quantised, bits=6),
    row(0.008, "experts", "3% of tokens far off", mismatch.experts, 0.5, rate=0.03),
    row(0.002, "stale", "1 step", mismatch.stale, RATE, steps=1),
    row(0.008, "stale", "2 steps", mismatch.stale, RATE, steps=2),
    row(0.02, "stale", "6 steps", mismatch.stale, RATE, steps=6),
    row(0.08, "stale", "8 steps", mismatch.stale, RATE, steps=8),
    row(0.005, "stale", "2 sampled steps", mismatch.stale, RATE, steps=2, sampled=True),
    row(0.01, "stale and numerics", "3 steps and noise", mismatch.stale, RATE, steps=3, noise=0.07),
    row(0.007, "replay", "0, 1, 3 steps", mismatch.replay, RATE, steps=(0, 1, 3)),
    row(0.03, "replay", "2, 6 steps", mismatch.replay, RATE, steps=(2, 6)),
    row(0.004, "stale hosts", "10% 4 steps", mismatch.hosts, RATE, share=0.1, steps=4),
    row(0.015, "stale hosts", "35% 3 steps", mismatch.hosts, RATE, share=0.35, steps=3),
    row(None, "corrupted", "0.4% of tokens by 3.5 nats", mismatch.corrupted, 0.03, rate=0.004, nats=3.5),
    row(0.003, "temperature", "higher", mismatch.temperature, raw=False),
    row(None, "top-p", "0.9", mismatch.top_p, p=0.9, raw=False),
)
SPLITS: dict[Split, tuple[tuple[Place, ...], tuple[Kind, ...], int]] = {
    "development": (DEVELOPMENT, DEVELOPMENT_KINDS, 0),
    "final": (FINAL, FINAL_KINDS, 1_000_000),
}
"""Worlds, kinds and the first seed of each split."""


@dataclass(frozen=True)
class Regime:
    """One row of the benchmark: a world, and how its rollout differs."""

    split: Split
    place: Place
    kind: Kind
    seed: int

    @property
    def name(self) -> str:
        """Name that is unique in its split."""
        where = f"{self.place.family} {self.place.longest} {self.place.reward}"
        return f"{where}, {self.kind.kind}: {self.kind.name}"

    def made(self) -> Made:
        """Build the world with the policy in training, and its sampling policies."""
        p = self.place
        world = worlds.make(p.family, p.longest, p.reward, self.seed, p.vocabulary, p.prompts, p.hidden)
        return self.kind.made(world, np.random.default_rng(self.seed + 1))


def regimes(split: Split) -> list[Regime]:
    """List regimes: each world with 3 in 5 of the kinds, and with 1 in 5 of those sampled otherwise."""
    places, kinds, first = SPLITS[split]
    return [
        Regime(split, place, kind, first + 1000 * (100 * i + j))
        for i, place in enumerate(places)
        for j, kind in enumerate(kinds)
        if (2 * i + j) % 5 < (1 if kind.kind in ("temperature", "top-p") else 3)
    ]
