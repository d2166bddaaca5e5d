"""Policies whose tokens can be drawn by the million and whose true numbers are known.

A token's Δ is Gaussian, given what its prompt, its response and it itself are: a prompt and a response have
effects on the size of the mismatch, on the response's length and (where the logging is at fault) on the mean
of Δ; rare tokens are far wider. Honest Δ has the mean −s²/2 at spread s, so that E[r] = 1 at every token, as
it must be where tokens were drawn from the logged policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offpol_diag.dump.batch import Batch

Array = npt.NDArray[np.float64]

LONGEST = 2000
WIDEST = 3.0
"""Largest spread as a multiple of the median: unbounded, E[r²] would not exist."""


@dataclass(frozen=True)
class World:
    """A policy pair and how prompts, responses and tokens differ under it.

    Attributes:
        name: of its rows.
        text: what it is, in words.
        spread: median of the spread of Δ over responses.
        by_group: standard deviation of log spread between prompts; `by_sequence` within a prompt.
        wide: share of tokens that are far wider, and `width` their spread.
        lost: share of responses, drawn prompt by prompt, all of whose tokens are as wide.
        shift, shift_group, shift_sequence: mean of Δ beyond the honest one, and its effects; 0 is honest.
        length: median length; `length_group` and `length_sequence` are the effects on its logarithm.
        longer: how much log spread rises with log length.
        per_group: responses to a prompt.
    """

    name: str
    text: str
    spread: float
    by_group: float = 0.4
    by_sequence: float = 0.2
    wide: float = 0.0
    width: float = 1.0
    lost: float = 0.0
    shift: float = 0.0
    shift_group: float = 0.0
    shift_sequence: float = 0.0
    length: float = 24.0
    length_group: float = 0.4
    length_sequence: float = 0.4
    longer: float = 0.0
    per_group: int = 8


@dataclass(frozen=True)
class Sequences:
    """Attributes of drawn responses, [S] each: prompt, length, mean beyond the honest one, spread."""

    group: npt.NDArray[np.int64]
    n: npt.NDArray[np.int64]
    shift: Array
    spread: Array
    lost: npt.NDArray[np.bool_]


def sequences(world: World, groups: int, rng: np.random.Generator) -> Sequences:
    """Draw the responses to some prompts."""
    group = np.repeat(np.arange(groups), world.per_group)
    effects = rng.standard_normal((3, groups))[:, group]
    own = rng.standard_normal((3, len(group)))
    log_n = world.length_group * effects[0] + world.length_sequence * own[0]
    n = np.clip(np.rint(world.length * np.exp(log_n)), 1, LONGEST).astype(np.int64)
    log_spread = world.by_group * effects[1] + world.by_sequence * own[1] + world.longer * log_n
    spread = world.spread * np.exp(np.minimum(log_spread, math.log(WIDEST)))
    shift = world.shift + world.shift_group * effects[2] + world.shift_sequence * own[2]
    lost = (rng.random(groups) < world.lost)[group]
    return Sequences(group, n, shift, spread, lost)


def batch(world: World, groups: int, rng: np.random.Generator) -> Batch:
    """Build a batch as the readers would return it."""
    given = sequences(world, groups, rng)
    which = np.repeat(np.arange(len(given.n)), given.n)
    wide = (rng.random(len(which)) < world.wide) | given.lost[which]
    s = np.where(wide, world.width, given.spread[which])
    delta = given.shift[which] - s**2 / 2 + s * rng.standard_normal(len(which))
    rollout = np.log(rng.random(len(which))) / 3
    keys = rng.integers(-(2**63), 2**63, groups)
    starts = np.concatenate(([0], np.cumsum(given.n)))
    return Batch(
        rollout=rollout,
        old=rollout + delta,
        cu_seqlens=starts,
        cu_runs=starts,
        position=np.arange(len(which)) - starts[which],
        key=keys[given.group],
        masked=np.zeros(len(given.n), np.int64),
    )


MEAN_PROBABILITY = 0.75
"""Mean of a rollout probability U^(1/3)."""

HONEST = (
    World(
        "light", "precision noise: spread 0.02, one token in 1,000 of spread 0.5", 0.02, wide=1e-3, width=0.5
    ),
    World(
        "heavy",
        "quantised: spread 0.25 that doubles between prompts, 1% of spread 0.8",
        0.25,
        0.5,
        0.3,
        wide=0.01,
        width=0.8,
    ),
    World(
        "lengths",
        "longer responses are worse, and prompts differ in length",
        0.1,
        longer=0.3,
        length_group=0.6,
    ),
    World("rare", "one token in 20,000 is wrong", 0.02, wide=5e-5, width=1.5),
    World("rare prompts", "one prompt in 200 is wrong throughout", 0.02, lost=5e-3, width=1.0),
)
SHIFTED = (
    World(
        "shifted",
        "faulty logging: means of Δ differ by prompt and by response",
        0.1,
        shift=-0.01,
        shift_group=0.05,
        shift_sequence=0.03,
    ),
)
WORLDS = (*HONEST, *SHIFTED)
RARE = ("rare", "rare prompts")
"""Worlds whose rare events a dump may lack."""
