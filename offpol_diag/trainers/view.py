"""Sums and extremes over the tokens of one batch under one preset, for trainers' logged metrics.

Values that do not depend on the preset are computed once for all presets of a block of sequences. This is
the trainers' only access to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.engine import correction, segments
from offpol_diag.engine.correction import Kept, Weighed
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import Array, Memo
from offpol_diag.pipeline import formulas
from offpol_diag.pipeline.plan import LOSSES
from offpol_diag.presets import Over, Policy, Preset, Reject, Statistic, Veto
from offpol_diag.trainers import LOGS
from offpol_diag.trainers.base import Columns, Ends, Ranges, applied, ends
from offpol_diag.trainers.measures import NEGATIVE, Mask, Measure

BLOCK = 1 << 17
"""Tokens at a time: in smaller blocks the overhead of calls exceeds the work, preset by preset."""

T = TypeVar("T")
How = Literal["Σ", "ends"]
Found = tuple[Array, ...]
"""The sum over the tokens of each sequence, or the minimum and the maximum, [S] each."""


# ---------------------------------------------------------------- some tokens


@dataclass(eq=False)
class Tokens:
    """All or some tokens of a batch under one preset: the inputs of measures, [T] each.

    Attributes:
        ratios: the tokens' ratios with the preset's numerator.
        preset: the preset.
    """

    ratios: Ratios
    preset: Preset

    @property
    def batch(self) -> Batch:
        """The packed tokens."""
        return self.ratios.batch

    @property
    def delta(self) -> Array:
        """Δ, nats."""
        return self.ratios.delta

    def column(self, name: str) -> Array:
        """Return an optional column of the batch, which must be there."""
        found: Array | None = getattr(self.batch, name)
        assert found is not None
        return found

    def of(self, policy: Policy) -> Tokens:
        """Return the same tokens with another numerator."""
        return Tokens(self.ratios.of(policy), self.preset)

    def ratio(self, safety: float | None = None) -> Array:
        """Return r, with Δ clamped to ±safety."""
        return self.ratios.once(("e^Δ", safety), lambda: np.exp(self.ratios.clamped(safety)))

    def excess(self, safety: float | None = None) -> Array:
        """r − 1, Δ clamped to ±safety."""
        return self.ratios.excess(safety)

    def k3(self, safety: float | None = None) -> Array:
        """r − 1 − Δ, Δ clamped to ±safety."""
        return self.ratios.once(
            ("e^Δ − 1 − Δ", safety), lambda: self.excess(safety) - self.ratios.clamped(safety)
        )

    def rollout_probability(self) -> Array:
        """π_rollout."""
        return self.ratios.of("rollout").once("π_rollout", lambda: np.exp(self.batch.rollout))

    @property
    def update(self) -> Array:
        """u of each token, nats: of π_θ against π_old, or the rollout where the trainer has no π_old."""
        if self.ratios.policy != "old":
            return self.ratios.of("current").delta
        return self.ratios.once("logged u", lambda: self.column("current") - self.column("old"))

    @property
    def update_ratio(self) -> Array:
        """e^u of each token."""
        if self.ratios.policy != "old":
            return self.of("current").ratio()
        return self.ratios.once("logged e^u", lambda: np.exp(self.update))

    def weigh(self) -> Weighed:
        """The preset's weights of these tokens, whether they are applied or not."""
        return correction.weigh(self.ratios, self.preset)

    @property
    def kept(self) -> Array | None:
        """Flags of tokens that pass the rules on tokens, [T] bool; None for all."""
        return correction.keep(self.ratios, applied(self.preset)).tokens

    def kept_by(self, before: Preset) -> Array | None:
        """Return flags of tokens that a preset's rules and veto keep, [T] bool; None for all."""
        if not before.reject and before.veto is None:
            return None
        kept = correction.keep(self.ratios, before)
        rows = segments.spread(kept.sequences, self.batch.cu_seqlens)
        return rows if kept.tokens is None else rows & kept.tokens

    def found(self, how: How, of: Measure, kept: Array | None = None) -> Found:
        """Return the sum of each sequence, [S], of flags how many are set; or both extremes, [S] each.

        Only tokens flagged in `kept` [T] count; None for all.
        """
        x, offsets = self._values(of), self.batch.cu_seqlens
        if how == "Σ" and x.dtype == bool:
            return (segments.count(x if kept is None else x & kept, offsets),)
        if how == "Σ":
            return (segments.total(x if kept is None else np.where(kept, x, 0.0), offsets),)
        low, high = (x, x) if kept is None else (np.where(kept, x, end) for end in (np.inf, -np.inf))
        return segments.smallest(low, offsets), segments.largest(high, offsets)

    def within(self, of: Measure, low: float, high: float) -> tuple[Array, ...]:
        """Σ of a measure clamped to limits and of its square, and how many lie above and below, [S] each."""
        x, offsets = self._values(of), self.batch.cu_seqlens
        inside = np.clip(x, low, high)
        sums = (segments.total(each, offsets) for each in (inside, inside**2))
        return *sums, *(segments.count(flags, offsets) for flags in (x > high, x < low))

    def _values(self, of: Measure) -> Array:
        x = self if of.policy is None else self.of(of.policy)
        return of.of(x) if of.own else x.ratios.once(("measure", of.name), lambda: of.of(x))


