"""ColossalAI: a PPO clip against the rollout; it logs nothing of the mismatch."""

from __future__ import annotations

from functools import partial

from offpol_diag.trainers import config, schema
from offpol_diag.trainers.config import ClipKeys, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form

CLIP = ClipKeys("clip_eps_low", "clip_eps_high")


def colossalai(parts: Parts) -> Translation:
    """The clip of a PPO loss whose anchor is always the rollout."""
    parts.need(("current",), ("ppo_clip",))
    parts.finish()
    low, high = config.clip_bounds(parts.preset)
    return (Form({CLIP.low: low, CLIP.high: high}),), ()


WRITERS: schema.Writers = {"python": partial(schema.python, "grpo_config")}
TRAINER = Trainer("colossalai", "hpcaitech/ColossalAI 4f9953be3 (2026-04-09)", colossalai, WRITERS, clip=CLIP)
