"""NeMo-RL: `train/` (algorithms/loss/loss_functions.py and grpo.py of v0.6 and later), and keys of `loss_fn`.

Δ = prev_logprobs − generation_logprobs; nothing is clamped. A mean is over tokens and divides by their number
plus 1e-8. The error mask (seq_logprob_error_threshold) is applied before the loss, so that everything else is
about the sequences it leaves. A sequence without a token counts as one whose sample_mask is 0.

All of it is float32, where e^x is infinite from x = 88.7 on and a sum beyond 3.4e38: such a number is so here
too, and nan where it is multiplied by 0. NeMo-RL multiplies masked tokens by 0 after exp (masked_mean,
algorithms/utils.py:212-224 of 7ea279abf), so that one which overflows makes its means nan; that is not
reproduced, since masked tokens are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from offpol_diag.presets import FLOAT32_MAX, FLOAT32_OVERFLOW, Preset
from offpol_diag.trainers import config
from offpol_diag.trainers.base import EPS, Array, Log, Number, Numbers, Tokens, Totals, named, np
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, Snippet, cannot

FLOAT32_VANISHES = math.log(1.5) - 149 * math.log(2.0)
"""Half of e^x is 0 in float32 below this x, nats."""


def log(t: Tokens, s: Totals) -> Numbers:
    """Return `train/`, of the sequences that the error mask leaves."""
    rules = [r for r in t.preset.reject if r.statistic == "mult_prob_error" and not r.on_tokens]
    masked = t.under(*rules).only("reject")
    result = s.part(gap, masked) | weights(t, masked, s)
    if t.batch.current is not None:
        result |= probs_ratio(t, masked, s) | s.part(approx_entropy, masked)
    return named("train/", result | s.part(seq_errors, masked))


# ---------------------------------------------------------------- sums over the sequences left


def left(masked: Tokens) -> Array:
    """Flag the sequences with a token that the error mask leaves, [S] bool."""
    return masked.cached(("left", masked.preset.reject), lambda: masked.there & masked.kept_rows)


def added(masked: Tokens, s: Totals, x: Array) -> Number:
    """Return the sum of a number of each sequence left, infinite beyond float32."""
    return single(s.sum(np.where(left(masked), x, 0.0)))


def averaged(masked: Tokens, s: Totals) -> Callable[[Array], Number]:
    """Return the mean over the tokens of the sequences left, [T] → a number."""
    tokens = added(masked, s, masked.n)
    return lambda x: added(masked, s, masked.row_sum(x)) / (tokens + EPS)


def single(x: Number) -> Number:
    """Return a number as in float32: infinite beyond its largest."""
    return np.where(abs(x) > FLOAT32_MAX, np.copysign(math.inf, x), x)


# ---------------------------------------------------------------- what is logged


def gap(t: Tokens, s: Totals) -> Numbers:
    """Return how far π_old is off the rollout."""
    mean, d = averaged(t, s), t.log_ratio
    neither = (t.train < FLOAT32_VANISHES) & (t.batch.rollout < FLOAT32_VANISHES)
    vanished = added(t, s, t.row_sum(neither))
    divergence = mean(np.log1p(2 * np.sinh(d / 4) ** 2))  # log cosh(Δ/2): half of both k3 to the mean
    return {
        "token_mult_prob_error": mean(np.exp(abs(d))),
        "gen_kl_error": mean(t.k3()),
        "policy_kl_error": mean(np.expm1(-d) + d),
        "js_divergence_error": np.where(vanished > 0, math.nan, divergence),
    }


def weights(t: Tokens, masked: Tokens, s: Totals) -> Numbers:
    """Return the mean weight as the loss gets it, over tokens, or where they are products over sequences."""
    tokens, rows = added(masked, s, t.n), added(masked, s, t.one)
    weight = t.preset.weight
    if weight is None:
        finite = np.where(t.log_ratio > FLOAT32_OVERFLOW, 0.0, t.ratio())
        total = t.row_sum(finite) * (t.n_kept > 0)
    elif t.weighs_rows:
        total = t.unit_weight * (t.n_kept > 0)
    else:
        total = t.row_sum(np.where(t.kept, t.weight, 0.0))
    units = tokens if weight is None or weight.over == "token" else rows
    result = {"sampling_importance_ratio": single(s.sum(total)) / (units + EPS)}
    # seq-mask-tis: bounds on the geometric mean, which count sequences
    geometric = [r for r in t.preset.reject if (r.statistic, r.over) == ("ratio", "mean") and not r.on_tokens]
    if geometric:
        passed = t.under(*geometric).kept_rows & t.there
        result["is_oob_ratio"] = added(masked, s, ~passed) / (rows + EPS)
    elif weight is not None and weight.action in ("truncate", "mask"):
        result["is_oob_ratio"] = added(masked, s, out_of_bounds(t)) / (tokens + EPS)
    return result


def out_of_bounds(t: Tokens) -> Array:
    """Count the tokens with a weight out of bounds, [S]; an overflowing one is 0 by then, not above any."""
    weight = t.preset.weight
    assert weight is not None
    if weight.overflow != "zero" or weight.lower:
        return t.n_bounded
    above = t.aggregate("ratio", weight.over) > FLOAT32_OVERFLOW
    return t.n_bounded - (above * t.n if t.weighs_rows else t.row_sum(above))


def probs_ratio(t: Tokens, masked: Tokens, s: Totals) -> Numbers:
    """Return the loss's own ratio, raw and clipped whatever the sign of A; of REINFORCE log π_θ."""
    if t.preset.loss == "reinforce":
        assert t.batch.current is not None
        raw = clamped = t.batch.current
    else:
        raw, clamped = t.update_ratio, t.clipped(t.update_ratio)
    mean = averaged(masked, s)
    result = {"probs_ratio": mean(raw), "probs_ratio_clamped": mean(clamped)}
    for name, x in (("probs_ratio", raw), ("probs_ratio_clamped", clamped)):
        result[f"{name}_min"] = single(s.min(np.where(left(masked), t.row_min(x), math.inf)))
        result[f"{name}_max"] = single(s.max(np.where(left(masked), t.row_max(x), -math.inf)))
    return result


