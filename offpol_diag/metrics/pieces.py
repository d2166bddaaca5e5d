"""One preset applied to one batch, near and far tokens apart: sums of both, per sequence.

What acts on whole sequences is decided once, by all tokens; what acts on tokens is looked at where it can.
Near tokens are summed as if nothing acted on them; what acts on a turn, or on tokens with one sign of the
advantage, multiplies the moments of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag import losses, segments
from offpol_diag.correction import beyond, by_turn, fails, seen, weigh_turns
from offpol_diag.memo import Memo
from offpol_diag.metrics.outcome import (
    PER_SEQUENCE,
    Outcome,
    WeightSums,
    applied,
    near_weight_sums,
    of,
    powers,
)
from offpol_diag.metrics.scene import Scene
from offpol_diag.moments import AWAY, Moments
from offpol_diag.near import neutral, on_turns, signs
from offpol_diag.presets import Preset, Reject
from offpol_diag.ratios import Ratios

Columns = Mapping[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Near:
    """The near tokens of each sequence, or of each turn with one sign of A, and what a preset does to them.

    Attributes:
        ratios: of the preset's numerator, all tokens.
        preset: what is left of the preset for near tokens.
        moments: over K rows: sequences [S] or turns [R].
        passes: rows that pass the rules on tokens, [R] bool; None for all.
        weights: of turns, [R]; None where tokens or sequences have their own, or there are none.
    """

    ratios: Ratios
    preset: Preset
    moments: Moments
    passes: Tensor | None = None
    weights: Tensor | None = None
    _memo: Memo = field(default_factory=Memo, repr=False, compare=False)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, computed once per key."""
        return self._memo.once(key, make)

    def of_passed(self, x: Tensor) -> Tensor:
        """Sums of rows → sums [S] over those that pass."""
        return self.of_all(x if self.passes is None else torch.where(self.passes, x, 0.0))

    def of_weighed(self, x: Tensor) -> Tensor:
        """The same, each row's times its weight."""
        return self.of_passed(x if self.weights is None else x * self.weights)

    def of_all(self, x: Tensor) -> Tensor:
        """Sums of rows → sums [S], whether they pass or not."""
        return segments.total(x, self.ratios.batch.turns) if self.moments.by_turn else x

    def given(self, x: Tensor) -> Tensor:
        """A number of each sequence [S] given to its rows."""
        return segments.spread(x, self.ratios.batch.turns) if self.moments.by_turn else x

    @cached_property
    def passed(self) -> Tensor:
        """Tokens that pass the rules on tokens, [S]."""
        return self.of_passed(self.moments.n)

    @property
    def weight_sum(self) -> Tensor:
        """Σ of the final weights, of tokens that do not pass too, [S]."""
        if self.weights is not None:
            return self.of_all(self.weights * self.moments.n)
        return self.of_all(self.moments.exp(self.preset.policy) if self.preset.weight else self.moments.n)

    def sums(self) -> WeightSums:
        """Of tokens' own weights or their turns', over those that pass."""
        w, n = self.weights, self.moments.n
        each = near_weight_sums(self.moments, self.preset.policy) if w is None else powers(w).times(n)
        return each.map(self.of_passed)

    def span(self) -> Columns:
        """The largest of the weights that pass, and of their negatives, [S]; -inf where none does."""
        w, policy = self.weights, self.preset.policy
        high = self.moments.high(policy).exp() if w is None else w
        low = self.moments.low(policy).exp() if w is None else w
        there = self.moments.n > 0 if self.passes is None else self.passes & (self.moments.n > 0)
        each = {"high": high, "minus low": -low}
        found = {name: torch.where(there, x, -torch.inf) for name, x in each.items()}
        if not self.moments.by_turn:
            return found
        return {name: segments.largest(x, self.ratios.batch.turns) for name, x in found.items()}


How = Callable[[Near, Columns], Columns]
"""What becomes of sums over rows: sums per sequence."""


def passing(near: Near, sums: Columns) -> Columns:
    """Over the rows that pass."""
    return {name: near.of_passed(x) for name, x in sums.items()}


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
    near: tuple[Near, ...] = ()

    @property
    def weighs_tokens(self) -> bool:
        """Whether tokens have weights of their own."""
        weight = self.preset.weight
        return weight is not None and weight.over not in PER_SEQUENCE

    @cached_property
    def passed(self) -> Tensor:
        """Tokens that pass the rules on tokens, [S]."""
        return _sum(self.first.passed, [near.passed for near in self.near])

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Tokens left, [S]."""
        return self.passed * self.sequences

    @cached_property
    def weight_sum(self) -> Tensor:
        """Σ of the final weights over all tokens, rejected or not, [S]."""
        if self.per_sequence is not None:
            return self.per_sequence * self.ratios.batch.lengths
        return _sum(self.first.weight_sum, [near.weight_sum for near in self.near])

    @cached_property
    def sums(self) -> WeightSums:
        """Of the final weights, over kept tokens."""
        if not self.weighs_tokens:
            one = torch.ones_like(self.kept_tokens)
            return powers(one if self.per_sequence is None else self.per_sequence).times(self.kept_tokens)
        each = reduce(WeightSums.plus, (near.sums() for near in self.near), self.first.moments())
        return each.times(self.sequences)

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
    far = scene.apart[0].of(preset.policy)
    return Pieces(ratios, preset, of(far, preset), tuple(_near(scene, ratios, preset)))


def _near(scene: Scene, ratios: Ratios, preset: Preset) -> Iterator[Near]:
    """The near tokens: by sequence; by turn where a rule or weight is of turns; by sign where a rule asks."""
    moments, rest = scene.moments, neutral(preset)
    rules = [(at, rule) for at, rule in enumerate(preset.reject) if on_turns(rule)]
    if not rules and not by_turn(preset.weight):
        yield ratios.once(("near", rest), lambda: Near(ratios, rest, moments))
        return
    weights = weigh_turns(ratios, preset).final.values if by_turn(preset.weight) else None
    for sign in signs(preset):
        passed = [_passes(ratios, preset, at, rule, sign) for at, rule in rules]
        passes = reduce(torch.logical_and, passed) if passed else None
        yield Near(ratios, rest, moments.turns(sign), passes, weights)


def _passes(ratios: Ratios, preset: Preset, at: int, rule: Reject, sign: str) -> Tensor:
    """Which turns a rule lets through where the advantage has a sign, [R] bool."""
    before = replace(preset, reject=preset.reject[:at])
    above, below = beyond(seen(ratios, before, rule), rule)
    sample = 1.0 if sign == "1+" or sign.startswith(AWAY) else -1.0 if sign == "1-" else 0.0
    advantage = above.values.new_full((), sample, dtype=torch.float64)
    passed = ~fails(rule, above.values, below.values, advantage)
    return passed if above.per == "turn" else segments.spread(passed, ratios.batch.turns)
