"""Drift: how many steps the engine is behind the trainer, measured by token ids whose log-probs move.

Training moves the log-prob of a token id from step to step. An engine with the trainer's weights moves with
it; one with older weights shows in Δ what the trainer has moved since. Rounding, quantised weights, other
kernels and harder text move both columns alike, or neither.

Only products of tokens of different prompts are used, in which the noise of each cancels. Tokens are weighted
by √r, midway between the two policies, so that noise of any size has no mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.rows import CAP, Flags, Floats, Ints, Rows, clusters

MOST_KINDS, FEWEST_OF_KIND = 256, 30
"""Most token ids that are followed, the most frequent ones; and fewest uncertain tokens of each."""
FEWEST_KINDS, FEWEST_PROMPTS, FEWEST_STEPS = 8, 16, 4
"""Fewest token ids, prompts and steps for a measurement."""
SEEN = 2.5
"""Standard errors by which the trainer's own movement must lie above 0 to be compared with."""
LOWEST = -12.0
"""Bound on log π_train of a single token in means, nats."""


FEWEST_SEQUENCES, FEWEST_OF_STEP, FEWEST_TOKENS = 16, 4, 200
"""Least size of a step: sequences, prompts, uncertain tokens."""


class Part(NamedTuple):
    """A ratio with its standard error over prompts."""

    value: float
    error: float

    @property
    def low(self) -> float:
        """Lower end of three standard errors."""
        return self.value - 3 * self.error

    @property
    def high(self) -> float:
        """Upper end of three standard errors."""
        return self.value + 3 * self.error


@dataclass(frozen=True)
class Drift:
    """The engine's drift, compared with the trainer's.

    Attributes:
        carried: the engine's movement per version that it is said to have, in the trainer's: 1 if its weights
            are those of that version up to a constant, 0 if they stand still.
        seen: the trainer's movement in standard errors.
        steps: rising, [N].
        behind: steps that the engine is behind the trainer, [N].
        errors: their standard errors, [N].
        moved: the trainer's movement by each step, in steps, of no known origin, [N].
        moved_errors: its standard errors, [N].
        followed: the tokens.
        theirs: slopes of the trainer's log-probs.
        late: by how many steps tokens are behind.
    """

    carried: Part
    seen: float
    steps: Floats
    behind: Floats
    errors: Floats
    moved: Floats
    moved_errors: Floats
    followed: Followed
    theirs: Slopes
    late: Behind

    @property
    def kinds(self) -> int:
        """Number of token ids that were followed."""
        return self.followed.shape[1]

    @property
    def text(self) -> str:
        """The measured steps behind by step, at most four from each end."""
        pairs = [
            f"{s:g}: {x:.1f}".replace(": -0.0", ": 0.0") for s, x in zip(self.steps, self.behind, strict=True)
        ]
        return ", ".join(pairs if len(pairs) <= 9 else [*pairs[:4], "…", *pairs[-4:]])

    @property
    def share(self) -> str:
        """What the engine carries of the trainer's movement, in words."""
        return f"{100 * self.carried.value:.0f}% ± {max(100 * self.carried.error, 1):.0f}%"

    def carries(self, steps: Flags) -> Part:
        """Return what the engine carries of the trainer's movement over some steps, flagged [N].

        Token ids move in the direction that all steps show, which tells more than that of few steps.
        """
        x = np.where(steps, self.steps - self.steps[steps].mean(), 0.0)
        left, moved = float(x @ self.behind), float(x @ self.moved)
        share = left / moved if moved > 0 else np.inf
        spread = x**2 @ (self.errors**2 + share**2 * self.moved_errors**2) if moved > 0 else np.inf
        return Part(1 - share, float(np.sqrt(spread)) / max(moved, 1e-12))

    @cached_property
    def whole(self) -> Part:
        """The steps behind, of all tokens."""
        return self.late.of(np.ones(len(self.followed.at), np.bool_))

    @cached_property
    def aligned(self) -> float:
        """Correlation of the mean Δ of token ids with what the trainer moves them by."""
        weight = np.maximum(self.followed.by_kind(self.followed.weight), 1e-12)
        spread = np.maximum(self.theirs.spread, 1e-12)
        off = self.followed.table(self.followed.weight * np.clip(self.followed.delta, -CAP, CAP))
        pairs = ((off, self.theirs.sums, 1 / spread), (off, off, 1 / weight))
        both, own = (float(_crossed(a, b)[0] @ scale) for a, b, scale in pairs)
        theirs = float(_crossed(self.theirs.sums, self.theirs.sums)[0] @ (weight / spread**2))
        return both / np.sqrt(own * theirs) if own > 0 and theirs > 0 else 0.0

    def among(self, tokens: Flags) -> Part:
        """Return the steps behind of some of the tokens that were measured, [T]."""
        return self.late.of(tokens[self.followed.at])


