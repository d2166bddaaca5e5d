"""The policy loss under one preset: its value in four aggregations, clip fractions, ppo_kl."""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import losses, segments
from offpol_diag.correction import weight_key
from offpol_diag.losses import TokenLoss
from offpol_diag.metrics.formula import Formula, mean
from offpol_diag.metrics.outcome import Outcome, token_rules
from offpol_diag.metrics.pieces import Pieces, pieces
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Weighted loss over kept tokens, its mean over the sequence's kept tokens, clip counts, ppo_kl."""
    done = pieces(scene, preset)
    if not losses.known(scene.batch, preset):
        return {}
    sums = done.total(_counts)
    summed = done.total(weighed_sums)["loss"] * sequence_weights(done, preset) * done.sequences
    found = {
        "loss": summed,
        "loss_mean": summed / done.kept_tokens.clamp(min=1),
        "loss_rows": (done.kept_tokens > 0).to(torch.float64),
        **{name: values * done.sequences for name, values in sums.items()},
    }
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def sequence_weights(done: Pieces, preset: Preset) -> Tensor | float:
    """What multiplies the loss of a whole sequence, [S]."""
    weights = done.per_sequence
    return weights if weights is not None and losses.weighted(preset) else 1.0


def token_weights(done: Outcome, preset: Preset) -> Tensor | None:
    """What multiplies the loss of each token, [T]."""
    if done.weighed is None or done.weighed.final.per != "token" or not losses.weighted(preset):
        return None
    return done.weighed.final.values


def weighed_sums(done: Outcome, preset: Preset) -> dict[str, Tensor]:
    """Σ w·loss and Σ|w·slope| over tokens that pass the rules on tokens, [S], w of tokens only.

    Without π_θ there is no loss, and the slope is −A.
    """
    found, weights = losses.token_loss(done.ratios, preset), token_weights(done, preset)
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


def _counts(done: Outcome, preset: Preset) -> dict[str, Tensor]:
    """Tokens where the clip decides, where the dual clip does, and Σ(log π_anchor − log π_θ)."""
    loss, rules = losses.token_loss(done.ratios, preset), token_rules(done, preset)
    assert loss is not None
    clips = done.ratios.once(("clip sums", losses.kind(preset), rules), lambda: _clips(done, loss))
    kl = done.ratios.once(("kl sum", rules), lambda: _total(done, loss.kl, done.kept.tokens))
    return clips | {"kl": kl}


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
