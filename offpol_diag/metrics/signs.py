"""Tokens by the sign of their advantage."""

from __future__ import annotations

from torch import Tensor

from offpol_diag import segments
from offpol_diag.metrics.outcome import Outcome, token_rules
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.summed import Inputs, Summed, flagged
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios

EVERY = "signs", ()
"""The key under which the counts of all tokens are kept."""


def signs(ratios: Ratios) -> dict[str, Tensor]:
    """Tokens with A > 0 and with A < 0, [S] each."""
    offsets = ratios.batch.cu_seqlens
    return ratios.once(
        EVERY, lambda: {name: segments.count(at, offsets) for name, at in _flags(ratios).items()}
    )


def every(scene: Scene) -> dict[str, Tensor]:
    """The same of all tokens of the batch: of far ones and what is known of near ones, if it is."""
    return scene.once("signs", lambda: _every(scene))


def _every(scene: Scene) -> dict[str, Tensor]:
    both = (ratios.joined(EVERY, signs, _added) for ratios in scene.numerators)
    return next((found for found in both if found is not None), None) or signs(scene.ratios("rollout"))


def _added(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x + two[name] for name, x in one.items()}


def _flags(ratios: Ratios) -> dict[str, Tensor]:
    """Where A has each sign, [T] bool."""
    advantages = ratios.batch.advantages
    assert advantages is not None
    return ratios.once("signs of A", lambda: {"positive": advantages > 0, "negative": advantages < 0})


def _counted(done: Outcome, preset: Preset) -> Inputs:
    return (*_flags(done.ratios).values(), done.kept.tokens)


sign_counts = Summed(
    lambda done, preset: (EVERY[0], token_rules(done, preset)),
    _counted,
    lambda up, down, keep: {"positive": flagged(up, keep), "negative": flagged(down, keep)},
)
"""Tokens by the sign of their advantage that pass the rules on tokens, [S]."""
