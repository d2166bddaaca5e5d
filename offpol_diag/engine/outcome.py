"""One preset applied to one batch: kept tokens and their weights, for far tokens and for near ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from offpol_diag.engine import correction, losses, segments
from offpol_diag.engine.correction import Kept, Weighed, beyond, by_turn, fails, seen, weigh_turns
from offpol_diag.engine.memo import Memo
from offpol_diag.engine.moments import Moments
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.rows import Inputs, Summed, flagged, left
from offpol_diag.engine.scene import Scene, neutral, on_turns, signs
from offpol_diag.engine.segments import numbers
from offpol_diag.presets import Policy, Preset, Reject

PER_SEQUENCE = ("sum", "mean")
"""`over` of weights that a whole sequence shares; over `token` and `segment` tokens have their own."""
SMALLEST_NORM = 1e-8
"""Normalisation divides only by mean weights above this."""
NORMS = ("norm", "norm_units")
"""Names of the sums that the mean weight is computed from: Σ of weights, and their number."""


@dataclass(frozen=True)
class WeightSums:
    """Sums of weights per sequence, [S] float64 each.

    Σw and Σw² stay exact when every weight is tiny, Σ(w − 1) and Σ(w − 1)² when every weight is near 1.

    Attributes:
        first: Σw.
        second: Σw².
        excess: Σ(w − 1).
        about_one: Σ(w − 1)².
    """

    first: Tensor
    second: Tensor
    excess: Tensor
    about_one: Tensor

    def named(self) -> dict[str, Tensor]:
        """Return the sums by name."""
        return dict(vars(self))

    def map(self, function: Callable[[Tensor], Tensor]) -> WeightSums:
        """Return the same sums with a function applied to each."""
        return WeightSums(**{name: function(x) for name, x in self.named().items()})

    def times(self, x: Tensor) -> WeightSums:
        """Multiply every sum by x [S]."""
        return WeightSums(self.first * x, self.second * x, self.excess * x, self.about_one * x)

    def plus(self, more: WeightSums) -> WeightSums:
        """Add the sums of other tokens."""
        return WeightSums(
            self.first + more.first,
            self.second + more.second,
            self.excess + more.excess,
            self.about_one + more.about_one,
        )


@dataclass(frozen=True)
class Outcome:
    """One preset applied to one batch, per sequence [S] float64.

    Attributes:
        ratios: ratios of the preset's numerator policy.
        preset: a preset with the same weight, rules and veto.
        kept: tokens and sequences that pass rejection and veto.
    """

    ratios: Ratios
    preset: Preset
    kept: Kept

    @cached_property
    def passed(self) -> Tensor:
        """Number of tokens that pass the rules on tokens."""
        return passing_tokens(self, self.preset)["passed"]

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Number of kept tokens."""
        return self.passed * self.kept.sequences

    @cached_property
    def weight_sum(self) -> Tensor:
        """Σ of the final weights over all unmasked tokens, rejected or not."""
        weight, lengths = self.preset.weight, self.ratios.batch.lengths
        if weight is None:
            return lengths.to(torch.float64)
        if weight.over not in PER_SEQUENCE:
            return _total(self.ratios, self.preset)
        return correction.weigh(self.ratios, self.preset).final.values * lengths

    @cached_property
    def sums(self) -> WeightSums:
        """Sums of the final weights over kept tokens."""
        weight, tokens = self.preset.weight, self.kept_tokens
        if weight is None:
            none = torch.zeros_like(tokens)
            return WeightSums(tokens, tokens, none, none)
        if weight.over in PER_SEQUENCE:
            return powers(correction.weigh(self.ratios, self.preset).final.values).times(tokens)
        return self.moments().times(self.kept.sequences)

    def moments(self) -> WeightSums:
        """Sum tokens' own weights over tokens that pass the rules on tokens."""
        return WeightSums(**token_moments(self, self.preset))

    @cached_property
    def weighed(self) -> Weighed | None:
        """Weights before rejection; None where the preset has none (every weight is 1)."""
        return None if self.preset.weight is None else correction.weigh(self.ratios, self.preset)


