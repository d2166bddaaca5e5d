"""AReaL: actor.rejection_sampling since v1.0.4, behave_imp_weight_* before."""

from __future__ import annotations

from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_remarks, clip_settings
from offpol_diag.configs.parts import Parts, cannot
from offpol_diag.configs.schema import block, older
from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset, Reject

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
ACTOR, RULE = "actor.", "rejection_sampling."
CLIP = ClipKeys("eps_clip", "eps_clip_higher", "c_clip")
LEVELS = {"token": "token", "mean": "sequence"}
METRICS = {"ratio": "ratio", "k1": "kl_k1", "k2": "kl_k2", "k3_reverse": "kl_k3"}
BYPASS = {"use_decoupled_loss": False, "recompute_logprob": False}
RECOMPUTE = {"use_decoupled_loss": False, "recompute_logprob": True}
DECOUPLED = {"use_decoupled_loss": True, "recompute_logprob": True}


def areal(preset: Preset) -> Said:
    """Bypass, recompute, or the decoupled loss with one rule."""
    parts = Parts(preset)
    parts.need(("old", "current"), ("ppo_clip", "gspo"))
    settings = {**_correction(parts), **_loss(preset)}
    parts.finish()
    now = {ACTOR + key: value for key, value in settings.items()}
    snippets = (block("areal", "yaml", syntax.yaml(now), now), *_before(preset))
    return snippets, (*_remarks(settings), *clip_remarks(preset, CLIP))


def _correction(parts: Parts) -> dict[str, Any]:
    if parts.policy == "current":
        return dict(BYPASS)
    if parts.weight is None:
        moment = parts.take("k2", "batch", "upper")
        if moment is None:
            return dict(RECOMPUTE)
        return {**DECOUPLED, "rejection_sampling": None, **_moment(moment)}
    if parts.loss == "gspo":
        cannot("weights under the GSPO loss")
    return {**DECOUPLED, **{RULE + key: value for key, value in _rule(parts).items()}}


def _moment(rule: Reject) -> dict[str, Any]:
    """Only the decoupled loss keeps the rollout's log-probs beside the recomputed ones."""
    return {"m2_threshold": 2 * (rule.upper or 0.0)}


def _rule(parts: Parts) -> dict[str, Any]:
    parts.split_mask()
    parts.drop_idle()
    weight = parts.take_weight(*LEVELS, lower=True)
    if weight is None:
        cannot("this weight")
    level = LEVELS[weight.over]
    if weight.action == "truncate":
        return _bounded(level, "clamp", "ratio", weight.lower, weight.upper)
    for rule in tuple(parts.rules):
        if _fits(rule, weight.over) and parts.take(rule.statistic, rule.over):
            return _masked(rule)
    return cannot("untruncated weights without a rejection by one of its metrics")


def _fits(rule: Reject, over: str) -> bool:
    """Whether the rule leaves the weight there what it is: with a ratio of sequences it is their mean."""
    if rule.statistic not in METRICS or rule.over == "batch":
        return False
    if rule.statistic == "ratio" and rule.over != "token":
        return over == "mean" and rule.over in ("mean", "sum", "max")
    return over == "token" and rule.over in ("token", "mean", "sum")


def _masked(rule: Reject) -> dict[str, Any]:
    metric, low, high = METRICS[rule.statistic], rule.lower, rule.upper
    if rule.statistic == "k1":  # +Δ there
        low, high = (None if bound is None else -bound for bound in (rule.upper, rule.lower))
    if rule.over == "token":
        return _bounded("token", "mask", metric, low, high)
    return _bounded("sequence", "mask", metric, low, high, rule.over)


def _bounded(
    level: str, action: str, metric: str, low: float | None, high: float | None, agg: str = ""
) -> dict[str, Any]:
    if high is None:
        cannot("a rule without an upper bound")
    if metric == "ratio" and high <= 1:
        cannot("an upper bound of the ratio that is not above 1")
    aggregate = {"agg": agg or "mean"} if level == "sequence" else {}
    return {"level": level, "action": action, "metric": metric, **aggregate, "upper": high, "lower": low}


def _loss(preset: Preset) -> dict[str, Any]:
    gspo = {"importance_sampling_level": "sequence"} if preset.loss == "gspo" else {}
    return {**gspo, **clip_settings(preset, CLIP)}


def _remarks(settings: dict[str, Any]) -> tuple[str, ...]:
    metric = str(settings.get(RULE + "metric", ""))
    found = (
        metric and "a log-ratio that is not finite counts as 0 here (weight 1)",
        metric == "kl_k1" and "kl_k1 is +log r here, the opposite sign of k1 elsewhere",
        metric == "kl_k3" and "kl_k3 is of π_rollout/π_train here, whatever its help says",
        "m2_threshold" in settings
        and "m2_threshold is on the mean of the squared log-ratio, and per micro-batch here",
        settings.get("importance_sampling_level") and "the advantage is averaged per sequence here",
    )
    return tuple(text for text in found if isinstance(text, str) and text)


def _before(preset: Preset) -> tuple[Snippet, ...]:
    """The keys of before 1.0.4, where they can say it: an upper bound, or M2PO without weights."""
    try:
        settings = _cap(Parts(preset))
    except ConfigError:
        return ()
    said = {ACTOR + key: value for key, value in {**DECOUPLED, **settings, **_loss(preset)}.items()}
    return older("areal", "yaml", syntax.yaml(said), said)


def _cap(parts: Parts) -> dict[str, Any]:
    parts.need(("old",), ("ppo_clip",))
    moment = parts.take("k2", "batch", "upper") if parts.weight is None else None
    if moment is not None:
        parts.finish()
        return {"behave_imp_weight_mode": "disabled", "behave_imp_weight_cap": None, **_moment(moment)}
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
