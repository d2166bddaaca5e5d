"""open-instruct: ρ flags, on by default; 0 means off."""

from __future__ import annotations

from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_bounds, clip_remarks, clip_settings
from offpol_diag.configs.parts import Band, Parts, cannot
from offpol_diag.configs.schema import block
from offpol_diag.presets import Preset

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
CLIP = ClipKeys("clip_lower", "clip_higher", high_default=0.272)
OFF = (None, None)


def open_instruct(preset: Preset) -> Said:
    """A clamp and a mask on ρ, of tokens or of rows."""
    parts = Parts(preset)
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip",) if bypass else ("ppo_clip", "cispo"))
    on = not bypass and parts.weight is not None
    settings: dict[str, Any] = {"use_rho_correction": "true" if on else "false"}
    settings |= {"use_vllm_logprobs": "true"} if bypass else {}
    settings |= _rho(parts) if on else {}
    parts.finish()
    settings |= _loss(preset)
    snippet = block("open-instruct", "flags", syntax.flags(settings), settings)
    return (snippet,), (*_remarks(settings, on), *clip_remarks(preset, CLIP))


def _rho(parts: Parts) -> dict[str, Any]:
    tv = _take_tv(parts)
    parts.split_mask()
    weight = parts.take_weight("token", "mean", lower=True)
    if weight is None or (tv is not None and weight.over != "token"):
        cannot("this weight")
    rule = None if tv is not None else parts.take("ratio", weight.over)
    clamp = (weight.lower, weight.upper)
    mask: Band = (None, tv) if tv is not None else (rule.lower, rule.upper) if rule else OFF
    if weight.over == "mean" and rule is None:
        cannot("weights of the geometric mean without its mask")
    flags = {
        "rho_mask_sequence_level": "true" if weight.over == "mean" else "",
        "rho_mask_tv_divergence": "true" if tv is not None else "",
    }
    return {
        **_bounds("rho_clamp", clamp),
        **_bounds("rho_mask", mask),
        **{k: v for k, v in flags.items() if v},
    }


def _take_tv(parts: Parts) -> float | None:
    """Twice the bound of a mask on the sequence's mean |r − 1|/2, on tokens pushed further away."""
    for rule in parts.rules:
        right = (rule.statistic, rule.over, rule.advantage, rule.lower) == ("tv", "mean", "away", None)
        if right and not (rule.strict or rule.policy or rule.among == "left") and rule.upper is not None:
            parts.rules.remove(rule)
            return 2 * rule.upper
    return None


def _bounds(name: str, bounds: Band) -> dict[str, float]:
    """0 is off; its validator wants the lower bound in (0, 1) and the upper one above 1."""
    low, high = bounds
    if low is not None and not 0 < low < 1:
        cannot("a lower bound that is not between 0 and 1")
    if high is not None and high <= 1:
        cannot("an upper bound that is not above 1")
    return {f"{name}_lower_bound": low or 0.0, f"{name}_upper_bound": high or 0.0}


def _loss(preset: Preset) -> dict[str, Any]:
    if preset.loss != "cispo":
        return clip_settings(preset, CLIP)
    low, high = clip_bounds(preset)
    if low < 1:
        cannot("a lower bound of CISPO's weight")
    return {"loss_fn": "cispo", "clip_higher": high}


def _remarks(settings: dict[str, Any], on: bool) -> tuple[str, ...]:
    found = (
        on and "a bound of 0 is off; before 2026-05-07 the key was truncated_importance_sampling_ratio_cap",
        "rho_mask_sequence_level" in settings
        and "a sequence is a packed row here, which may hold several responses",
        "rho_mask_tv_divergence" in settings
        and "the bound is on the mean of |r - 1| over a packed row, twice that of the preset",
    )
    return tuple(text for text in found if text)
