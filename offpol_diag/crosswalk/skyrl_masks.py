"""SkyRL's loss mask as its corrections edit it, and what each of them counts on the way, per sequence [S]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.bounds import Side, bound, half_veto
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Over, Preset, Veto, Weight
from offpol_diag.ratios import Ratios

SAFETY = 20.0
"""|log r| that SkyRL exponentiates, tokens and aggregates alike."""


@cache
def _up_to_tokens(preset: Preset) -> Preset:
    return replace(preset, reject=tuple(rule for rule in preset.reject if rule.over == "token"))


def left_by_outliers(view: View) -> Tensor:
    """How many tokens the outlier mask leaves, [S]."""
    return _left(view, replace(view.preset, reject=()))


def left_by_tokens(view: View) -> Tensor:
    """How many tokens the outlier and token masks leave, [S]."""
    return _left(view, _up_to_tokens(view.preset))


def _left(view: View, preset: Preset) -> Tensor:
    """Tokens that a part of the preset leaves: all but those of the first piece that it drops."""
    if not _drops(preset):
        return view.n
    ratios = view.far
    kept = correction.keep(ratios, preset)
    if kept.tokens is None:
        return view.n * kept.sequences
    lost = segments.count(~kept.tokens, ratios.batch.cu_seqlens)
    return (view.n - lost) * kept.sequences


def _drops(preset: Preset) -> bool:
    return preset.veto is not None or bool(preset.reject)


def _after_tokens(view: View, preset: Preset) -> Tensor | None:
    """Tokens that a part of the preset leaves, [T] bool; None for all."""
    if not _drops(preset):
        return None
    kept = correction.keep(view.ratios, preset)
    rows = segments.spread(kept.sequences, view.batch.cu_seqlens)
    return rows if kept.tokens is None else rows & kept.tokens


def _seen(view: View) -> Ratios:
    """Ratios whose sums and means run over the tokens that the outlier and token masks leave."""
    before = _up_to_tokens(view.preset)
    return correction.among(view.ratios, view.ratios, before) if _drops(before) else view.ratios


def _beyond(x: Tensor, edge: float | None, sign: int) -> Tensor:
    """Where log x, clamped to ±20, is above (sign 1) or below (−1) log(edge)."""
    if edge is None:
        return torch.zeros_like(x, dtype=torch.bool)
    return x.clamp(-SAFETY, SAFETY) * sign > math.log(edge) * sign


EXCESS = Measure("r − 1 to ±20", lambda view: powers.excess(view.ratios, SAFETY))
EXCESS_SQUARED = Measure("(r − 1)² to ±20", lambda view: powers.excess(view.ratios, SAFETY).square())
RATIO = Measure("r to ±20", lambda view: powers.ratio(view.ratios, SAFETY))


def outlier_side(side: Side | None) -> Callable[[View], Tensor]:
    """Rows with a token beyond the outlier bounds, or beyond one of them."""

    def of(view: View) -> Tensor:
        both = view.preset.veto or Veto()
        veto = both if side is None else half_veto(both, side)
        return (correction.veto_hits(view.far, veto) > 0).to(torch.float64)

    return of


def capped_tokens(view: View) -> Tensor:
    """Tokens that are left and whose r is above the weight's cap: far ones, where those are apart."""
    weight, some = view.preset.weight or Weight(), view.first
    left = _after_tokens(some, _up_to_tokens(view.preset))
    above = _beyond(some.ratios.delta, weight.upper, 1)
    return segments.count(above if left is None else above & left, some.batch.cu_seqlens)


def capped_rows(view: View) -> Tensor:
    """Rows whose product of r over the tokens left is above the weight's cap."""
    weight = view.preset.weight or Weight()
    return _beyond(_seen(view).aggregate("ratio", "sum").values, weight.upper, 1).to(torch.float64)


def row_masked(over: Over, side: Side) -> Callable[[View], Tensor]:
    """Rows whose geometric mean (over = mean) or product (sum) of what is left lies beyond one bound."""

    def of(view: View) -> Tensor:
        x = _seen(view).aggregate("ratio", over).values
        flags = torch.zeros_like(x, dtype=torch.bool)
        for rule in view.preset.reject:
            if rule.over == over:
                flags = flags | _beyond(x, bound(rule, side), 1 if side == "upper" else -1)
        return flags.to(torch.float64)

    return of


def _clipped_ppo(view: View) -> Tensor:
    a, clip = view.batch.advantages, view.preset.clip
    assert a is not None
    u = view.of("current").delta - view.ratios.delta
    high = _beyond(u, None if clip.high is None else 1 + clip.high, 1) & (a > 0)
    low = _beyond(u, None if clip.low is None or clip.low >= 1 else 1 - clip.low, -1) & (a < 0)
    return high | low


CLIPPED = Measure("skyrl clipped", _clipped_ppo, lambda view: view.preset.clip)
"""Tokens where the clipped objective of π_θ/π_old is below the unclipped one."""


def clipped_anchored(view: View) -> Tensor:
    """Tokens whose weight is cut or zeroed, or that the loss's own mask drops."""
    weighed = view.pieces.first.weighed
    dropped = view.n - view.pieces.kept_tokens
    return dropped if weighed is None else dropped + weighed.high + weighed.low
