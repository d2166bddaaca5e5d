"""Log-ratios of one numerator policy over one batch, aggregated over tokens, sequences and turns.

Δ = log π_train − log π_rollout of the sampled token; r = e^Δ. Aggregates are computed when first asked for
and kept, so that presets share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor

from offpol_diag.batch import Batch, Some
from offpol_diag.engine import host, segments
from offpol_diag.engine.memo import Memo
from offpol_diag.engine.moments import Moments
from offpol_diag.engine.scope import UNSETTLED, Settled
from offpol_diag.presets import Over, Policy, Preset, Statistic

OVERFLOW = 345.0
"""Largest |log weight| that is exponentiated: e^(2·345) is still a float64."""
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_OVERFLOW = math.log(FLOAT32_MAX)
"""Largest log weight that float32 holds: what trainers that guard against inf take for too large."""

T = TypeVar("T")


@dataclass(frozen=True)
class Level:
    """Values per token [T], per sequence [S] or per turn [R]."""

    values: Tensor
    per: Literal["token", "sequence", "turn"]

    def map(self, function: Callable[[Tensor], Tensor]) -> Level:
        """The same level with a function applied to its values."""
        return Level(function(self.values), self.per)


_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ratio": lambda d, q: d,
    "k1": lambda d, q: -d,
    "k2": lambda d, q: d.square() / 2,
    "k3": lambda d, q: host.expm1(d) - d,
    "k3_reverse": lambda d, q: host.expm1(-d) + d,
    "mult_prob_error": lambda d, q: host.exp(d.abs()),
    "prob_diff": lambda d, q: host.exp(q) * host.expm1(d),
    "tv": lambda d, q: host.expm1(d).abs() / 2,
    "binary_kl": lambda d, q: _binary_kl(d, q),
}
"""Per-token statistics as functions of Δ and log π_rollout; `ratio` stays in the log domain, where its bounds
are taken too."""


def _binary_kl(d: Tensor, q: Tensor) -> Tensor:
    """KL between two coins, "this token or another": π_rollout's from π_train's, nats; 0 on-policy."""
    this = -host.exp(q) * d
    other, train = -host.expm1(q), -host.expm1(q + d)
    return this + other * torch.log((other + COIN) / (train.clamp(min=0) + COIN))


COIN = 1e-8
"""Added to the probability of "another token" before its logarithm, as SkyRL and verl do."""

_OVER_SEQUENCE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "sum": (segments.total, 0.0),
    "mean": (segments.mean, 0.0),
    "max": (segments.largest, -torch.inf),
    "min": (segments.smallest, torch.inf),
}
"""How a sequence aggregates its tokens, and what a token counts as that has left it."""
_PARTS: dict[str, tuple[Over, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": ("sum", torch.add),
    "mean": ("sum", torch.add),
    "max": ("max", torch.maximum),
    "min": ("min", torch.minimum),
}
"""What is asked of some of a sequence's tokens and of the others, and what makes of both that of all."""

_OF_MOMENTS: dict[str, Callable[[Moments, Policy], Tensor]] = {
    "ratio": lambda m, d: m.of("d", d),
    "k1": lambda m, d: -m.of("d", d),
    "k2": lambda m, d: m.of("d²", d) / 2,
    "k3": lambda m, d: m.of("k3", d),
    "k3_reverse": lambda m, d: m.of("k3_reverse", d),
    "mult_prob_error": lambda m, d: m.n + m.of("e^|d| − 1", d),
    "prob_diff": lambda m, d: m.of("x", d, "π_rollout"),
    "tv": lambda m, d: m.of("|x|", d) / 2,
}
"""The sum of each statistic over near tokens; one without a row is taken from the tokens."""
_LARGEST: dict[str, Callable[[Moments, Policy], Tensor]] = {
    "ratio": lambda m, d: m.high(d),
    "k1": lambda m, d: -m.low(d),
    "k2": lambda m, d: m.high(d, "d²") / 2,
    "k3": lambda m, d: m.high(d, "k3"),
    "k3_reverse": lambda m, d: m.high(d, "k3_reverse"),
    "mult_prob_error": lambda m, d: 1 + m.high(d, "e^|d| − 1"),
    "tv": lambda m, d: m.high(d, "|x|") / 2,
}
"""Its largest value over near tokens."""


