"""prime-rl: [trainer.loss], DPPO or IPO at HEAD; ratios and their masks before 2026-03-03."""

from __future__ import annotations

import math
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.parts import Parts, cannot
from offpol_diag.presets import Preset, Reject

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
TABLE = "trainer.loss"
KL = "kl_tau adds a term (log r)² on every loss token, masked ones included; 0 leaves it out"
OLD = "these keys are gone since 2026-03-03: pin prime-rl before that (<= v0.4), or write a custom loss"


def prime_rl(preset: Preset) -> Said:
    """One gradient pass against the rollout: there is no π_old."""
    parts = Parts(preset)
    parts.need(("current",), ("surrogate", "reinforce"))
    settings, remarks = (_head if parts.loss == "surrogate" else _before)(parts)
    parts.finish()
    return (Snippet("toml", syntax.toml(TABLE, settings)),), remarks


def _head(parts: Parts) -> tuple[dict[str, Any], tuple[str, ...]]:
    weight = parts.take_weight("token", actions=("none",))
    if weight is None or len(parts.rules) != 1:
        cannot("this loss without exactly one mask on the probability difference")
    rule = parts.rules.pop()
    plain = (rule.statistic, rule.over, rule.strict, rule.policy) == ("prob_diff", "token", False, None)
    if not plain or rule.lower is None or rule.upper is None or rule.upper < 0 < rule.lower:
        cannot("a mask on anything but the token's probability difference, with both bounds")
    settings = {**_mask(rule, rule.lower, rule.upper), "adv_tau": 1.0, "kl_tau": 0.0}
    return settings, (KL, "[loss] where the trainer runs alone", "needs prime-rl since 2026-04-06")


def _mask(rule: Reject, low: float, high: float) -> dict[str, Any]:
    if rule.advantage == "against_or_zero":
        return {"type": "default", "dppo_mask_low": -low, "dppo_mask_high": high}
    if rule.advantage == "any" and low == -high:
        return {"type": "ipo", "ipo_threshold": high}
    return cannot("this condition on the advantage, or bounds that are not symmetric")


def _before(parts: Parts) -> tuple[dict[str, Any], tuple[str, ...]]:
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
    return {**settings, "adv_tau": 1.0, "kl_tau": 0.0}, (OLD, *by_length)
