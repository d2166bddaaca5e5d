"""What presets do to each sequence: sums over its tokens, [S] each, shared by presets of equal parts."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import NamedTuple

from offpol_diag.core import formulas as f
from offpol_diag.core.evaluate import INF, Evaluator, once
from offpol_diag.core.segments import Array, floats
from offpol_diag.core.steps import PolicyLoss, SequenceMask, Steps, TokenMask, Weighting
from offpol_diag.presets import Policy

LARGEST = sys.float_info.max


class OfWeights(NamedTuple):
    """Sums of final weights w over kept tokens, and their extremes, [S] each.

    Two pairs, since Σw and Σw² stay exact where every weight is tiny, and the other two where every weight is
    near 1.

    Attributes:
        w: Σw.
        ww: Σw².
        deviation: Σ(w − 1).
        about_one: Σ(w − 1)².
        weighted: tokens with w ≠ 0.
        smallest: smallest w; inf without a token.
        largest: largest w; −inf without a token.
    """

    w: Array
    ww: Array
    deviation: Array
    about_one: Array
    weighted: Array
    smallest: Array
    largest: Array


class OfPreset(NamedTuple):
    """Numbers of each sequence under one preset, [S] each.

    Attributes:
        left: 1 where it passes the rules on sequences and the veto, else 0.
        kept: tokens that pass all of them and the rules on tokens.
        hits: tokens beyond the veto's bounds.
        k3: Σ(r − 1 − Δ) over kept tokens.
        delta: ΣΔ over tokens that pass the rules on tokens.
        weights: of the final weights of kept tokens.
        high: weights above their upper bound.
        low: weights below their lower bound.
        units: how many weights there are.
        bounded: weights, or tokens, on which the safety bound acts.
        tries: how many of those there are.
        over_all: Σw over all tokens, rejected or not; 0 where it was not asked for.
        loss: Σ w L over kept tokens; this and what follows None where no losses were asked for.
        clipped: kept tokens on which the loss's clip acts.
        dual_clipped: kept tokens on which its dual clip acts.
        kl: Σ −u over kept tokens.
    """

    left: Array
    kept: Array
    hits: Array
    k3: Array
    delta: Array
    weights: OfWeights
    high: Array
    low: Array
    units: Array
    bounded: Array
    tries: Array
    over_all: Array
    loss: Array | None = None
    clipped: Array | None = None
    dual_clipped: Array | None = None
    kl: Array | None = None


class Sums(Evaluator):
    """An evaluator that adds up.

    Sums over tokens multiply by a mask of 0 and 1, which is as exact as leaving tokens out: every number is
    finite.
    """

    def of_preset(self, preset: Steps, losses: bool, over_all: bool) -> OfPreset:
        """Compute everything of one preset, as far as it is asked for."""
        tokens, sequences, weight = preset.tokens, preset.sequences, preset.weight
        high = low = bounded = self.none
        of_tokens = safety_on_tokens = True
        if weight is not None:
            high, low = self.truncated(weight)
            bounded = self.bounded(weight)
            of_tokens, safety_on_tokens = weight.on_tokens, weight.safety_on_tokens
        k3, delta = self.gap(preset.policy, tokens)
        result = OfPreset(
            left=self.left(sequences),
            kept=self.product(self.many(tokens), sequences),
            hits=self.none if sequences.veto is None else self.veto_hits(sequences.veto),
            k3=self.product(k3, sequences),
            delta=delta,
            weights=self.of_weights(weight, tokens, sequences),
            high=high,
            low=low,
            units=self.sequences.n if of_tokens else self.filled,
            bounded=bounded,
            tries=self.sequences.n if safety_on_tokens else self.filled,
            over_all=self.over_all(weight) if over_all else self.none,
        )
        if not losses:
            return result
        clipped, dual_clipped = self.clips(preset.loss, tokens)
        return result._replace(
            loss=self.of_loss(preset.loss, weight if preset.weighted else None, tokens, sequences),
            clipped=self.product(clipped, sequences),
            dual_clipped=self.product(dual_clipped, sequences),
            kl=self.product(self.kl(preset.loss.anchor, preset.loss.kl_within, tokens), sequences),
        )

    # ------------------------------------------------------------ masks as numbers

    @cached_property
    def none(self) -> Array:
        """0 of each sequence, [S]."""
        return 0.0 * self.sequences.n

    @cached_property
    def one(self) -> Array:
        """1 of each sequence, [S]."""
        return self.none + 1.0

    @cached_property
    def filled(self) -> Array:
        """1 of each sequence that has a token, else 0, [S]."""
        return floats(self.sequences.filled)

    @once
    def mask(self, tokens: TokenMask) -> Array | None:
        """Return 1 for tokens that pass the rules on tokens, else 0, [T]; None without a rule."""
        passing = self.passing_tokens(tokens)
        return None if passing is None else floats(passing)

    @once
    def left(self, sequences: SequenceMask) -> Array:
        """Return 1 for sequences that pass the rules on sequences and the veto, else 0, [S]."""
        passing = self.passing_sequences(sequences)
        return self.one if passing is None else floats(passing)

    def product(self, x: Array, sequences: SequenceMask) -> Array:
        """Return a sum of each sequence, 0 where the sequence is dropped; the sum itself without a rule."""
        if self.passing_sequences(sequences) is None:
            return x
        key = "product", id(x), sequences
        if key not in self.known:
            self.known[key] = x, x * self.left(sequences)  # keeps x, so that no other array gets its id
        return self.known[key][1]

    def over(self, x: Array, tokens: TokenMask) -> Array:
        """Sum x [T] over the tokens that pass the rules on tokens, [S]."""
        mask = self.mask(tokens)
        return self.sequences.sum(x if mask is None else x * mask)

    # ------------------------------------------------------------ sums over tokens that pass

    @once
    def many(self, tokens: TokenMask) -> Array:
        """Count them."""
        mask = self.mask(tokens)
        return self.sequences.n if mask is None else self.sequences.sum(mask)

    @once
    def gap(self, policy: Policy, tokens: TokenMask) -> tuple[Array, Array]:
        """Sum k3, its r held so that sums stay finite, and Δ."""
        return self.over(self.finite_k3(policy), tokens), self.over(self.log_ratio(policy), tokens)

    @once
    def finite_k3(self, policy: Policy, anchor: Policy = "rollout") -> Array:
        """Compute k3 of tokens, Δ held to 345 from above, [T] nats."""
        log_ratio = self.xp.clip(self.log_ratio(policy, anchor), None, f.LARGEST)
        return f.k3(log_ratio, self.ratio_minus_1_within(policy, f.LARGEST, anchor))

    @once
    def weight_of_kept(self, weight: Weighting, tokens: TokenMask) -> Array:
        """Return weights of tokens, 0 of those that are rejected, [T]."""
        mask = self.mask(tokens)
        return self.weight(weight) if mask is None else self.weight(weight) * mask

    @once
    def of_token_weights(self, weight: Weighting, tokens: TokenMask) -> OfWeights:
        """Sum weights that tokens have of their own."""
        w, mask, runs = self.weight_of_kept(weight, tokens), self.mask(tokens), self.sequences
        deviation, smallest = self.weight(weight) - 1.0, w
        if mask is not None:
            deviation = deviation * mask
            smallest = self.weight(weight) + self.barrier(tokens)
        weighted = runs.count(w != 0.0) if weight.may_be_zero else self.many(tokens)
        squares = runs.sum(w * w), runs.sum(deviation), runs.sum(deviation * deviation)
        return OfWeights(runs.sum(w), *squares, weighted, runs.min(smallest), runs.max(w))

    @once
    def barrier(self, tokens: TokenMask) -> Array:
        """Return 0 for tokens that pass, and for others a number above every weight: for minima, [T]."""
        mask: Array = self.mask(tokens)
        return (1.0 - mask) * 1e300

    @once
    def of_weights(self, weight: Weighting | None, tokens: TokenMask, sequences: SequenceMask) -> OfWeights:
        """Sum the final weights of kept tokens."""
        n = self.product(self.many(tokens), sequences)
        if weight is not None and weight.on_tokens:
            found = self.of_token_weights(weight, tokens)
            sums = [self.product(x, sequences) for x in found[:5]]
            smallest, largest = found.smallest, found.largest
        else:  # all tokens of a sequence share its weight
            smallest = largest = w = self.one if weight is None else self.weight(weight)
            sums = [n, n, self.none, self.none, n]
            if weight is not None:
                weighted = n * floats(w != 0.0) if weight.may_be_zero else n
                sums = [w * n, w * w * n, (w - 1.0) * n, (w - 1.0) * (w - 1.0) * n, weighted]
        w_sum, ww, deviation, about_one, weighted = sums
        ends = self.xp.where(n > 0, smallest, INF), self.xp.where(n > 0, largest, -INF)
        return OfWeights(w_sum, ww, deviation, about_one, weighted, *ends)

    @once
    def over_all(self, weight: Weighting | None) -> Array:
        """Sum weights over all tokens, rejected or not, [S]."""
        if weight is None:
            return self.sequences.n
        w = self.weight(weight)
        return self.sequences.sum(w) if weight.on_tokens else w * self.sequences.n

    # ------------------------------------------------------------ losses

    @once
    def of_loss(
        self, loss: PolicyLoss, weight: Weighting | None, tokens: TokenMask, sequences: SequenceMask
    ) -> Array:
        """Sum w · L over kept tokens; without a weight w is 1."""
        if weight is None or weight.on_tokens:
            return self.product(self.of_token_losses(loss, weight, tokens), sequences)
        return self.product(self.of_token_losses(loss, None, tokens) * self.weight(weight), sequences)

    @once
    def of_token_losses(self, loss: PolicyLoss, weight: Weighting | None, tokens: TokenMask) -> Array:
        """Sum w · L over tokens that pass the rules on tokens, their own w or 1."""
        value = self.finite_loss(loss)
        if weight is None:
            return self.over(value, tokens)
        return self.sequences.sum(self.weight_of_kept(weight, tokens) * value)

    @once
    def finite_loss(self, loss: PolicyLoss) -> Array:
        """Compute a policy loss, held to the largest float64 where it overflows, [T]."""
        return self.xp.clip(self.loss(loss).value, -LARGEST, LARGEST)

    @once
    def clips(self, loss: PolicyLoss, tokens: TokenMask) -> tuple[Array, Array]:
        """Count the tokens that pass on which the loss's clip acts, and its dual clip."""
        made = self.loss(loss)
        return self._flagged(made.clipped, tokens), self._flagged(made.dual_clipped, tokens)

    def _flagged(self, flags: Array | None, tokens: TokenMask) -> Array:
        if flags is None:
            return self.none
        passing = self.passing_tokens(tokens)
        return self.sequences.count(flags if passing is None else flags & passing)

    @once
    def kl(self, anchor: Policy, within: float, tokens: TokenMask) -> Array:
        """Sum −u over tokens that pass the rules on tokens."""
        return self.over(self.loss_kl(anchor, within), tokens)
