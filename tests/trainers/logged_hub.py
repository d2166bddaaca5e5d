"""Restatement of what TRL, ms-swift, and OpenRLHF log of a batch; settings of `trl_swift_openrlhf`.

What verl 2026-03 logs beside `rollout_corr/`, which `verl_reference` has, is here too.
"""

import math

import numpy as np

from tests.trainers.padded import over, row_mean, row_sum, under, within
from tests.trainers.policies import update

# ---------------------------------------------------------------- TRL


def trl(p, *, mode="sequence_mask", clip_max=3.0, clip_min=None):
    """Restate `_generate_and_score_completions`."""
    level, action = mode.split("_")
    log = p.gap() if level == "token" else row_sum(p.gap(), p.mask)
    ratio = np.exp(log)
    if action == "truncate":
        ratio = np.clip(ratio, clip_min, clip_max)
    else:
        ratio = np.where(within(ratio, clip_min, clip_max), ratio, 0.0)
    flat = ratio[p.mask] if level == "token" else ratio.flatten()
    delta = np.abs(p.gap())[p.mask]
    return {
        "sampling/sampling_logp_difference/mean": delta.mean(),
        "sampling/sampling_logp_difference/max": delta.max(),
        "sampling/importance_sampling_ratio/min": flat.min(),
        "sampling/importance_sampling_ratio/mean": flat.mean(),
        "sampling/importance_sampling_ratio/max": flat.max(),
    }


def trl_clips(p, loss):
    """Restate `_compute_loss`'s clips with one advantage per completion: of tokens, or of rows' ratios."""
    u, up, down = update(p, "old"), (p.advantages > 0) & p.mask, (p.advantages < 0) & p.mask
    if loss == "cispo":
        return {"cispo_clip_ratio": (over(np.exp(u), 5.0) & up).sum() / p.mask.sum()}
    low, high = under(np.exp(u), 0.8) & down, over(np.exp(u), 1.2) & up
    there = p.mask if loss == "ppo_clip" else np.ones_like(low)
    filled = there.any(axis=1)
    rows = [(x.sum(axis=1)[filled] / there.sum(axis=1)[filled]) for x in (low, high)]
    shares = [x.sum() / there.sum() for x in (low, high)]
    return {
        "clip_ratio/low_mean": shares[0],
        "clip_ratio/low_min": rows[0].min(),
        "clip_ratio/high_mean": shares[1],
        "clip_ratio/high_max": rows[1].max(),
        "clip_ratio/region_mean": sum(shares),
    }


# ---------------------------------------------------------------- ms-swift


def masked_mean(x, mask):
    return np.where(mask, x, 0.0).sum() / max(mask.sum(), 1.0)


def swift_gap(p):
    log_ratio = p.gap()
    safe = np.clip(log_ratio, -20, 20)
    k3 = np.clip(np.expm1(safe) - safe, -10, 10)
    train, rollout = row_mean(p.old, p.mask)[:, 0], row_mean(p.rollout, p.mask)[:, 0]
    geometric = np.exp(np.clip(row_mean(log_ratio, p.mask)[:, 0], -20, 20))
    diff = rollout - train
    return {
        "training_ppl": np.exp(-train).mean(),
        "training_log_ppl": (-train).mean(),
        "kl": masked_mean(-log_ratio, p.mask),
        "k3_kl": masked_mean(k3, p.mask),
        "rollout_ppl": np.exp(-rollout).mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": np.abs(diff).mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "ppl_ratio": np.exp(diff).mean(),
        "chi2_token": masked_mean(np.exp(safe) ** 2, p.mask) - 1,
        "chi2_seq": (geometric**2).mean() - 1,
    }


def swift_weights(p, mode, threshold):
    """Return the weights as applied [B, L], and `clipped_frac`."""
    ratio = np.exp(np.clip(p.gap(), -20, 20))
    rows = np.exp(row_mean(np.log(np.maximum(ratio, 1e-10)), p.mask))
    beyond = over(rows, threshold)
    weights = {
        "token_truncate": np.minimum(ratio, threshold),
        "token_mask": np.where(over(ratio, threshold), 0.0, ratio),
        "sequence_truncate": np.minimum(rows, threshold) * np.ones_like(ratio),
        "sequence_mask": ratio * ~beyond,
    }[mode]
    clipped = {
        "token_truncate": masked_mean(over(ratio, threshold), p.mask),
        "token_mask": masked_mean(weights == 0, p.mask),
    }
    return weights, clipped.get(mode, beyond.mean())


