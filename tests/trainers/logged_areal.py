"""Restatement of what AReaL 4aef98d8d logs of an update, on plain lists; settings as in `areal`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.trainers.samples import Listed, Sample, clamp, each, exp, flat, mean

Flags = list[list[bool]]


@dataclass(frozen=True)
class Sampled:
    """Result of rejection sampling: weights (0 where dropped), the mask, and whether `share` is logged."""

    weights: Listed
    keep: Flags
    share: float | None


def every(batch: list[Sample]) -> Flags:
    return [[True] * len(one) for one in batch]


def stat(values: Listed, over: Flags) -> dict[str, float]:
    """Log average, minimum and maximum (AVG_MIN_MAX); nothing of nothing."""
    found = [x for x, on in zip(flat(values), flat(over), strict=True) if on]
    return {"avg": math.fsum(found) / len(found), "min": min(found), "max": max(found)} if found else {}


def logged(batch: list[Sample], valid: Flags, sampled: Sampled | None) -> dict[str, float]:
    keep = valid if sampled is None else sampled.keep
    moves = [one.update() for one in batch]
    ratios = [[exp(u) * on for u, on in zip(*pair, strict=True)] for pair in zip(moves, keep, strict=True)]
    stats = {"importance_weight": stat(ratios, valid), "approx_kl": stat(moves, valid)}
    behave = valid
    if sampled is not None:
        behave = [
            [on and w > 0 for on, w in zip(*pair, strict=True)]
            for pair in zip(keep, sampled.weights, strict=True)
        ]
        stats["behave_imp_weight"] = stat(sampled.weights, behave)
        stats["behave_approx_kl"] = stat([one.gap() for one in batch], behave)
    v = [one.gap("current") for one in batch]
    stats |= {
        "compute_logp/kl_div_direct": stat(each(lambda x: -x, v), behave),
        "compute_logp/kl_div_taylor": stat(each(lambda x: x**2 / 2, v), behave),
        "compute_logp/kl_div_dual": stat(each(lambda x: exp(x) - 1 - x, v), behave),
    }
    found = {f"{name}/{end}": x for name, ends in stats.items() for end, x in ends.items()}
    if sampled is not None and sampled.share is not None:
        found["rs_filtered_fraction"] = sampled.share
    return {f"ppo_actor/update/{name}": x for name, x in found.items()}


METRICS: dict[str, Callable[[float], float]] = {
    "ratio": lambda d: d,
    "kl_k1": lambda d: d,
    "kl_k2": lambda d: d**2 / 2,
    "kl_k3": lambda d: exp(-d) - 1 + d,
}
"""Of d = log π_prox − log π_behave; a ratio is aggregated in logs."""
AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "mean": mean, "max": max}


def kpop(one: Sample) -> list[float]:
    """Compute the larger KL of two coins of each token, clamped to [1e-8, 1 - 1e-8]."""

    def kl(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    coins = [[clamp(exp(x), 1e-8, 1 - 1e-8) for x in pair] for pair in zip(one.old, one.rollout, strict=True)]
    return [max(kl(*pair), kl(*pair[::-1])) for pair in coins]


def rejection_sampling(
    batch: list[Sample],
    *,
    level: str = "token",
    action: str = "mask",
    metric: str = "ratio",
    agg: str = "mean",
    upper: float = 5.0,
    lower: float | None = None,
) -> dict[str, float]:
    gaps = [one.gap() for one in batch]
    judged = [kpop(one) for one in batch] if metric == "binary_kl" else each(METRICS[metric], gaps)
    weights = each(exp, gaps)
    if level == "sequence":
        judged = [[AGGREGATES[agg](one)] * len(one) if one else [] for one in judged]
        if metric == "ratio":
            weights = [[exp(mean(one))] * len(one) for one in gaps]
    if metric == "ratio":
        judged = each(exp, judged)
    inside = [[(lower is None or x >= lower) and x <= upper for x in one] for one in judged]
    if action == "mask":
        changed, keep = each(lambda on: not on, inside), inside
        weights = [
            [w * on for w, on in zip(*pair, strict=True)] for pair in zip(weights, inside, strict=True)
        ]
    else:
        clamped = each(lambda w: clamp(w, lower or 0.0, upper), weights)
        changed = [
            [a != b for a, b in zip(*pair, strict=True)] for pair in zip(weights, clamped, strict=True)
        ]
        weights, keep = clamped, every(batch)
    share = sum(flat(changed)) / max(len(flat(changed)), 1)
    return logged(batch, every(batch), Sampled(weights, keep, share))


def behave_cap(
    batch: list[Sample], *, behave_imp_weight_cap: float = 5.0, behave_imp_weight_mode: str = "token_mask"
) -> dict[str, float]:
    """Log v1.0.3 and older: a weight above the cap is 0 and its token stays; no share is logged."""
    level, action = behave_imp_weight_mode.split("_")
    gaps, cap = [one.gap() for one in batch], behave_imp_weight_cap
    if level == "sequence":
        gaps = [[mean(one)] * len(one) for one in gaps]
    weights = each(exp, gaps)
    if action == "truncate":
        weights = each(lambda w: min(w, cap), weights)
    else:
        weights = each(lambda w: 0.0 if w > cap else w, weights)
    return logged(batch, every(batch), Sampled(weights, every(batch), None))


def m2po(batch: list[Sample], *, m2_threshold: float = 0.04) -> dict[str, float]:
    """Drop the largest (R − O)² until the mean of the rest is below the threshold; one always stays."""
    squares = each(lambda d: d**2, [one.gap() for one in batch])
    rest = sorted(flat(squares))
    while len(rest) > 1 and math.fsum(rest) / len(rest) >= m2_threshold:
        rest.pop()
    cut = rest[-1] if rest else 0.0
    return logged(batch, [[x <= cut for x in one] for one in squares], None)
