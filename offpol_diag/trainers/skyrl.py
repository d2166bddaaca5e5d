"""SkyRL: corrections that edit the loss mask one after the other; trainer.algorithm.off_policy_correction.

Logged numbers are those of off_policy_correction_utils.py, ppo_utils.py and trainer.py; log r is clamped to
±20. The corrections are outliers, tokens, weight, sequences, and each number is over what the earlier ones
left. Its fractions of sequences count rows without a token too. Three losses are against the rollout.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from offpol_diag.presets import Clip, Over, Preset, Weight
from offpol_diag.trainers import base, config, schema
from offpol_diag.trainers.base import Row, Side, Sum, Totals, Value, When, highest, per_row, std, table, total
from offpol_diag.trainers.config import IDLE_HIGH, ClipKeys, Guards, Parts, Settings, Trainer, Translation
from offpol_diag.trainers.measures import DISTANCE, EXCESS_CLAMPED, RATIO_CLAMPED, SAFETY, Measure, squared

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import Tokens, View


def _corrects(preset: Preset) -> bool:
    """Return whether the loss is anchored at π_old, and so has separate corrections."""
    return preset.policy == "old"


def _anchored(preset: Preset) -> bool:
    """Return whether the loss's own ratio is π_θ/π_rollout, which is then the correction."""
    return preset.policy == "current"


def _cispo(preset: Preset) -> bool:
    return _anchored(preset) and preset.weight is not None and preset.weight.action == "truncate"


def _outliers(preset: Preset) -> bool:
    return _corrects(preset) and preset.veto is not None


def _weighs(over: str) -> When:
    return lambda preset: _corrects(preset) and preset.weight is not None and preset.weight.over == over


def _masks(over: str) -> When:
    return lambda preset: _corrects(preset) and any(rule.over == over for rule in preset.reject)


# ---------------------------------------------------------------- sums


def _token_rules(preset: Preset) -> Preset:
    """Return the preset with only its rules on tokens."""
    return replace(preset, reject=tuple(rule for rule in preset.reject if rule.over == "token"))


def _beyond(x: Array, edge: float | None, side: Side) -> Array:
    """Flag where x, a log clamped to ±20, is beyond log(edge)."""
    held = x.clip(-SAFETY, SAFETY)
    if side == "upper":
        return held > (math.log(edge) if edge else math.inf)
    return held < (math.log(edge) if edge else -math.inf)  # nothing is below 0


def _outlier(*sides: Side) -> Value:
    """The share of rows with a token beyond these outlier bounds."""

    def of(view: View) -> Array:
        veto = view.preset.veto
        return (view.veto_hits(veto if len(sides) > 1 else base.half_veto(veto, sides[0])) > 0) + view.zeros

    return per_row(Sum(f"outlier {sides}", of))


def _capped(x: Tokens) -> Array:
    weight, left = x.preset.weight or Weight(), x.kept_by(_token_rules(x.preset))
    above = _beyond(x.delta, weight.upper, "upper")
    return above if left is None else above & left


def _capped_rows(view: View) -> Array:
    """Flag rows whose product of r over kept tokens is above the weight's cap."""
    product = view.aggregate_of_kept("sum", _token_rules(view.preset))
    return _beyond(product, (view.preset.weight or Weight()).upper, "upper") + view.zeros


def _row_masked(over: Over, side: Side) -> Sum:
    """Rows whose geometric mean (over = mean) or product (sum) of what is left lies beyond one bound."""

    def of(view: View) -> Array:
        x = view.aggregate_of_kept(over, _token_rules(view.preset))
        rules = (rule for rule in view.preset.reject if (rule.statistic, rule.over) == ("ratio", over))
        flags = (_beyond(x, getattr(rule, side), side) for rule in rules)
        return (sum(flags, view.zeros) > 0) + view.zeros

    return Sum(f"{over} {side}", of)


def _clips(x: Tokens) -> Array:
    """Tokens where the clipped objective of π_θ/π_old is below the unclipped one; none under SAPO."""
    a, u = x.column("advantages"), x.of("current").delta - x.delta
    clip = Clip(None, None) if x.preset.loss == "sapo" else x.preset.clip
    high = None if clip.high is None else 1 + clip.high
    low = None if clip.low is None or clip.low >= 1 else 1 - clip.low
    return (_beyond(u, high, "upper") & (a > 0)) | (_beyond(u, low, "lower") & (a < 0))


