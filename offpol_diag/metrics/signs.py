"""Tokens by the sign of their advantage."""

from __future__ import annotations

from torch import Tensor

from offpol_diag import segments
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Reject
from offpol_diag.ratios import Ratios


def signs(ratios: Ratios, keep: Tensor | None = None, rules: tuple[Reject, ...] = ()) -> dict[str, Tensor]:
    """Tokens with A > 0 and with A < 0, of those to keep, [S] each; `rules` stand for what is kept."""
    return ratios.once(("signs", rules), lambda: _counts(ratios, keep))


def every(scene: Scene) -> dict[str, Tensor]:
    """The same of all tokens of the batch: of far ones and what is known of near ones, if it is."""
    return scene.once("signs", lambda: _every(scene))


def _every(scene: Scene) -> dict[str, Tensor]:
    both = (ratios.joined(("signs", ()), signs, _added) for ratios in scene.numerators)
    return next((found for found in both if found is not None), None) or signs(scene.ratios("rollout"))


def _added(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x + two[name] for name, x in one.items()}


def _counts(ratios: Ratios, keep: Tensor | None) -> dict[str, Tensor]:
    advantages, offsets = ratios.batch.advantages, ratios.batch.cu_seqlens
    assert advantages is not None
    flags = {"positive": advantages > 0, "negative": advantages < 0}
    return {name: segments.count(at if keep is None else at & keep, offsets) for name, at in flags.items()}
