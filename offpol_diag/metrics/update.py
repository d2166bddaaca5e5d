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
from offpol_diag.metrics.outcome import Outcome, applied, outcome
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios

SIGNS = ("positive", "negative")


def shared(scene: Scene) -> dict[str, Tensor]:
    """Σ|A| of each sequence by sign, [S]: the same for every preset."""
    advantages = scene.batch.advantages
    return {} if advantages is None else _by_sign(advantages, scene.batch.cu_seqlens, "mass")


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Per-sequence columns [S]: Σ|slope · w| of what still pulls, and Σ|A| by sign of what does not."""
    if scene.batch.advantages is None:
        return {}
    done = outcome(scene, preset)
    weights = done.weighed.final if done.weighed is not None and losses.weighted(preset) else None
    whole = weights.values if weights is not None and weights.per == "sequence" else None
    each = weights.values if weights is not None and weights.per == "token" else None
    factor = done.kept.sequences.to(torch.float64) if whole is None else done.kept.sequences * whole
    pull, still = _pull(done, preset, each), _still(done, preset, each)
    mass = done.ratios.once("mass", lambda: shared(scene))
    found = {"update": pull * factor}
    for sign in SIGNS:
        found[f"still_{sign}"] = torch.where(factor == 0, mass[f"mass_{sign}"], still[f"still_{sign}"])
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def _by_sign(x: Tensor, offsets: Tensor, name: str) -> dict[str, Tensor]:
    parts = (x.clamp(min=0), -x.clamp(max=0))
    return {f"{name}_{sign}": segments.total(part, offsets) for sign, part in zip(SIGNS, parts, strict=True)}


def _slope(ratios: Ratios, preset: Preset) -> tuple[object, Tensor]:
    """What each token pulls with before weights and rules, and what that depends on."""
    found = losses.token_loss(ratios, preset)
    if found is not None:
        return losses.kind(preset), found.slope
    assert ratios.batch.advantages is not None
    return None, ratios.batch.advantages


def _rules(done: Outcome, preset: Preset) -> object:
    return applied(preset).reject if done.kept.tokens is not None else ()


def _pull(done: Outcome, preset: Preset, weights: Tensor | None) -> Tensor:
    """Σ|slope · w| over tokens that the rules on tokens leave, [S]; w of tokens only."""
    ratios = done.ratios
    kind, slope = _slope(ratios, preset)
    size = ratios.once(("pull", kind), slope.abs)
    key = ("pull", kind, None if weights is None else weight_key(preset), _rules(done, preset))

    def total() -> Tensor:
        x = size if weights is None else size * weights
        x = x if done.kept.tokens is None else torch.where(done.kept.tokens, x, 0.0)
        return segments.total(x, ratios.batch.cu_seqlens)

    return ratios.once(key, total)


def _still(done: Outcome, preset: Preset, weights: Tensor | None) -> dict[str, Tensor]:
    """Σ|A| by sign of the tokens that pull nothing: by a rule, by the loss's clip or by a weight of 0."""
    ratios, rule = done.ratios, applied(preset).weight
    kind, slope = _slope(ratios, preset)
    may_be_zero = rule is not None and (rule.action == "mask" or rule.overflow == "zero")
    zeros = weights if may_be_zero else None
    key = ("still", kind, None if zeros is None else weight_key(preset), _rules(done, preset))

    def total() -> dict[str, Tensor]:
        pulls = slope != 0
        pulls = pulls if zeros is None else pulls & (zeros != 0)
        pulls = pulls if done.kept.tokens is None else pulls & done.kept.tokens
        assert ratios.batch.advantages is not None
        still = torch.where(pulls, 0.0, ratios.batch.advantages)
        return _by_sign(still, ratios.batch.cu_seqlens, "still")

    return ratios.once(key, total)


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
