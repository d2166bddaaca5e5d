"""Restatement of what prime-rl and SkyRL log of a batch, on padded arrays; settings of `prime_skyrl`."""

import math

import numpy as np

from tests.trainers.padded import within

# ---------------------------------------------------------------- prime-rl


def safe_mean(values, mask):
    return values[mask].sum() / max(mask.sum(), 1)


def kl_of(log_ratio):
    return np.minimum(np.expm1(np.minimum(log_ratio, math.log(1e30))) - log_ratio, 1e30)


def mean_and_max(rows):
    found = {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        found |= {f"{name}/mean": values.mean(), f"{name}/max": values.max()}
    return found


def prime_step(d):
    """Compute the metrics that train.py logs over all loss tokens."""
    kl = kl_of(d.current - d.rollout)[d.mask]
    std = kl.std(ddof=1) if len(kl) > 1 else math.nan
    return {
        "mismatch_kl/all/mean": kl.mean(),
        "mismatch_kl/all/std": std,
        "mismatch_kl/all/max": kl.max(),
        "kl_ent_ratio/mean": kl.mean() / d.entropy[d.mask].mean(),
    }


def prime_default(d, dppo_mask_low=0.2, dppo_mask_high=0.2):
    rows = []
    for c, r, a, m in zip(d.current, d.rollout, d.advantages, d.mask, strict=True):
        diff, kl = np.exp(c) - np.exp(r), kl_of(c - r)
        positive, negative = a > 0, a < 0
        masked = np.where(positive, diff > dppo_mask_high, diff < -dppo_mask_low)
        rows.append(
            {
                "masked_mismatch_kl": safe_mean(kl, m & masked),
                "unmasked_mismatch_kl": safe_mean(kl, m & ~masked),
                "is_masked": safe_mean(masked, m),
                "is_masked_low": safe_mean(negative & (diff < -dppo_mask_low), m),
                "is_masked_high": safe_mean(positive & (diff > dppo_mask_high), m),
                "masked_advantage_positive": safe_mean(positive, m & masked),
                "masked_advantage_negative": safe_mean(negative, m & masked),
            }
        )
    return prime_step(d) | mean_and_max(rows)


def prime_ipo(d, ipo_threshold=0.1):
    rows = []
    for c, r, m in zip(d.current, d.rollout, d.mask, strict=True):
        masked, kl = np.abs(np.exp(c) - np.exp(r)) > ipo_threshold, kl_of(c - r)
        rows.append(
            {
                "masked_mismatch_kl": safe_mean(kl, m & masked),
                "unmasked_mismatch_kl": safe_mean(kl, m & ~masked),
                "is_masked": safe_mean(masked, m),
            }
        )
    return prime_step(d) | mean_and_max(rows)


# ---------------------------------------------------------------- SkyRL


def safe_exp(x):
    return np.exp(np.clip(x, -20.0, 20.0))


def masked_mean(x, mask):
    return (x * mask).sum() / max(mask.sum(), 1.0)


def skyrl_ppo_clip(d, eps=0.2):
    ratio = safe_exp(d.current - d.old)
    plain, clipped = ratio * d.advantages, np.clip(ratio, 1 - eps, 1 + eps) * d.advantages
    return masked_mean(-clipped > -plain, d.mask)


def skyrl_distances(log_ratio, mask, stem, ddof, smallest=None):
    x = np.abs(log_ratio)[mask]
    std = x.std(ddof=ddof) if len(x) > ddof else math.nan
    smallest = x.min() if smallest is None else smallest
    found = {"mean": x.mean(), "max": x.max(), "min": smallest, "std": std}
    return {f"policy/{stem}_abs_diff_{name}": value for name, value in found.items()}


def skyrl(
    d,
    tis_ratio_type=None,
    token_tis_ratio_clip_high=2.0,
    sequence_tis_ratio_clip_high=5.0,
    sequence_mask_metric=None,
    geo_mask=(0.99, 1.01),
    product_mask=(0.5, 2.0),
    outlier_token_is_threshold=None,
    token_mask_is_threshold=None,
    loss="ppo_clip",
):
    """Restate compute_off_policy_correction: each part sees the mask that the parts before it left."""
    mask, log_ratio = d.mask.astype(np.float64), np.where(d.mask, d.old - d.rollout, 0.0)
    ratio = safe_exp(log_ratio)
    padded = ratio * mask
    found = {
        "is_ratio_mean": masked_mean(ratio, mask),
        "is_ratio_std": padded.std(ddof=1) if padded.size > 1 else math.nan,
        "is_ratio_max": padded.max(),
        "is_ratio_min": padded.min(),
    }
    if outlier_token_is_threshold:
        low, high = outlier_token_is_threshold
        over, under = (ratio > high) & (mask > 0), (ratio < low) & (mask > 0)
        gone = (over | under).any(axis=1)
        found |= {
            "outlier_seq_masked_ratio": gone.mean(),
            "outlier_seq_over_high_ratio": over.any(axis=1).mean(),
            "outlier_seq_under_low_ratio": under.any(axis=1).mean(),
        }
        mask = mask * ~gone[:, None]
    if token_mask_is_threshold:
        inside = within(ratio, *token_mask_is_threshold)
        found["token_mask_ratio"] = masked_mean(~inside, mask)
        mask = mask * inside
    if tis_ratio_type == "token":
        found["tis_token_clip_high_ratio"] = masked_mean(ratio > token_tis_ratio_clip_high, mask)
    total = (log_ratio * mask).sum(axis=1)
    if tis_ratio_type == "sequence":
        found["tis_seq_clip_high_ratio"] = (safe_exp(total) > sequence_tis_ratio_clip_high).mean()
    if sequence_mask_metric:
        geometric = sequence_mask_metric == "geometric"
        x = safe_exp(total / np.maximum(mask.sum(axis=1), 1.0) if geometric else total)
        low, high = geo_mask if geometric else product_mask
        stem = f"{'geo' if geometric else 'product'}_sequence_mask"
        found[f"{stem}_masked_ratio"] = ((x > high) | (x < low)).mean()
        found[f"{stem}_over_high_ratio"] = (x > high).mean()
        found[f"{stem}_under_low_ratio"] = (x < low).mean()
    found["clip_ratio"] = skyrl_ppo_clip(d) if loss == "ppo_clip" else 0.0
    return found | skyrl_distances(log_ratio, d.mask, "rollout_train_logprobs", 1)


def skyrl_anchored(d, clipped):
    """Compute losses around the rollout, clipped where asked for, [B, L]."""
    log_ratio = np.where(d.mask, d.current - d.rollout, 0.0)
    found = {"clip_ratio": masked_mean(clipped, d.mask)}
    smallest = np.abs(log_ratio).min()  # of the padded batch, what is masked as 0
    return found | skyrl_distances(log_ratio, d.mask, "minibatch_rollout_logprobs", 0, smallest)


def skyrl_rollout_is(d):
    ratio = safe_exp(d.gap("current"))
    return skyrl_anchored(d, ~((ratio > 0.8) & (ratio < 1.2)))


def skyrl_dppo(d, dppo_type="binary_tv"):
    now, then = np.exp(d.current), np.exp(d.rollout)
    up, down = (d.advantages > 0) & (now > then), (d.advantages < 0) & (now < then)
    far = np.abs(now - then)
    if dppo_type == "binary_kl":
        far = then * (d.rollout - d.current) + (1 - then) * np.log((1 - then + 1e-8) / (1 - now + 1e-8))
    return skyrl_anchored(d, (up | down) & (far > 0.2))


def skyrl_cispo(d):
    ratio = safe_exp(d.gap("current"))
    active = ratio[d.mask]
    return skyrl_anchored(d, ratio > 5.0) | {
        "cispo/ratio_mean": active.mean(),
        "cispo/ratio_clamped_mean": np.clip(active, 0.0, 5.0).mean(),
        "cispo/ratio_max": active.max(),
        "cispo/ratio_min": active.min(),
    }
