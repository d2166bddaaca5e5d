"""Presets: what one correction does, as data.

A preset is a table in `presets.toml`, or in a user's file of the same form. Every bound is on
r = π_train/π_rollout, or on a divergence of it; `over` says over what it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Policy = Literal["old", "current", "rollout"]
Over = Literal["token", "sum", "mean", "max", "min", "segment"]
WeightOver = Literal["token", "sum", "mean", "segment"]
Action = Literal["truncate", "mask", "none"]
Statistic = Literal["ratio", "k1", "k2", "k3", "prob_diff", "tv"]
Sign = Literal["any", "negative", "positive", "against"]
Loss = Literal["ppo_clip", "reinforce"]
AGGREGATES = frozenset({"ratio", "k1"})
"""Statistics whose sequence form is an aggregated log-ratio, which a safety bound can act on."""
Slip = tuple[str, str]  # the key, or "" for the whole table; and the rule its value breaks


@dataclass(frozen=True)
class Weight:
    """The importance weight that multiplies the loss.

    Attributes:
        over: token, sum (product ratio of the sequence), mean (geometric mean), segment (geometric mean of a
            turn).
        action: truncate (clamp to the bounds), mask (0 outside the bounds, the token stays in the mask:
            IcePop), none (the raw ratio).
        upper: largest weight, or None. With `none` it bounds nothing: it is what weights are counted
            against as truncated, and the threshold of what the trainer logs.
        lower: smallest weight, or None.
        normalize: divide by the batch mean of the weights as processed but before any rejection: over tokens
            for `token`, over sequences (each one's mean weight) for the rest.
        safety: bound on |log weight| before exp, nats; None = no bound.
        safety_at: whether that bound acts on the aggregated log-ratio or on each token before aggregation.
    """

    over: WeightOver = "token"
    action: Action = "truncate"
    upper: float | None = None
    lower: float | None = None
    normalize: bool = False
    safety: float | None = 20.0
    safety_at: Literal["aggregate", "token"] = "aggregate"

    def slips(self) -> Iterator[Slip]:
        """What the types let through and no trainer could mean."""
        yield from _above_zero(upper=self.upper, safety=self.safety)
        yield from _not_negative(lower=self.lower)
        yield from _ordered(self.lower, self.upper)
        bounded = self.lower is not None or self.upper is not None
        if not bounded and self.action != "none":
            yield "", f"action {self.action} needs upper, lower or both"


@dataclass(frozen=True)
class Reject:
    """One rejection rule; what lies outside [lower, upper] (inclusive) leaves the loss mask.

    Attributes:
        statistic: ratio (r; bounds on r), k1 (−Δ; bounds in nats), k2 (Δ²/2), k3 (r−1−Δ), prob_diff
            (π_train − π_rollout, signed), tv (|r−1|/2).
        over: token, or how the sequence (sum, mean, max, min) or the turn (segment) aggregates it.
            For `ratio`: sum is the product ratio, mean the geometric mean.
        advantage: where the rule acts: any; negative/positive advantages only; against = a bound acts only
            where the update pushes further past it (upper where A > 0, lower where A < 0).
        safety: bound on |Δ| before the statistic, nats; None = no bound.
        safety_at: whether that bound acts on the aggregated log-ratio or on each token. The aggregate can be
            bounded for ratio and k1 only; every other statistic bounds each token's Δ.
    """

    statistic: Statistic = "ratio"
    over: Over = "token"
    lower: float | None = None
    upper: float | None = None
    advantage: Sign = "any"
    safety: float | None = None
    safety_at: Literal["aggregate", "token"] = "aggregate"

    def slips(self) -> Iterator[Slip]:
        """What the types let through and no trainer could mean."""
        yield from _above_zero(safety=self.safety)
        if self.statistic == "ratio":
            yield from _above_zero(lower=self.lower, upper=self.upper)
        if self.statistic in ("k2", "k3", "tv"):
            yield from _not_negative(lower=self.lower, upper=self.upper)
        yield from _ordered(self.lower, self.upper)
        yield from _some_bound(self.lower, self.upper)


@dataclass(frozen=True)
class Veto:
    """Drop a whole sequence if one token's unclamped r is strictly below `lower` or above `upper`."""

    lower: float | None = None
    upper: float | None = None

    def slips(self) -> Iterator[Slip]:
        """What the types let through and no trainer could mean."""
        yield from _above_zero(lower=self.lower, upper=self.upper)
        yield from _ordered(self.lower, self.upper)
        yield from _some_bound(self.lower, self.upper)


@dataclass(frozen=True)
class Preset:
    """One correction method.

    Attributes:
        name: as in the table's header.
        summary: one line for the catalogue.
        policy: numerator of r: old (decoupled, three policies), current (bypass, two), rollout (r is 1 by
            construction: the trainer takes the rollout log-probs for its own).
        weight: or None when the loss is not weighted.
        reject: all must hold for a token to be kept.
        veto: or None.
        loss: the policy loss the weights enter.
        apply: False when the trainer only logs the numbers and changes neither weights nor mask.
        aliases: other names people search for.
        trainers: whose configuration the catalogue can print.
        logs: whose names and definitions the crosswalk uses, or None.
        source: where the row comes from: trainer, version, function.
        note: what a reader should know before comparing it with another row.
    """

    name: str
    summary: str
    policy: Policy = "old"
    weight: Weight | None = None
    reject: tuple[Reject, ...] = ()
    veto: Veto | None = None
    loss: Loss = "ppo_clip"
    apply: bool = True
    aliases: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    logs: str | None = None
    source: str = ""
    note: str = ""


def _above_zero(**bounds: float | None) -> Iterator[Slip]:
    for key, bound in bounds.items():
        if bound is not None and bound <= 0:
            yield key, "it must be above 0"


def _not_negative(**bounds: float | None) -> Iterator[Slip]:
    for key, bound in bounds.items():
        if bound is not None and bound < 0:
            yield key, "it must not be negative"


def _ordered(lower: float | None, upper: float | None) -> Iterator[Slip]:
    if lower is not None and upper is not None and lower > upper:
        yield "lower", f"it must not exceed upper = {upper}"


def _some_bound(lower: float | None, upper: float | None) -> Iterator[Slip]:
    if lower is None and upper is None:
        yield "", "it needs upper, lower or both"
