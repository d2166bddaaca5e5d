"""The policy loss under one preset: its value in four aggregations, clip fractions, ppo_kl."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from offpol_diag.engine import losses, segments
from offpol_diag.engine.correction import weight_key
from offpol_diag.engine.formula import Formula, mean
from offpol_diag.engine.losses import TokenLoss
from offpol_diag.engine.moments import Direction
from offpol_diag.engine.outcome import (
    PER_SEQUENCE,
    Near,
    Outcome,
    Pieces,
    sign_counts,
    token_rules,
    token_weights,
)
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.rows import Columns, Inputs, Rows, Sheet, Summed, flagged, joined, left
from offpol_diag.engine.stack import Stack
from offpol_diag.presets import Preset


def columns(stack: Stack) -> Sheet:
    """Compute the weighted loss over kept tokens, its mean per sequence, clip counts and ppo_kl."""
    stack = stack.only(lambda preset: losses.known(stack.batch, preset))
    if not stack.presets:
        return stack.named({})
    sums, kept = stack.total(clip_sums), stack.kept
    summed = joined(torch.mul, stack.total(weighed_sums, weighing)["loss"], sequence_weights(stack))
    found = {
        "loss": summed,
        "loss_mean": joined(lambda loss, many: loss / many.clamp(min=1), summed, kept),
        "loss_rows": kept.map(lambda x: (x > 0).to(torch.float64)),
        **{name: joined(torch.mul, values, stack.sequences) for name, values in sums.items()},
    }
    return stack.named(found)


def sequence_weights(stack: Stack) -> Rows:
    """Return the weight on the loss of each sequence; 1 without one, 0 where it is dropped."""
    return joined(torch.mul, stack.rows(lambda item: _multiplier(item, stack.one)), stack.sequences)


def _multiplier(item: Pieces, one: Tensor) -> Tensor:
    weights = item.per_sequence if losses.weighted(item.preset) else None
    return one if weights is None else weights


def weighing(near: Near, sums: Columns) -> Columns:
    """Add up loss sums, each turn's times its weight where that multiplies the loss."""
    weighs = losses.weighted(near.preset)
    return {name: near.of_weighed(x) if weighs else near.of_passed(x) for name, x in sums.items()}


def weighs_tokens(done: Outcome, preset: Preset) -> bool:
    """Return whether tokens have weights of their own that multiply their loss."""
    weight = done.preset.weight
    return weight is not None and weight.over not in PER_SEQUENCE and losses.weighted(preset)


def pooled(done: Outcome, preset: Preset) -> bool:
    """Return whether all tokens of a sequence share the loss's ratio."""
    return losses.LOSSES[preset.loss].pooled and losses.known(done.ratios.batch, preset)


def _key_of_weighed(done: Outcome, preset: Preset) -> Hashable:
    weight = weight_key(preset) if weighs_tokens(done, preset) else None
    kind = losses.kind(preset) if losses.known(done.ratios.batch, preset) else None
    return "loss sums", kind, weight, token_rules(done, preset)


def _of_weighed(done: Outcome, preset: Preset) -> Inputs | dict[str, Tensor]:
    if pooled(done, preset):
        both, mass = losses.by_sign(done.ratios, preset), mass_sums(done, preset)
        return {
            "loss": _added(both, lambda sign, one: one.loss * mass[sign]),
            "pull": _added(both, lambda sign, one: one.slope.abs() * mass[sign]),
        }
    weights = token_weights(done) if weighs_tokens(done, preset) else None
    found = losses.token_loss(done.ratios, preset)
    loss, slope = (None, done.ratios.batch.advantages) if found is None else (found.loss, found.slope)
    return loss, slope, weights, done.kept.tokens


def _weighed(
    loss: Tensor | None, slope: Tensor, weights: Tensor | None, keep: Tensor | None
) -> dict[str, Tensor]:
    terms = {"pull": slope.abs()} if loss is None else {"loss": loss, "pull": slope.abs()}
    if weights is None:
        return {name: left(x, keep) for name, x in terms.items()}
    each = left(weights, keep)
    return {name: x * each for name, x in terms.items()}


def _near_weighed(near: Near) -> dict[str, Tensor]:
    """Compute the sums on near tokens, where the loss is not clipped or bounded and a token's weight is r."""
    preset, moments = near.preset, near.moments
    weight = preset.policy if preset.weight is not None and losses.weighted(preset) else "rollout"
    if near_pooled(near):
        masses = {sign: moments.exp(weight, side=side) for sign, side in SIDES.items()}
        both = near_by_sign(near)
        return {
            "loss": _added(both, lambda sign, one: one.loss * masses[sign]),
            "pull": _added(both, lambda sign, one: one.slope.abs() * masses[sign]),
        }

    def sums(ratio: Direction, column: str = "") -> tuple[Tensor, Tensor]:
        """Compute Σ A · column · e^d, and the same with |A|."""
        up, down = (moments.exp(ratio, column, side) for side in SIDES.values())
        return up - down, up + down

    if not losses.known(near.ratios.batch, preset):
        return {"pull": sums(weight)[1]}
    own = preset.loss in ("ppo_clip", "cispo")  # the loss's own ratio e^u multiplies the weight e^Δ
    ratio = weight if not own else "current" if weight == "old" else losses.drift(preset.policy)
    signed, size = sums(ratio)
    times_log = preset.loss in ("reinforce", "cispo")
    return {"loss": -(sums(ratio, "log π_θ")[0] if times_log else signed), "pull": size}


