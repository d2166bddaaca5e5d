"""Log-ratios of one numerator policy over one batch, aggregated over tokens, sequences and turns.

Δ = log π_train − log π_rollout of the sampled token; r = e^Δ. Aggregates are computed on first use and
cached, so that presets share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor

from offpol_diag.batch import Batch, Some
from offpol_diag.engine import segments
from offpol_diag.engine.moments import BLOCK, Moments
from offpol_diag.engine.scope import NO_FITS, BatchFits
from offpol_diag.engine.segments import Memo
from offpol_diag.presets import Over, Policy, Preset, Statistic

OVERFLOW = 345.0
"""Largest |log weight| that is exponentiated: e^(2·345) is still a float64."""
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_OVERFLOW = math.log(FLOAT32_MAX)
"""Largest log weight that float32 holds: trainers that guard against inf drop larger ones."""

T = TypeVar("T")


@dataclass(frozen=True)
class Level:
    """Values per token [T], per sequence [S] or per turn [R]."""

    values: Tensor
    per: Literal["token", "sequence", "turn"]

    def map(self, function: Callable[[Tensor], Tensor]) -> Level:
        """Return the same level with a function applied to its values."""
        return Level(function(self.values), self.per)


_STATISTICS: dict[str, Callable[[Ratios, float | None], Tensor]] = {
    "ratio": lambda x, safety: x.clamped(safety),
    "k1": lambda x, safety: -x.clamped(safety),
    "k2": lambda x, safety: x.clamped(safety).square() / 2,
    "k3": lambda x, safety: x.excess(safety) - x.clamped(safety),
    "k3_reverse": lambda x, safety: segments.expm1(-x.clamped(safety)) + x.clamped(safety),
    "mult_prob_error": lambda x, safety: segments.exp(x.clamped(safety).abs()),
    "prob_diff": lambda x, safety: x.difference(safety),
    "prob_gap": lambda x, safety: x.difference(safety).abs(),
    "tv": lambda x, safety: x.excess(safety).abs() / 2,
    "binary_kl": lambda x, safety: _binary_kl(x.clamped(safety), x.batch.rollout),
    "binary_kl_clamped": lambda x, safety: _kl(*_coins(x.clamped(safety), x.batch.rollout, 1e-6)),
    "binary_kl_max": lambda x, safety: _larger_kl(*_coins(x.clamped(safety), x.batch.rollout, 1e-8)),
}
"""Statistic of every token, with Δ clamped to ±safety; `ratio` stays in the log domain, where its bounds are
taken too."""


def _binary_kl(d: Tensor, q: Tensor) -> Tensor:
    """Compute the KL from π_rollout to π_train of "this token or another", nats; 0 on-policy."""
    this = -segments.exp(q) * d
    other, train = -segments.expm1(q), -segments.expm1(q + d)
    return this + other * torch.log((other + COIN) / (train.clamp(min=0) + COIN))


def _coins(d: Tensor, q: Tensor, least: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the probabilities of "this token" and "another" under π_rollout, and under π_train.

    All are clamped to [least, 1 − least], as OpenRLHF and AReaL do.
    """
    rollout, train = (
        (segments.exp(log).clamp(least, 1 - least), (-segments.expm1(log)).clamp(least, 1 - least))
        for log in (q, q + d)
    )
    return rollout, train


