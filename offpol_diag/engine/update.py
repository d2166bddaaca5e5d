"""Share of the policy update that a preset removes, by the sign of the advantage.

Uncorrected, the gradient of token t on log π_θ is |A_t|. Under a preset it is |slope · w| for kept tokens and
0 elsewhere. Without π_θ the loss's own clip is inactive, as in the first minibatch, where π_θ = π_old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag.engine import losses
from offpol_diag.engine.formula import POSITIVE, Formula, Lookup
from offpol_diag.engine.outcome import Named, NearOutcome, Outcome, Outcomes
from offpol_diag.engine.policyloss import (
    SIDES,
    loss_weights,
    mass_sums,
    masses,
    near_by_sign,
    near_factors,
    near_sums,
    near_values,
    pooled,
    sequence_weights,
    weighed_sums,
    weighing,
)
from offpol_diag.engine.rows import Columns, Inputs, Summed, joined
from offpol_diag.engine.scene import Scene


def shared(scene: Scene) -> dict[str, Tensor]:
    """Compute Σ|A| of each sequence by sign of A, [S]; the same for every preset."""
    if scene.batch.advantages is None:
        return {}
    return scene.once("mass", lambda: {f"mass_{sign}": x for sign, x in _masses(scene).items()})


def _masses(scene: Scene) -> dict[str, Tensor]:
    ratios = scene.ratios("rollout")
    if ratios.split is None:
        return masses(ratios)
    far, near = masses(ratios.split.far), ratios.split.near
    return {sign: far[sign] + near.of(side=side) for sign, side in SIDES.items()}


def columns(outcomes: Outcomes) -> Columns:
    """Compute Σ|slope · w| of the remaining update, and Σ|A| by sign of what is removed, [S] each."""
    if outcomes.batch.advantages is None or not outcomes.presets:
        return outcomes.named({})
    whole, still = sequence_weights(outcomes), outcomes.total(still_sums, stilling)
    pull = outcomes.total(weighed_sums, weighing)["pull"]
    mass = shared(outcomes.scene)
    found = {"update": joined(torch.mul, pull, whole)}
    for sign in SIDES:
        found[f"still_{sign}"] = joined(
            lambda factor, x, gone=mass[f"mass_{sign}"]: torch.where(factor == 0, gone, x), whole, still[sign]
        )
    return outcomes.named(found)


def stilling(near: NearOutcome, sums: Named) -> Named:
    """Add up the removed Σ|A|: all of a turn that does not pass or has weight 0."""
    pulls = near.passes
    if near.weights is not None and losses.weighted(near.preset):
        pulls = near.weights != 0 if pulls is None else pulls & (near.weights != 0)
    if pulls is None:
        return {name: near.of_all(x) for name, x in sums.items()}
    mass = {sign: near.moments.of(side=side) for sign, side in SIDES.items()}
    return {name: near.of_all(torch.where(pulls, x, mass[name])) for name, x in sums.items()}


def _zero_weights(done: Outcome) -> Tensor | None:
    """Return the weights of tokens, [T], if one may be 0, which removes the token's gradient; else None."""
    rule = done.preset.weight
    zero = rule is not None and (rule.action == "mask" or rule.overflow == "zero")
    return loss_weights(done) if zero else None


def _of_still(done: Outcome) -> Inputs | dict[str, Tensor]:
    weights = _zero_weights(done)
    if pooled(done) and done.kept.tokens is None and weights is None:
        mass, each = mass_sums(done, None), losses.by_sign(done.far, done.preset)
        return {sign: torch.where(one.slope == 0, mass[sign], 0.0) for sign, one in each.items()}
    ratios, advantages = done.far, done.far.batch.advantages
    assert advantages is not None
    loss = losses.token_loss(ratios, done.preset)
    parts = ratios.once("parts", lambda: losses.parts(advantages))
    return (*parts.values(), advantages if loss is None else loss.slope, weights, done.kept.tokens)


def _still(
    up: Tensor, down: Tensor, slope: Tensor, weights: Tensor | None, keep: Tensor | None
) -> dict[str, Tensor]:
    pulls = slope != 0
    pulls = pulls if weights is None else pulls & (weights != 0)
    pulls = pulls if keep is None else pulls & keep
    return {sign: torch.where(pulls, 0.0, x) for sign, x in zip(SIDES, (up, down), strict=True)}


def _near_still(near: NearOutcome) -> dict[str, Tensor]:
    """Compute the Σ|A| removed on near tokens: 0 if the loss is linear and no clip of a sequence acts."""
    found = near_sums(near)
    if found is not None:
        return {sign: found[sign] for sign in SIDES}
    values = near_values(near)
    factors = near_factors(near) if values is None else dict.fromkeys(SIDES, values)
    if factors is not None:
        mass = {sign: near.moments.of(side=side) for sign, side in SIDES.items()}
        return {sign: torch.where(phi == 0, mass[sign], 0.0) for sign, phi in factors.items()}
    if not pooled(near):
        return dict.fromkeys(SIDES, torch.zeros_like(near.moments.n))
    both = near_by_sign(near)
    return {
        sign: torch.where(both[sign].slope == 0, near.moments.of(side=side), 0.0)
        for sign, side in SIDES.items()
    }


still_sums = Summed(_of_still, _still, _near_still)
"""Σ|A| by sign of the tokens without gradient: by a rule, the loss's clip or a weight of 0."""


def _all(get: Lookup, name: str) -> Tensor:
    return get(f"{name}_positive") + get(f"{name}_negative")


_ZERO = "Σ|A| of tokens that pull nothing (rejected, vetoed, weight 0, or clipped away) / Σ|A|"
_VIEW = "; without current_log_probs no clip acts (π_θ = π_old)"

ROWS = (
    Formula(
        "update_kept",
        "",
        "Σ|A|",
        f"Σ|w · ∂L/∂log π_θ| over tokens not rejected / Σ|A|: the size of the update that is left{_VIEW}",
        lambda get: get("update") / _all(get, "mass"),
        POSITIVE,
    ),
    Formula(
        "update_removed",
        "fraction",
        "Σ|A|",
        _ZERO + _VIEW,
        lambda get: _all(get, "still") / _all(get, "mass"),
    ),
    Formula(
        "update_removed_positive",
        "fraction",
        "Σ|A| where A > 0",
        f"{_ZERO}, where A > 0{_VIEW}",
        lambda get: get("still_positive") / get("mass_positive"),
    ),
    Formula(
        "update_removed_negative",
        "fraction",
        "Σ|A| where A < 0",
        f"{_ZERO}, where A < 0{_VIEW}",
        lambda get: get("still_negative") / get("mass_negative"),
    ),
)
