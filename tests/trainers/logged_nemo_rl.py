"""Restatement of what NeMo-RL 7ea279abf logs of a global batch, on plain lists; settings as in `nemo_rl`."""

from __future__ import annotations

import math

import numpy as np

from tests.trainers.samples import Listed, Sample, clamp, each, flat, mean

EPS = 1e-8
LARGEST_FLOAT32 = 3.4028234663852886e38


def exp(x: float) -> float:
    """Compute e^x in float32: inf where it overflows."""
    return single(math.exp(min(x, 700.0)))


def single(x: float) -> float:
    return math.inf if x > LARGEST_FLOAT32 else x


def finite(weight: float) -> float:
    return weight if weight <= LARGEST_FLOAT32 else 0.0


def js(prev: float, gen: float) -> float:
    if all(float(np.float32(0.5) * np.exp(np.float32(x))) == 0 for x in (prev, gen)):
        return math.nan  # the logarithm of 0, and inf − inf
    mixture = math.log(0.5 * exp(prev) + 0.5 * exp(gen))
    return 0.5 * sum(exp(x - mixture) - (x - mixture) - 1 for x in (prev, gen))


def k3(log: float) -> float:
    """Compute e^x − 1 − x, by its series where it would cancel."""
    if abs(log) > 1e-3:
        return exp(log) - 1 - log
    return math.fsum(log**k / math.factorial(k) for k in range(2, 9))


def nemo_rl(
    batch: list[Sample],
    *,
    truncated_importance_sampling_type: str | None = None,
    truncated_importance_sampling_ratio: float | None = None,
    truncated_importance_sampling_ratio_min: float | None = None,
    sequence_level_importance_ratios: bool = False,
    seq_logprob_error_threshold: float | None = None,
    ratio_clip: tuple[float, float] = (0.2, 0.2),
) -> dict[str, float]:
    """Log the loss's metrics; a sample without a token has sample_mask 0, and both drifts must be there."""
    valid = [one for one in batch if len(one)]
    found, left = errors(valid, seq_logprob_error_threshold)
    tokens = sum(len(one) for one in left)

    def masked_mean(lists: Listed) -> float:
        return single(math.fsum(flat(lists))) / (tokens + EPS)

    gaps, moves = [one.gap() for one in left], [one.update() for one in left]
    if sequence_level_importance_ratios:
        moves = [[mean(one)] * len(one) for one in moves]
    ratios = each(exp, moves)
    clipped = each(lambda r: clamp(r, 1 - ratio_clip[0], 1 + ratio_clip[1]), ratios)
    entropy = [[-exp(c - r) * c for c, r in zip(s.current, s.rollout, strict=True)] for s in left]
    found |= {
        "token_mult_prob_error": masked_mean(each(lambda d: exp(abs(d)), gaps)),
        "gen_kl_error": masked_mean(each(k3, gaps)),
        "policy_kl_error": masked_mean(each(lambda d: k3(-d), gaps)),
        "js_divergence_error": masked_mean(
            [[js(o, r) for o, r in zip(s.old, s.rollout, strict=True)] for s in left]
        ),
        "probs_ratio": masked_mean(ratios),
        "probs_ratio_clamped": masked_mean(clipped),
        "approx_entropy": masked_mean(entropy),
        **extremes("probs_ratio", ratios),
        **extremes("probs_ratio_clamped", clipped),
    }
    kind, low, high = (
        truncated_importance_sampling_type,
        truncated_importance_sampling_ratio_min,
        truncated_importance_sampling_ratio,
    )
    if sequence_level_importance_ratios:
        weights = [[finite(exp(math.fsum(one)))] for one in gaps]
    else:
        weights = each(lambda d: finite(exp(d)), gaps)
    if kind == "tis":
        outside = each(lambda w: float(w > high or w < (low or 0.0)), weights)
        weights = each(lambda w: clamp(w, low or 0.0, high), weights)
    elif kind == "icepop":
        outside = each(lambda w: float(not low <= w <= high), weights)
        weights = each(lambda w: w if low <= w <= high else 0.0, weights)
    elif kind == "seq-mask-tis":
        inside = [low <= exp(mean(one)) <= high for one in gaps]
        weights = [[w * on for w in one] for one, on in zip(weights, inside, strict=True)]
        found["is_oob_ratio"] = sum(not on for on in inside) / (len(left) + EPS)
    if kind in ("tis", "icepop"):  # a row's flag is a column that the token mask spreads
        spread = [one * len(s) if len(one) < len(s) else one for one, s in zip(outside, left, strict=True)]
        found["is_oob_ratio"] = masked_mean(spread)
    per = len(left) if sequence_level_importance_ratios else tokens
    found["sampling_importance_ratio"] = single(math.fsum(flat(weights))) / (per + EPS)
    return {f"train/{name}": value for name, value in found.items()}


def extremes(name: str, lists: Listed) -> dict[str, float]:
    every = flat(lists)
    return {f"{name}_min": min(every, default=math.inf), f"{name}_max": max(every, default=-math.inf)}


def errors(valid: list[Sample], threshold: float | None) -> tuple[dict[str, float], list[Sample]]:
    """Restate grpo.py: the statistics of sequences, and the masked ones."""
    found = [single(math.fsum(exp(abs(d)) for d in one.gap())) / len(one) for one in valid]
    kept = [threshold is None or error <= threshold for error in found]
    dropped = [one for one, on in zip(valid, kept, strict=True) if not on]
    after = [error for error, on in zip(found, kept, strict=True) if on]
    return {
        "max_seq_mult_prob_error": max(found, default=0.0),
        "mean_seq_mult_prob_error": single(math.fsum(found)) / max(len(found), 1),
        "min_seq_mult_prob_error": min(found, default=0.0),
        "max_seq_mult_prob_error_after_mask": max(after, default=0.0),
        "mean_seq_mult_prob_error_after_mask": single(math.fsum(after)) / max(len(after), 1),
        "min_seq_mult_prob_error_after_mask": min(after, default=0.0),
        "num_masked_seqs_by_logprob_error": float(len(dropped)),
        "masked_correct_pct": mean([float(one.reward == 1) for one in dropped]),
    }, [one for one, on in zip(valid, kept, strict=True) if on]
