"""Sums and extremes over the tokens of one batch under one preset, for trainers' logged metrics.

Nearly all tokens are near: so close to on-policy that no rule and no bound of a preset acts on them. Their
sums are computed once for all presets of a numerator, in blocks that fit the cache; only the few far tokens
are processed for each preset. This is the trainers' only access to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import correction, losses, outcome, segments
from offpol_diag.engine.batching import Graph, computed, reduced
from offpol_diag.engine.correction import Weighed
from offpol_diag.engine.outcome import Outcome
from offpol_diag.engine.ratios import Level, Ratios
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import Memo, here
from offpol_diag.presets import BINARY, Over, Policy, Preset, Reject, Statistic, Veto
from offpol_diag.trainers import LOGS
from offpol_diag.trainers.base import Columns, Ends, Ranges, applied, ends
from offpol_diag.trainers.measures import K1, LOG, NEGATIVE, Mask, Measure, squared

T = TypeVar("T")
How = Literal["sum", "min", "max"]
REDUCE: dict[str, tuple[segments.Reduce, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (segments.total, torch.add),
    "min": (segments.smallest, torch.minimum),
    "max": (segments.largest, torch.maximum),
}
"""Reduction of the tokens of a sequence, and what joins the results of near and far ones."""
WITHIN: tuple[Callable[[Tensor, float, float], Tensor], ...] = (
    lambda x, low, high: x.clamp(low, high),
    lambda x, low, high: x.clamp(low, high).square(),
    lambda x, low, high: x > high,
    lambda x, low, high: x < low,
)
BLOCK = 1 << 16
"""Number of near tokens in a block."""
HELD = 1 << 26
"""Bytes of tokens' numbers that may wait until they are summed for several presets at once."""


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
    def delta(self) -> Tensor:
        """Δ, nats."""
        return self.ratios.delta

    def column(self, name: str) -> Tensor:
        """Return an optional column of the batch, which must be there."""
        found = getattr(self.batch, name)
        assert isinstance(found, Tensor)
        return found

    def of(self, policy: Policy) -> Tokens:
        """Return the same tokens with another numerator."""
        return Tokens(self.ratios.of(policy), self.preset)

    def ratio(self, safety: float | None = None) -> Tensor:
        """Return r, with Δ clamped to ±safety."""
        return self.ratios.once(("e^Δ", safety), lambda: torch.exp(self.ratios.clamped(safety)))

    def excess(self, safety: float | None = None) -> Tensor:
        """r − 1, Δ clamped to ±safety."""
        return self.ratios.excess(safety)

    def k3(self, safety: float | None = None) -> Tensor:
        """r − 1 − Δ, Δ clamped to ±safety."""
        return self.ratios.once(
            ("e^Δ − 1 − Δ", safety), lambda: self.excess(safety) - self.ratios.clamped(safety)
        )

    def rollout_probability(self) -> Tensor:
        """π_rollout."""
        return self.ratios.of("rollout").once("π_rollout", lambda: self.batch.rollout.exp())

    @property
    def update(self) -> Tensor:
        """u of each token, nats: of π_θ against π_old, or the rollout where the trainer has no π_old."""
        if self.ratios.policy != "old":
            return self.ratios.of("current").delta
        return self.ratios.once("logged u", lambda: self.column("current") - self.column("old"))

    @property
    def update_ratio(self) -> Tensor:
        """e^u of each token."""
        if self.ratios.policy != "old":
            return self.of("current").ratio()
        return self.ratios.once("logged e^u", lambda: torch.exp(self.update))

    def weigh(self) -> Weighed:
        """The preset's weights of these tokens, whether they are applied or not."""
        return correction.weigh(self.ratios, self.preset)

    @property
    def kept(self) -> Tensor | None:
        """Flags of tokens that pass the rules on tokens, [T] bool; None for all."""
        return outcome.of(self.ratios, applied(self.preset)).kept.tokens

    def kept_by(self, before: Preset) -> Tensor | None:
        """Return flags of tokens that a preset's rules and veto keep, [T] bool; None for all."""
        if not before.reject and before.veto is None:
            return None
        kept = correction.keep(self.ratios, before)
        rows = segments.spread(kept.sequences, self.batch.cu_seqlens)
        return rows if kept.tokens is None else rows & kept.tokens

    def values(self, of: Measure) -> Tensor:
        """Compute a measure, [T]; once for all presets, unless it depends on more than their numerator."""
        x = self if of.policy is None else self.of(of.policy)
        return of.of(x) if of.own else x.ratios.once(("measure", of.name), lambda: of.of(x))


