"""The policy loss under one preset: its value in four aggregations, clip fractions, ppo_kl."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offpol_diag.engine import losses, segments
from offpol_diag.engine.formula import Formula, mean
from offpol_diag.engine.losses import TokenLoss
from offpol_diag.engine.moments import Direction
from offpol_diag.engine.outcome import Named, NearOutcome, Outcome, Outcomes, near_counts, sign_counts
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.rows import Columns, Inputs, Rows, Summed, flagged, joined, masked
from offpol_diag.engine.scene import RADII

SIDES = {"positive": "A+", "negative": "A-"}


def columns(outcomes: Outcomes) -> Columns:
    """Compute the weighted loss over kept tokens, its mean per sequence, clip counts and ppo_kl."""
    outcomes = outcomes.only(lambda preset: losses.known(outcomes.batch, preset))
    if not outcomes.presets:
        return outcomes.named({})
    sums, kept = outcomes.total(clip_sums), outcomes.kept
    summed = joined(torch.mul, outcomes.total(weighed_sums, weighing)["loss"], sequence_weights(outcomes))
    found = {
        "loss": summed,
        "loss_mean": joined(lambda loss, many: loss / many.clamp(min=1), summed, kept),
        "loss_rows": kept.map(lambda x: (x > 0).to(torch.float64)),
        **{name: joined(torch.mul, values, outcomes.sequences) for name, values in sums.items()},
    }
    return outcomes.named(found)


def sequence_weights(outcomes: Outcomes) -> Rows:
    """Return the weight on the loss of each sequence; 1 without one, 0 where it is dropped."""

    def weight(one: Outcome) -> Tensor:
        weights = one.per_sequence if losses.weighted(one.preset) else None
        return outcomes.one if weights is None else weights

    return joined(torch.mul, outcomes.rows(weight), outcomes.sequences)


def weighing(near: NearOutcome, sums: Named) -> Named:
    """Add up loss sums, each turn's times its weight where that multiplies the loss."""
    weighs = losses.weighted(near.preset)
    return {name: near.of_weighed(x) if weighs else near.of_passed(x) for name, x in sums.items()}


def loss_weights(done: Outcome) -> Tensor | None:
    """Return the far tokens' own weights, [T], where they multiply the loss; else None."""
    return done.token_weights if done.weighs_tokens and losses.weighted(done.preset) else None


def pooled(done: Outcome | NearOutcome) -> bool:
    """Return whether all tokens of a sequence share the loss's ratio."""
    return losses.LOSSES[done.preset.loss].pooled and losses.known(done.ratios.batch, done.preset)


def of_signs(both: dict[str, TokenLoss], make: Callable[[str, TokenLoss], Tensor]) -> Tensor:
    """Add up a term computed for each sign of the advantage."""
    one, two = (make(sign, loss) for sign, loss in both.items())
    return one + two


def near_by_sign(near: NearOutcome) -> dict[str, TokenLoss]:
    """Compute a pooled loss at A = 1 and at A = −1, for each row."""
    both = losses.by_sign(near.ratios, near.preset)
    return {sign: one.map(near.given) for sign, one in both.items()}


def near_sums(near: NearOutcome) -> dict[str, Tensor] | None:
    """Sum a loss that is not linear over the near tokens of each row; None where moments suffice.

    Returns:
        loss, pull: Σ w·loss and Σ|w·slope|, w = r where the weight multiplies the loss; clipped,
        clipped_lower: tokens where a clip is active; positive, negative: Σ|A| of the tokens without gradient,
        by sign of A; kl: Σ(log π_anchor − log π_θ), where the loss's bound acts on near tokens.
    """
    if losses.linear(near.preset) or not losses.known(near.ratios.batch, near.preset):
        return None
    return near.once("loss", lambda: _near_sums(near))


