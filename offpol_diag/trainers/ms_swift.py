"""ms-swift: `rollout_correction/` of π_old against the rollout, and rollout_importance_sampling_mode.

Logged numbers are off ms-swift 3602360a. Names are verl's, definitions are not: chi2_seq is of geometric
means, k3 is bounded at 10 per token, the ESS counts a masked token as 1/C. Its means are per micro-batch and
rank, here of the dump. Its "sequence" is the geometric mean.
"""

from __future__ import annotations

import math

from offpol_diag.presets import Preset
from offpol_diag.trainers.base import EPS, SAFETY, Log, Numbers, Tokens, Totals, named, np
from offpol_diag.trainers.config import FLAGS, IDLE_HIGH, ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, cannot
from offpol_diag.trainers.trl import loss

ESS_LEAST = 1e-10
"""Lower bound on the normalised second moment."""


def log(t: Tokens, s: Totals) -> Numbers:
    """Return `rollout_correction/`: how far π_old is off the rollout; with a mode, its weights."""
    result = s.part(gap, t.only()) | ({} if t.preset.weight is None else weights(t, s))
    return named("rollout_correction/", result)


def gap(t: Tokens, s: Totals) -> Numbers:
    """Return means over tokens and over rows, where one without a token has mean log-probs of 0."""
    tokens, rows, d = s.sum(t.n), s.sum(t.one), t.log_ratio
    train, rollout, difference = t.row_mean(t.train), t.row_mean(t.batch.rollout), t.row_mean(-d)
    return {
        "training_ppl": s.sum(np.exp(-train)) / rows,
        "training_log_ppl": s.sum(-train) / rows,
        "kl": s.sum(t.row_sum(-d)) / tokens,
        "k3_kl": s.sum(t.row_sum(t.k3(SAFETY).clip(max=10.0))) / tokens,
        "rollout_ppl": s.sum(np.exp(-rollout)) / rows,
        "rollout_log_ppl": s.sum(-rollout) / rows,
        "log_ppl_diff": s.sum(difference) / rows,
        "log_ppl_abs_diff": s.sum(abs(difference)) / rows,
        "log_ppl_diff_max": s.max(difference),
        "log_ppl_diff_min": s.min(difference),
        "ppl_ratio": s.sum(np.exp(difference)) / rows,
        "chi2_token": s.sum(t.row_sum(t.ratio(SAFETY) ** 2)) / tokens - 1,
        "chi2_seq": s.sum(np.exp(-2 * difference.clip(-SAFETY, SAFETY))) / rows - 1,
    }


def weights(t: Tokens, s: Totals) -> Numbers:
    """Return numbers of weights as the loss gets them, masked ones being 0; for the ESS within [1/C, C]."""
    mode, gate, w = t.preset.weight, _gate(t.preset), t.weight
    assert mode is not None
    c = mode.upper or gate or math.inf
    of_rows = mode.over != "token" or (mode.upper is None and gate is not None)
    tokens, above = s.sum(t.n), t.aggregate("ratio", "mean", SAFETY) > math.log(c)
    if of_rows and not t.weighs_rows:  # sequence_mask multiplies the ratios of tokens by 0 or 1
        w = np.where(t.spread(above), 0.0, w)
    bounded = w.clip(1 / c, c)
    first, second = s.sum(t.row_sum(bounded)) / tokens, s.sum(t.row_sum(bounded**2)) / tokens
    if of_rows:
        clipped_frac = s.sum(above) / s.sum(t.one)
    else:
        low = t.n_below if mode.action == "mask" else 0.0
        clipped_frac = s.sum(t.n_above + low) / tokens
    return {
        "is_weight_mean": s.sum(t.row_sum(w)) / tokens,
        "ess": 1 / np.maximum(second / (first + EPS) ** 2, ESS_LEAST),
        "clipped_frac": clipped_frac,
    }


def _gate(preset: Preset) -> float | None:
    """Return the upper bound on a row's geometric mean under sequence_mask, or None."""
    rules = (rule for rule in preset.reject if rule.statistic == "ratio" and rule.over == "mean")
    return next((rule.upper for rule in rules), None)


LOG = Log("ms-swift", log)

# ---------------------------------------------------------------- configuration

CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
MODE = "rollout_importance_sampling_mode"


def ms_swift(parts: Parts) -> Translation:
    """rollout_importance_sampling_mode with an upper bound; its "sequence" is the geometric mean."""
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    settings: Settings = {}
    upper = None
    if parts.weight is not None:
        if parts.weight.over == "sum":
            cannot("weights of the product ratio (its sequence modes take the geometric mean)")
        mode, upper = _mode(parts)
        bound = IDLE_HIGH if upper is None else upper
        settings = {MODE: mode, "rollout_importance_sampling_threshold": bound}
    parts.finish()
    settings = ({"use_vllm": "true"} if settings else {}) | settings | loss(parts.preset, CLIP)
    return (Form(settings, "3.11.0"),), (
        parts.loss == "gspo"
        and "importance_sampling_level sequence_token has the same loss and, with one advantage per "
        "sequence, the same gradient",
        "use_vllm" not in settings and f"ms-swift corrects nothing unless {MODE} is set",
        MODE in settings
        and "the weights multiply the KL-to-reference term as well; needs vLLM 0.10.2 or later",
        MODE in settings
        and upper is None
        and "a threshold of 1.0e+9 is idle: the log-ratio is clamped to ±20",
    )


def _mode(parts: Parts) -> tuple[str, float | None]:
    over = parts.weight.over if parts.weight else ""
    band = parts.take_band(over)
    if band is not None:
        if band[0] is not None or over != "token":
            cannot("a lower bound of the mask" if over == "token" else "weights zeroed by the geometric mean")
        return "token_mask", band[1]
    weight = parts.take_weight("token", "mean")
    raw = weight is not None and weight.action == "none"
    rule = parts.take("ratio", "mean", "upper") if raw and over == "token" else None
    if rule is not None:
        return "sequence_mask", rule.upper
    name = {"token": "token_truncate", "mean": "sequence_truncate"}[over]
    return name, None if weight is None else weight.upper


GUARDS = Guards(20.0, "token", "token", frozenset({"k1"}))
READ = "modelscope/ms-swift 3602360a (2026-08-22)"
TRAINER = Trainer("ms-swift", READ, ms_swift, FLAGS, GUARDS, CLIP, (LOG,), "ms-swift")