Parts = tuple[Tokens, Ratios | None]
"""Far tokens, on which a preset can act, and near ones, on which it cannot (None if all are far)."""

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

    @cached_property
    def graph(self) -> Graph:
        """The operations recorded for all presets of the batch."""
        return self.once("graph", Graph)

    @cached_property
    def n(self) -> Tensor:
        """Tokens of each sequence, [S] float64."""
        return self.graph.leaf(self.once("n", lambda: self.batch.lengths.to(torch.float64)))

    @cached_property
    def counted(self) -> Tensor:
        """Tokens of each sequence that denominators of means count, [S] float64."""
        return self.n + self.batch.masked if self.padded else self.n

    @property
    def divisor(self) -> Tensor:
        """Divisor of means over the tokens of each sequence: max(number, 1), [S]."""
        return self.counted.clamp(min=1)

    @property
    def nonempty(self) -> Tensor:
        """Sequences with a token, [S] bool."""
        return self.n > 0

    @property
    def zeros(self) -> Tensor:
        """Zeros, [S] float64."""
        return torch.zeros_like(self.n)

    # ------------------------------------------------------------ sums over tokens

    def total(self, of: Measure, mask: Mask | None = None) -> Tensor:
        """Σ over the tokens of each sequence that the mask leaves, [S]; of flags, how many are set."""
        rows = of.rows and of.rows(self)
        if rows is not None:
            return rows * (self.n if mask is None else self._passed(mask))
        return self._merged("sum", of, mask)

    def ends(self, of: Measure, mask: Mask | None = None) -> Ends:
        """The smallest and largest of each sequence, [S] each; ±inf where the mask leaves none."""
        rows = of.rows and of.rows(self)
        if rows is not None:
            return ends(rows, self.nonempty if mask is None else self._passed(mask) > 0)
        return self._merged("min", of, mask), self._merged("max", of, mask)

    def within(self, of: Measure, low: float, high: float) -> tuple[Tensor, ...]:
        """Σ of a measure clamped to limits and of its square, and how many lie above and below, [S] each."""
        acted, near = self._unruled if of.own else self._split
        x, same, policy = self._values(acted, of), on_near(of), self.preset.policy
        offsets = acted.batch.cu_seqlens
        found = [self.graph.reduced(segments.total, (x, low, high), None, offsets, term) for term in WITHIN]
        if near is None or same is None:
            return tuple(found)
        least, most = (near_sum(self.scene, policy, end, same) for end in ("min", "max"))
        if here(least) and bool((least >= low).all()) and bool((most <= high).all()):  # no GPU waits
            sums = [near_sum(self.scene, policy, "sum", one) for one in (same, squared(same))]
        else:
            key = "within", policy, same.name, low, high
            close = Tokens(near.of(policy), self.preset)
            sums = self.once(key, lambda: _within(close.values(same), low, high, near.batch))
        return *(a + b for a, b in zip(found, sums, strict=False)), *found[len(sums) :]

    def _values(self, tokens: Tokens, of: Measure) -> Tensor:
        return self.mine(("values", id(tokens), of), lambda: tokens.values(of))

    def _flags(self, mask: Mask) -> Tensor | None:
        """Flag the far tokens that the mask leaves, [T] bool; None for all."""
        return self.mine(("mask", mask), lambda: mask.of(self._ruled[0]))

    def _passed(self, mask: Mask) -> Tensor:
        """Tokens of each sequence that the mask leaves, [S]."""
        near = self._ruled[1]
        passed = self._count(self._flags(mask))
        return passed if near is None or not mask.near else passed + near.batch.lengths

    def _count(self, flags: Tensor | None) -> Tensor:
        """Count the flagged far tokens of each sequence, [S]; all for None."""
        return self._of_far(self.far.batch, flags)

    def _of_far(self, batch: Batch, x: Tensor | None, kept: Tensor | None = None) -> Tensor:
        """Sum x [T] over the kept tokens of each sequence, [S]; None for the number of all."""
        if x is None:
            return self.graph.leaf(batch.lengths).to(torch.float64)
        return self.graph.reduced(segments.total, (x,), kept, batch.cu_seqlens)

    def _merged(self, how: How, of: Measure, mask: Mask | None) -> Tensor:
        """Return the sums or extremes over far and near tokens together."""
        same, policy = on_near(of), of.policy or self.preset.policy
        ruled, kept = mask is not None, None if mask is None else self._flags(mask)
        if not (ruled or of.own or same is None or same.moment or same.linear or same.rising):
            key = "all", how, policy, of.name
            return self.graph.leaf(self.once(key, lambda: _of_blocks(self.scene.ratios(policy), how, of)))
        acted, near = self._ruled if ruled else self._unruled if of.own else self._split
        reduce, join = REDUCE[how]
        far = self.graph.reduced(reduce, (self._values(acted, of),), kept, acted.batch.cu_seqlens)
        if near is None or same is None or not (mask is None or mask.near):
            return far
        return join(far, near_sum(self.scene, policy, how, same))

    @cached_property
    def _split(self) -> Parts:
        """Far and near tokens by the widest criterion, the same for all presets."""
        return self._parted(Preset("", "", self.preset.policy, loss="reinforce"))

    @cached_property
    def _ruled(self) -> Parts:
        """Far tokens, on which the preset can act, and near ones (None if all are far)."""
        return self._parted(parting(self.preset))

    @cached_property
    def _unruled(self) -> Parts:
        """Far and near tokens for measures that rejection rules do not affect."""
        weight = self.preset.weight
        if not self.preset.reject or (weight and weight.among == "left"):
            return self._ruled
        return self._parted(parting(replace(self.preset, reject=(), veto=None)))

    def _parted(self, judge: Preset | None) -> Parts:
        if judge is None:
            return Tokens(self.ratios, self.preset), None
        far, *near = self.scene.parts(judge)
        return Tokens(far[0], self.preset), near[0][0] if near else None

    # ------------------------------------------------------------ the outcome of the preset

    @cached_property
    def far(self) -> Ratios:
        """The ratios of far tokens, on which a rule or a bound can act."""
        return self._ruled[0].ratios

    @cached_property
    def outcome(self) -> Outcome:
        """Which tokens and sequences the preset keeps, and its weights."""
        return outcome.apply(self.scene, self.preset)

    @property
    def sequences(self) -> Tensor:
        """Sequences that pass every rule on sequences and the veto, [S] bool."""
        return self.graph.leaf(self.outcome.sequences)

    @property
    def per_sequence(self) -> Tensor | None:
        """Weights of sequences, [S]; None when tokens have their own, or there are none."""
        weights = self.outcome.per_sequence
        return None if weights is None else self.graph.leaf(weights)

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Number of kept tokens of each sequence, [S]."""
        done = self.outcome
        return self._joined(done.kept.tokens, None, [near.passed for near in done.near]) * self.sequences

    @property
    def weight_sum(self) -> Tensor:
        """Sum of the final weights over all tokens of each sequence, rejected or not, [S]."""
        done, weights = self.outcome, self.per_sequence
        if weights is not None:
            return weights * self.n
        own = None if done.weighed is None else done.token_weights
        return self._joined(own, None, [near.weight_sum for near in done.near])

    @property
    def kept_weight(self) -> Tensor:
        """Sum of the final weights over the kept tokens of each sequence, [S]."""
        done, weights = self.outcome, self.per_sequence
        if not done.weighs_tokens:
            return self.kept_tokens if weights is None else weights * self.kept_tokens
        near = [near.sums.first for near in done.near]
        return self._joined(done.token_weights, done.kept.tokens, near) * self.sequences

    def _joined(self, x: Tensor | None, kept: Tensor | None, near: Sequence[Tensor]) -> Tensor:
        """Add a sum over far tokens, None for their number, and those of near ones, [S]."""
        return reduce(torch.add, near, self._of_far(self.outcome.far.batch, x, kept))

    def weigh(self) -> Weighed:
        """The weights, whether they are applied or not, with numbers of sequences as operands of `graph`."""
        found = correction.weigh(self.far, self.preset)
        high, low = map(self.graph.leaf, (found.high, found.low))
        if found.final.per == "token":
            return replace(found, high=high, low=low)
        return replace(found, high=high, low=low, raw=self._level(found.raw), final=self._level(found.final))

    def _level(self, x: Level) -> Level:
        return replace(x, values=self.graph.leaf(x.values))

    def capped(self) -> Tensor:
        """Tokens whose weight a bound moved, or whose sequence's weight it did, [S]."""
        if self.outcome.weighed is None:
            return self.zeros
        return self.moved()

    def moved(self, *sides: str) -> Tensor:
        """Count the tokens whose weight is beyond a bound ("high", "low"; both), [S], applied or not."""
        weighed = self.weigh()
        found: Tensor = reduce(torch.add, (getattr(weighed, side) for side in sides or ("high", "low")))
        return found * self.n if weighed.final.per == "sequence" else found

    def dropped_by(self, *rules: Reject) -> Tensor:
        """Count the tokens of each sequence that any of these rules drops, [S]."""
        return self.n - self.kept_by(replace(self.preset, reject=rules, veto=None))

    def kept_by(self, before: Preset) -> Tensor:
        """Count the tokens of each sequence that a preset's rules and veto keep, [S]."""
        kept = correction.keep(self.far, before)
        sequences = self.graph.leaf(kept.sequences)
        if kept.tokens is None:
            return self.n * sequences
        return (self.n - self.far.batch.lengths + self._count(kept.tokens)) * sequences

    def aggregate_of_kept(self, over: Over, before: Preset) -> Tensor:
        """Return the sum or mean of Δ over the tokens that a preset's rules and veto keep, [S]."""
        some = self.ratios
        if before.reject or before.veto is not None:
            some = correction.among(some, some, before)
        return self.graph.leaf(some.aggregate("ratio", over).values)

    def tokens_above(self, over: Over, bound: float) -> Tensor:
        """Tokens of each sequence whose log-ratio, or their sequence's or turn's, is above a bound, [S]."""
        some = self.ratios if over in ("sum", "mean") else self.far
        log = some.aggregate("ratio", over)
        found = self.graph.leaf(
            self.once(
                ("above", over, bound, id(some)),
                lambda: correction.per_sequence((log.values > bound)[None], log, some.batch)[0],
            )
        )
        return found * self.n if log.per == "sequence" else found

    def passing_sequences(self) -> Tensor:
        """Flag the sequences that pass the rules on sequences, whatever the veto drops, [S] bool."""
        return self.graph.leaf(correction.keep(self.far, replace(self.preset, veto=None)).sequences)

    def passes(self, rule: Reject) -> Tensor:
        """Flag the sequences that pass a rule on sequences, [S] bool."""
        return self.graph.leaf(correction.passes(self.ratios, rule).values)

    def veto_hits(self, veto: Veto | None) -> Tensor:
        """Tokens of each sequence that lie beyond a veto's bounds, [S]."""
        return self.graph.leaf(correction.veto_hits(self.far, veto))

    # ------------------------------------------------------------ numbers of sequences

    @property
    def mean_log(self) -> Tensor:
        """Mean Δ of each sequence, [S] nats; 0 for one without a token."""
        mean = self.graph.leaf(self.ratios.aggregate("ratio", "mean").values)
        return mean * self.n / self.divisor if self.padded else mean

    def turns(self, statistic: Statistic) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return means of a statistic over turns [R], token counts [R], and a function to sum by sequence."""
        batch = self.batch
        many = segments.lengths(batch.cu_runs).to(torch.float64)
        return self.ratios.turns(statistic), many, lambda x: segments.total(x, batch.turns)

    @property
    def pooled_update(self) -> Tensor | None:
        """u of each sequence under GSPO, [S]; else None: tokens have their own."""
        pooled = losses.LOSSES[self.preset.loss].pooled
        return self.graph.leaf(losses.mean_u(self.ratios)) if pooled else None

    @property
    def pooled_ratio(self) -> Tensor | None:
        """e^u of each sequence under GSPO, [S]; else None."""
        u = self.pooled_update
        return None if u is None else u.exp()

    @property
    def vespo_factor(self) -> Tensor:
        """φ of each sequence under VESPO, by the sign of its advantages, [S]."""
        positive, negative = losses.vespo_factors(self.ratios, self.preset, self.scene.divides(self.preset))
        return torch.where(self.total(NEGATIVE) > 0, negative, positive)

    def where_nonempty(self, x: Tensor) -> Tensor:
        """Return x with 0 for sequences without a token, [S]."""
        return torch.where(self.nonempty, x, 0.0)


@cache
def parting(preset: Preset) -> Preset | None:
    """Return the preset whose bounds separate far from near tokens, or None if all tokens are far."""
    clips = losses.LOSSES[preset.loss].ratio and losses.linear(preset)
    if preset.apply and clips:  # others do not use their clip, or are not split by it
        return preset
    rules = (rule for rule in preset.reject if rule.on_tokens)
    by_distance = all(rule.over == "token" and rule.statistic not in BINARY for rule in rules)
    psis = preset.weight is not None and preset.weight.action == "psis"
    if preset.apply or (by_distance and not psis):  # what is not used may still be logged
        return replace(preset, apply=True, loss="ppo_clip")
    return None


# ---------------------------------------------------------------- near tokens


def on_near(of: Measure) -> Measure | None:
    """Return the measure's equivalent on near tokens; None if it is 0 there."""
    return of.near or (None if of.own else of)


