"""The formulas of off-policy correction, for numpy arrays or torch tensors of any shape.

    Δ = log π_train − log π_rollout of the sampled token, r = e^Δ      weights, divergences, rules
    u = log π_θ − log π_anchor, r = e^u                                policy losses
    A = advantage

Log-probs and log-ratios are in nats. Bounds are numbers, ±inf for none. On-policy, Δ = 0, a weight is 1 and
a divergence 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from offpol_diag.core.segments import Array, namespace, sort

LARGEST = 345.0
"""|log-ratio| that is exponentiated at most: e^(2 · 345) is still a float64."""
SMOOTHING = 1e-8
"""Added to the probability of "another token" before its log (SkyRL, verl)."""
LEAST_PROBABILITY = 1e-8
"""Least probability in the larger of both directions of the binary KL."""


# ---------------------------------------------------------------- Importance weights


def importance_ratio(log_ratio: Array) -> Array:
    """Compute r = e^Δ.

    Of a sequence or turn, Δ may be the sum of its tokens' (the product of their ratios) or the mean (the
    geometric mean). Finite, and so is its square, whatever Δ is.
    """
    xp = namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -LARGEST, LARGEST))


def truncate(ratio: Array, lower: float, upper: float) -> Array:
    """Compute the truncated importance weight min(max(r, lower), upper).

    References: Ionides 2008, "Truncated importance sampling".
    """
    return namespace(ratio).clip(ratio, lower, upper)


def mask_outside(ratio: Array, log_ratio: Array, lower: float, upper: float) -> Array:
    """Compute the masked importance weight: r where lower ≤ log r ≤ upper, else 0.

    The token stays in the loss's denominator, unlike one that a rule rejects.

    References: IcePop, Zhao et al. 2025.
    """
    return ratio * ~outside(log_ratio, lower, upper)


def outside(x: Array, lower: float, upper: float) -> Array:
    """Flag what is beyond a bound; a number on a bound is within."""
    if lower == -math.inf:
        return x > upper
    return x < lower if upper == math.inf else (x < lower) | (x > upper)


# ---------------------------------------------------------------- Divergences


def k1(log_ratio: Array) -> Array:
    """Compute −Δ, nats, worse away from 0: an unbiased estimate of KL(π_rollout‖π_train).

    References: Schulman 2020, "Approximating KL divergence", as k2 and k3.
    """
    return -log_ratio


def k2(log_ratio: Array) -> Array:
    """Compute Δ²/2, nats, worse upwards: a biased estimate of that KL, of small variance, never negative."""
    return log_ratio * log_ratio / 2.0


def k3(log_ratio: Array, ratio_minus_1: Array) -> Array:
    """Compute r − 1 − Δ, nats, worse upwards: unbiased, never negative, dominated by large r.

    `ratio_minus_1` is expm1(Δ), which has all digits of r − 1 where r is near 1.
    """
    return ratio_minus_1 - log_ratio


def k3_reverse(log_ratio: Array) -> Array:
    """Compute 1/r − 1 + Δ, nats, worse upwards: k3 with the policies exchanged."""
    return namespace(log_ratio).expm1(-log_ratio) + log_ratio


def total_variation(ratio_minus_1: Array) -> Array:
    """Compute |r − 1|/2, worse upwards: its mean estimates the total variation distance."""
    return namespace(ratio_minus_1).abs(ratio_minus_1) / 2.0


def ratio_either_way(log_ratio: Array) -> Array:
    """Compute max(r, 1/r) = e^|Δ|, worse upwards; 1 on-policy. NeMo-RL's token_mult_prob_error."""
    xp = namespace(log_ratio)
    return xp.exp(xp.abs(log_ratio))


def probability_difference(log_train: Array, log_rollout: Array) -> Array:
    """Compute π_train − π_rollout, worse away from 0.

    As the larger one times 1 − e^−|Δ|: nothing cancels, and nothing overflows.
    """
    xp = namespace(log_train)
    log_ratio = log_train - log_rollout
    larger = xp.exp(xp.maximum(log_train, log_rollout))
    return xp.copysign(larger * xp.expm1(-xp.abs(log_ratio)), log_ratio)


