"""Tokens by the sign of their advantage."""

from __future__ import annotations

from torch import Tensor

from offpol_diag import segments
from offpol_diag.metrics.outcome import Outcome, token_rules
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.summed import Inputs, Summed, flagged
from offpol_diag.moments import Moments
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios


def every(scene: Scene) -> dict[str, Tensor]:
    """Tokens of the batch with A > 0 and with A < 0, [S] each."""
    return scene.once("signs", lambda: _every(scene))


def _every(scene: Scene) -> dict[str, Tensor]:
    ratios = scene.ratios("rollout")
    if ratios.apart is None:
        return _counts(ratios)
    far, near = _counts(ratios.apart.far), _near_counts(ratios.apart.near)
    return {name: x + near[name] for name, x in far.items()}


def _counts(ratios: Ratios) -> dict[str, Tensor]:
    offsets = ratios.batch.cu_seqlens
    return {name: segments.count(at, offsets) for name, at in _flags(ratios).items()}


def _near_counts(near: Moments) -> dict[str, Tensor]:
    return {"positive": near.of(side="1+"), "negative": near.of(side="1-")}


def _flags(ratios: Ratios) -> dict[str, Tensor]:
    """Where A has each sign, [T] bool."""
    advantages = ratios.batch.advantages
    assert advantages is not None
    return ratios.once("signs of A", lambda: {"positive": advantages > 0, "negative": advantages < 0})


def _counted(done: Outcome, preset: Preset) -> Inputs:
    return (*_flags(done.ratios).values(), done.kept.tokens)


sign_counts = Summed(
    lambda done, preset: ("signs", token_rules(done, preset)),
    _counted,
    lambda up, down, keep: {"positive": flagged(up, keep), "negative": flagged(down, keep)},
    near=lambda near: _near_counts(near.moments),
)
"""Tokens by the sign of their advantage that pass the rules on tokens, [S]."""
