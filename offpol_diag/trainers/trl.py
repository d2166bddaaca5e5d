"""TRL's GRPO trainer: `sampling/` while its vLLM correction is on, `clip_ratio/`; its GRPOConfig.

Logged numbers are off TRL f2cd5771. Its means are of one process each, then over processes; here the dump is
one process.
"""

from __future__ import annotations

import math
from functools import partial

from offpol_diag.presets import Preset
from offpol_diag.trainers import config
from offpol_diag.trainers.base import Array, Log, Numbers, Tokens, Totals, named, np
from offpol_diag.trainers.config import ClipKeys, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, Writers, cannot, python


def log(t: Tokens, s: Totals) -> Numbers:
    """Return `sampling/` while the correction is on, and what the clip does (grpo_trainer.py:3218-3258)."""
    result = {} if t.preset.weight is None else named("sampling/", sampling(t, s))
    if t.batch.current is None or t.batch.advantages is None:
        return result
    if t.preset.loss in ("ppo_clip", "gspo"):
        result |= named("clip_ratio/", clip_ratio(t, s))
    if t.preset.loss == "cispo":
        _, high = cut(t)
        result["cispo_clip_ratio"] = s.sum(t.row_sum(high)) / s.sum(t.n)
    return result


def sampling(t: Tokens, s: Totals) -> Numbers:
    """Return ratios after truncation or masking: of tokens, in sequence modes of all completions."""
    tokens, gap, ratio = s.sum(t.n), abs(t.log_ratio), t.unit_weight
    low, total, high = (
        (ratio, ratio, ratio) if t.weighs_rows else (t.row_min(ratio), t.row_sum(ratio), t.row_max(ratio))
    )
    return {
        "sampling_logp_difference/mean": s.sum(t.row_sum(gap)) / tokens,
        "sampling_logp_difference/max": s.max(t.row_max(gap)),
        "importance_sampling_ratio/min": s.min(low),
        "importance_sampling_ratio/mean": s.sum(total) / (s.sum(t.one) if t.weighs_rows else tokens),
        "importance_sampling_ratio/max": s.max(high),
    }


def clip_ratio(t: Tokens, s: Totals) -> Numbers:
    """Return shares of tokens that the clip acts on; of completions where each has one ratio."""
    size = t.one if t.pooled else t.n
    low, high = (np.minimum(t.row_sum(flags), size) for flags in cut(t))
    units, lows, highs = s.sum(t.one if t.pooled else t.n), s.sum(low), s.sum(high)
    return {
        "low_mean": lows / units,
        "low_min": s.min(np.where(size > 0, low / size, math.inf)),
        "high_mean": highs / units,
        "high_max": s.max(np.where(size > 0, high / size, -math.inf)),
        "region_mean": (lows + highs) / units,
    }


def cut(t: Tokens) -> tuple[Array, Array]:
    """Flag tokens that the clip acts on: below 1 − epsilon with A < 0, and above 1 + epsilon with A > 0."""
    clip, a = t.preset.clip, t.batch.advantages
    assert a is not None
    low, high, dual = (math.inf if x is None else x for x in (clip.low, clip.high, clip.dual))
    r = np.minimum(t.update_ratio, dual)
    return (r < 1 - low) & (a < 0), (r > 1 + high) & (a > 0)


LOG = Log("trl", log)

# ---------------------------------------------------------------- configuration

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
TRAINER = Trainer(
    "trl", "huggingface/trl f2cd5771 (2026-07-24)", trl, WRITERS, clip=CLIP, logs=(LOG,), title="TRL"
)
