"""AReaL: actor.rejection_sampling since v1.0.4, behave_imp_weight_* before."""

from __future__ import annotations

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers import config
from offpol_diag.trainers.config import YAML, ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, Snippet, cannot

ACTOR, RULE = "actor.", "rejection_sampling."
CLIP = ClipKeys("eps_clip", "eps_clip_higher", "c_clip")
LEVELS = {"token": "token", "mean": "sequence"}
METRICS = {"ratio": "ratio", "k1": "kl_k1", "k2": "kl_k2", "k3_reverse": "kl_k3"}
DECOUPLED = {"use_decoupled_loss": True, "recompute_logprob": True}
"""Required by M2PO too: this loss alone keeps the rollout's log-probs beside the recomputed ones."""


def areal(parts: Parts) -> Translation:
    """Translate a preset: bypass, recompute, or the decoupled loss with one rule."""
    preset = parts.preset
    parts.need(("old", "current"), ("ppo_clip", "gspo", "cispo"))
    settings = {**_correction(parts), **_loss(preset)}
    parts.finish()
    metric = str(settings.get(RULE + "metric", ""))
    ruled = any(key.startswith(RULE.rstrip(".")) for key in settings)
    since = "2.0.0" if parts.loss == "cispo" else "1.0.4" if ruled else "1.0.1"
    return [Form(config.prefixed(ACTOR, settings), since), *_before(preset)], (
        metric and "a log-ratio that is not finite counts as 0 here (weight 1)",
        metric == "kl_k1" and "kl_k1 is +log r here, the opposite sign of k1 elsewhere",
        metric == "kl_k3" and "kl_k3 is of π_rollout/π_train here, whatever its help says",
        "m2_threshold" in settings
        and "m2_threshold is on the mean of the squared log-ratio, and per micro-batch here",
        settings.get("importance_sampling_level") and "the advantage is averaged per sequence here",
    )


def _correction(parts: Parts) -> Settings:
    if parts.policy == "current":
        return {"use_decoupled_loss": False, "recompute_logprob": False}
    if parts.weight is None:
        moment = parts.take("k2", "batch", "upper")
        if moment is None:
            return {"use_decoupled_loss": False, "recompute_logprob": True}
        return {**DECOUPLED, "rejection_sampling": None, "m2_threshold": 2 * (moment.upper or 0.0)}
    if parts.loss == "gspo":
        cannot("weights under the GSPO loss")
    return {**DECOUPLED, **config.prefixed(RULE, _rule(parts))}


def _rule(parts: Parts) -> Settings:
    parts.split_mask()
    parts.drop_idle()
    weight = parts.take_weight(*LEVELS, lower=True)
    if weight is None:
        cannot("this weight")
    if weight.action == "truncate":
        return _bounded(LEVELS[weight.over], "clamp", "ratio", weight.lower, weight.upper)
    for rule in tuple(parts.rules):
        if _fits(rule, weight.over) and parts.take(rule.statistic, rule.over):
            low, high = rule.lower, rule.upper
            if rule.statistic == "k1":  # +Δ there
                low, high = (None if bound is None else -bound for bound in (rule.upper, rule.lower))
            level = "token" if rule.over == "token" else "sequence"
            return _bounded(level, "mask", METRICS[rule.statistic], low, high, rule.over)
    return cannot("untruncated weights without a rejection by one of its metrics")


def _fits(rule: Reject, over: str) -> bool:
    """Return whether the rule does not change the weight; a rule on sequence ratios makes it their mean."""
    if rule.statistic not in METRICS or rule.over == "batch":
        return False
    if rule.statistic == "ratio" and rule.over != "token":
        return over == "mean" and rule.over in ("mean", "sum", "max")
    return over == "token" and rule.over in ("token", "mean", "sum")


def _bounded(
    level: str, action: str, metric: str, low: float | None, high: float | None, agg: str = "mean"
) -> Settings:
    if high is None:
        cannot("a rule without an upper bound")
    if metric == "ratio" and high <= 1:
        cannot("an upper bound of the ratio that is not above 1")
    aggregate = {"agg": agg} if level == "sequence" else {}
    return {"level": level, "action": action, "metric": metric, **aggregate, "upper": high, "lower": low}


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        low, high = config.clip_bounds(preset)
        if high <= 0:
            cannot("CISPO without an upper bound above 1")
        return {"use_cispo_loss": True, CLIP.low: low, CLIP.high: high}
    gspo = {"importance_sampling_level": "sequence"} if preset.loss == "gspo" else {}
    return {**gspo, **config.clip_settings(preset, CLIP)}


def _before(preset: Preset) -> tuple[Form, ...]:
    """The keys of before 1.0.4, where they suffice: an upper bound, or M2PO without weights."""
    try:
        settings = {**DECOUPLED, **_cap(Parts(preset)), **_loss(preset)}
        return (Form(config.prefixed(ACTOR, settings), "1.0.1", "1.0.4"),)
    except ConfigError:
        return ()


def _cap(parts: Parts) -> Settings:
    parts.need(("old",), ("ppo_clip",))
    moment = parts.take("k2", "batch", "upper") if parts.weight is None else None
    if moment is not None:
        parts.finish()
        threshold = 2 * (moment.upper or 0.0)
        return {
            "behave_imp_weight_mode": "disabled",
            "behave_imp_weight_cap": None,
            "m2_threshold": threshold,
        }
    over = parts.weight.over if parts.weight else ""
    level = LEVELS.get(over) or cannot("no weight")
    band, mode = parts.take_band(over), "mask"
    low, high = band or (None, None)
    if band is None:
        weight, mode = parts.take_weight(over, actions=("truncate",)), "truncate"
        high = weight.upper if weight else None
    parts.finish()
    if low is not None or high is None:
        cannot("a lower bound")
    return {"behave_imp_weight_cap": high, "behave_imp_weight_mode": f"{level}_{mode}"}


def _guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    return Guards(denominator="kept" if any(rule.over == "batch" for rule in preset.reject) else "all")


READ = "areal-project/AReaL cbff54d64 (2026-08-22)"
TRAINER = Trainer("areal", READ, areal, YAML, _guards, CLIP, "AReaL")
