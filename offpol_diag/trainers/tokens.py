"""One batch under one preset: what trainers' formulas are of.

A number of each token is [T], of each sequence, which trainers call a row, [S]. r = π_train/π_rollout = e^Δ,
and u = log π_θ − log π_anchor is the log of the ratio that a policy loss clips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from offpol_diag.core import steps
from offpol_diag.core.evaluate import Evaluator
from offpol_diag.core.steps import Steps, Weighting
from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.presets import Numerator, Over, Preset, Reject, Statistic, Veto

T = TypeVar("T")


@dataclass(eq=False)
class Tokens:
    """One batch under one preset.

    Attributes:
        context: the batch, and what was computed of it for other presets.
        preset: the preset.
    """

    context: BatchContext
    preset: Preset

    def only(self, *parts: str) -> Tokens:
        """Return the batch under a preset with these parts alone (fields of it), for what presets share."""
        some = {name: getattr(self.preset, name) for name in parts}
        return replace(self, preset=Preset("", "", self.preset.policy, **some))

    def of(self, policy: Numerator) -> Tokens:
        """Return the batch with another numerator of its ratios."""
        return replace(self, preset=replace(self.preset, policy=policy))

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key for all presets of the batch with this numerator."""
        return self.context.cached(("logs", self.preset.policy, key), make)

    @property
    def evaluator(self) -> Evaluator:
        """What computes the numbers of tokens and sequences that a preset is made of, each once."""
        return self.context.evaluator

    @property
    def steps(self) -> Steps:
        """The preset with numbers for bounds."""
        return steps.steps(self.preset)

    @property
    def _weighting(self) -> Weighting:
        weight = self.steps.weight
        assert weight is not None
        return weight

    @property
    def batch(self) -> Batch:
        """The packed tokens."""
        return self.context.batch

    # ------------------------------------------------------------ numbers of sequences, [S]

    @property
    def n(self) -> Array:
        """Tokens of each sequence, [S] float64."""
        return self.context.cached("n", lambda: self.batch.lengths.astype(np.float64))

    @property
    def one(self) -> Array:
        """1 of each sequence, [S], to count them; `there` counts those with a token."""
        return self.context.cached("one", lambda: np.ones_like(self.n))

    @property
    def there(self) -> Array:
        """Sequences with a token, [S] bool."""
        return self.context.cached("there", lambda: self.n > 0)

    def row_sum(self, x: Array) -> Array:
        """Sum numbers over each sequence, or count flags: [T] → [S]; 0 for one without tokens."""
        add = segments.count if x.dtype == bool else segments.total
        return add(x, self.batch.cu_seqlens)

    def row_mean(self, x: Array) -> Array:
        """Average over the tokens of each sequence: [T] → [S]; 0 for one without tokens."""
        return self.row_sum(x) / np.maximum(self.n, 1)

    def row_max(self, x: Array) -> Array:
        """Return the largest of each sequence: [T] → [S]; −∞ for one without tokens."""
        return segments.largest(x, self.batch.cu_seqlens)

    def row_min(self, x: Array) -> Array:
        """Return the smallest of each sequence: [T] → [S]; +∞ for one without tokens."""
        return segments.smallest(x, self.batch.cu_seqlens)

    def spread(self, x: Array) -> Array:
        """Give every token its sequence's number: [S] → [T]."""
        return segments.spread(x, self.batch.cu_seqlens)

    # ------------------------------------------------------------ numbers of tokens, [T]

    @property
    def train(self) -> Array:
        """log of the preset's numerator (π_old, or π_θ in bypass), [T] nats."""
        return self.evaluator.log_probs[self.preset.policy]

    @property
    def log_ratio(self) -> Array:
        """Δ = log π_train − log π_rollout, [T] nats."""
        return self.evaluator.log_ratio(self.preset.policy)

    def ratio(self, safety: float | None = None) -> Array:
        """r = e^Δ, Δ clamped to ±safety, [T]."""
        return self.cached(
            ("r", safety), lambda: np.exp(self.evaluator.log_ratio_within(self.preset.policy, safety))
        )

    def ratio_minus_one(self, safety: float | None = None) -> Array:
        """r − 1, Δ clamped to ±safety, [T]; precise near 0."""
        return self.evaluator.ratio_minus_1_within(self.preset.policy, safety)

    def k3(self, safety: float | None = None) -> Array:
        """r − 1 − Δ, Δ clamped to ±safety, [T]."""
        return self.evaluator.statistic("k3", self.preset.policy, safety)

    @property
    def difference(self) -> Array:
        """π_train − π_rollout, [T]."""
        return self.evaluator.statistic("prob_diff", self.preset.policy, None)

    @property
    def token_u(self) -> Array:
        """log π_θ − log π_anchor of each token, [T]: π_old, or the rollout where the trainer has no π_old."""
        if self.preset.policy != "old":
            return self.evaluator.log_ratio("current")
        current, old = self.batch.current, self.batch.old
        assert current is not None
        assert old is not None
        return self.cached("u", lambda: current - old)

    @property
    def pooled(self) -> bool:
        """Whether the loss's ratio is one of a sequence: under GSPO."""
        return self.steps.loss.pooled

    @property
    def u(self) -> Array:
        """Log of the ratio that the loss clips, [T] nats: `token_u`, or its sequence's mean where pooled."""
        if not self.pooled:
            return self.token_u
        return self.cached("mean u", lambda: self.spread(segments.mean(self.token_u, self.batch.cu_seqlens)))

    @property
    def update_ratio(self) -> Array:
        """e^u, the ratio that the loss clips, [T]."""
        return self.cached(("e^u", self.pooled), lambda: np.exp(self.u))

    # ------------------------------------------------------------ what the preset does

    def aggregate(self, statistic: Statistic, over: Over, safety: float | None = None) -> Array:
        """Compute a statistic of tokens [T] or sequences [S] (`base.of_rows`); of `ratio` its log.

        Each token's Δ is clamped to ±safety first.
        """
        return self.evaluator.aggregate(statistic, self.preset.policy, over, safety)

    def passes(self, rule: Reject) -> Array:
        """Flag the tokens [T] or sequences [S] (`rule.on_tokens`) that pass one rule, bool."""
        return self.evaluator.passes(steps.rule(self.preset.policy, rule))

    @property
    def kept_rows(self) -> Array:
        """Sequences that pass the rules on sequences and the veto, [S] bool."""
        passing = self.evaluator.passing_sequences(self.steps.sequences)
        return np.ones(self.batch.sequences, bool) if passing is None else passing

    @property
    def kept(self) -> Array:
        """Tokens that pass all rules and the veto, [T] bool."""
        return self.evaluator.kept(self.steps.tokens, self.steps.sequences)

    @property
    def n_kept(self) -> Array:
        """Tokens of each sequence that pass all rules and the veto, [S]."""
        key = "n kept", self.preset.reject, self.preset.veto
        return self.cached(key, lambda: self.row_sum(self.kept))

    def under(self, *rules: Reject, veto: Veto | None = None) -> Tokens:
        """Return the batch under a preset with other rules and veto."""
        return replace(self, preset=replace(self.preset, reject=rules, veto=veto))

    def dropped_by(self, *rules: Reject) -> Array:
        """Count the tokens of each sequence that any of these rules drops, [S]."""
        return self.n - self.under(*rules).n_kept

    def veto_hits(self, veto: Veto | None) -> Array:
        """Count the tokens of each sequence beyond a veto's bounds, [S]."""
        if veto is None:
            return np.zeros_like(self.n)
        return self.evaluator.veto_hits(steps.veto_bounds(self.preset.policy, veto))

    @property
    def weighs_rows(self) -> bool:
        """Whether a sequence has one weight, rather than each token its own."""
        weight = self.preset.weight
        assert weight is not None
        return not weight.on_tokens

    @property
    def unit_weight(self) -> Array:
        """Final weight of each token [T], or of each sequence [S] if `weighs_rows`.

        Before rejection, not normalised.
        """
        return self.evaluator.weight(self._weighting)

    @property
    def raw_unit_weight(self) -> Array:
        """The same before truncation or masking, within the safety bound."""
        weight = self.preset.weight
        assert weight is not None
        return self.evaluator.weight(steps.weighting(self.preset.policy, replace(weight, action="none")))

    @property
    def weight(self) -> Array:
        """Final weight of each token, [T], before rejection, not normalised; 1 without a weight."""
        if self.preset.weight is None:
            return np.ones(self.batch.tokens)
        return self.spread(self.unit_weight) if self.weighs_rows else self.unit_weight

    @property
    def n_above(self) -> Array:
        """Weights above the upper bound by sequence, [S]: of its tokens, or 1 for its own."""
        return self.evaluator.truncated(self._weighting)[0]

    @property
    def n_below(self) -> Array:
        """Weights below the lower bound by sequence, [S]: of its tokens, or 1 for its own."""
        return self.evaluator.truncated(self._weighting)[1]

    @property
    def n_bounded(self) -> Array:
        """Tokens of each sequence whose weight a bound moved, or whose sequence's weight it did, [S]."""
        if self.preset.weight is None:
            return np.zeros_like(self.n)
        moved = self.n_above + self.n_below
        return moved * self.n if self.weighs_rows else moved

    # ------------------------------------------------------------ the policy loss

    def clipped(self, ratio: Array) -> Array:
        """Clip a ratio to the bounds of the preset's loss, [1 − low, 1 + high]."""
        clip = self.preset.clip
        low = -math.inf if clip.low is None else 1 - clip.low
        return ratio.clip(low, math.inf if clip.high is None else 1 + clip.high)

    @property
    def clip_decides(self) -> Array:
        """Tokens whose clipped term is the larger loss, [T] bool: −A clip(e^u) > −A e^u."""
        r, a = self.update_ratio, self.batch.advantages
        assert a is not None
        if self.pooled:  # by the sign of A: products of rounded factors may be equal
            return ((a > 0) & (self.clipped(r) < r)) | ((a < 0) & (self.clipped(r) > r))
        return -a * self.clipped(r) > -a * r

    @property
    def loss_acts(self) -> tuple[Array, Array]:
        """Where the clip of the preset's loss acts, and its dual clip, [T] bool each; nowhere without one.

        Needs π_θ and advantages.
        """
        made, nowhere = self.evaluator.loss(self.steps.loss), np.zeros(self.batch.tokens, bool)
        clipped, dual_clipped = (nowhere if x is None else x for x in made[1:])
        return clipped, dual_clipped

    @property
    def loss_kl(self) -> Array:
        """log π_anchor − log π_θ, bounded where the preset's loss bounds its log-ratio, [T] nats."""
        within = self.steps.loss.kl_within
        return -self.token_u.clip(-within, within)