@dataclass(frozen=True)
class Apart:
    """A batch's ratios by how far its tokens are off.

    Attributes:
        far: of the far tokens.
        close: of all others; what is summed of them may be known without a look at them.
        reach: no |Δ| of those is larger, nats.
        leaves: whether rules on tokens and a veto, those of a preset, drop no near token.
        left: which far tokens aggregates run over, [F] bool; None for all.
        rows: of which sequences they run over the near ones, and any, [S] bool; None for all.
    """

    far: Ratios
    close: Ratios
    reach: float
    leaves: Callable[[Preset], bool] = lambda preset: False
    left: Tensor | None = None
    rows: Tensor | None = None

    @property
    def near(self) -> Moments:
        """Moments of the near tokens."""
        assert self.close.moments is not None
        return self.close.moments

    @cached_property
    def tokens(self) -> Tensor:
        """How many tokens of each sequence are left, before whole ones go, [S]."""
        lost = 0.0 if self.left is None else segments.count(~self.left, self.far.batch.cu_seqlens)
        return self.far.batch.lengths + self.close.batch.lengths - lost

    def of_left(self, x: Tensor, absent: float) -> Tensor:
        """Values of far tokens [F], those that are gone counting as something that is not seen."""
        return x if self.left is None else torch.where(self.left, x, absent)


