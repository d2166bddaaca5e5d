"""SkyRL's trainer.algorithm.off_policy_correction; three losses are against the rollout."""

from __future__ import annotations

from offpol_diag.presets import Preset
from offpol_diag.trainers import config, schema
from offpol_diag.trainers.config import IDLE_HIGH, ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, cannot

ALGORITHM, CORRECTION = "trainer.algorithm.", "off_policy_correction."
DUAL = "clip_ratio_c"
CLIP = ClipKeys(
    "eps_clip_low",
    "eps_clip_high",
    DUAL,
    dual_words=lambda bound: f"policy_loss_type is dual_clip and {DUAL} is {bound:g}",
)


def skyrl(parts: Parts) -> Translation:
    """Overrides, and the same as YAML."""
    preset, rules = parts.preset, parts.preset.reject
    settings = _bypass(parts) if parts.policy == "current" else _decoupled(parts)
    parts.finish()
    named = config.prefixed(ALGORITHM, settings)
    named["generator.sampling_params.logprobs"] = 1
    several = len(rules) + bool(preset.veto) > 1
    return (Form(named, _since(settings)),), (
        config.idle(settings) and "bounds of 1.0e-9 and 1.0e+9 are idle: log-ratios are clamped to ±20",
        several
        and "outliers, token mask, weights, sequence mask, in that order: each over what the one "
        "before has left",
    )


def _since(settings: Settings) -> str:
    """Return the first version that reads these keys."""
    if "cispo.cispo_anchor" in settings:
        return "2026-07-28"
    return "0.3.0" if settings["policy_loss_type"] == "dppo" else "0.1.0"


def _decoupled(parts: Parts) -> Settings:
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    on_tokens = any(rule.on_tokens for rule in parts.rules)
    result: Settings = {}
    veto = parts.take_veto(upper=True)
    if veto is not None:
        result["outlier_token_is_threshold_low"] = veto.lower
        result["outlier_token_is_threshold_high"] = veto.upper
    parts.split_mask()
    rule = parts.take("ratio", "token")
    if rule is not None:
        low, high = config.idle_bounds(rule.lower, rule.upper)
        result |= {"token_mask_is_threshold_low": low, "token_mask_is_threshold_high": high}
    result |= _weight(parts, on_tokens) | _sequence_mask(parts, on_tokens)
    return config.prefixed(CORRECTION, result) | _loss(parts.preset)


def _weight(parts: Parts, on_tokens: bool) -> Settings:
    weight = parts.weight
    if weight is None:
        return {"tis_ratio_type": None}
    if weight.over == "sum" and on_tokens:
        cannot("a product over tokens that its token mask has taken out")
    parts.take_weight("token", "sum")
    name = {"token": "token", "sum": "sequence"}[weight.over]
    upper = IDLE_HIGH if weight.upper is None or weight.action == "none" else weight.upper
    return {"tis_ratio_type": name, f"{name}_tis_ratio_clip_high": upper}


def _sequence_mask(parts: Parts, on_tokens: bool) -> Settings:
    for rule in tuple(parts.rules):
        name = {"mean": "geo", "sum": "product"}.get(rule.over)
        if name and (rule.statistic, rule.advantage) == ("ratio", "any") and not on_tokens:
            parts.rules.remove(rule)
            low, high = config.idle_bounds(rule.lower, rule.upper)
            metric = "geometric" if name == "geo" else "product"
            return {"sequence_mask_metric": metric, f"{name}_mask_low": low, f"{name}_mask_high": high}
    return {}


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        return {"policy_loss_type": "cispo", **_cispo_bounds(*config.clip_bounds(preset))}
    config.no_dual_clip(preset)
    if (preset.loss, preset.clip.low, preset.clip.high, preset.clip.dual) == ("ppo_clip", None, None, None):
        if preset.weight is not None or preset.reject or preset.veto is not None:
            cannot("weights or rules under importance_sampling, which applies no correction")
        return {"policy_loss_type": "importance_sampling"}
    clip = config.clip_settings(preset, CLIP)
    dual = clip.pop(DUAL, None)
    if preset.loss == "gspo":
        return {"policy_loss_type": "gspo", **clip}
    if dual is None:  # the usual one is a guard, which is a remark
        return {"policy_loss_type": "regular", **clip}
    return {"policy_loss_type": "dual_clip", **clip, DUAL: dual}


def _cispo_bounds(low: float, high: float) -> Settings:
    return {"cispo.cispo_eps_clip_low": low, "cispo.cispo_eps_clip_high": high}


# ---------------------------------------------------------------- against the rollout


def _bypass(parts: Parts) -> Settings:
    if parts.loss == "surrogate":
        return _dppo(parts)
    parts.need(("current",), ("reinforce",))
    weight = parts.weight
    if weight is None or weight.over != "token" or weight.normalize:
        cannot("REINFORCE against the rollout without token weights")
    result = parts.take_weight("token", actions=("truncate",), lower=True)
    if result is None or result.upper is None:
        cannot("this weight")
    bounds = _cispo_bounds(1 - (result.lower or 0.0), result.upper - 1)
    return {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout", **_short(bounds)}


def _short(bounds: dict[str, float]) -> Settings:
    """1.2 − 1 is 0.2 in its config, not 0.19999999999999996."""
    return {key: float(f"{value:.15g}") for key, value in bounds.items()}


def _dppo(parts: Parts) -> Settings:
    parts.take_weight("token", actions=("none",))
    if len(parts.rules) != 1 or parts.preset.weight is None:
        cannot("this loss without exactly one mask")
    rule = parts.rules.pop()
    kinds = {("prob_diff", "against"): "binary_tv", ("binary_kl", "away"): "binary_kl"}
    kind = kinds.get((rule.statistic, rule.advantage))
    low = rule.upper if kind == "binary_kl" else None if rule.lower is None else -rule.lower
    if kind is None or rule.over != "token" or low is None or rule.upper is None:
        cannot(f"a mask by {rule.statistic} with this condition on the advantage ({rule.advantage})")
    bounds = {"dppo.delta_low": low, "dppo.delta_high": rule.upper}
    return {"policy_loss_type": "dppo", "dppo.dppo_type": kind, **bounds}


GUARDS = Guards(20.0, unclamped=frozenset({"prob_diff", "binary_kl"}))
READ = "NovaSky-AI/SkyRL a9564572e (2026-08-21)"
WRITERS: schema.Writers = {"hydra": schema.hydra, "yaml": schema.yaml}
TRAINER = Trainer("skyrl", READ, skyrl, WRITERS, GUARDS, CLIP, "SkyRL")
