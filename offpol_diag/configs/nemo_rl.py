"""NeMo-RL: keys of `loss_fn`, and one of `grpo`."""

from __future__ import annotations

from typing import Any

from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_bounds, clip_remarks, clip_settings
from offpol_diag.configs.parts import Parts, cannot
from offpol_diag.configs.schema import yaml_and_hydra
from offpol_diag.presets import Preset

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
TYPE, RATIO, LOW = (f"truncated_importance_sampling_{key}" for key in ("type", "ratio", "ratio_min"))
CLIP = ClipKeys("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
LOSS = "loss_fn."
RAW = {TYPE: None, RATIO: None}
"""No truncation: a ratio that is left over from a base file is an error without its type."""


def nemo_rl(preset: Preset) -> Said:
    """tis, icepop or seq-mask-tis, and a threshold on the sequence's log-prob error."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    error = parts.take("mult_prob_error", "mean", "upper")
    settings = {**_weights(parts), **_loss(preset)}
    parts.finish()
    block = {LOSS + key: value for key, value in settings.items()}
    if error is not None:
        block["grpo.seq_logprob_error_threshold"] = error.upper
    return yaml_and_hydra("nemo-rl", block), (
        *_remarks(settings, error is not None),
        *clip_remarks(preset, CLIP),
    )


def _weights(parts: Parts) -> dict[str, Any]:
    if parts.weight is None:
        return {"use_importance_sampling_correction": False, **RAW}
    on = {"use_importance_sampling_correction": True}
    if parts.weight.over == "sum" or parts.loss == "gspo":
        return on | _sequence(parts)
    band = parts.take_band("token")
    if band is not None:
        return on | _bounded("icepop", *band)
    weight = parts.take_weight("token", lower=True)
    if weight is None or weight.action == "none":
        rule = parts.take("ratio", "mean")
        return on | (_bounded("seq-mask-tis", rule.lower, rule.upper) if rule else RAW)
    return on | _tis(weight.lower, weight.upper)


def _sequence(parts: Parts) -> dict[str, Any]:
    """sequence_level_importance_ratios makes both the weight a product and the loss GSPO."""
    if parts.loss != "gspo":
        cannot("weights of the product ratio without the GSPO loss")
    weight = parts.take_weight("sum", lower=True)
    if weight is None or weight.action == "none":
        return dict(RAW)
    return _tis(weight.lower, weight.upper)


def _tis(low: float | None, high: float | None) -> dict[str, Any]:
    if high is None:
        cannot("weights truncated from below alone")
    return {TYPE: "tis", RATIO: high, LOW: low}


def _bounded(kind: str, low: float | None, high: float | None) -> dict[str, Any]:
    """icepop and seq-mask-tis need both bounds; a ratio is never below 0."""
    if high is None:
        cannot(f"{kind} without an upper bound")
    return {TYPE: kind, RATIO: high, LOW: 0.0 if low is None else low}


def _loss(preset: Preset) -> dict[str, Any]:
    if preset.loss == "cispo":
        low, high = clip_bounds(preset)
        return {"use_cispo": True, CLIP.low: low, CLIP.high: high, CLIP.dual: None}
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    return {**(gspo if preset.loss == "gspo" else {}), **clip_settings(preset, CLIP)}


def _remarks(settings: dict[str, Any], error: bool) -> tuple[str, ...]:
    found = (
        settings.get(TYPE) == "tis"
        and not settings[LOW]
        and f"before NeMo-RL 0.6.0 there is no {TYPE}: the ratio alone means tis",
        error and "the sequences of seq_logprob_error_threshold leave the denominator",
    )
    return tuple(text for text in found if isinstance(text, str) and text)
