"""TRL, ms-swift and OpenRLHF: one mode, one or two bounds, and a mask on negative advantages."""

from __future__ import annotations

import math
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_bounds, clip_remarks, clip_settings
from offpol_diag.configs.parts import IDLE_HIGH, Parts, cannot
from offpol_diag.presets import Preset

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
MODES = {"token": "token", "sum": "sequence"}
TRL_CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
SWIFT_CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
OPENRLHF_CLIP = ClipKeys("low", "high", "actor.dual_clip")


# ---------------------------------------------------------------- TRL


def trl(preset: Preset) -> Said:
    """vllm_importance_sampling_*, and off_policy_mask_threshold."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    delta = parts.take_opsm()
    weights = _trl_weights(parts)
    parts.finish()
    settings = {"use_vllm": True, **weights, **_mask("off_policy_mask_threshold", delta)}
    settings |= _trl_loss(preset, TRL_CLIP)
    bounded = settings.get("vllm_importance_sampling_clip_min") is not None
    remarks = (
        bounded and "vllm_importance_sampling_clip_min needs TRL 1.6.0 or later",
        "before TRL 1.6.0 vllm_importance_sampling_clip_max was vllm_importance_sampling_cap"
        if weights.get("vllm_importance_sampling_clip_max") is not None
        else "",
        delta is not None and "off_policy_mask_threshold is in nats per token",
    )
    snippet = Snippet("python", syntax.call("GRPOConfig", settings))
    return (snippet,), (*(text for text in remarks if text), *clip_remarks(preset, TRL_CLIP))


def _trl_weights(parts: Parts) -> dict[str, Any]:
    if parts.weight is None:
        return {"vllm_importance_sampling_correction": False}
    over = parts.weight.over
    band = parts.take_band(over)
    mode, (low, high) = "mask", band or (None, None)
    if band is None:
        weight = parts.take_weight(*MODES, lower=True)
        if weight is not None and weight.action == "truncate":
            mode, low, high = "truncate", weight.lower, weight.upper
    if over not in MODES:
        cannot("weights of the geometric mean of the sequence")
    found = {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": f"{MODES[over]}_{mode}",
        "vllm_importance_sampling_clip_max": high,
    }
    return {**found, **({} if low is None else {"vllm_importance_sampling_clip_min": low})}


def _mask(key: str, delta: float | None) -> dict[str, Any]:
    return {} if delta is None else {key: delta}


def _trl_loss(preset: Preset, keys: ClipKeys) -> dict[str, Any]:
    """The loss; CISPO's epsilon_high there is the bound itself, and it has no lower one."""
    if preset.loss == "cispo":
        low, high = clip_bounds(preset)
        if low < 1:
            cannot("a lower bound of CISPO's weight")
        return {"loss_type": "cispo", "epsilon_high": 1 + high}
    level = {"importance_sampling_level": "sequence"} if preset.loss == "gspo" else {}
    return {**level, **clip_settings(preset, keys)}


# ---------------------------------------------------------------- ms-swift


