"""A preset applied to all tokens of a batch at once: the reference for near and far tokens apart."""

import torch

from offpol_diag.engine import segments
from offpol_diag.engine.outcome import applied, of


def outcome(scene, preset):
    """Apply a preset to the whole batch, token by token."""
    preset = applied(preset)
    return of(scene.ratios(preset.policy), preset)


def token_mask(done):
    """Return 1 where a token is kept, [T] float64."""
    mask = segments.spread(done.kept.sequences, done.ratios.batch.cu_seqlens)
    mask = mask if done.kept.tokens is None else mask & done.kept.tokens
    return mask.to(torch.float64)
