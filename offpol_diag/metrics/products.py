"""Sums of powers of one log-ratio by a matrix product: I powers times J rows are I · J sums at once.

The powers 1, d, … d^{I−1} are made once for all that they multiply: the parts (`series.py`), each times d,
times d^{I+1} where it has more powers, and on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offpol_diag.metrics.room import Room
from offpol_diag.metrics.series import Part

Array = NDArray[np.float64]
Offsets = NDArray[np.int64]
Factor = Callable[[Part], Array | None]
"""What a part is besides powers of d and its sign, [T]; None: 1."""

WIDTH = 5
"""Powers that every row is multiplied by, at most."""
SMALL = 1 << 18
"""A product of no more multiplications is made by one thread: how many there are changes no bits."""


@dataclass(frozen=True)
class Products:
    """The sums of powers of one log-ratio.

    Attributes:
        degrees: the highest power of each part.
    """

    degrees: tuple[tuple[Part, int], ...]

    @cached_property
    def width(self) -> int:
        """How many powers every row is multiplied by, from 1 and d on."""
        return min(WIDTH, max(degree for _, degree in self.degrees))

    @cached_property
    def rows(self) -> tuple[tuple[Part, int], ...]:
        """What they multiply: a part and its first power."""
        return tuple((part, first) for part, degree in self.degrees for first in self._firsts(degree))

    def _firsts(self, degree: int) -> list[int]:
        last = max(degree - self.width + 1, 1)  # so that none is higher than asked for; some come twice
        return [min(first, last) for first in range(1, degree + 1, self.width)]

    @cached_property
    def places(self) -> Offsets:
        """Where in a product, flat, the powers 1, 2, … of each part lie, one part after the other [F]."""
        at, found = {row: place for place, row in enumerate(self.rows)}, []
        for part, degree in self.degrees:
            for power in range(1, degree + 1):
                first = max(one for one in self._firsts(degree) if one <= power)
                found.append((power - first) * len(at) + at[part, first])
        return np.array(found, dtype=np.int64)

    @property
    def most(self) -> int:
        """Tokens of a product, at most."""
        return SMALL // (self.width * len(self.rows))

    def sums(self, gap: Array, factor: Factor, begins: Offsets, room: Room) -> Array:
        """Sums over runs of the powers 1, 2, … of each part, one part after the other [F, N].

        Args:
            gap: d, [T].
            factor: of each part.
            begins: where each run begins and the last one ends, [N+1]; no run is longer than `most`.
            room: to compute in.
        """
        powers = Powers(gap, self.width, room)
        right = room("right", len(self.rows), len(gap))
        for row, (part, first) in zip(right, self.rows, strict=True):
            powers.fill(row, part, factor(part), first)
        found = np.empty((len(begins) - 1, self.width, len(right)))
        for into, first, last in zip(found, begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            np.matmul(powers.left[:, first:last], right[:, first:last].T, out=into)
        return found.reshape(len(found), -1).T[self.places]


class Powers:
    """Powers of d [T].

    Attributes:
        left: 1, d, d², … [width, T].
    """

    def __init__(self, gap: Array, width: int, room: Room) -> None:
        self.left, self._room, self._made = room("left", width, len(gap)), room, {1: gap}
        self.left[0] = 1.0
        for power, row in enumerate(self.left[1:], 1):
            if power == 1:
                row[:] = gap
            self._made[power] = row if power == 1 else np.multiply(*self._halves(power), out=row)

    def of(self, power: int) -> Array:
        """One of them, [T]."""
        if power not in self._made:
            out = self._room(("power", power), len(self._made[1]))
            self._made[power] = np.multiply(*self._halves(power), out=out)
        return self._made[power]

    def _halves(self, power: int) -> tuple[Array, Array]:
        return self.of(power // 2), self.of(power - power // 2)

    def fill(self, row: Array, part: Part, factor: Array | None, power: int) -> None:
        """A part times a power, into a row; the sign of d is |d| for one d."""
        factors = [self.of(power)]
        if part[2]:
            size = np.abs(self._made[1], out=self._room("size", len(row)))
            factors = [size] if power == 1 else [size, self.of(power - 1)]
        first, *more = [*factors, *([] if factor is None else [factor])]
        if not more:
            row[:] = first
        for other in more:
            first = np.multiply(first, other, out=row)
