"""Presets applied to a batch: kept tokens and their weights, for far tokens and for near ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import correction, segments
from offpol_diag.engine.correction import Kept, Weighed, beyond, by_turn, fails, ratios_for, weigh_units
from offpol_diag.engine.moments import Moments
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.rows import Columns, Inputs, Rows, Summed, flagged, joined, masked, merged, together
from offpol_diag.engine.scene import Scene, neutral, on_turns, signs
from offpol_diag.engine.segments import Memo, numbers
from offpol_diag.presets import Policy, Preset, Reject

PER_SEQUENCE = ("sum", "mean")
"""`over` of weights that a whole sequence shares; over `token` and `segment` tokens have their own."""
SMALLEST_NORM = 1e-8
"""Normalisation divides only by mean weights above this."""
NORMS = ("norm", "norm_units")
"""Names of the sums that the mean weight is computed from: Σ of weights, and their number."""

T = TypeVar("T")
Named = Mapping[str, Tensor]


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
        return self.map(lambda each: each * x)

    def plus(self, more: WeightSums) -> WeightSums:
        """Add the sums of other tokens."""
        return WeightSums(**{name: x + getattr(more, name) for name, x in self.named().items()})


def powers(w: Tensor) -> WeightSums:
    """Compute the terms that each weight adds to the sums."""
    return WeightSums(w, w.square(), w - 1, (w - 1).square())


def applied(preset: Preset) -> Preset:
    """Return the preset as its trainer applies it: one that is only logged changes nothing."""
    return preset if preset.apply else replace(preset, weight=None, reject=(), veto=None)


def normalised(preset: Preset) -> bool:
    """Return whether weights are divided by a batch mean; a preset that is only logged divides nothing."""
    return preset.apply and preset.weight is not None and preset.weight.normalize


# ---------------------------------------------------------------- one preset


@dataclass(frozen=True, eq=False)
class NearOutcome:
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
    _memo: Memo = field(default_factory=Memo, repr=False)

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
    def weighted(self) -> Tensor:
        """Number of tokens that pass the rules on tokens, with a weight that is not 0, [S]."""
        n = self.moments.n
        return self.of_passed(n if self.weights is None else torch.where(self.weights != 0, n, 0.0))

    @property
    def weight_sum(self) -> Tensor:
        """Sum of the final weights over all near tokens, also those that do not pass, [S]."""
        if self.weights is not None:
            return self.of_all(self.weights * self.moments.n)
        return self.of_all(self.moments.exp(self.preset.policy) if self.preset.weight else self.moments.n)

    @cached_property
    def sums(self) -> WeightSums:
        """Sums of tokens' own weights, or their turns', over the rows that pass."""
        w, n = self.weights, self.moments.n
        each = near_weight_sums(self.moments, self.preset.policy) if w is None else powers(w).times(n)
        return each.map(self.of_passed)

    @cached_property
    def span(self) -> dict[str, Tensor]:
        """Largest weight that passes, and minus the smallest one, [S]; -inf where none passes."""
        w, policy = self.weights, self.preset.policy
        high = self.moments.high(policy).exp() if w is None else w
        low = self.moments.low(policy).exp() if w is None else w
        there = self.moments.n > 0 if self.passes is None else self.passes & (self.moments.n > 0)
        found = {name: torch.where(there, x, -torch.inf) for name, x in (("high", high), ("minus low", -low))}
        if not self.moments.by_turn:
            return found
        return {name: segments.largest(x, self.ratios.batch.turns) for name, x in found.items()}


def near_weight_sums(near: Moments, policy: Policy) -> WeightSums:
    """Compute the weight sums of near tokens, whose weight is r."""
    x, xx = near.of("x", policy), near.of("x²", policy)
    return WeightSums(near.n + x, near.n + 2 * x + xx, x, xx)


@dataclass(frozen=True, eq=False)
class Outcome:
    """One preset applied to one batch; numbers are per sequence, [S] float64.

    Attributes:
        ratios: ratios of the preset's numerator policy, for all tokens.
        preset: the preset as it is applied.
        far: ratios of the tokens looked at one by one: the far ones, or all where none is near.
        kept: the far tokens that pass the rules on tokens, and the sequences that pass the others.
        near: the near tokens.
    """

    ratios: Ratios
    preset: Preset
    far: Ratios
    kept: Kept
    near: tuple[NearOutcome, ...] = ()

    @property
    def weighs_tokens(self) -> bool:
        """Return whether tokens have weights of their own."""
        weight = self.preset.weight
        return weight is not None and weight.over not in PER_SEQUENCE

    @cached_property
    def weighed(self) -> Weighed | None:
        """Weights of far tokens, or of sequences, before rejection; None where every weight is 1."""
        return None if self.preset.weight is None else correction.weigh(self.far, self.preset)

    @property
    def token_weights(self) -> Tensor:
        """Weights of the far tokens, [T]; the preset must weight tokens, not sequences."""
        assert self.weighed is not None
        return self.weighed.final.values

    @property
    def per_sequence(self) -> Tensor | None:
        """Weights of sequences, [S]; None when tokens have their own, or there are none."""
        return None if self.weighed is None or self.weighs_tokens else self.weighed.final.values

    @property
    def sequences(self) -> Tensor:
        """Sequences that pass every rule on sequences and the veto, [S] bool."""
        return self.kept.sequences

    @cached_property
    def passed(self) -> Tensor:
        """Number of tokens that pass the rules on tokens."""
        return reduce(torch.add, (near.passed for near in self.near), passing_tokens(self)["passed"])

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Number of kept tokens."""
        return self.passed * self.sequences

    @cached_property
    def weight_sum(self) -> Tensor:
        """Sum of the final weights over all tokens, rejected or not."""
        if self.per_sequence is not None:
            return self.per_sequence * self.ratios.batch.lengths
        batch = self.far.batch
        if self.weighed is None:
            total = batch.lengths.to(torch.float64)
        else:
            key = "total", correction.weight_key(self.preset)
            total = self.far.once(key, lambda: segments.total(self.token_weights, batch.cu_seqlens))
        return reduce(torch.add, (near.weight_sum for near in self.near), total)

    @cached_property
    def sums(self) -> WeightSums:
        """Sums of the final weights over kept tokens."""
        if not self.weighs_tokens:
            one = torch.ones_like(self.kept_tokens)
            return powers(one if self.per_sequence is None else self.per_sequence).times(self.kept_tokens)
        far = WeightSums(**weight_sums(self))
        return reduce(WeightSums.plus, (near.sums for near in self.near), far).times(self.sequences)

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
        found = self.weighed
        if found is None:
            return {"high": none, "low": none, "units": n, "bounded": none, "tries": n}
        tokens = found.final.per == "token"
        acted = {"high": found.high, "low": found.low, "bounded": found.bounded}
        return acted | {"units": n if tokens else there, "tries": n if tokens else found.tries}


