"""Moments of near tokens: sums of functions of log-ratios, computed once for all presets.

On near tokens no rule and no bound on tokens acts, so every sum over them that a preset needs is a linear
form of these moments. A moment is Σ side(A) · column · f(d) over the tokens of a sequence or turn, d being
the log-ratio of two policies; `FUNCTIONS`, `COLUMNS` and `DIRECTIONS` name the choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.segments import on_host

BLOCK = 1 << 17
"""Tokens per block on a CPU, so that its arrays fit in a core's cache; a GPU takes a whole batch."""

Direction = Literal["", "rollout", "old", "current", "drift"]
DIRECTIONS: dict[Direction, tuple[str, str]] = {
    "old": ("rollout", "old"),
    "current": ("rollout", "current"),
    "drift": ("old", "current"),
}
"""d = log-prob of the second policy minus that of the first, nats; "rollout" is d = 0, "" no d at all."""

Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "d": lambda d, x: d,
    "−d": lambda d, x: -d,
    "x": lambda d, x: x,
    "x²": lambda d, x: x.square(),
    "k3": lambda d, x: x - d,
    "|d|": lambda d, x: d.abs(),
    "d²": lambda d, x: d.square(),
    "|x|": lambda d, x: x.abs(),
    "k3_reverse": lambda d, x: segments.expm1(-d) + d,
    "e^|d| − 1": lambda d, x: torch.maximum(x, -x / (x + 1)),
    "k3²": lambda d, x: (x - d).square(),
    "d⁴": lambda d, x: d.square().square(),
    "log cosh(d/2)": lambda d, x: torch.log1p(x.square() / (4 * (x + 1))) / 2,
}
"""By name, f of d and of x = e^d − 1; all are 0 where d is, so that a token left out is one with d = 0."""
GATES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "gate": lambda g, x, tau: g * (4 / tau),
    "gate slope": lambda g, x, tau: x - 4 * g.square() * (1 + x),
}
"""SAPO's gate 4/τ·σ(τx) less 2/τ, and its derivative with respect to u less 1, of g = σ(τx) − ½, x = r − 1
and τ. Their names end in τ: "gate 1.05".
"""

GROUPS = {
    "": (
        ("d", "x", "x²", "k3"),
        ("|d|", "d²", "|x|"),
        ("k3²", "d⁴"),
        ("k3_reverse", "e^|d| − 1", "log cosh(d/2)"),
    ),
    "π_rollout": (("d", "x"),),
}
"""By column, functions that are made in one pass."""

COLUMNS: dict[str, Callable[[NearTokens, slice], Tensor]] = {
    "log π_rollout": lambda near, at: near.batch.rollout[at],
    "log π_θ": lambda near, at: _there(near.batch.current)[at],
    "π_rollout": lambda near, at: near.probabilities[at],
    "π_old/π_rollout": lambda near, at: near._expm1("old")[at] + 1,
}
SIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "A+": lambda a: a.clamp(min=0),
    "A-": lambda a: -a.clamp(max=0),
    "1+": lambda a: segments.numbers(a > 0),
    "1-": lambda a: segments.numbers(a < 0),
    "1=": lambda a: segments.numbers(a == 0),
}
"""Parts of the advantage: |A| where A > 0, |A| where A < 0; 1 where A > 0, A < 0, and A = 0."""


