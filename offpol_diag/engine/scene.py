"""One batch with its bootstrap draws, log-ratios computed once, and its split into near and far tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag.batch import Batch, places
from offpol_diag.engine import accumulators, correction
from offpol_diag.engine.correction import by_turn
from offpol_diag.engine.losses import LOSSES, linear
from offpol_diag.engine.moments import DIRECTIONS, Moments
from offpol_diag.engine.ratios import Ratios, Split
from offpol_diag.engine.scope import NO_FITS, BatchFits
from offpol_diag.engine.segments import Memo
from offpol_diag.presets import Clip, Policy, Preset, Reject, Shape, Veto, Weight

RADII = (0.5, 0.2, 0.15, 0.09, 0.05, 0.03)
"""Candidates for the largest |Δ| of a near token, nats."""

FREE = Weight(over="token", action="none", upper=None, lower=None, safety=None)
"""The token weight r, without bounds."""
UNCLIPPED = Clip(low=None, high=None, dual=None, safety=None)

ROUNDING = 1.01
"""Upper limit of a logged rollout probability: rounding may raise it above 1, by less than this."""

SAMPLED = 16
"""Distance of the tokens from which the share of far ones is estimated."""

SPANS: dict[str, Callable[[float], tuple[float, float]]] = {
    "ratio": lambda a: (-a, a),
    "k1": lambda a: (-a, a),
    "k2": lambda a: (0.0, a * a / 2),
    "k3": lambda a: (0.0, math.expm1(a) - a),
    "k3_reverse": lambda a: (0.0, math.expm1(a) - a),
    "mult_prob_error": lambda a: (1.0, math.exp(a)),
    "prob_diff": lambda a: (ROUNDING * math.expm1(-a), ROUNDING * math.expm1(a)),
    "prob_gap": lambda a: (0.0, ROUNDING * math.expm1(a)),
    "tv": lambda a: (0.0, math.expm1(a) / 2),
}
"""Statistic → the range of a token's value when |Δ| <= a. Statistics without an entry have no such range
(`BINARY`: at π_train = 1 it is large however small Δ is).
"""


@dataclass(frozen=True)
class Nearness:
    """Conditions under which a token is near, for some presets.

    Attributes:
        radius: largest |Δ| between any two policies of a near token, nats.
        rules: rules whose effect does not follow from |Δ|, each with its numerator: tokens that one of them
            drops are far.
        tails: Pareto-smoothed token weights, each with its numerator: tokens in the tail are far.
        parted: presets that treat near tokens of a sequence differently by turn or by the sign of A.
    """

    radius: float
    rules: tuple[tuple[Policy, Reject], ...] = ()
    tails: tuple[tuple[Policy, Weight], ...] = ()
    parted: tuple[Preset, ...] = ()

    def divides(self, preset: Preset) -> bool:
        """Return whether a preset's near tokens are processed separately from its far ones."""
        return splits(preset, self.radius) or preset in self.parted

    def leaves(self, preset: Preset) -> bool:
        """Return whether rules on tokens and the veto of a preset drop no near token."""
        rules = all(
            _rule_idle(rule, self.radius) or (rule.policy or preset.policy, rule) in self.rules
            for rule in preset.reject
        )
        return rules and _veto_idle(preset.veto, self.radius)

    def share_of_far(self, batch: Batch) -> float:
        """Estimate the share of far tokens from every `SAMPLED`-th: of those that |Δ| makes far."""
        logs = [x[::SAMPLED] for name in POLICIES if (x := batch.policy(name)) is not None]
        far = torch.zeros_like(logs[0], dtype=torch.bool)
        for one, other in combinations(logs, 2):
            far |= ~((one - other).abs() <= self.radius)  # NaN is far
        return float(far.to(torch.float64).mean()) if len(far) else 0.0

    @classmethod
    def of(cls, presets: Sequence[Preset]) -> Nearness:
        """Choose the largest of `RADII` at which as many presets can be split as at the smallest."""
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
    """Return whether a preset treats all near tokens, |Δ| within ±a, alike given its watched rules."""
    parted = preset.apply and (by_turn(preset.weight) or any(map(on_turns, preset.reject)))
    return divides(preset, a) and not parted


@cache
def divides(preset: Preset, a: float) -> bool:
    """Return whether a preset treats near tokens of a sequence alike but for their turn and the sign of A."""
    if not preset.apply:
        return _clip_idle(preset, a)
    rules = all(_rule_idle(rule, a) or _watched(rule) or on_turns(rule) for rule in preset.reject)
    weight = by_turn(preset.weight) or _weight_idle(preset.weight, a)
    return rules and weight and _veto_idle(preset.veto, a) and _clip_idle(preset, a)