def uncertain(rows: Rows) -> Flags:
    """Flag tokens whose logits show: −8 < log π_rollout < −0.02, [T]."""
    return (rows.q < -0.02) & (rows.q > -8)


def numbers(column: list[object]) -> Floats:
    """Return a scalar column as floats, NaN for what is no finite number."""
    known = [isinstance(one, int | float) and not isinstance(one, bool) for one in column]
    found = np.array([float(x) if k else np.nan for x, k in zip(column, known, strict=True)])  # type: ignore[arg-type]
    return np.where(np.isfinite(found), found, np.nan)


def enough(rows: Rows) -> Rows:
    """Return the rows of steps that are large enough to be compared."""
    step, many = numbers(rows.column("step")), rows.sum(uncertain(rows))
    group = clusters(rows)
    kept = np.zeros(rows.sequences, np.bool_)
    for one in np.unique(step[np.isfinite(step)]):
        at = step == one
        size = at.sum() >= FEWEST_SEQUENCES and many[at].sum() >= FEWEST_TOKENS
        kept |= at & bool(size and len(np.unique(group[at])) >= FEWEST_OF_STEP)
    return rows.only(kept)


def versions(rows: Rows) -> tuple[Floats, Floats]:
    """Return the versions that a dump gives to the weights that scored and that sampled each token, [T] each.

    The step stands for the trainer's version, and the policy lag is that of a response's oldest token. Where
    no lag is recorded, the engine's version is taken to be the trainer's.
    """
    steps, lags = numbers(rows.column("step")), numbers(rows.column("policy_lag"))
    trainer = steps[rows.owner]
    sampled = (steps - (lags if np.isfinite(lags).any() else 0.0))[rows.owner]
    if rows.versions is not None:
        known = rows.versions >= 0
        oldest = np.full(rows.sequences, np.iinfo(np.int64).max)
        np.minimum.at(oldest, rows.owner[known], rows.versions[known])
        sampled = np.where(known, sampled + rows.versions - oldest[rows.owner], sampled)
    return trainer, sampled


def measure(rows: Rows) -> Drift | None:
    """Measure the drift; None without token ids, over few steps, or where the trainer's cannot be seen."""
    if rows.ids is None or not rows.tokens:
        return None
    trainer, sampled = versions(rows)
    some = uncertain(rows) & np.isfinite(trainer) & np.isfinite(sampled)
    kinds, of = np.unique(rows.ids, return_inverse=True)
    many = np.bincount(of, some, len(kinds))
    kept = np.zeros(len(kinds), np.bool_)
    kept[np.argsort(-many, kind="stable")[:MOST_KINDS]] = True
    some &= (kept & (many >= FEWEST_OF_KIND))[of]
    if not some.any():
        return None
    kind = np.unique(of[some], return_inverse=True)[1]
    prompt = np.unique(clusters(rows)[rows.owner[some]], return_inverse=True)[1]
    trainer, sampled, delta = trainer[some], sampled[some], rows.delta[some]
    steps = np.unique(trainer)
    shape = int(prompt.max()) + 1, int(kind.max()) + 1
    if len(steps) < FEWEST_STEPS or shape[0] < FEWEST_PROMPTS or shape[1] < FEWEST_KINDS:
        return None
    followed = Followed(np.flatnonzero(some), kind, prompt, delta, shape)
    log = np.maximum(rows.p[some], LOWEST)
    low, high = max(trainer.min(), sampled.min()), min(trainer.max(), sampled.max())
    if low >= high:
        return None
    scored, drawn = ((x >= low) & (x <= high) for x in (trainer, sampled))  # versions that both sides have
    if min(len(np.unique(trainer[scored])), len(np.unique(sampled[drawn]))) < FEWEST_STEPS:
        return None  # of one version there is no slope, and of few hardly any
    theirs, own = followed.slopes(trainer, log, scored), followed.slopes(sampled, rows.q[some], drawn)
    moved, carried = _product(theirs, theirs), _product(own, theirs)
    seen = _part(moved)
    if not seen.value >= SEEN * seen.error:
        return None
    whole = followed.slopes(trainer, log, np.ones(len(log), np.bool_))
    late = followed.measured(whole, np.clip(delta, -CAP, CAP))
    total = np.maximum(followed.by_kind(followed.weight), 1e-12)
    centred = log - (followed.by_kind(followed.weight * log) / total)[kind]
    courses = (late, followed.measured(whole, centred))
    by_step = [np.array([one.of(trainer == step) for step in steps]).T for one in courses]
    (values, errors), (way, way_errors) = by_step
    return Drift(
        _part(carried / moved),
        seen.value / seen.error,
        steps,
        values,
        errors,
        way,
        way_errors,
        followed,
        whole,
        late,
    )


