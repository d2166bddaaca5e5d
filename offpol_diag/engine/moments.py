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
from offpol_diag.engine import host, segments
from offpol_diag.engine.host import here

BLOCK = 1 << 16
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
    "x": lambda d, x: x,
    "x²": lambda d, x: x.square(),
    "k3": lambda d, x: x - d,
    "|d|": lambda d, x: d.abs(),
    "d²": lambda d, x: d.square(),
    "|x|": lambda d, x: x.abs(),
    "k3_reverse": lambda d, x: host.expm1(-d) + d,
    "e^|d| − 1": lambda d, x: torch.maximum(x, -x / (x + 1)),
    "k3²": lambda d, x: (x - d).square(),
    "d⁴": lambda d, x: d.square().square(),
    "log cosh(d/2)": lambda d, x: torch.log1p(x.square() / (4 * (x + 1))) / 2,
}
"""By name, f of d and of x = e^d − 1; all are 0 where d is, so that a token left out is one with d = 0."""
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

COLUMNS: dict[str, Callable[[Batch, slice], Tensor]] = {
    "log π_rollout": lambda batch, at: batch.rollout[at],
    "log π_θ": lambda batch, at: _there(batch.current)[at],
    "π_rollout": lambda batch, at: host.exp(batch.rollout[at]),
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
    def near(cls, batch: Batch, far: Tensor) -> Moments:
        """Build the moments of all tokens of a batch but the far ones, whose indices must rise."""
        return cls(NearTokens(batch, far))

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
            function: one of `FUNCTIONS`, or "1".
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

    def exp(self, d: Direction, column: str = "", side: str = "") -> Tensor:
        """Compute Σ side(A) · column · e^d of each row."""
        return self.of("1", "", column, side) + self.of("x", d, column, side)

    def low(self, d: Direction, function: str = "d") -> Tensor:
        """Smallest f(d) of each row, +inf of none."""
        found = self.tokens.ends(function, d, self.sign)[0]
        return found if self.by_turn else segments.smallest(found, self.tokens.batch.turns)

    def high(self, d: Direction, function: str = "d") -> Tensor:
        """Largest f(d) of each row, -inf of none."""
        found = self.tokens.ends(function, d, self.sign)[1]
        return found if self.by_turn else segments.largest(found, self.tokens.batch.turns)


@dataclass(eq=False)
class NearTokens:
    """The near tokens of a batch, and sums over each of its R turns, [R] float64.

    Attributes:
        batch: all tokens.
        far: indices of the far tokens, which do not count, rising.
        known: sums computed so far.
    """

    batch: Batch
    far: Tensor
    known: dict[tuple[str, ...], Tensor] = field(default_factory=dict, repr=False)
    _excess: dict[Direction, Tensor] = field(default_factory=dict, repr=False)

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
            groups = () if side else GROUPS.get(column, ())
            self._make(side, column, d, next((names for names in groups if function in names), (function,)))
        return self.known[side, column, d, function]

    @cached_property
    def advantages(self) -> Tensor | None:
        """Advantage of each turn, if constant within every turn and on a CPU; else None."""
        a, starts = self.batch.advantages, self.batch.cu_runs
        if a is None or not here(a) or not len(a):
            return None
        changes = a.numpy()[1:] != a.numpy()[:-1]
        borders = starts[1:-1].numpy() - 1
        return None if int(changes.sum()) > int(changes[borders].sum()) else a[starts[:-1]]

    def ends(self, function: str, d: Direction, sign: str = "") -> tuple[Tensor, Tensor]:
        """Smallest and largest f(d) of each turn, ±inf of none."""
        if d == "rollout":
            there = self.total("1", "", "", sign) > 0
            return torch.where(there, 0.0, torch.inf), torch.where(there, 0.0, -torch.inf)
        keys = [(sign, end, d, function) for end in ("low", "high")]
        if keys[0] not in self.known:
            self.known |= zip(keys, self._made_ends(function, d, sign), strict=True)
        return self.known[keys[0]], self.known[keys[1]]

    # ------------------------------------------------------------------ passes over the tokens

    def _make(self, side: str, column: str, d: Direction, names: tuple[str, ...]) -> None:
        """Sum some functions in one pass."""
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        excess: list[Tensor] = []
        for at, offsets, far in self._blocks:
            factor = self._factor(side, column, at, far)
            if not d:
                found["1"].append(segments.total(_there(factor), offsets))
                continue
            delta = self._delta(d, at, far)
            x = self._excess[d][at] if d in self._excess else host.expm1(delta)
            excess.append(x)
            for name in names:
                value = FUNCTIONS[name](delta, x)
                found[name].append(segments.total(value if factor is None else value * factor, offsets))
        if excess and d not in self._excess:
            self._excess[d] = _joined(excess)
        self.known |= {(side, column, d, name): _joined(parts) for name, parts in found.items()}

    def _made_ends(self, function: str, d: Direction, sign: str) -> tuple[Tensor, Tensor]:
        lows: list[Tensor] = []
        highs: list[Tensor] = []
        for at, offsets, far in self._blocks:
            value = delta = self._delta(d, at, far)
            if function != "d":
                x = self._excess[d][at] if d in self._excess else host.expm1(delta)
                value = FUNCTIONS[function](delta, x)
                value = value.clone() if value is x else value
            counts = self._factor(sign, "", at, far) if sign else None
            for found, absent, end in (
                (lows, torch.inf, segments.smallest),
                (highs, -torch.inf, segments.largest),
            ):
                value.index_fill_(0, far, absent)
                seen = value if counts is None else torch.where(counts > 0, value, absent)
                found.append(end(seen, offsets))
        return _joined(lows), _joined(highs)

    @cached_property
    def _blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """Blocks of whole turns: their tokens, offsets of their turns, and which of the tokens are far."""
        starts = self.batch.cu_runs
        if not here(starts):
            return [(slice(0, self.batch.tokens), starts, self.far)]
        found = []
        for first, last in segments.spans(starts, BLOCK):
            begin, end = int(starts[first]), int(starts[last])
            low, high = torch.searchsorted(self.far, torch.tensor([begin, end])).tolist()
            found.append((slice(begin, end), starts[first : last + 1] - begin, self.far[low:high] - begin))
        return found or [(slice(0, 0), starts, self.far)]

    def _delta(self, d: Direction, at: slice, far: Tensor) -> Tensor:
        """Compute d of a block's tokens, set to 0 for far ones."""
        below, above = (_there(self.batch.policy(name)) for name in DIRECTIONS[d])
        found = above[at] - below[at]
        return found.index_fill_(0, far, 0.0)

    def _factor(self, side: str, column: str, at: slice, far: Tensor) -> Tensor | None:
        """Compute the factor of f(d) of each token of a block, 0 for far ones; None for 1."""
        found = COLUMNS[column](self.batch, at) if column else None
        if side:
            of_side = SIDES[side](_there(self.batch.advantages)[at])
            found = of_side if found is None else found * of_side
        return None if found is None else found.index_fill(0, far, 0.0)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
