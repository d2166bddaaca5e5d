"""A number of every near token as a power series in its log-ratios, found by the code that makes the number.

Near tokens lie within a small radius, where every formula is smooth and no bound acts. Given a `Series` in
place of a tensor, a formula gives the series of its own result; its sum over a sequence is then a sum of
powers of Δ (`powersums.py`), which all formulas share. What has no such series raises `Untraced`, and is
computed from the tokens themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offpol_diag.metrics.parts import ONE, Part, product
from offpol_diag.metrics.polynomials import Poly, Untraced, exp, times
from offpol_diag.metrics.reach import sign_of, span

NEGLIGIBLE = 2.0**-60


@dataclass(frozen=True)
class Space:
    """Where series are defined.

    Attributes:
        radius: the largest |log-ratio|, nats.
        offsets: stands for where the sequences begin.
        degree: of the highest power that is kept.
    """

    radius: float
    offsets: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))

    @cached_property
    def degree(self) -> int:
        """So that what is left out of e^{2Δ} cannot be seen beside Δ⁴."""
        a, enough = self.radius, NEGLIGIBLE * self.radius**4
        return next(n for n in range(2, 60) if (2 * a) ** (n + 1) / math.factorial(n + 1) < enough)

    def symbol(self, part: Part = ONE, constant: float = 1.0, x: float = 0.0, y: float = 0.0) -> Series:
        """(constant + x·X + y·Y) times a part."""
        poly = np.zeros((self.degree + 1,) * 2)
        poly[0, 0], poly[1, 0], poly[0, 1] = constant, x, y
        return self.of(poly, part)

    def of(self, poly: Poly, part: Part = ONE) -> Series:
        """A polynomial times a part."""
        return Series(self, {part: poly})


@dataclass(frozen=True, eq=False)
class Line:
    """A series reduced over each sequence: `sum`, `max` or `min`."""

    of: Series
    how: str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing is computed of it before there are numbers."""
        raise Untraced(function)

    def __getattr__(self, name: str) -> Any:
        raise Untraced(name)


