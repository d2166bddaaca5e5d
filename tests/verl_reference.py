"""Slow reference of verl's helper on padded float64 arrays [B, L], independent of the package.

Four generations: `mismatch_helper` of 2025-10 (4424616d), `rollout_corr_helper` of 2025-11 (418f964a), of
2026-01 (b178a3cd) and of 2026-03 (1dda039b), which has no golden numbers. Arguments have the names that
generation gives them. `golden/verl.json` settles the numbers where every row has a token and the dump has
many; the rest is as verl's code has it:

* Rows without a token. Per-row means are 0/(0 + 1e-8) = 0, so a weight is 0 there and a perplexity 1;
  2025 statistics and all of `rollout_is_*` run over every row, the largest and smallest product or geometric
  mean too (log 0 gives 1). The per-option numbers of 2026 run over rows with a token; its overall
  `rollout_rs_seq_masked_fraction` over every row.
* A batch of one token: every std is 0. Of one row: every std over rows is 0.
* 2025-10 reports a geometric mean's extremes as it does a product's, clamped above only.
* k3 is exp(x) - 1 - x as it stands, so its smallest values are rounding, and can be negative. The golden dump
  shows it in its 12th digit: there torch's exp has the rounding that was printed, numpy's has not.

Three things differ from verl on purpose: verl holds log thresholds and counts of rows in float32, which moves
a fraction by 1e-8, and a row only where it lies within 1e-7 of a threshold; and we take k3 without its
rounding, so that none of ours is below 0, however a dump is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

BOUND = 20.0
EPS = 1e-8


@dataclass
class Result:
    """Metrics by logged name; kept tokens and Σ of final weights per row (None: no weights)."""

    metrics: dict[str, float]
    kept: np.ndarray
    weight_sum: np.ndarray | None


def exp(x):
    """Compute e^x as torch rounds it."""
    return torch.exp(torch.from_numpy(x)).numpy()


def masked_sum(x, mask, axis=None):
    return np.where(mask, x, 0.0).sum(axis=axis)


def masked_mean(x, mask, axis=None):
    return masked_sum(x, mask, axis) / (mask.sum(axis=axis) + EPS)


def row_std(x):
    return float(np.std(x, ddof=1)) if len(x) > 1 else 0.0


def token_std(x, mask, low, high):
    if mask.sum() <= 1:
        return 0.0
    x = np.clip(x, low, high)
    mean = masked_mean(x, mask)
    return math.sqrt(max(masked_mean(x * x, mask) - mean * mean, 0.0))


def weights_of(delta, mask, level):
    """Return weights [B, L] after the ±20 clamp, and the log-ratio [B, 1] or [B, L] before it."""
    if level == "token":
        log = delta
    elif level == "sequence":
        log = masked_sum(delta, mask, -1)[:, None]
    else:
        log = masked_mean(delta, mask, -1)[:, None]
    return np.broadcast_to(np.exp(np.clip(log, -BOUND, BOUND)), delta.shape), log


def ratio_metrics(stem, weights, log, mask, low, high, *, extremes_in_log, fractions_over_rows):
    """Describe weights, or the ratio that 2025 rejects by: `rollout_is_*`, `rollout_rs_*`."""
    found = {"mean": masked_mean(weights, mask)}
    if extremes_in_log:
        found["max"], found["min"] = math.exp(min(log.max(), BOUND)), math.exp(log.min())
    else:
        found["max"], found["min"] = weights[mask].max(), weights[mask].min()
    if fractions_over_rows:
        found["ratio_fraction_high"] = (log > math.log(high)).mean()
        found["ratio_fraction_low"] = (log < math.log(low)).mean()
    else:
        found["ratio_fraction_high"] = masked_mean(weights > high, mask)
        found["ratio_fraction_low"] = masked_mean(weights < low, mask)
    found["std"] = token_std(weights, mask, low, high)
    clamped = np.clip(weights, low, high)
    found["eff_sample_size"] = 1 / masked_mean(np.square(clamped / (masked_mean(clamped, mask) + EPS)), mask)
    rows = masked_mean(weights, mask, -1)
    found |= {
        "seq_mean": rows.mean(),
        "seq_std": row_std(rows),
        "seq_max": rows.max(),
        "seq_min": rows.min(),
        "seq_max_deviation": np.abs(rows - 1).max(),
        "seq_fraction_high": (rows > high).mean(),
        "seq_fraction_low": (rows < low).mean(),
    }
    return {f"{stem}_{name}": value for name, value in found.items()}


def gap_metrics(train, rollout, mask, *, chi2, gap=""):
    delta = train - rollout
    t, r = masked_mean(train, mask, -1), masked_mean(rollout, mask, -1)
    d = r - t
    found = {
        "training_ppl": np.exp(-t).mean(),
        "training_log_ppl": (-t).mean(),
        "kl": masked_mean(-delta, mask),
        "k3_kl": masked_mean(exp(delta) - delta - 1, mask),
        "rollout_ppl": np.exp(-r).mean(),
        "rollout_log_ppl": (-r).mean(),
        "log_ppl_diff": d.mean(),
        "log_ppl_abs_diff": np.abs(d).mean(),
        "log_ppl_diff_max": d.max(),
        "log_ppl_diff_min": d.min(),
        "ppl_ratio": np.exp(d).mean(),
    }
    if chi2:
        safe = np.exp(np.clip(delta, -BOUND, BOUND))
        found["chi2_token"] = masked_mean(safe * safe, mask) - 1
        found["chi2_seq"] = np.exp(2 * np.clip(masked_sum(delta, mask, -1), -BOUND, BOUND)).mean() - 1
    return {gap + name: value for name, value in found.items()}


def veto_of(delta, mask, threshold):
    """Return the rows that the veto keeps, and its two metrics."""
    hits = (delta < math.log(threshold)) & mask if threshold is not None else np.zeros_like(mask)
    rows = hits.any(-1)
    return ~rows, {
        "rollout_is_veto_fraction": rows.mean(),
        "rollout_is_catastrophic_token_fraction": masked_mean(hits, mask),
    }


def band_of(stem, weights, mask, level, low, high):
    """Return the tokens that a ratio band of 2025 keeps, and its two metrics."""
    inside = (weights >= low) & (weights <= high)
    rows = (~inside & mask).any(-1) if level == "token" else ~inside[:, 0]
    return inside, {
        f"{stem}_masked_fraction": masked_mean(~inside, mask),
        f"{stem}_seq_masked_fraction": rows.mean(),
    }


def result(prefix, metrics, mask, keep, weights):
    return Result(
        {prefix + name: float(value) for name, value in metrics.items()},
        (mask & keep).sum(-1),
        None if weights is None else masked_sum(weights, mask, -1),
    )


def verl_2025_10(
    train,
    rollout,
    mask,
    *,
    rollout_is_level,
    rollout_is_mode,
    rollout_is_threshold,
    rollout_is_threshold_lower=None,
    rollout_is_veto_threshold=None,
):
    delta, high = train - rollout, rollout_is_threshold
    low = 1 / high if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    weights, log = weights_of(delta, mask, rollout_is_level)
    rows, metrics = veto_of(delta, mask, rollout_is_veto_threshold)
    metrics |= ratio_metrics(
        "rollout_is",
        weights,
        log,
        mask,
        low,
        high,
        extremes_in_log=rollout_is_level != "token",
        fractions_over_rows=rollout_is_level == "sequence",
    )
    keep = np.broadcast_to(rows[:, None], mask.shape)
    if rollout_is_mode == "truncate":
        weights = np.minimum(weights, high)
    else:
        inside, found = band_of("rollout_is", weights, mask, rollout_is_level, low, high)
        metrics, keep = metrics | found, keep & inside
    metrics |= gap_metrics(train, rollout, mask, chi2=False, gap="mismatch_")
    return result("mismatch/", metrics, mask, keep, weights)


def normalised(weights, mask, sequence, metrics):
    """Divide weights by their mean over tokens, or over rows with a token; the mean is logged."""
    rows = masked_mean(weights, mask, -1)[mask.any(-1)]
    mean = rows.mean() if sequence else masked_mean(weights, mask)
    metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
    return weights / metrics["rollout_is_batch_norm_factor"]


def truncated(delta, mask, level, threshold, normalize):
    """Return final weights and `rollout_is_*` of 2025-11 and 2026-01."""
    raw, log = weights_of(delta, mask, level)
    sequence = level == "sequence"
    metrics = ratio_metrics(
        "rollout_is",
        raw,
        log,
        mask,
        1 / threshold,
        threshold,
        extremes_in_log=sequence,
        fractions_over_rows=sequence,
    )
    weights = np.minimum(raw, threshold)
    return normalised(weights, mask, sequence, metrics) if normalize else weights, metrics


def verl_2025_11(
    train,
    rollout,
    mask,
    *,
    rollout_is=None,
    rollout_is_threshold=2.0,
    rollout_rs=None,
    rollout_rs_threshold=2.0,
    rollout_rs_threshold_lower=None,
    rollout_token_veto_threshold=None,
    rollout_is_batch_normalize=False,
):
    delta, weights, metrics = train - rollout, None, {}
    if rollout_is:
        weights, metrics = truncated(
            delta, mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
    rows, found = veto_of(delta, mask, rollout_token_veto_threshold)
    metrics |= found
    keep = np.broadcast_to(rows[:, None], mask.shape)
    if rollout_rs:
        high = rollout_rs_threshold
        low = 1 / high if rollout_rs_threshold_lower is None else rollout_rs_threshold_lower
        ratio, log = weights_of(delta, mask, rollout_rs)
        over_rows = rollout_rs != "token"
        metrics |= ratio_metrics(
            "rollout_rs",
            ratio,
            log,
            mask,
            low,
            high,
            extremes_in_log=over_rows,
            fractions_over_rows=over_rows,
        )
        inside, found = band_of("rollout_rs", ratio, mask, rollout_rs, low, high)
        metrics, keep = metrics | found, keep & inside
    metrics |= gap_metrics(train, rollout, mask, chi2=True)
    return result("rollout_corr/", metrics, mask, keep, weights)


def option_limits(option, spec):
    """Return (lower, upper) of one option; for k1 in nats."""
    if not option.endswith("k1"):
        return 0.0, float(spec)
    low, _, high = str(spec).partition("_")
    if not high:
        low, high = 1 / float(low), low
    return math.log(float(low)), math.log(float(high))


def option_metrics(option, token, mask, low, high):
    """Return the tokens that one option of 2026 keeps, and its metrics."""
    stem, valid, two_sided = f"rollout_rs_{option}", mask.any(-1), option.endswith("k1")
    level = option.split("_")[1] if option.startswith("seq_") else "token"
    if level == "token":
        rows, x = masked_mean(token, mask, -1), token
    else:
        biggest = np.where(mask, token, -np.inf).max(-1)
        rows = {
            "sum": masked_sum(token, mask, -1),
            "mean": masked_mean(token, mask, -1),
            "max": np.where(valid, biggest, 0.0),
        }[level]
        x = np.broadcast_to(rows[:, None], mask.shape)
    keep = (x <= high) & ((x >= low) if two_sided else True)
    rows = rows[valid]
    seen = x[mask] if level == "token" else rows
    lost = (~keep & mask).any(-1)[valid]
    found = {
        "mean": masked_mean(x, mask),
        "max": seen.max(),
        "min": seen.min(),
        "fraction_high": (seen > high).mean(),
        "fraction_low": (seen < low).mean() if two_sided else 0.0,
        "std": token_std(x, mask, low, high),
        "seq_mean": rows.mean(),
        "seq_std": row_std(rows),
        "seq_max": rows.max(),
        "seq_min": rows.min(),
        "seq_max_deviation": np.abs(rows).max(),
        "seq_fraction_high": (rows > high).mean(),
        "masked_fraction": masked_mean(~keep, mask),
        "seq_masked_fraction": lost.mean(),
    }
    if two_sided:
        found["seq_fraction_low"] = (rows < low).mean()
    return keep, {f"{stem}_{name}": value for name, value in found.items()}


def applied_metrics(raw, log, applied, mask, low, high, *, sequence):
    """Compute `rollout_is_*` of 2026-03, of the applied factors but for the fractions."""
    found = ratio_metrics(
        "rollout_is", raw, log, mask, low, high, extremes_in_log=sequence, fractions_over_rows=sequence
    )
    bounded = np.clip(applied, 0.0, high)
    mean = masked_mean(bounded, mask)
    spread = masked_mean(np.square(bounded / (mean + EPS)), mask)
    rows = masked_mean(applied, mask, -1)
    news = {
        "mean": masked_mean(applied, mask),
        "std": token_std(applied, mask, 0.0, high),
        "eff_sample_size": 1 / spread if spread else math.nan,  # there a ZeroDivisionError
        "seq_mean": rows.mean(),
        "seq_std": row_std(rows),
        "seq_max": rows.max(),
        "seq_min": rows.min(),
        "seq_max_deviation": np.abs(rows - 1).max(),
    }
    if not sequence:
        news |= {"max": applied[mask].max(), "min": applied[mask].min()}
    return found | {f"rollout_is_{name}": value for name, value in news.items()}


def icepop_or_truncated(delta, mask, level, threshold, normalize):
    """Return final weights and `rollout_is_*` of 2026-03; the threshold is a number or "lower_upper"."""
    raw, log = weights_of(delta, mask, level)
    low, _, high = str(threshold).rpartition("_")
    high = float(high)
    if low:
        outside = (raw < float(low)) | (raw > high)
        weights = np.where(outside, 0.0, raw)
    else:
        weights = np.minimum(raw, high)
    sequence = level == "sequence"
    metrics = applied_metrics(
        raw, log, weights, mask, float(low) if low else 1 / high, high, sequence=sequence
    )
    if low:
        metrics["rollout_is_oob_ratio"] = masked_mean(outside, mask)
    return normalised(weights, mask, sequence, metrics) if normalize else weights, metrics


def verl_2026_03(train, rollout, mask, **config):
    """Apply 2026-03: 2026-01 with IcePop's weights allowed, and metrics taken after processing."""
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    level, threshold, normalize = (config.pop(name, None) for name in names)
    found = verl_2026_01(train, rollout, mask, **config)
    if level is None:
        return found
    weights, metrics = icepop_or_truncated(train - rollout, mask, level, threshold or 2.0, normalize)
    said = {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}
    return Result(found.metrics | said, found.kept, masked_sum(weights, mask, -1))


