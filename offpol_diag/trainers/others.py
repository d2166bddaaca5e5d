"""Trainers with next to nothing to set, which log nothing: ColossalAI and torchforge."""

from __future__ import annotations

from functools import partial

from offpol_diag.trainers import config
from offpol_diag.trainers.config import ClipKeys, Parts, Trainer, Translation
from offpol_diag.trainers.schema import cannot, python

CLIP = ClipKeys("clip_eps_low", "clip_eps_high")
FORGE = ("token", "truncate", 0.1, 10.0, False)


def colossalai(parts: Parts) -> Translation:
    """The clip of a PPO loss whose anchor is always the rollout."""
    parts.need(("current",), ("ppo_clip",))
    parts.finish()
    low, high = config.clip_bounds(parts.preset)
    return ({CLIP.low: low, CLIP.high: high},), ()


def torchforge(parts: Parts) -> Translation:
    """No key at all: one method is in its code."""
    weight = parts.weight
    same = weight and (weight.over, weight.action, weight.lower, weight.upper, weight.normalize) == FORGE
    if not same or parts.policy != "current" or parts.loss != "reinforce":
        cannot("anything but r clamped to [0.1, 10] under REINFORCE, which stands in its code without a key")
    parts.weight = None
    parts.finish()
    return ({},), ("nothing to paste: reinforce_loss.py has these bounds in its code",)


COLOSSALAI = Trainer("colossalai", colossalai, {"python": partial(python, "grpo_config")}, clip=CLIP)
TORCHFORGE = Trainer("torchforge", torchforge, {"python": partial(python, "")})
