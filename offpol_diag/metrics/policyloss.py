"""The policy loss under one preset: its value in four aggregations, clip fractions, ppo_kl."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offpol_diag import losses, segments
from offpol_diag.metrics.formula import Formula, Lookup, mean
from offpol_diag.metrics.outcome import norm, outcome, scale, token_mask, token_weights
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Weighted loss over kept tokens, its mean over the sequence's kept tokens, clip counts, ppo_kl.

    Normalised presets scale their loss when it is read, like their weights: by `loss_norm_units` over
    `loss_norm`.
    """
    done = outcome(scene, preset)
    key = ("loss", preset.loss, preset.policy)
    loss = done.ratios.once(key, lambda: losses.token_loss(scene.batch, preset))
    if loss is None:
        return {}
    by = norm(done, preset) if loss.weighted else {}
    weights = token_weights(done) if loss.weighted else None
    mask = token_mask(done)
    offsets = scene.batch.cu_seqlens
    summed = segments.total((loss.loss if weights is None else loss.loss * weights) * mask, offsets)
    found = {
        **{f"loss_{name}": values for name, values in by.items()},
        "loss": summed,
        "loss_mean": summed / done.kept_tokens.clamp(min=1),
        "loss_rows": (done.kept_tokens > 0).to(torch.float64),
        "clipped": segments.total(loss.clipped * mask, offsets),
        "clipped_lower": segments.total(loss.clipped_lower * mask, offsets),
        "kl": segments.total(loss.kl * mask, offsets),
    }
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def _loss(column: str, per: str) -> Callable[[Lookup], Tensor]:
    return lambda get: get(column) / get(per) * scale(get, "loss_norm")


_T, _S = "tokens", "sequences"

ROWS = (
    Formula("pg_loss", "", "kept tokens", "Σ w L / kept tokens (token-mean)", _loss("loss", "kept")),
    Formula(
        "pg_loss_kept",
        "",
        _T,
        "Σ w L / all tokens (token-mean, rejected tokens stay)",
        _loss("loss", "tokens"),
    ),
    Formula(
        "pg_loss_seq_sum", "", _S, "Σ w L / sequences left (seq-mean-token-sum)", _loss("loss", "loss_rows")
    ),
    Formula(
        "pg_loss_seq_mean",
        "",
        _S,
        "mean over sequences left of their mean w L (seq-mean-token-mean)",
        _loss("loss_mean", "loss_rows"),
    ),
    Formula(
        "pg_loss_seq_norm",
        "",
        _S,
        "Σ w L / sequences left / longest response (seq-mean-token-sum-norm)",
        lambda get: _loss("loss", "loss_rows")(get) / get("longest"),
    ),
    Formula(
        "pg_clipfrac", "fraction", "kept tokens", "share where the PPO clip decides", mean("clipped", "kept")
    ),
    Formula(
        "pg_clipfrac_lower",
        "fraction",
        "kept tokens",
        "share where the dual clip decides",
        mean("clipped_lower", "kept"),
    ),
    Formula("ppo_kl", "nats", "kept tokens", "mean(log π_anchor − log π_θ)", mean("kl", "kept")),
)
