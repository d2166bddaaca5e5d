"""TRL: GRPOConfig's vllm_importance_sampling_*, and its mask on negative advantages."""

from __future__ import annotations

from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_bounds, clip_remarks, clip_settings
from offpol_diag.configs.parts import Parts, cannot
from offpol_diag.configs.schema import block, older
from offpol_diag.presets import Preset

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
MODES = {"token": "token", "sum": "sequence"}
CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
MAX, CAP = "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"


def trl(preset: Preset) -> Said:
    """vllm_importance_sampling_*, and off_policy_mask_threshold."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    delta = parts.take_opsm()
    weights = _weights(parts)
    parts.finish()
    settings = {"use_vllm": True, **weights, **threshold("off_policy_mask_threshold", delta)}
    settings |= loss(preset, CLIP)
    before = {CAP if key == MAX else key: value for key, value in settings.items()}
    snippets = (
        block("trl", "python", syntax.call("GRPOConfig", settings), settings),
        *(older("trl", "python", syntax.call("GRPOConfig", before), before) if MAX in settings else ()),
    )
    nats = ("off_policy_mask_threshold is in nats per token",) if delta is not None else ()
    return snippets, (*nats, *clip_remarks(preset, CLIP))


def _weights(parts: Parts) -> dict[str, Any]:
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


def threshold(key: str, delta: float | None) -> dict[str, Any]:
    """The setting of a mask on negative advantages, if there is one."""
    return {} if delta is None else {key: delta}


def loss(preset: Preset, keys: ClipKeys) -> dict[str, Any]:
    """The loss; CISPO's epsilon_high there is the bound itself, and it has no lower one."""
    if preset.loss == "cispo":
        low, high = clip_bounds(preset)
        if low < 1:
            cannot("a lower bound of CISPO's weight")
        return {"loss_type": "cispo", "epsilon_high": 1 + high}
    level = {"importance_sampling_level": "sequence"} if preset.loss == "gspo" else {}
    return {**level, **clip_settings(preset, keys)}