def _within(x: Tensor, low: float, high: float, batch: Batch) -> list[Tensor]:
    """Compute the sums of `View.within` over near tokens, [S] each."""
    return [reduced(segments.total, term(x, low, high), None, batch.cu_seqlens) for term in WITHIN]


def near_sum(scene: Scene, policy: Policy, how: How, of: Measure) -> Tensor:
    """Return a sum or an extreme over the near tokens of each sequence, [S], computed once per batch."""
    policy = of.policy or policy
    return scene.once(("near", policy, how, of.name), lambda: _near_sum(scene, policy, how, of))


def _near_sum(scene: Scene, policy: Policy, how: How, of: Measure) -> Tensor:
    """Compute it from named moments or from other near sums if possible, else from the tokens."""
    if how == "sum" and of.linear:
        return reduce(torch.add, (near_sum(scene, policy, how, one) * factor for factor, one in of.linear))
    if of.moment and (how == "sum" or not any(of.moment[2:])):
        function, over, column, side = (*of.moment, "", "")[:4]
        d: Any = policy if over == "Δ" else losses.drift(policy) if over == "u" else over
        if how == "sum":
            return scene.moments.of(function, d, column, side)
        return scene.moments.low(d, function) if how == "min" else scene.moments.high(d, function)
    if of.name == K1.name and how != "sum":
        return -near_sum(scene, policy, "max" if how == "min" else "min", LOG)
    if of.rising and how != "sum":
        measure, rise = of.rising
        x = near_sum(scene, policy, how, measure)
        return torch.where(x.isinf(), x, rise(x))
    return _of_blocks(scene.far_and_near[1].of(policy), how, of)


