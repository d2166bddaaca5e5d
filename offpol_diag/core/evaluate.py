"""Weights, statistics, rules, masks, vetoes and losses of presets on packed tokens, each computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

from offpol_diag.core import formulas as f
from offpol_diag.core.formulas import Loss
from offpol_diag.core.plan import PolicyLoss, Rule, SequenceMask, TokenMask, VetoBounds, Weighting
from offpol_diag.core.segments import Array, Segments, floats, namespace
from offpol_diag.presets import OF_SEQUENCES, Policy, Statistic

INF = math.inf
Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """Compute a method of an evaluator once per arguments, given by position; an array stands for itself."""
    defaults = method.__defaults__ or ()
    most = method.__code__.co_argcount - 1

    @wraps(method)
    def cached(self: Evaluator, *args: Any) -> Any:
        args += defaults[len(defaults) - most + len(args) :]
        key = method, *[id(one) if type(one).__hash__ is None else one for one in args]
        if key not in self.known:
            self.known[key] = method(self, *args), args  # holds the arrays, so that no other gets their id
        return self.known[key][0]

    return cast(Method, cached)


@dataclass(eq=False)
class Evaluator:
    """Applies presets to T tokens of S sequences, packed: on a GPU where the tensors lie there.

    A number of each token is [T], of each sequence [S], in float64. Nothing makes the host wait for a GPU.

    Attributes:
        log_probs: policy → log-probs of the sampled tokens, [T] nats.
        sequences: the sequences.
        turns: the turns, each within a sequence.
        advantages: [T]; None without.
        cut: rule over a trainer batch and its statistic [T] → the value from which on tokens are dropped.
        known: what was computed so far.
    """

    log_probs: Mapping[Policy, Array]
    sequences: Segments
    turns: Segments
    advantages: Array | None = None
    cut: Callable[[Rule, Array], Array] | None = None
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Choose numpy or torch by the arrays."""
        self.xp = namespace(self.log_probs["rollout"])

    # ------------------------------------------------------------ log-ratios and statistics

    @once
    def log_ratio(self, policy: Policy, anchor: Policy = "rollout") -> Array:
        """Compute Δ = log π − log π_anchor, [T] nats."""
        return self.log_probs[policy] - self.log_probs[anchor]

    @once
    def log_ratio_within(self, policy: Policy, bound: float | None) -> Array:
        """Compute Δ held to ±bound, [T] nats."""
        log_ratio = self.log_ratio(policy)
        return log_ratio if bound is None else self.xp.clip(log_ratio, -bound, bound)

    @once
    def ratio_minus_1(self, policy: Policy, anchor: Policy = "rollout") -> Array:
        """Compute r − 1 without cancellation, [T]."""
        return self.xp.expm1(self.log_ratio(policy, anchor))

    @once
    def ratio_minus_1_within(self, policy: Policy, bound: float | None, anchor: Policy = "rollout") -> Array:
        """Compute r − 1 of Δ held to ±bound, [T]."""
        every = self.ratio_minus_1(policy, anchor)
        return every if bound is None else self.xp.clip(every, math.expm1(-bound), math.expm1(bound))

    @once
    def statistic(self, name: Statistic, policy: Policy, bound: float | None) -> Array:
        """Compute a rule's statistic of tokens, Δ held to ±bound, [T]; of `ratio` its log."""
        log_ratio, log_rollout = self.log_ratio_within(policy, bound), self.log_probs["rollout"]
        match name:
            case "ratio":
                return log_ratio
            case "k1":
                return f.k1(log_ratio)
            case "k2":
                return f.k2(log_ratio)
            case "k3":
                return f.k3(log_ratio, self.ratio_minus_1_within(policy, bound))
            case "k3_reverse":
                return f.k3_reverse(log_ratio)
            case "tv":
                return f.total_variation(self.ratio_minus_1_within(policy, bound))
            case "mult_prob_error":
                return f.ratio_either_way(log_ratio)
            case "prob_diff":
                log_train = self.log_probs[policy] if bound is None else log_rollout + log_ratio
                return f.probability_difference(log_train, log_rollout)
            case "binary_kl":
                return f.binary_kl(log_ratio, log_rollout)
            case "binary_kl_max":
                return f.binary_kl_larger(log_ratio, log_rollout)

    @once
    def aggregate(self, name: Statistic, policy: Policy, over: str, bound: float | None) -> Array:
        """Aggregate a statistic: to sequences [S] where `over` is in `OF_SEQUENCES`, else to tokens [T]."""
        x = self.statistic(name, policy, bound)
        match over:
            case "segment":
                return self.turns.spread(self.turns.mean(x))
            case "sum":
                return self.sequences.sum(x)
            case "mean":
                return self.aggregate(name, policy, "sum", bound) / self.sequences.at_least_1
            case "max":
                return self.xp.where(self.sequences.filled, self.sequences.max(x), 0.0)
            case "min":
                return self.xp.where(self.sequences.filled, self.sequences.min(x), 0.0)
            case _:
                return x

    # ------------------------------------------------------------ rules, veto, masks

    def judged(self, rule: Rule) -> Array:
        """Compute what a rule compares with its bounds, within its safety: of tokens or of sequences."""
        x = self.aggregate(rule.reject.statistic, rule.policy, rule.reject.over, rule.early)
        return x if rule.late is None else self.xp.clip(x, -rule.late, rule.late)

    @once
    def passes(self, rule: Rule) -> Array:
        """Flag the tokens [T], or the sequences [S] unless `reject.on_tokens`, that pass a rule."""
        reject = rule.reject
        x = self.aggregate(reject.statistic, rule.policy, reject.over, rule.early)
        if reject.over == "batch":
            assert self.cut is not None
            return x < self.cut(rule, x)
        if reject.on_tokens and reject.over in OF_SEQUENCES:
            x = self.sequences.spread(x)
        if reject.advantage == "any":
            return ~f.outside(x, rule.lower, rule.upper)
        assert self.advantages is not None
        advantage = self.advantages if reject.on_tokens else self.sequences.mean(self.advantages)
        match reject.advantage:
            case "negative":
                above = below = advantage < 0
            case "positive":
                above = below = advantage > 0
            case "against":
                above, below = advantage > 0, advantage < 0
            case "against_or_zero":
                above, below = advantage > 0, advantage <= 0
            case "away":  # the update pushes r further from 1
                above = below = advantage * self.log_ratio(rule.policy) > 0
        return ~(((x > rule.upper) & above) | ((x < rule.lower) & below))

    @once
    def veto_hits(self, veto: VetoBounds) -> Array:
        """Count the tokens of each sequence whose log r is beyond a veto's bounds, [S]."""
        return self.sequences.count(f.outside(self.log_ratio(veto.policy), veto.lower, veto.upper))

    @once
    def passing_tokens(self, mask: TokenMask) -> Array | None:
        """Flag the tokens that pass the rules on tokens, [T]; None without a rule."""
        return _all(self.passes(rule) for rule in mask)

    @once
    def passing_sequences(self, mask: SequenceMask) -> Array | None:
        """Flag the sequences that pass the rules on sequences and the veto, [S]; None without either."""
        parts = [self.passes(rule) for rule in mask.rules]
        return _all(parts if mask.veto is None else [*parts, self.veto_hits(mask.veto) == 0])

    @once
    def kept(self, tokens: TokenMask, sequences: SequenceMask) -> Array:
        """Flag the tokens that pass all rules, in sequences that the veto leaves, [T]."""
        passing, left = self.passing_tokens(tokens), self.passing_sequences(sequences)
        parts = [passing, None if left is None else self.sequences.spread(left)]
        every = _all(part for part in parts if part is not None)
        return self.log_probs["rollout"] == self.log_probs["rollout"] if every is None else every

    # ------------------------------------------------------------ weights

    def log_weight(self, weight: Weighting) -> Array:
        """Compute the log r that a weight is made of, of tokens [T] or sequences [S]; nats."""
        return self.aggregate("ratio", weight.policy, weight.over, weight.early)

    @once
    def ratio(self, policy: Policy, over: str, early: float | None) -> Array:
        """Compute r of tokens [T] or sequences [S]."""
        if over == "segment":
            mean = self.turns.mean(self.log_ratio_within(policy, early))
            return self.turns.spread(f.importance_ratio(mean))
        return f.importance_ratio(self.aggregate("ratio", policy, over, early))

    @once
    def weight(self, weight: Weighting) -> Array:
        """Compute weights before rejection, not normalised: of tokens [T], or of sequences [S]."""
        w = self.ratio(weight.policy, weight.over, weight.early)
        if weight.lower > 0 or weight.upper < INF:
            w = f.truncate(w, weight.lower, weight.upper)
        if not weight.may_be_zero:
            return w
        return f.mask_outside(w, self.log_weight(weight), weight.zero_below, weight.zero_above)

    @once
    def truncated(self, weight: Weighting) -> tuple[Array, Array]:
        """Count the weights above their upper bound, and those below the lower one, [S] each.

        A sequence's weight counts 1, a turn's as often as the turn has tokens.
        """
        log_weight = self.log_weight(weight)
        return (
            self._beyond(log_weight, -INF, weight.high, weight.on_tokens),
            self._beyond(log_weight, weight.low, INF, weight.on_tokens),
        )

    @once
    def bounded(self, weight: Weighting) -> Array:
        """Count the weights, or tokens if `safety_on_tokens`, on which the safety bound acts, [S]."""
        early = weight.early is not None
        x = self.log_ratio(weight.policy) if early else self.log_weight(weight)
        return self._beyond(x, -weight.safety, weight.safety, weight.safety_on_tokens)

    def _beyond(self, x: Array, lower: float, upper: float, of_tokens: bool) -> Array:
        """Count what is outside, of tokens [T] or sequences [S] with one: [S]."""
        if lower == -INF and upper == INF:
            return 0.0 * self.sequences.n
        flags = f.outside(x, lower, upper)
        return self.sequences.count(flags) if of_tokens else floats(flags & self.sequences.filled)

    # ------------------------------------------------------------ policy losses

    @once
    def loss_ratio(self, anchor: Policy, pooled: bool, safety: float) -> Array:
        """Compute r = e^u of u = log π_θ − log π_anchor, [T], held to ±safety.

        Of `pooled` it is e to the sequence's mean of u.
        """
        u = self.log_ratio("current", anchor)
        if pooled:  # the mean is held from above only
            return self.sequences.spread(
                f.importance_ratio(self.xp.clip(self.sequences.mean(u), None, safety))
            )
        return f.importance_ratio(self.xp.clip(u, -safety, safety))

    @once
    def loss(self, loss: PolicyLoss) -> Loss:
        """Compute a policy loss of tokens, before weight and mask."""
        advantage: Array = self.advantages
        log_prob = self.log_probs["current"]
        if loss.kind == "surrogate":
            return Loss(-advantage)
        if loss.kind == "reinforce":
            return Loss(f.reinforce(advantage, log_prob))
        ratio = self.loss_ratio(loss.anchor, loss.pooled, loss.safety)
        if loss.kind == "cispo":
            return f.cispo(advantage, log_prob, ratio, loss.low, loss.high)
        return f.ppo_clip(advantage, ratio, loss.low, loss.high, loss.dual)

    @once
    def loss_kl(self, anchor: Policy, within: float) -> Array:
        """Compute −u as the loss bounds it, [T] nats."""
        return f.loss_kl(self.log_ratio("current", anchor), within)


def _all(flags: Any) -> Array | None:
    """Return where all of several arrays of flags are set; None of none."""
    result = None
    for one in flags:
        result = one if result is None else result & one
    return result