def binary_kl(log_ratio: Array, log_rollout: Array) -> Array:
    """Compute the KL from π_rollout to π_train of "this token or another", nats, worse upwards."""
    xp = namespace(log_ratio)
    other_rollout = -xp.expm1(log_rollout)
    other_train = xp.clip(-xp.expm1(log_rollout + log_ratio), 0.0, None)
    odds = (other_rollout + SMOOTHING) / (other_train + SMOOTHING)
    return other_rollout * xp.log(odds) - xp.exp(log_rollout) * log_ratio


def binary_kl_larger(log_ratio: Array, log_rollout: Array) -> Array:
    """Compute the larger of both directions of the binary KL, nats, worse upwards.

    Probabilities are clamped to [1e-8, 1 − 1e-8].
    """
    xp = namespace(log_ratio)

    def clamped(probability: Array) -> Array:
        return xp.clip(probability, LEAST_PROBABILITY, 1.0 - LEAST_PROBABILITY)

    log_train = log_rollout + log_ratio
    this_rollout, other_rollout = clamped(xp.exp(log_rollout)), clamped(-xp.expm1(log_rollout))
    this_train, other_train = clamped(xp.exp(log_train)), clamped(-xp.expm1(log_train))
    log_this, log_other = xp.log(this_rollout / this_train), xp.log(other_rollout / other_train)
    return xp.maximum(
        this_rollout * log_this + other_rollout * log_other,
        -(this_train * log_this + other_train * log_other),
    )


# ---------------------------------------------------------------- Rejection


def batch_cut(values: Array, upper: float, many: int = 0, total: float = 0.0) -> Array:
    """Find the value from which on the largest are dropped, so that the mean of the rest is below `upper`.

    It is inf where none need be dropped. The smallest of all never is, nor is a value below `upper`, so that
    the number and sum of such values may stand for them.

    References: M2PO, Zheng et al. 2025: second-moment trust policy optimization.

    Args:
        values: a statistic of all tokens of a trainer batch, at least one, [T].
        upper: the bound of its mean.
        many: how many further tokens there are, each with a value below `upper`.
        total: the sum of these values.

    Returns: [] float64; of tensors the host waits for it.
    """
    rising, xp = sort(values), namespace(values)
    counts = many + xp.ones_like(rising).cumsum(0)
    kept = int((total + rising.cumsum(0) < upper * counts).sum())  # means of the first 1, 2, … rise
    if kept == 0 and many == 0:
        rising = rising[rising > rising[0]]
    return rising[kept] if kept < len(rising) else xp.ones_like(values[0]) * math.inf


# ---------------------------------------------------------------- Policy losses


class Loss(NamedTuple):
    """A policy loss of tokens, before weight and mask."""

    value: Array  # the loss, [T]
    clipped: Array | None = None  # where its clip acts, [T] bool; None without one
    dual_clipped: Array | None = None  # where its dual clip acts, [T] bool; None without one


def reinforce(advantage: Array, log_prob: Array) -> Array:
    """Compute −A log π_θ.

    References: Williams 1992.
    """
    return -advantage * log_prob


def ppo_clip(advantage: Array, ratio: Array, low: float, high: float, dual: float) -> Loss:
    """Compute PPO's clipped surrogate max(−A r, −A clip(r, low, high)), where A < 0 at most −dual · A.

    GSPO is the same with one r for all tokens of a sequence: e to the mean of their u.

    References: Schulman et al. 2017; dual clip, Ye et al. 2020; GSPO, Zheng et al. 2025.

    Args:
        advantage: A, [T].
        ratio: r = π_θ/π_anchor, [T].
        low: 1 − ε, 0 for none.
        high: 1 + ε, inf for none.
        dual: the dual clip, a bound of r above 1; inf for none.
    """
    xp = namespace(ratio)
    negative, positive = advantage < 0.0, advantage > 0.0
    value = xp.maximum(-advantage * ratio, -advantage * xp.clip(ratio, low, high))
    clipped = ((ratio > high) & positive) | ((ratio < low) & negative)
    if dual == math.inf:
        return Loss(value, clipped)
    return Loss(xp.minimum(value, dual * xp.abs(advantage)), clipped, (ratio > dual) & negative)


def cispo(advantage: Array, log_prob: Array, ratio: Array, low: float, high: float) -> Loss:
    """Compute −A log π_θ times the clipped, constant r: every token keeps its gradient.

    References: MiniMax-M1 2025.
    """
    held = namespace(ratio).clip(ratio, low, high)
    return Loss(-advantage * held * log_prob, held != ratio)