class Weights(Protocol):
    """Protocol of objects that have the sum of all weights per sequence."""

    @property
    def ratios(self) -> Ratios:
        """Ratios of all tokens."""
        ...

    @property
    def weight_sum(self) -> Tensor:
        """Sum of all weights per sequence, [S]."""
        ...


def applied(preset: Preset) -> Preset:
    """Return the preset as its trainer applies it: one that is only logged changes nothing."""
    return preset if preset.apply else replace(preset, weight=None, reject=(), veto=None)


def normalised(preset: Preset) -> bool:
    """Return whether weights are divided by a batch mean; a preset that is only logged divides nothing."""
    return preset.apply and preset.weight is not None and preset.weight.normalize


def of(ratios: Ratios, preset: Preset) -> Outcome:
    """Apply a preset to some tokens or all; presets that share rules share the work."""
    key = ("outcome", preset.weight, preset.reject, preset.veto)
    return ratios.once(key, lambda: Outcome(ratios, preset, correction.keep(ratios, preset)))


def _passing(done: Outcome, preset: Preset) -> Inputs | dict[str, Tensor]:
    if done.kept.tokens is not None:
        return (done.kept.tokens,)
    ratios = done.ratios
    return {"passed": ratios.once("lengths", lambda: ratios.batch.lengths.to(torch.float64))}


def _total(ratios: Ratios, preset: Preset) -> Tensor:
    """Sum the weights of all tokens per sequence."""
    return ratios.once(
        ("total", correction.weight_key(preset)),
        lambda: segments.total(correction.weigh(ratios, preset).final.values, ratios.batch.cu_seqlens),
    )


def powers(w: Tensor) -> WeightSums:
    """Compute the terms that each weight adds to the sums."""
    return WeightSums(w, w.square(), w - 1, (w - 1).square())


def token_weights(done: Outcome) -> Tensor:
    """Return the weights of tokens, [T]; the preset must weight tokens, not sequences."""
    assert done.weighed is not None
    return done.weighed.final.values