def of(ratios: Ratios, preset: Preset) -> Outcome:
    """Apply a preset to tokens one by one."""
    return Outcome(ratios, preset, ratios, correction.keep(ratios, preset))


def apply(scene: Scene, preset: Preset) -> Outcome:
    """Apply a preset to the batch, to near tokens together; presets that share rules share the work."""
    preset = applied(preset)
    ratios = scene.ratios(preset.policy)
    key = ("outcome", preset.weight, preset.reject, preset.veto, preset.loss, preset.clip, preset.shape)
    return ratios.once(key, lambda: _apply(scene, ratios, preset))


def _looked_at(scene: Scene, preset: Preset) -> Ratios:
    """Return the ratios of tokens looked at one by one: the far ones, or all where none is near."""
    return scene.far_and_near[0].of(preset.policy) if scene.divides(preset) else scene.ratios(preset.policy)


def _apply(scene: Scene, ratios: Ratios, preset: Preset) -> Outcome:
    far, near = _looked_at(scene, preset), scene.divides(preset)
    kept = correction.keep(far, preset)
    return Outcome(ratios, preset, far, kept, tuple(_near(scene, ratios, preset)) if near else ())


def _near(scene: Scene, ratios: Ratios, preset: Preset) -> Iterator[NearOutcome]:
    """Yield the near tokens: by sequence, or by turn (and sign of A) where a rule or the weight needs it."""
    moments, rest = scene.moments, neutral(preset)
    rules = [(at, rule) for at, rule in enumerate(preset.reject) if on_turns(rule)]
    if not rules and not by_turn(preset.weight):
        yield ratios.once(("near", rest), lambda: NearOutcome(ratios, rest, moments))
        return
    weights = weigh_units(ratios, preset).final.values if by_turn(preset.weight) else None
    for sign in signs(preset):
        passed = [_passes(ratios, preset, at, rule, sign) for at, rule in rules]
        passes = reduce(torch.logical_and, passed) if passed else None
        yield NearOutcome(ratios, rest, moments.turns(sign), passes, weights)


