"""Reference for methods that act across sequences: batch-wide cuts and Pareto-smoothed tails.

Vehtari, Simpson, Gelman, Yao, Gabry 2024 (Pareto smoothed importance sampling, JMLR 25:72) with the estimator
of Zhang & Stephens 2009; M2PO's cut from the docstring of `presets.Reject`. Nothing is shared with the
package.
"""

from __future__ import annotations

import math

SHORTEST = 5  # exceedances that a tail is fitted to, at least
PRIOR = 10.0  # observations that the prior k = 1/2 counts for


def cut(values: list[float], upper: float) -> float:
    """Return the cut: tokens from this value on are dropped, until the mean of the rest is below `upper`.

    Never everything: the smallest value stays.
    """
    rest = sorted(values)
    smallest, gone = rest[0] if rest else 0.0, math.inf
    while rest and not math.fsum(rest) / len(rest) < upper:
        gone = rest.pop()
    return gone if gone > smallest else math.nextafter(smallest, math.inf)


def smoothed(logs: list[float]) -> dict[float, float]:
    """Return the smoothed values of the largest log-weights of a trainer batch; ties share their mean weight.

    Empty where the tail is too short or flat to be fitted.
    """
    many = math.ceil(min(len(logs) / 5, 3 * math.sqrt(len(logs))))
    rising = sorted(logs)
    if many < SHORTEST or many >= len(rising):
        return {}
    border, top = rising[-many - 1], rising[-1]
    tail = [x for x in rising[-many:] if x > border]
    low = math.exp(border - top)
    beyond = [low * math.expm1(x - border) if x - border < 1 else math.exp(x - top) - low for x in tail]
    if len(tail) < SHORTEST or beyond[-1] <= 1e-12:
        return {}
    k, sigma = pareto(beyond)
    new = [min(low + quantile((i + 0.5) / len(tail), k, sigma), 1.0) for i in range(len(tail))]
    return {
        x: math.log(math.fsum(w for y, w in zip(tail, new, strict=True) if y == x) / tail.count(x)) + top
        for x in tail
    }


def quantile(p: float, k: float, sigma: float) -> float:
    """Compute a quantile of the generalised Pareto distribution, k > 0 being the heavy tail."""
    return -sigma * math.log1p(-p) if k == 0 else sigma * math.expm1(-k * math.log1p(-p)) / k


def pareto(x: list[float]) -> tuple[float, float]:
    """Fit (k, σ) to rising exceedances: b = −k/σ averaged over its profile likelihood, k shrunk to 1/2."""
    n, many = len(x), 30 + math.isqrt(len(x))
    quartile = x[math.floor(n / 4 + 0.5) - 1]
    grid = [1 / x[-1] + (1 - math.sqrt(many / (j + 0.5))) / (3 * quartile) for j in range(many)]
    fits = [_profile(b, x) for b in grid]
    best = max(fits)
    weights = [math.exp(fit - best) for fit in fits]
    b = math.fsum(w * g for w, g in zip(weights, grid, strict=True)) / math.fsum(weights)
    k = _shape(b, x)
    return (n * k + PRIOR / 2) / (n + PRIOR), -k / b


def _shape(b: float, x: list[float]) -> float:
    return math.fsum(math.log1p(-b * y) for y in x) / len(x)


def _profile(b: float, x: list[float]) -> float:
    k = _shape(b, x)
    return len(x) * (math.log(-b / k) - k - 1)
