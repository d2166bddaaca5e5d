"""Sample from a world and measure the alignment of each correction's gradient with the true one.

The alignment of a correction at B sequences per update is E[ĝ·g] / (|g| √E|ĝ|²), which no rescaling changes:
g is the exact on-policy gradient, ĝ the corrected gradient of one batch. E ĝ is exact for weights of single
tokens; for weights of sequences it is that of token TIS at 2 plus the mean difference over the same samples.
The variance of ĝ is always sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.advice.worlds import (
    Array,
    Generator,
    Ints,
    World,
    advantages,
    credit,
    gradient,
    values,
    visits,
)
from offpol_diag import DumpWriter

BATCHES = (64, 256, 1024)
"""Sequences in one update of the trainer."""
SURE = 3.0
"""Standard errors below its estimate by which a sampled method counts as the best."""
NEAREST = "token_tis_2.0"
"""Method whose samples those of methods for sequences are compared with."""
CHUNK = 4_000_000
"""Coefficients held at once while gradients of groups are computed."""


# ---------------------------------------------------------------- weights, in formulas of their own


def _tis(high: float) -> Callable[[Array], Array]:
    return lambda r: np.minimum(r, high)


def _icepop(low: float, high: float) -> Callable[[Array], Array]:
    return lambda r: r * _within(r, low, high)


def _within(r: Array, low: float, high: float) -> Array:
    return ((r >= low) & (r <= high)).astype(float)


TOKEN: dict[str, Callable[[Array], Array]] = {
    "none": np.ones_like,
    **{f"token_tis_{high}": _tis(high) for high in (1.5, 2.0, 3.0, 5.0)},
    "token_icepop_0.5_2.0": _icepop(0.5, 2.0),
    "token_icepop_0.5_5.0": _icepop(0.5, 5.0),
    "token_mask_0.5_2.0": lambda r: _within(r, 0.5, 2.0),
}
"""Weight of a token by its ratio r = π_train / π_rollout."""
SEQUENCE: dict[str, Callable[[Array, Array, Array], Array]] = {
    "seq_tis_2.0": lambda product, mean, least: np.minimum(product, 2),
    "seq_mis_0.5_2.0": lambda product, mean, least: _icepop(0.5, 2.0)(product),
    "geo_rs_0.1%": lambda product, mean, least: _within(mean, 1 / 1.001, 1.001),
    "geo_rs_1%": lambda product, mean, least: _within(mean, 0.99, 1.01),
    "geo_rs_1%_token_tis_2.0": lambda product, mean, least: _within(mean, 0.99, 1.01),
    "veto_token_tis_2.0": lambda product, mean, least: _within(least, 1e-4, math.inf),
}
"""Weight of a sequence by the product, the geometric mean and the least of its ratios."""
WITH_TIS = ("geo_rs_1%_token_tis_2.0", "veto_token_tis_2.0")
"""Sequence methods that weight tokens by token TIS at 2 as well."""
METHODS = (*TOKEN, *SEQUENCE)


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class Part:
    """A share of the sequences sampled in one way; at every token one of K policies is drawn.

    Attributes:
        share: of the sequences.
        chance: of each of the K policies, [K].
        sampled: log-probs by which tokens are sampled, [K, Q, V + 1, V].
        logged: log-probs that are logged, [K, Q, V + 1, V].
    """

    share: float
    chance: Array
    sampled: Array
    logged: Array

    def mean(self) -> Array:
        """Probabilities by which tokens are sampled, [Q, V + 1, V]."""
        return np.tensordot(self.chance, np.exp(self.sampled), 1)

    def log_ratios(self, world: World) -> Array:
        """Return a trainer's log-ratios, log π_train / π_rollout of the logged values, [K, Q, V + 1, V]."""
        return np.clip(world.log_probs() - self.logged, -20, 20)


@dataclass(frozen=True)
class Rollout:
    """The sampling policies of all sequences.

    Attributes:
        parts: by host, or by version of the weights.
        hosts: whether each part is a host of its own that a dump names.
        by_group: whether all samples of a prompt come from one part.
    """

    parts: tuple[Part, ...]
    hosts: bool = False
    by_group: bool = False


def facts(world: World, rollout: Rollout) -> tuple[float, float]:
    """Return the exact k3 of the logged values, and the mean number of tokens of a response."""
    tokens = total = 0.0
    for part in rollout.parts:
        log_r = part.log_ratios(world)
        k3 = np.tensordot(part.chance, np.exp(part.sampled) * (np.expm1(log_r) - log_r), 1).sum(-1)
        seen = visits(world, part.mean())
        tokens += part.share * float(seen.sum())
        total += part.share * float((seen * k3).sum())
    return total / tokens, tokens / world.prompts


