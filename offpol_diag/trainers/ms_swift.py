"""ms-swift: `rollout_correction/` of π_old against the rollout, and rollout_importance_sampling_mode.

Logged numbers are off ms-swift 3602360a. Names are verl's, definitions are not: chi2_seq is of geometric
means, k3 is bounded at 10 per token, the ESS counts a masked token as 1/C. Its means are per micro-batch and
rank, here of the dump. Its "sequence" is the geometric mean.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offpol_diag.presets import Preset
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import (
    EPS,
    K3_HELD,
    RATIO_SQUARED,
    ROLLOUT,
    SAFETY,
    TRAIN,
    WEIGHT,
    Entry,
    Log,
    Range,
    Rows,
    Sum,
    Totals,
    Value,
    ends,
    highest,
    lowest,
    row_mean,
    where,
)
from offpol_diag.trainers.base import LOG as LOG_RATIO
from offpol_diag.trainers.config import (
    IDLE_HIGH,
    ClipKeys,
    Habits,
    Parts,
    Said,
    Settings,
    Trainer,
    cannot,
    clip_remarks,
    remarks,
)
from offpol_diag.trainers.schema import block
from offpol_diag.trainers.trl import loss, row_weights, threshold

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import View


def weighs(preset: Preset) -> bool:
    """Return whether an importance sampling mode is set; without one only the gap is logged."""
    return preset.weight is not None


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


def _difference(view: View) -> Tensor:
    """Return mean log π_rollout − mean log π_old of each row, [S] nats."""
    return -row_mean(LOG_RATIO)(view)


def _beyond(view: View) -> Tensor:
    """Flag rows whose mean Δ, clamped to ±20, is above ln C, as sequence modes do, [S] bool."""
    return view.ratios.aggregate("ratio", "mean", SAFETY).values > math.log(_threshold(view.preset))


def _without(view: View, of_masked: float, sums: Tensor) -> Tensor:
    """Replace the sums of rows that sequence_mask drops by `of_masked` per token, [S]."""
    return where(_beyond(view), view.n * of_masked, sums) if _of_rows(view.preset) else sums


def _kept_weight(view: View) -> Tensor:
    """Sum the weights of each row, [S]; sequence_mask multiplies token ratios by 0 or 1."""
    weights = row_weights(view)
    return _without(view, 0.0, view.total(WEIGHT)) if weights is None else weights * view.n


def _bounded(power: int) -> Rows:
    """Return the sum of weights clamped to [1/C, C], or of their squares, from which the ESS is made."""

    def of(view: View) -> Tensor:
        high, weights = _threshold(view.preset), row_weights(view)
        if weights is not None:
            return weights.clamp(1 / high, high) ** power * view.n
        return _without(view, high**-power, view.within(WEIGHT, 1 / high, high)[power - 1])

    return of


def _clipped(view: View) -> Tensor:
    """Rows above C; or tokens above it; under token_mask tokens of weight 0."""
    if _of_rows(view.preset):
        return _beyond(view) + view.zeros
    weighed = view.weigh()
    masks = view.preset.weight is not None and view.preset.weight.action == "mask"
    return weighed.high + weighed.low if masks else weighed.high


SUMS = (
    Sum("training_ppl", lambda view: (-row_mean(TRAIN)(view)).exp()),
    Sum("training_log_ppl", lambda view: -row_mean(TRAIN)(view)),
    Sum("rollout_ppl", lambda view: (-row_mean(ROLLOUT)(view)).exp()),
    Sum("rollout_log_ppl", lambda view: -row_mean(ROLLOUT)(view)),
    Sum("kl", lambda view: -view.total(LOG_RATIO)),
    Sum("k3_kl", lambda view: view.total(K3_HELD)),
    Sum("log_ppl_diff", _difference),
    Sum("log_ppl_abs_diff", lambda view: _difference(view).abs()),
    Sum("ppl_ratio", lambda view: _difference(view).exp()),
    Sum("rr", lambda view: view.total(RATIO_SQUARED)),
    Sum("gg", lambda view: (-2 * _difference(view).clamp(-SAFETY, SAFETY)).exp()),
    Sum("weight", _kept_weight, own=True, when=weighs),
    Sum("bounded", _bounded(1), own=True, when=weighs),
    Sum("bounded²", _bounded(2), own=True, when=weighs),
    Sum("clipped", _clipped, own=True, when=weighs),
)
RANGES = (Range("log_ppl_diff", lambda view: ends(_difference(view))),)


def _mean(name: str, minus: float = 0.0) -> Value:
    """Over tokens."""
    return lambda totals: totals(name) / totals.tokens - minus


def _row_mean(name: str, minus: float = 0.0) -> Value:
    return lambda totals: totals(name) / totals.rows - minus


ESS_LEAST = 1e-10
"""Lower bound on the normalised second moment."""


def _ess(totals: Totals) -> float:
    mean = totals("bounded") / totals.tokens
    return 1 / max(totals("bounded²") / totals.tokens / (mean + EPS) ** 2, ESS_LEAST)


def _clipped_frac(totals: Totals) -> float:
    return totals("clipped") / (totals.rows if _of_rows(totals.preset) else totals.tokens)


_EMPTY = " A row without a token counts as {}."


def _entry(name: str, meaning: str, of: Value) -> Entry:
    return Entry(f"rollout_correction/{name}", meaning, of)


LOG = Log(
    "ms-swift",
    SUMS,
    RANGES,
    (
        _entry(
            "training_ppl",
            "Mean over rows of e^(−mean log π_old), not the perplexity of all tokens." + _EMPTY.format(1),
            _row_mean("training_ppl"),
        ),
        _entry(
            "training_log_ppl",
            "Mean over rows of −mean log π_old, nats." + _EMPTY.format(0),
            _row_mean("training_log_ppl"),
        ),
        _entry(
            "kl",
            "Mean over tokens of log π_rollout − log π_old, nats (k1; it may be negative). Before 2025-12-22 "
            "its sign was the opposite.",
            _mean("kl"),
        ),
        _entry(
            "k3_kl",
            "Mean over tokens of r − 1 − log r, with log r bounded to ±20 and the result to 10: one bad "
            "token cannot show as it does in verl.",
            _mean("k3_kl"),
        ),
        _entry(
            "rollout_ppl",
            "Mean over rows of e^(−mean log π_rollout)." + _EMPTY.format(1),
            _row_mean("rollout_ppl"),
        ),
        _entry(
            "rollout_log_ppl",
            "Mean over rows of −mean log π_rollout, nats." + _EMPTY.format(0),
            _row_mean("rollout_log_ppl"),
        ),
        _entry(
            "log_ppl_diff",
            "Mean over rows of mean log π_rollout − mean log π_old, nats: above 0 where the trainer finds "
            "the text less likely." + _EMPTY.format(0),
            _row_mean("log_ppl_diff"),
        ),
        _entry(
            "log_ppl_abs_diff",
            "The same without its sign, row by row." + _EMPTY.format(0),
            _row_mean("log_ppl_abs_diff"),
        ),
        _entry(
            "log_ppl_diff_max",
            "Largest log_ppl_diff of a row." + _EMPTY.format(0),
            highest("log_ppl_diff"),
        ),
        _entry(
            "log_ppl_diff_min",
            "Smallest log_ppl_diff of a row." + _EMPTY.format(0),
            lowest("log_ppl_diff"),
        ),
        _entry(
            "ppl_ratio",
            "Mean over rows of the two perplexities' ratio, 1/r in geometric mean." + _EMPTY.format(1),
            _row_mean("ppl_ratio"),
        ),
        _entry(
            "chi2_token",
            "Mean over tokens of r², log r bounded to ±20, minus 1; below 0 on samples that lack the tail.",
            _mean("rr", 1.0),
        ),
        _entry(
            "chi2_seq",
            "Mean over rows of the squared GEOMETRIC mean of r, minus 1: near 0 where verl's number of that "
            "name, of products, is huge." + _EMPTY.format("r = 1"),
            _row_mean("gg", 1.0),
        ),
        _entry(
            "is_weight_mean",
            "Mean over tokens of the weights as the loss gets them, zeros included.",
            _mean("weight"),
        ),
        _entry(
            "ess",
            "1/E[(w/E[w])²] over tokens, a fraction, of weights bounded to [1/C, C]: a masked token counts "
            "as 1/C, and the untruncated tail of sequence_mask as C.",
            _ess,
        ),
        _entry(
            "clipped_frac",
            "token_truncate: share of tokens with r > C; token_mask: share of weights that are 0; sequence "
            "modes: share of all rows, empty ones included, whose geometric mean of r is above C.",
            _clipped_frac,
        ),
    ),
)

# ---------------------------------------------------------------- configuration

CLIP = ClipKeys("epsilon", "epsilon_high", "delta")


def ms_swift(preset: Preset) -> Said:
    """rollout_importance_sampling_mode with an upper bound; its "sequence" is the geometric mean."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    delta = parts.take_opsm()
    settings, idle = _weights(parts)
    parts.finish()
    settings |= threshold("off_policy_sequence_mask_delta", delta)
    settings = ({"use_vllm": "true"} if settings else {}) | settings | loss(preset, CLIP)
    found = remarks(
        settings.get("rollout_importance_sampling_mode")
        and "the weights multiply the KL-to-reference term as well; needs vLLM 0.10.2 or later",
        idle and "a threshold of 1.0e+9 is idle: the log-ratio is clamped to ±20",
        delta is not None
        and "off_policy_sequence_mask_delta is in nats per token; rows leave the denominator under bnpo only",
    )
    nothing = (
        ("ms-swift corrects nothing unless rollout_importance_sampling_mode is set",)
        if "use_vllm" not in settings
        else ()
    )
    said = (*nothing, *found, *clip_remarks(preset, CLIP))
    return (block("ms-swift", "flags", schema.flags(settings), settings),), said


def _weights(parts: Parts) -> tuple[Settings, bool]:
    if parts.weight is None:
        return {}, False
    if parts.weight.over == "sum":
        cannot("weights of the product ratio (its sequence modes take the geometric mean)")
    mode, upper = _mode(parts)
    threshold = IDLE_HIGH if upper is None else upper
    settings = {
        "rollout_importance_sampling_mode": mode,
        "rollout_importance_sampling_threshold": threshold,
    }
    return settings, upper is None


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


TRAINER = Trainer("ms-swift", ms_swift, Habits(20.0, "token", "token", frozenset({"k1"})), (LOG,))
