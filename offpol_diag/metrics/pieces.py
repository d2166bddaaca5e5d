"""One preset applied to one batch, near and far tokens apart: sums of both, per sequence.

What acts on whole sequences is decided once, by all tokens; what acts on tokens is looked at where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from offpol_diag import losses
from offpol_diag.metrics.outcome import PER_SEQUENCE, Moments, Outcome, applied, of, powers
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios


@dataclass(frozen=True)
class Pieces:
    """A preset applied to a batch; the names are those of `Outcome`, over all its tokens.

    Attributes:
        ratios: of the preset's numerator policy, all tokens.
        each: the far tokens' outcome and the near ones', with the preset as it applies there; or one.
    """

    ratios: Ratios
    each: tuple[tuple[Outcome, Preset], ...]

    @property
    def preset(self) -> Preset:
        """As it is applied."""
        return self.each[0][1]

    @property
    def weighs_tokens(self) -> bool:
        """Whether tokens have weights of their own."""
        weight = self.preset.weight
        return weight is not None and weight.over not in PER_SEQUENCE

    @property
    def close(self) -> Outcome | None:
        """The near tokens' outcome, where they are looked at apart."""
        return self.each[1][0] if len(self.each) > 1 else None

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Tokens left, [S]."""
        tokens = self.first.kept_tokens
        return tokens if self.close is None else tokens + self.close.kept_tokens * self.sequences

    @cached_property
    def weight_sum(self) -> Tensor:
        """Σ of the final weights over all tokens, rejected or not, [S]."""
        if self.per_sequence is not None:
            return self.per_sequence * self.ratios.batch.lengths
        total = self.first.weight_sum
        return total if self.close is None else total + self.close.weight_sum

    @cached_property
    def sums(self) -> Moments:
        """Of the final weights, over kept tokens."""
        if self.per_sequence is not None:
            return powers(self.per_sequence).times(self.kept_tokens)
        sums = self.first.sums
        return sums if self.close is None else sums.plus(self.close.sums.times(self.sequences))

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

    def acted(self, n: Tensor, there: Tensor, none: Tensor) -> dict[str, Tensor]:
        """What the bounds of the weights did, per sequence [S] float64; near no bound acts.

        Args:
            n: tokens of each sequence, as float64.
            there: 1 where there is one.
            none: 0 everywhere.

        Returns:
            high: weights above `upper`; low: below `lower`; units: of how many weights; bounded: on how many
            the safety bound acted, of how many tries.
        """
        weighed = self.first.weighed
        if weighed is None:
            return {"high": none, "low": none, "units": n, "bounded": none, "tries": n}
        tokens = weighed.final.per == "token"
        tries, units = (n, n) if tokens else (weighed.tries, there)
        acted = {"high": weighed.high, "low": weighed.low, "bounded": weighed.bounded}
        return acted | {"units": units, "tries": tries}

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
    return Pieces(ratios, tuple((of(part, rules), rules) for part, rules in scene.parts(preset)))
