"""OpenRLHF: three numbers of its policy loss, none about the weights; a level, a mode and a gate.

Logged numbers are off OpenRLHF 3c3be623 (models/loss.py). Averages over micro-batches are weighted by their
tokens, so the dump as one batch gives the same. The keys of the correction are those since September 2026;
before, is_correction_type with two bounds.
"""

from __future__ import annotations

import math

from offpol_diag.presets import Preset
from offpol_diag.trainers import config, schema
from offpol_diag.trainers.base import Log, Sum, per_token, table
from offpol_diag.trainers.config import ClipKeys, Parts, Settings, Snippet, Trainer, Translation
from offpol_diag.trainers.measures import K1, UPDATE, U, clip_decides, under


def _corrects(preset: Preset) -> bool:
    """Under GSPO the rollout is the anchor: there is no correction of its own, and no vllm_kl."""
    return preset.loss == "ppo_clip" and preset.weight is not None


CLIPPED = Sum("clipped", clip_decides, needs=(*UPDATE, "advantages"))
DRIFT = under(U, "old")
"""Of π_old also where GSPO clips around the rollout."""

LOSS = {
    "ppo_clip_ratio": per_token(CLIPPED).means(
        "Share of tokens whose clipped term is the smaller surrogate. The ratio is π_θ/π_old, under GSPO "
        "the geometric mean of π_θ/π_rollout; what the correction masks counts all the same."
    ),
    "ppo_kl": (-per_token(DRIFT)).means(
        "Mean log π_old − log π_θ over tokens, nats: k1 of the update, not of the mismatch; it may be "
        "negative. Under GSPO it is still of π_old, though the loss clips around the rollout."
    ),
}
CORRECTED = {
    "vllm_kl": per_token(under(K1, "old")).means(
        "Mean log π_rollout − log π_old over tokens, nats: k1 of the mismatch, which may be negative. "
        "Logged by the PPO loss only, with the correction on."
    ),
}
LOG = Log("openrlhf", (*table(LOSS), *table(CORRECTED, when=_corrects)))

# ---------------------------------------------------------------- configuration

CLIP = ClipKeys("low", "high", "actor.dual_clip")
CORRECTION = "algo.advantage.is_correction_"
LEVELS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
FORMER = {"seq-mask-tis": "mis"}
"""Type → its name before 0.9.4."""
VLLM = {
    "enable": "enable_vllm_is_correction",
    "type": "vllm_is_correction_type",
    "threshold": "vllm_is_truncated_threshold",
}
"""Key → its spelling before 0.10.2."""


def openrlhf(parts: Parts) -> Translation:
    """A correction of tokens or sequences with two bounds; an idle lower one is 0, an idle upper one inf."""
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("gspo",) if bypass else ("ppo_clip", "gspo"))
    if not bypass and parts.loss == "gspo" and parts.weight is not None:
        config.cannot("weights under the GSPO loss, which takes the rollout for its anchor instead")
    if bypass or parts.weight is None:
        parts.finish()
        nothing = "OpenRLHF corrects nothing unless its correction is on"
        ignored = "under gspo the correction's bounds are ignored: the rollout's log-probs become the anchor"
        forms: tuple[Settings, Settings] = ({"level": "token"}, {"enable": True}) if bypass else ({}, {})
        return _forms(_loss(parts.preset), *forms), (ignored if bypass else nothing,)
    kind, (low, high) = _type(parts)
    parts.finish()
    bounds = 0.0 if low is None else low, math.inf if high is None else high
    level, mode = LEVELS[kind]
    newest: Settings = {"level": level, "mode": mode, "gating": "ratio", "threshold": bounds}
    before: Settings = {"enable": True, "type": kind, "threshold": bounds}
    return _forms(_loss(parts.preset), newest, before), config.remarks(
        bounds[0] == 0 and "a lower bound of 0 is idle; the default, 0.5, is not",
        bounds[1] == math.inf and "an upper bound of inf is idle",
        "before 0.9.1 the threshold was one upper bound",
    )


def _type(parts: Parts) -> tuple[str, config.Band]:
    band = parts.take_band("token")
    if band is not None:
        return "icepop", band
    weight = parts.take_weight("token", lower=True)
    rule = parts.take("ratio", "mean") if weight is not None and weight.action == "none" else None
    if rule is not None:
        return "seq-mask-tis", (rule.lower, rule.upper)
    return "tis", (None, None) if weight is None else (weight.lower, weight.upper)


def _forms(loss: Settings, newest: Settings, before: Settings) -> tuple[Snippet, ...]:
    """The correction in each spelling that has had it, the newest first; the same spellings once."""
    flat = {key.removeprefix("actor."): value for key, value in loss.items()}
    former = {**before, "type": FORMER.get(before.get("type", ""), before.get("type"))} if before else {}
    spelt = [
        {CORRECTION + key: value for key, value in newest.items()} | loss,
        {CORRECTION + key: value for key, value in before.items()} | loss,
        {VLLM[key]: value for key, value in before.items()} | flat,
        {VLLM[key]: value for key, value in former.items()} | flat,
    ]
    distinct = [one for i, one in enumerate(spelt) if one not in spelt[:i]]
    found = tuple(form for one in distinct for form in schema.older("openrlhf", "flags", one))
    return found or config.cannot("bounds that its command line refuses")


def _loss(preset: Preset) -> Settings:
    found = config.clip_settings(preset, CLIP)
    bounds = {"actor.eps_clip_low_high": (found.pop("low"), found.pop("high"))} if "low" in found else {}
    gspo = {"actor.policy_loss_type": "gspo"} if preset.loss == "gspo" else {}
    return {**gspo, **bounds, **found}


TRAINER = Trainer("openrlhf", openrlhf, clip=CLIP, logs=(LOG,))