# ---------------------------------------------------------------- what a preset does


@dataclass(eq=False)
class Effect:
    """What a preset, as it is applied, does to the tokens and sequences of a batch; sums are [S] float64."""

    ratios: Ratios
    preset: Preset

    @cached_property
    def kept(self) -> Kept:
        """Tokens and sequences that pass rejection and veto."""
        return correction.keep(self.ratios, self.preset)

    @property
    def sequences(self) -> Array:
        """Sequences that pass every rule on sequences and the veto, [S] bool."""
        return self.kept.sequences

    @cached_property
    def weighed(self) -> Weighed | None:
        """Weights before rejection; None where every weight is 1."""
        return None if self.preset.weight is None else correction.weigh(self.ratios, self.preset)

    @property
    def per_sequence(self) -> Array | None:
        """Weights of sequences, [S]; None when tokens have their own, or there are none."""
        found = self.weighed
        return found.final.values if found is not None and found.final.per == "sequence" else None

    @cached_property
    def kept_tokens(self) -> Array:
        """Number of kept tokens."""
        batch, tokens = self.ratios.batch, self.kept.tokens
        passed = (
            batch.lengths.astype(np.float64) if tokens is None else segments.count(tokens, batch.cu_seqlens)
        )
        return passed * self.sequences

    @property
    def weight_sum(self) -> Array:
        """Sum of the final weights over all tokens, rejected or not."""
        return self._weight_sum(None)

    @property
    def kept_weight_sum(self) -> Array:
        """Sum of the final weights over kept tokens."""
        if self.weighed is None:
            return self.kept_tokens
        if self.per_sequence is not None:
            return self.per_sequence * self.kept_tokens
        return self._weight_sum(self.kept.tokens) * self.sequences

    def _weight_sum(self, kept: Array | None) -> Array:
        batch = self.ratios.batch
        if self.weighed is None:
            return batch.lengths.astype(np.float64)
        if self.per_sequence is not None:
            return self.per_sequence * batch.lengths
        w = self.weighed.final.values
        return segments.total(w if kept is None else np.where(kept, w, 0.0), batch.cu_seqlens)


# ---------------------------------------------------------------- a batch under a preset


