"""e^Δ, e^Δ − 1 and |Δ| of every token, once for all books, and what several of them sum of these."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from offpol_diag.crosswalk.measures import Measure
from offpol_diag.ratios import Ratios


def ratio(of: Ratios, safety: float | None = None) -> Tensor:
    """r = e^Δ, its logarithm within ±safety: [T]. Bounded after exp, which is the same and costs less."""
    raw = of.once("e^Δ", lambda: torch.exp(of.delta))
    return raw if safety is None else of.once(("e^Δ", safety), lambda: _bounded(raw, safety, math.exp))


def excess(of: Ratios, safety: float | None = None) -> Tensor:
    """r − 1, log r within ±safety: [T]."""
    raw = of.once("e^Δ − 1", lambda: torch.expm1(of.delta))
    return raw if safety is None else of.once(("e^Δ − 1", safety), lambda: _bounded(raw, safety, math.expm1))


def k3(of: Ratios, safety: float | None = None) -> Tensor:
    """r − 1 − log r, log r within ±safety: [T]."""
    return of.once(("e^Δ − 1 − Δ", safety), lambda: excess(of, safety) - of.clamped(safety))


def distance(of: Ratios) -> Tensor:
    """|Δ|, [T] nats."""
    return of.once("|Δ|", lambda: of.delta.abs())


def _bounded(x: Tensor, safety: float, power: Callable[[float], float]) -> Tensor:
    return x.clamp(power(-safety), power(safety))


LOG = Measure("Δ", lambda view: view.ratios.delta)
RATIO = Measure("r", lambda view: ratio(view.ratios))
K3 = Measure("k3", lambda view: k3(view.ratios))
K3_HELD = Measure("k3 to ±20, at most 10", lambda view: k3(view.ratios, 20.0).clamp(max=10.0))
"""As ms-swift and miles bound it: log r within ±20, and what comes out."""
DISTANCE = Measure("|Δ|", lambda view: distance(view.ratios))
SQUARED = Measure("Δ²", lambda view: view.ratios.delta.square())
TRAIN = Measure("log π_train", lambda view: view.ratios.train)
ROLLOUT = Measure("log π_rollout", lambda view: view.batch.rollout)
RATIO_SQUARED = Measure("r² to ±20", lambda view: ratio(view.ratios, 20.0).square())