def _of_blocks(ratios: Ratios, how: How, of: Measure) -> Tensor:
    """From the tokens themselves, block by block on a CPU."""
    batch, nothing, reduce = ratios.batch, Preset("", "", ratios.policy), REDUCE[how][0]
    if not here(batch.cu_seqlens):
        return reduced(reduce, Tokens(ratios, nothing).values(of), None, batch.cu_seqlens)
    found = []
    for first, last in segments.spans(batch.cu_seqlens, BLOCK):
        block = Ratios(batch.rows(first, last), ratios.policy, ratios.settled)
        found.append(reduced(reduce, Tokens(block, nothing).values(of), None, block.batch.cu_seqlens))
        block.forget()
    return torch.cat(found)


# ---------------------------------------------------------------- all presets


def columns(scene: Scene, presets: Sequence[Preset], padded: bool = False) -> tuple[Columns, Ranges]:
    """Compute the sums and extremes of a batch that the presets' logged metrics need, [S] each."""
    sums: Columns = {}
    ranges: Ranges = {}
    for preset in presets:
        view = View(scene, preset, padded)
        found = LOGS[preset.logs or ""].columns(view)
        sums |= found[0]
        ranges |= found[1]
        view.graph.compute(HELD)
    return (
        {name: computed(x) for name, x in sums.items()},
        {name: (computed(low), computed(high)) for name, (low, high) in ranges.items()},
    )


def outermost(ranges: Ranges) -> Ranges:
    """Reduce extremes over sequences to scalars; ±inf if there is no sequence."""
    if not ranges:
        return {}
    lows, highs = (torch.stack(each) for each in zip(*ranges.values(), strict=True))
    none = lows.new_full((len(lows), 1), torch.inf)  # filled there: no GPU waits
    low, high = torch.cat((lows, none), 1).amin(1), torch.cat((highs, -none), 1).amax(1)
    return dict(zip(ranges, zip(low.unbind(), high.unbind(), strict=True), strict=True))