def _moments(weights: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
    return powers(weights).map(lambda x: left(x, keep)).named()


def near_weight_sums(near: Moments, policy: Policy) -> WeightSums:
    """Compute the weight sums of near tokens, whose weight is r."""
    x, xx = near.of("x", policy), near.of("x²", policy)
    return WeightSums(near.n + x, near.n + 2 * x + xx, x, xx)


def token_rules(done: Outcome, preset: Preset) -> tuple[Reject, ...]:
    """Key of the mask of single tokens: empty for presets that only drop whole sequences."""
    return applied(preset).reject if done.kept.tokens is not None else ()


passing_tokens = Summed(
    lambda done, preset: ("left", token_rules(done, preset)),
    _passing,
    lambda keep: {"passed": numbers(keep)},
)
"""Number of tokens that pass the rules on tokens."""
token_moments: Summed[Outcome] = Summed(
    lambda done, preset: ("moments", correction.weight_key(done.preset), token_rules(done, preset)),
    lambda done, preset: (token_weights(done), done.kept.tokens),
    _moments,
)
"""`WeightSums` of tokens' own weights, over those that pass the rules on tokens."""


def norm(done: Weights, preset: Preset) -> dict[str, Tensor]:
    """Compute the sums of the normalising mean: weights before rejection, over tokens or sequences."""
    if preset.weight is None or not preset.weight.normalize:
        return {}
    n = done.ratios.batch.lengths.to(torch.float64)
    if preset.weight.over == "token":
        return dict(zip(NORMS, (done.weight_sum, n), strict=True))
    return dict(zip(NORMS, (done.weight_sum / n.clamp(min=1), (n > 0).to(torch.float64)), strict=True))


def norm_factor(total: Tensor, units: Tensor) -> Tensor:
    """Compute the divisor of batch normalisation; 1 where the mean weight is at most 1e-8, as in verl."""
    mean_weight = total / units
    return torch.where(mean_weight > SMALLEST_NORM, mean_weight, 1.0)


Columns = Mapping[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Near:
    """Near tokens of each sequence, or of each turn with one sign of A, under one preset.

    Attributes:
        ratios: ratios of the preset's numerator, for all tokens.
        preset: the part of the preset that acts on near tokens.
        moments: sums per row: sequences [S] or turns [R].
        passes: rows that pass the rules on tokens, [R] bool; None for all.
        weights: weights of turns, [R]; None where tokens or sequences have their own, or there are none.
    """

    ratios: Ratios
    preset: Preset
    moments: Moments
    passes: Tensor | None = None
    weights: Tensor | None = None
    _memo: Memo = field(default_factory=Memo, repr=False, compare=False)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        return self._memo.once(key, make)

    def of_passed(self, x: Tensor) -> Tensor:
        """Add up sums of rows to sums [S] over the rows that pass."""
        return self.of_all(x if self.passes is None else torch.where(self.passes, x, 0.0))

    def of_weighed(self, x: Tensor) -> Tensor:
        """Add up sums of rows that pass to sums [S], each row times its weight."""
        return self.of_passed(x if self.weights is None else x * self.weights)

    def of_all(self, x: Tensor) -> Tensor:
        """Add up sums of rows to sums [S], whether the rows pass or not."""
        return segments.total(x, self.ratios.batch.turns) if self.moments.by_turn else x

    def given(self, x: Tensor) -> Tensor:
        """Spread a number of each sequence [S] to its rows."""
        return segments.spread(x, self.ratios.batch.turns) if self.moments.by_turn else x

    @cached_property
    def passed(self) -> Tensor:
        """Number of tokens that pass the rules on tokens, [S]."""
        return self.of_passed(self.moments.n)

    @property
    def weight_sum(self) -> Tensor:
        """Sum of the final weights over all near tokens, also those that do not pass, [S]."""
        if self.weights is not None:
            return self.of_all(self.weights * self.moments.n)
        return self.of_all(self.moments.exp(self.preset.policy) if self.preset.weight else self.moments.n)

    def sums(self) -> WeightSums:
        """Sum tokens' own weights, or their turns', over the rows that pass."""
        w, n = self.weights, self.moments.n
        each = near_weight_sums(self.moments, self.preset.policy) if w is None else powers(w).times(n)
        return each.map(self.of_passed)

    def span(self) -> Columns:
        """Return the largest weight that passes, and minus the smallest one, [S]; -inf where none passes."""
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
"""Function from sums over rows to sums per sequence."""


def passing(near: Near, sums: Columns) -> Columns:
    """Add up sums over the rows that pass."""
    return {name: near.of_passed(x) for name, x in sums.items()}


@dataclass(frozen=True)
class Pieces:
    """A preset applied to a whole batch; attributes are those of `Outcome`, over all its tokens.

    Attributes:
        ratios: ratios of the preset's numerator policy, for all tokens.
        preset: the preset as it is applied.
        first: the outcome on the far tokens, or on all where near tokens are not separate.
        near: the near tokens, where they are separate.
    """

    ratios: Ratios
    preset: Preset
    first: Outcome
    near: tuple[Near, ...] = ()

    @property
    def weighs_tokens(self) -> bool:
        """Return whether tokens have weights of their own."""
        weight = self.preset.weight
        return weight is not None and weight.over not in PER_SEQUENCE

    @cached_property
    def passed(self) -> Tensor:
        """Number of tokens that pass the rules on tokens, [S]."""
        return _sum(self.first.passed, [near.passed for near in self.near])

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Number of kept tokens, [S]."""
        return self.passed * self.sequences

    @cached_property
    def weight_sum(self) -> Tensor:
        """Sum of the final weights over all tokens, rejected or not, [S]."""
        if self.per_sequence is not None:
            return self.per_sequence * self.ratios.batch.lengths
        return _sum(self.first.weight_sum, [near.weight_sum for near in self.near])

    @cached_property
    def sums(self) -> WeightSums:
        """Sums of the final weights over kept tokens."""
        if not self.weighs_tokens:
            one = torch.ones_like(self.kept_tokens)
            return powers(one if self.per_sequence is None else self.per_sequence).times(self.kept_tokens)
        each = reduce(WeightSums.plus, (near.sums() for near in self.near), self.first.moments())
        return each.times(self.sequences)

    @property
    def sequences(self) -> Tensor:
        """Sequences that pass every rule on sequences and the veto, [S] bool."""
        return self.first.kept.sequences

    @property
    def per_sequence(self) -> Tensor | None:
        """Weights of sequences, [S]; None when tokens have their own, or there are none."""
        weight, weighed = self.first.preset.weight, self.first.weighed
        if weight is None or weighed is None or weight.over not in PER_SEQUENCE:
            return None
        return weighed.final.values

    def acted(self, n: Tensor, there: Tensor, none: Tensor) -> dict[str, Tensor]:
        """Count weights on which bounds acted, per sequence [S] float64; bounds never act on near tokens.

        Args:
            n: tokens of each sequence, as float64.
            there: 1 where the sequence has a token, else 0.
            none: 0 everywhere.

        Returns:
            high: weights above `upper`; low: below `lower`; units: number of weights; bounded: weights or
            tokens on which the safety bound acted; tries: number of those.
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
    """Yield the near tokens: by sequence, or by turn (and sign of A) where a rule or the weight needs it."""
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
    """Return which turns pass a rule for advantages of one sign, [R] bool."""
    before = replace(preset, reject=preset.reject[:at])
    above, below = beyond(seen(ratios, before, rule), rule)
    sample = {"1+": 1.0, "1-": -1.0}.get(sign, 0.0)
    advantage = above.values.new_full((), sample, dtype=torch.float64)
    passed = ~fails(rule, above.values, below.values, advantage)
    return passed if above.per == "turn" else segments.spread(passed, ratios.batch.turns)


def every(scene: Scene) -> dict[str, Tensor]:
    """Count the batch's tokens with A > 0 and with A < 0, [S] each."""
    return scene.once("signs", lambda: _every(scene))


def _every(scene: Scene) -> dict[str, Tensor]:
    ratios = scene.ratios("rollout")
    if ratios.apart is None:
        return _counts(ratios)
    far, near = _counts(ratios.apart.far), _near_counts(ratios.apart.near)
    return {name: x + near[name] for name, x in far.items()}


def _counts(ratios: Ratios) -> dict[str, Tensor]:
    offsets = ratios.batch.cu_seqlens
    return {name: segments.count(at, offsets) for name, at in _flags(ratios).items()}


def _near_counts(near: Moments) -> dict[str, Tensor]:
    return {"positive": near.of(side="1+"), "negative": near.of(side="1-")}


def _flags(ratios: Ratios) -> dict[str, Tensor]:
    """Return where A > 0 and where A < 0, [T] bool."""
    advantages = ratios.batch.advantages
    assert advantages is not None
    return ratios.once("signs of A", lambda: {"positive": advantages > 0, "negative": advantages < 0})


def _counted(done: Outcome, preset: Preset) -> Inputs:
    return (*_flags(done.ratios).values(), done.kept.tokens)


sign_counts = Summed(
    lambda done, preset: ("signs", token_rules(done, preset)),
    _counted,
    lambda up, down, keep: {"positive": flagged(up, keep), "negative": flagged(down, keep)},
    near=lambda near: _near_counts(near.moments),
)
"""Number of tokens with A > 0 and A < 0 that pass the rules on tokens, [S]."""
