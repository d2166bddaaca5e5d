"""One preset applied to one batch, near and far tokens apart: sums of both, per sequence.

What acts on whole sequences is decided once, by all tokens; what acts on tokens is looked at where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import correction, losses
from offpol_diag.metrics.outcome import PER_SEQUENCE, Moments, Outcome, applied, of, powers
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios


@dataclass(frozen=True)
class Acted:
    """What the bounds of the weights did, per sequence [S] float64.

    Attributes:
        high: weights above `upper`; `low` below `lower`.
        units: of how many weights.
        bounded: on how many the safety bound acted, of `tries`.
    """

    high: Tensor
    low: Tensor
    units: Tensor
    bounded: Tensor
    tries: Tensor


@dataclass(frozen=True)
class Pieces:
    """A preset applied to a batch; the names are those of `Outcome`, over all its tokens.

    Attributes:
        ratios: of the preset's numerator policy, all tokens.
        each: the far tokens' outcome and the near ones', with the preset as it applies there; or one.
    """

    ratios: Ratios
    each: tuple[tuple[Outcome, Preset], ...]
    kept_tokens: Tensor
    weight_sum: Tensor
    sums: Moments

    @property
    def first(self) -> Outcome:
        """The piece that every rule and the veto have seen."""
        return self.each[0][0]

    @property
    def sequences(self) -> Tensor:
        """Which sequences passed every rule on sequences and the veto, [S] bool."""
        return self.first.kept.sequences

    @property
    def per_sequence(self) -> Tensor | None:
        """The weights of sequences, [S]; None when tokens have their own, or there are none."""
        weight, weighed = self.first.preset.weight, self.first.weighed
        if weight is None or weighed is None or weight.over not in PER_SEQUENCE:
            return None
        return weighed.final.values

    @property
    def acted(self) -> Acted:
        """What the bounds of the weights did."""
        n = self.ratios.batch.lengths.to(torch.float64)
        weighed = self.first.weighed
        if weighed is None:
            zero = torch.zeros_like(n)
            return Acted(zero, zero, n, zero, n)
        if weighed.final.per == "token":  # near no bound acts
            return Acted(weighed.high, weighed.low, n, weighed.bounded, n)
        there = (n > 0).to(torch.float64)
        return Acted(weighed.high, weighed.low, there, weighed.bounded, weighed.tries)

    def total(self, make: Callable[[Outcome, Preset], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Sums [S] over the tokens that pass the rules on tokens, of all pieces together."""
        first, *rest = (make(done, preset) for done, preset in self.each)
        return {name: sum((more[name] for more in rest), x) for name, x in first.items()}


def pieces(scene: Scene, preset: Preset) -> Pieces:
    """Apply a preset to the batch; presets that share rules share the work."""
    preset = applied(preset)
    ratios = scene.ratios(preset.policy)
    key = ("pieces", preset.weight, preset.reject, preset.veto, losses.kind(preset))
    return ratios.once(key, lambda: _pieces(scene, ratios, preset))


def _pieces(scene: Scene, ratios: Ratios, preset: Preset) -> Pieces:
    each = tuple((of(part, rules), rules) for part, rules in scene.parts(preset))
    (first, _), *rest = each
    sequences = first.kept.sequences
    tokens = sum((more.kept_tokens * sequences for more, _ in rest), first.kept_tokens)
    if preset.weight is not None and preset.weight.over in PER_SEQUENCE:
        weights, lengths = correction.weigh(ratios, preset).final.values, ratios.batch.lengths
        return Pieces(ratios, each, tokens, weights * lengths, powers(weights).times(tokens))
    weight_sum = sum((more.weight_sum for more, _ in rest), first.weight_sum)
    sums = first.sums
    for more, _ in rest:
        sums = sums.plus(more.sums.times(sequences))
    return Pieces(ratios, each, tokens, weight_sum, sums)
