"""Tokens by the sign of their advantage."""

from __future__ import annotations

from torch import Tensor

from offpol_diag import segments
from offpol_diag.presets import Reject
from offpol_diag.ratios import Ratios


def signs(ratios: Ratios, keep: Tensor | None = None, rules: tuple[Reject, ...] = ()) -> dict[str, Tensor]:
    """Tokens with A > 0 and with A < 0, of those to keep, [S] each; `rules` stand for what is kept."""
    return ratios.once(("signs", rules), lambda: _counts(ratios, keep))


def _counts(ratios: Ratios, keep: Tensor | None) -> dict[str, Tensor]:
    advantages, offsets = ratios.batch.advantages, ratios.batch.cu_seqlens
    assert advantages is not None
    flags = {"positive": advantages > 0, "negative": advantages < 0}
    return {name: segments.count(at if keep is None else at & keep, offsets) for name, at in flags.items()}