def _there(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over the near tokens of each sequence [S] or turn [R], float64, computed on first use.

    Attributes:
        tokens: the near tokens, with the sums computed so far.
        by_turn: whether a row is a turn.
        sign: count only tokens with this sign of the advantage: "1+", "1-" or "1=" (A = 0); "" for all.
    """

    tokens: NearTokens
    by_turn: bool = False
    sign: str = ""

    @classmethod
    def near(cls, batch: Batch, far: Tensor, excess: dict[Direction, Tensor] | None = None) -> Moments:
        """Build the moments of all tokens of a batch but the far ones, whose indices must rise."""
        return cls(NearTokens(batch, far, excess or {}))

    def turns(self, sign: str = "") -> Moments:
        """Return the same moments per turn, over the tokens with one sign of the advantage."""
        return Moments(self.tokens, True, sign)

    @property
    def n(self) -> Tensor:
        """Number of tokens of each row."""
        return self.of()

    def of(self, function: str = "1", d: Direction = "", column: str = "", side: str = "") -> Tensor:
        """Compute Σ side(A) · column · f(d) of each row.

        Args:
            function: one of `FUNCTIONS`, of `GATES` with its τ, or "1".
            d: the log-ratio that the function is applied to.
            column: one of `COLUMNS`; "" for 1.
            side: one of `SIDES`; "" for 1.
        """
        d = "" if function == "1" else d
        key = "sequence", self.sign, side, column, d, function
        if not self.by_turn and key in self.tokens.known:
            return self.tokens.known[key]
        if self.sign and side and side[1] != self.sign[1]:
            return torch.zeros_like(self.n)
        found = self.tokens.total(function, d, column, side or self.sign)
        if not self.by_turn:
            self.tokens.known[key] = found = segments.total(found, self.tokens.batch.turns)
        return found

    def of_turns(self, x: Tensor, at: slice, block: Batch) -> Tensor:
        """Compute Σ x of each turn of a block of whole sequences; x of all its tokens, [t], may be flags."""
        x = x.index_fill(0, self.tokens.far_in(at), 0)
        if self.sign:
            x = x * SIDES[self.sign](_there(block.advantages))
        if x.dtype != torch.bool:
            return segments.total(x, block.cu_runs)
        if segments.none(x):
            return self.n.new_zeros(len(block.cu_runs) - 1)
        return segments.count(x, block.cu_runs)

    def of_blocks(self, parts: list[Tensor]) -> Tensor:
        """Join the sums over the turns of all blocks, in order, to those of each row."""
        found = _joined(parts)
        return found if self.by_turn else segments.total(found, self.tokens.batch.turns)

    def exp(self, d: Direction, column: str = "", side: str = "") -> Tensor:
        """Compute Σ side(A) · column · e^d of each row."""
        return self.of("1", "", column, side) + self.of("x", d, column, side)

    def low(self, d: Direction, function: str = "d") -> Tensor:
        """Smallest f(d) of each row, +inf of none."""
        found = self.tokens.low(function, d, self.sign)
        return found if self.by_turn else segments.smallest(found, self.tokens.batch.turns)

    def high(self, d: Direction, function: str = "d") -> Tensor:
        """Largest f(d) of each row, -inf of none: at an end of d, as f is monotone on each side of 0."""
        low, high = self.low(d), -self.low(d, "−d")
        if function == "d":
            return high
        ends = torch.maximum(*(FUNCTIONS[function](x, segments.expm1(x)) for x in (low, high)))
        return torch.where(low > high, -torch.inf, ends)


@dataclass(eq=False)
class NearTokens:
    """The near tokens of a batch, and sums over each of its R turns, [R] float64.

    Attributes:
        batch: all tokens.
        far: indices of the far tokens, which do not count, rising.
        excess: e^d − 1 of all tokens, [T], where it is known; far ones are set to 0 here.
        known: sums computed so far.
    """

    batch: Batch
    far: Tensor
    excess: dict[Direction, Tensor] = field(default_factory=dict, repr=False)
    known: dict[tuple[str, ...], Tensor] = field(default_factory=dict, repr=False)
    _log_ratios: dict[Direction, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for x in self.excess.values():
            x.index_fill_(0, self.far, 0.0)

    @cached_property
    def probabilities(self) -> Tensor:
        """π_rollout of every token, [T]."""
        return segments.exp(self.batch.rollout)

    @cached_property
    def n(self) -> Tensor:
        """Number of near tokens in each turn."""
        starts = self.batch.cu_runs
        return segments.lengths(starts - torch.searchsorted(self.far, starts)).to(torch.float64)

    def total(self, function: str, d: Direction, column: str, side: str) -> Tensor:
        """Compute Σ side(A) · column · f(d) of each turn; "1" for f and "" elsewhere stand for 1."""
        if d == "rollout":
            return torch.zeros_like(self.n)
        if side and self.advantages is not None:
            return SIDES[side](self.advantages) * self.total(function, d, column, "")
        if function == "1" and not column and not side:
            return self.n
        if (side, column, d, function) not in self.known:
            gates = tuple(f"{gate} {_tau(function)}" for gate in GATES) if _tau(function) else ()
            groups = (*(() if side else GROUPS.get(column, ())), gates)
            self._sum(side, column, d, next((names for names in groups if function in names), (function,)))
        return self.known[side, column, d, function]

    @cached_property
    def advantages(self) -> Tensor | None:
        """Advantage of each turn, if constant within every turn and on a CPU; else None."""
        a, starts = self.batch.advantages, self.batch.cu_runs
        if a is None or not on_host(a) or not len(a):
            return None
        changes = a.numpy()[1:] != a.numpy()[:-1]
        borders = starts[1:-1].numpy() - 1
        return None if int(changes.sum()) > int(changes[borders].sum()) else a[starts[:-1]]

    def low(self, function: str, d: Direction, sign: str = "") -> Tensor:
        """Smallest f(d) of each turn, +inf of none."""
        if d == "rollout":
            return torch.where(self.total("1", "", "", sign) > 0, 0.0, torch.inf)
        key = sign, "low", d, function
        if key not in self.known:
            self.known[key] = self._low(function, d, sign)
        return self.known[key]

    # ------------------------------------------------------------------ passes over the tokens

    def _sum(self, side: str, column: str, d: Direction, names: tuple[str, ...]) -> None:
        """Sum some functions in one pass."""
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        tau = _tau(names[0])
        for at, offsets, far in self._blocks:
            factor = self._factor(side, column, at, far)
            delta, x = (self._log_ratio(d)[at], self._expm1(d)[at]) if d else (self.batch.rollout[at],) * 2
            gate = (tau * x).sigmoid_().sub_(0.5) if tau else x
            for name in names:
                if name == "1":
                    value = _there(factor)
                elif tau:
                    value = GATES[name.rpartition(" ")[0]](gate, x, tau)
                else:
                    value = FUNCTIONS[name](delta, x)
                value = value if factor is None or name == "1" else value * factor
                found[name].append(segments.total(value, offsets))
        self.known |= {(side, column, d, name): _joined(parts) for name, parts in found.items()}

    def _low(self, function: str, d: Direction, sign: str) -> Tensor:
        found = []
        for at, offsets, far in self._blocks:
            value = FUNCTIONS[function](self._log_ratio(d)[at], self._expm1(d)[at])
            if sign:
                value = torch.where(_there(self._factor(sign, "", at, far)) > 0, value, torch.inf)
            found.append(segments.smallest(value.index_fill(0, far, torch.inf), offsets))
        return _joined(found)

    @cached_property
    def _blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """Blocks of whole turns: their tokens, offsets of their turns, and which of the tokens are far."""
        starts = self.batch.cu_runs
        if not on_host(starts):
            return [(slice(0, self.batch.tokens), starts, self.far)]
        found = []
        for first, last in segments.spans(starts, BLOCK):
            at = slice(int(starts[first]), int(starts[last]))
            found.append((at, starts[first : last + 1] - at.start, self.far_in(at)))
        return found or [(slice(0, 0), starts, self.far)]

    def far_in(self, at: slice) -> Tensor:
        """Return the indices of the far tokens in a block, from its first token on."""
        if at == slice(0, self.batch.tokens):
            return self.far
        low, high = torch.searchsorted(self.far, torch.tensor([at.start, at.stop])).tolist()
        found: Tensor = self.far[low:high] - at.start
        return found

    def _log_ratio(self, d: Direction) -> Tensor:
        """Return d of every token, 0 of far ones, [T]."""
        if d not in self._log_ratios:
            below, above = (_there(self.batch.policy(name)) for name in DIRECTIONS[d])
            self._log_ratios[d] = (above - below).index_fill_(0, self.far, 0.0)
        return self._log_ratios[d]

    def _expm1(self, d: Direction) -> Tensor:
        """Return e^d − 1 of every token, 0 of far ones, [T]."""
        if d not in self.excess:
            self.excess[d] = segments.expm1(self._log_ratio(d))
        return self.excess[d]

    def _factor(self, side: str, column: str, at: slice, far: Tensor) -> Tensor | None:
        """Compute the factor of f(d) of each token of a block, 0 for far ones; None for 1."""
        found = COLUMNS[column](self, at) if column else None
        if side:
            of_side = SIDES[side](_there(self.batch.advantages)[at])
            found = of_side if found is None else found * of_side
        return None if found is None else found.index_fill(0, far, 0.0)


def _tau(name: str) -> float:
    """Return the τ in the name of a gate; 0 for other functions."""
    gate, _, tau = name.rpartition(" ")
    return float(tau) if gate in GATES else 0.0


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
