"""ms-swift: `rollout_correction/` of π_old against the rollout, and rollout_importance_sampling_mode.

Logged numbers are off ms-swift 3602360a. Names are verl's, definitions are not: chi2_seq is of geometric
means, k3 is bounded at 10 per token, the ESS counts a masked token as 1/C. Its means are per micro-batch and
rank, here of the dump. Its "sequence" is the geometric mean.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offpol_diag.presets import Preset
from offpol_diag.trainers import base, config, schema
from offpol_diag.trainers.base import Range, Sum, Totals, Value, ends, lowest, mean, per_row, per_token, table
from offpol_diag.trainers.config import IDLE_HIGH, ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.measures import (
    EPS,
    K1,
    K3_CLAMPED,
    RATIO_SQUARED,
    ROLLOUT,
    SAFETY,
    TRAIN,
    WEIGHT,
    exp,
    where,
)
from offpol_diag.trainers.trl import corrects, loss, row_weights, threshold

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import View


def _gate(preset: Preset) -> float | None:
    """Return the upper bound on a row's geometric mean under sequence_mask, or None."""
    rules = (rule for rule in preset.reject if rule.statistic == "ratio" and rule.over == "mean")
    return next((rule.upper for rule in rules if rule.policy in (None, preset.policy)), None)


def _threshold(preset: Preset) -> float:
    """Return the threshold C of the mode."""
    assert preset.weight is not None
    return preset.weight.upper or _gate(preset) or math.inf


def _of_rows(preset: Preset) -> bool:
    """Return whether the mode acts on sequences."""
    weight = preset.weight
    assert weight is not None
    return weight.over != "token" or (weight.upper is None and _gate(preset) is not None)


def _difference(view: View) -> Array:
    """Return mean log π_rollout − mean log π_old of each row, [S] nats."""
    return mean(K1)(view)


def _beyond(view: View) -> Array:
    """Flag rows whose mean Δ, clamped to ±20, is above ln C, as sequence modes do, [S] bool."""
    return view.ratios.aggregate("ratio", "mean", SAFETY).values > math.log(_threshold(view.preset))


def _without(view: View, of_masked: float, sums: Array) -> Array:
    """Replace the sums of rows that sequence_mask drops by `of_masked` per token, [S]."""
    return where(_beyond(view), view.n * of_masked, sums) if _of_rows(view.preset) else sums


def _kept_weight(view: View) -> Array:
    """Sum the weights of each row, [S]; sequence_mask multiplies token ratios by 0 or 1."""
    weights = row_weights(view)
    return _without(view, 0.0, view.total(WEIGHT)) if weights is None else weights * view.n


def _bounded(view: View, power: int) -> Array:
    """Return the sum of weights clamped to [1/C, C], or of their squares, from which the ESS is made, [S]."""
    high, weights = _threshold(view.preset), row_weights(view)
    if weights is not None:
        return weights.clip(1 / high, high) ** power * view.n
    return _without(view, high**-power, view.within(WEIGHT, 1 / high, high)[power - 1])


def _clipped(view: View) -> Array:
    """Rows above C; or tokens above it; under token_mask tokens of weight 0."""
    if _of_rows(view.preset):
        return _beyond(view) + view.zeros
    weighed = view.weigh()
    masks = view.preset.weight is not None and view.preset.weight.action == "mask"
    return weighed.high + weighed.low if masks else weighed.high


