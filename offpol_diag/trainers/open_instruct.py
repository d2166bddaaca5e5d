"""open-instruct: ρ = π_old/π_rollout, log ρ clamped to ±10; ρ flags, on by default, where 0 means off.

Logged numbers are those of open_instruct/grpo_utils.py. What it takes per "row" is per packed row there,
which may hold several responses; here a row is a response. Means over tokens do not depend on that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offpol_diag.presets import Preset
from offpol_diag.trainers import base, config, schema
from offpol_diag.trainers.base import Log, Range, Rows, Side, Sum, Totals, Value, half, mean, per_token, std
from offpol_diag.trainers.config import Band, ClipKeys, Guards, Parts, Settings, Trainer, Translation
from offpol_diag.trainers.measures import DISTANCE, SQUARED, Measure, expm1, under

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import View


def _clamped(view: View) -> Array:
    """Count the tokens whose ρ, or whose sequence's ρ, is clamped, including dropped tokens."""
    weight = view.preset.weight
    return view.capped() if weight is not None and weight.action == "truncate" else view.zeros


def _dropped(side: Side) -> Rows:
    """Count the tokens that the mask drops at one bound."""
    return lambda view: view.dropped_by(*filter(None, [half(rule, side) for rule in view.preset.reject]))


def _local(view: View, of: Measure) -> Measure:
    """Of π_local/π_rollout: π_θ where the dump has it, else π_old, which it copies."""
    return under(of, "old" if view.batch.current is None else "current")


def _local_sum(name: str, of: Measure) -> Sum:
    return Sum(name, lambda view: view.total(_local(view, of)), shared=True)


MOVED = Measure("π_θ/π_old − 1", lambda x: expm1(x.of("current").delta - x.of("old").delta))
REVERSE = Measure("π_rollout Δ", lambda x: x.rollout_probability() * x.delta)
BOTH = ("current", "old")
MEANS = Sum("u − 1", lambda view: mean(MOVED)(view) * view.n, True, BOTH)
SQUARES = Sum("(u − 1)²", lambda view: mean(MOVED)(view) ** 2 * view.n, True, BOTH)
DISTANCES, DISTANCES_SQUARED = _local_sum("|d|", DISTANCE), _local_sum("d²", SQUARED)
LARGEST = Range("|d| of a token", lambda view: view.ends(_local(view, DISTANCE)), shared=True)


def _variance(totals: Totals) -> float:
    mean = totals(MEANS) / totals.tokens
    return max(totals(SQUARES) / totals.tokens - mean * mean, 0.0)


LOCAL = "π_local being π_θ where the dump has it, else π_old (with one mini-batch a copy of π_θ there)"
ALL = "all response tokens of the dump; open-instruct takes it per micro-batch"

NAMES = {
    "val/rho_weight": per_token(Sum("weight", lambda view: view.effect.kept_weight_sum)).means(
        "mean over response tokens of the weight that multiplies the loss: ρ = π_old/π_rollout (its log "
        "within ±10) after the clamp, and 0 where the token is dropped; not the mean of ρ"
    ),
    "val/rho_clipfrac": per_token(Sum("clamped", _clamped)).means(
        "the share of response tokens whose ρ the clamp moves, dropped ones included"
    ),
    "val/rho_drop_frac": per_token(Sum("dropped", lambda view: view.n - view.effect.kept_tokens)).means(
        "the share of response tokens whose weight the mask sets to 0; they stay in the loss's denominator"
    ),
    "val/rho_drop_low_frac": per_token(Sum("dropped low", _dropped("lower"))).means(
        "of all response tokens, those dropped because ρ (token, sequence, or the row's mean |ρ − 1|) is "
        "below the lower bound"
    ),
    "val/rho_drop_high_frac": per_token(Sum("dropped high", _dropped("upper"))).means(
        "of all response tokens, those dropped because it is above the upper bound"
    ),
    "val/ratio": (per_token(MEANS) + 1).means(
        "π_θ/π_old, unclamped, mean over response tokens: the ratio of PPO's loss and not ρ"
    ),
    "val/ratio_var": Value(_variance, (MEANS, SQUARES)).means(
        "how far the rows' means of π_θ/π_old spread about val/ratio, weighted by length, n below: no "
        "variance over tokens. A row is one response here and a packed row there"
    ),
    "debug/vllm_vs_local_logprob_diff_mean": per_token(DISTANCES).means(
        f"|log π_local − log π_rollout|, unclamped, mean over {ALL}; {LOCAL}"
    ),
    "debug/vllm_vs_local_logprob_diff_max": base.highest(LARGEST).means(
        f"the largest |log π_local − log π_rollout| of {ALL}"
    ),
    "debug/vllm_vs_local_logprob_diff_std": Value(
        lambda x: std(x(DISTANCES), x(DISTANCES_SQUARED), x.tokens) if x.tokens > 1 else 0.0,
        (DISTANCES, DISTANCES_SQUARED),
    ).means(f"standard deviation of |log π_local − log π_rollout|, n − 1 below, over {ALL}; 0 for one token"),
    "debug/vllm_local_reverse_kl": (-per_token(_local_sum("reverse", REVERSE))).means(
        f"π_rollout·(log π_rollout − log π_local), mean over {ALL}. Weighting sampled tokens by their "
        "probability once more, it estimates no KL divergence"
    ),
}
LOG = Log("open-instruct", base.table(NAMES))

