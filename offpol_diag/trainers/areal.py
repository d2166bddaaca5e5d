"""AReaL: `ppo_actor/update/` (trainer/ppo/actor.py, utils/functional), and actor.rejection_sampling.

Every statistic comes as `/avg`, `/min` and `/max` over the tokens of its own denominator, of which there are
two: the valid tokens (all, or what M2PO leaves), and the behave tokens, those kept with a weight above 0.
A statistic of no token is not logged. The configuration is actor.rejection_sampling since v1.0.4,
behave_imp_weight_* before.
"""

from __future__ import annotations

import math

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers import config
from offpol_diag.trainers.base import Array, Log, Numbers, Tokens, Totals, named, np
from offpol_diag.trainers.config import YAML, ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, Snippet, cannot

SCOPE = "ppo_actor/update/"


def log(t: Tokens, s: Totals) -> Numbers:
    """Return what is logged since 1.0.4, where rejection_sampling has a share beside what its cap had."""
    return named(SCOPE, statistics(t, s) | filtered(t, s))


def log_v1_0_3(t: Tokens, s: Totals) -> Numbers:
    """Return what is logged under behave_imp_weight_cap: actor.py:536-542 there."""
    return named(SCOPE, statistics(t, s))


def statistics(t: Tokens, s: Totals) -> Numbers:
    """Return statistics of the update, over valid tokens, and of the mismatch, over behave tokens."""
    weight, result = t.preset.weight, {}
    if (
        t.batch.current is not None and t.preset.loss != "gspo"
    ):  # whose ratio over kept tokens is not computed here
        result = s.part(importance_weight, t.only("reject", "veto", "loss"))
        result = result | s.part(approx_kl, t.under(*_over_batch(t.preset)).only("reject", "loss"))
    if weight is None:
        return result | s.part(mismatch, t.only("reject", "veto"), False)
    result = result | statistic(t, s, "behave_imp_weight", t.weight, behave(t))
    masks = ("weight",) if weight.action == "mask" else ()
    return result | s.part(mismatch, t.only("reject", "veto", *masks), True)


def importance_weight(t: Tokens, s: Totals) -> Numbers:
    """Return π_θ/π_old over the valid tokens, where that of one that is dropped is 0."""
    return statistic(t, s, "importance_weight", np.where(t.kept, t.update_ratio, 0.0), valid(t))


def approx_kl(t: Tokens, s: Totals) -> Numbers:
    """Return log π_θ − log π_old over the valid tokens, which are all that `t` keeps."""
    return statistic(t, s, "approx_kl", t.u, t.kept)


def mismatch(t: Tokens, s: Totals, samples: bool) -> Numbers:
    """Return k1 with the sign turned, if rejection sampling is set, and the estimates of π_θ's."""
    result, of = {}, behave(t)
    if samples:
        result = statistic(t, s, "behave_approx_kl", t.log_ratio, of)
    if t.batch.current is not None:
        both = t.of("current")
        result |= statistic(t, s, "compute_logp/kl_div_direct", -both.log_ratio, of)
        result |= statistic(t, s, "compute_logp/kl_div_taylor", both.log_ratio**2 / 2, of)
        result |= statistic(t, s, "compute_logp/kl_div_dual", both.k3(), of)
    return result


def behave(t: Tokens) -> Array:
    """Flag the tokens kept with a weight above 0, which only a masked weight is not, [T] bool."""
    weight = t.preset.weight
    return t.kept & (t.weight > 0) if weight is not None and weight.action == "mask" else t.kept


def statistic(t: Tokens, s: Totals, name: str, x: Array, among: Array) -> Numbers:
    """Return average, smallest and largest of the tokens of a denominator, not logged where it is 0."""
    many, every = s.sum(t.row_sum(among)), among.all()

    def only(none: float) -> Array:
        return x if every else np.where(among, x, none)

    result = {
        "avg": s.sum(t.row_sum(only(0.0))) / many,
        "min": s.min(t.row_min(only(math.inf))),
        "max": s.max(t.row_max(only(-math.inf))),
    }
    return {f"{name}/{end}": s.given(many > 0, number) for end, number in result.items()}


def _over_batch(preset: Preset) -> tuple[Reject, ...]:
    """Return the M2PO rules, which edit the loss mask before any statistic."""
    return tuple(rule for rule in preset.reject if rule.over == "batch")


def valid(t: Tokens) -> Array:
    """Flag the tokens that M2PO leaves, [T] bool."""
    return t.under(*_over_batch(t.preset)).kept


def filtered(t: Tokens, s: Totals) -> Numbers:
    """Return the share of valid tokens that rejection sampling drops, or whose weight it clamps."""
    weight = t.preset.weight
    if weight is None or weight.action == "mask":  # a weight masked without its token means the older cap
        return {}
    tokens = t.row_sum(valid(t))
    changed = tokens - t.n_kept + (t.n_bounded if weight.action == "truncate" else 0.0)
    return {"rs_filtered_fraction": s.sum(changed) / np.maximum(s.sum(tokens), 1.0)}


LOGS = (Log("areal", log), Log("areal-v1.0.3", log_v1_0_3))

# ---------------------------------------------------------------- configuration

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
    return Guards(denominator="kept" if _over_batch(preset) else "all")


READ = "areal-project/AReaL cbff54d64 (2026-08-22)"
TRAINER = Trainer("areal", READ, areal, YAML, _guards, CLIP, LOGS, "AReaL")
