"""OpenRLHF: three numbers of its policy loss, none about the weights; a level, a mode and a gate.

Logged numbers are off OpenRLHF 3c3be623 (models/loss.py). Averages over micro-batches are weighted by their
tokens, so the dump as one batch gives the same. The keys of the correction are those since September 2026;
before, is_correction_type with two bounds.
"""

from __future__ import annotations

import math

from offpol_diag.presets import Preset
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import LOG as LOG_RATIO
from offpol_diag.trainers.base import UPDATE, Entry, Log, Sum, U, clip_decides, per_token, under
from offpol_diag.trainers.config import (
    ClipKeys,
    Parts,
    Said,
    Settings,
    Snippet,
    Trainer,
    cannot,
    clip_remarks,
    clip_settings,
    remarks,
)
from offpol_diag.trainers.schema import older


def _corrects(preset: Preset) -> bool:
    """Under GSPO the rollout is the anchor: there is no correction of its own, and no vllm_kl."""
    return preset.loss == "ppo_clip" and preset.weight is not None


DRIFT = under(U, "old")
"""Of π_old also where GSPO clips around the rollout."""
MISMATCH = under(LOG_RATIO, "old")

LOG = Log(
    "openrlhf",
    (
        Sum("clipped", clip_decides, own=True, needs=(*UPDATE, "advantages")),
        Sum("drift", lambda view: -view.total(DRIFT), needs=(*UPDATE, "old")),
        Sum("mismatch", lambda view: -view.total(MISMATCH), when=_corrects, needs=("old",)),
    ),
    (),
    (
        Entry(
            "ppo_clip_ratio",
            "Share of tokens whose clipped term is the smaller surrogate. The ratio is π_θ/π_old, under GSPO "
            "the geometric mean of π_θ/π_rollout; what the correction masks counts all the same.",
            per_token("clipped"),
        ),
        Entry(
            "ppo_kl",
            "Mean log π_old − log π_θ over tokens, nats: k1 of the update, not of the mismatch; it may be "
            "negative. Under GSPO it is still of π_old, though the loss clips around the rollout.",
            per_token("drift"),
        ),
        Entry(
            "vllm_kl",
            "Mean log π_rollout − log π_old over tokens, nats: k1 of the mismatch, which may be negative. "
            "Logged by the PPO loss only, with the correction on.",
            per_token("mismatch"),
            _corrects,
        ),
    ),
)

# ---------------------------------------------------------------- configuration

CLIP = ClipKeys("low", "high", "actor.dual_clip")
CORRECTION = "algo.advantage.is_correction_"
LEVELS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
FORMER = {"seq-mask-tis": "mis"}
"""Type → its name before 0.9.4."""


def openrlhf(preset: Preset) -> Said:
    """A correction of tokens or sequences with two bounds; an idle lower one is 0, an idle upper one inf."""
    parts = Parts(preset)
    if parts.policy == "current":
        return _gspo(preset, parts)
    parts.need(("old",), ("ppo_clip", "gspo"))
    if parts.loss == "gspo" and parts.weight is not None:
        cannot("weights under the GSPO loss, which takes the rollout for its anchor instead")
    if parts.weight is None:
        parts.finish()
        nothing = "OpenRLHF corrects nothing unless its correction is on"
        return _forms(_loss(preset), {}, {}), (nothing, *clip_remarks(preset, CLIP))
    kind, bounds = _type(parts)
    parts.finish()
    level, mode = LEVELS[kind]
    newest = {"level": level, "mode": mode, "gating": "ratio", "threshold": bounds}
    before = {"enable": True, "type": kind, "threshold": bounds}
    return _forms(_loss(preset), newest, before), _remarks(preset, bounds)


def _forms(loss: Settings, newest: Settings, before: Settings) -> tuple[Snippet, ...]:
    """The correction in each spelling that has had it, the newest first; the same spellings once."""
    flat = {key.removeprefix("actor."): value for key, value in loss.items()}
    spelt = [
        {CORRECTION + key: value for key, value in newest.items()} | loss,
        {CORRECTION + key: value for key, value in before.items()} | loss,
        _vllm(before) | flat,
        _vllm(before | {"type": FORMER.get(before.get("type", ""), before.get("type"))} if before else {})
        | flat,
    ]
    distinct = [one for i, one in enumerate(spelt) if one not in spelt[:i]]
    found = tuple(form for one in distinct for form in older("openrlhf", "flags", schema.flags(one), one))
    return found or cannot("bounds that its command line refuses")


def _vllm(correction: Settings) -> Settings:
    """The spelling before 0.10.2."""
    names = {
        "enable": "enable_vllm_is_correction",
        "type": "vllm_is_correction_type",
        "threshold": "vllm_is_truncated_threshold",
    }
    return {names[key]: value for key, value in correction.items()}


def _remarks(preset: Preset, bounds: tuple[float, float]) -> tuple[str, ...]:
    found = remarks(
        bounds[0] == 0 and "a lower bound of 0 is idle; the default, 0.5, is not",
        bounds[1] == math.inf and "an upper bound of inf is idle",
        "before 0.9.1 the threshold was one upper bound",
    )
    return (*found, *clip_remarks(preset, CLIP))


def _type(parts: Parts) -> tuple[str, tuple[float, float]]:
    band = parts.take_band("token")
    if band is not None:
        return "icepop", _open(*band)
    weight = parts.take_weight("token", lower=True)
    rule = parts.take("ratio", "mean") if weight is not None and weight.action == "none" else None
    if rule is not None:
        return "seq-mask-tis", _open(rule.lower, rule.upper)
    return "tis", _open(None, None) if weight is None else _open(weight.lower, weight.upper)


def _open(low: float | None, high: float | None) -> tuple[float, float]:
    return (0.0 if low is None else low, math.inf if high is None else high)


def _gspo(preset: Preset, parts: Parts) -> Said:
    parts.need(("current",), ("gspo",))
    parts.finish()
    remark = "under gspo the correction's bounds are ignored: the rollout's log-probs become the anchor"
    return _forms(_loss(preset), {"level": "token"}, {"enable": True}), (remark,)


def _loss(preset: Preset) -> Settings:
    found = clip_settings(preset, CLIP)
    bounds = {"actor.eps_clip_low_high": (found.pop("low"), found.pop("high"))} if "low" in found else {}
    gspo = {"actor.policy_loss_type": "gspo"} if preset.loss == "gspo" else {}
    return {**gspo, **bounds, **found}


TRAINER = Trainer("openrlhf", openrlhf, logs=(LOG,))
