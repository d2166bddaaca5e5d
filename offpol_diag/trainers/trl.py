"""TRL's GRPOConfig."""

from __future__ import annotations

from functools import partial

from offpol_diag.presets import Preset
from offpol_diag.trainers import config
from offpol_diag.trainers.config import ClipKeys, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, Writers, cannot, python

MODES = {"token": "token", "sum": "sequence"}
CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
KEY = "vllm_importance_sampling_"


def trl(parts: Parts) -> Translation:
    """vllm_importance_sampling_*."""
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    weights = _weights(parts)
    parts.finish()
    settings = {"use_vllm": True, **weights, **loss(parts.preset, CLIP)}
    forms = [Form(settings, _since(settings))]
    if settings.get(f"{KEY}clip_max") is not None and f"{KEY}clip_min" not in settings:
        capped = {key.replace("_clip_max", "_cap"): value for key, value in settings.items()}
        forms.append(Form(capped, _since(capped), "1.6.0"))
    return forms, () if f"{KEY}mode" in weights else (NO_DUMP,)


def _since(settings: Settings) -> str:
    """Return the first version that reads these keys."""
    if f"{KEY}clip_max" in settings:
        return "1.6.0"
    return "0.26.0" if f"{KEY}mode" in settings or settings.get("loss_type") == "cispo" else "0.23.0"


NO_DUMP = "without a correction TRL computes no old log-probs to dump: docs/trainers/trl.md says what does"


def _weights(parts: Parts) -> Settings:
    if parts.weight is None:
        return {f"{KEY}correction": False}
    over = parts.weight.over
    band = parts.take_band(over)
    mode, (low, high) = "mask", band or (None, None)
    if band is None:
        weight = parts.take_weight(*MODES, lower=True)
        if weight is not None and weight.action == "truncate":
            mode, low, high = "truncate", weight.lower, weight.upper
    if over not in MODES:
        cannot("weights of the geometric mean of the sequence")
    result = {f"{KEY}correction": True, f"{KEY}mode": f"{MODES[over]}_{mode}", f"{KEY}clip_max": high}
    return result if low is None else {**result, f"{KEY}clip_min": low}


def loss(preset: Preset, keys: ClipKeys) -> Settings:
    """The loss; CISPO's epsilon_high there is the bound itself, and it has no lower one."""
    if preset.loss == "cispo":
        return {"loss_type": "cispo", "epsilon_high": 1 + config.cispo_high(preset)}
    level = {"importance_sampling_level": "sequence"} if preset.loss == "gspo" else {}
    return {**level, **config.clip_settings(preset, keys)}


WRITERS: Writers = {"python": partial(python, "GRPOConfig")}
TRAINER = Trainer("trl", "huggingface/trl f2cd5771 (2026-07-24)", trl, WRITERS, clip=CLIP, title="TRL")
