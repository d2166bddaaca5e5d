"""Reference for the logged metrics of prime-rl, SkyRL, ROLL and open-instruct, on padded arrays.

The restatements work the way the trainers do: on rows padded to one width, with a mask, row by row where the
trainer goes row by row. They share nothing with the package; options carry the trainer's own names.
"""

import functools
import math

import numpy as np

EPS = 1e-8
COLUMNS = {
    "R": "rollout_log_probs",
    "O": "old_log_probs",
    "C": "current_log_probs",
    "M": "response_mask",
    "A": "advantages",
    "E": "entropy",
}


class Padded:
    """A dump's columns as arrays [rows, longest], with zeros where a row has ended."""

    def __init__(self, columns):
        width = max(map(len, columns["rollout_log_probs"]))
        for short, name in COLUMNS.items():
            rows = [np.pad(np.asarray(row, np.float64), (0, width - len(row))) for row in columns[name]]
            setattr(self, short, np.array(rows))
        self.M = self.M > 0


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
    kl = kl_of(d.C - d.R)[d.M]
    std = kl.std(ddof=1) if len(kl) > 1 else math.nan
    return {
        "mismatch_kl/all/mean": kl.mean(),
        "mismatch_kl/all/std": std,
        "mismatch_kl/all/max": kl.max(),
        "kl_ent_ratio/mean": kl.mean() / d.E[d.M].mean(),
    }


def prime_default(d, dppo_mask_low=0.2, dppo_mask_high=0.2):
    rows = []
    for c, r, a, m in zip(d.C, d.R, d.A, d.M, strict=True):
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
    for c, r, m in zip(d.C, d.R, d.M, strict=True):
        masked, kl = np.abs(np.exp(c) - np.exp(r)) > ipo_threshold, kl_of(c - r)
        rows.append(
            {
                "masked_mismatch_kl": safe_mean(kl, m & masked),
                "unmasked_mismatch_kl": safe_mean(kl, m & ~masked),
                "is_masked": safe_mean(masked, m),
            }
        )
    return prime_step(d) | mean_and_max(rows)


def prime_v02(d):
    token_low, token_high, geo_low, geo_high, sequence_low, sequence_high = 0.125, 8.0, 0.1, 10.0, 0.0, 100.0
    stacked, tokens = [], {"is_masked": [], "is_masked_low": [], "is_masked_high": []}
    for c, r, m in zip(d.C, d.R, d.M, strict=True):
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
        "kl_ent_ratio/mean": kl.mean() / d.E[d.M].mean(),
    }


# ---------------------------------------------------------------- SkyRL


def safe_exp(x):
    return np.exp(np.clip(x, -20.0, 20.0))


def masked_mean(x, mask):
    return (x * mask).sum() / max(mask.sum(), 1.0)


def skyrl_ppo_clip(d, eps=0.2):
    ratio = safe_exp(d.C - d.O)
    plain, clipped = ratio * d.A, np.clip(ratio, 1 - eps, 1 + eps) * d.A
    return masked_mean(-clipped > -plain, d.M)


def skyrl_distances(log_ratio, mask, stem, ddof, smallest=None):
    x = np.abs(log_ratio)[mask]
    std = x.std(ddof=ddof) if len(x) > ddof else math.nan
    smallest = x.min() if smallest is None else smallest
    found = {"mean": x.mean(), "max": x.max(), "min": smallest, "std": std}
    return {f"policy/{stem}_abs_diff_{name}": value for name, value in found.items()}


def skyrl_sequences(x, low, high, stem):
    over, under = x > high, x < low
    return over | under, {
        f"{stem}_masked_ratio": (over | under).mean(),
        f"{stem}_over_high_ratio": over.mean(),
        f"{stem}_under_low_ratio": under.mean(),
    }


