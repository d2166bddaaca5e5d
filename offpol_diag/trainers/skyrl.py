"""SkyRL: corrections that edit the loss mask one after the other; trainer.algorithm.off_policy_correction.

Logged numbers are those of off_policy_correction_utils.py, ppo_utils.py and trainer.py; log r is clamped to
±20. The corrections are outliers, tokens, weight, sequences, and each number is over what the earlier ones
left. Its fractions of sequences count rows without a token too. Three losses are against the rollout.
"""

from __future__ import annotations

import math

from offpol_diag.presets import Preset
from offpol_diag.trainers import base, config, schema
from offpol_diag.trainers.base import (
    SAFETY,
    Array,
    Log,
    Number,
    Numbers,
    Side,
    Tokens,
    Totals,
    named,
    np,
    std,
)
from offpol_diag.trainers.config import IDLE_HIGH, ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, cannot


def log(t: Tokens, s: Totals) -> Numbers:
    """Return numbers of a loss at π_old and its corrections, or of one anchored at the rollout."""
    if t.preset.policy == "old":
        gap = named("policy/rollout_train_logprobs_abs_diff_", s.part(distance, t.only(), False))
        return s.part(is_ratio, t.only()) | corrections(t, s) | clip_ratio(t, s) | gap
    gap = named("policy/minibatch_rollout_logprobs_abs_diff_", s.part(distance, t.only(), True))
    return anchored(t, s) | gap


def is_ratio(t: Tokens, s: Totals) -> Numbers:
    """Return numbers of r, its log within ±20, before any mask; std and min are of the padded batch."""
    tokens, hole, x = s.sum(t.n), padding(t, s), t.ratio_minus_one(SAFETY)
    first, second = s.sum(t.row_sum(x)), s.sum(t.row_sum(x**2))  # of r − 1, which is −1 in the hole
    return {
        "is_ratio_mean": first / tokens + 1,
        "is_ratio_std": std(first - hole, second + hole, tokens + hole),
        "is_ratio_max": s.max(t.row_max(t.ratio(SAFETY))),
        "is_ratio_min": padded_min(s.min(t.row_min(t.ratio(SAFETY))), hole),
    }


def padding(t: Tokens, s: Totals) -> Number:
    """Return the entries of SkyRL's padded batch, rows × longest response, that are no loss token."""
    return s.sum(t.one) * s.max(t.n + t.batch.masked) - s.sum(t.n)


def padded_min(low: Number, hole: Number) -> Number:
    """Return the minimum over the padded batch, where everything that is no loss token is 0."""
    return np.where(hole > 0, np.minimum(low, 0.0), low)


def distance(t: Tokens, s: Totals, padded: bool) -> Numbers:
    """Return |Δ| over loss tokens; `padded`: its minimum over the padded batch, its std with n below.

    That is so where SkyRL takes no pass for π_old (worker_utils.py:48-57 of a9564572e).
    """
    tokens, x = s.sum(t.n), abs(t.log_ratio)
    first, second, low = s.sum(t.row_sum(x)), s.sum(t.row_sum(x**2)), s.min(t.row_min(x))
    return {
        "mean": first / np.maximum(tokens, 1.0),
        "max": s.max(t.row_max(x)),
        "min": padded_min(low, padding(t, s)) if padded else low,
        "std": std(first, second, tokens, less=0 if padded else 1),
    }


# ---------------------------------------------------------------- at π_old


