"""ROLL: train_infer_correction, with a weight and filters."""

from __future__ import annotations

import math
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_bounds, clip_remarks, clip_settings
from offpol_diag.configs.parts import Parts, cannot
from offpol_diag.configs.schema import block
from offpol_diag.presets import Preset, Reject

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
TYPES = {"token": "token", "segment": "segment", "mean": "geometric", "sum": "sequence"}


def _dual(bound: float) -> str:
    switches = "dual_clip_loss and use_pg_clip_range are true"
    return f"{switches} and pg_clip is {(bound - 1) / 2:g} (the bound is 1 + 2 pg_clip)"


CLIP = ClipKeys("pg_clip_low", "pg_clip_high", "dual_clip_loss", dual_said=_dual)
BLOCK = "train_infer_correction."
PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
CISPO = (0.1, 0.1)
"""The bounds in its code: no configuration class has a key for them."""


def roll(preset: Preset) -> Said:
    """One is_weight and a filter per rule; all filters must pass."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    parts.split_mask()
    settings = {**_weight(parts), BLOCK + "filters": _filters(parts)}
    parts.finish()
    settings |= {"enable_old_logprobs_recompute": True, **_loss(preset)}
    remarks = (
        "with enable_old_logprobs_recompute the filters act on the whole batch",
        "under loss_agg_mode token-mean the sum ignores the mask: filtered tokens still push there",
    )
    shown = remarks if preset.reject else ()
    seq = (
        "importance_sampling is a key of the RLVR pipeline; its mean is over the tokens left by the filters",
    )
    said = (*shown, *(seq if preset.loss == "gspo" else ()), *clip_remarks(preset, CLIP))
    return (block("roll", "yaml", syntax.yaml(settings), settings),), said


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
        if clip_bounds(preset) != CISPO:
            cannot(
                "bounds of CISPO's weight other than 0.1 and 0.1: they stand in its code, "
                "and cispo_epsilon_low and cispo_epsilon_high in YAML are dropped"
            )
        return {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "cispo"}
    clip = clip_settings(preset, CLIP)
    dual = clip.pop(CLIP.dual, None)
    seq = {"importance_sampling": "seq"} if preset.loss == "gspo" else {}
    if dual is None:
        return {**seq, **({"use_pg_clip_range": True} if clip else {}), **clip}
    low, high = clip_bounds(preset)
    bound = {"dual_clip_loss": True, "pg_clip": (dual - 1) / 2}
    return {**seq, "use_pg_clip_range": True, CLIP.low: low, CLIP.high: high, **bound}
