"""Weights, statistics, rules, masks, vetoes and losses of presets on packed tokens, each computed once.

Methods take the parts of a preset (`presets.Weight`, `Reject`, `Veto`, `Clip`) with the numerator of their
ratio. Parts are compared by value, so that what presets have in common is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar, cast

from offpol_diag.core import formulas as f
from offpol_diag.core.segments import Array, Segments, floats, namespace
from offpol_diag.presets import (
    AGGREGATES,
    FLOAT32_OVERFLOW,
    OF_SEQUENCES,
    Clip,
    Loss,
    Policy,
    Preset,
    Reject,
    Statistic,
    Veto,
    Weight,
)

INF = math.inf
Method = TypeVar("Method", bound=Callable[..., Any])

# ---------------------------------------------------------------- parts of presets


class Rule(NamedTuple):
    """A rejection rule, and the numerator of its ratio."""

    policy: Policy
    reject: Reject


TokenRules = tuple[Rule, ...]
"""Rules that reject tokens one by one."""


class SequenceRules(NamedTuple):
    """Rules that drop whole sequences, and a veto with the numerator of its ratio."""

    rules: tuple[Rule, ...]
    veto: tuple[Policy, Veto] | None


class PolicyLoss(NamedTuple):
    """A policy loss with numbers for all bounds; u = log π_θ − log π_anchor of a token."""

    kind: Loss
    anchor: Policy
    pooled: bool  # whether all tokens of a sequence share the ratio: e to the mean of their u
    low: float  # bound of the ratio from below, 0 for none
    high: float  # from above, inf for none
    dual: float  # its dual clip, inf for none
    safety: float  # u is clipped to ±safety before exp; a mean of u from above only
    kl_within: float  # bound on the u that is logged as ppo_kl, inf if the loss has none


def rules_of(preset: Preset) -> tuple[TokenRules, SequenceRules]:
    """Return what rejects tokens, and what drops whole sequences."""
    rules = [Rule(preset.policy, reject) for reject in preset.reject]
    on_tokens = tuple(rule for rule in rules if rule.reject.on_tokens)
    on_sequences = tuple(rule for rule in rules if not rule.reject.on_tokens)
    veto = None if preset.veto is None else (preset.policy, preset.veto)
    return on_tokens, SequenceRules(on_sequences, veto)


WITHOUT_RATIO = frozenset({"reinforce", "surrogate"})
"""Losses without a ratio of their own: there is nothing to clip."""


def loss_of(preset: Preset) -> PolicyLoss:
    """Return the loss; its anchor is π_old for decoupled presets, else π_rollout."""
    without, pooled = preset.loss in WITHOUT_RATIO, preset.loss == "gspo"
    clip = (
        Clip() if without else preset.clip
    )  # they ignore its bounds, so presets that differ there share one loss
    return PolicyLoss(
        preset.loss,
        "old" if preset.policy == "old" else "rollout",
        pooled,
        low=0.0 if clip.low is None else 1.0 - clip.low,
        high=INF if clip.high is None else 1.0 + clip.high,
        dual=INF if clip.dual is None else clip.dual,
        safety=f.LARGEST if clip.safety is None else clip.safety,
        kl_within=INF if clip.safety is None or pooled or without else clip.safety,
    )


def multiplies_loss(preset: Preset) -> bool:
    """Return whether a weight multiplies the loss: around π_rollout its own ratio is the correction."""
    return preset.loss in WITHOUT_RATIO or preset.policy == "old"


def may_be_zero(weight: Weight) -> bool:
    """Return whether a token that no rule rejects may weigh 0."""
    return weight.action == "mask" or weight.overflow == "zero"


def bounds(part: Weight | Reject | Veto) -> tuple[float, float]:
    """Return the bounds of a part, ±inf for none: of a statistic, or the logs of bounds of r."""
    lower = -INF if part.lower is None else part.lower
    upper = INF if part.upper is None else part.upper
    if isinstance(part, Reject) and part.statistic != "ratio":
        return lower, upper
    return math.log(lower) if lower > 0 else -INF, math.log(upper)


# ---------------------------------------------------------------- the evaluator


def once(method: Method) -> Method:
    """Compute a method once for equal arguments, given by position; an array equals itself only."""

    @wraps(method)
    def cached(self: Evaluator, *args: Any) -> Any:
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

    @cached_property
    def zeros(self) -> Array:
        """0 of each sequence, [S]."""
        return 0.0 * self.sequences.n

    @cached_property
    def filled(self) -> Array:
        """1 of each sequence that has a token, else 0, [S]."""
        return floats(self.sequences.filled)

    # ------------------------------------------------------------ log-ratios and statistics

    @once
    def log_ratio(self, policy: Policy, anchor: Policy) -> Array:
        """Compute Δ = log π − log π_anchor, [T] nats."""
        return self.log_probs[policy] - self.log_probs[anchor]

    @once
    def ratio_minus_1(self, policy: Policy, anchor: Policy) -> Array:
        """Compute r − 1 without cancellation, [T]."""
        return self.xp.expm1(self.log_ratio(policy, anchor))

    @once
    def ratio_minus_1_within(self, policy: Policy, anchor: Policy, bound: float | None) -> Array:
        """Compute r − 1 of Δ held to ±bound, [T]."""
        every = self.ratio_minus_1(policy, anchor)
        return every if bound is None else self.xp.clip(every, math.expm1(-bound), math.expm1(bound))

    @once
    def statistic(self, name: Statistic, policy: Policy, bound: float | None) -> Array:
        """Compute a rule's statistic of tokens, Δ held to ±bound, [T]; of `ratio` its log."""
        log_ratio, log_rollout = self.log_ratio(policy, "rollout"), self.log_probs["rollout"]
        log_train = self.log_probs[policy]
        if bound is not None:
            log_ratio = self.xp.clip(log_ratio, -bound, bound)
            log_train = log_rollout + log_ratio
        match name:
            case "ratio":
                return log_ratio
            case "k1":
                return f.k1(log_ratio)
            case "k2":
                return f.k2(log_ratio)
            case "k3":
                return f.k3(log_ratio, self.ratio_minus_1_within(policy, "rollout", bound))
            case "k3_reverse":
                return f.k3_reverse(log_ratio)
            case "tv":
                return f.total_variation(self.ratio_minus_1_within(policy, "rollout", bound))
            case "mult_prob_error":
                return f.ratio_either_way(log_ratio)
            case "prob_diff":
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

    @once
    def aggregate_within(
        self, name: Statistic, policy: Policy, over: str, safety: float | None, safety_at: str
    ) -> Array:
        """Aggregate a statistic, held by a safety bound on each token's Δ or on the aggregated log-ratio."""
        if safety is None or name not in AGGREGATES or (safety_at == "token" and over != "token"):
            return self.aggregate(name, policy, over, safety)
        return self.xp.clip(self.aggregate(name, policy, over, None), -safety, safety)

    # ------------------------------------------------------------ rules, veto, masks

    def judged(self, rule: Rule) -> Array:
        """Compute what a rule compares with its bounds: of tokens [T] or of sequences [S]."""
        policy, reject = rule
        return self.aggregate_within(reject.statistic, policy, reject.over, reject.safety, reject.safety_at)

    @once
    def passes(self, rule: Rule) -> Array:
        """Flag the tokens [T], or the sequences [S] unless `reject.on_tokens`, that pass a rule."""
        reject, x, (lower, upper) = rule.reject, self.judged(rule), bounds(rule.reject)
        if reject.over == "batch":
            assert self.cut is not None
            return x < self.cut(rule, x)
        if reject.on_tokens and reject.over in OF_SEQUENCES:
            x = self.sequences.spread(x)
        if reject.advantage == "any":
            return ~f.outside(x, lower, upper)
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
                above = below = advantage * self.log_ratio(rule.policy, "rollout") > 0
        return ~(((x > upper) & above) | ((x < lower) & below))

    @once
    def veto_hits(self, policy: Policy, veto: Veto) -> Array:
        """Count the tokens of each sequence whose r is beyond a veto's bounds, whatever bounds Δ, [S]."""
        return self.sequences.count(f.outside(self.log_ratio(policy, "rollout"), *bounds(veto)))

    @once
    def passing_tokens(self, tokens: TokenRules) -> Array | None:
        """Flag the tokens that pass the rules on tokens, [T]; None without a rule."""
        return _all(self.passes(rule) for rule in tokens)

    @once
    def passing_sequences(self, sequences: SequenceRules) -> Array | None:
        """Flag the sequences that pass the rules on sequences and the veto, [S]; None without either."""
        passing = [self.passes(rule) for rule in sequences.rules]
        return _all(passing if sequences.veto is None else [*passing, self.veto_hits(*sequences.veto) == 0])

    @once
    def kept(self, tokens: TokenRules, sequences: SequenceRules) -> Array:
        """Flag the tokens that pass all rules, in sequences that pass theirs and the veto, [T]."""
        passing, left = self.passing_tokens(tokens), self.passing_sequences(sequences)
        if left is not None:
            left = self.sequences.spread(left)
            return left if passing is None else passing & left
        return self.xp.ones_like(self.log_probs["rollout"]) > 0 if passing is None else passing

    # ------------------------------------------------------------ weights

    def log_weight(self, policy: Policy, weight: Weight) -> Array:
        """Compute the log r that a weight is made of, of tokens [T] or sequences [S]; nats."""
        return self.aggregate_within("ratio", policy, weight.over, weight.safety, weight.safety_at)

    @once
    def ratio(self, policy: Policy, over: str, safety: float | None, safety_at: str) -> Array:
        """Compute r of tokens [T] or sequences [S], held to e^±safety; an aggregate is exponentiated once."""
        if safety is None or (safety_at == "token" and over != "token"):
            return f.importance_ratio(self.aggregate("ratio", policy, over, safety))
        bound = min(safety, f.LARGEST)
        return f.truncate(self.ratio(policy, over, None, safety_at), math.exp(-bound), math.exp(bound))

    @once
    def weight(self, policy: Policy, weight: Weight) -> Array:
        """Compute weights before rejection, not normalised: of tokens [T], or of sequences [S]."""
        w = self.ratio(policy, weight.over, weight.safety, weight.safety_at)
        if weight.action == "truncate":
            w = f.truncate(w, weight.lower or 0.0, INF if weight.upper is None else weight.upper)
        if not may_be_zero(weight):
            return w
        lower, upper = bounds(weight) if weight.action == "mask" else (-INF, INF)
        if weight.overflow == "zero" and (weight.safety is None or weight.safety > FLOAT32_OVERFLOW):
            upper = min(upper, FLOAT32_OVERFLOW)
        return f.mask_outside(w, self.log_weight(policy, weight), lower, upper)

    @once
    def truncated(self, policy: Policy, weight: Weight) -> tuple[Array, Array]:
        """Count the weights above their upper bound, and those below the lower one, [S] each.

        A sequence's weight counts 1, a turn's as often as the turn has tokens.
        """
        log_weight, (lower, upper) = self.log_weight(policy, weight), bounds(weight)
        return (
            self._beyond(log_weight, -INF, upper, weight.on_tokens),
            self._beyond(log_weight, lower, INF, weight.on_tokens),
        )

    @once
    def held(self, policy: Policy, weight: Weight) -> tuple[Array, Array]:
        """Count the weights, or tokens, that the safety bound changes, and out of how many, [S] each.

        Without one the bound is the largest |log r| that is exponentiated.
        """
        by_token = weight.safety_at == "token" and weight.safety is not None
        x = self.aggregate("ratio", policy, "token" if by_token else weight.over, None)
        safety, of_tokens = (
            f.LARGEST if weight.safety is None else weight.safety,
            by_token or weight.on_tokens,
        )
        return self._beyond(x, -safety, safety, of_tokens), self.sequences.n if of_tokens else self.filled

    def _beyond(self, x: Array, lower: float, upper: float, of_tokens: bool) -> Array:
        """Count what is outside, of tokens [T] or sequences [S] with one: [S]."""
        if lower == -INF and upper == INF:
            return self.zeros
        flags = f.outside(x, lower, upper)
        return self.sequences.count(flags) if of_tokens else floats(flags & self.sequences.filled)

    # ------------------------------------------------------------ policy losses

    @once
    def loss_ratio(self, anchor: Policy, pooled: bool, safety: float) -> Array:
        """Compute r = e^u of u = log π_θ − log π_anchor, [T], held to ±safety.

        With `pooled` it is e to the sequence's mean of u, which is clipped from above only.
        """
        u = self.log_ratio("current", anchor)
        if pooled:
            mean = self.xp.clip(self.sequences.mean(u), None, safety)
            return self.sequences.spread(f.importance_ratio(mean))
        return f.importance_ratio(self.xp.clip(u, -safety, safety))

    @once
    def loss(self, loss: PolicyLoss) -> f.Loss:
        """Compute a policy loss of tokens, before weight and mask."""
        advantage: Array = self.advantages
        log_prob = self.log_probs["current"]
        if loss.kind == "surrogate":
            return f.Loss(-advantage)
        if loss.kind == "reinforce":
            return f.Loss(f.reinforce(advantage, log_prob))
        ratio = self.loss_ratio(loss.anchor, loss.pooled, loss.safety)
        if loss.kind == "cispo":
            return f.cispo(advantage, log_prob, ratio, loss.low, loss.high)
        return f.ppo_clip(advantage, ratio, loss.low, loss.high, loss.dual)

    @once
    def loss_kl(self, anchor: Policy, bound: float) -> Array:
        """Compute −u held to ±bound, [T] nats: what verl logs as ppo_kl."""
        return f.k1(self.xp.clip(self.log_ratio("current", anchor), -bound, bound))


def _all(flags: Iterable[Array]) -> Array | None:
    """Return where all of several arrays of flags are set; None of none."""
    result = None
    for one in flags:
        result = one if result is None else result & one
    return result