def approx_entropy(t: Tokens, s: Totals) -> Numbers:
    """Return the mean of −(π_θ/π_rollout) log π_θ."""
    mean, current, drift = averaged(t, s), t.batch.current, t.of("current")
    assert current is not None
    nan = (drift.log_ratio > FLOAT32_OVERFLOW) & (current == 0)  # ∞ · 0
    return {"approx_entropy": mean(np.where(nan, math.nan, -drift.ratio() * current))}


def seq_errors(t: Tokens, s: Totals) -> Numbers:
    """Return errors, mean e^|Δ|, of sequences, before the error mask and after it, and how many it drops."""
    total = t.row_sum(np.exp(abs(t.log_ratio)))
    error = np.where(total > FLOAT32_MAX, math.inf, total) / t.n.clip(min=1)
    result: Numbers = {}
    for after, rows in (("", t.there), ("_after_mask", left(t))):
        many, added_up = s.sum(rows), single(s.sum(np.where(rows, error, 0.0)))
        high, low = s.max(np.where(rows, error, -math.inf)), s.min(np.where(rows, error, math.inf))
        result |= {
            f"max_seq_mult_prob_error{after}": np.where(many > 0, high, 0.0),
            f"mean_seq_mult_prob_error{after}": added_up / np.maximum(many, 1.0),
            f"min_seq_mult_prob_error{after}": np.where(many > 0, low, 0.0),
        }
    lost = t.there & ~left(t)
    dropped = s.sum(lost)
    result["num_masked_seqs_by_logprob_error"] = dropped
    if t.batch.rewards is not None:
        result["masked_correct_pct"] = s.sum(lost & (t.batch.rewards == 1)) / np.maximum(dropped, 1.0)
    return result


