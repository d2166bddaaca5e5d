"""Rules, veto and importance weights of one preset on the tokens of one batch.

`Evaluator` is written once, and a layout says how tokens lie in memory:

| layout | a number of each token | of each sequence | arrays |
| --- | --- | --- | --- |
| `Packed` | [T] | [S] | numpy |
| `Padded` (`offpol_diag.torch`) | [S, L] | [S, 1] | torch |

A number of a turn is given to each of its tokens. Formulas are those of `pipeline.formulas`, bounds as
numbers those of `pipeline.plan`. Every bound is on r = π_train/π_rollout = e^Δ; `policy` names π_train.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.scope import NO_FITS, BatchFits
from offpol_diag.engine.segments import Array, Memo
from offpol_diag.pipeline import formulas, plan, tables
from offpol_diag.presets import (
    AGGREGATES,
    OF_SEQUENCES,
    Over,
    Policy,
    Preset,
    Reject,
    Statistic,
    Veto,
    Weight,
)

Method = TypeVar("Method", bound=Callable[..., Any])
Safety = float | None
"""A bound on |Δ| before anything is made of it, nats."""

FROM_RATIO_MINUS_ONE = frozenset({"k3", "tv"})
"""Statistics that are made of r − 1; it is not computed for others."""
SIGNS = {tables.POSITIVE: "positive", tables.NEGATIVE: "negative", tables.NOT_POSITIVE: "not_positive"}
"""Row of a sign in `tables.COUNTS` → its formula."""


def memoised(method: Method) -> Method:
    """Compute a method of `Evaluator` once per arguments, which are given by position."""
    defaults = method.__defaults__ or ()
    required = method.__code__.co_argcount - len(defaults) - 1

    @wraps(method)
    def cached(self, *arguments):
        key = method, *arguments, *defaults[len(arguments) - required :]
        return self.cache.cached(key, lambda: method(self, *arguments))

    return cast(Method, cached)


@dataclass(frozen=True)
class Evaluator:
    """Applies presets, one at a time, to a batch; presets share what they have in common.

    Attributes:
        layout: the batch, `Packed` or `Padded`; what is typed as an `Array` is a tensor under the latter.
        cache: what was computed so far.
    """

    layout: Any
    cache: Memo = field(default_factory=Memo, repr=False)

    # ------------------------------------------------------------ numbers of tokens

    @memoised
    def log_ratio(self, policy: Policy, safety: Safety = None) -> Array:
        """Compute Δ = log π_train − log π_rollout of each token, nats, bounded to ±safety."""
        if safety is not None:
            return self.log_ratio(policy).clip(-safety, safety)
        train, rollout = self.layout.log_prob(policy), self.layout.log_prob("rollout")
        return self.layout.formulas.log_ratio_of(train, rollout)

    @memoised
    def ratio_minus_one(self, policy: Policy, safety: Safety = None) -> Array:
        """Compute r − 1 of each token, Δ bounded to ±safety."""
        if safety is not None:
            return self.ratio_minus_one(policy).clip(np.expm1(-safety), np.expm1(safety))
        return self.layout.formulas.ratio_minus_one(self.log_ratio(policy))

    @memoised
    def probability_difference(self, policy: Policy, safety: Safety = None) -> Array:
        """Compute π_train − π_rollout of each token, Δ bounded to ±safety.

        It is exact for a log-prob of −1e30 too, where log π_rollout + Δ is not log π_train.
        """
        log_ratio, rollout = self.log_ratio(policy, safety), self.layout.log_prob("rollout")
        train = self.layout.log_prob(policy) if safety is None else rollout + log_ratio
        larger = self.layout.xp.maximum(train, rollout)
        gap = self.layout.formulas.probability_gap(-abs(log_ratio), None, larger)
        return self.layout.xp.copysign(gap, log_ratio)

    @memoised
    def token_statistic(self, name: Statistic, policy: Policy, safety: Safety = None) -> Array:
        """Compute a rule's statistic of each token, Δ bounded to ±safety; of `ratio` its log."""
        if name == "prob_diff":
            return self.probability_difference(policy, safety)
        minus_one = self.ratio_minus_one(policy, safety) if name in FROM_RATIO_MINUS_ONE else None
        formula = getattr(self.layout.formulas, tables.STATISTICS[name])
        return formula(self.log_ratio(policy, safety), minus_one, self.layout.log_prob("rollout"))

    # ------------------------------------------------------------ numbers of sequences and turns

    @memoised
    def aggregate(self, name: Statistic, over: Over, policy: Policy, safety: Safety = None) -> Array:
        """Aggregate a statistic over sequences or turns, each token's Δ bounded to ±safety first.

        Of each sequence if `over` is in `OF_SEQUENCES`, else of each token; 0 over no token.
        """
        x = self.token_statistic(name, policy, safety)
        if over in ("token", "batch"):
            return x
        if over == "segment":
            return self.layout.turn_mean(x)
        if over == "sum":
            return self.layout.sum(x)
        if over == "mean":
            return self.aggregate(name, "sum", policy, safety) / self._lengths().clip(1)
        sign = 1.0 if over == "max" else -1.0
        return self.layout.xp.where(self._lengths() > 0, sign * self.layout.max(sign * x), 0.0)

    @memoised
    def _lengths(self) -> Array:
        """Count the tokens of each sequence, float64."""
        return self.layout.count(self.layout.counted)

    def statistic(self, part: Weight | Reject, policy: Policy) -> Array:
        """Compute what a rule or weight compares with its bounds, within its safety bound; log r for `ratio`.

        The safety bound is on each token's Δ, or on the aggregate.
        """
        name, safety = part.statistic if isinstance(part, Reject) else "ratio", part.safety
        if safety is None or part.over == "token" or part.safety_at == "token" or name not in AGGREGATES:
            return self.aggregate(name, part.over, policy, safety)
        return self.aggregate(name, part.over, policy, None).clip(-safety, safety)

    # ------------------------------------------------------------ rules and veto

    @memoised
    def passes(self, rule: Reject, policy: Policy) -> Array:
        """Flag the tokens, or the sequences unless `rule.on_tokens`, that pass one rule."""
        value = self.statistic(rule, policy)
        if rule.over == "batch":
            return value < self.layout.cut(policy, rule, value)
        if rule.on_tokens and rule.over in OF_SEQUENCES:
            value = self.layout.spread(value)
        bounds = plan.log_bounds if rule.statistic == "ratio" else plan.plain_bounds
        return ~self.layout.formulas.rejected(value, *bounds(rule, None), *self._counts(rule, policy))

    def _counts(self, rule: Reject, policy: Policy) -> tuple[Array | float, Array | float]:
        """Return 1 where a violation of the upper bound counts, and of the lower one, else 0."""
        if rule.advantage == "any":
            return 1.0, 1.0
        advantage = self.layout.advantages
        if advantage is None:
            raise ValueError("a rule conditioned on advantages needs the advantages column")
        if not rule.on_tokens:
            advantage = self.layout.sum(advantage) / self._lengths().clip(1)
        if rule.advantage == "away":
            moves = self.layout.formulas.moves_away(advantage, self.log_ratio(policy))
            return moves, moves
        signs = [getattr(self.layout.formulas, SIGNS[row]) for row in tables.COUNTS[rule.advantage]]
        return signs[0](advantage), signs[1](advantage)

    @memoised
    def veto_hits(self, veto: Veto | None, policy: Policy) -> Array:
        """Count the tokens of each sequence whose unclamped r lies strictly beyond a veto's bounds."""
        bounds = (-math.inf, math.inf) if veto is None else plan.log_bounds(veto, None)
        return self.layout.count(self.layout.formulas.outside(self.log_ratio(policy), *bounds))

    def passing(self, preset: Preset) -> tuple[Array, Array]:
        """Flag tokens that pass the rules on tokens, and sequences that pass the other rules and the veto."""
        return self._passing(preset.policy, preset.reject, preset.veto)

    @memoised
    def _passing(self, policy: Policy, rules: tuple[Reject, ...], veto: Veto | None) -> tuple[Array, Array]:
        tokens, sequences = self.layout.counted, self.veto_hits(veto, policy) == 0
        for rule in rules:
            passed = self.passes(rule, policy)
            if rule.on_tokens:
                tokens = tokens & passed
            else:
                sequences = sequences & passed
        return tokens, sequences

    def kept(self, preset: Preset) -> Array:
        """Flag the tokens that pass all rules of a preset and its veto."""
        return self._kept(preset.policy, preset.reject, preset.veto)

    @memoised
    def _kept(self, policy: Policy, rules: tuple[Reject, ...], veto: Veto | None) -> Array:
        tokens, sequences = self._passing(policy, rules, veto)
        return tokens & self.layout.spread(sequences)

    # ------------------------------------------------------------ weights

    def weight(self, preset: Preset) -> Array:
        """Compute the importance weights before rejection, not normalised: of tokens or sequences.

        The preset must have a weight; `weight.on_tokens` says whether tokens have their own.
        """
        assert preset.weight is not None
        return self._weight(preset.weight, preset.policy)

    @memoised
    def _weight(self, weight: Weight, policy: Policy) -> Array:
        log_ratio = self.statistic(weight, policy)
        ratio = self._ratio(weight.over, weight.safety, weight.safety_at, policy)
        return self.layout.formulas.importance_weight(ratio, log_ratio, *plan.weight_bounds(weight))

    @memoised
    def _ratio(self, over: Any, safety: Safety, safety_at: Any, policy: Policy):
        """Compute r, which weights of different bounds share."""
        unbounded = Weight(over, "none", safety=safety, safety_at=safety_at)
        return self.layout.formulas.importance_ratio(self.statistic(unbounded, policy))

    def beyond_bounds(self, preset: Preset) -> tuple[Array, Array]:
        """Count the weights above the upper bound, and those below the lower one, by sequence.

        A sequence's weight counts 1, a turn's as often as the turn has tokens.
        """
        assert preset.weight is not None
        return self._beyond_bounds(preset.weight, preset.policy)

    @memoised
    def _beyond_bounds(self, weight: Weight, policy: Policy) -> tuple[Array, Array]:
        log_ratio, (lower, upper) = self.statistic(weight, policy), plan.log_bounds(weight, None)
        above, below = log_ratio > upper, log_ratio < lower
        if weight.on_tokens:
            return self.layout.count(above), self.layout.count(below)
        there = 1.0 * (self._lengths() > 0)
        return above * there, below * there


