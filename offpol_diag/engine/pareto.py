"""Pareto k̂: the tail index of the importance weights; the larger, the heavier the tail.

Above min(1 − 1/log10 n, 0.7) means of the weights (ESS, χ², E[r]) are unreliable at this sample size.

Reference: Vehtari, Simpson, Gelman, Yao, Gabry 2024, "Pareto smoothed importance sampling"; Zhang &
Stephens 2009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag.engine.accumulators import Tail
from offpol_diag.engine.scope import Smooth

SMALLEST_TAIL = 5


def limit(n: int) -> float:
    """Return the k̂ above which estimates from n weights are unreliable."""
    return min(1 - 1 / math.log10(n), 0.7) if n > 10 else 0.0


@dataclass(frozen=True)
class Fit:
    """A generalised Pareto distribution fitted to the exceedances of the largest weights.

    Attributes:
        k: its shape; scale: its scale, in units of the largest weight.
        above: the log-weight above which the tail begins.
        logs: the M log-weights beyond it, rising, [M].
    """

    k: float
    scale: float
    above: float
    logs: Tensor


def khat(tail: Tail) -> float | None:
    """Return k̂ of the largest M = min(n/5, 3√n) weights; None when the tail is constant or too short.

    Beyond 1.2e8 weights M is capped by the tail that was kept.
    """
    fitted = fit(tail)
    return None if fitted is None else fitted.k


def fit(tail: Tail) -> Fit | None:
    """Fit the largest M = min(n/5, 3√n) weights; None when the tail is constant or too short."""
    from pyro.ops.stats import fit_generalized_pareto

    top = tail.top.cpu()
    size = min(math.ceil(min(tail.n / 5, 3 * math.sqrt(tail.n))), len(top) - 1)
    if size < SMALLEST_TAIL:
        return None
    weights = torch.exp(top[: size + 1] - top[0])
    beyond = (weights[:size] - weights[size]).flip(0)
    there = beyond > 0  # a weight equal to the threshold has no exceedance to fit
    exceedances = beyond[there]
    if len(exceedances) < SMALLEST_TAIL or float(exceedances[-1]) <= 1e-12:
        return None
    try:
        k, scale = map(float, fit_generalized_pareto(exceedances))
    except ZeroDivisionError:  # for equal values a point of pyro's grid can be 0: drop a few
        few = exceedances[: math.isqrt(len(exceedances)) ** 2 - 1]
        k, scale = map(float, fit_generalized_pareto(few))
    if not math.isfinite(k) or not scale > 0:
        return None
    return Fit(k, scale, float(top[size]), top[:size].flip(0)[there])


def smooth(tail: Tail) -> Smooth | None:
    """Smooth the tail: the i-th smallest of its M weights becomes the fitted quantile at (i − ½)/M.

    No weight may exceed the largest raw one; equal weights share the mean of the values for their ranks.
    None when there is no tail to fit.
    """
    fitted = fit(tail)
    if fitted is None:
        return None
    size = len(fitted.logs)
    p = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    stretch = torch.expm1(-fitted.k * torch.log1p(-p)) / fitted.k if fitted.k else -torch.log1p(-p)
    top = float(fitted.logs[-1])
    weights = (math.exp(fitted.above - top) + fitted.scale * stretch).clamp(max=1.0)
    old, which = torch.unique(fitted.logs, return_inverse=True)
    many = torch.zeros_like(old).index_add_(0, which, torch.ones_like(weights))
    shared = torch.zeros_like(old).index_add_(0, which, weights) / many
    return Smooth(fitted.above, old, torch.log(shared) + top)
