"""What presets do to each sequence: numbers [S] of its tokens, shared by presets of equal parts.

Sums over tokens multiply by a mask of 0 and 1, which is as exact as leaving tokens out: all numbers are
finite.
"""

from __future__ import annotations

from functools import cached_property

from offpol_diag.core import formulas as f
from offpol_diag.core.evaluate import (
    INF,
    Evaluator,
    PolicyLoss,
    SequenceRules,
    TokenRules,
    loss_of,
    may_be_zero,
    multiplies_loss,
    once,
    rules_of,
)
from offpol_diag.core.segments import Array, floats
from offpol_diag.number import LARGEST
from offpol_diag.presets import Policy, Preset, Veto, Weight

LARGEST_SUM = 2 * f.LARGEST
"""Largest log of a sequence's number that is exponentiated: e^690 is still a float64."""
Columns = dict[str, Array]
"""Name → a number of each sequence, [S] float64."""


class Sums(Evaluator):
    """An evaluator that adds up what it computes, by sequence."""

    def of_preset(self, preset: Preset, losses: bool) -> Columns:
        """Compute all columns of one preset; those of losses if asked for."""
        policy, weight, (tokens, sequences) = preset.policy, preset.weight, rules_of(preset)
        found = self.of_kept(tokens, sequences) | self.of_gap(policy, tokens, sequences)
        found |= self.of_veto(policy, preset.veto) | self.of_bounds(policy, weight)
        found |= self.of_weights(policy, weight, tokens, sequences)
        if losses:
            weight = weight if multiplies_loss(preset) else None
            found |= self.of_losses(loss_of(preset), policy, weight, tokens, sequences)
        return found

    # ------------------------------------------------------------ masks as numbers

    @cached_property
    def one(self) -> Array:
        """1 of each sequence."""
        return self.zeros + 1.0

    @once
    def mask(self, tokens: TokenRules) -> Array | None:
        """Return 1 for tokens that pass the rules on tokens, else 0, [T]; None without a rule."""
        passing = self.passing_tokens(tokens)
        return None if passing is None else floats(passing)

    @once
    def product(self, x: Array, sequences: SequenceRules) -> Array:
        """Return a number of each sequence, 0 where it is dropped; the array itself without a rule."""
        passing = self.passing_sequences(sequences)
        return x if passing is None else x * passing

    @once
    def over(self, x: Array, tokens: TokenRules) -> Array:
        """Sum x [T] over the tokens that pass the rules on tokens."""
        mask = self.mask(tokens)
        return self.sequences.sum(x if mask is None else x * mask)

    @once
    def flagged(self, flags: Array | None, tokens: TokenRules) -> Array:
        """Count flags [T] of tokens that pass the rules on tokens; None is no flag."""
        if flags is None:
            return self.zeros
        passing = self.passing_tokens(tokens)
        return self.sequences.count(flags if passing is None else flags & passing)

    # ------------------------------------------------------------ tokens that are kept

    @once
    def many(self, tokens: TokenRules) -> Array:
        """Count the tokens that pass the rules on tokens."""
        mask = self.mask(tokens)
        return self.sequences.n if mask is None else self.sequences.sum(mask)

    @once
    def of_kept(self, tokens: TokenRules, sequences: SequenceRules) -> Columns:
        """Count tokens that pass all rules and the veto.

        kept: how many; left: 1 where there is one; touched: 1 where one was rejected.
        """
        kept = self.product(self.many(tokens), sequences)
        if kept is self.sequences.n:
            return {"kept": kept, "left": self.filled, "touched": self.zeros}
        touched = floats(kept < self.sequences.n)
        return {"kept": kept, "left": floats(kept > 0), "touched": touched}

    @once
    def of_gap(self, policy: Policy, tokens: TokenRules, sequences: SequenceRules) -> Columns:
        """Sum the gap of the tokens that are kept.

        k3: Σ(r − 1 − Δ), nats; ppl: exp(−mean Δ) − 1.
        """
        kept, left, _ = self.of_kept(tokens, sequences).values()
        log_ratio = self.log_ratio(policy, "rollout")
        k3, delta = (self.over(x, tokens) for x in (self.finite_k3(policy, "rollout"), log_ratio))
        mean = delta / self.xp.clip(kept, 1.0, None)
        ppl = self.xp.expm1(self.xp.clip(-mean, None, LARGEST_SUM)) * left
        return {"k3": self.product(k3, sequences), "ppl": ppl}

    @once
    def finite_k3(self, policy: Policy, anchor: Policy) -> Array:
        """Compute k3 of tokens, Δ held to 345 from above so that sums stay finite, [T] nats."""
        log_ratio = self.xp.clip(self.log_ratio(policy, anchor), None, f.LARGEST)
        return f.k3(log_ratio, self.ratio_minus_1_within(policy, anchor, f.LARGEST))

    @once
    def of_veto(self, policy: Policy, veto: Veto | None) -> Columns:
        """Count what the veto finds.

        hits: tokens beyond its bounds; vetoed: 1 where there is one.
        """
        if veto is None:
            return {"hits": self.zeros, "vetoed": self.zeros}
        hits = self.veto_hits(policy, veto)
        return {"hits": hits, "vetoed": floats(hits > 0)}

    # ------------------------------------------------------------ weights

    @once
    def of_bounds(self, policy: Policy, weight: Weight | None) -> Columns:
        """Count the weights on which a bound acts, rejected or not.

        high, low: weights above their upper bound, below their lower one; units: how many weights there are;
        bounded: weights, or tokens, on which the safety bound acts; tries: how many of those there are.
        """
        n, none = self.sequences.n, self.zeros
        if weight is None:
            return {"high": none, "low": none, "units": n, "bounded": none, "tries": n}
        (high, low), (bounded, tries) = self.truncated(policy, weight), self.held(policy, weight)
        units = n if weight.on_tokens else self.filled
        return {"high": high, "low": low, "units": units, "bounded": bounded, "tries": tries}

    @once
    def of_weights(
        self, policy: Policy, weight: Weight | None, tokens: TokenRules, sequences: SequenceRules
    ) -> Columns:
        """Sum the final weights w of kept tokens, before they are normalised.

        w, ww: Σw and Σw², exact where weights are tiny; w1, w11: Σ(w − 1) and Σ(w − 1)², exact where they are
        near 1; weighted: tokens with w ≠ 0; smallest, largest: w, ±inf without a token. Of v, the mean over
        all tokens of the sequence with 0 for rejected ones: v; vv: v²; v11: v² − 1, 0 where none is kept.
        """
        kept, left, _ = self.of_kept(tokens, sequences).values()
        if weight is not None and weight.on_tokens:
            *sums, smallest, largest = self.of_token_weights(policy, weight, tokens)
            w, ww, w1, w11, weighted = (self.product(x, sequences) for x in sums)
        elif weight is None:
            w, ww, w1, w11, weighted = kept, kept, self.zeros, self.zeros, kept
            smallest = largest = self.one
        else:  # all tokens of a sequence share its weight
            smallest = largest = of_each = self.weight(policy, weight)
            w, w1 = of_each * kept, (of_each - 1.0) * kept
            ww, w11 = of_each * w, (of_each - 1.0) * w1
            weighted = kept * floats(of_each != 0.0) if may_be_zero(weight) else kept
        found = {"w": w, "ww": ww, "w1": w1, "w11": w11, "weighted": weighted}
        v, away = w / self.sequences.at_least_1, (w1 + kept - self.sequences.n) / self.sequences.at_least_1
        found |= {"v": v, "vv": v * v, "v11": away * (away + 2.0) * left}
        ends = self.xp.where(kept > 0, smallest, INF), self.xp.where(kept > 0, largest, -INF)
        return found | {"smallest": ends[0], "largest": ends[1]}

    @once
    def of_token_weights(self, policy: Policy, weight: Weight, tokens: TokenRules) -> tuple[Array, ...]:
        """Sum weights that tokens have of their own: w, ww, w1, w11, weighted, smallest, largest."""
        every, mask, runs = self.weight(policy, weight), self.mask(tokens), self.sequences
        w, w1, smallest = self.weight_of_kept(policy, weight, tokens), every - 1.0, every
        if mask is not None:
            w1, smallest = w1 * mask, every + (1.0 - mask) * 1e300  # above every weight where it is rejected
        weighted = runs.count(w != 0.0) if may_be_zero(weight) else self.many(tokens)
        sums = runs.sum(w), runs.sum(w * w), runs.sum(w1), runs.sum(w1 * w1)
        return *sums, weighted, runs.min(smallest), runs.max(w)

    @once
    def weight_of_kept(self, policy: Policy, weight: Weight, tokens: TokenRules) -> Array:
        """Return weights of tokens, 0 of those that are rejected, [T]."""
        mask = self.mask(tokens)
        return self.weight(policy, weight) if mask is None else self.weight(policy, weight) * mask

    @once
    def over_all(self, policy: Policy, weight: Weight) -> Array:
        """Sum weights over all tokens, rejected or not."""
        w = self.weight(policy, weight)
        return self.sequences.sum(w) if weight.on_tokens else w * self.sequences.n

    def of_norm(self, policy: Policy, weight: Weight) -> Columns:
        """Sum what the mean weight of a trainer batch is made of, rejected tokens among them.

        norm: Σw over tokens, or over sequences of their mean; norm_units: how many of either there are.
        """
        every = self.over_all(policy, weight)
        if weight.over == "token":
            return {"norm": every, "norm_units": self.sequences.n}
        return {"norm": every / self.sequences.at_least_1, "norm_units": self.filled}

    # ------------------------------------------------------------ losses

    @once
    def of_losses(
        self,
        loss: PolicyLoss,
        policy: Policy,
        weight: Weight | None,
        tokens: TokenRules,
        sequences: SequenceRules,
    ) -> Columns:
        """Sum policy losses L over kept tokens; without a weight w is 1.

        loss: Σ w L; loss_mean: the same over their number; clipped, dual_clipped: tokens on which the loss's
        clip acts, and its dual clip; kl: Σ −u, u held as the loss holds it.
        """
        if weight is not None and weight.on_tokens:
            summed = self.product(self.weighted_loss(loss, policy, weight, tokens), sequences)
        else:
            summed = self.product(self.over(self.finite_loss(loss), tokens), sequences)
            summed = summed if weight is None else summed * self.weight(policy, weight)
        flags, kl = self.loss(loss), self.over(self.loss_kl(loss.anchor, loss.kl_within), tokens)
        return {
            "loss": summed,
            "loss_mean": summed / self.xp.clip(self.of_kept(tokens, sequences)["kept"], 1.0, None),
            "clipped": self.product(self.flagged(flags.clipped, tokens), sequences),
            "dual_clipped": self.product(self.flagged(flags.dual_clipped, tokens), sequences),
            "kl": self.product(kl, sequences),
        }

    @once
    def weighted_loss(self, loss: PolicyLoss, policy: Policy, weight: Weight, tokens: TokenRules) -> Array:
        """Sum w · L over tokens that pass the rules on tokens, which have weights of their own."""
        return self.sequences.sum(self.weight_of_kept(policy, weight, tokens) * self.finite_loss(loss))

    @once
    def finite_loss(self, loss: PolicyLoss) -> Array:
        """Compute a policy loss, held to the largest float64 where it overflows, [T]."""
        return self.xp.clip(self.loss(loss).value, -LARGEST, LARGEST)
