"""A preset's weights and mask for a padded batch of a trainer, on its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from offpol_diag.core.evaluate import Evaluator
from offpol_diag.core.formulas import batch_cut
from offpol_diag.core.segments import Segments
from offpol_diag.core.steps import steps
from offpol_diag.presets import SMALLEST_NORM, Policy, Preset


def packed(log_probs: Mapping[Policy, Tensor], counted: Tensor, advantages: Tensor | None) -> Evaluator:
    """Pack log-probs [S, L] and advantages [S] or [S, L] of what counts, [S, L]; the rest may be anything."""
    if advantages is not None:
        advantages = advantages.reshape(len(counted), -1).expand(counted.shape)[counted].double()
    offsets = pad(counted.sum(1).cumsum(0), (1, 0))
    begins = (counted & ~pad(counted[:, :-1], (1, 0)))[counted].nonzero().flatten()
    tokens, turns = int(offsets[-1]), torch.cat((begins, offsets[-1:]))
    logs = {policy: x[counted].double() for policy, x in log_probs.items()}
    segments = Segments(offsets, tokens), Segments(turns, tokens)
    return Evaluator(logs, *segments, advantages, lambda rule, x: batch_cut(x, rule.reject.upper or 0.0))


def weights_and_mask(
    tokens: Evaluator, counted: Tensor, preset: Preset, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Apply a preset to packed tokens, as to one trainer batch.

    Returns: weights [S, L], and which tokens are kept, [S, L] bool; weights that the dtype cannot hold share
    half of its range, but exceed all others.
    """
    if not tokens.sequences.tokens:
        return torch.ones_like(counted, dtype=dtype), counted
    own = steps(preset)
    kept, w = tokens.kept(own.tokens, own.sequences), torch.ones_like(tokens.log_probs["rollout"])
    if own.weight is not None:
        w = tokens.weight(own.weight)
        w = w if own.weight.on_tokens else tokens.sequences.spread(w)
    if preset.weight is not None and preset.weight.normalize:
        by_sequence = preset.weight.over != "token"
        mean = (tokens.sequences.mean(w)[tokens.sequences.filled] if by_sequence else w).mean()
        w = w / torch.where(mean > SMALLEST_NORM, mean, 1.0)
    w, most = w * kept, torch.finfo(dtype).max
    over = w > most
    room = (most / 2 / over.sum()).clamp(min=w.masked_fill(over, 0.0).max())
    weights, mask = torch.zeros_like(counted, dtype=dtype), counted.clone()
    weights[counted], mask[counted] = torch.where(over, room, w).to(dtype), kept
    return weights, mask
