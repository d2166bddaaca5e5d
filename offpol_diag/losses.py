"""Per-token policy losses that the weights enter; the weight is a constant in the gradient.

A is the advantage, π_θ the current policy. Sources: Schulman et al. 2017 (PPO clip), Ye et al. 2020 (dual
clip), Williams 1992 (REINFORCE); defaults of verl's `compute_policy_loss_vanilla`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.presets import Preset

CLIP_LOW = CLIP_HIGH = 0.2
DUAL_CLIP = 3.0
SAFETY = 20.0


@dataclass(frozen=True)
class TokenLoss:
    """Per-token terms, [T] each.

    Attributes:
        loss: before weights and mask.
        clipped: whether the upper clip decided.
        clipped_lower: whether the dual clip decided (A < 0 only).
        kl: −(log π_θ − log π_anchor), verl's ppo_kl.
        weighted: whether the preset's importance weight multiplies this loss.
    """

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    kl: Tensor
    weighted: bool


def lacking(columns: set[str]) -> list[str]:
    """Columns that a loss needs and the dump lacks."""
    return [column for column in ("current_log_probs", "advantages") if column not in columns]


def ppo_clip(batch: Batch, anchor: Tensor, advantages: Tensor, current: Tensor, weighted: bool) -> TokenLoss:
    """PPO clip with dual clip: max(−A r, −A clip(r, 0.8, 1.2)), at most −3A where A < 0; r = π_θ/π_anchor."""
    log = current - anchor
    ratio = torch.exp(log.clamp(-SAFETY, SAFETY))
    plain, clip = -advantages * ratio, -advantages * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss, ceiling = torch.maximum(plain, clip), -advantages * DUAL_CLIP
    negative = advantages < 0
    lower = (loss > ceiling) & negative
    return TokenLoss(
        torch.where(negative, torch.minimum(loss, ceiling), loss), clip > plain, lower, -log, weighted
    )


def reinforce(batch: Batch, anchor: Tensor, advantages: Tensor, current: Tensor, weighted: bool) -> TokenLoss:
    """−A log π_θ; its importance weight is the preset's."""
    never = torch.zeros_like(current, dtype=torch.bool)
    return TokenLoss(-advantages * current, never, never, -(current - anchor), True)


_LOSSES: dict[str, Callable[[Batch, Tensor, Tensor, Tensor, bool], TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
}


def token_loss(batch: Batch, preset: Preset) -> TokenLoss | None:
    """The preset's loss per token, or None when the batch lacks what it needs.

    Decoupled presets clip around π_old and weight the result. Bypass presets with PPO clip around
    π_rollout: the clipped ratio is the correction already, so no weight multiplies it.
    """
    decoupled = preset.policy == "old"
    anchor = batch.old if decoupled else batch.rollout
    if anchor is None or batch.current is None or batch.advantages is None:
        return None
    return _LOSSES[preset.loss](batch, anchor, batch.advantages, batch.current, decoupled)
