"""Drift 2 as a policy loss sees it, u = log π_θ − log π_anchor, and where the loss clips its ratio e^u.

The anchor is π_old, or π_rollout where the trainer bypasses its own pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.crosswalk.ledger import View
from offpol_diag.presets import Clip, Preset

NEEDS = ("current",)
"""Fields of the batch without which there is no u; a preset is never run without its own numerator."""


def log_ratio(view: View) -> Tensor:
    """u of every token, [T] nats; under GSPO its sequence's mean."""
    return view.ratios.once(("logged u", _pooled(view.preset)), lambda: _log_ratio(view))


def _pooled(preset: Preset) -> bool:
    return preset.loss == "gspo"


def _log_ratio(view: View) -> Tensor:
    batch = view.batch
    anchor = batch.old if view.preset.policy == "old" else batch.rollout
    assert anchor is not None
    assert batch.current is not None
    u = batch.current - anchor
    if not _pooled(view.preset):
        return u
    return segments.spread(segments.mean(u, batch.cu_seqlens), batch.cu_seqlens)


def ratio(view: View) -> Tensor:
    """e^u, [T]."""
    return view.ratios.once(("logged e^u", _pooled(view.preset)), lambda: torch.exp(log_ratio(view)))


def clipped(x: Tensor, clip: Clip) -> Tensor:
    """The ratio within [1 − low, 1 + high]; a side without a bound is left."""
    low = None if clip.low is None else 1 - clip.low
    high = None if clip.high is None else 1 + clip.high
    return x if low is None and high is None else x.clamp(low, high)


def decides(view: View) -> Tensor:
    """Where the clipped term is the larger loss, [T] bool: −A clip(e^u) > −A e^u."""
    key = ("logged clip", _pooled(view.preset), view.preset.clip)
    return view.ratios.once(key, lambda: _decides(view))


def _decides(view: View) -> Tensor:
    advantages, r = view.batch.advantages, ratio(view)
    assert advantages is not None
    return -advantages * clipped(r, view.preset.clip) > -advantages * r
