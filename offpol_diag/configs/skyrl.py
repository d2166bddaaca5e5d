"""SkyRL: trainer.algorithm.off_policy_correction, and three losses against the rollout."""

from __future__ import annotations

from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_bounds, clip_remarks, clip_settings, no_dual_clip
from offpol_diag.configs.parts import IDLE_HIGH, IDLE_LOW, Parts, cannot
from offpol_diag.configs.schema import block
from offpol_diag.presets import Preset, Weight

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
ALGORITHM, CORRECTION = "trainer.algorithm.", "off_policy_correction."
DUAL = "clip_ratio_c"


def _dual(bound: float) -> str:
    return f"policy_loss_type is dual_clip and {DUAL} is {bound:g}"


CLIP = ClipKeys("eps_clip_low", "eps_clip_high", DUAL, dual_said=_dual)
IDLE = "bounds of 1.0e-9 and 1.0e+9 are idle: log-ratios are clamped to ±20"
ORDER = "outliers, token mask, weights, sequence mask, in that order: each over what the one before has left"


def skyrl(preset: Preset) -> Said:
    """Overrides, and the same as YAML."""
    parts = Parts(preset)
    settings = _bypass(parts) if parts.policy == "current" else _decoupled(parts)
    parts.finish()
    said = {ALGORITHM + key: value for key, value in settings.items()}
    said["generator.sampling_params.logprobs"] = 1
    snippets = (
        block("skyrl", "hydra", syntax.hydra(said), said),
        block("skyrl", "yaml", syntax.yaml(said), said, "as YAML"),
    )
    idle = {IDLE_LOW, IDLE_HIGH} & {value for value in settings.values() if isinstance(value, float)}
    several = len(preset.reject) + bool(preset.veto) > 1 or any(
        rule.among == "left" for rule in preset.reject
    )
    dual = settings.get("policy_loss_type") == "regular"
    remarks = clip_remarks(preset, CLIP) if dual else ()
    return snippets, (*((IDLE,) if idle else ()), *((ORDER,) if several else ()), *remarks)


def _decoupled(parts: Parts) -> dict[str, Any]:
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    tokens = any(rule.on_tokens for rule in parts.rules)
    found = {
        **_outliers(parts),
        **_token_mask(parts),
        **_weight(parts, tokens),
        **_sequence_mask(parts, tokens),
    }
    return {**{CORRECTION + key: value for key, value in found.items()}, **_loss(parts.preset)}


def _outliers(parts: Parts) -> dict[str, Any]:
    veto = parts.take_veto(upper=True)
    bounds = {"low": veto.lower, "high": veto.upper} if veto else {}
    return {f"outlier_token_is_threshold_{side}": value for side, value in bounds.items()}


def _token_mask(parts: Parts) -> dict[str, Any]:
    parts.split_mask()
    rule = parts.take("ratio", "token")
    if rule is None:
        return {}
    return {
        "token_mask_is_threshold_low": IDLE_LOW if rule.lower is None else rule.lower,
        "token_mask_is_threshold_high": IDLE_HIGH if rule.upper is None else rule.upper,
    }


def _weight(parts: Parts, tokens: bool) -> dict[str, Any]:
    weight = parts.weight
    if weight is None:
        return {"tis_ratio_type": None}
    if weight.over == "sum" and tokens and weight.among != "left":
        cannot("a product over tokens that its token mask has taken out")
    parts.take_weight("token", "sum")
    name = {"token": "token", "sum": "sequence"}[weight.over]
    return {"tis_ratio_type": name, f"{name}_tis_ratio_clip_high": _upper(weight)}


def _upper(weight: Weight) -> float:
    return IDLE_HIGH if weight.upper is None or weight.action == "none" else weight.upper


def _sequence_mask(parts: Parts, tokens: bool) -> dict[str, Any]:
    for rule in tuple(parts.rules):
        name = {"mean": "geo", "sum": "product"}.get(rule.over)
        plain = (rule.statistic, rule.advantage, rule.policy, rule.strict) == ("ratio", "any", None, False)
        if name and plain and (rule.among == "left" or not tokens):
            parts.rules.remove(rule)
            return {
                "sequence_mask_metric": "geometric" if name == "geo" else "product",
                f"{name}_mask_low": IDLE_LOW if rule.lower is None else rule.lower,
                f"{name}_mask_high": IDLE_HIGH if rule.upper is None else rule.upper,
            }
    return {}


def _loss(preset: Preset) -> dict[str, Any]:
    if preset.loss == "cispo":
        return {"policy_loss_type": "cispo", **_cispo(*clip_bounds(preset))}
    no_dual_clip(preset)
    clip = clip_settings(preset, CLIP)
    dual = clip.pop(DUAL, None)
    if preset.loss == "gspo":
        return {"policy_loss_type": "gspo", **clip}
    if dual is None:  # the usual one is a guard, said in a remark
        return {"policy_loss_type": "regular", **clip}
    return {"policy_loss_type": "dual_clip", **clip, DUAL: dual}


def _cispo(low: float, high: float) -> dict[str, Any]:
    return {"cispo.cispo_eps_clip_low": low, "cispo.cispo_eps_clip_high": high}


# ---------------------------------------------------------------- against the rollout


def _bypass(parts: Parts) -> dict[str, Any]:
    if parts.loss == "surrogate":
        return _dppo(parts)
    parts.need(("current",), ("reinforce",))
    weight = parts.weight
    if weight is None or weight.over != "token" or weight.normalize:
        cannot("REINFORCE against the rollout without token weights")
    if weight.action == "mask" and weight.strict:
        return _rollout_is(parts, weight)
    found = parts.take_weight("token", actions=("truncate",), lower=True)
    if found is None or found.upper is None:
        cannot("this weight")
    bounds = _cispo(1 - (found.lower or 0.0), found.upper - 1)
    return {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout", **_short(bounds)}


def _rollout_is(parts: Parts, weight: Weight) -> dict[str, Any]:
    if weight.lower is None or weight.upper is None:
        cannot("rollout_is without both bounds")
    parts.weight = None
    bounds = {"eps_clip_low": 1 - weight.lower, "eps_clip_high": weight.upper - 1}
    return {"policy_loss_type": "rollout_is", **_short(bounds)}


def _short(bounds: dict[str, float]) -> dict[str, Any]:
    """1.2 − 1 is 0.2 in its config, not 0.19999999999999996."""
    return {key: float(f"{value:.15g}") for key, value in bounds.items()}


def _dppo(parts: Parts) -> dict[str, Any]:
    parts.take_weight("token", actions=("none",))
    if len(parts.rules) != 1 or parts.preset.weight is None:
        cannot("this loss without exactly one mask")
    rule = parts.rules.pop()
    kind = {("prob_diff", "against"): "binary_tv", ("binary_kl", "away"): "binary_kl"}.get(
        (rule.statistic, rule.advantage)
    )
    low = rule.upper if kind == "binary_kl" else None if rule.lower is None else -rule.lower
    if kind is None or rule.over != "token" or rule.strict or low is None or rule.upper is None:
        cannot(f"a mask by {rule.statistic} with this condition on the advantage ({rule.advantage})")
    bounds = {"dppo.delta_low": low, "dppo.delta_high": rule.upper}
    return {"policy_loss_type": "dppo", "dppo.dppo_type": kind, **bounds}