def _passes(ratios: Ratios, preset: Preset, at: int, rule: Reject, sign: str) -> Tensor:
    """Return which turns pass a rule for advantages of one sign, [R] bool."""
    before = replace(preset, reject=preset.reject[:at])
    above, below = beyond(ratios_for(ratios, before, rule), rule)
    sample = {"1+": 1.0, "1-": -1.0}.get(sign, 0.0)
    advantage = above.values.new_full((), sample, dtype=torch.float64)
    passed = ~fails(rule, above.values, below.values, advantage)
    return passed if above.per == "turn" else segments.spread(passed, ratios.batch.turns)


def norm(done: Any, preset: Preset) -> dict[str, Tensor]:
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


# ---------------------------------------------------------------- sums over tokens


def _passing(done: Outcome) -> Inputs | dict[str, Tensor]:
    if done.kept.tokens is not None:
        return (done.kept.tokens,)
    return {"passed": done.far.once("lengths", lambda: done.far.batch.lengths.to(torch.float64))}


passing_tokens = Summed(
    _passing, lambda keep: {"passed": numbers(keep)}, lambda near: {"passed": near.moments.n}
)
"""Number of tokens that pass the rules on tokens."""
weight_sums = Summed(
    lambda done: (done.token_weights, done.kept.tokens),
    lambda w, keep: powers(w).map(lambda x: masked(x, keep)).named(),
    lambda near: near.sums.named(),
)
"""`WeightSums` of tokens' own weights, over those that pass the rules on tokens."""
weighted_tokens = Summed(
    lambda done: (done.token_weights, done.kept.tokens),
    lambda w, keep: {"weighted": flagged(w != 0, keep)},
    lambda near: {"weighted": near.weighted},
)
"""Number of tokens with weights of their own that pass the rules on tokens, with one that is not 0."""
weight_spans = Summed(
    lambda done: (done.token_weights, done.kept.tokens),
    lambda w, keep: {"high": masked(w, keep, -torch.inf), "minus low": masked(-w, keep, -torch.inf)},
    lambda near: near.span,
    segments.largest,
    torch.maximum,
)
"""Largest weight of a sequence's tokens that pass the rules on tokens, and minus the smallest one."""


def every(scene: Scene) -> dict[str, Tensor]:
    """Count the batch's tokens with A > 0 and with A < 0, [S] each."""
    return scene.once("signs", lambda: _every(scene))


def _every(scene: Scene) -> dict[str, Tensor]:
    ratios = scene.ratios("rollout")
    if ratios.split is None:
        return _counts(ratios)
    far, near = _counts(ratios.split.far), near_counts(ratios.split.near)
    return {name: x + near[name] for name, x in far.items()}


def _counts(ratios: Ratios) -> dict[str, Tensor]:
    offsets = ratios.batch.cu_seqlens
    return {name: segments.count(at, offsets) for name, at in _flags(ratios).items()}


def near_counts(near: Moments) -> dict[str, Tensor]:
    """Count the near tokens with A > 0 and with A < 0 of each row."""
    return {"positive": near.of(side="1+"), "negative": near.of(side="1-")}


