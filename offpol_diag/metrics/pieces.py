"""One preset applied to one batch, near and far tokens apart: sums of both, per sequence.

What acts on whole sequences is decided once, by all tokens; what acts on tokens is looked at where it can.
Near tokens are summed as if nothing acted on them; what acts on a cell of them multiplies its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from offpol_diag import losses, segments
from offpol_diag.metrics.cells import cells, passes, weights
from offpol_diag.metrics.outcome import PER_SEQUENCE, Moments, Outcome, applied, of, powers
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.summed import Columns, Summed
from offpol_diag.near import neutral, splits
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios

Make = Summed[Outcome]
"""Sums over the tokens of an outcome that pass the rules on tokens."""


@dataclass(frozen=True)
class Lot:
    """Near tokens by cells [C], or by sequences where no cells matter, and what the preset does to each.

    Attributes:
        done: what is left of the preset for single tokens, applied.
        preset: that.
        there: cells whose tokens are looked at here, [C] bool; None for all.
        passes: cells that pass the rules on tokens, [C] bool; None for all.
        weights: of cells, [C]; None where tokens have their own, sequences have, or there are none.
        starts: where the cells of each sequence start, [S+1]; None where a cell is a sequence.
    """

    done: Outcome
    preset: Preset
    there: Tensor | None = None
    passes: Tensor | None = None
    weights: Tensor | None = None
    starts: Tensor | None = None

    @cached_property
    def left(self) -> Tensor | None:
        """1 where a cell is looked at here and passes, [C] float64; None for all."""
        if self.passes is None:
            return None
        return (self.passes if self.there is None else self.passes & self.there).to(torch.float64)

    def of_passed(self, x: Tensor) -> Tensor:
        """Sums of cells → sums [S] over those that pass."""
        return self._added(x if self.left is None else x * self.left)

    def of_weighed(self, x: Tensor) -> Tensor:
        """The same, each cell's times its weight."""
        return self.of_passed(x if self.weights is None else x * self.weights)

    def of_all(self, x: Tensor) -> Tensor:
        """Sums of cells → sums [S], whether they pass or not."""
        return self._added(x if self.there is None else torch.where(self.there, x, 0.0))

    def _added(self, x: Tensor) -> Tensor:
        return x if self.starts is None else segments.total(x, self.starts)

    @cached_property
    def passed(self) -> Tensor:
        """Tokens that pass the rules on tokens, [S]."""
        return self.of_passed(self.done.passed)

    @property
    def weight_sum(self) -> Tensor:
        """Σ of the final weights, of tokens that do not pass too, [S]."""
        return self.of_all(self.done.weight_sum if self.weights is None else self.weights * self.done.passed)

    def moments(self) -> Moments:
        """Of tokens' own weights or their cells', over those that pass."""
        w, done = self.weights, self.done
        each = done.moments() if w is None else powers(w).times(done.passed)
        return each.map(self.of_passed)

    def span(self, of: Make) -> Columns:
        """The largest of the weights that pass, and of their negatives, [S]; -inf where none does."""
        w = self.weights
        found = of(self.done, self.preset) if w is None else {"high": w, "minus low": -w}
        if self.left is None:
            return found
        there = (self.left > 0) & (self.done.passed > 0)
        found = {name: torch.where(there, x, -torch.inf) for name, x in found.items()}
        if self.starts is None:
            return found
        return {name: segments.largest(x, self.starts) for name, x in found.items()}


How = Callable[[Lot, Columns], Columns]
"""What becomes of sums over cells: sums per sequence."""


def passing(lot: Lot, sums: Columns) -> Columns:
    """Over the cells that pass."""
    return {name: lot.of_passed(x) for name, x in sums.items()}


@dataclass(frozen=True)
class Pieces:
    """A preset applied to a batch; the names are those of `Outcome`, over all its tokens.

    Attributes:
        ratios: of the preset's numerator policy, all tokens.
        preset: as it is applied.
        first: the outcome of what every rule and the veto have seen: the far tokens, or all.
        near: the near ones, where they are looked at apart.
    """

    ratios: Ratios
    preset: Preset
    first: Outcome
    near: tuple[Lot, ...] = ()

    @property
    def each(self) -> tuple[tuple[Outcome, Preset], ...]:
        """Outcomes token by token, each with the preset as it applies there; of cells there are none.

        Raises:
            ValueError: the preset looks at cells.
        """
        if any(lot.passes is not None for lot in self.near):
            raise ValueError("sums of cells are no outcomes of tokens")
        return (self.first, self.preset), *((lot.done, lot.preset) for lot in self.near)

    @property
    def weighs_tokens(self) -> bool:
        """Whether tokens have weights of their own."""
        weight = self.preset.weight
        return weight is not None and weight.over not in PER_SEQUENCE

    @cached_property
    def passed(self) -> Tensor:
        """Tokens that pass the rules on tokens, [S]."""
        return _sum(self.first.passed, [lot.passed for lot in self.near])

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Tokens left, [S]."""
        return self.passed * self.sequences

    @cached_property
    def weight_sum(self) -> Tensor:
        """Σ of the final weights over all tokens, rejected or not, [S]."""
        if self.per_sequence is not None:
            return self.per_sequence * self.ratios.batch.lengths
        return _sum(self.first.weight_sum, [lot.weight_sum for lot in self.near])

    @cached_property
    def sums(self) -> Moments:
        """Of the final weights, over kept tokens."""
        if not self.weighs_tokens:
            one = torch.ones_like(self.kept_tokens)
            return powers(one if self.per_sequence is None else self.per_sequence).times(self.kept_tokens)
        return Moments(**self.moments()).times(self.sequences)

    def moments(self) -> dict[str, Tensor]:
        """Sums of tokens' own weights, over those that pass the rules on tokens."""
        each = [self.first.moments().named(), *(lot.moments().named() for lot in self.near)]
        return {name: _sum(x, [one[name] for one in each[1:]]) for name, x in each[0].items()}

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


def _sum(x: Tensor, more: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, more, x)


def pieces(scene: Scene, preset: Preset) -> Pieces:
    """Apply a preset to the batch; presets that share rules share the work."""
    preset = applied(preset)
    ratios = scene.ratios(preset.policy)
    key = ("pieces", preset.weight, preset.reject, preset.veto, losses.kind(preset))
    return ratios.once(key, lambda: _pieces(scene, ratios, preset))


def _pieces(scene: Scene, ratios: Ratios, preset: Preset) -> Pieces:
    if not scene.divides(preset):
        return Pieces(ratios, preset, of(ratios, preset))
    far, rules = scene.apart[0].of(preset.policy), neutral(preset)
    return Pieces(ratios, preset, of(far, preset), tuple(_lots(scene, preset, rules)))


def _lots(scene: Scene, preset: Preset, rules: Preset) -> Iterator[Lot]:
    if scene.near is None or splits(preset, scene.near.radius):
        yield Lot(of(scene.apart[1].of(preset.policy), rules), rules)
        return
    for at in cells(scene, preset):
        done, passed = of(at.ratios.of(preset.policy), rules), passes(scene, preset, at)
        yield Lot(done, rules, at.there, passed, weights(scene, preset, at), at.starts)
