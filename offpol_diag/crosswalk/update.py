"""Drift 2 as a policy loss sees it, u = log π_θ − log π_anchor, and where the loss clips its ratio e^u.

The anchor is π_old, or π_rollout where the trainer bypasses its own pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import losses, segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.metrics import signs
from offpol_diag.presets import Clip
from offpol_diag.ratios import Ratios

NEEDS = ("current",)
"""Fields of the batch without which there is no u; a preset is never run without its own numerator."""


def log_ratio(view: View) -> Tensor:
    """u of every token, [T] nats; under GSPO its sequence's mean."""
    if not pooled(view):
        return _of_tokens(view.ratios)
    offsets = view.batch.cu_seqlens
    return view.ratios.once("logged u of rows", lambda: segments.spread(losses.mean_u(view.ratios), offsets))


def pooled(view: View) -> bool:
    """What of a preset u depends on besides its numerator."""
    return view.preset.loss == "gspo"


def _of_tokens(ratios: Ratios) -> Tensor:
    """[T]; with π_rollout for anchor it is Δ of π_θ."""
    current, old = ratios.of("current"), ratios.batch.old
    if ratios.policy != "old":
        return current.delta
    assert old is not None
    return ratios.once("logged u", lambda: current.train - old)


def ratio(view: View) -> Tensor:
    """e^u, [T]."""
    ratios, offsets = view.ratios, view.batch.cu_seqlens
    if pooled(view):
        return ratios.once("logged e^u of rows", lambda: segments.spread(_of_rows(ratios), offsets))
    if ratios.policy != "old":
        return powers.ratio(ratios.of("current"))
    return ratios.once("logged e^u", lambda: torch.exp(_of_tokens(ratios)))


def shared(view: View) -> Tensor | None:
    """e^u of the sequences, [S], under GSPO; else tokens have their own."""
    return _of_rows(view.ratios) if pooled(view) else None


def _of_rows(ratios: Ratios) -> Tensor:
    return torch.exp(losses.mean_u(ratios))


def clipped(x: Tensor, clip: Clip) -> Tensor:
    """The ratio within [1 − low, 1 + high]; a side without a bound is left."""
    low = None if clip.low is None else 1 - clip.low
    high = None if clip.high is None else 1 + clip.high
    return x if low is None and high is None else x.clamp(low, high)


def decides(view: View) -> Tensor:
    """Where the clipped term is the larger loss, [T] bool: −A clip(e^u) > −A e^u."""
    advantages, r = view.batch.advantages, ratio(view)
    assert advantages is not None
    bounded = clipped(r, view.preset.clip)
    if bounded is r:
        return torch.zeros_like(r, dtype=torch.bool)
    return -advantages * bounded > -advantages * r


def decided(view: View) -> Tensor:
    """How many tokens of each sequence that is, [S]; under GSPO all those with one sign of A."""
    r = shared(view)
    if r is None:
        return view.count(DECIDES)
    bounded, found = clipped(r, view.preset.clip), signs.every(view.scene)
    return found["positive"] * (bounded < r) + found["negative"] * (bounded > r)


def clip_key(view: View) -> object:
    """What of a preset `decides` depends on besides its numerator."""
    return pooled(view), view.preset.clip


DECIDES = Measure("logged clip", decides, clip_key)
