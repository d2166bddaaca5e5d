"""Which tokens are near: every log-ratio within the radius, and no rule or tail that `Near` watches acts."""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.host import here
from offpol_diag.moments import BLOCK
from offpol_diag.near import Near
from offpol_diag.ratios import Ratios


def close(ratios: Ratios, near: Near) -> Tensor:
    """Which tokens are near, [T] bool; `ratios` are of all tokens, of any numerator.

    On a CPU they are looked at in blocks of whole sequences, which stay in a core's cache.
    """
    batch = ratios.batch
    if not here(batch.rollout) or batch.tokens <= BLOCK:
        return _close(ratios, near)
    found = []
    for first, last in segments.spans(batch.cu_seqlens, BLOCK):
        block = Ratios(batch.rows(first, last), ratios.policy, ratios.settled)
        found.append(_close(block, near))
        block.forget()
    return torch.cat(found)


def _close(ratios: Ratios, near: Near) -> Tensor:
    found = torch.ones_like(ratios.batch.rollout, dtype=torch.bool)
    for gap in _gaps(ratios):
        found &= gap.abs() <= near.radius  # a NaN is far
    for policy, rule in near.rules:
        found &= correction.passes(ratios.of(policy), rule).values
    for policy, weight in near.tails:
        found &= ~correction.in_tail(ratios.of(policy), weight)
    return found


def _gaps(ratios: Ratios) -> list[Tensor]:
    """Every log-ratio that a preset or a loss may look at, [T]."""
    batch = ratios.batch
    found = [ratios.of(policy).delta for policy in ("old", "current") if batch.has(policy)]
    if batch.old is not None and batch.current is not None:
        found.append(batch.current - batch.old)
    return found
