"""What presets do to each sequence: numbers [S] of its tokens, shared by presets of equal parts.

Sums over tokens multiply by a mask of 0 and 1, which is as exact as leaving tokens out: all numbers are
finite.
"""

from __future__ import annotations

from functools import cached_property

from offpol_diag.core import formulas as f
from offpol_diag.core.evaluate import INF, Evaluator, once
from offpol_diag.core.plan import Plan, PolicyLoss, SequenceMask, TokenMask, VetoBounds, Weighting
from offpol_diag.core.segments import Array, floats
from offpol_diag.number import LARGEST
from offpol_diag.presets import Policy

LARGEST_SUM = 2 * f.LARGEST
"""Largest log of a sequence's number that is exponentiated: e^690 is still a float64."""
Columns = dict[str, Array]
"""Name → a number of each sequence, [S] float64."""


class Sums(Evaluator):
    """An evaluator that adds up what it computes, by sequence."""

    def of_preset(self, preset: Plan, losses: bool) -> Columns:
        """Compute all columns of one preset; those of losses if asked for."""
        tokens, sequences, weight = preset.tokens, preset.sequences, preset.weight
        found = self.of_kept(tokens, sequences) | self.of_gap(preset.policy, tokens, sequences)
        found |= self.of_veto(sequences.veto) | self.of_bounds(weight)
        found |= self.of_weights(weight, tokens, sequences)
        if losses:
            found |= self.of_losses(preset.loss, weight if preset.weighted else None, tokens, sequences)
        return found

    # ------------------------------------------------------------ masks as numbers

    @cached_property
    def none(self) -> Array:
        """0 of each sequence."""
        return 0.0 * self.sequences.n

    @cached_property
    def one(self) -> Array:
        """1 of each sequence."""
        return self.none + 1.0

    @cached_property
    def filled(self) -> Array:
        """1 of each sequence that has a token, else 0."""
        return floats(self.sequences.filled)

    @once
    def mask(self, tokens: TokenMask) -> Array | None:
        """Return 1 for tokens that pass the rules on tokens, else 0, [T]; None without a rule."""
        passing = self.passing_tokens(tokens)
        return None if passing is None else floats(passing)

    @once
    def sequence_mask(self, sequences: SequenceMask) -> Array | None:
        """Return 1 for sequences that pass the rules on sequences and the veto, else 0; None without any."""
        passing = self.passing_sequences(sequences)
        return None if passing is None else floats(passing)

    @once
    def product(self, x: Array, sequences: SequenceMask) -> Array:
        """Return a number of each sequence, 0 where it is dropped; the array itself without a rule."""
        mask = self.sequence_mask(sequences)
        return x if mask is None else x * mask

    @once
    def over(self, x: Array, tokens: TokenMask) -> Array:
        """Sum x [T] over the tokens that pass the rules on tokens."""
        mask = self.mask(tokens)
        return self.sequences.sum(x if mask is None else x * mask)

    @once
    def flagged(self, flags: Array | None, tokens: TokenMask) -> Array:
        """Count flags [T] of tokens that pass the rules on tokens; None is no flag."""
        if flags is None:
            return self.none
        passing = self.passing_tokens(tokens)
        return self.sequences.count(flags if passing is None else flags & passing)

    # ------------------------------------------------------------ tokens that are kept

    @once
    def many(self, tokens: TokenMask) -> Array:
        """Count the tokens that pass the rules on tokens."""
        mask = self.mask(tokens)
        return self.sequences.n if mask is None else self.sequences.sum(mask)

    @once
    def of_kept(self, tokens: TokenMask, sequences: SequenceMask) -> Columns:
        """Count tokens that pass all rules and the veto.

        kept: how many; left: 1 where there is one; touched: 1 where one was rejected.
        """
        kept = self.product(self.many(tokens), sequences)
        if kept is self.sequences.n:
            return {"kept": kept, "left": self.filled, "touched": self.none}
        touched = floats(kept < self.sequences.n)
        return {"kept": kept, "left": floats(kept > 0), "touched": touched}

    @once
    def of_gap(self, policy: Policy, tokens: TokenMask, sequences: SequenceMask) -> Columns:
        """Sum the gap of the tokens that are kept.

        k3: Σ(r − 1 − Δ), nats; ppl: exp(−mean Δ) − 1.
        """
        kept, left, _ = self.of_kept(tokens, sequences).values()
        k3, delta = (self.over(x, tokens) for x in (self.finite_k3(policy), self.log_ratio(policy)))
        mean = delta / self.xp.clip(kept, 1.0, None)
        ppl = self.xp.expm1(self.xp.clip(-mean, None, LARGEST_SUM)) * left
        return {"k3": self.product(k3, sequences), "ppl": ppl}

    @once
    def finite_k3(self, policy: Policy, anchor: Policy = "rollout") -> Array:
        """Compute k3 of tokens, Δ held to 345 from above so that sums stay finite, [T] nats."""
        log_ratio = self.xp.clip(self.log_ratio(policy, anchor), None, f.LARGEST)
        return f.k3(log_ratio, self.ratio_minus_1_within(policy, f.LARGEST, anchor))

    @once
    def of_veto(self, veto: VetoBounds | None) -> Columns:
        """Count what the veto finds.

        hits: tokens beyond its bounds; vetoed: 1 where there is one.
        """
        if veto is None:
            return {"hits": self.none, "vetoed": self.none}
        hits = self.veto_hits(veto)
        return {"hits": hits, "vetoed": floats(hits > 0)}

    # ------------------------------------------------------------ weights

    @once
    def of_bounds(self, weight: Weighting | None) -> Columns:
        """Count the weights on which a bound acts, rejected or not.

        high, low: weights above their upper bound, below their lower one; units: how many weights there are;
        bounded: weights, or tokens, on which the safety bound acts; tries: how many of those there are.
        """
        n = self.sequences.n
        if weight is None:
            return {"high": self.none, "low": self.none, "units": n, "bounded": self.none, "tries": n}
        high, low = self.truncated(weight)
        return {
            "high": high,
            "low": low,
            "units": n if weight.on_tokens else self.filled,
            "bounded": self.bounded(weight),
            "tries": n if weight.safety_on_tokens else self.filled,
        }

    @once
    def of_weights(self, weight: Weighting | None, tokens: TokenMask, sequences: SequenceMask) -> Columns:
        """Sum the final weights w of kept tokens, before they are normalised.

        w, ww: Σw and Σw², exact where weights are tiny; w1, w11: Σ(w − 1) and Σ(w − 1)², exact where they are
        near 1; weighted: tokens with w ≠ 0; smallest, largest: w, ±inf without a token. Of v, the mean over
        all tokens of the sequence with 0 for rejected ones: v; vv: v²; v11: v² − 1, 0 where none is kept.
        """
        kept, left, _ = self.of_kept(tokens, sequences).values()
        if weight is not None and weight.on_tokens:
            *sums, smallest, largest = self.of_token_weights(weight, tokens)
            w, ww, w1, w11, weighted = (self.product(x, sequences) for x in sums)
        elif weight is None:
            w, ww, w1, w11, weighted = kept, kept, self.none, self.none, kept
            smallest = largest = self.one
        else:  # all tokens of a sequence share its weight
            smallest = largest = own = self.weight(weight)
            w, w1 = own * kept, (own - 1.0) * kept
            ww, w11 = own * w, (own - 1.0) * w1
            weighted = kept * floats(own != 0.0) if weight.may_be_zero else kept
        found = {"w": w, "ww": ww, "w1": w1, "w11": w11, "weighted": weighted}
        v, away = w / self.sequences.at_least_1, (w1 + kept - self.sequences.n) / self.sequences.at_least_1
        found |= {"v": v, "vv": v * v, "v11": away * (away + 2.0) * left}
        ends = self.xp.where(kept > 0, smallest, INF), self.xp.where(kept > 0, largest, -INF)
        return found | {"smallest": ends[0], "largest": ends[1]}

    @once
    def of_token_weights(self, weight: Weighting, tokens: TokenMask) -> tuple[Array, ...]:
        """Sum weights that tokens have of their own: w, ww, w1, w11, weighted, smallest, largest."""
        every, mask, runs = self.weight(weight), self.mask(tokens), self.sequences
        w, w1, smallest = self.weight_of_kept(weight, tokens), every - 1.0, every
        if mask is not None:
            w1, smallest = w1 * mask, every + (1.0 - mask) * 1e300  # above every weight where it is rejected
        weighted = runs.count(w != 0.0) if weight.may_be_zero else self.many(tokens)
        sums = runs.sum(w), runs.sum(w * w), runs.sum(w1), runs.sum(w1 * w1)
        return *sums, weighted, runs.min(smallest), runs.max(w)

    @once
    def weight_of_kept(self, weight: Weighting, tokens: TokenMask) -> Array:
        """Return weights of tokens, 0 of those that are rejected, [T]."""
        mask = self.mask(tokens)
        return self.weight(weight) if mask is None else self.weight(weight) * mask

    @once
    def over_all(self, weight: Weighting | None) -> Array:
        """Sum weights over all tokens, rejected or not."""
        if weight is None:
            return self.sequences.n
        w = self.weight(weight)
        return self.sequences.sum(w) if weight.on_tokens else w * self.sequences.n

    @once
    def of_norm(self, weight: Weighting) -> Columns:
        """Sum what the mean weight of a trainer batch is made of, rejected tokens among them.

        norm: Σw over tokens, or over sequences of their mean; norm_units: how many of either there are.
        """
        if weight.over == "token":
            return {"norm": self.over_all(weight), "norm_units": self.sequences.n}
        return {"norm": self.over_all(weight) / self.sequences.at_least_1, "norm_units": self.filled}

    # ------------------------------------------------------------ losses

    @once
    def of_losses(
        self, loss: PolicyLoss, weight: Weighting | None, tokens: TokenMask, sequences: SequenceMask
    ) -> Columns:
        """Sum policy losses L over kept tokens; without a weight w is 1.

        loss: Σ w L; loss_mean: the same over their number; clipped, dual_clipped: tokens on which the loss's
        clip acts, and its dual clip; kl: Σ −u, u held as the loss holds it.
        """
        if weight is None or weight.on_tokens:
            summed = self.product(self.of_token_losses(loss, weight, tokens), sequences)
        else:
            summed = self.product(self.of_token_losses(loss, None, tokens), sequences) * self.weight(weight)
        made, kl = self.loss(loss), self.loss_kl(loss.anchor, loss.kl_within)
        kept = self.of_kept(tokens, sequences)["kept"]
        return {
            "loss": summed,
            "loss_mean": summed / self.xp.clip(kept, 1.0, None),
            "clipped": self.product(self.flagged(made.clipped, tokens), sequences),
            "dual_clipped": self.product(self.flagged(made.dual_clipped, tokens), sequences),
            "kl": self.product(self.over(kl, tokens), sequences),
        }

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