@dataclass(frozen=True)
class Samples:
    """N sequences of whole groups, with n tokens in all, one sequence after the other.

    Attributes:
        prompt, length, part: [N].
        reward, advantage: [N].
        previous, token: [n].
        rollout, train: log-probs as logged, and under the policy in training, [n].
    """

    prompt: Ints
    length: Ints
    part: Ints
    reward: Array
    advantage: Array
    previous: Ints
    token: Ints
    rollout: Array
    train: Array

    @property
    def row(self) -> Ints:
        """The sequence of each token, [n]."""
        return np.repeat(np.arange(len(self.length)), self.length)

    def weights(self) -> dict[str, Array]:
        """Return the weights of every method, [n] each."""
        delta = np.clip(self.train - self.rollout, -20, 20)
        r, total = np.exp(delta), np.bincount(self.row, delta, len(self.length))
        least = np.exp(np.minimum.reduceat(delta, np.cumsum(self.length) - self.length))
        of_sequence = (np.exp(np.clip(total, -20, 20)), np.exp(total / self.length), least)
        found = {name: of(r) for name, of in TOKEN.items()}
        for name, of in SEQUENCE.items():
            found[name] = of(*of_sequence)[self.row] * (found[NEAREST] if name in WITH_TIS else 1.0)
        return found