def verl_2026_01(
    train,
    rollout,
    mask,
    *,
    rollout_is=None,
    rollout_is_threshold=2.0,
    rollout_is_batch_normalize=False,
    rollout_rs=None,
    rollout_rs_threshold=None,
):
    delta, weights, metrics = train - rollout, None, {}
    keep = np.ones_like(mask)
    if rollout_is:
        weights, metrics = truncated(
            delta, mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
    if rollout_rs:
        options, specs = rollout_rs.split(","), str(rollout_rs_threshold).split(",")
        safe = np.clip(delta, -BOUND, BOUND)
        kinds = {"k1": -safe, "k2": safe * safe / 2, "k3": exp(safe) - 1 - safe}
        for option, spec in zip(options, specs * len(options) if len(specs) == 1 else specs, strict=True):
            inside, found = option_metrics(option, kinds[option[-2:]], mask, *option_limits(option, spec))
            metrics, keep = metrics | found, keep & inside
        lost = ~keep & mask
        metrics["rollout_rs_masked_fraction"] = masked_mean(lost, mask)
        metrics["rollout_rs_seq_masked_fraction"] = lost.any(-1).mean()
    metrics |= gap_metrics(train, rollout, mask, chi2=True)
    return result("rollout_corr/", metrics, mask, keep, weights)


GENERATIONS = {
    "2025-10": verl_2025_10,
    "2025-11": verl_2025_11,
    "2026-01": verl_2026_01,
    "2026-03": verl_2026_03,
}


def padded(rows):
    """Pad lists of numbers, one per row, with zeros to [B, L]; at least one column."""
    width = max(1, *(len(row) for row in rows))
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=np.float64)


def run(generation, columns, config):
    """Run a case on a dump's columns (lists per row); `bypass`, `bypass_identity` as in golden/verl.json."""
    config = dict(config)
    numerator = "current_log_probs" if config.pop("bypass", 0) else "old_log_probs"
    numerator = "rollout_log_probs" if config.pop("bypass_identity", 0) else numerator
    mask = padded(columns["response_mask"]) > 0
    return GENERATIONS[generation](
        padded(columns[numerator]), padded(columns["rollout_log_probs"]), mask, **config
    )