def ms_swift(preset: Preset) -> Said:
    """rollout_importance_sampling_mode with an upper bound; its "sequence" is the geometric mean."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    delta = parts.take_opsm()
    settings, idle = _swift_weights(parts)
    parts.finish()
    settings |= _mask("off_policy_sequence_mask_delta", delta) | _trl_loss(preset, SWIFT_CLIP)
    remarks = (
        settings.get("rollout_importance_sampling_mode")
        and "the weights multiply the KL-to-reference term as well; needs vLLM 0.10.2 or later",
        idle and "a threshold of 1.0e+9 is idle: the log-ratio is clamped to ±20",
        delta is not None
        and "off_policy_sequence_mask_delta is in nats per token; rows leave the denominator under bnpo only",
    )
    text = "" if not settings else syntax.flags(settings)
    nothing = (
        () if settings else ("ms-swift corrects nothing unless rollout_importance_sampling_mode is set",)
    )
    said = (*nothing, *(str(text) for text in remarks if text), *clip_remarks(preset, SWIFT_CLIP))
    return (Snippet("flags", text),), said


def _swift_weights(parts: Parts) -> tuple[dict[str, Any], bool]:
    if parts.weight is None:
        return {}, False
    if parts.weight.over == "sum":
        cannot("weights of the product ratio (its sequence modes take the geometric mean)")
    mode, upper = _swift_mode(parts)
    threshold = IDLE_HIGH if upper is None else upper
    settings = {
        "rollout_importance_sampling_mode": mode,
        "rollout_importance_sampling_threshold": threshold,
    }
    return settings, upper is None


def _swift_mode(parts: Parts) -> tuple[str, float | None]:
    over = parts.weight.over if parts.weight else ""
    band = parts.take_band(over)
    if band is not None:
        if band[0] is not None or over != "token":
            cannot("a lower bound of the mask" if over == "token" else "weights zeroed by the geometric mean")
        return "token_mask", band[1]
    weight = parts.take_weight("token", "mean")
    raw = weight is not None and weight.action == "none"
    rule = parts.take("ratio", "mean", "upper") if raw and over == "token" else None
    if rule is not None:
        return "sequence_mask", rule.upper
    name = {"token": "token_truncate", "mean": "sequence_truncate"}[over]
    return name, None if weight is None else weight.upper


# ---------------------------------------------------------------- OpenRLHF


def openrlhf(preset: Preset) -> Said:
    """is_correction_type with two bounds; an idle lower one is 0, an idle upper one inf."""
    parts = Parts(preset)
    if parts.policy == "current":
        return _openrlhf_gspo(preset, parts)
    parts.need(("old",), ("ppo_clip", "gspo"))
    if parts.loss == "gspo" and parts.weight is not None:
        cannot("weights under the GSPO loss, which takes the rollout for its anchor instead")
    settings = _openrlhf_loss(preset)
    if parts.weight is None:
        parts.finish()
        nothing = "OpenRLHF corrects nothing without --algo.advantage.is_correction_enable"
        return (Snippet("flags", syntax.flags(settings)),), (nothing, *clip_remarks(preset, OPENRLHF_CLIP))
    kind, bounds = _openrlhf_type(parts)
    parts.finish()
    prefix = "algo.advantage.is_correction_"
    new = {f"{prefix}enable": True, f"{prefix}type": kind, f"{prefix}threshold": bounds, **settings}
    old = {"enable": True, "type": kind, "threshold": bounds}
    return (Snippet("flags", syntax.flags(new)), _openrlhf_old(old, settings)), _openrlhf_remarks(
        preset, bounds
    )


OLD = {
    "enable": "enable_vllm_is_correction",
    "type": "vllm_is_correction_type",
    "threshold": "vllm_is_truncated_threshold",
}


def _openrlhf_old(correction: dict[str, Any], loss: dict[str, Any]) -> Snippet:
    """The spelling before 0.10."""
    old = {OLD[key]: value for key, value in correction.items()}
    old |= {key.removeprefix("actor."): value for key, value in loss.items()}
    return Snippet("flags", syntax.flags(old), "or, before 0.10 (and from 2026-02 on)")


def _openrlhf_remarks(preset: Preset, bounds: tuple[float, float]) -> tuple[str, ...]:
    found = (
        bounds[0] == 0 and "a lower bound of 0 is idle; the default, 0.5, is not",
        bounds[1] == math.inf and "an upper bound of inf is idle",
        "before 2025-12-11 the threshold was one upper bound; until 2026-02-06 seq-mask-tis was called mis",
    )
    return (*(text for text in found if text), *clip_remarks(preset, OPENRLHF_CLIP))


def _openrlhf_type(parts: Parts) -> tuple[str, tuple[float, float]]:
    band = parts.take_band("token")
    if band is not None:
        return "icepop", _open(*band)
    weight = parts.take_weight("token", lower=True)
    rule = parts.take("ratio", "mean") if weight is not None and weight.action == "none" else None
    if rule is not None:
        return "seq-mask-tis", _open(rule.lower, rule.upper)
    return "tis", _open(None, None) if weight is None else _open(weight.lower, weight.upper)


def _open(low: float | None, high: float | None) -> tuple[float, float]:
    return (0.0 if low is None else low, math.inf if high is None else high)


def _openrlhf_gspo(preset: Preset, parts: Parts) -> Said:
    parts.need(("current",), ("gspo",))
    parts.finish()
    settings = {"algo.advantage.is_correction_enable": True, **_openrlhf_loss(preset)}
    remark = "under gspo correction type and threshold are ignored: the rollout's log-probs become the anchor"
    return (Snippet("flags", syntax.flags(settings)),), (remark,)


def _openrlhf_loss(preset: Preset) -> dict[str, Any]:
    found = clip_settings(preset, OPENRLHF_CLIP)
    bounds = {"actor.eps_clip_low_high": (found.pop("low"), found.pop("high"))} if "low" in found else {}
    gspo = {"actor.policy_loss_type": "gspo"} if preset.loss == "gspo" else {}
    return {**gspo, **bounds, **found}
