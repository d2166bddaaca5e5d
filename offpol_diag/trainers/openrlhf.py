"""OpenRLHF: a level, a mode and a gate since September 2026; before, is_correction_type with two bounds."""

from __future__ import annotations

import math

from offpol_diag.presets import Preset
from offpol_diag.trainers import config
from offpol_diag.trainers.config import FLAGS, Band, ClipKeys, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, cannot

CLIP = ClipKeys("low", "high", "actor.dual_clip")
CORRECTION = "algo.advantage.is_correction_"
SEPTEMBER = "2026-09 (pull request 1339)"
LEVELS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
VLLM = {
    "enable": "enable_vllm_is_correction",
    "type": "vllm_is_correction_type",
    "threshold": "vllm_is_truncated_threshold",
}
"""Key → its spelling before 0.10.2."""


def openrlhf(parts: Parts) -> Translation:
    """A correction of tokens or sequences with two bounds; an idle lower one is 0, an idle upper one inf."""
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("gspo",) if bypass else ("ppo_clip", "gspo"))
    if not bypass and parts.loss == "gspo" and parts.weight is not None:
        cannot("weights under the GSPO loss, which takes the rollout for its anchor instead")
    if bypass or parts.weight is None:
        parts.finish()
        nothing = "OpenRLHF corrects nothing unless its correction is on"
        ignored = "under gspo the correction's bounds are ignored: the rollout's log-probs become the anchor"
        correction: tuple[Settings, ...] = ({"level": "token"}, {"enable": True}) if bypass else ({}, {})
        return _forms(_loss(parts.preset), *correction), (ignored if bypass else nothing,)
    kind, (low, high) = _type(parts)
    parts.finish()
    bounds = config.open_bounds(low, high)
    level, mode = LEVELS[kind]
    newest: Settings = {"level": level, "mode": mode, "gating": "ratio", "threshold": bounds}
    before: Settings = {"enable": True, "type": kind, "threshold": bounds}
    return _forms(_loss(parts.preset), newest, before), (
        bounds[0] == 0 and "a lower bound of 0 is idle; the default, 0.5, is not",
        bounds[1] == math.inf and "an upper bound of inf is idle",
        "before 0.9.1 the threshold was one upper bound",
    )


def _type(parts: Parts) -> tuple[str, Band]:
    band = parts.take_band("token")
    if band is not None:
        return "icepop", band
    weight = parts.take_weight("token", lower=True)
    rule = parts.take("ratio", "mean") if weight is not None and weight.action == "none" else None
    if rule is not None:
        return "seq-mask-tis", (rule.lower, rule.upper)
    return "tis", (None, None) if weight is None else (weight.lower, weight.upper)


def _forms(loss: Settings, newest: Settings, before: Settings) -> list[Form]:
    """The correction in each spelling that has had it, the newest first."""
    flat = {key.removeprefix("actor."): value for key, value in loss.items()}
    if not newest:
        return [Form(loss, "0.10.2"), *([Form(flat, "0.9.1", "0.10.2")] if flat else [])]
    former = {VLLM[key]: value for key, value in before.items()} | flat
    masked = before.get("type") == "seq-mask-tis"
    result = [
        Form(config.prefixed(CORRECTION, newest) | loss, SEPTEMBER),
        Form(config.prefixed(CORRECTION, before) | loss, "0.10.2", SEPTEMBER),
        Form(former, "0.9.4" if masked else "0.9.1", "0.10.2"),
    ]
    return [*result, Form(former | {VLLM["type"]: "mis"}, "0.9.1", "0.9.4")] if masked else result


def _loss(preset: Preset) -> Settings:
    result = config.clip_settings(preset, CLIP)
    bounds = {"actor.eps_clip_low_high": (result.pop("low"), result.pop("high"))} if "low" in result else {}
    return {**({"actor.policy_loss_type": "gspo"} if preset.loss == "gspo" else {}), **bounds, **result}


READ = "OpenRLHF/OpenRLHF 3c3be623 (2026-08-13) and pull request 1339 of September 2026"
TRAINER = Trainer("openrlhf", READ, openrlhf, FLAGS, clip=CLIP, title="OpenRLHF")