def _clipped_anchored(view: View) -> Array:
    """Tokens whose weight is cut or zeroed, or that the loss's own mask drops."""
    weighed, dropped = view.effect.weighed, view.n - view.effect.kept_tokens
    return dropped if weighed is None else dropped + weighed.high + weighed.low


CLIPS = Measure("the clip acts", _clips, own=True, needs=("current", "old", "advantages"))
CAPPED = total(Measure("above the cap", _capped, own=True))
EXCESS, EXCESS_SQUARED = total(EXCESS_CLAMPED), total(squared(EXCESS_CLAMPED))
AFTER_OUTLIERS = Sum("after outliers", lambda view: view.kept_by(replace(view.preset, reject=())))
AFTER_TOKENS = Sum("after tokens", lambda view: view.kept_by(_token_rules(view.preset)))

# ---------------------------------------------------------------- what is logged


def _hole(totals: Totals) -> float:
    """Entries of SkyRL's padded batch, rows × longest response, that are no loss token."""
    return totals.rows * totals.read.ranges["response"][1] - totals.tokens


def _padded_min(of: base.Range) -> Value:
    """Over the padded batch, where everything that is no loss token counts as 0."""

    def least(totals: Totals) -> float:
        low = totals.ends(of)[0]
        return min(low, 0.0) if _hole(totals) else low

    return Value(least, (of,))


def _over_tokens(column: Sum, of: Sum | None = None) -> Value:
    """Over the tokens of a stage, or over all."""
    return Value(
        lambda totals: totals(column) / max(totals(of) if of else totals.tokens, 1.0),
        (column, of) if of else (column,),
    )


def _row_mask(name: str, over: Over, word: str) -> dict[str, Row]:
    high, low = _row_masked(over, "upper"), _row_masked(over, "lower")
    what = (
        f"sequences whose {word} of r = π_old/π_rollout, over the tokens that the outlier and token masks "
        "left (1 where none is), is beyond {} bound, as a share of all rows"
    )
    both = Value(lambda totals: (totals(high) + totals(low)) / totals.rows, (high, low))
    stem = f"{name}_sequence_mask_"
    return {
        f"{stem}masked_ratio": both.means(
            f"{what.format('either')}: not what all masks drop together", _masks(over)
        ),
        f"{stem}over_high_ratio": per_row(high).means(what.format("the upper"), _masks(over)),
        f"{stem}under_low_ratio": per_row(low).means(what.format("the lower"), _masks(over)),
    }


