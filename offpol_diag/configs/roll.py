"""ROLL: train_infer_correction, with a weight and filters."""

from __future__ import annotations

import math
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_bounds, clip_remarks, clip_settings
from offpol_diag.configs.parts import Parts
from offpol_diag.presets import Preset, Reject

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
TYPES = {"token": "token", "segment": "segment", "mean": "geometric", "sum": "sequence"}
CLIP = ClipKeys("pg_clip_low", "pg_clip_high")
BLOCK = "train_infer_correction."


def roll(preset: Preset) -> Said:
    """One is_weight and a filter per rule; all filters must pass."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "cispo"))
    parts.split_mask()
    settings = {**_weight(parts), BLOCK + "filters": _filters(parts)}
    parts.finish()
    settings |= {"enable_old_logprobs_recompute": True, **_loss(preset)}
    remarks = (
        "with enable_old_logprobs_recompute the filters act on the whole batch",
        "under loss_agg_mode token-mean the sum ignores the mask: filtered tokens still push there",
    )
    shown = remarks if preset.reject else ()
    return (Snippet("yaml", syntax.yaml(settings)),), (*shown, *clip_remarks(preset, CLIP))


def _weight(parts: Parts) -> dict[str, Any]:
    weight = parts.take_weight(*TYPES)
    found: dict[str, Any] = {"enabled": weight is not None}
    if weight is not None:
        found |= {"weight_type": TYPES[weight.over], "upper_bound": weight.upper}
    return {f"{BLOCK}is_weight.{key}": value for key, value in found.items()}


def _filters(parts: Parts) -> list[dict[str, Any]]:
    taken = ((rule, parts.take(rule.statistic, rule.over)) for rule in tuple(parts.rules) if _fits(rule))
    return [_filter(rule) for rule, found in taken if found is not None]


def _fits(rule: Reject) -> bool:
    return rule.statistic in ("ratio", "prob_diff") and rule.over in TYPES


def _filter(rule: Reject) -> dict[str, Any]:
    ratio = rule.statistic == "ratio"
    least = 0.0 if ratio else -math.inf
    low, high = least if rule.lower is None else rule.lower, math.inf if rule.upper is None else rule.upper
    name = "ratio" if ratio else "diff"
    return {
        "enabled": True,
        "agg_type": TYPES[rule.over],
        "ratio_enabled": ratio,
        "diff_enabled": not ratio,
        f"{name}_low": low,
        f"{name}_high": high,
    }


def _loss(preset: Preset) -> dict[str, Any]:
    if preset.loss == "cispo":
        low, high = clip_bounds(preset)
        return {"pg_variant": "cispo", "cispo_epsilon_low": low, "cispo_epsilon_high": high}
    clip = clip_settings(preset, CLIP)
    return {**({"use_pg_clip_range": True} if clip else {}), **clip}
