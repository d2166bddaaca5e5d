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
from offpol_diag.presets import Preset, Reject


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Weighted loss over kept tokens, its mean over the sequence's kept tokens, clip counts, ppo_kl."""
    done, kind = outcome(scene, preset), losses.kind(preset)
    loss = losses.token_loss(done.ratios, preset)
    if loss is None:
        return {}
    rules = token_rules(done, preset)
    clips = done.ratios.once(("clip sums", kind, rules), lambda: _clips(done, loss))
    kl = done.ratios.once(("kl sum", rules), lambda: _total(done, loss.kl, done.kept.tokens))
    summed = weighed_sums(done, preset)["loss"] * multipliers(done, loss.weighted)[1] * done.kept.sequences
    found = {
        "loss": summed,
        "loss_mean": summed / done.kept_tokens.clamp(min=1),
        "loss_rows": (done.kept_tokens > 0).to(torch.float64),
        **{name: values * done.kept.sequences for name, values in {**clips, "kl": kl}.items()},
    }
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def multipliers(done: Outcome, weighted: bool) -> tuple[Tensor | None, Tensor]:
    """The weights that multiply the loss: of tokens [T] or none, and of sequences [S]."""
    ones = torch.ones_like(done.kept_tokens)
    if not weighted or done.weighed is None:
        return None, ones
    final = done.weighed.final
    return (final.values, ones) if final.per == "token" else (None, final.values)


def token_rules(done: Outcome, preset: Preset) -> tuple[Reject, ...]:
    """What the mask of single tokens depends on; presets that drop whole sequences share what follows."""
    return applied(preset).reject if done.kept.tokens is not None else ()


def weighed_sums(done: Outcome, preset: Preset) -> dict[str, Tensor]:
    """Σ w·loss and Σ|w·slope| over tokens that pass the rules on tokens, [S], w of tokens only.

    Without π_θ there is no loss, and the slope is −A.
    """
    found, weights = losses.token_loss(done.ratios, preset), multipliers(done, losses.weighted(preset))[0]
    by = None if weights is None else weight_key(preset), token_rules(done, preset)
    key = "loss sums", None if found is None else losses.kind(preset), by
    return done.ratios.once(key, lambda: _weighed_sums(done, found, weights))


def _weighed_sums(done: Outcome, found: TokenLoss | None, weights: Tensor | None) -> dict[str, Tensor]:
    advantages, keep = done.ratios.batch.advantages, done.kept.tokens
    assert advantages is not None
    each = weights if keep is None or weights is None else torch.where(keep, weights, 0.0)
    terms = {"pull": advantages.abs()} if found is None else {"loss": found.loss, "pull": found.slope.abs()}
    if each is None:
        return {name: _total(done, x, keep) for name, x in terms.items()}
    return {name: _total(done, x * each, None) for name, x in terms.items()}


def _clips(done: Outcome, loss: TokenLoss) -> dict[str, Tensor]:
    keep, offsets = done.kept.tokens, done.ratios.batch.cu_seqlens
    flags = {"clipped": loss.clipped, "clipped_lower": loss.clipped_lower}
    return {
        name: segments.count(flag if keep is None else flag & keep, offsets) for name, flag in flags.items()
    }


def _total(done: Outcome, x: Tensor, keep: Tensor | None) -> Tensor:
    """Per sequence [S], over the tokens to keep."""
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
        "pg_clipfrac",
        "fraction",
        "kept tokens",
        "share where the loss's clip decides (cispo: where it changes the weight)",
        mean("clipped", "kept"),
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
