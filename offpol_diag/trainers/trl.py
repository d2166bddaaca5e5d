"""TRL's GRPO trainer: `sampling/` while its vLLM correction is on; GRPOConfig's vllm_importance_sampling_*.

Logged numbers are off TRL f2cd5771. Its means are of one process each, then over processes; here the dump is
one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offpol_diag.presets import Preset
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import (
    DISTANCE,
    WEIGHT,
    Ends,
    Entry,
    Log,
    Range,
    Sum,
    ends,
    highest,
    lowest,
    per_token,
)
from offpol_diag.trainers.config import (
    ClipKeys,
    Parts,
    Said,
    Settings,
    Trainer,
    cannot,
    clip_bounds,
    clip_remarks,
    clip_settings,
)
from offpol_diag.trainers.schema import block, older

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import View


def corrects(preset: Preset) -> bool:
    """Return whether the correction is on; without it none of these names is logged."""
    return preset.weight is not None


def row_weights(view: View) -> Tensor | None:
    """The final weights of sequences, [S], where one without a token has e^0 = 1; None in token modes."""
    found = view.weigh().final
    return found.values if found.per == "sequence" else None


def _total(view: View) -> Tensor:
    found = row_weights(view)
    return view.total(WEIGHT) if found is None else found


def _units(view: View) -> Tensor:
    """Return the number of weights in the mean: of tokens, or of all rows."""
    return view.n if row_weights(view) is None else view.n * 0 + 1


def _ends(view: View) -> Ends:
    found = row_weights(view)
    return view.ends(WEIGHT) if found is None else ends(found)


_ROWS = " In sequence modes it is over completions, long or short; one without a token has a ratio of 1."

LOG = Log(
    "trl",
    (
        Sum("difference", lambda view: view.total(DISTANCE), when=corrects),
        Sum("ratio", _total, own=True, when=corrects),
        Sum("units", _units, own=True, when=corrects),
    ),
    (
        Range("|Δ|", lambda view: view.ends(DISTANCE), when=corrects),
        Range("ratios", _ends, own=True, when=corrects),
    ),
    (
        Entry(
            "sampling/sampling_logp_difference/mean",
            "Mean |log π_old − log π_rollout| over tokens, nats, whatever the mode: a size, which cannot "
            "tell drift from noise.",
            per_token("difference"),
            corrects,
        ),
        Entry(
            "sampling/sampling_logp_difference/max",
            "Largest |log π_old − log π_rollout| of a token, nats.",
            highest("|Δ|"),
            corrects,
        ),
        Entry(
            "sampling/importance_sampling_ratio/min",
            "Smallest ratio after truncation or masking: 0 as soon as anything is masked, the lower bound "
            "(if there is one) as soon as anything is truncated." + _ROWS,
            lowest("ratios"),
            corrects,
        ),
        Entry(
            "sampling/importance_sampling_ratio/mean",
            "Mean ratio after truncation or masking, zeros included: not an estimate of E[r], which is 1."
            + _ROWS,
            lambda totals: totals("ratio") / totals("units"),
            corrects,
        ),
        Entry(
            "sampling/importance_sampling_ratio/max",
            "Largest ratio after truncation or masking, never above clip_max: it says nothing of the raw "
            "tail." + _ROWS,
            highest("ratios"),
            corrects,
        ),
    ),
)

# ---------------------------------------------------------------- configuration

MODES = {"token": "token", "sum": "sequence"}
CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
MAX, CAP = "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"


def trl(preset: Preset) -> Said:
    """vllm_importance_sampling_*, and off_policy_mask_threshold."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    delta = parts.take_opsm()
    weights = _weights(parts)
    parts.finish()
    settings = {"use_vllm": True, **weights, **threshold("off_policy_mask_threshold", delta)}
    settings |= loss(preset, CLIP)
    before = {CAP if key == MAX else key: value for key, value in settings.items()}
    snippets = (
        block("trl", "python", schema.call("GRPOConfig", settings), settings),
        *(older("trl", "python", schema.call("GRPOConfig", before), before) if MAX in settings else ()),
    )
    nats = ("off_policy_mask_threshold is in nats per token",) if delta is not None else ()
    return snippets, (*nats, *clip_remarks(preset, CLIP))


def _weights(parts: Parts) -> Settings:
    if parts.weight is None:
        return {"vllm_importance_sampling_correction": False}
    over = parts.weight.over
    band = parts.take_band(over)
    mode, (low, high) = "mask", band or (None, None)
    if band is None:
        weight = parts.take_weight(*MODES, lower=True)
        if weight is not None and weight.action == "truncate":
            mode, low, high = "truncate", weight.lower, weight.upper
    if over not in MODES:
        cannot("weights of the geometric mean of the sequence")
    found = {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": f"{MODES[over]}_{mode}",
        "vllm_importance_sampling_clip_max": high,
    }
    return {**found, **({} if low is None else {"vllm_importance_sampling_clip_min": low})}


def threshold(key: str, delta: float | None) -> Settings:
    """The setting of a mask on negative advantages, if there is one."""
    return {} if delta is None else {key: delta}


def loss(preset: Preset, keys: ClipKeys) -> Settings:
    """The loss; CISPO's epsilon_high there is the bound itself, and it has no lower one."""
    if preset.loss == "cispo":
        low, high = clip_bounds(preset)
        if low < 1:
            cannot("a lower bound of CISPO's weight")
        return {"loss_type": "cispo", "epsilon_high": 1 + high}
    level = {"importance_sampling_level": "sequence"} if preset.loss == "gspo" else {}
    return {**level, **clip_settings(preset, keys)}


TRAINER = Trainer("trl", trl, logs=(LOG,))