# ---------------------------------------------------------------- configuration

CLIP = ClipKeys("clip_lower", "clip_higher", high_default=0.272)


def open_instruct(parts: Parts) -> Translation:
    """A clamp and a mask on ρ, of tokens or of rows."""
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip",) if bypass else ("ppo_clip", "cispo"))
    on = not bypass and parts.weight is not None
    settings: Settings = {"use_rho_correction": "true" if on else "false"}
    settings |= {"use_vllm_logprobs": "true"} if bypass else {}
    settings |= _rho(parts) if on else {}
    parts.finish()
    settings |= _loss(parts.preset)
    return (schema.block("open-instruct", "flags", settings),), config.remarks(
        on and "a bound of 0 is off; before 2026-05-07 the key was truncated_importance_sampling_ratio_cap",
        "rho_mask_sequence_level" in settings
        and "a sequence is a packed row here, which may hold several responses",
        "rho_mask_tv_divergence" in settings
        and "the bound is on the mean of |r - 1| over a packed row, twice that of the preset",
    )


def _rho(parts: Parts) -> Settings:
    tv = None  # twice the bound of a mask on the sequence's mean |r − 1|/2, on tokens pushed further away
    for rule in tuple(parts.rules):
        fits = (rule.statistic, rule.over, rule.advantage, rule.lower) == ("tv", "mean", "away", None)
        if tv is None and fits and not config.unusual(rule) and rule.upper is not None:
            parts.rules.remove(rule)
            tv = 2 * rule.upper
    parts.split_mask()
    weight = parts.take_weight("token", "mean", lower=True)
    if weight is None or (tv is not None and weight.over != "token"):
        config.cannot("this weight")
    band = None if tv is not None else parts.take("ratio", weight.over)
    if weight.over == "mean" and band is None:
        config.cannot("weights of the geometric mean without its mask")
    return {
        **_bounds("rho_clamp", (weight.lower, weight.upper)),
        **_bounds("rho_mask", (band.lower, band.upper) if band else (None, tv)),
        **({"rho_mask_sequence_level": "true"} if weight.over == "mean" else {}),
        **({"rho_mask_tv_divergence": "true"} if tv is not None else {}),
    }


def _bounds(name: str, bounds: Band) -> Settings:
    """0 is off; its validator wants the lower bound in (0, 1) and the upper one above 1."""
    low, high = bounds
    if low is not None and not 0 < low < 1:
        config.cannot("a lower bound that is not between 0 and 1")
    if high is not None and high <= 1:
        config.cannot("an upper bound that is not above 1")
    return {f"{name}_lower_bound": low or 0.0, f"{name}_upper_bound": high or 0.0}


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        return {"loss_fn": "cispo", "clip_higher": config.cispo_high(preset)}
    return config.clip_settings(preset, CLIP)


TRAINER = Trainer("open-instruct", open_instruct, Guards(10.0, "token", "token"), CLIP, (LOG,))
