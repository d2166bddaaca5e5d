"""How much of the update a preset leaves, and on whom it takes it away, by the sign of the advantage.

Uncorrected, token t pulls on log π_θ with |A_t|. Under a preset it pulls with |slope · w| where it is kept,
0 elsewhere. Without π_θ the loss's own clip is idle: the view of the first minibatch, where π_θ = π_old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import losses, segments
from offpol_diag.correction import weight_key
from offpol_diag.metrics.formula import Formula, Lookup
from offpol_diag.metrics.outcome import Outcome, applied, token_rules
from offpol_diag.metrics.pieces import pieces
from offpol_diag.metrics.policyloss import sequence_weights, token_weights, weighed_sums
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios

SIGNS = ("positive", "negative")


def shared(scene: Scene) -> dict[str, Tensor]:
    """Σ|A| of each sequence by sign, [S]: the same for every preset."""
    advantages, offsets = scene.batch.advantages, scene.batch.cu_seqlens
    if advantages is None:
        return {}
    return {f"mass_{sign}": segments.total(part, offsets) for sign, part in _parts(advantages).items()}


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Per-sequence columns [S]: Σ|slope · w| of what still pulls, and Σ|A| by sign of what does not."""
    if scene.batch.advantages is None:
        return {}
    done = pieces(scene, preset)
    whole = sequence_weights(done, preset) * done.sequences
    still = done.total(_still)
    mass = done.ratios.once("mass", lambda: shared(scene))
    found = {"update": done.total(weighed_sums)["pull"] * whole}
    for sign in SIGNS:
        found[f"still_{sign}"] = torch.where(whole == 0, mass[f"mass_{sign}"], still[sign])
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def _parts(advantages: Tensor) -> dict[str, Tensor]:
    """|A| where A has each sign, 0 elsewhere, [T]."""
    return dict(zip(SIGNS, (advantages.clamp(min=0), -advantages.clamp(max=0)), strict=True))


def _slope(ratios: Ratios, preset: Preset) -> tuple[object, Tensor]:
    """What each token pulls with before weights and rules, after what that depends on."""
    found = losses.token_loss(ratios, preset)
    if found is not None:
        return losses.kind(preset), found.slope
    assert ratios.batch.advantages is not None
    return None, ratios.batch.advantages


def _still(done: Outcome, preset: Preset) -> dict[str, Tensor]:
    """Σ|A| by sign of the tokens that pull nothing: by a rule, by the loss's clip or by a weight of 0."""
    ratios = done.ratios
    kind, slope = _slope(ratios, preset)
    zeros = token_weights(done, preset) if _may_be_zero(preset) else None
    by = None if zeros is None else weight_key(preset), token_rules(done, preset)
    return ratios.once(("still", kind, by), lambda: _still_sums(done, slope, zeros))


def _may_be_zero(preset: Preset) -> bool:
    rule = applied(preset).weight
    return rule is not None and (rule.action == "mask" or rule.overflow == "zero")


def _still_sums(done: Outcome, slope: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
    ratios, pulls = done.ratios, slope != 0
    pulls = pulls if weights is None else pulls & (weights != 0)
    pulls = pulls if done.kept.tokens is None else pulls & done.kept.tokens
    advantages, offsets = ratios.batch.advantages, ratios.batch.cu_seqlens
    assert advantages is not None
    parts = ratios.once("parts", lambda: _parts(advantages))
    return {sign: segments.total(torch.where(pulls, 0.0, part), offsets) for sign, part in parts.items()}


def _all(get: Lookup, name: str) -> Tensor:
    return get(f"{name}_positive") + get(f"{name}_negative")


_ZERO = "Σ|A| of tokens that pull nothing (rejected, vetoed, weight 0, or clipped away) / Σ|A|"
_VIEW = "; without current_log_probs no clip acts (π_θ = π_old)"

ROWS = (
    Formula(
        "update_kept",
        "",
        "Σ|A|",
        f"Σ|w · ∂L/∂log π_θ| over kept tokens / Σ|A|: the size of the update that is left{_VIEW}",
        lambda get: get("update") / _all(get, "mass"),
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