def on_turns(rule: Reject) -> bool:
    """Return whether a rule judges turns or sequences and drops their tokens, or those with some sign of A.

    Such rules are not watched: they may drop most tokens.
    """
    beyond = rule.on_tokens and rule.over not in ("token", "batch") and rule.advantage != "away"
    return beyond and not _watched(rule)


def signs(preset: Preset) -> tuple[str, ...]:
    """Return the signs of A (`Moments.sign`) by which rules on turns or sequences split near tokens."""
    by_sign = any(on_turns(rule) and rule.advantage != "any" for rule in preset.reject)
    return ("1+", "1-", "1=") if by_sign else ("",)


@cache
def neutral(preset: Preset) -> Preset:
    """Return the preset's part that acts on near tokens: numerator, loss and kind of weight.

    Weights of sequences and rules that drop sequences multiply the sums afterwards.
    """
    loss = LOSSES[preset.loss]
    on_tokens = preset.apply and preset.weight is not None and preset.weight.over == "token"
    weight = preset.weight if loss.weighted == "never" else FREE
    clip, shape = (preset.clip if loss.pooled else UNCLIPPED, Shape())
    if loss.factors is not None or loss.values is not None or loss.gate or not linear(preset):
        clip, shape = preset.clip if loss.ratio else UNCLIPPED, preset.shape
    return Preset("", "", preset.policy, weight if on_tokens else None, (), None, preset.loss, clip, shape)


def _rule_idle(rule: Reject, a: float) -> bool:
    """Return whether a rule drops no token with |Δ| <= a; rules on sequences do not concern single tokens."""
    if not rule.on_tokens:
        return True
    if rule.over != "token" or rule.statistic not in SPANS:
        return False
    low, high = SPANS[rule.statistic](a)
    lower, upper = (_edge(bound, rule.statistic) for bound in (rule.lower, rule.upper))
    return (lower is None or lower < low) and (upper is None or upper > high)


def _watched(rule: Reject) -> bool:
    """Return whether a rule on tokens is evaluated to find far tokens, since |Δ| does not show its effect.

    Rules with bounds tighter than every radius are not: nearly all tokens might be far.
    """
    if rule.among != "all" or not rule.on_tokens:
        return False
    if rule.over == "token":
        return rule.statistic not in SPANS
    return rule.over in ("segment", "batch") or rule.advantage == "away"


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
    """Return whether a loss's clip acts on no token with |Δ| <= a.

    Pooled losses clip whole sequences; losses that are not linear are computed of every token.
    """
    loss = LOSSES[preset.loss]
    if not linear(preset) or not loss.ratio or loss.pooled:
        return loss.weighted != "never" or preset.weight is None or preset.weight.over == "token"
    clip = preset.clip
    bounded = clip.safety is None or clip.safety > a
    if loss.gate:
        return bounded
    if loss.values is not None:  # its bounds are on u
        return bounded and all(bound is None or bound > a for bound in (clip.low, clip.high))
    low, high = None if clip.low is None else 1 - clip.low, None if clip.high is None else 1 + clip.high
    return bounded and _outside(low, high, a) and _outside(None, clip.dual, a)


def _outside(lower: float | None, upper: float | None, a: float) -> bool:
    """Return whether bounds on r act on no |Δ| <= a."""
    above = upper is None or (upper > 0 and math.log(upper) > a)
    return above and (lower is None or lower <= 0 or math.log(lower) < -a)


def close(
    ratios: Ratios, near: Nearness, excess: Mapping[tuple[Policy, Policy], Tensor] | None = None
) -> Tensor:
    """Return which tokens are near, [T] bool; `ratios` are of all tokens, of any numerator, and are not kept.

    `excess` is e^Δ − 1 of pairs of policies, [T], where it is known.
    """
    found = []
    for at, block in ratios.blocks():
        for (denominator, numerator), x in (excess or {}).items():
            if denominator == "rollout":
                block.of(numerator).know("r − 1", x[at])
        found.append(_close(block, near))
    ratios.forget()
    return found[0] if len(found) == 1 else torch.cat(found)


def _close(ratios: Ratios, near: Nearness) -> Tensor:
    found = torch.ones_like(ratios.batch.rollout, dtype=torch.bool)
    for gap in _gaps(ratios):
        found &= gap.abs() <= near.radius  # a NaN is far
    for policy, rule in near.rules:
        passed = correction.passing_tokens(ratios.of(policy), rule)
        found = found if passed is None else found & passed
    for policy, weight in near.tails:
        found &= ~correction.in_tail(ratios.of(policy), weight)
    return found


