"""How much of the update a preset leaves, and how much of it it takes away, by sign of the advantage.

Uncorrected, token t pushes log π_θ with |A_t|. Under a preset it pushes with |slope · w| where it is kept, 0
elsewhere. Without π_θ the loss's own clip is idle: the view of the first minibatch, where π_θ = π_old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import losses, segments
from offpol_diag.correction import weight_key
from offpol_diag.metrics.formula import Formula, Lookup
from offpol_diag.metrics.outcome import Outcome, applied, outcome
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset

SIGNS = ("positive", "negative")


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Per-sequence columns [S]: the mass Σ|A| by sign, what of it still pushes, and Σ|slope · w| of that."""
    advantages = scene.batch.advantages
    if advantages is None:
        return {}
    done = outcome(scene, preset)
    mass = done.ratios.once("mass", lambda: _by_sign(advantages.abs(), advantages, done))
    sums, whole = _pushing(scene, preset, done)
    alive = done.kept.sequences * (whole != 0)
    found = {f"mass_{sign}": mass[sign] for sign in SIGNS}
    found |= {f"pushing_{sign}": sums[sign] * alive for sign in SIGNS}
    found["update"] = sums["update"] * whole * done.kept.sequences
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def _by_sign(x: Tensor, advantages: Tensor, done: Outcome) -> dict[str, Tensor]:
    offsets = done.ratios.batch.cu_seqlens
    flags = zip(SIGNS, (advantages > 0, advantages < 0), strict=True)
    return {sign: segments.total(torch.where(flag, x, 0.0), offsets) for sign, flag in flags}


def _pushing(scene: Scene, preset: Preset, done: Outcome) -> tuple[dict[str, Tensor], Tensor]:
    """Sums over tokens that the rules on tokens leave, and the weight of each whole sequence [S].

    Many presets share the sums: those with the same loss, rules on tokens and weights on tokens.
    """
    whole, each, key = torch.ones_like(done.kept_tokens), None, None
    if done.weighed is not None and losses.weighted(preset):
        final = done.weighed.final
        per_token = final.per == "token"
        each, key = (final.values, weight_key(preset)) if per_token else (None, None)
        whole = whole if per_token else final.values
    rules = applied(preset).reject if done.kept.tokens is not None else ()
    sums = done.ratios.once(
        ("pushing", losses.kind(preset), key, rules), lambda: _sums(scene, preset, done, each)
    )
    return sums, whole


def _sums(scene: Scene, preset: Preset, done: Outcome, weights: Tensor | None) -> dict[str, Tensor]:
    advantages, offsets = scene.batch.advantages, scene.batch.cu_seqlens
    assert advantages is not None
    loss = losses.token_loss(done.ratios, preset)
    push = (advantages if loss is None else loss.slope).abs()
    push = push if weights is None else push * weights
    push = push if done.kept.tokens is None else torch.where(done.kept.tokens, push, 0.0)
    left = torch.where(push != 0, advantages.abs(), 0.0)
    return _by_sign(left, advantages, done) | {"update": segments.total(push, offsets)}


def _removed(get: Lookup, *signs: str) -> Tensor:
    mass = sum((get(f"mass_{sign}") for sign in signs), torch.zeros(()))
    pushing = sum((get(f"pushing_{sign}") for sign in signs), torch.zeros(()))
    return 1 - pushing / mass


_MASS = "Σ|A|"
_ZERO = "share of Σ|A| on tokens that push nothing: rejected, vetoed, of weight 0, or clipped away"

ROWS = (
    Formula(
        "update_kept",
        "",
        _MASS,
        "Σ|slope · w| over kept tokens / Σ|A|: the size of the update that is left; slope is −A on-policy",
        lambda get: get("update") / (get("mass_positive") + get("mass_negative")),
    ),
    Formula("update_removed", "fraction", _MASS, _ZERO, lambda get: _removed(get, *SIGNS)),
    Formula(
        "update_removed_positive",
        "fraction",
        "Σ|A| where A > 0",
        "the same of what is pushed up",
        lambda get: _removed(get, "positive"),
    ),
    Formula(
        "update_removed_negative",
        "fraction",
        "Σ|A| where A < 0",
        "the same of what is pushed down",
        lambda get: _removed(get, "negative"),
    ),
)