SIDES = {"positive": "A+", "negative": "A-"}


def near_pooled(near: Near) -> bool:
    """Return whether all tokens of a sequence share the loss's ratio."""
    return losses.LOSSES[near.preset.loss].pooled and losses.known(near.ratios.batch, near.preset)


def near_by_sign(near: Near) -> dict[str, TokenLoss]:
    """Compute a pooled loss at A = 1 and at A = −1, for each row."""
    both = losses.by_sign(near.ratios, near.preset)
    return {sign: one.map(near.given) for sign, one in both.items()}


weighed_sums = Summed(_key_of_weighed, _of_weighed, _weighed, near=_near_weighed)
"""Σ w·loss and Σ|w·slope| over tokens that pass the rules on tokens, [S], w of tokens only.

Without π_θ there is no loss, and the slope is −A.
"""


def _added(both: dict[str, TokenLoss], make: Callable[[str, TokenLoss], Tensor]) -> Tensor:
    """Add up a term computed for each sign of the advantage."""
    one, two = (make(sign, loss) for sign, loss in both.items())
    return one + two


def mass_sums(done: Outcome, preset: Preset, weighed: bool = True) -> dict[str, Tensor]:
    """Compute Σ w·|A| by sign of A over tokens that pass the rules on tokens, [S]; w of tokens, or 1."""
    weighed = weighed and weighs_tokens(done, preset)
    key = "mass", weight_key(preset) if weighed else None, token_rules(done, preset)
    return done.ratios.once(key, lambda: _mass_sums(done, weighed))


def masses(ratios: Ratios) -> dict[str, Tensor]:
    """Compute Σ|A| by sign of A over all tokens, [S]."""
    advantages, offsets = ratios.batch.advantages, ratios.batch.cu_seqlens
    assert advantages is not None
    return {sign: segments.total(part, offsets) for sign, part in losses.parts(advantages).items()}


def _mass_sums(done: Outcome, weighed: bool) -> dict[str, Tensor]:
    advantages = done.ratios.batch.advantages
    assert advantages is not None
    parts = losses.parts(advantages)
    if weighed:
        parts = {sign: part * token_weights(done) for sign, part in parts.items()}
    return {sign: _total(done, part, done.kept.tokens) for sign, part in parts.items()}


def kl_sum(done: Outcome, preset: Preset) -> Tensor:
    """Compute Σ(log π_anchor − log π_θ) over tokens that pass the rules on tokens, [S]."""
    key = "kl sum", token_rules(done, preset)
    return done.ratios.once(key, lambda: _total(done, losses.kl(done.ratios, preset), done.kept.tokens))


def _of_clip(done: Outcome, preset: Preset) -> Inputs | dict[str, Tensor]:
    if pooled(done, preset):
        both, tokens = losses.by_sign(done.ratios, preset), sign_counts(done, preset)
        return {
            "clipped": _added(both, lambda sign, one: one.clipped * tokens[sign]),
            "clipped_lower": _added(both, lambda sign, one: one.clipped_lower * tokens[sign]),
            "kl": kl_sum(done, preset),
        }
    loss = losses.token_loss(done.ratios, preset)
    assert loss is not None
    return loss.clipped, loss.clipped_lower, loss.kl, done.kept.tokens


def _near_clip(near: Near) -> dict[str, Tensor]:
    kl = -near.moments.of("d", losses.drift(near.preset.policy))
    if near_pooled(near):
        both = near_by_sign(near)
        tokens = {"positive": near.moments.of(side="1+"), "negative": near.moments.of(side="1-")}
        return {
            "clipped": _added(both, lambda sign, one: one.clipped * tokens[sign]),
            "clipped_lower": _added(both, lambda sign, one: one.clipped_lower * tokens[sign]),
            "kl": kl,
        }
    none = torch.zeros_like(kl)
    return {"clipped": none, "clipped_lower": none, "kl": kl}


clip_sums = Summed(
    lambda done, preset: ("clip sums", losses.kind(preset), token_rules(done, preset)),
    _of_clip,
    lambda clipped, lower, kl, keep: {
        "clipped": flagged(clipped, keep),
        "clipped_lower": flagged(lower, keep),
        "kl": left(kl, keep),
    },
    near=_near_clip,
)
"""Number of tokens where the clip and the dual clip are active, and Σ(log π_anchor − log π_θ)."""


def _total(done: Outcome, x: Tensor, keep: Tensor | None) -> Tensor:
    """Sum x over the kept tokens of each sequence, [S]."""
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
    Formula(
        "ppo_kl",
        "nats",
        "kept tokens",
        "mean(log π_anchor − log π_θ), each bounded as the loss bounds it",
        mean("kl", "kept"),
    ),
)
