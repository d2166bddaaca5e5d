"""prime-rl: [trainer.loss], DPPO or IPO; ratios and their masks before 0.5.0."""

from __future__ import annotations

import math
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.parts import Parts, cannot
from offpol_diag.configs.schema import older
from offpol_diag.presets import Preset, Reject

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
TABLE = "trainer.loss"
KL = "kl_tau adds a term (log r)² on every loss token, masked ones included; 0 leaves it out"
OLD = "these keys are gone since 2026-03-03: pin prime-rl to release 0.4.0, or write a custom loss"


def prime_rl(preset: Preset) -> Said:
    """One gradient pass against the rollout: there is no π_old."""
    parts = Parts(preset)
    parts.need(("current",), ("surrogate", "reinforce"))
    forms, remarks = (_head if parts.loss == "surrogate" else _before)(parts)
    parts.finish()
    snippets = tuple(one for settings in forms for one in _written(settings))
    return snippets or cannot("bounds that its classes refuse"), remarks


def _written(settings: dict[str, Any]) -> tuple[Snippet, ...]:
    named = {f"{TABLE}.{key}": value for key, value in settings.items()}
    return older("prime-rl", "toml", syntax.toml(TABLE, settings), named)


def _head(parts: Parts) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    weight = parts.take_weight("token", actions=("none",))
    if weight is None or len(parts.rules) != 1:
        cannot("this loss without exactly one mask on the probability difference")
    rule = parts.rules.pop()
    plain = (rule.statistic, rule.over, rule.strict, rule.policy) == ("prob_diff", "token", False, None)
    if not plain or rule.lower is None or rule.upper is None or rule.upper < 0 < rule.lower:
        cannot("a mask on anything but the token's probability difference, with both bounds")
    terms = {"adv_tau": 1.0, "kl_tau": 0.0}
    forms = tuple({**mask, **terms} for mask in _masks(rule, rule.lower, rule.upper))
    return forms, (KL, "[loss] where the trainer runs alone")


def _masks(rule: Reject, low: float, high: float) -> tuple[dict[str, Any], ...]:
    """The newest spelling first."""
    if rule.advantage == "against_or_zero":
        return ({"type": "default", "dppo_mask_low": -low, "dppo_mask_high": high},)
    if rule.advantage != "any":
        return cannot(f"this condition on the advantage ({rule.advantage})")
    two_sided = {"type": "default", "ipo_mask_low": -low, "ipo_mask_high": high}
    return ({"type": "ipo", "ipo_threshold": high}, two_sided) if low == -high else (two_sided,)


def _before(parts: Parts) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    parts.split_mask()
    parts.drop_idle()
    weight = parts.take_weight("token", "sum")
    if weight is None or (weight.over, weight.action) not in (("token", "none"), ("sum", "truncate")):
        cannot("truncated token weights, or no weight")
    token, geo = parts.take("ratio", "token"), parts.take("ratio", "mean")
    veto = parts.take_veto(upper=True)
    bounds = {"token": token, "geo": geo, "sequence": veto}
    settings: dict[str, Any] = {"ratio_type": "token" if weight.over == "token" else "sequence"}
    for name, part in bounds.items():
        low, high = (part.lower, part.upper) if part else (None, None)
        settings[f"{name}_mask_low"] = 0.0 if low is None else low
        settings[f"{name}_mask_high"] = math.inf if high is None else high
    if weight.upper is not None and weight.upper > math.exp(10):
        cannot("a product above e^10, where it clamps the log-ratio")
    if weight.upper is not None:
        settings["sequence_clip_high"] = weight.upper
    by_length = ("each sequence is divided by its length here",) if weight.over == "sum" else ()
    return ({**settings, "kl_tau": 0.0},), (OLD, *by_length)