def _kl(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the KL from one coin to another, nats."""
    this, rest = (a * torch.log(a / b) for a, b in zip(one, other, strict=True))
    return this + rest


def _larger_kl(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the larger of the KLs from one coin to another and back, nats."""
    return torch.maximum(_kl(one, other), _kl(other, one))


COIN = 1e-8
"""Added to the probability of "another token" before its logarithm, as SkyRL and verl do."""

_OVER_SEQUENCE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "sum": (segments.total, 0.0),
    "mean": (segments.mean, 0.0),
    "max": (segments.largest, -torch.inf),
    "min": (segments.smallest, torch.inf),
}
"""Aggregation over a sequence, and the value that makes it ignore a token."""
_PARTS: dict[str, tuple[Over, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": ("sum", torch.add),
    "mean": ("sum", torch.add),
    "max": ("max", torch.maximum),
    "min": ("min", torch.minimum),
}
"""Aggregate of each of two subsets of a sequence, and the function that joins both."""

_OF_MOMENTS: dict[str, Callable[[Moments, Policy], Tensor]] = {
    "ratio": lambda m, d: m.of("d", d),
    "k1": lambda m, d: -m.of("d", d),
    "k2": lambda m, d: m.of("d²", d) / 2,
    "k3": lambda m, d: m.of("k3", d),
    "k3_reverse": lambda m, d: m.of("k3_reverse", d),
    "mult_prob_error": lambda m, d: m.n + m.of("e^|d| − 1", d),
    "prob_diff": lambda m, d: m.of("x", d, "π_rollout"),
    "prob_gap": lambda m, d: m.of("|x|", d, "π_rollout"),
    "tv": lambda m, d: m.of("|x|", d) / 2,
}
"""Sum of each statistic over near tokens; statistics without an entry are computed token by token."""
_LARGEST: dict[str, Callable[[Moments, Policy], Tensor]] = {
    "ratio": lambda m, d: m.high(d),
    "k1": lambda m, d: -m.low(d),
    "k2": lambda m, d: m.high(d, "d²") / 2,
    "k3": lambda m, d: m.high(d, "k3"),
    "k3_reverse": lambda m, d: m.high(d, "k3_reverse"),
    "mult_prob_error": lambda m, d: 1 + m.high(d, "e^|d| − 1"),
    "tv": lambda m, d: m.high(d, "|x|") / 2,
}
"""Largest value of a statistic over near tokens."""


@dataclass(frozen=True)
class Split:
    """Ratios of a batch, split into far tokens (large |Δ|) and near ones.

    Attributes:
        far: ratios of the far tokens.
        close: ratios of the near tokens; sums over them may come from moments.
        reach: largest |Δ| that a near token may have, nats.
        leaves: whether a preset's rules on tokens and veto drop no near token.
        counted: far tokens that aggregates run over, [F] bool; None for all.
        rows: sequences that aggregates cover, [S] bool; None for all.
    """

    far: Ratios
    close: Ratios
    reach: float
    leaves: Callable[[Preset], bool] = lambda preset: False
    counted: Tensor | None = None
    rows: Tensor | None = None

    @property
    def near(self) -> Moments:
        """Moments of the near tokens."""
        assert self.close.moments is not None
        return self.close.moments

    @cached_property
    def tokens(self) -> Tensor:
        """Number of tokens of each sequence that aggregates run over, [S]."""
        lost = 0.0 if self.counted is None else segments.count(~self.counted, self.far.batch.cu_seqlens)
        return self.far.batch.lengths + self.close.batch.lengths - lost

    def of_counted(self, x: Tensor, absent: float) -> Tensor:
        """Set the far tokens [F] that are excluded to a value that the aggregate ignores."""
        return x if self.counted is None else torch.where(self.counted, x, absent)


@dataclass
class Ratios:
    """π_train/π_rollout on a batch, for π_train = `policy`.

    Attributes:
        batch: the packed batch.
        policy: old, current, or rollout (Δ is 0 everywhere).
        fits: cuts and tails per trainer batch, for rules and weights that look beyond one sequence.
        peers: ratios of the same batch with other numerators, shared by all of them.
        counted: tokens that aggregates run over, [T] bool, or a function that computes them; None for all.
        moments: moments of these tokens, if they are near ones; sums are taken from there.
        whole: if this batch is a subset of tokens of another one, that one's ratios, on which sequences and
            turns are judged.
        rows: index in `whole` of each sequence, [S]; None where the sequences are the same.
        split: these ratios split into far and near tokens; None where they are not split.
    """

    batch: Batch
    policy: Policy
    fits: BatchFits = NO_FITS
    peers: dict[str, Ratios] = field(default_factory=dict, repr=False)
    counted: Tensor | Callable[[], Tensor] | None = field(default=None, repr=False)
    moments: Moments | None = field(default=None, repr=False)
    whole: Ratios | None = field(default=None, repr=False)
    rows: Tensor | None = field(default=None, repr=False)
    split: Split | None = field(default=None, init=False, repr=False)
    _memo: Memo = field(default_factory=Memo, repr=False)

    def of(self, policy: Policy | None) -> Ratios:
        """Return the ratios with another numerator; None for this one's own."""
        if policy is None or policy == self.policy:
            return self
        if policy not in self.peers:
            whole = None if self.whole is None else self.whole.of(policy)
            self.peers[policy] = replace(self, policy=policy, counted=None, whole=whole, _memo=Memo())
        return self.peers[policy]

    def among(self, counted: Callable[[], Tensor], split: Split | None = None) -> Ratios:
        """Return the same ratios, aggregated over the tokens `counted` [T], by `split` faster."""
        found = Ratios(self.batch, self.policy, self.fits, self.peers, counted)
        found.split = split
        return found

    @property
    def index(self) -> Tensor | None:
        """Indices of the tokens in the whole batch, [T]; None where they are not known."""
        batch = self.batch
        known = self.whole is not None and isinstance(batch, Some) and batch.whole is self.whole.batch
        return batch.index if known and isinstance(batch, Some) else None

    @property
    def _counted(self) -> Tensor | None:
        if callable(self.counted):
            self.counted = self.counted()
        return self.counted

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        return self._memo.once(key, make)

    def know(self, key: object, value: object) -> None:
        """Store what was computed elsewhere, e.g. r − 1 of every token, [T]."""
        self._memo[key] = value

    def forget(self) -> None:
        """Drop all cached values, of the other numerators too: they form reference cycles."""
        for ratios in (self, *self.peers.values()):
            ratios._memo.clear()
            ratios.split = None
        self.peers.clear()

    def together(self) -> Ratios:
        """Return the same ratios, not split into far and near tokens."""
        if self.split is None:
            return self
        return self.once("together", self._together)

    def _together(self) -> Ratios:
        found = Ratios(self.batch, self.policy, self.fits)
        if "delta" in self._memo:
            found.know("delta", self.delta)
        return found

    @property
    def train(self) -> Tensor:
        """log π_train, [T]."""
        found = self.batch.policy(self.policy)
        if found is None:
            raise ValueError(f"the batch has no {self.policy} log-probs")
        return found

    @property
    def delta(self) -> Tensor:
        """Δ, [T] float64, nats."""
        return self.once("delta", lambda: self.train - self.batch.rollout)

    def clamped(self, safety: float | None) -> Tensor:
        """Return Δ clamped to ±safety, [T]."""
        if safety is None:
            return self.delta
        return self.once(("clamped", safety), lambda: self.delta.clamp(-safety, safety))

    @property
    def probabilities(self) -> Tensor:
        """π_rollout, [T]."""
        return self.of("rollout").once("π_rollout", lambda: segments.exp(self.batch.rollout))

    def excess(self, safety: float | None = None) -> Tensor:
        """Return r − 1, with Δ clamped to ±safety, [T]."""
        if safety is None:
            return self.once("r − 1", lambda: segments.expm1(self.delta))
        low, high = math.expm1(-safety), math.expm1(safety)
        return self.once(("r − 1", safety), lambda: self.excess().clamp(low, high))

    def difference(self, safety: float | None = None) -> Tensor:
        """Return π_train − π_rollout, with Δ clamped to ±safety, [T]; exact at every Δ.

        π_rollout · (r − 1) would be 0 · e^Δ where π_rollout underflows, and is inf or NaN where r overflows.
        """
        return self.once(("p − q", safety), lambda: self._difference(safety))

    def _difference(self, safety: float | None) -> Tensor:
        d, q = self.clamped(safety), self.batch.rollout
        p = self.train if safety is None else q + d
        size = -segments.expm1(-d.abs()) * segments.exp(torch.maximum(p, q))
        return torch.copysign(size, d)

    def token(self, statistic: Statistic, safety: float | None = None) -> Tensor:
        """Compute the statistic of every token, [T]; `ratio` as its logarithm."""
        return self.once((statistic, safety), lambda: self._token(statistic, safety))

    def _token(self, statistic: Statistic, safety: float | None) -> Tensor:
        return _STATISTICS[statistic](self, safety)

    def aggregate(self, statistic: Statistic, over: Over, safety: float | None = None) -> Level:
        """Compute the statistic over tokens, sequences or turns; each token's Δ is clamped to ±safety first.

        Per sequence: sum, mean, max or min of its tokens (0 for an empty sequence). A turn's mean is spread
        to its tokens. Sequences are aggregated over all their tokens, also where this batch is a subset.
        """
        if over == "segment":
            key = ("of turns", statistic, safety)
            return self.once(key, lambda: Level(self.of_turns(self.turns(statistic, safety)), "token"))
        if self.whole is not None and over not in ("token", "batch"):
            return self.whole.aggregate(statistic, over, safety)
        return self.once((statistic, over, safety), lambda: self._aggregate(statistic, over, safety))

    def _aggregate(self, statistic: Statistic, over: Over, safety: float | None) -> Level:
        if over in ("token", "batch"):
            return Level(self.token(statistic, safety), "token")
        values = self._of_both(statistic, over, safety)
        if values is None:
            values = self._reduced(self.token(statistic, safety), over, self.batch.cu_seqlens)
        there = self.once("there", lambda: self.batch.lengths > 0)
        return Level(torch.where(there, values, 0.0), "sequence")

    def of_sequences(self, statistic: Statistic, how: Over) -> Tensor:
        """Compute the sum, max or min of a statistic over this batch's tokens of each sequence, [S]."""
        return self.once(("of sequences", statistic, how), lambda: self._of_sequences(statistic, how))

    def _of_sequences(self, statistic: Statistic, how: Over) -> Tensor:
        known = {"sum": _OF_MOMENTS, "max": _LARGEST}.get(how, {})
        if self.moments is not None and statistic in known:
            return known[statistic](self.moments, self.policy)
        reduce = _OVER_SEQUENCE[how][0]
        return torch.cat([reduce(x.token(statistic), x.batch.cu_seqlens) for _, x in self.blocks()])

    def blocks(self) -> Iterator[tuple[slice, Ratios]]:
        """Yield blocks of whole sequences with their tokens; on a CPU they fit in a core's cache.

        A block forgets what it computed when the next one is asked for.
        """
        offsets = self.batch.cu_seqlens
        if not segments.on_host(offsets) or self.batch.tokens <= BLOCK:
            yield slice(0, self.batch.tokens), self
            return
        for first, last in segments.spans(offsets, BLOCK):
            block = Ratios(self.batch.rows(first, last), self.policy, self.fits)
            yield slice(int(offsets[first]), int(offsets[last])), block
            block.forget()

    def beyond(self, bound: float) -> Ratios:
        """Return ratios that include all tokens whose |Δ| exceeds a bound."""
        return self.split.far if self.split is not None and self.split.reach < bound else self

    def _of_both(self, statistic: Statistic, over: Over, safety: float | None) -> Tensor | None:
        """Aggregate over far and near tokens; None where they are not split or a bound acts on near ones."""
        split = self.split
        if split is None or (safety is not None and safety < split.reach):
            return None
        how, join = _PARTS[over]
        reduce, absent = _OVER_SEQUENCE[how]
        far = split.far
        values = join(
            reduce(split.of_counted(far.token(statistic, safety), absent), far.batch.cu_seqlens),
            split.close.of_sequences(statistic, how),
        )
        values = values / split.tokens.clamp(min=1) if over == "mean" else values
        return values if split.rows is None else torch.where(split.rows & (split.tokens > 0), values, 0.0)

    def own(self, x: Tensor) -> Tensor:
        """Map a number of the whole batch's sequences to the sequences here, [S]."""
        return x if self.rows is None else x[self.rows]

    def turns(self, statistic: Statistic, safety: float | None = None) -> Tensor:
        """Compute the mean of the statistic over each turn, [R], over all tokens of the whole batch."""
        if self.whole is not None:
            return self.whole.turns(statistic, safety)
        return self.once(("turns", statistic, safety), lambda: self._turns(statistic, safety))

    def _turns(self, statistic: Statistic, safety: float | None) -> Tensor:
        blocks = (x for _, x in self.blocks()) if self._counted is None else (self,)
        return torch.cat([x._reduced(x.token(statistic, safety), "mean", x.batch.cu_runs) for x in blocks])

    def of_turns(self, x: Tensor) -> Tensor:
        """Spread each turn's value [R] to its tokens in this batch, [T]."""
        whole, index = self.whole, self.index
        if whole is None or index is None:
            return segments.spread(x, (whole or self).batch.cu_runs)
        at = self.once("turn", lambda: torch.searchsorted(whole.batch.cu_runs, index, right=True) - 1)
        return x[..., at]

    def _reduced(self, x: Tensor, over: Over, offsets: Tensor) -> Tensor:
        """Aggregate per run [R], over the included tokens; 0 where there is none."""
        reduce, absent = _OVER_SEQUENCE[over]
        counted = self._counted
        if counted is None:
            return reduce(x, offsets)
        there = segments.count(counted, offsets)
        x = torch.where(counted, x, absent)
        values = segments.total(x, offsets) / there.clamp(min=1) if over == "mean" else reduce(x, offsets)
        return torch.where(there > 0, values, 0.0)

    def log_ratio(self, over: Over, safety: float | None, safety_at: str) -> Level:
        """Compute log r over tokens, sequences or turns, bounded where `safety_at` says."""
        if safety is None:
            return self.aggregate("ratio", over)
        if safety_at == "token":
            return self.aggregate("ratio", over, safety)
        bound = safety
        return self.once(
            ("log_ratio", over, safety),
            lambda: self.aggregate("ratio", over).map(lambda x: x.clamp(-bound, bound)),
        )