TRAIN_PPL = Sum("training_ppl", lambda view: exp(-mean(TRAIN)(view)), shared=True)
ROLLOUT_PPL = Sum("rollout_ppl", lambda view: exp(-mean(ROLLOUT)(view)), shared=True)
ABS_DIFF = Sum("log_ppl_abs_diff", lambda view: abs(_difference(view)), shared=True)
PPL_RATIO = Sum("ppl_ratio", lambda view: exp(_difference(view)), shared=True)
CHI2 = Sum("gg", lambda view: exp(-2 * _difference(view).clip(-SAFETY, SAFETY)), shared=True)
DIFFS = Range("log_ppl_diff", lambda view: ends(_difference(view)), shared=True)
BOUNDED, SQUARES = (
    Sum("bounded", lambda view: _bounded(view, 1)),
    Sum("bounded²", lambda view: _bounded(view, 2)),
)
CLIPPED = Sum("clipped", _clipped)
ESS_LEAST = 1e-10
"""Lower bound on the normalised second moment."""


def _ess(totals: Totals) -> float:
    mean = totals(BOUNDED) / totals.tokens
    return 1 / max(totals(SQUARES) / totals.tokens / (mean + EPS) ** 2, ESS_LEAST)


def _clipped_frac(totals: Totals) -> float:
    return totals(CLIPPED) / (totals.rows if _of_rows(totals.preset) else totals.tokens)


_EMPTY = " A row without a token counts as {}."

GAP = {
    "training_ppl": per_row(TRAIN_PPL).means(
        "Mean over rows of e^(−mean log π_old), not the perplexity of all tokens." + _EMPTY.format(1)
    ),
    "training_log_ppl": (-per_row(TRAIN)).means(
        "Mean over rows of −mean log π_old, nats." + _EMPTY.format(0)
    ),
    "kl": per_token(K1).means(
        "Mean over tokens of log π_rollout − log π_old, nats (k1; it may be negative). Before 2025-12-22 "
        "its sign was the opposite."
    ),
    "k3_kl": per_token(K3_CLAMPED).means(
        "Mean over tokens of r − 1 − log r, with log r bounded to ±20 and the result to 10: one bad "
        "token cannot show as it does in verl."
    ),
    "rollout_ppl": per_row(ROLLOUT_PPL).means(
        "Mean over rows of e^(−mean log π_rollout)." + _EMPTY.format(1)
    ),
    "rollout_log_ppl": (-per_row(ROLLOUT)).means(
        "Mean over rows of −mean log π_rollout, nats." + _EMPTY.format(0)
    ),
    "log_ppl_diff": per_row(K1).means(
        "Mean over rows of mean log π_rollout − mean log π_old, nats: above 0 where the trainer finds "
        "the text less likely." + _EMPTY.format(0)
    ),
    "log_ppl_abs_diff": per_row(ABS_DIFF).means("The same without its sign, row by row." + _EMPTY.format(0)),
    "log_ppl_diff_max": base.highest(DIFFS).means("Largest log_ppl_diff of a row." + _EMPTY.format(0)),
    "log_ppl_diff_min": lowest(DIFFS).means("Smallest log_ppl_diff of a row." + _EMPTY.format(0)),
    "ppl_ratio": per_row(PPL_RATIO).means(
        "Mean over rows of the two perplexities' ratio, 1/r in geometric mean." + _EMPTY.format(1)
    ),
    "chi2_token": (per_token(RATIO_SQUARED) - 1).means(
        "Mean over tokens of r², log r bounded to ±20, minus 1; below 0 on samples that lack the tail."
    ),
    "chi2_seq": (per_row(CHI2) - 1).means(
        "Mean over rows of the squared GEOMETRIC mean of r, minus 1: near 0 where verl's number of that "
        "name, of products, is huge." + _EMPTY.format("r = 1")
    ),
}
WEIGHTS = {
    "is_weight_mean": per_token(Sum("weight", _kept_weight)).means(
        "Mean over tokens of the weights as the loss gets them, zeros included."
    ),
    "ess": Value(_ess, (BOUNDED, SQUARES)).means(
        "1/E[(w/E[w])²] over tokens, a fraction, of weights bounded to [1/C, C]: a masked token counts "
        "as 1/C, and the untruncated tail of sequence_mask as C."
    ),
    "clipped_frac": Value(_clipped_frac, (CLIPPED,)).means(
        "token_truncate: share of tokens with r > C; token_mask: share of weights that are 0; sequence "
        "modes: share of all rows, empty ones included, whose geometric mean of r is above C."
    ),
}
LOG = base.Log(
    "ms-swift", (*table(GAP, "rollout_correction/"), *table(WEIGHTS, "rollout_correction/", corrects))
)