def _near_sums(near: NearOutcome) -> dict[str, Tensor]:
    """Look at every token, block by block: a batch's terms of each such loss would take 300 MB together."""
    preset, moments = near.preset, near.moments
    weighs = preset.weight is not None and losses.weighted(preset)
    bounded = preset.clip.safety is not None and preset.clip.safety < RADII[0]  # it may act on near tokens
    later = losses.later_drift(near.ratios, preset) if losses.LOSSES[preset.loss].later else None
    found: dict[str, list[Tensor]] = {}
    for at, block in near.ratios.blocks():
        if later is not None:
            block.know(losses.later_key(preset), later[at])
        one, advantages = losses.token_loss(block, preset), block.batch.advantages
        assert one is not None
        assert advantages is not None
        still = (one.slope == 0) & (advantages != 0)
        terms = {"loss": one.loss, "pull": one.slope.abs()}
        if weighs:
            r = torch.exp(block.delta)
            terms = {name: x * r for name, x in terms.items()}
        terms |= {"clipped": one.clipped, "clipped_lower": one.clipped_lower}
        if bounded:
            terms["kl"] = one.kl
        masses = {} if segments.none(still) else losses.parts(advantages)
        terms |= {sign: torch.where(still, masses[sign], 0.0) if masses else still for sign in SIDES}
        for name, x in terms.items():
            found.setdefault(name, []).append(moments.of_turns(x, at, block.batch))
    return {name: moments.of_blocks(parts) for name, parts in found.items()}


def near_factors(near: NearOutcome) -> dict[str, Tensor] | None:
    """Compute what multiplies −A log π_θ of each row, by sign of A; None for other losses."""
    of = losses.LOSSES[near.preset.loss].factors
    if of is None or not losses.known(near.ratios.batch, near.preset):
        return None
    found = of(near.ratios, near.preset, True)
    return {sign: near.given(phi) for sign, phi in zip(SIDES, found, strict=True)}


def near_values(near: NearOutcome) -> Tensor | None:
    """Compute the loss that all tokens of each row share; None for other losses."""
    of = losses.LOSSES[near.preset.loss].values
    if of is None or not losses.known(near.ratios.batch, near.preset):
        return None
    return near.given(of(near.ratios, near.preset, True))


def _total(done: Outcome, x: Tensor) -> Tensor:
    """Sum x over the far tokens of each sequence that pass the rules on tokens, [S]."""
    return segments.total(masked(x, done.kept.tokens), done.far.batch.cu_seqlens)


def mass_sums(done: Outcome, weights: Tensor | None) -> dict[str, Tensor]:
    """Compute Σ w·|A| by sign of A over far tokens that pass the rules on tokens, [S]; w of tokens, or 1."""
    advantages = done.far.batch.advantages
    assert advantages is not None
    parts = losses.parts(advantages)
    return {sign: _total(done, x if weights is None else x * weights) for sign, x in parts.items()}


def masses(ratios: Ratios) -> dict[str, Tensor]:
    """Compute Σ|A| by sign of A over all tokens, [S]."""
    advantages, offsets = ratios.batch.advantages, ratios.batch.cu_seqlens
    assert advantages is not None
    return {sign: segments.total(part, offsets) for sign, part in losses.parts(advantages).items()}


def _of_mass(both: dict[str, TokenLoss], mass: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "loss": of_signs(both, lambda sign, one: one.loss * mass[sign]),
        "pull": of_signs(both, lambda sign, one: one.slope.abs() * mass[sign]),
    }


def _of_weighed(done: Outcome) -> Inputs | dict[str, Tensor]:
    if pooled(done):
        return _of_mass(losses.by_sign(done.far, done.preset), mass_sums(done, loss_weights(done)))
    found = losses.token_loss(done.far, done.preset)
    loss, slope = (None, done.far.batch.advantages) if found is None else (found.loss, found.slope)
    return loss, slope, loss_weights(done), done.kept.tokens


def _weighed(
    loss: Tensor | None, slope: Tensor, weights: Tensor | None, keep: Tensor | None
) -> dict[str, Tensor]:
    terms = {"pull": slope.abs()} if loss is None else {"loss": loss, "pull": slope.abs()}
    if weights is None:
        return {name: masked(x, keep) for name, x in terms.items()}
    each = masked(weights, keep)
    return {name: x * each for name, x in terms.items()}


