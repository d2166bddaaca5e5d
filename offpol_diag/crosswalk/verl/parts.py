"""How each generation of verl names and splits what it logs, and the spreads that a preset has in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from offpol_diag.crosswalk.limits import Thresholds
from offpol_diag.crosswalk.spread import Spread
from offpol_diag.presets import Preset, Reject, Weight

SAFETY = 20.0


@dataclass(frozen=True)
class Generation:
    """How one generation names and splits what it logs.

    Attributes:
        prefix: before every name; `gap` is put before the names of the policy-gap numbers.
        chi2: whether it logs χ².
        veto: whether it logs the veto's fractions.
        divergences: whether rejection is logged per k1/k2/k3 option (2026-01) or as one ratio band.
        weight_band: 2025-10: rejection is a mode of the weights and has no numbers of its own, and
            fractions beyond a threshold are taken over rows for product ratios only, over tokens for
            geometric means.
        applied: 2026-03: means, extremes, std and ESS are of the weights as the loss gets them, bounded
            to [0, C]; fractions beyond a threshold stay those of raw weights.
        debug: whether `training/` and `actor/` are told as well; golden numbers have neither.
    """

    prefix: str
    gap: str = ""
    chi2: bool = True
    veto: bool = True
    divergences: bool = False
    weight_band: bool = False
    applied: bool = False
    debug: bool = False


GENERATIONS = {
    "verl-2025-10": Generation("mismatch/", gap="mismatch_", chi2=False, weight_band=True),
    "verl-2025-11": Generation("rollout_corr/"),
    "verl-2026-01": Generation("rollout_corr/", veto=False, divergences=True),
    "verl-2026-03": Generation("rollout_corr/", veto=False, divergences=True, applied=True, debug=True),
}


@dataclass(frozen=True)
class Part:
    """One spread that a preset logs: under which stem, of which statistic.

    Attributes:
        stem: before its names.
        spread: of the raw statistic.
        rule: whose statistic it is.
        applied: of the weights after truncation or masking, where the generation logs those.
    """

    stem: str
    spread: Spread
    rule: Weight | Reject
    applied: Spread | None = None


def weight_part(preset: Preset, generation: Generation) -> Part | None:
    """The spread of the importance weights, thresholds [1/C, C] unless a lower bound is given."""
    if preset.weight is None:
        return None
    band = (_ratio_rule(preset) if generation.weight_band else None) or preset.weight
    high = band.upper or math.inf
    low = band.lower or 1 / high
    key = f"is/{preset.policy}/{preset.weight.over}/{low:.17g}/{high:.17g}"
    raw = Spread(key, Thresholds(low, high), 1.0)
    applied = Spread(f"{preset.weight.action}/{key}", Thresholds(0.0, high), 1.0)
    return Part("rollout_is", raw, preset.weight, applied if generation.applied else None)


def _ratio_rule(preset: Preset) -> Reject | None:
    return next((_in_ratio(rule) for rule in preset.reject if rule.statistic in ("ratio", "k1")), None)


def _in_ratio(rule: Reject) -> Reject:
    """A band of k1 = −Δ in nats as the same band of r."""
    if rule.statistic != "k1":
        return rule
    lower = None if rule.upper is None else math.exp(-rule.upper)
    upper = None if rule.lower is None else math.exp(-rule.lower)
    return replace(rule, statistic="ratio", lower=lower, upper=upper)


def reject_parts(preset: Preset, generation: Generation) -> Iterator[Part]:
    """The spreads of the rejection statistics."""
    if generation.weight_band:
        return
    for rule in preset.reject:
        yield _divergence_part(preset, rule) if generation.divergences else _ratio_part(preset, rule)


def _ratio_part(preset: Preset, rule: Reject) -> Part:
    rule = _in_ratio(rule)
    high = rule.upper or math.inf
    low = rule.lower if rule.lower is not None else 1 / high
    key = f"is/{preset.policy}/{rule.over}/{low:.17g}/{high:.17g}"
    return Part("rollout_rs", Spread(key, Thresholds(low, high), 1.0), rule)


_AS_K1 = {"ratio": "k1"}


def _divergence_part(preset: Preset, rule: Reject) -> Part:
    """verl 2026-01 speaks of −log r where we speak of r: the band is mirrored."""
    name = _AS_K1.get(rule.statistic, rule.statistic)
    limits = _divergence_limits(rule)
    option = f"token_{name}" if rule.over == "token" else f"seq_{rule.over}_{name}"
    key = f"rs/{preset.policy}/{name}/{rule.over}/{limits.low:.17g}/{limits.high:.17g}"
    return Part(f"rollout_rs_{option}", Spread(key, limits, 0.0, empty=False), rule)


def _divergence_limits(rule: Reject) -> Thresholds:
    if rule.statistic == "ratio":
        return Thresholds(
            -math.log(rule.upper or math.inf), -math.log(rule.lower) if rule.lower else math.inf
        )
    if rule.statistic == "k1":
        return Thresholds(-math.inf if rule.lower is None else rule.lower, _or_inf(rule.upper))
    return Thresholds(rule.lower or 0.0, _or_inf(rule.upper))


def _or_inf(bound: float | None) -> float:
    return math.inf if bound is None else bound


@cache
def parts(preset: Preset, generation: Generation) -> tuple[Part, ...]:
    """Every spread that this preset logs."""
    weight = weight_part(preset, generation)
    return (*((weight,) if weight else ()), *reject_parts(preset, generation))