@dataclass(eq=False)
class View:
    """One batch under one preset.

    Attributes:
        scene: the batch.
        preset: the preset.
        padded: whether denominators of means count masked tokens too, as no trainer should.
    """

    scene: Scene
    preset: Preset
    padded: bool = False
    _memo: Memo = field(default_factory=Memo, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, computed once per key for all presets of the batch."""
        return self.scene.once(("trainers", key), make)

    def mine(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, computed once per key for this preset."""
        return self._memo.once(key, make)

    @cached_property
    def ratios(self) -> Ratios:
        """The ratios of all tokens with the preset's numerator."""
        return self.scene.ratios(self.preset.policy)

    @property
    def batch(self) -> Batch:
        """The packed tokens."""
        return self.scene.batch

    @property
    def n(self) -> Array:
        """Tokens of each sequence, [S] float64."""
        return self.once("n", lambda: self.batch.lengths.astype(np.float64))

    @property
    def counted(self) -> Array:
        """Tokens of each sequence that denominators of means count, [S] float64."""
        return self.n + self.batch.masked if self.padded else self.n

    @property
    def divisor(self) -> Array:
        """Divisor of means over the tokens of each sequence: max(number, 1), [S]."""
        return self.once("n or 1", lambda: np.maximum(self.counted, 1))

    @property
    def nonempty(self) -> Array:
        """Sequences with a token, [S] bool."""
        return self.once("there", lambda: self.batch.lengths > 0)

    @property
    def zeros(self) -> Array:
        """Zeros, [S] float64."""
        return self.once("zeros", lambda: np.zeros_like(self.n))

    # ------------------------------------------------------------ sums over tokens

    def total(self, of: Measure, mask: Mask | None = None) -> Array:
        """Σ over the tokens of each sequence that the mask leaves, [S]; of flags, how many are set."""
        rows = of.rows and of.rows(self)
        if rows is not None:
            return rows * (self.n if mask is None else self._passed(mask))
        return self._found("Σ", of, mask)[0]

    def ends(self, of: Measure, mask: Mask | None = None) -> Ends:
        """The smallest and largest of each sequence, [S] each; ±inf where the mask leaves none."""
        rows = of.rows and of.rows(self)
        if rows is not None:
            return ends(rows, self.nonempty if mask is None else self._passed(mask) > 0)
        return self._found("ends", of, mask)  # type: ignore[return-value]

    def within(self, of: Measure, low: float, high: float) -> tuple[Array, ...]:
        """Σ of a measure clamped to limits and of its square, and how many lie above and below, [S] each."""
        return self.mine(("within", of.name, low, high), lambda: self.tokens.within(of, low, high))

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens of the batch."""
        return Tokens(self.ratios, self.preset)

    def _passed(self, mask: Mask) -> Array:
        """Tokens of each sequence that the mask leaves, [S]."""
        flags = self._flags(mask)
        return self.n if flags is None else segments.count(flags, self.batch.cu_seqlens)

    def _flags(self, mask: Mask) -> Array | None:
        """Return which tokens a mask selects, [T] bool; None for all."""
        return self.mine(mask, lambda: mask.of(self.tokens))

    def _found(self, how: How, of: Measure, mask: Mask | None) -> Found:
        """Return the sum or the extremes of each sequence; presets with the same flags share them."""
        kept = None if mask is None else self._flags(mask)
        if of.own:
            return self.tokens.found(how, of, kept)
        # the flags are kept with what was found: their id stays theirs
        key = how, of.policy or self.preset.policy, of.name, id(kept)
        return self.once(key, lambda: (self.tokens.found(how, of, kept), kept))[0]

    # ------------------------------------------------------------ what the preset does

    @cached_property
    def effect(self) -> Effect:
        """Which tokens and sequences the preset keeps, and its weights."""
        return Effect(self.ratios, applied(self.preset))

    def weigh(self) -> Weighed:
        """The weights, whether they are applied or not."""
        return correction.weigh(self.ratios, self.preset)

    def capped(self) -> Array:
        """Tokens whose weight a bound moved, or whose sequence's weight it did, [S]."""
        weighed = self.effect.weighed
        if weighed is None:
            return self.zeros
        moved = weighed.high + weighed.low
        return moved * self.n if weighed.final.per == "sequence" else moved

    def dropped_by(self, *rules: Reject) -> Array:
        """Count the tokens of each sequence that any of these rules drops, [S]."""
        return self.n - self.kept_by(replace(self.preset, reject=rules, veto=None))

    def kept_by(self, before: Preset) -> Array:
        """Count the tokens of each sequence that a preset's rules and veto keep, [S]."""
        return Effect(self.ratios, before).kept_tokens

    def aggregate_of_kept(self, over: Over, before: Preset) -> Array:
        """Return the sum or mean of Δ over the tokens that a preset's rules and veto keep, [S]."""
        some = self.ratios
        if before.reject or before.veto is not None:
            some = correction.among(some, some, before)
        return some.aggregate("ratio", over).values

    def tokens_above(self, over: Over, bound: float) -> Array:
        """Tokens of each sequence whose log-ratio, or their sequence's or turn's, is above a bound, [S]."""
        log = self.ratios.aggregate("ratio", over)
        found = correction.per_sequence(log.values > bound, log, self.batch)
        return found * self.n if log.per == "sequence" else found

    def passing_sequences(self) -> Array:
        """Flag the sequences that pass the rules on sequences, whatever the veto drops, [S] bool."""
        return correction.keep(self.ratios, replace(self.preset, veto=None)).sequences

    def passes(self, rule: Reject) -> Array:
        """Flag the sequences that pass a rule on sequences, [S] bool."""
        return correction.passes(self.ratios, rule).values

    def veto_hits(self, veto: Veto | None) -> Array:
        """Tokens of each sequence that lie beyond a veto's bounds, [S]."""
        return correction.veto_hits(self.ratios, veto)

    # ------------------------------------------------------------ numbers of sequences

    @property
    def mean_log(self) -> Array:
        """Mean Δ of each sequence, [S] nats; 0 for one without a token."""
        mean = self.ratios.aggregate("ratio", "mean").values
        return mean * self.n / self.divisor if self.padded else mean

    def turns(self, statistic: Statistic) -> tuple[Array, Array, Callable[[Array], Array]]:
        """Return means of a statistic over turns [R], token counts [R], and a function to sum by sequence."""
        batch = self.batch
        many = segments.lengths(batch.cu_runs).astype(np.float64)
        return self.ratios.turns(statistic), many, lambda x: segments.total(x, batch.turns)

    @property
    def pooled_update(self) -> Array | None:
        """u of each sequence under GSPO, [S]; else None: tokens have their own."""
        if not LOSSES[self.preset.loss].pooled:
            return None
        offsets = self.batch.cu_seqlens
        return self.once(("mean u", self.preset.policy), lambda: segments.mean(self.tokens.update, offsets))

    @property
    def pooled_ratio(self) -> Array | None:
        """e^u of each sequence under GSPO, [S]; else None."""
        u = self.pooled_update
        return None if u is None else self.once(("e^u", self.preset.policy), lambda: np.exp(u))

    @property
    def vespo_factor(self) -> Array:
        """φ of each sequence under VESPO, by the sign of its advantages, [S]."""
        offsets, shape = self.batch.cu_seqlens, self.preset.shape
        most = formulas.LOG_W_HIGHEST
        log_w = segments.total(np.clip(self.tokens.update, -most, most), offsets)
        if self.preset.weight is not None:
            final = self.weigh().final
            logs = formulas.bounded_log(final.values)  # type: ignore[no-untyped-call]
            log_w = log_w + (segments.total(logs, offsets) if final.per == "token" else logs)
        minus = self.total(NEGATIVE) > 0
        k = np.where(minus, shape.k_negative, shape.k_positive)
        rate = np.where(minus, shape.lambda_negative, shape.lambda_positive)
        found: Array = formulas.vespo_factor(log_w, k, rate)  # type: ignore[no-untyped-call]
        return found

    def where_nonempty(self, x: Array) -> Array:
        """Return x with 0 for sequences without a token, [S]."""
        return np.where(self.nonempty, x, 0.0)


# ---------------------------------------------------------------- all presets


def columns(scene: Scene, presets: Sequence[Preset]) -> tuple[Columns, Ranges]:
    """Compute the sums and extremes of a batch that the presets' logged metrics need, [S] each.

    A few sequences at a time.
    """
    batch = scene.batch
    spans = segments.spans(batch.cu_seqlens, BLOCK)
    parts = []
    for first, last in spans if presets else ():
        part = (
            Scene(batch.rows(first, last), scene.draws[first:last], scene.fits) if len(spans) > 1 else scene
        )
        sums: Columns = {}
        ranges: Ranges = {}
        for preset in presets:
            found = LOGS[preset.logs or ""].columns(View(part, preset))
            sums |= found[0]
            ranges |= found[1]
        parts.append((sums, ranges))
        if part is not scene:
            part.forget()
    if len(parts) <= 1:
        return parts[0] if parts else ({}, {})
    names, of_ends = parts[0]

    def joined(name: str) -> Ends:
        low, high = (np.concatenate(each) for each in zip(*(found[name] for _, found in parts), strict=True))
        return low, high

    return {name: np.concatenate([found[name] for found, _ in parts]) for name in names}, {
        name: joined(name) for name in of_ends
    }


def outermost(ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Reduce extremes over sequences to scalars; ±inf if there is no sequence."""
    return {
        name: (low.min(initial=np.inf), high.max(initial=-np.inf)) for name, (low, high) in ranges.items()
    }
