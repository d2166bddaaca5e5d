"""open-instruct: ρ = π_old/π_rollout, log ρ clamped to ±10; ρ flags, on by default, where 0 means off.

Logged numbers are those of open_instruct/grpo_utils.py. What it takes per "row" is per packed row there,
which may hold several responses; here a row is a response. Means over tokens do not depend on that.
"""

from __future__ import annotations

from offpol_diag.presets import Preset
from offpol_diag.trainers import config
from offpol_diag.trainers.base import Array, Log, Numbers, Side, Tokens, Totals, half, named, np, std
from offpol_diag.trainers.config import Band, ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Settings, cannot


def log(t: Tokens, s: Totals) -> Numbers:
    """Return `val/`: ρ, and the ratio of PPO's loss; `debug/`: the rollout against the local policy."""
    val = rho(t.applied, s) | s.part(ratio, t.only())
    return named("val/", val) | named("debug/", s.part(debug, t.only()))


def rho(t: Tokens, s: Totals) -> Numbers:
    """Return the mean of what multiplies the loss, ρ clamped or 0 if dropped, and shares of all tokens."""
    tokens, weight = s.sum(t.n), t.preset.weight
    clamped = t.n_bounded if weight is not None and weight.action == "truncate" else 0 * t.n
    return {
        "rho_weight": s.sum(t.row_sum(np.where(t.kept, t.weight, 0.0))) / tokens,
        "rho_clipfrac": s.sum(clamped) / tokens,
        "rho_drop_frac": s.sum(t.n - t.n_kept) / tokens,
        "rho_drop_low_frac": s.sum(dropped(t, "lower")) / tokens,
        "rho_drop_high_frac": s.sum(dropped(t, "upper")) / tokens,
    }


def dropped(t: Tokens, side: Side) -> Array:
    """Count the tokens of each row that the mask drops at one bound, [S]."""
    return t.dropped_by(*filter(None, [half(rule, side) for rule in t.preset.reject]))


def ratio(t: Tokens, s: Totals) -> Numbers:
    """Return the mean of π_θ/π_old, unclamped, and how far its row means spread, weighted by length."""
    if t.batch.current is None or t.batch.old is None:
        return {}
    tokens = s.sum(t.n)
    moved = t.row_mean(np.expm1(t.batch.current - t.batch.old))
    mean, square = s.sum(moved * t.n) / tokens, s.sum(moved**2 * t.n) / tokens
    return {"ratio": mean + 1, "ratio_var": np.maximum(square - mean * mean, 0.0)}


def debug(t: Tokens, s: Totals) -> Numbers:
    """Return |log π_local − log π_rollout|: π_θ where the dump has it, else π_old, there a copy of π_θ."""
    tokens, d = s.sum(t.n), t.of("old" if t.batch.current is None else "current").log_ratio
    total, square = s.sum(t.row_sum(abs(d))), s.sum(t.row_sum(d**2))
    return {
        "vllm_vs_local_logprob_diff_mean": total / tokens,
        "vllm_vs_local_logprob_diff_max": s.max(t.row_max(abs(d))),
        "vllm_vs_local_logprob_diff_std": np.where(tokens > 1, std(total, square, tokens), 0.0),
        "vllm_local_reverse_kl": -s.sum(t.row_sum(np.exp(t.batch.rollout) * d)) / tokens,
    }


LOG = Log("open-instruct", log)

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
    return (settings,), (
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
        cannot("this weight")
    band = None if tv is not None else parts.take("ratio", weight.over)
    if weight.over == "mean" and band is None:
        cannot("weights of the geometric mean without its mask")
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
        cannot("a lower bound that is not between 0 and 1")
    if high is not None and high <= 1:
        cannot("an upper bound that is not above 1")
    return {f"{name}_lower_bound": low or 0.0, f"{name}_upper_bound": high or 0.0}


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        return {"loss_fn": "cispo", "clip_higher": config.cispo_high(preset)}
    return config.clip_settings(preset, CLIP)


GUARDS = Guards(10.0, "token", "token")
TRAINER = Trainer("open-instruct", open_instruct, config.FLAGS, GUARDS, CLIP, (LOG,))