def _gaps(ratios: Ratios) -> list[Tensor]:
    """List every log-ratio that a preset or a loss may use, [T] each."""
    batch = ratios.batch
    found = [ratios.of(policy).delta for policy in ("old", "current") if batch.has(policy)]
    if batch.old is not None and batch.current is not None:
        found.append(batch.current - batch.old)
    return found


T = TypeVar("T")
POLICIES: tuple[Policy, ...] = ("rollout", "old", "current")


@dataclass
class Scene:
    """A batch, its bootstrap draws [S, B], and the log-ratios computed so far.

    Attributes:
        near: conditions under which a token is near; None: all tokens are processed preset by preset.
        excess: e^Δ − 1 of pairs of policies (denominator, numerator), [T], that were computed on the way.
    """

    batch: Batch
    draws: Tensor
    fits: BatchFits = NO_FITS
    near: Nearness | None = None
    excess: dict[tuple[Policy, Policy], Tensor] = field(default_factory=dict, repr=False)
    _ratios: dict[str, Ratios] = field(default_factory=dict)
    _memo: Memo = field(default_factory=Memo, repr=False)
    _parts: tuple[Ratios, Ratios] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        batch: Batch,
        seed: int,
        replicates: int,
        fits: BatchFits = NO_FITS,
        near: Nearness | None = None,
    ) -> Scene:
        """Build with bootstrap draws for every sequence."""
        return cls(batch, accumulators.draws(batch.key, seed, replicates), fits, near)

    def ratios(self, policy: Policy) -> Ratios:
        """Return the ratios π_policy/π_rollout, computed once."""
        if policy not in self._ratios:
            self._ratios[policy] = Ratios(self.batch, policy, self.fits, self._ratios)
        return self._ratios[policy]

    @property
    def numerators(self) -> tuple[Ratios, ...]:
        """The ratios computed so far."""
        return tuple(self._ratios.values())

    def parts(self, preset: Preset) -> tuple[tuple[Ratios, Preset], ...]:
        """Return the far tokens with the preset, and the near ones with the part of it that acts on them.

        One part with all tokens, where the preset cannot be split.
        """
        if self.near is None or not splits(preset, self.near.radius):
            return ((self.ratios(preset.policy), preset),)
        far, close = self.far_and_near
        return (far.of(preset.policy), preset), (close.of(preset.policy), neutral(preset))

    def divides(self, preset: Preset) -> bool:
        """Return whether a preset's near tokens are processed separately."""
        return self.near is not None and self.near.divides(preset)

    @property
    def moments(self) -> Moments:
        """Moments of the near tokens; `near` must be set."""
        moments = self.far_and_near[1].moments
        assert moments is not None
        return moments

    @property
    def far_and_near(self) -> tuple[Ratios, Ratios]:
        """Ratios of the far tokens and of the near ones; `near` must be set."""
        if self._parts is None:
            assert self.near is not None
            self._parts = self._split(self.near)
        return self._parts

    def use_split(self) -> None:
        """Make sequence-level ratios use far tokens and moments of near ones from now on."""
        assert self.near is not None
        far, close = self.far_and_near
        for policy in POLICIES:
            if self.batch.has(policy):
                parts = far.of(policy), close.of(policy)
                self.ratios(policy).split = Split(*parts, self.near.radius, self.near.leaves)

    def _split(self, near: Nearness) -> tuple[Ratios, Ratios]:
        """Split the batch into far and near tokens."""
        whole = self.ratios("rollout")
        far = places(~close(Ratios(self.batch, "rollout", self.fits), near, self.excess))
        excess = {d: self.excess[pair] for d, pair in DIRECTIONS.items() if pair in self.excess}
        few, rest = self.batch.some(far), self.batch.some(None, far)
        return (
            Ratios(few, "rollout", self.fits, whole=whole),
            Ratios(rest, "rollout", self.fits, whole=whole, moments=Moments.near(self.batch, far, excess)),
        )

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        return self._memo.once(key, make)

    def forget(self) -> None:
        """Drop all cached values; outcomes and ratios form reference cycles, so nothing else would soon."""
        for ratios in (*self._ratios.values(), *(self._parts or ())):
            ratios.forget()
        self._parts = None
        self._memo.clear()
        self.excess.clear()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Denominators of means: tokens, sequences with a token, rows; [S] each."""
        n = self.batch.lengths.to(torch.float64)
        return {"tokens": n, "sequences": (n > 0).to(torch.float64), "rows": torch.ones_like(n)}
