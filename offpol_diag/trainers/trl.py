"""TRL's GRPO trainer: `sampling/` while its vLLM correction is on, `clip_ratio/`; its GRPOConfig.

Logged numbers are off TRL f2cd5771. Its means are of one process each, then over processes; here the dump is
one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from offpol_diag.presets import Preset
from offpol_diag.trainers import config, schema
from offpol_diag.trainers.base import (
    Ends,
    Log,
    Range,
    Sum,
    Value,
    ends,
    highest,
    lowest,
    per_row,
    per_token,
    ratio,
    table,
)
from offpol_diag.trainers.config import ClipKeys, Parts, Settings, Trainer, Translation
from offpol_diag.trainers.measures import CLIPPED_HIGH, CLIPPED_LOW, DISTANCE, WEIGHT, clipped_row

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import View


def corrects(preset: Preset) -> bool:
    """Return whether the correction is on; without it none of these names is logged."""
    return preset.weight is not None


def row_weights(view: View) -> Array | None:
    """The final weights of sequences, [S], where one without a token has e^0 = 1; None in token modes."""
    found = view.weigh().final
    return found.values if found.per == "sequence" else None


def _total(view: View) -> Array:
    found = row_weights(view)
    return view.total(WEIGHT) if found is None else found


def _units(view: View) -> Array:
    """Return the number of weights in the mean: of tokens, or of all rows."""
    return view.counted if row_weights(view) is None else view.n * 0 + 1


def _ends(view: View) -> Ends:
    found = row_weights(view)
    return view.ends(WEIGHT) if found is None else ends(found)


RATIO, UNITS, RATIOS = Sum("ratio", _total), Sum("units", _units), Range("ratios", _ends)
_ROWS = " In sequence modes it is over completions, long or short; one without a token has a ratio of 1."

NAMES = {
    "sampling_logp_difference/mean": per_token(DISTANCE).means(
        "Mean |log π_old − log π_rollout| over tokens, nats, whatever the mode: a size, which cannot "
        "tell drift from noise."
    ),
    "sampling_logp_difference/max": highest(DISTANCE).means(
        "Largest |log π_old − log π_rollout| of a token, nats."
    ),
    "importance_sampling_ratio/min": lowest(RATIOS).means(
        "Smallest ratio after truncation or masking: 0 as soon as anything is masked, the lower bound "
        "(if there is one) as soon as anything is truncated." + _ROWS
    ),
    "importance_sampling_ratio/mean": ratio(RATIO, UNITS).means(
        "Mean ratio after truncation or masking, zeros included: not an estimate of E[r], which is 1." + _ROWS
    ),
    "importance_sampling_ratio/max": highest(RATIOS).means(
        "Largest ratio after truncation or masking, never above clip_max: it says nothing of the raw "
        "tail." + _ROWS
    ),
}


def _clips(preset: Preset) -> bool:
    """Return whether the loss is one whose clip TRL counts."""
    return preset.loss in ("ppo_clip", "gspo", "luspo")


def _side(side: Literal["low", "high"]) -> tuple[Sum, Range]:
    """Return the count of clipped tokens, or of sequences under a pooled ratio, and the extremes by row."""
    measure = CLIPPED_LOW if side == "low" else CLIPPED_HIGH

    def count(view: View) -> Array:
        rows = clipped_row(view, side)
        return view.total(measure) if rows is None else rows

    def of_rows(view: View) -> Ends:
        rows = clipped_row(view, side)
        return ends(view.total(measure) / view.n.clip(min=1), view.nonempty) if rows is None else ends(rows)

    return Sum(f"clipped {side}", count, needs=measure.needs), Range(f"{side}", of_rows, needs=measure.needs)


def _region(view: View) -> Array:
    return LOW[0].of(view) + HIGH[0].of(view)


def _over_units(of: Sum) -> Value:
    pooled = ("gspo", "luspo")
    return Value(
        lambda totals: totals(of) / (totals.rows if totals.preset.loss in pooled else totals.tokens), (of,)
    )


LOW, HIGH = _side("low"), _side("high")
_UNITS = " Of tokens; under importance_sampling_level sequence of completions, long or short."
CLIPS = {
    "clip_ratio/low_mean": _over_units(LOW[0]).means(
        "Share with π_θ/π_old below 1 − epsilon and A < 0." + _UNITS, _clips
    ),
    "clip_ratio/low_min": lowest(LOW[1]).means("The same of the completion where it is smallest.", _clips),
    "clip_ratio/high_mean": _over_units(HIGH[0]).means(
        "Share with π_θ/π_old above 1 + epsilon_high and A > 0." + _UNITS, _clips
    ),
    "clip_ratio/high_max": highest(HIGH[1]).means("The same of the completion where it is largest.", _clips),
    "clip_ratio/region_mean": _over_units(Sum("clipped", _region, needs=LOW[0].needs)).means(
        "The sum of low_mean and high_mean." + _UNITS, _clips
    ),
    "cispo_clip_ratio": per_token(HIGH[0]).means(
        "Share of tokens whose weight is cut, π_θ/π_old above epsilon_high, among all, but counted where "
        "A > 0 only.",
        lambda preset: preset.loss == "cispo",
    ),
    "vespo/phi_seq_mean": per_row(
        Sum("φ", lambda view: view.vespo_factor, needs=("current", "old", "advantages"))
    ).means(
        "Mean over completions of φ(w), which multiplies −A log π_θ: 1 on-policy, near 0 far off it to "
        "either side.",
        lambda preset: preset.loss == "vespo",
    ),
}
"""Logged with or without the correction: grpo_trainer.py:3218-3258."""
LOG = Log("trl", (*table(NAMES, "sampling/", corrects), *table(CLIPS)))

# ---------------------------------------------------------------- configuration

MODES = {"token": "token", "sum": "sequence"}
CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
KEY = "vllm_importance_sampling_"
SHAPES = {
    "sapo": {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"},
    "vespo": {
        f"{letter}_{sign}": f"vespo_{letter}_{sign[:3]}"
        for sign in ("positive", "negative")
        for letter in ("k", "lambda")
    },
}
"""Losses with parameters → their fields of `Shape` and keys."""


def trl(parts: Parts) -> Translation:
    """vllm_importance_sampling_*, and off_policy_mask_threshold."""
    parts.need(("old",), ("ppo_clip", "gspo", "luspo", "cispo", "sapo", "vespo"))
    over = parts.weight.over if parts.weight else ""
    if (over, parts.loss) == ("sum", "vespo"):
        config.cannot("weights of sequences under the VESPO loss, which takes token modes")
    if (over, parts.loss) == ("token", "luspo"):
        config.cannot("weights of tokens under the LUSPO loss, whose terms are of sequences")
    delta = parts.take_opsm()
    weights = _weights(parts)
    parts.finish()
    settings = {"use_vllm": True, **weights, **threshold("off_policy_mask_threshold", delta)}
    settings |= loss(parts.preset, CLIP)
    before = {key.replace("_clip_max", "_cap"): value for key, value in settings.items()}
    snippets = (
        schema.block("trl", "python", settings, name="GRPOConfig"),
        *(schema.older("trl", "python", before, name="GRPOConfig") if before != settings else ()),
    )
    notes = ("off_policy_mask_threshold is in nats per token",) if delta is not None else ()
    return snippets, notes if f"{KEY}mode" in weights else (*notes, NO_DUMP)


NO_DUMP = "without a correction TRL computes no old log-probs to dump: docs/trainers/trl.md says what does"


def _weights(parts: Parts) -> Settings:
    if parts.weight is None:
        return {f"{KEY}correction": False}
    over = parts.weight.over
    band = parts.take_band(over)
    mode, (low, high) = "mask", band or (None, None)
    if band is None:
        weight = parts.take_weight(*MODES, lower=True)
        if weight is not None and weight.action == "truncate":
            mode, low, high = "truncate", weight.lower, weight.upper
    if over not in MODES:
        config.cannot("weights of the geometric mean of the sequence")
    found = {f"{KEY}correction": True, f"{KEY}mode": f"{MODES[over]}_{mode}", f"{KEY}clip_max": high}
    return found if low is None else {**found, f"{KEY}clip_min": low}


def threshold(key: str, delta: float | None) -> Settings:
    """The setting of a mask on negative advantages, if there is one."""
    return {} if delta is None else {key: delta}


def loss(preset: Preset, keys: ClipKeys) -> Settings:
    """The loss; CISPO's epsilon_high there is the bound itself, and it has no lower one."""
    if preset.loss == "cispo":
        return {"loss_type": "cispo", "epsilon_high": 1 + config.cispo_high(preset)}
    if preset.loss in SHAPES:
        return {"loss_type": preset.loss, **config.shape_settings(preset, SHAPES[preset.loss])}
    pooled = preset.loss in ("gspo", "luspo")
    level = {"importance_sampling_level": "sequence"} if pooled else {}
    kind = {"loss_type": "luspo"} if preset.loss == "luspo" else {}
    return {**kind, **level, **config.clip_settings(preset, keys)}


TRAINER = Trainer("trl", trl, clip=CLIP, logs=(LOG,))
