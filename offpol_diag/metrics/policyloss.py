"""The policy loss under one preset: its value in four aggregations, clip fractions, ppo_kl."""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import losses, segments
from offpol_diag.correction import weight_key
from offpol_diag.losses import TokenLoss
from offpol_diag.metrics.formula import Formula, mean
from offpol_diag.metrics.outcome import Outcome, applied, outcome
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Weighted loss over kept tokens, its mean over the sequence's kept tokens, clip counts, ppo_kl."""
    done, kind = outcome(scene, preset), losses.kind(preset)
    loss = losses.token_loss(done.ratios, preset)
    if loss is None:
        return {}
    per_token, per_sequence = _weights(done, loss.weighted)
    rules = applied(preset).reject if done.kept.tokens is not None else ()
    by = None if per_token is None else weight_key(preset)
    summed = done.ratios.once(("loss sum", kind, by, rules), lambda: _value(done, loss, per_token))
    clips = done.ratios.once(("clip sums", kind, rules), lambda: _clips(done, loss))
    kl = done.ratios.once(("kl sum", preset.policy, rules), lambda: _total(done, loss.kl))
    summed = summed * per_sequence * done.kept.sequences
    found = {
        "loss": summed,
        "loss_mean": summed / done.kept_tokens.clamp(min=1),
        "loss_rows": (done.kept_tokens > 0).to(torch.float64),
        **{name: values * done.kept.sequences for name, values in {**clips, "kl": kl}.items()},
    }
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def _weights(done: Outcome, weighted: bool) -> tuple[Tensor | None, Tensor]:
    """The weights that multiply the loss: of tokens [T] or none, and of sequences [S]."""
    ones = torch.ones_like(done.kept_tokens)
    if not weighted or done.weighed is None:
        return None, ones
    final = done.weighed.final
    return (final.values, ones) if final.per == "token" else (None, final.values)


def _value(done: Outcome, loss: TokenLoss, weights: Tensor | None) -> Tensor:
    return _total(done, loss.loss if weights is None else loss.loss * weights)


def _clips(done: Outcome, loss: TokenLoss) -> dict[str, Tensor]:
    flags = {"clipped": loss.clipped, "clipped_lower": loss.clipped_lower}
    return {name: _total(done, flag.to(torch.float64)) for name, flag in flags.items()}


def _total(done: Outcome, x: Tensor) -> Tensor:
    """Per sequence [S], over tokens that pass the rules on tokens; many presets share it."""
    keep = done.kept.tokens
    return segments.total(x if keep is None else torch.where(keep, x, 0.0), done.ratios.batch.cu_seqlens)


_T, _S = "tokens", "sequences"

ROWS = (
    Formula("pg_loss", "", "kept tokens", "Σ w L / kept tokens (token-mean)", mean("loss", "kept")),
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
        "Σ w L / kept tokens, or all tokens where rejected ones stay (token-mean)",
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
