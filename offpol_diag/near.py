"""Near tokens: so close to on-policy that no rule on tokens and no bound on token weights can act on them.

Nearly all tokens of a dump are near for nearly every preset. There a preset is the same as one without rules
and bounds, so that the sums are taken once for all presets; only the few others are looked at preset by
preset. What acts on all near tokens of a turn, or of one sign of A, alike multiplies their sums (`cells.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from offpol_diag.correction import by_turn
from offpol_diag.losses import LOSSES
from offpol_diag.moments import AWAY, TOWARD
from offpol_diag.presets import Clip, Policy, Preset, Reject, Veto, Weight

RADII = (0.5, 0.2, 0.15, 0.09, 0.05, 0.03)
"""Candidates for the largest |Δ| of a near token, nats."""

FREE = Weight(over="token", action="none", upper=None, lower=None, safety=None)
"""The token weight that is r itself."""
UNCLIPPED = Clip(low=None, high=None, dual=None, safety=None)

ROUNDING = 1.01
"""A logged rollout probability may exceed 1 by what rounding leaves; this is more."""

SPANS: dict[str, Callable[[float], tuple[float, float]]] = {
    "ratio": lambda a: (-a, a),
    "k1": lambda a: (-a, a),
    "k2": lambda a: (0.0, a * a / 2),
    "k3": lambda a: (0.0, math.expm1(a) - a),
    "k3_reverse": lambda a: (0.0, math.expm1(a) - a),
    "mult_prob_error": lambda a: (1.0, math.exp(a)),
    "prob_diff": lambda a: (ROUNDING * math.expm1(-a), ROUNDING * math.expm1(a)),
    "tv": lambda a: (0.0, math.expm1(a) / 2),
}
"""Between what a token's statistic lies when |Δ| <= a; without a row (binary_kl: at π_train = 1 it is large
however small Δ is) it may be anything.
"""


@dataclass(frozen=True)
class Near:
    """What makes a token near, for some presets.

    Attributes:
        radius: the largest |Δ| between any two policies, nats.
        rules: rules whose reach |Δ| does not tell, each with its numerator: a token that one of them drops is
            far.
        tails: smoothed token weights, each with its numerator: a token in the tail is far.
        parted: presets for which near tokens of a sequence may differ, by turn or by the sign of A.
    """

    radius: float
    rules: tuple[tuple[Policy, Reject], ...] = ()
    tails: tuple[tuple[Policy, Weight], ...] = ()
    parted: tuple[Preset, ...] = ()

    def divides(self, preset: Preset) -> bool:
        """Whether near tokens are looked at apart, by sequence or, for those of `parted`, finer."""
        return splits(preset, self.radius) or preset in self.parted

    def leaves(self, preset: Preset) -> bool:
        """Whether rules on tokens and the veto of a preset drop no near token."""
        rules = all(
            _rule_idle(rule, self.radius) or (rule.policy or preset.policy, rule) in self.rules
            for rule in preset.reject
        )
        return rules and _veto_idle(preset.veto, self.radius)

    @classmethod
    def of(cls, presets: Sequence[Preset]) -> Near:
        """With the largest of `RADII` at which as many presets can be split as at the smallest."""
        applied = [preset if preset.apply else replace(preset, weight=None, reject=()) for preset in presets]
        most = sum(divides(preset, RADII[-1]) for preset in applied)
        a = next(a for a in RADII if sum(divides(preset, a) for preset in applied) == most)
        split = [preset for preset in applied if divides(preset, a)]
        rules = ((rule.policy or p.policy, rule) for p in split for rule in p.reject if _watched(rule))
        tails = ((p.policy, p.weight) for p in split if p.weight and _smoothed(p.weight))
        return cls(
            a,
            tuple(dict.fromkeys(rules)),
            tuple(dict.fromkeys(tails)),
            tuple(preset for preset in split if not splits(preset, a)),
        )


@cache
def splits(preset: Preset, a: float) -> bool:
    """Whether near tokens, with |Δ| within ±a, are all alike for a preset (given what `Near` watches)."""
    parted = preset.apply and (by_turn(preset.weight) or any(map(on_turns, preset.reject)))
    return divides(preset, a) and not parted


@cache
def divides(preset: Preset, a: float) -> bool:
    """Whether near tokens of a sequence are alike but for their turn and the sign of A."""
    if not preset.apply:
        return _clip_idle(preset, a)
    rules = all(_rule_idle(rule, a) or _watched(rule) or on_turns(rule) for rule in preset.reject)
    weight = by_turn(preset.weight) or _weight_idle(preset.weight, a)
    return rules and weight and bool(signs(preset)) and _veto_idle(preset.veto, a) and _clip_idle(preset, a)


def on_turns(rule: Reject) -> bool:
    """Whether a rule judges a turn or a sequence and drops its tokens, or those with some sign of A.

    So many may fail that they are not watched.
    """
    return rule.on_tokens and rule.over not in ("token", "batch") and not _watched(rule)


def signs(preset: Preset) -> tuple[str, ...]:
    """Which signs (`Moments.sign`) part near tokens for rules on turns or sequences; none: too many."""
    asked = {
        AWAY + (rule.policy or preset.policy) if rule.advantage == "away" else "A"
        for rule in preset.reject
        if on_turns(rule) and rule.advantage != "any"
    }
    if not asked:
        return ("",)
    if asked == {"A"}:
        return ("1+", "1-", "1=")
    (one, *more) = asked
    return () if more or one == "A" else (one, one.replace(AWAY, TOWARD))


@cache
def neutral(preset: Preset) -> Preset:
    """The preset as near tokens see it: equal for all that split, of one numerator, loss and kind of weight.

    A sequence's weight and what drops whole sequences multiply the sums afterwards.
    """
    on_tokens = preset.apply and preset.weight is not None and preset.weight.over == "token"
    clip = preset.clip if LOSSES[preset.loss].pooled else UNCLIPPED
    return Preset("", "", preset.policy, FREE if on_tokens else None, (), None, preset.loss, clip)


def _rule_idle(rule: Reject, a: float) -> bool:
    """Rules on sequences are no matter of single tokens; of the others |Δ| must tell."""
    if not rule.on_tokens:
        return True
    if rule.over != "token" or rule.statistic not in SPANS:
        return False
    low, high = SPANS[rule.statistic](a)
    lower, upper = (_edge(bound, rule.statistic) for bound in (rule.lower, rule.upper))
    return (lower is None or lower < low) and (upper is None or upper > high)


def _watched(rule: Reject) -> bool:
    """Whether a rule on tokens is looked at by itself, since |Δ| does not say where it acts.

    A rule whose bounds are tighter than any radius is not: nearly all tokens might be far.
    """
    if rule.among != "all" or not rule.on_tokens:
        return False
    return rule.over in ("segment", "batch") or (rule.over == "token" and rule.statistic not in SPANS)


def _edge(bound: float | None, statistic: str) -> float | None:
    if bound is None or statistic != "ratio":
        return bound
    return math.log(bound) if bound > 0 else -math.inf


def _weight_idle(weight: Weight | None, a: float) -> bool:
    if weight is None:
        return True
    if weight.over != "token":
        return weight.over != "segment"
    return (weight.safety is None or weight.safety > a) and _outside(weight.lower, weight.upper, a)


def _smoothed(weight: Weight) -> bool:
    return weight.over == "token" and weight.action == "psis"


def _veto_idle(veto: Veto | None, a: float) -> bool:
    return veto is None or _outside(veto.lower, veto.upper, a)


def _clip_idle(preset: Preset, a: float) -> bool:
    """Losses without a ratio have no clip; a pooled one is about sequences."""
    if preset.loss in ("reinforce", "surrogate") or LOSSES[preset.loss].pooled:
        return True
    clip = preset.clip
    low, high = None if clip.low is None else 1 - clip.low, None if clip.high is None else 1 + clip.high
    bounded = clip.safety is None or clip.safety > a
    return bounded and _outside(low, high, a) and _outside(None, clip.dual, a)


def _outside(lower: float | None, upper: float | None, a: float) -> bool:
    """Whether bounds on r leave every |Δ| <= a alone."""
    above = upper is None or (upper > 0 and math.log(upper) > a)
    return above and (lower is None or lower <= 0 or math.log(lower) < -a)