CORRECTIONS: dict[str, Row] = {
    "is_ratio_mean": (base.per_token(EXCESS_CLAMPED) + 1).means(
        "r = π_old/π_rollout with log r clamped to ±20, mean over the loss tokens before any mask or cap: "
        "not the mean weight. W&B has these names under policy/loss_metrics/, averaged over micro-batches"
    ),
    "is_ratio_std": Value(
        lambda p: std(p(EXCESS) - _hole(p), p(EXCESS_SQUARED) + _hole(p), p.tokens + _hole(p)),
        (EXCESS, EXCESS_SQUARED),
    ).means(
        "standard deviation over the whole padded batch, where everything that is no loss token counts as a "
        "ratio of 0 (here: rows × longest response of the dump, masked tokens included); so it says how much "
        "padding there is before it says how far r spreads"
    ),
    "is_ratio_max": highest(RATIO_CLAMPED).means("the largest r of any loss token, e^20 at most"),
    "is_ratio_min": _padded_min(base.span(RATIO_CLAMPED)).means(
        "0 as soon as one entry of the padded batch is masked or padding, else the smallest r: rarely a ratio"
    ),
    "outlier_seq_masked_ratio": _outlier("lower", "upper").means(
        "rows with a token whose r is below the low or above the high threshold, as a share of all rows",
        _outliers,
    ),
    "outlier_seq_over_high_ratio": _outlier("upper").means(
        "rows with a token above the high threshold; a row can count here and below", _outliers
    ),
    "outlier_seq_under_low_ratio": _outlier("lower").means(
        "rows with a token below the low threshold", _outliers
    ),
    "token_mask_ratio": Value(
        lambda p: (p(AFTER_OUTLIERS) - p(AFTER_TOKENS)) / max(p(AFTER_OUTLIERS), 1.0),
        (AFTER_OUTLIERS, AFTER_TOKENS),
    ).means(
        "tokens with r outside the token mask's band, as a share of those that the outlier mask left",
        _masks("token"),
    ),
    "tis_token_clip_high_ratio": _over_tokens(CAPPED, AFTER_TOKENS).means(
        "tokens with r above the cap, as a share of those that the outlier and token masks left",
        _weighs("token"),
    ),
    "tis_seq_clip_high_ratio": per_row(Sum("capped rows", _capped_rows)).means(
        "sequences whose product of r over the tokens left is above the cap, as a share of all rows; a row "
        "with nothing left has the product 1",
        _weighs("sum"),
    ),
    **_row_mask("geo", "mean", "geometric mean"),
    **_row_mask("product", "sum", "product"),
    "clip_ratio": _over_tokens(total(CLIPS)).means(
        "loss tokens where PPO's clip of π_θ/π_old acts (upwards with A > 0, downwards with A < 0), whatever "
        "the corrections drop; 0 under sapo, which has none; needs π_θ, π_old and advantages"
    ),
}
ANCHORED: dict[str, Row] = {
    "clip_ratio": _over_tokens(Sum("clipped anchored", _clipped_anchored)).means(
        "loss tokens whose π_θ/π_rollout the loss cuts, zeroes or masks, as a share of all", _anchored
    ),
    "cispo/ratio_mean": (base.per_token(EXCESS_CLAMPED) + 1).means(
        "π_θ/π_rollout before the clamp to its bounds (but with its log within ±20), mean over loss tokens"
    ),
    "cispo/ratio_clamped_mean": _over_tokens(Sum("weight", lambda view: view.effect.weight_sum)).means(
        "the same after the clamp: the mean weight"
    ),
    "cispo/ratio_max": highest(RATIO_CLAMPED).means("the largest π_θ/π_rollout of a loss token"),
    "cispo/ratio_min": base.lowest(RATIO_CLAMPED).means(
        "the smallest π_θ/π_rollout of a loss token; unlike is_ratio_min no padding enters"
    ),
}


def _distances(what: str) -> dict[str, Row]:
    return {
        "mean": _over_tokens(total(DISTANCE)).means(f"{what}, mean over the loss tokens of the batch"),
        "max": highest(DISTANCE).means(f"{what}, largest of any loss token"),
        "min": base.lowest(DISTANCE).means(f"{what}, smallest of any loss token"),
        "std": base.deviation(DISTANCE).means(f"{what}, standard deviation over loss tokens, n − 1 below"),
    }


TRAINED = _distances("|log π_old − log π_rollout|, unclamped")
BATCHED = "|log π_θ − log π_rollout|, unclamped, which SkyRL logs where it takes no pass for π_old"
MINIBATCH = _distances(BATCHED) | {
    "min": _padded_min(base.span(DISTANCE)).means(
        f"{BATCHED}, 0 as soon as one entry of the padded batch is masked or padding, else the smallest: "
        "rarely a difference (worker_utils.py:48-57 of a9564572e)"
    ),
    "std": base.deviation(DISTANCE, less=0).means(f"{BATCHED}, standard deviation over loss tokens, n below"),
}
LOG = base.Log(
    "skyrl",
    (
        *table(CORRECTIONS, when=_corrects),
        *table(ANCHORED, when=_cispo),
        *table(TRAINED, "policy/rollout_train_logprobs_abs_diff_", _corrects),
        *table(MINIBATCH, "policy/minibatch_rollout_logprobs_abs_diff_", _anchored),
    ),
)

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
    snippets = schema.block("skyrl", "hydra", named), schema.block("skyrl", "yaml", named, "as YAML")
    several = len(rules) + bool(preset.veto) > 1 or any(rule.among == "left" for rule in rules)
    return snippets, config.remarks(
        config.idle(settings) and "bounds of 1.0e-9 and 1.0e+9 are idle: log-ratios are clamped to ±20",
        several
        and "outliers, token mask, weights, sequence mask, in that order: each over what the one "
        "before has left",
    )


