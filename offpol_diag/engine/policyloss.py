"""The policy loss under one preset: its value in four aggregations, clip fractions, ppo_kl."""

from __future__ import annotations

import numpy as np

from offpol_diag.core.intervals import Formula, mean
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns, joined

NEEDED = ("current_log_probs", "advantages")
"""Columns of a dump that a policy loss is made of."""


def columns(sums: PresetSums) -> Columns:
    """Compute the weighted loss over kept tokens, its mean per sequence, clip counts and ppo_kl."""
    batch = sums.batch
    if batch.current is None or batch.advantages is None:
        return Columns((), ())
    kept, summed = sums["kept"], sums["loss"]
    result = {
        "loss": summed,
        "loss_mean": joined(lambda loss, many: loss / np.maximum(many, 1), summed, kept),
        "loss_rows": kept.map(lambda x: (x > 0).astype(np.float64)),
        "clipped": sums["clipped"],
        "clipped_lower": sums["dual_clipped"],
        "kl": sums["kl"],
    }
    return sums.named(result)


_T, _S = "tokens", "sequences"

ROWS = (
    Formula(
        "pg_loss", "", "tokens not rejected", "Σ w L / tokens not rejected (token-mean)", mean("loss", "kept")
    ),
    Formula(
        "pg_loss_kept",
        "",
        _T,
        "Σ w L / all tokens (token-mean, rejected tokens stay)",
        mean("loss"),
    ),
    Formula(
        "pg_loss_own",
        "",
        "the preset's own denominator",
        "Σ w L / tokens not rejected, or all tokens where rejected ones stay (token-mean)",
        mean("loss", "own"),
    ),
    Formula(
        "pg_loss_seq_sum", "", _S, "Σ w L / sequences left (seq-mean-token-sum)", mean("loss", "loss_rows")
    ),
    Formula(
        "pg_loss_seq_mean",
        "",
        _S,
        "mean over sequences left of their mean w L (seq-mean-token-mean)",
        mean("loss_mean", "loss_rows"),
    ),
    Formula(
        "pg_loss_seq_norm",
        "",
        _S,
        "Σ w L / sequences left / longest response (seq-mean-token-sum-norm)",
        lambda get: get("loss") / get("loss_rows") / get("longest"),
    ),
    Formula(
        "pg_clipfrac",
        "fraction",
        "tokens not rejected",
        "share where the loss's clip decides (cispo: where it changes the weight)",
        mean("clipped", "kept"),
    ),
    Formula(
        "pg_clipfrac_lower",
        "fraction",
        "tokens not rejected",
        "share where the dual clip decides",
        mean("clipped_lower", "kept"),
    ),
    Formula(
        "ppo_kl",
        "nats",
        "tokens not rejected",
        "mean(log π_anchor − log π_θ), each bounded as the loss bounds it",
        mean("kl", "kept"),
    ),
)
