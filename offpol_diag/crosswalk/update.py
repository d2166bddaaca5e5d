"""Drift 2 as a policy loss sees it, u = log π_θ − log π_anchor, and where the loss clips its ratio e^u.

The anchor is π_old, or π_rollout where the trainer bypasses its own pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.ledger import View
from offpol_diag.presets import Clip, Preset

NEEDS = ("current",)
"""Fields of the batch without which there is no u; a preset is never run without its own numerator."""


def log_ratio(view: View) -> Tensor:
    """u of every token, [T] nats; under GSPO its sequence's mean."""
    if not _pooled(view.preset):
        return _of_tokens(view)
    return view.ratios.once(
        "logged u of rows", lambda: segments.spread(_of_rows(view), view.batch.cu_seqlens)
    )


def _pooled(preset: Preset) -> bool:
    return preset.loss == "gspo"


def _of_tokens(view: View) -> Tensor:
    """[T]; with π_rollout for anchor it is Δ of π_θ."""
    current = view.scene.ratios("current")
    if view.preset.policy != "old":
        return current.delta
    old = view.batch.old
    assert old is not None
    return view.ratios.once("logged u", lambda: current.train - old)


def _of_rows(view: View) -> Tensor:
    """Mean u of each sequence, [S]."""
    make = _of_tokens
    return view.ratios.once("logged mean u", lambda: segments.mean(make(view), view.batch.cu_seqlens))


def ratio(view: View) -> Tensor:
    """e^u, [T]."""
    if _pooled(view.preset):
        return view.ratios.once("logged e^u of rows", lambda: _ratio_of_rows(view))
    if view.preset.policy != "old":
        return powers.ratio(view.scene.ratios("current"))
    return view.ratios.once("logged e^u", lambda: torch.exp(log_ratio(view)))


def _ratio_of_rows(view: View) -> Tensor:
    return segments.spread(torch.exp(_of_rows(view)), view.batch.cu_seqlens)


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
