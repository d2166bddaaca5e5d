"""A preset as a plan of the evaluator: which weight, rules, veto and loss, with numbers for bounds.

Equal parts of presets are one object (`one_object`). So a memo compares identities, and what several presets
share is computed once per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from threading import RLock
from typing import Any, NamedTuple, TypeVar, cast

from offpol_diag.core.formulas import LARGEST
from offpol_diag.presets import AGGREGATES, FLOAT32_OVERFLOW, Clip, Policy, Preset, Reject, Veto, Weight

INF = math.inf
MOST_NATS = 709.0
"""Largest x, of whole ones, of which e^x is a float."""
WITHOUT_RATIO = frozenset({"reinforce", "surrogate"})
"""Losses without a ratio of their own: the preset's weight multiplies them for any anchor."""


_making = RLock()
Make = TypeVar("Make", bound=Callable[..., Any])


def one_object(make: Make) -> Make:
    """Return one object for equal arguments, also to threads that ask at the same time."""
    cached = cache(make)

    @wraps(make)
    def locked(*args: Any) -> Any:
        with _making:
            return cached(*args)

    return cast(Make, locked)


@dataclass(frozen=True, eq=False)
class Weighting:
    """An importance weight: r held to [lower, upper], and 0 where log r is outside [zero_below, zero_above].

    Attributes:
        policy: numerator of r.
        over: token, sum, mean or segment: what log r is of.
        on_tokens: whether tokens have weights of their own; else a sequence has one.
        early: bound of each token's log-ratio before it is aggregated; None for none.
        lower: what r is held to from below; 0 for nothing. A late safety bound is part of it.
        upper: what r is held to from above; inf for nothing.
        zero_below: log r below which the weight is 0.
        zero_above: log r above which the weight is 0.
        low: log r below which the weight counts as truncated.
        high: log r above which it does.
        safety: |log r| beyond which the safety bound acts.
        safety_on_tokens: whether it acts on tokens; else on the aggregate.
    """

    policy: Policy
    over: str
    on_tokens: bool
    early: float | None
    lower: float
    upper: float
    zero_below: float
    zero_above: float
    low: float
    high: float
    safety: float
    safety_on_tokens: bool

    @property
    def may_be_zero(self) -> bool:
        """Whether a token that no rule rejects may weigh 0."""
        return self.zero_below > -INF or self.zero_above < INF


@dataclass(frozen=True, eq=False)
class Rule:
    """A rejection rule: what is outside [lower, upper], as far as a safety bound lets it come there, fails.

    Attributes:
        policy: numerator of the ratio.
        reject: the rule of the preset.
        early: bound of each token's log-ratio before the statistic; None for none.
        late: bound of the aggregated log-ratio; None for none.
        lower: of the statistic; of `ratio` bounds are logs.
        upper: the same.
    """

    policy: Policy
    reject: Reject
    early: float | None
    late: float | None
    lower: float
    upper: float


@dataclass(frozen=True, eq=False)
class VetoBounds:
    """Bounds of a token's log r beyond which its whole sequence is dropped."""

    policy: Policy
    lower: float
    upper: float


TokenMask = tuple[Rule, ...]
"""Rules that look at tokens."""


class SequenceMask(NamedTuple):
    """Rules that look at whole sequences, and a veto."""

    rules: tuple[Rule, ...]
    veto: VetoBounds | None


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """A policy loss.

    Attributes:
        kind: as a preset names it.
        anchor: denominator of its ratio: π_old for decoupled presets, else π_rollout.
        pooled: whether all tokens of a sequence share the ratio: e to the mean of their log-ratios.
        low: bound of the ratio from below, 0 for none.
        high: from above, inf for none.
        dual: its dual clip, inf for none.
        safety: the log-ratio is held to ±safety before exp; a mean is held from above only.
        kl_within: the same of the log-ratio that is logged as ppo_kl, inf where the loss does not hold it.
    """

    kind: str
    anchor: Policy
    pooled: bool
    low: float
    high: float
    dual: float
    safety: float
    kl_within: float


@dataclass(frozen=True, eq=False)
class Plan:
    """A preset as it is evaluated.

    Attributes:
        policy: numerator of r.
        weight: its importance weight, or None.
        tokens: what decides about tokens.
        sequences: what decides about whole sequences.
        loss: its policy loss.
        weighted: whether the weight multiplies the loss: around the anchor π_rollout the loss's own ratio is
            the correction already.
    """

    policy: Policy
    weight: Weighting | None
    tokens: TokenMask
    sequences: SequenceMask
    loss: PolicyLoss
    weighted: bool


# ---------------------------------------------------------------- Presets → plans


