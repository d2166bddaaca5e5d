"""open-instruct: ρ = π_old/π_rollout, log ρ clamped to ±10; ρ flags, on by default, where 0 means off.

Logged numbers are those of open_instruct/grpo_utils.py. What it takes per "row" is per packed row there,
which may hold several responses; here a row is a response. Means over tokens do not depend on that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offpol_diag.presets import Preset
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import (
    DISTANCE,
    SQUARED,
    Entry,
    Log,
    Measure,
    Range,
    Rows,
    Side,
    Sum,
    Totals,
    half,
    highest,
    per_token,
    row_mean,
    std,
    under,
)
from offpol_diag.trainers.config import (
    Band,
    ClipKeys,
    Habits,
    Parts,
    Said,
    Settings,
    Trainer,
    cannot,
    clip_bounds,
    clip_remarks,
    clip_settings,
    remarks,
)
from offpol_diag.trainers.schema import block

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import View


def _clamped(view: View) -> Tensor:
    """Count the tokens whose ρ, or whose sequence's ρ, is clamped, including dropped tokens."""
    weight = view.preset.weight
    return view.capped() if weight is not None and weight.action == "truncate" else view.zeros


def _dropped(side: Side) -> Rows:
    """Count the tokens that the mask drops at one bound."""
    return lambda view: view.failing(*filter(None, [half(rule, side) for rule in view.preset.reject]))


def _local(view: View, of: Measure) -> Measure:
    """Of π_local/π_rollout: π_θ where the dump has it, else π_old, which it copies."""
    return under(of, "old" if view.batch.current is None else "current")


MOVED = Measure(
    "π_θ/π_old − 1",
    lambda x: (x.of("current").delta - x.of("old").delta).expm1(),
    moment=("x", "drift", "", ""),
)
REVERSE = Measure(
    "π_rollout Δ", lambda x: x.rollout_probability() * x.delta, moment=("d", "Δ", "π_rollout", "")
)
BOTH = ("current", "old")

SUMS = (
    Sum("weight", lambda view: view.kept_weights, own=True),
    Sum("clamped", _clamped, own=True),
    Sum("dropped", lambda view: view.n - view.kept_tokens, own=True),
    Sum("dropped low", _dropped("lower"), own=True),
    Sum("dropped high", _dropped("upper"), own=True),
    Sum("u − 1", lambda view: row_mean(MOVED)(view) * view.n, needs=BOTH),
    Sum("(u − 1)²", lambda view: row_mean(MOVED)(view).square() * view.n, needs=BOTH),
    Sum("|d|", lambda view: view.total(_local(view, DISTANCE))),
    Sum("d²", lambda view: view.total(_local(view, SQUARED))),
    Sum("reverse", lambda view: -view.total(_local(view, REVERSE))),
)
RANGES = (Range("|d| of a token", lambda view: view.ends(_local(view, DISTANCE))),)

LOCAL = "π_local being π_θ where the dump has it, else π_old (with one mini-batch a copy of π_θ there)"
ALL = "all response tokens of the dump; open-instruct takes it per micro-batch"


def _variance(totals: Totals) -> float:
    mean = totals("u − 1") / totals.tokens
    return max(totals("(u − 1)²") / totals.tokens - mean * mean, 0.0)


def _deviation(totals: Totals) -> float:
    return std(totals("|d|"), totals("d²"), totals.tokens) if totals.tokens > 1 else 0.0


