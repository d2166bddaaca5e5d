"""ms-swift: rollout_importance_sampling_mode with an upper bound; its "sequence" is the geometric mean."""

from __future__ import annotations

from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.habits import ClipKeys, clip_remarks
from offpol_diag.configs.parts import IDLE_HIGH, Parts, cannot
from offpol_diag.configs.schema import block
from offpol_diag.configs.trl import Said, loss, threshold
from offpol_diag.presets import Preset

CLIP = ClipKeys("epsilon", "epsilon_high", "delta")


def ms_swift(preset: Preset) -> Said:
    """rollout_importance_sampling_mode with an upper bound; its "sequence" is the geometric mean."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    delta = parts.take_opsm()
    settings, idle = _weights(parts)
    parts.finish()
    settings |= threshold("off_policy_sequence_mask_delta", delta)
    settings = ({"use_vllm": "true"} if settings else {}) | settings | loss(preset, CLIP)
    remarks = (
        settings.get("rollout_importance_sampling_mode")
        and "the weights multiply the KL-to-reference term as well; needs vLLM 0.10.2 or later",
        idle and "a threshold of 1.0e+9 is idle: the log-ratio is clamped to ±20",
        delta is not None
        and "off_policy_sequence_mask_delta is in nats per token; rows leave the denominator under bnpo only",
    )
    nothing = (
        ("ms-swift corrects nothing unless rollout_importance_sampling_mode is set",)
        if "use_vllm" not in settings
        else ()
    )
    said = (*nothing, *(str(text) for text in remarks if text), *clip_remarks(preset, CLIP))
    return (block("ms-swift", "flags", syntax.flags(settings), settings),), said


def _weights(parts: Parts) -> tuple[dict[str, Any], bool]:
    if parts.weight is None:
        return {}, False
    if parts.weight.over == "sum":
        cannot("weights of the product ratio (its sequence modes take the geometric mean)")
    mode, upper = _mode(parts)
    threshold = IDLE_HIGH if upper is None else upper
    settings = {
        "rollout_importance_sampling_mode": mode,
        "rollout_importance_sampling_threshold": threshold,
    }
    return settings, upper is None


def _mode(parts: Parts) -> tuple[str, float | None]:
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
