"""Restatement of what prime-rl, SkyRL, ROLL and open-instruct log of a batch, on padded arrays.

Settings are those of `prime_skyrl` and `roll_open_instruct`.
"""

import math

import numpy as np

from tests.trainers.padded import within

EPS = 1e-8


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


def prime_v02(d, ratio_type="token"):
    token_low, token_high, geo_low, geo_high, sequence_low, sequence_high = 0.125, 8.0, 0.1, 10.0, 0.0, 100.0
    stacked, tokens = [], {"is_masked": [], "is_masked_low": [], "is_masked_high": []}
    for c, r, m in zip(d.current, d.rollout, d.mask, strict=True):
        log_ratio = c - r
        ratio, kl = np.exp(log_ratio), kl_of(log_ratio)
        geo = np.exp(safe_mean(log_ratio, m))
        least, most = np.where(m, ratio, np.inf).min(), np.where(m, ratio, -np.inf).max()
        flags = (geo < geo_low, geo > geo_high, least < sequence_low, most > sequence_high)
        masked = (ratio < token_low) | (ratio > token_high) | any(flags)
        tokens["is_masked"].append(masked[m])
        tokens["is_masked_low"].append((ratio < token_low)[m])
        tokens["is_masked_high"].append((ratio > token_high)[m])
        stacked.append(
            {
                "mismatch_kl": safe_mean(kl, m),
                "masked_mismatch_kl": safe_mean(kl, m & masked),
                "unmasked_mismatch_kl": safe_mean(kl, m & ~masked),
                "geo_masked_low": flags[0],
                "geo_masked_high": flags[1],
                "sequence_masked_low": flags[2],
                "sequence_masked_high": flags[3],
                "geo_seq_ratio": geo,
            }
        )
    rows = {name: np.array([row[name] for row in stacked], dtype=np.float64) for name in stacked[0]}
    kl = rows["mismatch_kl"]
    return {
        **{f"{name}/mean": np.concatenate(parts).mean() for name, parts in tokens.items()},
        **{f"{name}/mean": values.mean() for name, values in rows.items()},
        "mismatch_kl/std": kl.std(ddof=1) if len(kl) > 1 else math.nan,
        "mismatch_kl/min": kl.min(),
        "mismatch_kl/max": kl.max(),
        "kl_ent_ratio/mean": kl.mean() / d.entropy[d.mask].mean(),
    }


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


# ---------------------------------------------------------------- ROLL


def roll_masked_mean(x, mask):
    n = mask.sum(axis=-1)
    return np.where(n > 0, (x * mask).sum(axis=-1) / (n + EPS), 0.0)