class Series:
    """Σ over parts of part · polynomial; takes the place of a tensor [T] of float64 or of flags (0 or 1)."""

    requires_grad = False
    device = torch.device("meta")

    def __init__(self, space: Space, parts: Mapping[Part, Poly]) -> None:
        self.space = space
        self.parts = {part: poly for part, poly in parts.items() if poly.any()}

    # ------------------------------------------------------------ arithmetic

    def __add__(self, other: Series | float) -> Series:
        found = dict(self.parts)
        for part, poly in self._series(other).parts.items():
            found[part] = found[part] + poly if part in found else poly
        return Series(self.space, found)

    def __mul__(self, other: Series | float) -> Series:
        if isinstance(other, int | float) and math.isfinite(other):
            return Series(self.space, {part: poly * other for part, poly in self.parts.items()})
        found: dict[Part, Poly] = {}
        for one, p in self.parts.items():
            for two, q in self._series(other).parts.items():
                part = product(one, two)
                if part is not None:
                    poly = times(p, q)
                    found[part] = found[part] + poly if part in found else poly
        return Series(self.space, found)

    def __neg__(self) -> Series:
        return self * -1.0

    def __sub__(self, other: Series | float) -> Series:
        return self + -self._series(other)

    def __rsub__(self, other: Series | float) -> Series:
        return self._series(other) - self

    def __truediv__(self, other: float) -> Series:
        if not isinstance(other, int | float):
            raise Untraced("division")
        return Series(self.space, {part: poly / other for part, poly in self.parts.items()})

    __radd__, __rmul__ = __add__, __mul__

    def square(self) -> Series:
        """x²."""
        return self * self

    def exp(self) -> Series:
        """e^x; of log π_rollout no other multiple than 1 has a name."""
        log, rest, constant = self._log(), self._plain(), self._constant()
        alone = rest.parts.keys() <= {ONE}
        found = self.space.of(exp(rest.parts[ONE])) if alone and rest.parts else rest._exp()
        return found * math.exp(constant) * (self.space.symbol(("probability", "", "")) if log else 1.0)

    def _exp(self) -> Series:
        """e^x of what has no constant, with signs of directions in it."""
        found = power = self._series(1.0)
        for k in range(1, self.space.degree + 1):
            power = power * self / k
            found = found + power
        return found

    def expm1(self) -> Series:
        """e^x − 1."""
        return self.exp() - 1.0

    def sinh(self) -> Series:
        """(e^x − e^−x)/2."""
        return (self.exp() - (-self).exp()) / 2

    def log1p(self) -> Series:
        """log(1 + x), x being 0 on-policy."""
        if self._constant() or self._log():
            raise Untraced("log1p")
        found, power = self._series(0.0), self._series(-1.0)
        for k in range(1, self.space.degree + 1):
            power = power * -self
            found = found + power / k
        return found

    def abs(self) -> Series:
        """|x|."""
        try:
            return self * ((self > 0.0) - (self < 0.0))
        except Untraced:
            return self * self._sign()

    def clamp(self, min: float | None = None, max: float | None = None) -> Series:
        """x within bounds."""
        up = self if min is None else self._at_least(min)
        return up if max is None else -(-up)._at_least(-max)

    def _at_least(self, low: float) -> Series:
        if low == 0 and any(side for _, side, _ in self.parts):
            return self * (self > 0.0)
        bottom, top = span(self.parts, self.space.radius)
        if bottom < low < top:
            raise Untraced("a bound within reach")
        return self if bottom >= low else self._series(low)

    def to(self, dtype: torch.dtype) -> Series:
        """Flags are 0 and 1 already."""
        return self

    # ------------------------------------------------------------ flags

    def __gt__(self, other: Series | float) -> Series:
        away = self - other
        sides = {side for _, side, _ in away.parts}
        if sides and sides <= {"A+", "A-"}:
            up, down = (away._side(side)._above() for side in ("A+", "A-"))
            return self.space.symbol(("", "1+", ""), up) + self.space.symbol(("", "1-", ""), down)
        return self._series(away._above())

    def __lt__(self, other: Series | float) -> Series:
        return self._series(other) > self

    def __ge__(self, other: Series | float) -> Series:
        return ~(self < other)

    def __le__(self, other: Series | float) -> Series:
        return ~(self > other)

    def __ne__(self, other: Series | float) -> Series:  # type: ignore[override]
        return (self > other) + (self < other)

    def __eq__(self, other: Series | float) -> Series:  # type: ignore[override]
        return ~(self != other)

    def __invert__(self) -> Series:
        return 1.0 - self

    def __and__(self, other: Series) -> Series:
        return self * other

    def __or__(self, other: Series) -> Series:
        return self + other - self * other

    __hash__ = object.__hash__

    # ------------------------------------------------------------ in a tensor's place

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch's functions do with a series."""
        if function not in _FUNCTIONS or any(isinstance(x, Tensor) for x in args):
            raise Untraced(function)
        return _FUNCTIONS[function](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise Untraced(name)

    def __bool__(self) -> bool:
        raise Untraced("a decision")

    # ------------------------------------------------------------ inside

    def _series(self, other: object) -> Series:
        if isinstance(other, Series):
            return other
        if not isinstance(other, int | float) or not math.isfinite(other):
            raise Untraced(type(other))
        return self.space.symbol(ONE, float(other))

    def _constant(self) -> float:
        return float(self.parts[ONE][0, 0]) if ONE in self.parts else 0.0

    def _log(self) -> bool:
        """Whether log π_rollout is added once."""
        poly = self.parts.get(("log", "", ""))
        if poly is not None and (poly[0, 0] != 1 or np.count_nonzero(poly) > 1):
            raise Untraced("a power of the probability")
        return poly is not None

    def _plain(self) -> Series:
        """Without the constant and log π_rollout."""
        parts = {part: poly for part, poly in self.parts.items() if part != ("log", "", "")}
        if any(column or side for column, side, _ in parts):
            raise Untraced("a function of a column")
        return Series(self.space, parts) - self._constant()

    def _side(self, side: str) -> Series:
        """What a part of the advantage is multiplied by."""
        return Series(self.space, {(c, "", s): poly for (c, at, s), poly in self.parts.items() if at == side})

    def _above(self) -> float:
        """1 where all values lie above 0, 0 where none does."""
        low, high = span(self.parts, self.space.radius)
        if low <= 0 < high:
            raise Untraced("a bound within reach")
        return float(low > 0)

    def _sign(self) -> Series:
        direction, sign = sign_of(self.parts, self.space.radius)
        return self.space.symbol(("", "", direction), sign)


def _where(flags: object, one: Any, two: Any) -> Series:
    if not isinstance(flags, Series):
        raise Untraced("flags of something else")
    found: Series = flags * one + ~flags * two
    return found


def _reduced(x: Series, how: str, *, offsets: Tensor, initial: float) -> Line:
    if offsets is not x.space.offsets:
        raise Untraced("runs that are not sequences")
    return Line(x, how)


def _like(value: float) -> Callable[..., Series]:
    return lambda x, dtype=None: x.space.symbol(ONE, value)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.exp: Series.exp,
    torch.expm1: Series.expm1,
    torch.log1p: Series.log1p,
    torch.sinh: Series.sinh,
    torch.square: Series.square,
    torch.abs: Series.abs,
    torch.where: _where,
    torch.zeros_like: _like(0.0),
    torch.ones_like: _like(1.0),
    torch.segment_reduce: _reduced,
}
