"""Which near tokens a watched rule may drop, by bounds that cost no logarithm: of all others it is known.

Every bound errs to one side: a token that is not in doubt passes the rule, whatever rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.near import SPANS
from offpol_diag.presets import Reject, Weight
from offpol_diag.ratios import COIN, Ratios

May = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]
"""Δ and log π_rollout of tokens within the radius → which of them may fail."""
Doubt = May | Tensor | None
"""Which tokens may fail: told by each, or known by their places [K] rising; None: any of them."""

MARGIN = 1 - 1e-6
"""What rounding may take from a bound is less."""


def of_rule(ratios: Ratios, rule: Reject, radius: float) -> Doubt:
    """Which tokens within the radius a watched rule may drop; `ratios` are of its numerator, all tokens."""
    if rule.over == "segment":
        above, below = (flags.values for flags in correction.beyond(ratios, rule))
        return inside(above | below, ratios.batch.cu_runs)
    if rule.over == "batch":
        cuts = ratios.settled.cuts[ratios.policy, rule].values()
        return _of_cut(rule, min(cuts, default=math.inf), radius)
    plain = rule.lower is None and rule.safety is None
    return _of_coins(rule.upper, radius) if rule.statistic == "binary_kl" and plain else None


def of_tail(ratios: Ratios, weight: Weight, radius: float) -> Doubt:
    """Which tokens within the radius may lie in the tail of a smoothed weight on tokens."""
    tails = ratios.settled.tails[ratios.policy, weight].values()
    lowest = min((tail.above for tail in tails if tail is not None), default=math.inf)
    if lowest >= radius:
        return _none()
    return None if lowest < 0 else lambda d, q: d > lowest  # a safety bound only takes from d > 0


def inside(which: Tensor, offsets: Tensor) -> Tensor:
    """Where the tokens of some runs [R] bool stand, rising."""
    begins, counts = offsets[:-1][which], segments.lengths(offsets)[which]
    before = torch.cumsum(counts, 0) - counts
    found = torch.repeat_interleave(begins - before, counts)
    return found + torch.arange(len(found), device=found.device)


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def _of_cut(rule: Reject, cut: float, radius: float) -> Doubt:
    """Tokens whose statistic may reach a cut: those beyond the largest |Δ| at which none can."""
    if rule.statistic not in SPANS:
        return None
    low, high = 0.0, radius
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if SPANS[rule.statistic](middle)[1] < cut * MARGIN else (low, middle)
    if SPANS[rule.statistic](radius)[1] < cut * MARGIN:
        return _none()
    return (lambda d, q: np.abs(d) >= low) if low and cut > 0 else None


def _of_coins(upper: float | None, radius: float) -> Doubt:
    """Tokens whose binary KL may reach a bound: those that are nearly certain, or were so before Δ.

    With p = π_rollout, t = π_train, w = (t − p)/(1 − p): it is at most |Δ| where Δ <= 0; where Δ > 0, at most
    (e^Δ − 1)/(1 − w) for w < 1, and never more than (1 − p) log(1 + (1 − p)/COIN).
    """
    top = math.inf if upper is None else upper * MARGIN
    room = 1 - math.expm1(radius) / top if top > 0 else 0.0
    if room <= 0 or radius >= top:
        return None
    steep, idle = math.expm1(radius) / radius, _idle(top)
    slope = -room / steep

    def may(d: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.bool_]:
        """w <= room elsewhere, since 1/p − 1 >= -q and e^Δ − 1 <= steep Δ."""
        found: NDArray[np.bool_] = np.abs(d) > slope * q
        at = np.flatnonzero(found)
        found[at] = (q[at] < -idle) | (q[at] > 0)
        return found

    return may


def _idle(top: float) -> float:
    """The largest 1 − p at which the logarithm cannot reach a bound."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.log1p(middle / COIN) < top else (low, middle)
    return low