@one_object
def plan(preset: Preset) -> Plan:
    """Return the plan of a preset."""
    policy, rules = preset.policy, [rule_of(preset.policy, reject) for reject in preset.reject]
    return Plan(
        policy,
        None if preset.weight is None else weighting(policy, preset.weight),
        tuple(one for one in rules if one.reject.on_tokens),
        SequenceMask(
            tuple(one for one in rules if not one.reject.on_tokens),
            None if preset.veto is None else veto_bounds(policy, preset.veto),
        ),
        _policy_loss(preset.loss, "old" if policy == "old" else "rollout", preset.clip),
        preset.weight is not None and weighted(preset),
    )


def weighted(preset: Preset) -> bool:
    """Return whether the preset's weight, if it has one, multiplies its loss."""
    return preset.loss in WITHOUT_RATIO or preset.policy == "old"


@one_object
def weighting(policy: Policy, weight: Weight) -> Weighting:
    """Return a weight with numbers for bounds."""
    by_token = weight.over != "token" and weight.safety_at == "token"
    early, late = (weight.safety, None) if by_token else (None, weight.safety)
    bound = INF if late is None or late > MOST_NATS else late
    lower, upper = math.exp(-bound), math.exp(bound)
    low, high = log_bounds(weight.lower, weight.upper, late)
    zero_below, zero_above = -INF, INF
    if weight.action == "truncate":  # the safety acts first
        least, most = weight.lower or 0.0, INF if weight.upper is None else weight.upper
        lower, upper = (min(max(bound, least), most) for bound in (lower, upper))
    elif weight.action == "mask":
        zero_below, zero_above = low, high
    if weight.overflow == "zero" and (weight.safety is None or weight.safety > FLOAT32_OVERFLOW):
        zero_above = min(zero_above, FLOAT32_OVERFLOW)
    safety = LARGEST if weight.safety is None else weight.safety
    safety_on_tokens = weight.on_tokens or (weight.safety_at == "token" and weight.safety is not None)
    held = lower, upper, zero_below, zero_above, low, high
    return Weighting(policy, weight.over, weight.on_tokens, early, *held, safety, safety_on_tokens)


@one_object
def rule_of(policy: Policy, reject: Reject) -> Rule:
    """Return a rejection rule with numbers for bounds."""
    of_aggregate = reject.safety_at == "aggregate" or reject.over == "token"
    late = reject.safety if reject.statistic in AGGREGATES and of_aggregate else None
    make = log_bounds if reject.statistic == "ratio" else bounds
    early = reject.safety if late is None else None
    return Rule(policy, reject, early, late, *make(reject.lower, reject.upper, late))


@one_object
def veto_bounds(policy: Policy, veto: Veto) -> VetoBounds:
    """Return a veto with numbers for bounds; no safety keeps them out of reach."""
    return VetoBounds(policy, *log_bounds(veto.lower, veto.upper))


@one_object
def _policy_loss(kind: str, anchor: Policy, clip: Clip) -> PolicyLoss:
    if kind in WITHOUT_RATIO and clip != Clip():
        return _policy_loss(kind, anchor, Clip())  # nothing is clipped: one object whatever the bounds
    pooled = kind == "gspo"
    low, high = 0.0 if clip.low is None else 1.0 - clip.low, INF if clip.high is None else 1.0 + clip.high
    dual, safety = INF if clip.dual is None else clip.dual, LARGEST if clip.safety is None else clip.safety
    held = clip.safety is not None and not pooled and kind not in WITHOUT_RATIO
    return PolicyLoss(kind, anchor, pooled, low, high, dual, safety, safety if held else INF)


# ---------------------------------------------------------------- Bounds


def bounds(lower: float | None, upper: float | None, safety: float | None = None) -> tuple[float, float]:
    """Return the numbers below and above which x, held to ±safety before, is outside; ±inf for none."""
    return reached(lower, -1, safety), reached(upper, 1, safety)


def log_bounds(lower: float | None, upper: float | None, safety: float | None = None) -> tuple[float, float]:
    """Return the same of bounds of r, as logs: nothing is below the log of 0."""
    log_lower = None if lower is None or lower <= 0 else math.log(lower)
    return bounds(log_lower, None if upper is None else math.log(upper), safety)


def reached(bound: float | None, sign: int, safety: float | None) -> float:
    """Return the number beyond which x, held to ±safety, is outside; sign is 1 for an upper bound.

    A bound that is not within the safety is never exceeded, and one beyond the other end always is.
    """
    if bound is None:
        return sign * INF
    reach = INF if safety is None else safety
    if sign * bound >= reach:
        return sign * INF
    return -sign * INF if sign * bound < -reach else bound
