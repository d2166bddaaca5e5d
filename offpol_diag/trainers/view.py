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
from offpol_diag.engine.correction import Weighed
from offpol_diag.engine.outcome import Outcome
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import Memo, on_host
from offpol_diag.presets import BINARY, Over, Policy, Preset, Reject, Statistic, Veto
from offpol_diag.trainers import LOGS
from offpol_diag.trainers.base import Columns, Ends, Ranges, applied, ends
from offpol_diag.trainers.measures import K1, LOG, NEGATIVE, Mask, Measure, squared

T = TypeVar("T")
How = Literal["Σ", "ends"]
Found = tuple[Tensor, ...]
"""The sum over the tokens of each sequence, or the minimum and the maximum, [S] each."""


# ---------------------------------------------------------------- some tokens


@dataclass(eq=False)
class Tokens:
    """All or some tokens of a batch under one preset: the inputs of measures, [T] each.

    Attributes:
        ratios: the tokens' ratios with the preset's numerator.
        preset: the preset.
        near: whether all are near tokens, on which no preset acts.
    """

    ratios: Ratios
    preset: Preset
    near: bool = False

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
        return Tokens(self.ratios.of(policy), self.preset, self.near)

    def ratio(self, safety: float | None = None) -> Tensor:
        """Return r, with Δ clamped to ±safety; for near tokens computed from r − 1, which is cached."""
        if self.near:
            return self.excess() + 1
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

    def found(self, how: How, of: Measure, kept: Tensor | None = None) -> Found:
        """Return the sum of each sequence, [S], of flags how many are set; or both extremes, [S] each.

        Only tokens flagged in `kept` [T] count; None for all.
        """
        x, offsets = self._values(of), self.batch.cu_seqlens
        if how == "Σ" and x.dtype == torch.bool:
            return (segments.count(x if kept is None else x & kept, offsets),)
        if how == "Σ":
            return (segments.total(x if kept is None else torch.where(kept, x, 0.0), offsets),)
        low, high = (x, x) if kept is None else (torch.where(kept, x, end) for end in (torch.inf, -torch.inf))
        return segments.smallest(low, offsets), segments.largest(high, offsets)

    def within(self, of: Measure, low: float, high: float) -> tuple[Tensor, ...]:
        """Σ of a measure clamped to limits and of its square, and how many lie above and below, [S] each."""
        x, offsets = self._values(of), self.batch.cu_seqlens
        inside = x.clamp(low, high)
        sums = (segments.total(each, offsets) for each in (inside, inside.square()))
        return *sums, *(segments.count(flags, offsets) for flags in (x > high, x < low))

    def _values(self, of: Measure) -> Tensor:
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

    @property
    def n(self) -> Tensor:
        """Tokens of each sequence, [S] float64."""
        return self.once("n", lambda: self.batch.lengths.to(torch.float64))

    @property
    def counted(self) -> Tensor:
        """Tokens of each sequence that denominators of means count, [S] float64."""
        return self.n + self.batch.masked if self.padded else self.n

    @property
    def divisor(self) -> Tensor:
        """Divisor of means over the tokens of each sequence: max(number, 1), [S]."""
        return self.once("n or 1", lambda: self.counted.clamp(min=1))

    @property
    def nonempty(self) -> Tensor:
        """Sequences with a token, [S] bool."""
        return self.once("there", lambda: self.batch.lengths > 0)

    @property
    def zeros(self) -> Tensor:
        """Zeros, [S] float64."""
        return self.once("zeros", lambda: torch.zeros_like(self.n))

    # ------------------------------------------------------------ sums over tokens

    def total(self, of: Measure, mask: Mask | None = None) -> Tensor:
        """Σ over the tokens of each sequence that the mask leaves, [S]; of flags, how many are set."""
        rows = of.rows and of.rows(self)
        if rows is not None:
            return rows * (self.n if mask is None else self._passed(mask))
        return self._merged("Σ", of, mask)[0]

    def ends(self, of: Measure, mask: Mask | None = None) -> Ends:
        """The smallest and largest of each sequence, [S] each; ±inf where the mask leaves none."""
        rows = of.rows and of.rows(self)
        if rows is not None:
            return ends(rows, self.nonempty if mask is None else self._passed(mask) > 0)
        return self._merged("ends", of, mask)  # type: ignore[return-value]

    def within(self, of: Measure, low: float, high: float) -> tuple[Tensor, ...]:
        """Σ of a measure clamped to limits and of its square, and how many lie above and below, [S] each."""

        def found() -> tuple[Tensor, ...]:
            acted, near = self._unruled if of.own else self._split
            first, same, policy = acted.within(of, low, high), on_near(of), self.preset.policy
            if near is None or same is None:
                return first
            least, most = near_sum(self.scene, policy, "ends", same)
            if on_host(least) and bool((least >= low).all()) and bool((most <= high).all()):  # no GPU waits
                sums = (near_sum(self.scene, policy, "Σ", one)[0] for one in (same, squared(same)))
                return *(x + more for x, more in zip(first, sums, strict=False)), *first[2:]
            second = Tokens(near.of(policy), self.preset).within(same, low, high)
            return tuple(x + more for x, more in zip(first, second, strict=True))

        return self.mine(("within", of.name, low, high), found)

    def _passed(self, mask: Mask) -> Tensor:
        """Tokens of each sequence that the mask leaves, [S]."""
        acted, near = self._ruled
        flags = mask.of(acted)
        own, offsets = acted.batch.lengths.to(torch.float64), acted.batch.cu_seqlens
        passed = own if flags is None else segments.count(flags, offsets)
        return passed if near is None or not mask.near else passed + near.batch.lengths

    def _merged(self, how: How, of: Measure, mask: Mask | None) -> Found:
        """Return the sums or extremes over far and near tokens together."""
        same, policy = on_near(of), of.policy or self.preset.policy

        def joined(parts: Parts, kept: Tensor | None = None) -> Found:
            acted, near = parts
            first = acted.found(how, of, kept)
            if near is None or same is None or not (mask is None or mask.near):
                return first
            second = near_sum(self.scene, policy, how, same)
            if how == "Σ":
                return (first[0] + second[0],)
            return torch.minimum(first[0], second[0]), torch.maximum(first[1], second[1])

        if mask is not None:
            acted, kept = self._ruled[0], mask.of(self._ruled[0])
            if of.own:
                return joined(self._ruled, kept)
            # presets with the same flags share what they find; the flags are kept: their id stays theirs
            key = "some", how, policy, of.name, mask.near, id(acted.ratios), id(kept)
            return self.once(key, lambda: (joined(self._ruled, kept), kept))[0]
        if of.own:
            return joined(self._unruled)
        if same is None or same.moment or same.linear or same.rising:
            return self.once(("all", how, policy, of.name), lambda: joined(self._split))
        return self.once(
            ("all", how, policy, of.name), lambda: _of_blocks(self.scene.ratios(policy), how, of)
        )

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

    def weigh(self) -> Weighed:
        """The weights, whether they are applied or not; of tokens, those of the far ones."""
        return correction.weigh(self.far, self.preset)

    def capped(self) -> Tensor:
        """Tokens whose weight a bound moved, or whose sequence's weight it did, [S]."""
        weighed = self.outcome.weighed
        if weighed is None:
            return self.zeros
        moved = weighed.high + weighed.low
        return moved * self.n if weighed.final.per == "sequence" else moved

    def dropped_by(self, *rules: Reject) -> Tensor:
        """Count the tokens of each sequence that any of these rules drops, [S]."""
        return self.n - self.kept_by(replace(self.preset, reject=rules, veto=None))

    def kept_by(self, before: Preset) -> Tensor:
        """Count the tokens of each sequence that a preset's rules and veto keep, [S]."""
        kept = correction.keep(self.far, before)
        if kept.tokens is None:
            return self.n * kept.sequences
        return (self.n - segments.count(~kept.tokens, self.far.batch.cu_seqlens)) * kept.sequences

    def aggregate_of_kept(self, over: Over, before: Preset) -> Tensor:
        """Return the sum or mean of Δ over the tokens that a preset's rules and veto keep, [S]."""
        some = self.ratios
        if before.reject or before.veto is not None:
            some = correction.among(some, some, before)
        return some.aggregate("ratio", over).values

    def tokens_above(self, over: Over, bound: float) -> Tensor:
        """Tokens of each sequence whose log-ratio, or their sequence's or turn's, is above a bound, [S]."""
        some = self.ratios if over in ("sum", "mean") else self.far
        log = some.aggregate("ratio", over)
        found = correction.per_sequence((log.values > bound)[None], log, some.batch)[0]
        return found * self.n if log.per == "sequence" else found

    def passing_sequences(self) -> Tensor:
        """Flag the sequences that pass the rules on sequences, whatever the veto drops, [S] bool."""
        return correction.keep(self.far, replace(self.preset, veto=None)).sequences

    def passes(self, rule: Reject) -> Tensor:
        """Flag the sequences that pass a rule on sequences, [S] bool."""
        return correction.passes(self.ratios, rule).values

    def veto_hits(self, veto: Veto | None) -> Tensor:
        """Tokens of each sequence that lie beyond a veto's bounds, [S]."""
        return correction.veto_hits(self.far, veto)

    # ------------------------------------------------------------ numbers of sequences

    @property
    def mean_log(self) -> Tensor:
        """Mean Δ of each sequence, [S] nats; 0 for one without a token."""
        mean = self.ratios.aggregate("ratio", "mean").values
        return mean * self.n / self.divisor if self.padded else mean

    def turns(self, statistic: Statistic) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return means of a statistic over turns [R], token counts [R], and a function to sum by sequence."""
        batch = self.batch
        many = segments.lengths(batch.cu_runs).to(torch.float64)
        return self.ratios.turns(statistic), many, lambda x: segments.total(x, batch.turns)

    @property
    def pooled_update(self) -> Tensor | None:
        """u of each sequence under GSPO, [S]; else None: tokens have their own."""
        return losses.mean_u(self.ratios) if losses.LOSSES[self.preset.loss].pooled else None

    @property
    def pooled_ratio(self) -> Tensor | None:
        """e^u of each sequence under GSPO, [S]; else None."""
        u = self.pooled_update
        return None if u is None else self.once(("e^u", self.preset.policy), lambda: torch.exp(u))

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


def near_sum(scene: Scene, policy: Policy, how: How, of: Measure) -> Found:
    """Return a sum or the extremes over the near tokens of each sequence, computed once per batch."""
    policy = of.policy or policy
    return scene.once(("near", policy, how, of.name), lambda: _near_sum(scene, policy, how, of))


def _near_sum(scene: Scene, policy: Policy, how: How, of: Measure) -> Found:
    """Compute it from named moments or from other near sums if possible, else from the tokens."""
    if how == "Σ" and of.linear:
        parts = [near_sum(scene, policy, how, one)[0] * factor for factor, one in of.linear]
        return (reduce(torch.add, parts),)
    if of.moment and (how == "Σ" or not any(of.moment[2:])):
        function, over, column, side = (*of.moment, "", "")[:4]
        d: Any = policy if over == "Δ" else losses.drift(policy) if over == "u" else over
        if how == "Σ":
            return (scene.moments.of(function, d, column, side),)
        return scene.moments.low(d, function), scene.moments.high(d, function)
    if how == "ends" and of.name == K1.name:
        low, high = near_sum(scene, policy, how, LOG)
        return -high, -low
    if how == "ends" and of.rising:
        measure, rise = of.rising
        return tuple(torch.where(x.isinf(), x, rise(x)) for x in near_sum(scene, policy, how, measure))
    return _of_blocks(scene.far_and_near[1].of(policy), how, of)


def _of_blocks(ratios: Ratios, how: How, of: Measure) -> Found:
    """From the tokens themselves, block by block on a CPU."""
    nothing = Preset("", "", ratios.policy)
    found = [Tokens(block, nothing).found(how, of, None) for _, block in ratios.blocks()]
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


# ---------------------------------------------------------------- all presets


def columns(scene: Scene, presets: Sequence[Preset]) -> tuple[Columns, Ranges]:
    """Compute the sums and extremes of a batch that the presets' logged metrics need, [S] each."""
    sums: Columns = {}
    ranges: Ranges = {}
    for preset in presets:
        found = LOGS[preset.logs or ""].columns(View(scene, preset))
        sums |= found[0]
        ranges |= found[1]
    return sums, ranges


def outermost(ranges: Ranges) -> Ranges:
    """Reduce extremes over sequences to scalars; ±inf if there is no sequence."""
    if not ranges:
        return {}
    lows, highs = (torch.stack(each) for each in zip(*ranges.values(), strict=True))
    none = lows.new_full((len(lows), 1), torch.inf)  # filled there: no GPU waits
    low, high = torch.cat((lows, none), 1).amin(1), torch.cat((highs, -none), 1).amax(1)
    return dict(zip(ranges, zip(low.unbind(), high.unbind(), strict=True), strict=True))