# ---------------------------------------------------------------- configuration

CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
MODE = "rollout_importance_sampling_mode"


def ms_swift(parts: Parts) -> Translation:
    """rollout_importance_sampling_mode with an upper bound; its "sequence" is the geometric mean."""
    parts.need(("old",), ("ppo_clip", "gspo", "cispo", "sapo", "fipo"))
    delta = parts.take_opsm()
    settings: config.Settings = {}
    upper = None
    if parts.weight is not None:
        if parts.weight.over == "sum":
            config.cannot("weights of the product ratio (its sequence modes take the geometric mean)")
        mode, upper = _mode(parts)
        bound = IDLE_HIGH if upper is None else upper
        settings = {MODE: mode, "rollout_importance_sampling_threshold": bound}
    parts.finish()
    settings |= threshold("off_policy_sequence_mask_delta", delta)
    settings = ({"use_vllm": "true"} if settings else {}) | settings | _loss(parts.preset)
    return (schema.block("ms-swift", "flags", settings),), config.remarks(
        parts.loss == "gspo"
        and "importance_sampling_level sequence_token has the same loss and, with one advantage per "
        "sequence, the same gradient",
        "use_vllm" not in settings and f"ms-swift corrects nothing unless {MODE} is set",
        MODE in settings
        and "the weights multiply the KL-to-reference term as well; needs vLLM 0.10.2 or later",
        MODE in settings
        and upper is None
        and "a threshold of 1.0e+9 is idle: the log-ratio is clamped to ±20",
        delta is not None
        and "off_policy_sequence_mask_delta is in nats per token; rows leave the denominator under bnpo only",
    )


def _loss(preset: Preset) -> config.Settings:
    shape = preset.shape
    if preset.loss == "sapo":
        taus = {"tau_positive": "tau_pos", "tau_negative": "tau_neg"}
        return {"loss_type": "sapo", **config.shape_settings(preset, taus)}
    if preset.loss != "fipo":
        return loss(preset, CLIP)
    reach = round(shape.highest - 1, 12)
    if reach <= 0 or shape.lowest not in (1, round(1 - reach, 12)):
        config.cannot("an influence within other bounds than 1 or 1 − c, and 1 + c")
    found: config.Settings = {"loss_type": "fipo", **config.clip_settings(preset, CLIP)}
    found |= config.shape_settings(
        preset, {"half_life": "fipo_decay_rate", "threshold": "fipo_safety_threshold"}
    )
    if reach != 0.2:
        found["fipo_clip_range"] = reach
    return found if shape.lowest == 1 else {**found, "fipo_clip_high_only": "false"}


def _mode(parts: Parts) -> tuple[str, float | None]:
    over = parts.weight.over if parts.weight else ""
    band = parts.take_band(over)
    if band is not None:
        if band[0] is not None or over != "token":
            config.cannot(
                "a lower bound of the mask" if over == "token" else "weights zeroed by the geometric mean"
            )
        return "token_mask", band[1]
    weight = parts.take_weight("token", "mean")
    raw = weight is not None and weight.action == "none"
    rule = parts.take("ratio", "mean", "upper") if raw and over == "token" else None
    if rule is not None:
        return "sequence_mask", rule.upper
    name = {"token": "token_truncate", "mean": "sequence_truncate"}[over]
    return name, None if weight is None else weight.upper


GUARDS = Guards(20.0, "token", "token", frozenset({"k1"}))
TRAINER = Trainer("ms-swift", ms_swift, GUARDS, CLIP, (LOG,))