class Packed:
    """Tokens end to end, [T], without padding; a number of a sequence is [S]."""

    xp = np
    formulas = formulas

    def __init__(self, batch: Batch, fits: BatchFits = NO_FITS) -> None:
        """Take a batch, and the cuts of its trainer batches."""
        self.batch, self.fits = batch, fits
        self.advantages = batch.advantages
        self.counted = np.ones(batch.tokens, bool)  # the tokens that count

    def log_prob(self, policy: Policy) -> Array:
        """Return the log-probs of a policy, nats, [T]."""
        result = self.batch.policy(policy)
        if result is None:
            raise ValueError(f"the batch has no {policy} log-probs")
        return result

    def sum(self, x: Array) -> Array:
        """Sum over each sequence: [T] → [S]."""
        return segments.total(x, self.batch.cu_seqlens)

    def max(self, x: Array) -> Array:
        """Return the largest of each sequence, −inf over no token: [T] → [S]."""
        return segments.largest(x, self.batch.cu_seqlens)

    def count(self, tokens: Array) -> Array:
        """Count the flagged tokens of each sequence: [T] → [S] float64."""
        return segments.count(tokens, self.batch.cu_seqlens)

    def turn_mean(self, x: Array) -> Array:
        """Give each token the mean of its turn: [T] → [T]."""
        turns = self.batch.cu_runs
        return segments.spread(segments.mean(x, turns), turns)

    def spread(self, x: Array) -> Array:
        """Give each token its sequence's number: [S] → [T]."""
        return segments.spread(x, self.batch.cu_seqlens)

    def cut(self, policy: Policy, rule: Reject, values: Array) -> Array:
        """Return the value from which on a rule on trainer batches drops tokens, [T]; inf for none."""
        return self.fits.cut(policy, rule, self.batch)
