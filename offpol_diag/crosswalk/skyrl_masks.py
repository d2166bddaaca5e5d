"""SkyRL's loss mask as its corrections edit it, and what each of them counts on the way, per sequence [S]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.bounds import Side, bound, half_veto
from offpol_diag.crosswalk.ledger import View
from offpol_diag.presets import Over, Preset, Veto, Weight
from offpol_diag.ratios import Ratios

SAFETY = 20.0
"""|log r| that SkyRL exponentiates, tokens and aggregates alike."""


def after_outliers(view: View) -> Tensor:
    """Tokens that the outlier mask leaves, [T]."""
    return _left(view, replace(view.preset, reject=()))


def after_tokens(view: View) -> Tensor:
    """Tokens that the outlier and token masks leave, [T]."""
    return _left(view, _up_to_tokens(view.preset))


def _up_to_tokens(preset: Preset) -> Preset:
    return replace(preset, reject=tuple(rule for rule in preset.reject if rule.over == "token"))


def _left(view: View, preset: Preset) -> Tensor:
    def make() -> Tensor:
        kept = correction.keep(view.ratios, preset)
        rows = segments.spread(kept.sequences, view.batch.cu_seqlens)
        return rows if kept.tokens is None else rows & kept.tokens

    return view.ratios.once(("skyrl left", preset.veto, preset.reject), make)


def _seen(view: View) -> Ratios:
    """Ratios whose sums and means run over the tokens that the outlier and token masks leave."""
    before = _up_to_tokens(view.preset)
    if before.veto is None and not before.reject:
        return view.ratios
    return view.ratios.among(after_tokens(view), ("skyrl", before.veto, before.reject))


def _beyond(x: Tensor, edge: float | None, sign: int) -> Tensor:
    """Where log x, clamped to ±20, is above (sign 1) or below (−1) log(edge)."""
    if edge is None:
        return torch.zeros_like(x, dtype=torch.bool)
    return x.clamp(-SAFETY, SAFETY) * sign > math.log(edge) * sign


def count(flags: Tensor, view: View) -> Tensor:
    """True tokens per sequence, [S]."""
    return segments.count(flags, view.batch.cu_seqlens)


def total(x: Tensor, view: View) -> Tensor:
    """Sum per sequence, [S]."""
    return segments.total(x, view.batch.cu_seqlens)


def excess(view: View) -> Tensor:
    """r − 1 of each token, [T]."""
    return powers.excess(view.ratios, SAFETY)


def distance(view: View) -> Tensor:
    """|log r| of each token, [T]."""
    return view.ratios.once("skyrl distance", lambda: view.ratios.delta.abs())


def outlier_side(side: Side | None) -> Callable[[View], Tensor]:
    """Rows with a token beyond the outlier bounds, or beyond one of them."""

    def of(view: View) -> Tensor:
        both = view.preset.veto or Veto()
        veto = both if side is None else half_veto(both, side)
        return (correction.veto_hits(view.ratios, veto) > 0).to(torch.float64)

    return of


def capped_tokens(view: View) -> Tensor:
    """Tokens that are left and whose r is above the weight's cap."""
    weight, before = view.preset.weight or Weight(), _up_to_tokens(view.preset)
    key = ("skyrl capped", weight.upper, before.veto, before.reject)
    return view.ratios.once(
        key, lambda: count(_beyond(view.ratios.delta, weight.upper, 1) & after_tokens(view), view)
    )


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


def clipped_ppo(view: View) -> Tensor:
    """Tokens where the clipped objective of π_θ/π_old is below the unclipped one."""
    return view.ratios.once(("skyrl clipped", view.preset.clip), lambda: _clipped_ppo(view))


def _clipped_ppo(view: View) -> Tensor:
    a, clip = view.batch.advantages, view.preset.clip
    assert a is not None
    u = view.scene.ratios("current").delta - view.ratios.delta
    high = _beyond(u, None if clip.high is None else 1 + clip.high, 1) & (a > 0)
    low = _beyond(u, None if clip.low is None or clip.low >= 1 else 1 - clip.low, -1) & (a < 0)
    return count(high | low, view)


def clipped_anchored(view: View) -> Tensor:
    """Tokens whose weight is cut or zeroed, or that the loss's own mask drops."""
    n = view.batch.lengths.to(torch.float64)
    weighed = view.done.weighed
    cut = 0.0 if weighed is None else weighed.high + weighed.low
    return n - view.done.kept_tokens + cut