def _flags(ratios: Ratios) -> dict[str, Tensor]:
    """Return where A > 0 and where A < 0, [T] bool."""
    advantages = ratios.batch.advantages
    assert advantages is not None
    return ratios.once("signs of A", lambda: {"positive": advantages > 0, "negative": advantages < 0})


sign_counts = Summed(
    lambda done: (*_flags(done.far).values(), done.kept.tokens),
    lambda up, down, keep: {"positive": flagged(up, keep), "negative": flagged(down, keep)},
    lambda near: near_counts(near.moments),
)
"""Number of tokens with A > 0 and A < 0 that pass the rules on tokens, [S]."""


# ---------------------------------------------------------------- many presets

How = Callable[[NearOutcome, Named], Named]
"""Function from sums over rows to sums per sequence."""


def passing(near: NearOutcome, sums: Named) -> Named:
    """Add up sums over the rows that pass."""
    return {name: near.of_passed(x) for name, x in sums.items()}


def as_they_are(near: NearOutcome, sums: Named) -> Named:
    """Return sums that are per sequence already."""
    return sums


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Many presets applied to one batch; numbers are float64, with a row per distinct result.

    Attributes:
        scene: the batch and its log-ratios.
        presets: the P presets.
        each: the outcome of each.
    """

    scene: Scene
    presets: tuple[Preset, ...]
    each: tuple[Outcome, ...]
    _memo: Memo = field(default_factory=Memo, init=False, repr=False)

    @classmethod
    def of(cls, scene: Scene, presets: Sequence[Preset]) -> Outcomes:
        """Apply presets to the batch."""
        done = [applied(preset) for preset in presets]
        correction.evaluate((_looked_at(scene, preset), preset) for preset in done)
        return cls(scene, tuple(presets), tuple(apply(scene, preset) for preset in presets))

    def only(self, which: Callable[[Preset], bool]) -> Outcomes:
        """Select the presets for which `which` is true."""
        return self._picked([at for at, preset in enumerate(self.presets) if which(preset)])

    @property
    def divided(self) -> tuple[Outcomes, Outcomes]:
        """Presets whose near tokens are separate, and all others."""
        divided = [bool(one.near) for one in self.each]
        one, two = ([at for at, flag in enumerate(divided) if flag is x] for x in (True, False))
        return self._picked(one), self._picked(two)

    def _picked(self, at: Sequence[int]) -> Outcomes:
        if len(at) == len(self.presets):
            return self
        return Outcomes(
            self.scene, tuple(self.presets[row] for row in at), tuple(self.each[row] for row in at)
        )

    def named(self, columns: Mapping[str, Rows | Tensor]) -> Columns:
        """Name columns by preset: one column [S] per preset; a plain tensor [S] is shared by all presets."""
        if not columns:
            return Columns((), ())
        many = len(self.presets)
        rows = [x if isinstance(x, Rows) else Rows(x[None], (0,) * many) for x in columns.values()]
        names = _names(tuple(columns), tuple(preset.name for preset in self.presets))
        begins = np.cumsum([0, *(len(x.values) for x in rows[:-1])])
        at = np.array([x.at for x in rows], dtype=np.int64) + begins[:, None]
        return Columns(names, tuple(x.values for x in rows), torch.from_numpy(at.flatten()))

    @property
    def batch(self) -> Batch:
        """The packed batch."""
        return self.scene.batch

    @cached_property
    def n(self) -> Tensor:
        """Tokens of each sequence, [S]."""
        return self.scene.counts["tokens"]

    @cached_property
    def none(self) -> Tensor:
        """Zero for every sequence, [S]."""
        return torch.zeros_like(self.n)

    @cached_property
    def one(self) -> Tensor:
        """One for every sequence, [S]."""
        return torch.ones_like(self.n)

    def rows(self, make: Callable[[Outcome], Tensor]) -> Rows:
        """Compute a row [S] per preset, stored once for presets with the same tensor."""
        if not self.each:
            return Rows(self.n.new_zeros((0, len(self.n))), ())
        return Rows.of_tensors([make(one) for one in self.each])

    @cached_property
    def sequences(self) -> Rows:
        """1 where a sequence passes every rule on sequences and the veto, else 0."""
        return self.rows(lambda one: one.sequences).map(segments.numbers)

    @cached_property
    def passed(self) -> Rows:
        """Number of tokens that pass the rules on tokens."""
        return self.total(passing_tokens)["passed"] if self.each else self.rows(lambda one: self.n)

    @cached_property
    def kept(self) -> Rows:
        """Number of kept tokens."""
        return joined(torch.mul, self.passed, self.sequences)

    @cached_property
    def weights(self) -> Rows:
        """Weights of sequences; 1 where tokens have their own, or there are none."""
        return self.rows(lambda one: self.one if one.per_sequence is None else one.per_sequence)

    @cached_property
    def sums(self) -> dict[str, Rows]:
        """Sums of the final weights over kept tokens, by the names of `WeightSums`."""
        found = self._of_weights(weight_sums, lambda w, passed: powers(w).times(passed).named())
        return {name: joined(torch.mul, x, self.sequences) for name, x in found.items()}

    @cached_property
    def weighted(self) -> Rows:
        """Number of kept tokens whose final weight is not 0."""
        found = self._of_weights(
            weighted_tokens, lambda w, passed: {"weighted": torch.where(w != 0, passed, 0.0)}
        )
        return joined(torch.mul, found["weighted"], self.sequences)

    @cached_property
    def spans(self) -> tuple[Rows, Rows]:
        """Smallest and largest final weight of each sequence's kept tokens; (+inf, -inf) if none."""
        found = self._of_weights(weight_spans, lambda w, passed: {"high": w, "minus low": -w})
        high, minus = (
            joined(lambda x, kept: torch.where(kept > 0, x, -torch.inf), x, self.kept) for x in found.values()
        )
        return minus.map(torch.neg), high

    def _of_weights(
        self, of_tokens: Summed, of_sequences: Callable[[Tensor, Tensor], Named]
    ) -> dict[str, Rows]:
        """Compute columns from the weights of tokens, or of whole sequences and their passing tokens."""
        own, others = (
            [at for at, one in enumerate(self.each) if one.weighs_tokens is x] for x in (True, False)
        )
        each, at = together(self.weights.of(others), self.passed.of(others))
        found = {name: Rows(x, at) for name, x in of_sequences(*each).items()}
        if not own:
            return found
        tokens = self._picked(own).total(of_tokens, as_they_are)
        return {name: merged({tuple(others): x, tuple(own): tokens[name]}) for name, x in found.items()}

    def total(self, make: Summed, how: How = passing) -> dict[str, Rows]:
        """Sum over the tokens that pass the rules on tokens, by column; cached."""
        return self._memo.once(make, lambda: self._total(make, how))

    def _total(self, make: Summed, how: How) -> dict[str, Rows]:
        """Sum over far tokens, and join the sums of near ones."""

        def sums(near: NearOutcome) -> Named:
            return near.once((make, how), lambda: how(near, near.once(make, lambda: make.near(near))))

        names, far = make.of_many(self.each)
        many: dict[int, list[int]] = {}
        for preset, done in enumerate(self.each):
            many.setdefault(len(done.near), []).append(preset)
        found = {}
        for count, presets in many.items():
            rows = far.of(presets)
            for at in range(count):
                more = [sums(self.each[preset].near[at]) for preset in presets]
                rows = joined(make.join, rows, Rows.of_columns([{n: x[n] for n in names} for x in more]))
            found[tuple(presets)] = rows
        every = merged(found)
        return {name: Rows(x, every.at) for name, x in zip(names, every.values.unbind(1), strict=True)}


@cache
def _names(columns: tuple[str, ...], presets: tuple[str, ...]) -> tuple[str, ...]:
    """Name columns for every preset, column by column; cached, since every batch has the same."""
    return tuple(f"{preset}|{column}" for column in columns for preset in presets)