def sample(world: World, rollout: Rollout, sequences: int, rng: Generator) -> Samples:
    """Sample sequences of whole groups, with prompts drawn at random."""
    v, size, parts = world.vocabulary, world.group, rollout.parts
    prompt = np.repeat(rng.integers(0, world.prompts, sequences // size), size)
    part = rng.choice(len(parts), len(prompt), p=[one.share for one in parts])
    if rollout.by_group:
        part = np.repeat(part[::size], size)
    which = np.stack([one.chance for one in parts]).cumsum(-1)
    upto = np.exp(np.stack([one.sampled for one in parts])).cumsum(-1).reshape(-1, v)
    which[:, -1] = upto[:, -1] = 1
    logged = np.stack([one.logged for one in parts]).ravel()
    train, moves = world.log_probs().ravel(), world.moves.cumsum(-1)

    def draw(chances: Array) -> Ints:
        return (rng.random(len(chances))[:, None] >= chances).sum(1)

    previous, state = np.full(len(prompt), v), np.zeros(len(prompt), np.int64)
    reward, going = np.zeros(len(prompt)), np.arange(len(prompt))
    steps: list[tuple[npt.NDArray[Any], ...]] = []
    for end in world.ends:
        q, before = prompt[going], previous[going]
        table = part[going] * which.shape[1] + draw(which[part[going]])
        context = q * (v + 1) + before
        at = table * world.prompts * (v + 1) + context
        token = draw(upto[at])
        steps.append((going, before, token, logged[at * v + token], train[context * v + token]))
        if world.dense is not None:
            reward[going] += world.dense[q, before, token]
        else:
            state[going] = draw(moves[q, state[going], token])
        previous[going] = token
        stops = (rng.random(len(going)) < end) | ((token == 0) & (world.hidden > 0))
        going = going[~stops]
    if world.dense is None:
        reward = world.goal[prompt, state]
    row, *tokens = (np.concatenate(column) for column in zip(*steps, strict=True))
    order = np.argsort(row, kind="stable")
    length = np.bincount(row, minlength=len(prompt))
    return Samples(prompt, length, part, reward, advantages(world, reward), *(one[order] for one in tokens))


def write(path: Path, rollout: Rollout, drawn: Samples, group: int) -> None:
    """Write a dump as a trainer writes it, with `samples` of each prompt."""
    cuts = np.cumsum(drawn.length)[:-1]
    hosts = {"host": [f"host-{part}" for part in drawn.part]} if rollout.hosts else {}
    groups = np.arange(len(drawn.length)) // group
    with DumpWriter(path) as writer:
        writer.write(
            rollout_log_probs=np.split(drawn.rollout, cuts),
            old_log_probs=np.split(drawn.train, cuts),
            token_ids=np.split(drawn.token, cuts),
            advantages=list(drawn.advantage),
            rewards=list(drawn.reward),
            group_id=[f"prompt-{group}" for group in groups],
            **hosts,
        )


# ---------------------------------------------------------------- gradients


def expected(world: World, rollout: Rollout) -> dict[str, Array]:
    """Compute the exact expected gradient of methods that weight single tokens, by parameters [P]."""
    means = [part.mean() for part in rollout.parts]
    shares = [part.share for part in rollout.parts]
    starts = [values(world, mean)[1] for mean in means]
    others = None if rollout.by_group else np.average(starts, axis=0, weights=shares)
    sums = {name: np.zeros_like(means[0]) for name in TOKEN}
    for part, mean in zip(rollout.parts, means, strict=True):
        reached, r, chance = credit(world, mean, others), np.exp(part.log_ratios(world)), np.exp(part.sampled)
        for name, of in TOKEN.items():
            sums[name] += part.share * reached * np.tensordot(part.chance, chance * of(r), 1)
    return {name: gradient(world, coefficients) for name, coefficients in sums.items()}


def group_gradients(world: World, drawn: Samples, weights: Array) -> Array:
    """Compute each group's gradient per sequence, with weights of tokens [n], by parameters [groups, P]."""
    v, prompt = world.vocabulary, drawn.prompt[:: world.group]
    code = ((drawn.row // world.group) * (v + 1) + drawn.previous) * v + drawn.token
    scores = weights * drawn.advantage[drawn.row] / world.group
    sums = np.bincount(code, scores, len(prompt) * (v + 1) * v).reshape(-1, v + 1, v)
    return world.pullback(sums - sums.sum(-1, keepdims=True) * np.exp(world.log_probs())[prompt], prompt)


def sampled_gradient(world: World, rollout: Rollout, sequences: int, rng: Generator) -> Array:
    """Compute the uncorrected gradient of one batch, [P]."""
    drawn = sample(world, rollout, sequences, rng)
    return group_gradients(world, drawn, np.ones(len(drawn.token))).mean(0)


@dataclass(frozen=True)
class Moments:
    """First and second moments of one method's gradient.

    Attributes:
        along: E ĝ · g / |g|, and its standard error; 0 where it is exact.
        square: |E ĝ|².
        noise: variance of one group's gradient, summed over parameters.
    """

    along: float
    error: float
    square: float
    noise: float

    def alignment(self, groups: float, errors: float = 0.0) -> float:
        """Return the alignment in a batch of `groups`; with `errors`, less that many standard errors."""
        along = self.along - errors * self.error
        whole = max(self.square, along**2) + self.noise / groups
        return along / math.sqrt(whole) if whole > 0 else 0.0


def judge(world: World, rollout: Rollout, sequences: int, rng: Generator) -> dict[str, Moments]:
    """Measure every method, with at least `sequences` samples for those that are not exact."""
    true = gradient(world)
    direction = true / np.linalg.norm(true)
    exact = expected(world, rollout)
    each = world.group * max(1, CHUNK // ((world.vocabulary + 1) * world.vocabulary + len(true)))
    sums = {name: np.zeros((2, len(true))) for name in METHODS}
    squares = {name: np.zeros(2) for name in METHODS}
    along: dict[str, list[Array]] = {name: [] for name in METHODS}
    groups = 0
    while groups * world.group < sequences:
        drawn = sample(world, rollout, min(each, sequences), rng)
        groups += len(drawn.prompt) // world.group
        weights = drawn.weights()
        nearest = group_gradients(world, drawn, weights[NEAREST])
        for name, weight in weights.items():
            mine = group_gradients(world, drawn, weight)
            for at, one in enumerate((mine, mine - nearest)):
                sums[name][at] += one.sum(0)
                squares[name][at] += np.vdot(one, one)
            along[name].append((mine - nearest) @ direction)
    found = {}
    for name in METHODS:
        mean = sums[name] / groups
        noise, apart = (squares[name] - groups * np.square(mean).sum(1)) / (groups - 1)
        center, error, surplus = exact.get(name), 0.0, 0.0
        if center is None:
            center, surplus = exact[NEAREST] + mean[1], apart / groups
            error = float(np.concatenate(along[name]).std(ddof=1)) / math.sqrt(groups)
        ahead = float(center @ direction)
        found[name] = Moments(ahead, error, max(float(center @ center) - surplus, ahead**2), float(noise))
    return found


def table(
    world: World, found: Mapping[str, Moments]
) -> tuple[dict[str, dict[str, float]], dict[str, list[Any]]]:
    """Return alignments by batch and method, and by batch the best method in hindsight with its alignment."""
    alignments, best = {}, {}
    for batch in BATCHES:
        groups = batch / world.group
        alignments[str(batch)] = {name: found[name].alignment(groups) for name in METHODS}
        sure = {name: found[name].alignment(groups, SURE) for name in METHODS}
        name = max(sure, key=sure.__getitem__)
        best[str(batch)] = [name, sure[name]]
    return alignments, best