def skyrl(d, tis=None, cap=None, sequence=None, low=None, high=None, outlier=None, token=None, clips=True):
    """compute_off_policy_correction: each part sees the mask that the parts before it left."""
    mask, log_ratio = d.M.astype(np.float64), d.O - d.R
    ratio = safe_exp(log_ratio)
    padded = ratio * mask
    found = {
        "is_ratio_mean": masked_mean(ratio, mask),
        "is_ratio_std": padded.std(ddof=1) if padded.size > 1 else math.nan,
        "is_ratio_max": padded.max(),
        "is_ratio_min": padded.min(),
    }
    if outlier:
        over, under = (ratio > outlier[1]) & (mask > 0), (ratio < outlier[0]) & (mask > 0)
        gone = (over | under).any(axis=1)
        found |= {
            "outlier_seq_masked_ratio": gone.mean(),
            "outlier_seq_over_high_ratio": over.any(axis=1).mean(),
            "outlier_seq_under_low_ratio": under.any(axis=1).mean(),
        }
        mask = mask * ~gone[:, None]
    if token:
        inside = (ratio >= token[0]) & (ratio <= token[1])
        found["token_mask_ratio"] = (~inside & (mask > 0)).sum() / max((mask > 0).sum(), 1)
        mask = mask * inside
    if tis == "token":
        found["tis_token_clip_high_ratio"] = ((ratio > cap) & (mask > 0)).sum() / max((mask > 0).sum(), 1)
    if tis == "sequence":
        found["tis_seq_clip_high_ratio"] = (safe_exp((log_ratio * mask).sum(axis=1)) > cap).mean()
    if sequence:
        total = (log_ratio * mask).sum(axis=1)
        x = total / np.maximum(mask.sum(axis=1), 1.0) if sequence == "geo" else total
        found |= skyrl_sequences(safe_exp(x), low, high, f"{sequence}_sequence_mask")[1]
    found["clip_ratio"] = skyrl_ppo_clip(d) if clips else 0.0
    return found | skyrl_distances(log_ratio, d.M, "rollout_train_logprobs", 1)


def skyrl_anchored(d, clipped, more=lambda ratio, mask: {}):
    ratio = safe_exp(d.C - d.R)
    found = {"clip_ratio": masked_mean(clipped(d, ratio), d.M), **more(ratio, d.M)}
    smallest = (np.abs(d.C - d.R) * d.M).min()  # of the padded batch, what is masked as 0
    return found | skyrl_distances(d.C - d.R, d.M, "minibatch_rollout_logprobs", 0, smallest)


def skyrl_rollout_is(d, ratio):
    return ~((ratio > 0.8) & (ratio < 1.2))


def skyrl_binary_tv(d, ratio):
    diff = np.exp(d.C) - np.exp(d.R)
    return ((d.A > 0) & (diff > 0.2)) | ((d.A < 0) & (-diff > 0.2))


def skyrl_binary_kl(d, ratio):
    now, then = np.exp(d.C), np.exp(d.R)
    kl = then * (d.R - d.C) + (1 - then) * np.log((1 - then + 1e-8) / (1 - now + 1e-8))
    return ((d.A > 0) & (now - then > 0) & (kl > 0.2)) | ((d.A < 0) & (now - then < 0) & (kl > 0.2))