def roll_segments(x, mask):
    """Fill each contiguous run of the mask with its mean."""
    found = np.zeros_like(x)
    for row, (values, flags) in enumerate(zip(x, mask, strict=True)):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(int), [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found[row, start:end] = values[start:end].sum() / (end - start + EPS)
    return found


def roll_granularities(d):
    mask = d.mask.astype(np.float64)
    log_ratio, diff = d.gap(), np.exp(d.old) - np.exp(d.rollout)
    wide = np.ones_like(log_ratio)
    ratio = {
        "token": np.exp(log_ratio),
        "geometric": np.exp(roll_masked_mean(log_ratio, mask))[:, None] * wide,
        "sequence": np.exp((log_ratio * mask).sum(axis=1))[:, None] * wide,
        "segment": np.exp(roll_segments(log_ratio, d.mask)),
    }
    difference = {
        "token": diff,
        "geometric": roll_masked_mean(diff, mask)[:, None] * wide,
        "sequence": (diff * mask).sum(axis=1)[:, None] * wide,
        "segment": roll_segments(diff, d.mask),
    }
    return ratio, difference


def roll(d, is_weight=None, filters=()):
    """Restate compute_train_infer_correction without padding in the token means."""
    mask, valid, tokens = d.mask.astype(np.float64), d.mask.any(axis=1), d.mask.sum()
    kept, found = np.ones_like(d.mask), {}
    measures = dict(zip(("ratio", "diff"), roll_granularities(d), strict=True))
    for measure, by in measures.items():
        for name, x in by.items():
            rows = roll_masked_mean(np.where(d.mask, x, 0.0), mask)
            found[f"actor/train_infer_{measure}_{name}_mean@sum"] = rows[valid].sum() / (valid.sum() + EPS)
    if is_weight is not None:
        ratio = measures["ratio"][is_weight.get("weight_type", "token")]
        beyond = ratio > is_weight.get("upper_bound", 1.2)
        found["actor/is_weight_clipfrac@sum"] = beyond[d.mask].sum() / tokens
    for one in filters:
        name = one.get("agg_type", "token")
        for measure, on, limit in (("ratio", True, (0.8, 1.2)), ("diff", False, (-0.2, 0.2))):
            if one.get(f"{measure}_enabled", on):
                low, high = (
                    one.get(f"{measure}_{end}", x) for end, x in zip(("low", "high"), limit, strict=True)
                )
                passed = within(measures[measure][name], low, high)
                found[f"actor/train_infer_{name}_{measure}_mask_mean@sum"] = passed[d.mask].sum() / tokens
                kept = kept & passed
    if filters:
        found["actor/train_infer_final_mask_mean"] = (mask * kept).sum() / (mask.sum() + EPS)
    return found


# ---------------------------------------------------------------- open-instruct


def drop_masks(x, mask, lower, upper):
    none = np.zeros_like(mask)
    return (x < lower) & mask if lower > 0 else none, (x > upper) & mask if upper > 0 else none


def open_instruct(
    d,
    rho_clamp_upper_bound=2.0,
    rho_clamp_lower_bound=0.0,
    rho_mask_lower_bound=0.0,
    rho_mask_upper_bound=0.0,
    rho_mask_sequence_level=False,
    rho_mask_tv_divergence=False,
):
    """Restate compute_rho_correction row by row, each a sample; then weighted by the rows' token counts."""
    keys = ("rho_weight", "rho_clipfrac", "rho_drop_frac", "rho_drop_low_frac", "rho_drop_high_frac", "ratio")
    stats, counts = {f"val/{key}": [] for key in keys}, []
    lower, upper, cap = rho_mask_lower_bound, rho_mask_upper_bound, rho_clamp_upper_bound
    for o, r, c, a, m in zip(d.old, d.rollout, d.current, d.advantages, d.mask, strict=True):
        if not m.any():
            continue
        diff = np.where(m, np.clip(o - r, -10.0, 10.0), 0.0)
        rho = np.exp(diff)
        effective = np.full_like(rho, np.exp(diff[m].mean())) if rho_mask_sequence_level else rho
        if rho_mask_tv_divergence:
            distance = np.full_like(rho, np.abs(rho - 1.0)[m].mean())
            low, high = (x & (np.sign(diff) * a > 0) for x in drop_masks(distance, m, lower, upper))
        else:
            low, high = drop_masks(effective, m, lower, upper)
        clamped = np.minimum(effective, cap) if cap > 0 else effective
        clamped = np.maximum(clamped, rho_clamp_lower_bound)
        weights = np.where(m & ~low & ~high, clamped, 0.0)
        values = (weights, clamped != effective, low | high, low, high, np.exp(c - o))
        for key, value in zip(keys, values, strict=True):
            stats[f"val/{key}"].append(value[m].mean())
        counts.append(m.sum())
    share = np.array(counts) / sum(counts)
    found = {key: (np.array(values) * share).sum() for key, values in stats.items()}
    found["val/ratio_var"] = (share * (np.array(stats["val/ratio"]) - found["val/ratio"]) ** 2).sum()
    return found | open_instruct_debug(d.current[d.mask], d.rollout[d.mask])


def open_instruct_debug(local, rollout):
    x = np.abs(local - rollout)
    return {
        "debug/vllm_vs_local_logprob_diff_mean": x.mean(),
        "debug/vllm_vs_local_logprob_diff_max": x.max(),
        "debug/vllm_vs_local_logprob_diff_std": x.std(ddof=1) if len(x) > 1 else 0.0,
        "debug/vllm_local_reverse_kl": (np.exp(rollout) * (rollout - local)).mean(),
    }