def corrections(t: Tokens, s: Totals) -> Numbers:
    """Return shares of outliers, token mask, cap, sequence mask, each of what those before it left."""
    p, d, rows, result = t.preset, t.log_ratio, s.sum(t.one), {}
    of_tokens = [rule for rule in p.reject if rule.over == "token"]
    inliers, left = t.under(veto=p.veto), t.under(*of_tokens, veto=p.veto)
    if p.veto is not None:
        above, below = base.half(p.veto, "upper"), base.half(p.veto, "lower")
        result["outlier_seq_masked_ratio"] = s.sum(t.veto_hits(p.veto) > 0) / rows
        result["outlier_seq_over_high_ratio"] = s.sum(t.veto_hits(above) > 0) / rows
        result["outlier_seq_under_low_ratio"] = s.sum(t.veto_hits(below) > 0) / rows
    before, after = s.sum(inliers.n_kept), s.sum(left.n_kept)
    if of_tokens:
        result["token_mask_ratio"] = (before - after) / np.maximum(before, 1.0)
    total = t.row_sum(np.where(left.kept, d, 0.0))
    if p.weight is not None and p.weight.over == "token":
        capped = beyond(d, p.weight.upper, "upper") & left.kept
        result["tis_token_clip_high_ratio"] = s.sum(t.row_sum(capped)) / np.maximum(after, 1.0)
    if p.weight is not None and p.weight.over == "sum":
        result["tis_seq_clip_high_ratio"] = s.sum(beyond(total, p.weight.upper, "upper")) / rows
    if any(rule.over == "mean" for rule in p.reject):
        result |= sequence_mask(t, s, "geo", "mean", total / left.n_kept.clip(min=1))
    if any(rule.over == "sum" for rule in p.reject):
        result |= sequence_mask(t, s, "product", "sum", total)
    return result


def sequence_mask(t: Tokens, s: Totals, name: str, over: str, x: Array) -> Numbers:
    """Return shares of rows whose log-ratio x [S] of the tokens left is beyond a bound."""
    rules = [rule for rule in t.preset.reject if (rule.statistic, rule.over) == ("ratio", over)]
    high = s.sum(sum((beyond(x, rule.upper, "upper") for rule in rules), np.zeros_like(x)) > 0)
    low = s.sum(sum((beyond(x, rule.lower, "lower") for rule in rules), np.zeros_like(x)) > 0)
    shares = {"masked": high + low, "over_high": high, "under_low": low}
    rows = s.sum(t.one)
    return {f"{name}_sequence_mask_{word}_ratio": many / rows for word, many in shares.items()}


def beyond(x: Array, edge: float | None, side: Side) -> Array:
    """Flag where x, a log clamped to ±20, is beyond log(edge)."""
    held = x.clip(-SAFETY, SAFETY)
    if side == "upper":
        return held > (math.log(edge) if edge else math.inf)
    return held < (math.log(edge) if edge else -math.inf)  # nothing is below 0


def clip_ratio(t: Tokens, s: Totals) -> Numbers:
    """Return the share of tokens where PPO's clip of π_θ/π_old acts, dropped or not."""
    a, clip = t.batch.advantages, t.preset.clip
    if a is None or t.batch.current is None:
        return {}
    u = t.token_u
    high = None if clip.high is None else 1 + clip.high
    low = None if clip.low is None or clip.low >= 1 else 1 - clip.low
    acts = (beyond(u, high, "upper") & (a > 0)) | (beyond(u, low, "lower") & (a < 0))
    return {"clip_ratio": s.sum(t.row_sum(acts)) / np.maximum(s.sum(t.n), 1.0)}


# ---------------------------------------------------------------- against the rollout


def anchored(t: Tokens, s: Totals) -> Numbers:
    """Return the share of tokens that the loss cuts, zeroes or masks; of CISPO also π_θ/π_rollout."""
    tokens, weight, cut = s.sum(t.n), t.preset.weight, t.n - t.n_kept
    if weight is not None:
        cut = cut + t.n_above + t.n_below
    result = {"clip_ratio": s.sum(cut) / np.maximum(tokens, 1.0)}
    if weight is not None and weight.action == "truncate":
        result |= {
            "cispo/ratio_mean": s.sum(t.row_sum(t.ratio_minus_one(SAFETY))) / tokens + 1,
            "cispo/ratio_clamped_mean": s.sum(t.row_sum(t.weight)) / np.maximum(tokens, 1.0),
            "cispo/ratio_max": s.max(t.row_max(t.ratio(SAFETY))),
            "cispo/ratio_min": s.min(t.row_min(t.ratio(SAFETY))),
        }
    return result


LOG = Log("skyrl", log)

# ---------------------------------------------------------------- configuration

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
TRAINER = Trainer("skyrl", READ, skyrl, WRITERS, GUARDS, CLIP, (LOG,), "SkyRL")
