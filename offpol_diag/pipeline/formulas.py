"""Every formula of one token: log-ratios, weights, divergences, rejection rules, policy losses.

A function looks at one token (or, for numbers of whole sequences, at one sequence) and uses nothing
but operators and `np.exp, expm1, log, abs, minimum, maximum, where`. So the same text serves arrays
of any shape by broadcasting, torch, and compiled loops (`namespaces.py`). Bounds are numbers or
columns [N, 1]: row i of the result [N, T] is then that of row i of the plan's table. Log-probs and
log-ratios are in nats; a bound that is absent is ±inf.

    Δ = log π_train − log π_rollout of the sampled token, r = e^Δ      (weights, divergences, rules)
    u = log π_θ − log π_anchor, r = e^u                                (policy losses)
    A = advantage
"""

import numpy as np

LARGEST = 345.0  # |log-ratio| that is exponentiated at most: e^(2 · 345) is still a float64
SMOOTHING = 1e-8  # added to the probability of "another token" before its log (SkyRL, verl)
LEAST_OF_LARGER = 1e-8  # binary KL, larger of both directions: the least probability


def clip(x, lower, upper):
    """Clip x to [lower, upper]."""
    return np.minimum(np.maximum(x, lower), upper)


# ---------------------------------------------------------------- Log-ratios and ratios


def log_ratio_of(log_prob, log_prob_before):
    """Δ or u: log of the ratio of two policies' probabilities of the token. 0 on-policy."""
    return log_prob - log_prob_before


def importance_ratio(log_ratio):
    """r = e^Δ, of tokens, or of sequences and turns if Δ is their mean. 1 on-policy."""
    return np.exp(clip(log_ratio, -LARGEST, LARGEST))


def ratio_minus_one(log_ratio):
    """r − 1 without cancellation. 0 on-policy."""
    return np.expm1(log_ratio)


# ---------------------------------------------------------------- Importance weights


def importance_weight(ratio, log_ratio, lower, upper, zero_below, zero_above):
    """Truncated importance weight, min(max(r, lower), upper), 0 outside a band of the log-ratio.

    Truncated IS has no band, [−inf, inf]; masked IS (IcePop) has a band and no truncation, lower 0
    and upper inf.

    Unit: a ratio, 1 on-policy. Source: Ionides 2008; IcePop, Zhao et al. 2025.
    """
    outside = (log_ratio < zero_below) | (log_ratio > zero_above)
    return np.where(outside, 0.0, clip(ratio, lower, upper))


def deviation(weight):
    """w − 1. 0 on-policy."""
    return weight - 1.0


# ---------------------------------------------------------------- Divergences, 0 on-policy
# All take Δ, r − 1 and log π_rollout, so that one table lists them; Δ and r − 1 come clipped to a
# rule's safety.


def log_ratio_itself(log_ratio, ratio_minus_1, log_rollout):
    """Δ, nats, worse away from 0: bounds on r are compared as logs."""
    return log_ratio


def k1(log_ratio, ratio_minus_1, log_rollout):
    """−Δ, nats, worse away from 0: an unbiased estimate of KL(π_rollout‖π_train).

    Source of k1, k2, k3: Schulman 2020.
    """
    return -log_ratio


def k2(log_ratio, ratio_minus_1, log_rollout):
    """Δ²/2, nats, worse upwards: a biased estimate of that KL, never negative."""
    return log_ratio * log_ratio / 2.0


def k3(log_ratio, ratio_minus_1, log_rollout):
    """r − 1 − Δ, nats, worse upwards: unbiased, never negative, dominated by large r."""
    return ratio_minus_1 - log_ratio


def k3_reverse(log_ratio, ratio_minus_1, log_rollout):
    """1/r − 1 + Δ, nats, worse upwards: k3 with the policies exchanged."""
    return np.expm1(-log_ratio) + log_ratio


def ratio_either_way(log_ratio, ratio_minus_1, log_rollout):
    """max(r, 1/r) = e^|Δ|, a ratio, worse upwards; 1 on-policy. NeMo-RL's token_mult_prob_error."""
    return np.exp(np.abs(log_ratio))


def probability_gap(log_ratio, ratio_minus_1, log_rollout):
    """|π_train − π_rollout|, a probability, worse upwards.

    As the larger one times 1 − e^−|Δ|: nothing cancels, and nothing overflows.
    """
    larger = np.maximum(log_rollout, log_rollout + log_ratio)
    return np.exp(larger) * -np.expm1(-np.abs(log_ratio))


def probability_difference(log_ratio, ratio_minus_1, log_rollout):
    """π_train − π_rollout, a probability, worse away from 0."""
    gap = probability_gap(log_ratio, ratio_minus_1, log_rollout)
    return np.where(log_ratio < 0.0, -gap, gap)


