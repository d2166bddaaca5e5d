"""Trainers with next to nothing to set, which log nothing: ColossalAI and torchforge."""

from __future__ import annotations

from offpol_diag.presets import Preset
from offpol_diag.trainers import schema
from offpol_diag.trainers.config import (
    ClipKeys,
    Parts,
    Said,
    Snippet,
    Trainer,
    cannot,
    clip_bounds,
    clip_remarks,
)
from offpol_diag.trainers.schema import block

COLOSSAL = ClipKeys("clip_eps_low", "clip_eps_high")
FORGE = (0.1, 10.0)


def colossalai(preset: Preset) -> Said:
    """The clip of a PPO loss whose anchor is always the rollout."""
    parts = Parts(preset)
    parts.need(("current",), ("ppo_clip",))
    parts.finish()
    low, high = clip_bounds(preset)
    settings = {COLOSSAL.low: low, COLOSSAL.high: high}
    snippet = block("colossalai", "python", schema.mapping("grpo_config", settings), settings)
    return (snippet,), tuple(clip_remarks(preset, COLOSSAL))


def torchforge(preset: Preset) -> Said:
    """No key at all: one method is in its code."""
    parts = Parts(preset)
    weight = parts.weight
    same = weight is not None and (weight.over, weight.action, weight.lower, weight.upper) == (
        "token",
        "truncate",
        *FORGE,
    )
    if not same or parts.policy != "current" or parts.loss != "reinforce" or (weight and weight.normalize):
        cannot("anything but r clamped to [0.1, 10] under REINFORCE, which stands in its code without a key")
    parts.weight = None
    parts.finish()
    return (Snippet("python", ""),), ("nothing to paste: reinforce_loss.py has these bounds in its code",)


COLOSSALAI = Trainer("colossalai", colossalai)
TORCHFORGE = Trainer("torchforge", torchforge)