def swift(p, *, rollout_importance_sampling_mode=None, rollout_importance_sampling_threshold=2.0):
    """Restate `_compute_rollout_offpolicy_metrics`, and with a mode `_compute_is_correction_metrics`."""
    found, threshold = swift_gap(p), rollout_importance_sampling_threshold
    if rollout_importance_sampling_mode:
        weights, clipped = swift_weights(p, rollout_importance_sampling_mode, threshold)
        bounded = np.clip(weights, 1 / threshold, threshold)
        normalised = bounded / (masked_mean(bounded, p.mask) + 1e-8)
        found |= {
            "is_weight_mean": masked_mean(weights, p.mask),
            "ess": 1 / max(masked_mean(normalised**2, p.mask), 1e-10),
            "clipped_frac": clipped,
        }
    return {f"rollout_correction/{name}": value for name, value in found.items()}


# ---------------------------------------------------------------- OpenRLHF


def openrlhf(p, *, policy_loss_type="ppo", is_correction_type="tis", is_correction_threshold=(0.5, 5.0)):
    """Restate `PolicyLoss.forward` with the correction on and eps_clip 0.2."""
    update = p.current - p.old
    if policy_loss_type == "gspo":
        ratio = np.exp(row_mean(p.gap("current"), p.mask)) * p.mask
    else:
        ratio = np.exp(np.clip(update, -20, 20))
    surr1, surr2 = ratio * p.advantages, np.clip(ratio, 0.8, 1.2) * p.advantages
    found = {
        "ppo_clip_ratio": (surr2 < surr1)[p.mask].mean(),
        "ppo_kl": (-update)[p.mask].mean(),
    }
    if policy_loss_type == "ppo":
        found["vllm_kl"] = (p.rollout - p.old)[p.mask].mean()
    return found


def openrlhf_2026_09(p, *, is_correction_type, is_correction_threshold=(0.5, 5.0)):
    """Restate the same of 2026-09, with the share beyond the threshold: of tokens, or of rows."""
    of_rows = is_correction_type == "seq-mask-tis"
    gate = np.exp(row_mean(p.gap(), p.mask) if of_rows else p.gap())
    beyond = ~within(gate, *is_correction_threshold)
    return openrlhf(p) | {"is_filter_ratio": beyond.mean() if of_rows else beyond[p.mask].mean()}


# ---------------------------------------------------------------- verl, beside the correction


def verl_debug(p):
    """Restate `calculate_debug_metrics`, of probabilities."""
    old, rollout = np.exp(p.old[p.mask]), np.exp(p.rollout[p.mask])
    diff = np.abs(old - rollout)
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": diff.max(),
        "training/rollout_probs_diff_mean": diff.mean(),
        "training/rollout_probs_diff_std": diff.std(ddof=1) if len(diff) > 1 else math.nan,
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(old, rollout)[0, 1]
        if len(diff) > 1
        else math.nan,
    }


def verl_actor(p, keep, clip_ratio=0.2, clip_ratio_c=3.0):
    """Restate `compute_policy_loss_vanilla` on the mask after rejection; it bounds u for ppo_kl too."""
    log, a = np.clip(p.current - p.old, -20, 20), p.advantages
    ratio = np.exp(log)
    plain, clipped = -a * ratio, -a * np.clip(ratio, 1 - clip_ratio, 1 + clip_ratio)
    worse, count = np.maximum(plain, clipped), keep.sum() + 1e-8
    return {
        "actor/pg_clipfrac": (clipped > plain)[keep].sum() / count,
        "actor/pg_clipfrac_lower": ((worse > -a * clip_ratio_c) & (a < 0))[keep].sum() / count,
        "actor/ppo_kl": (-log)[keep].sum() / count,
    }