LOG = Log("nemo-rl", log)

# ---------------------------------------------------------------- configuration

TYPE, CAP, LOW = (f"truncated_importance_sampling_{key}" for key in ("type", "ratio", "ratio_min"))
CLIP = ClipKeys("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
RAW = {TYPE: None, CAP: None}
"""No truncation: a ratio that is left over from a base file is an error without its type."""
ON_POLICY = {"surrogate": "force_on_policy_ratio", "reinforce": "disable_ppo_ratio"}
"""Loss → the key that takes the clipped ratio away: a ratio of 1, or REINFORCE."""


def nemo_rl(parts: Parts) -> Translation:
    """tis, icepop or seq-mask-tis, and a threshold on the sequence's log-prob error."""
    on_policy = parts.policy == "current"
    parts.need(
        ("old", "current"), ("surrogate",) if on_policy else ("ppo_clip", "gspo", "cispo", "reinforce")
    )
    error = parts.take("mult_prob_error", "mean", "upper")
    settings = {**_weight_settings(parts), **_loss_settings(parts.preset)}
    parts.finish()
    block = config.prefixed("loss_fn.", settings)
    if error is not None:
        block["grpo.seq_logprob_error_threshold"] = error.upper
    since = "0.7.0" if "use_cispo" in settings or (settings.get(TYPE) == "tis" and settings[LOW]) else "0.6.0"
    return (Form(block, since),), (
        settings.get(TYPE) == "tis"
        and not settings[LOW]
        and f"before NeMo-RL 0.6.0 there is no {TYPE}: the ratio alone means tis",
        on_policy
        and "force_on_policy_ratio takes one update per batch, and skips the pass for the old log-probs",
        error and "the sequences of seq_logprob_error_threshold leave the denominator",
    )


def _weight_settings(parts: Parts) -> Settings:
    """sequence_level_importance_ratios makes both the weight a product and the loss GSPO."""
    if parts.weight is None:
        return {"use_importance_sampling_correction": False, **RAW}
    on = {"use_importance_sampling_correction": True}
    sequence = parts.loss == "gspo"
    if parts.weight.over == "sum" and not sequence:
        cannot("weights of the product ratio without the GSPO loss")
    band = None if sequence else parts.take_band("token")
    if band is not None:
        return on | _bounded("icepop", *band)
    weight = parts.take_weight("sum" if sequence else "token", lower=True)
    if weight is None or weight.action == "none":
        rule = None if sequence else parts.take("ratio", "mean")
        return on | (_bounded("seq-mask-tis", rule.lower, rule.upper) if rule else RAW)
    if weight.upper is None:
        cannot("weights truncated from below alone")
    return {**on, TYPE: "tis", CAP: weight.upper, LOW: weight.lower}


def _bounded(kind: str, low: float | None, high: float | None) -> Settings:
    """icepop and seq-mask-tis need both bounds; a ratio is never below 0."""
    if high is None:
        cannot(f"{kind} without an upper bound")
    return {TYPE: kind, CAP: high, LOW: 0.0 if low is None else low}


def _loss_settings(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        low, high = config.clip_bounds(preset)
        return {"use_cispo": True, CLIP.low: low, CLIP.high: high, CLIP.dual: None}
    if preset.loss in ON_POLICY:
        return {ON_POLICY[preset.loss]: True}
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    return {**(gspo if preset.loss == "gspo" else {}), **config.clip_settings(preset, CLIP)}


def _guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    error = any(rule.statistic == "mult_prob_error" for rule in preset.reject)
    overflow = "a ratio that float32 cannot hold counts as 0 here"
    return Guards(denominator="kept" if error else "all", overflow=overflow)


READ = "NVIDIA-NeMo/RL 7ea279abf (2026-08-22)"
TRAINER = Trainer("nemo-rl", READ, nemo_rl, config.YAML_AND_HYDRA, _guards, CLIP, (LOG,), "NeMo-RL")