def _decoupled(parts: Parts) -> Settings:
    parts.need(("old",), ("ppo_clip", "gspo", "cispo", "sapo"))
    on_tokens = any(rule.on_tokens for rule in parts.rules)
    found: Settings = {}
    veto = parts.take_veto(upper=True)
    if veto is not None:
        found["outlier_token_is_threshold_low"] = veto.lower
        found["outlier_token_is_threshold_high"] = veto.upper
    parts.split_mask()
    rule = parts.take("ratio", "token")
    if rule is not None:
        low, high = config.idle_bounds(rule.lower, rule.upper)
        found |= {"token_mask_is_threshold_low": low, "token_mask_is_threshold_high": high}
    found |= _weight(parts, on_tokens) | _sequence_mask(parts, on_tokens)
    return config.prefixed(CORRECTION, found) | _loss(parts.preset)


def _weight(parts: Parts, on_tokens: bool) -> Settings:
    weight = parts.weight
    if weight is None:
        return {"tis_ratio_type": None}
    if weight.over == "sum" and on_tokens and weight.among != "left":
        config.cannot("a product over tokens that its token mask has taken out")
    parts.take_weight("token", "sum")
    name = {"token": "token", "sum": "sequence"}[weight.over]
    upper = IDLE_HIGH if weight.upper is None or weight.action == "none" else weight.upper
    return {"tis_ratio_type": name, f"{name}_tis_ratio_clip_high": upper}


def _sequence_mask(parts: Parts, on_tokens: bool) -> Settings:
    for rule in tuple(parts.rules):
        name = {"mean": "geo", "sum": "product"}.get(rule.over)
        plain = (rule.statistic, rule.advantage, rule.policy, rule.strict) == ("ratio", "any", None, False)
        if name and plain and (rule.among == "left" or not on_tokens):
            parts.rules.remove(rule)
            low, high = config.idle_bounds(rule.lower, rule.upper)
            metric = "geometric" if name == "geo" else "product"
            return {"sequence_mask_metric": metric, f"{name}_mask_low": low, f"{name}_mask_high": high}
    return {}


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        return {"policy_loss_type": "cispo", **_cispo_bounds(*config.clip_bounds(preset))}
    if preset.loss == "sapo":
        taus = {"tau_positive": "sapo.tau_pos", "tau_negative": "sapo.tau_neg"}
        return {"policy_loss_type": "sapo", **config.shape_settings(preset, taus)}
    config.no_dual_clip(preset)
    if (preset.loss, preset.clip.low, preset.clip.high, preset.clip.dual) == ("ppo_clip", None, None, None):
        if preset.weight is not None or preset.reject or preset.veto is not None:
            config.cannot("weights or rules under importance_sampling, which applies no correction")
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
        config.cannot("REINFORCE against the rollout without token weights")
    if weight.action == "mask" and weight.strict:
        if weight.lower is None or weight.upper is None:
            config.cannot("rollout_is without both bounds")
        parts.weight = None
        bounds = {"eps_clip_low": 1 - weight.lower, "eps_clip_high": weight.upper - 1}
        return {"policy_loss_type": "rollout_is", **_short(bounds)}
    found = parts.take_weight("token", actions=("truncate",), lower=True)
    if found is None or found.upper is None:
        config.cannot("this weight")
    bounds = _cispo_bounds(1 - (found.lower or 0.0), found.upper - 1)
    return {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout", **_short(bounds)}


def _short(bounds: dict[str, float]) -> Settings:
    """1.2 − 1 is 0.2 in its config, not 0.19999999999999996."""
    return {key: float(f"{value:.15g}") for key, value in bounds.items()}


def _dppo(parts: Parts) -> Settings:
    parts.take_weight("token", actions=("none",))
    if len(parts.rules) != 1 or parts.preset.weight is None:
        config.cannot("this loss without exactly one mask")
    rule = parts.rules.pop()
    kinds = {("prob_diff", "against"): "binary_tv", ("binary_kl", "away"): "binary_kl"}
    kind = kinds.get((rule.statistic, rule.advantage))
    low = rule.upper if kind == "binary_kl" else None if rule.lower is None else -rule.lower
    if kind is None or rule.over != "token" or rule.strict or low is None or rule.upper is None:
        config.cannot(f"a mask by {rule.statistic} with this condition on the advantage ({rule.advantage})")
    bounds = {"dppo.delta_low": low, "dppo.delta_high": rule.upper}
    return {"policy_loss_type": "dppo", "dppo.dppo_type": kind, **bounds}


GUARDS = Guards(20.0, unclamped=frozenset({"prob_diff", "binary_kl"}))
TRAINER = Trainer("skyrl", skyrl, GUARDS, CLIP, (LOG,))