def skyrl_cispo(ratio, mask):
    active = ratio[mask]
    return {
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
    """Each contiguous run of the mask filled with its mean."""
    found = np.zeros_like(x)
    for row, (values, flags) in enumerate(zip(x, mask, strict=True)):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(int), [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found[row, start:end] = values[start:end].sum() / (end - start + EPS)
    return found


def roll_granularities(d):
    mask = d.M.astype(np.float64)
    log_ratio, diff = d.O - d.R, np.exp(d.O) - np.exp(d.R)
    wide = np.ones_like(log_ratio)
    ratio = {
        "token": np.exp(log_ratio),
        "geometric": np.exp(roll_masked_mean(log_ratio, mask))[:, None] * wide,
        "sequence": np.exp((log_ratio * mask).sum(axis=1))[:, None] * wide,
        "segment": np.exp(roll_segments(log_ratio, d.M)),
    }
    difference = {
        "token": diff,
        "geometric": roll_masked_mean(diff, mask)[:, None] * wide,
        "sequence": (diff * mask).sum(axis=1)[:, None] * wide,
        "segment": roll_segments(diff, d.M),
    }
    return ratio, difference


def roll(d, is_weight=None, upper_bound=None, filters=()):
    """compute_train_infer_correction without padding in the token means."""
    mask, valid = d.M.astype(np.float64), d.M.any(axis=1)
    tokens, kept = d.M.sum(), np.ones_like(d.M)
    found = {}
    measures = dict(zip(("ratio", "diff"), roll_granularities(d), strict=True))
    for measure, by in measures.items():
        for name, x in by.items():
            rows = roll_masked_mean(np.where(d.M, x, 0.0), mask)
            found[f"actor/train_infer_{measure}_{name}_mean@sum"] = rows[valid].sum() / (valid.sum() + EPS)
    if is_weight:
        found["actor/is_weight_clipfrac@sum"] = (measures["ratio"][is_weight] > upper_bound)[
            d.M
        ].sum() / tokens
    for measure, name, low, high in filters:
        x = measures[measure][name]
        passed = (x >= low) & (x <= high)
        found[f"actor/train_infer_{name}_{measure}_mask_mean@sum"] = passed[d.M].sum() / tokens
        kept = kept & passed
    if filters:
        found["actor/train_infer_final_mask_mean"] = (mask * kept).sum() / (mask.sum() + EPS)
    return found


# ---------------------------------------------------------------- open-instruct


def drop_masks(x, mask, lower, upper):
    none = np.zeros_like(mask)
    return (x < lower) & mask if lower > 0 else none, (x > upper) & mask if upper > 0 else none


def open_instruct(d, clamp_upper=0.0, clamp_lower=0.0, lower=0.0, upper=0.0, sequence=False, tv=False):
    """compute_rho_correction row by row, each row a sample; then weighted by the rows' token counts."""
    keys = ("rho_weight", "rho_clipfrac", "rho_drop_frac", "rho_drop_low_frac", "rho_drop_high_frac", "ratio")
    stats, counts = {f"val/{key}": [] for key in keys}, []
    for o, r, c, a, m in zip(d.O, d.R, d.C, d.A, d.M, strict=True):
        if not m.any():
            continue
        diff = np.where(m, np.clip(o - r, -10.0, 10.0), 0.0)
        rho = np.exp(diff)
        effective = np.full_like(rho, np.exp(diff[m].mean())) if sequence else rho
        if tv:
            distance = np.full_like(rho, np.abs(rho - 1.0)[m].mean())
            low, high = (x & (np.sign(diff) * a > 0) for x in drop_masks(distance, m, lower, upper))
        else:
            low, high = drop_masks(effective, m, lower, upper)
        clamped = np.minimum(effective, clamp_upper) if clamp_upper > 0 else effective
        clamped = np.maximum(clamped, clamp_lower)
        weights = np.where(m & ~low & ~high, clamped, 0.0)
        values = (weights, clamped != effective, low | high, low, high, np.exp(c - o))
        for key, value in zip(keys, values, strict=True):
            stats[f"val/{key}"].append(value[m].mean())
        counts.append(m.sum())
    share = np.array(counts) / sum(counts)
    found = {key: (np.array(values) * share).sum() for key, values in stats.items()}
    found["val/ratio_var"] = (share * (np.array(stats["val/ratio"]) - found["val/ratio"]) ** 2).sum()
    return found | open_instruct_debug(d.C[d.M], d.R[d.M])


def open_instruct_debug(local, rollout):
    x = np.abs(local - rollout)
    return {
        "debug/vllm_vs_local_logprob_diff_mean": x.mean(),
        "debug/vllm_vs_local_logprob_diff_max": x.max(),
        "debug/vllm_vs_local_logprob_diff_std": x.std(ddof=1) if len(x) > 1 else 0.0,
        "debug/vllm_local_reverse_kl": (np.exp(rollout) * (rollout - local)).mean(),
    }


# ---------------------------------------------------------------- what each row is in its trainer's words


def anchored(clipped, more=None):
    return functools.partial(skyrl_anchored, clipped=clipped, **({"more": more} if more else {}))


WORDS = {
    "prime_rl_dppo": prime_default,
    "prime_rl_ipo": prime_ipo,
    "prime_rl_v02_token": prime_v02,
    "prime_rl_v02_sequence": prime_v02,
    "skyrl_tis_token": functools.partial(skyrl, tis="token", cap=2.0),
    "skyrl_tis_sequence": functools.partial(skyrl, tis="sequence", cap=5.0),
    "skyrl_geometric_mask": functools.partial(skyrl, sequence="geo", low=0.99, high=1.01),
    "skyrl_product_mask": functools.partial(skyrl, sequence="product", low=0.5, high=2.0),
    "skyrl_outlier": functools.partial(skyrl, tis="token", cap=2.0, outlier=(1e-4, 100.0)),
    "skyrl_token_mask": functools.partial(skyrl, tis="token", cap=2.0, token=(0.5, 5.0)),
    "skyrl_all": functools.partial(
        skyrl,
        tis="sequence",
        cap=5.0,
        sequence="geo",
        low=0.99,
        high=1.01,
        outlier=(1e-4, 100.0),
        token=(0.5, 5.0),
    ),
    "skyrl_sapo": functools.partial(skyrl, tis="token", cap=2.0, clips=False),
    "skyrl_rollout_is": anchored(skyrl_rollout_is),
    "skyrl_dppo_tv": anchored(skyrl_binary_tv),
    "skyrl_dppo_kl": anchored(skyrl_binary_kl),
    "skyrl_cispo_rollout": anchored(lambda d, ratio: (ratio < 0.0) | (ratio > 5.0), skyrl_cispo),
    "roll_is_token": functools.partial(roll, is_weight="token", upper_bound=1.2),
    "roll_is_segment": functools.partial(roll, is_weight="segment", upper_bound=1.2),
    "roll_is_geometric": functools.partial(roll, is_weight="geometric", upper_bound=1.2),
    "roll_is_sequence": functools.partial(roll, is_weight="sequence", upper_bound=1.2),
    "roll_filter_token": functools.partial(roll, filters=[("ratio", "token", 0.8, 1.2)]),
    "roll_filter_segment": functools.partial(roll, filters=[("ratio", "segment", 0.8, 1.2)]),
    "roll_filter_geometric": functools.partial(roll, filters=[("ratio", "geometric", 0.999, 1.002)]),
    "roll_filter_sequence": functools.partial(roll, filters=[("ratio", "sequence", 0.8, 1.2)]),
    "roll_diff_token": functools.partial(roll, filters=[("diff", "token", -0.2, 0.2)]),
    "roll_diff_segment": functools.partial(roll, filters=[("diff", "segment", -0.1, 0.1)]),
    "roll_diff_geometric": functools.partial(roll, filters=[("diff", "geometric", -0.2, 0.2)]),
    "roll_diff_sequence": functools.partial(roll, filters=[("diff", "sequence", -0.2, 0.2)]),
    "roll_turn": functools.partial(
        roll,
        is_weight="segment",
        upper_bound=1.2,
        filters=[("ratio", "segment", 0.8, 1.05), ("diff", "segment", -0.1, 0.1)],
    ),
    "roll_icepop": functools.partial(
        roll, is_weight="token", upper_bound=2.0, filters=[("ratio", "token", 0.5, 2.0)]
    ),
    "open_instruct_rho_clamp": functools.partial(open_instruct, clamp_upper=2.0),
    "open_instruct_rho_clamp_two_sided": functools.partial(open_instruct, clamp_lower=0.5, clamp_upper=2.0),
    "open_instruct_rho_mask": functools.partial(open_instruct, lower=0.5, upper=5.0),
    "open_instruct_rho_sequence": functools.partial(open_instruct, lower=0.999, upper=1.001, sequence=True),
    "open_instruct_rho_tv": functools.partial(open_instruct, clamp_upper=2.0, upper=1.1, tv=True),
}