def total_variation(log_ratio, ratio_minus_1, log_rollout):
    """|r − 1|/2, a share, worse upwards: its mean estimates the total variation distance."""
    return np.abs(ratio_minus_1) / 2.0


def binary_kl(log_ratio, ratio_minus_1, log_rollout):
    """KL from π_rollout to π_train of "this token or another", nats, worse upwards."""
    other_rollout = -np.expm1(log_rollout)
    other_train = np.maximum(-np.expm1(log_rollout + log_ratio), 0.0)
    this_token = -np.exp(log_rollout) * log_ratio
    return this_token + other_rollout * np.log((other_rollout + SMOOTHING) / (other_train + SMOOTHING))


def two_outcomes(log_prob, least):
    """Probabilities of "this token" and "another", clamped to [least, 1 − least]."""
    most = 1.0 - least
    return clip(np.exp(log_prob), least, most), clip(-np.expm1(log_prob), least, most)


def binary_kl_larger(log_ratio, ratio_minus_1, log_rollout):
    """The larger of both directions of the binary KL, clamped to [1e-8, 1 − 1e-8], nats."""
    this_rollout, other_rollout = two_outcomes(log_rollout, LEAST_OF_LARGER)
    this_train, other_train = two_outcomes(log_rollout + log_ratio, LEAST_OF_LARGER)
    log_this, log_other = np.log(this_rollout / this_train), np.log(other_rollout / other_train)
    return np.maximum(
        this_rollout * log_this + other_rollout * log_other,
        -(this_train * log_this + other_train * log_other),
    )


# ---------------------------------------------------------------- Rejection


def positive(x):
    """1 where x > 0, else 0: as a number, since rows of tokens are float64."""
    return np.where(x > 0.0, 1.0, 0.0)


def negative(x):
    """1 where x < 0, else 0."""
    return np.where(x < 0.0, 1.0, 0.0)


def not_positive(x):
    """1 where x <= 0, else 0."""
    return np.where(x <= 0.0, 1.0, 0.0)


def moves_away(advantage, log_ratio):
    """1 where the update pushes r further from 1, A·Δ > 0, else 0."""
    return positive(advantage * log_ratio)


def outside(value, lower, upper):
    """Whether a value is beyond a bound; one on a bound is not."""
    return (value > upper) | (value < lower)


def rejected(value, lower, upper, counts_above, counts_below):
    """Whether a value is beyond a bound that counts for this token, by the sign of its advantage.

    Args:
        value: the statistic that the rule bounds.
        lower: the lower bound; a value on a bound is within.
        upper: the upper bound.
        counts_above: 1 where a violation of `upper` counts, else 0: 1 for a rule on all tokens, A > 0 for one
            that acts against the update (DPPO).
        counts_below: the same of `lower`; A < 0 for such a rule.
    """
    return ((value > upper) & (counts_above != 0.0)) | ((value < lower) & (counts_below != 0.0))


# ---------------------------------------------------------------- Policy losses
# Returned is the loss before weight and mask; for losses with a clip also whether it acts. `r_lowest` and
# `r_highest` are the safety bounds of r = e^u.


def ppo_clip(advantage, ratio, low, high, dual, r_lowest, r_highest):
    """PPO's clipped surrogate max(−A r, −A clip(r)), at most −dual·A where A < 0.

    Args:
        advantage: A.
        ratio: r = e^u; GSPO gives all tokens of a sequence that of the mean of u.
        low: 1 − ε, a bound of r; 0 for none.
        high: 1 + ε; inf for none.
        dual: the dual clip, a bound of r; inf for none.
        r_lowest: the lower safety bound of r.
        r_highest: the upper one.

    Returns: loss, clipped, clipped by the dual clip. Source: Schulman et al. 2017; Ye et al. 2020; GSPO,
    Zheng et al. 2025.
    """
    bounded = clip(ratio, r_lowest, r_highest)
    held = np.where(advantage < 0.0, clip(bounded, low, dual), np.minimum(bounded, high))
    clipped = ((bounded > high) & (advantage > 0.0)) | ((bounded < low) & (advantage < 0.0))
    return -advantage * held, clipped, (bounded > dual) & (advantage < 0.0)


def reinforce(advantage, log_prob):
    """−A log π_θ. Source: Williams 1992.

    The surrogate −A, whose weight is its own ratio, is the same with 1 in place of log π_θ.
    """
    return -advantage * log_prob


def cispo(advantage, log_prob, ratio, low, high, r_lowest, r_highest):
    """−A log π_θ times the clipped, constant r: every token keeps its gradient. MiniMax-M1 2025."""
    bounded = clip(ratio, r_lowest, r_highest)
    held = clip(bounded, low, high)
    return -advantage * held * log_prob, held != bounded


def loss_kl(log_ratio, bound):
    """−u within ±bound, nats, worse away from 0: what verl logs as ppo_kl."""
    return -clip(log_ratio, -bound, bound)
