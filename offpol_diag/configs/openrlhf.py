"""OpenRLHF: is_correction_type with two bounds; since September 2026 a level, a mode and a gate."""

from __future__ import annotations

import math
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_remarks, clip_settings
from offpol_diag.configs.parts import Parts, cannot
from offpol_diag.presets import Preset

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
CLIP = ClipKeys("low", "high", "actor.dual_clip")


def openrlhf(preset: Preset) -> Said:
    """is_correction_type with two bounds; an idle lower one is 0, an idle upper one inf."""
    parts = Parts(preset)
    if parts.policy == "current":
        return _gspo(preset, parts)
    parts.need(("old",), ("ppo_clip", "gspo"))
    if parts.loss == "gspo" and parts.weight is not None:
        cannot("weights under the GSPO loss, which takes the rollout for its anchor instead")
    settings = _loss(preset)
    if parts.weight is None:
        parts.finish()
        nothing = "OpenRLHF corrects nothing without --algo.advantage.is_correction_enable"
        return (Snippet("flags", syntax.flags(settings)),), (nothing, *clip_remarks(preset, CLIP))
    kind, bounds = _type(parts)
    parts.finish()
    prefix = "algo.advantage.is_correction_"
    new = {f"{prefix}enable": True, f"{prefix}type": kind, f"{prefix}threshold": bounds, **settings}
    old = {"enable": True, "type": kind, "threshold": bounds}
    forms = Snippet("flags", syntax.flags(new)), _newer(kind, bounds, settings), _old(old, settings)
    return forms, _remarks(preset, bounds)


OLD = {
    "enable": "enable_vllm_is_correction",
    "type": "vllm_is_correction_type",
    "threshold": "vllm_is_truncated_threshold",
}


LEVELS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


def _newer(kind: str, bounds: tuple[float, float], loss: dict[str, Any]) -> Snippet:
    """The keys that took the place of type and enable."""
    level, mode = LEVELS[kind]
    words = {"level": level, "mode": mode, "gating": "ratio", "threshold": bounds}
    settings = {f"algo.advantage.is_correction_{key}": value for key, value in words.items()}
    return Snippet("flags", syntax.flags(settings | loss), "or, since September 2026 (pull request 1339)")


def _old(correction: dict[str, Any], loss: dict[str, Any]) -> Snippet:
    """The spelling before 0.10."""
    old = {OLD[key]: value for key, value in correction.items()}
    old |= {key.removeprefix("actor."): value for key, value in loss.items()}
    return Snippet("flags", syntax.flags(old), "or, before 0.10 (and from 2026-02 on)")


def _remarks(preset: Preset, bounds: tuple[float, float]) -> tuple[str, ...]:
    found = (
        bounds[0] == 0 and "a lower bound of 0 is idle; the default, 0.5, is not",
        bounds[1] == math.inf and "an upper bound of inf is idle",
        "before 2025-12-11 the threshold was one upper bound; until 2026-02-06 seq-mask-tis was called mis",
    )
    return (*(text for text in found if text), *clip_remarks(preset, CLIP))


def _type(parts: Parts) -> tuple[str, tuple[float, float]]:
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


def _gspo(preset: Preset, parts: Parts) -> Said:
    parts.need(("current",), ("gspo",))
    parts.finish()
    settings = {"algo.advantage.is_correction_enable": True, **_loss(preset)}
    remark = "under gspo correction type and threshold are ignored: the rollout's log-probs become the anchor"
    return (Snippet("flags", syntax.flags(settings)),), (remark,)


def _loss(preset: Preset) -> dict[str, Any]:
    found = clip_settings(preset, CLIP)
    bounds = {"actor.eps_clip_low_high": (found.pop("low"), found.pop("high"))} if "low" in found else {}
    gspo = {"actor.policy_loss_type": "gspo"} if preset.loss == "gspo" else {}
    return {**gspo, **bounds, **found}