@dataclass
class Ratios:
    """π_train/π_rollout on a batch, for π_train = `policy`.

    Attributes:
        batch: the packed batch.
        policy: old, current, or rollout (Δ is 0 everywhere).
        settled: what the trainer batch settles for rules and weights that look beyond one sequence.
        peers: the same batch's ratios of other numerators, shared by all of them.
        left: which tokens aggregates run over, [T] bool, or what makes that; None for all.
        moments: of these tokens, where they are near ones: what is summed of them is taken from there.
        whole: where this batch is some tokens of another one: that one's ratios, which judge sequences and
            turns.
        rows: of which of its sequences each one here has tokens, [S]; None where they are the same.
        apart: these ratios as those of far tokens and of near ones; None where all are looked at alike.
    """

    batch: Batch
    policy: Policy
    settled: Settled = UNSETTLED
    peers: dict[str, Ratios] = field(default_factory=dict, repr=False)
    left: Tensor | Callable[[], Tensor] | None = field(default=None, repr=False)
    moments: Moments | None = field(default=None, repr=False)
    whole: Ratios | None = field(default=None, repr=False)
    rows: Tensor | None = field(default=None, repr=False)
    apart: Apart | None = field(default=None, init=False, repr=False)
    _memo: Memo = field(default_factory=Memo, repr=False)

    def of(self, policy: Policy | None) -> Ratios:
        """The ratios of another numerator; None for this one's own."""
        if policy is None or policy == self.policy:
            return self
        if policy not in self.peers:
            whole = None if self.whole is None else self.whole.of(policy)
            self.peers[policy] = replace(self, policy=policy, left=None, whole=whole, _memo=Memo())
        return self.peers[policy]

    def among(self, left: Callable[[], Tensor], apart: Apart | None = None) -> Ratios:
        """The same ratios, aggregated over the tokens that are `left` [T]; `apart` tells it without that."""
        found = Ratios(self.batch, self.policy, self.settled, self.peers, left)
        found.apart = apart
        return found

    @property
    def index(self) -> Tensor | None:
        """Where the tokens stand among the whole's, [T]; None where that is not known."""
        batch = self.batch
        known = self.whole is not None and isinstance(batch, Some) and batch.whole is self.whole.batch
        return batch.index if known and isinstance(batch, Some) else None

    @property
    def _left(self) -> Tensor | None:
        if callable(self.left):
            self.left = self.left()
        return self.left

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, computed once per key."""
        return self._memo.once(key, make)

    def slim(self, size: int) -> None:
        """Drop what holds a tensor of at least `size` numbers, of the other numerators too."""
        for ratios in (self, *self.peers.values()):
            ratios._memo.slim(size)

    def forget(self) -> None:
        """Drop everything computed so far, of the other numerators too: what was found knows who found it."""
        for ratios in (self, *self.peers.values()):
            ratios._memo.clear()
            ratios.apart = None
        self.peers.clear()

    def together(self) -> Ratios:
        """The same ratios, whose sums are made of far and near tokens together."""
        if self.apart is None:
            return self
        return self.once("together", lambda: Ratios(self.batch, self.policy, self.settled))

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
        """Δ clamped to ±safety, [T]."""
        if safety is None:
            return self.delta
        return self.once(("clamped", safety), lambda: self.delta.clamp(-safety, safety))

    def token(self, statistic: Statistic, safety: float | None = None) -> Tensor:
        """The statistic of every token, [T]; `ratio` as its logarithm."""
        return self.once((statistic, safety), lambda: self._token(statistic, safety))

    def _token(self, statistic: Statistic, safety: float | None) -> Tensor:
        return _STATISTICS[statistic](self.clamped(safety), self.batch.rollout)

    def aggregate(self, statistic: Statistic, over: Over, safety: float | None = None) -> Level:
        """The statistic over tokens, sequences or turns, each token's Δ clamped to ±safety first.

        Per sequence: sum, mean, max, min of its tokens (an empty sequence has 0). A turn's mean is given to
        its tokens. Sequences are judged by all their tokens, also where this batch has only some of them.
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
        """The sum, max or min of a statistic over the tokens of each sequence that are here, [S]."""
        return self.once(("of sequences", statistic, how), lambda: self._of_sequences(statistic, how))

    def _of_sequences(self, statistic: Statistic, how: Over) -> Tensor:
        known = {"sum": _OF_MOMENTS, "max": _LARGEST}.get(how, {})
        if self.moments is not None and statistic in known:
            return known[statistic](self.moments, self.policy)
        return _OVER_SEQUENCE[how][0](self.token(statistic), self.batch.cu_seqlens)

    def beyond(self, bound: float) -> Ratios:
        """The ratios of tokens that none is missing from whose |Δ| exceeds a bound."""
        return self.apart.far if self.apart is not None and self.apart.reach < bound else self

    def _of_both(self, statistic: Statistic, over: Over, safety: float | None) -> Tensor | None:
        """Of far tokens and near ones; None where they are not told apart or a bound acts on near ones."""
        apart = self.apart
        if apart is None or (safety is not None and safety < apart.reach):
            return None
        how, join = _PARTS[over]
        reduce, absent = _OVER_SEQUENCE[how]
        far = apart.far
        values = join(
            reduce(apart.of_left(far.token(statistic, safety), absent), far.batch.cu_seqlens),
            apart.close.of_sequences(statistic, how),
        )
        values = values / apart.tokens.clamp(min=1) if over == "mean" else values
        return values if apart.rows is None else torch.where(apart.rows & (apart.tokens > 0), values, 0.0)

    def own(self, x: Tensor) -> Tensor:
        """What each sequence here has of a number of the whole's sequences, [S]."""
        return x if self.rows is None else x[self.rows]

    def turns(self, statistic: Statistic, safety: float | None = None) -> Tensor:
        """Mean of the statistic over each turn, [R]; of all tokens, also where only some are here."""
        if self.whole is not None:
            return self.whole.turns(statistic, safety)
        runs = self.batch.cu_runs
        return self.once(
            ("turns", statistic, safety), lambda: self._reduced(self.token(statistic, safety), "mean", runs)
        )

    def of_turns(self, x: Tensor) -> Tensor:
        """Each turn's value [R] given to its tokens that are here, [T]."""
        whole, index = self.whole, self.index
        if whole is None or index is None:
            return segments.spread(x, (whole or self).batch.cu_runs)
        at = self.once("turn", lambda: torch.searchsorted(whole.batch.cu_runs, index, right=True) - 1)
        return x[at]

    def _reduced(self, x: Tensor, over: Over, offsets: Tensor) -> Tensor:
        """Per run [R], over the tokens that are left; 0 where none is."""
        reduce, absent = _OVER_SEQUENCE[over]
        left = self._left
        if left is None:
            return reduce(x, offsets)
        there = segments.count(left, offsets)
        x = torch.where(left, x, absent)
        values = segments.total(x, offsets) / there.clamp(min=1) if over == "mean" else reduce(x, offsets)
        return torch.where(there > 0, values, 0.0)

    def log_ratio(self, over: Over, safety: float | None, safety_at: str) -> Level:
        """log r over tokens, sequences or turns, bounded where `safety_at` says."""
        if safety is None:
            return self.aggregate("ratio", over)
        if safety_at == "token":
            return self.aggregate("ratio", over, safety)
        bound = safety
        return self.once(
            ("log_ratio", over, safety),
            lambda: self.aggregate("ratio", over).map(lambda x: x.clamp(-bound, bound)),
        )