def _near_weighed(near: NearOutcome) -> dict[str, Tensor]:
    """Compute the sums on near tokens, where the loss is not clipped or bounded and a token's weight is r."""
    preset, moments = near.preset, near.moments
    weight = preset.policy if preset.weight is not None and losses.weighted(preset) else "rollout"
    if pooled(near):
        mass = {sign: moments.exp(weight, side=side) for sign, side in SIDES.items()}
        return _of_mass(near_by_sign(near), mass)

    def sums(ratio: Direction, column: str = "") -> tuple[Tensor, Tensor]:
        """Compute Σ A · column · e^d, and the same with |A|."""
        up, down = (moments.exp(ratio, column, side) for side in SIDES.values())
        return up - down, up + down

    if not losses.known(near.ratios.batch, preset):
        return {"pull": sums(weight)[1]}
    if losses.LOSSES[preset.loss].gate:
        return _near_gated(near, weight)
    values = near_values(near)
    if values is not None:
        pulls = moments.exp(weight, side="1+") + moments.exp(weight, side="1-")
        return {"loss": values * moments.exp(weight), "pull": values.abs() * pulls}
    found, factors = near_sums(near), near_factors(near)
    if factors is not None:
        up, down = (phi * moments.of("1", "", "log π_θ", SIDES[sign]) for sign, phi in factors.items())
        pull, more = (phi * moments.of("1", "", "", SIDES[sign]) for sign, phi in factors.items())
        return {"loss": down - up, "pull": pull + more}
    if found is not None:
        return {name: found[name] for name in ("loss", "pull")}
    row = losses.LOSSES[preset.loss]  # its own ratio e^u multiplies the weight e^Δ
    ratio = weight if not row.ratio else "current" if weight == "old" else losses.drift(preset.policy)
    signed, size = sums(ratio)
    return {"loss": -(sums(ratio, "log π_θ")[0] if row.log else signed), "pull": size}


def _near_gated(near: NearOutcome, weight: Direction) -> dict[str, Tensor]:
    """Compute the sums of a gated loss on near tokens, from the gate's distance to what it is at u = 0."""
    moments, d = near.moments, losses.drift(near.preset.policy)
    column = "" if weight == "rollout" else "π_old/π_rollout"
    loss, pull = [], []
    for (sign, tau), minus in zip(losses.taus(near.preset).items(), (-1, 1), strict=True):
        mass = moments.exp(weight, side=SIDES[sign])
        loss.append(minus * (2 / tau * mass + moments.of(f"gate {tau}", d, column, SIDES[sign])))
        pull.append(mass + moments.of(f"gate slope {tau}", d, column, SIDES[sign]))
    return {"loss": loss[0] + loss[1], "pull": pull[0] + pull[1]}


weighed_sums = Summed(_of_weighed, _weighed, _near_weighed)
"""Σ w·loss and Σ|w·slope| over tokens that pass the rules on tokens, [S], w of tokens only.

Without π_θ there is no loss, and the slope is −A.
"""


def _of_counts(both: dict[str, TokenLoss], tokens: dict[str, Tensor], kl: Tensor) -> dict[str, Tensor]:
    return {
        "clipped": of_signs(both, lambda sign, one: one.clipped * tokens[sign]),
        "clipped_lower": of_signs(both, lambda sign, one: one.clipped_lower * tokens[sign]),
        "kl": kl,
    }


def _of_clip(done: Outcome) -> Inputs | dict[str, Tensor]:
    if pooled(done):
        kl = _total(done, losses.kl(done.far, done.preset))
        return _of_counts(losses.by_sign(done.far, done.preset), sign_counts(done), kl)
    loss = losses.token_loss(done.far, done.preset)
    assert loss is not None
    return loss.clipped, loss.clipped_lower, loss.kl, done.kept.tokens


def _near_clip(near: NearOutcome) -> dict[str, Tensor]:
    kl = -near.moments.of("d", losses.drift(near.preset.policy))
    if pooled(near):
        return _of_counts(near_by_sign(near), near_counts(near.moments), kl)
    none, found = torch.zeros_like(kl), near_sums(near)
    if found is None:
        return {"clipped": none, "clipped_lower": none, "kl": kl}
    return {"kl": kl, **{name: found[name] for name in ("clipped", "clipped_lower", "kl") if name in found}}


clip_sums = Summed(
    _of_clip,
    lambda clipped, lower, kl, keep: {
        "clipped": flagged(clipped, keep),
        "clipped_lower": flagged(lower, keep),
        "kl": masked(kl, keep),
    },
    _near_clip,
)
"""Number of tokens where the clip and the dual clip are active, and Σ(log π_anchor − log π_θ)."""


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