ENTRIES = (
    Entry(
        "val/rho_weight",
        "mean over response tokens of the weight that multiplies the loss: ρ = π_old/π_rollout (its log "
        "within ±10) after the clamp, and 0 where the token is dropped; not the mean of ρ",
        per_token("weight"),
    ),
    Entry(
        "val/rho_clipfrac",
        "the share of response tokens whose ρ the clamp moves, dropped ones included",
        per_token("clamped"),
    ),
    Entry(
        "val/rho_drop_frac",
        "the share of response tokens whose weight the mask sets to 0; they stay in the loss's denominator",
        per_token("dropped"),
    ),
    Entry(
        "val/rho_drop_low_frac",
        "of all response tokens, those dropped because ρ (token, sequence, or the row's mean |ρ − 1|) is "
        "below the lower bound",
        per_token("dropped low"),
    ),
    Entry(
        "val/rho_drop_high_frac",
        "of all response tokens, those dropped because it is above the upper bound",
        per_token("dropped high"),
    ),
    Entry(
        "val/ratio",
        "π_θ/π_old, unclamped, mean over response tokens: the ratio of PPO's loss and not ρ",
        lambda totals: 1 + totals("u − 1") / totals.tokens,
    ),
    Entry(
        "val/ratio_var",
        "how far the rows' means of π_θ/π_old spread about val/ratio, weighted by length, n below: no "
        "variance over tokens. A row is one response here and a packed row there",
        _variance,
    ),
    Entry(
        "debug/vllm_vs_local_logprob_diff_mean",
        f"|log π_local − log π_rollout|, unclamped, mean over {ALL}; {LOCAL}",
        per_token("|d|"),
    ),
    Entry(
        "debug/vllm_vs_local_logprob_diff_max",
        f"the largest |log π_local − log π_rollout| of {ALL}",
        highest("|d| of a token"),
    ),
    Entry(
        "debug/vllm_vs_local_logprob_diff_std",
        f"standard deviation of |log π_local − log π_rollout|, n − 1 below, over {ALL}; 0 for one token",
        _deviation,
    ),
    Entry(
        "debug/vllm_local_reverse_kl",
        f"π_rollout·(log π_rollout − log π_local), mean over {ALL}. Weighting sampled tokens by their "
        "probability once more, it estimates no KL divergence",
        per_token("reverse"),
    ),
)

LOG = Log("open-instruct", SUMS, RANGES, ENTRIES)

# ---------------------------------------------------------------- configuration

CLIP = ClipKeys("clip_lower", "clip_higher", high_default=0.272)
OFF = (None, None)


def open_instruct(preset: Preset) -> Said:
    """A clamp and a mask on ρ, of tokens or of rows."""
    parts = Parts(preset)
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip",) if bypass else ("ppo_clip", "cispo"))
    on = not bypass and parts.weight is not None
    settings: Settings = {"use_rho_correction": "true" if on else "false"}
    settings |= {"use_vllm_logprobs": "true"} if bypass else {}
    settings |= _rho(parts) if on else {}
    parts.finish()
    settings |= _loss(preset)
    snippet = block("open-instruct", "flags", schema.flags(settings), settings)
    return (snippet,), (*_remarks(settings, on), *clip_remarks(preset, CLIP))


def _rho(parts: Parts) -> Settings:
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
        **_bounds_said("rho_clamp", clamp),
        **_bounds_said("rho_mask", mask),
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


def _bounds_said(name: str, bounds: Band) -> dict[str, float]:
    """0 is off; its validator wants the lower bound in (0, 1) and the upper one above 1."""
    low, high = bounds
    if low is not None and not 0 < low < 1:
        cannot("a lower bound that is not between 0 and 1")
    if high is not None and high <= 1:
        cannot("an upper bound that is not above 1")
    return {f"{name}_lower_bound": low or 0.0, f"{name}_upper_bound": high or 0.0}


def _loss(preset: Preset) -> Settings:
    if preset.loss != "cispo":
        return clip_settings(preset, CLIP)
    low, high = clip_bounds(preset)
    if low < 1:
        cannot("a lower bound of CISPO's weight")
    return {"loss_fn": "cispo", "clip_higher": high}


def _remarks(settings: Settings, on: bool) -> tuple[str, ...]:
    return remarks(
        on and "a bound of 0 is off; before 2026-05-07 the key was truncated_importance_sampling_ratio_cap",
        "rho_mask_sequence_level" in settings
        and "a sequence is a packed row here, which may hold several responses",
        "rho_mask_tv_divergence" in settings
        and "the bound is on the mean of |r - 1| over a packed row, twice that of the preset",
    )


TRAINER = Trainer("open-instruct", open_instruct, Habits(10.0, "token", "token"), (LOG,))