class Slopes(NamedTuple):
    """Slopes over versions: weighted sums by prompt and kind [G, K], and the spread of versions [K]."""

    sums: Floats
    spread: Floats


@dataclass(frozen=True)
class Followed:
    """Tokens that are followed.

    Attributes:
        at: their indices, [N].
        kind: number of their token id, [N].
        prompt: number of their prompt, [N].
        delta: Δ, [N] nats.
        shape: numbers of prompts and of kinds.
    """

    at: Ints
    kind: Ints
    prompt: Ints
    delta: Floats
    shape: tuple[int, int]

    @cached_property
    def weight(self) -> Floats:
        """√r, [N]."""
        return np.exp(np.clip(self.delta, -2.0, 2.0) / 2)

    def by_kind(self, x: Floats) -> Floats:
        """Sum values [N] by kind, [K]."""
        return np.bincount(self.kind, x, self.shape[1]).astype(np.float64)

    def table(self, x: Floats) -> Floats:
        """Sum values [N] by prompt and kind, [G, K]."""
        cell = self.prompt * self.shape[1] + self.kind
        return np.bincount(cell, x, self.shape[0] * self.shape[1]).reshape(self.shape).astype(np.float64)

    def slopes(self, version: Floats, log: Floats, inside: Flags) -> Slopes:
        """Return the slopes of log-probs over versions, of the flagged tokens."""
        weight = np.where(inside, self.weight, 0.0)
        total = np.maximum(self.by_kind(weight), 1e-12)
        x, y = (v - (self.by_kind(weight * v) / total)[self.kind] for v in (version, log))
        return Slopes(self.table(weight * x * y), self.by_kind(weight * x * x))

    def measured(self, theirs: Slopes, x: Floats) -> Behind:
        """Return what makes up the steps that values [N] of any tokens hold, as other prompts show them."""
        spread = np.maximum(theirs.spread, 1e-12)
        others = theirs.sums.sum(0) - theirs.sums
        squares = others**2 - (np.square(theirs.sums).sum(0) - np.square(theirs.sums))
        own, moved = ((x / y)[self.prompt, self.kind] for x, y in ((others, spread), (squares, spread**2)))
        return Behind(self.prompt, self.weight * x * own, self.weight * moved)


class Behind(NamedTuple):
    """Numbers of tokens [N] whose sums are in the ratio of the steps behind: products with Δ, and squares."""

    prompt: Ints
    above: Floats
    below: Floats

    def of(self, tokens: Flags) -> Part:
        """Return the steps that the engine is behind at flagged tokens, [N]."""
        prompts = np.unique(self.prompt[tokens], return_inverse=True)[1]
        above, below = (np.bincount(prompts, x[tokens]) for x in (self.above, self.below))
        total, parts = float(below.sum()), len(below)
        if parts < 2 or total <= 0:
            return Part(0.0, np.inf)
        value = float(above.sum()) / total
        rest = above - value * below
        return Part(value, float(np.sqrt(rest @ rest * parts / (parts - 1))) / total)


def _product(a: Slopes, b: Slopes) -> Floats:
    """Return Σ over kinds of the product of two slopes, of all prompts and without each of them, [1 + G].

    A product of the same prompt is left out: its noise is in both.
    """
    weight = np.minimum(a.spread, b.spread) / np.maximum(a.spread * b.spread, 1e-12)
    return _crossed(a.sums, b.sums) @ weight


def _crossed(a: Floats, b: Floats) -> Floats:
    """Return the product of sums over prompts [G, K], but for that within prompts: of all, and without each.

    Returns:
        [1 + G, K].
    """
    each = a * b
    first, second, both = a.sum(0), b.sum(0), each.sum(0)
    return np.concatenate(([first * second - both], (first - a) * (second - b) - (both - each)))


def _part(x: Floats) -> Part:
    """Return a number with its standard error by the jackknife over prompts."""
    without = x[1:]
    spread = np.square(without - without.mean()).sum() * (len(without) - 1) / len(without)
    return Part(float(x[0]), float(np.sqrt(spread)) + 1e-12)
