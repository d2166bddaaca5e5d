"""Sums of powers of one log-ratio by a matrix product: I powers times J rows are I · J sums at once.

The powers d, d², … d^I are made once for all that they multiply: the parts (`series.py`), and parts times d^I
where they have more powers, and on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offpol_diag.metrics.parts import ONE, Part
from offpol_diag.metrics.room import Room

Array = NDArray[np.float64]
Offsets = NDArray[np.int64]
Factor = Callable[[Part], Array | None]
"""What a part is besides powers of d and its sign, [T]; None: 1."""

WIDTH = 5
"""How many powers every row is multiplied by, at most."""
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
        """How many powers every row is multiplied by, from d on."""
        return min(WIDTH, max(degree for _, degree in self.degrees))

    @cached_property
    def rows(self) -> tuple[tuple[Part, int], ...]:
        """What they multiply: a part and a power; first d^I, which is one of them, and 1."""
        found = {(ONE, self.width): None, (ONE, 0): None}
        for part, degree in sorted(self.degrees, key=lambda one: one[0] != ONE):
            found |= dict.fromkeys((part, before) for before in self._befores(degree))
        return tuple(found)

    def _befores(self, degree: int) -> range:
        return range(0, degree, self.width)

    @cached_property
    def places(self) -> Offsets:
        """Where in a product, flat, the powers 1, 2, … of each part lie, one part after the other [F]."""
        at, found = {row: place for place, row in enumerate(self.rows)}, []
        for part, degree in self.degrees:
            for power in range(1, degree + 1):
                left = (power - 1) % self.width
                found.append(left * len(at) + at[part, power - 1 - left])
        return np.array(found, dtype=np.int64)

    @property
    def most(self) -> int:
        """Tokens of a product, at most."""
        return SMALL // (self.width * len(self.rows))

    @property
    def saves(self) -> float:
        """Nanoseconds for each token that matrix products take less than sums one by one, calls aside."""
        sums, made = sum(degree for _, degree in self.degrees), self.width + len(self.rows)
        return 0.5 * sums - 0.35 * made - 0.07 * self.width * len(self.rows)

    def sums(self, gap: Array, factor: Factor, begins: Offsets, room: Room) -> Array:
        """Sums over runs of the powers 1, 2, … of each part, one part after the other [F, N].

        Args:
            gap: d, [T].
            factor: of each part.
            begins: where each run begins and the last one ends, [N+1]; no run is longer than `most`.
            room: to compute in.
        """
        both = room("products", self.width - 1 + len(self.rows), len(gap))
        left, right = both[: self.width], both[self.width - 1 :]  # the highest power is in both
        self._fill(left, right, gap, factor)
        found, beside = np.empty((len(begins) - 1, self.width, len(self.rows))), right.T
        for into, first, last in zip(found, begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            np.matmul(left[:, first:last], beside[first:last], into)  # by name `out` takes a tenth longer
        return found.reshape(len(found), -1).T[self.places]

    def _fill(self, left: Array, right: Array, gap: Array, factor: Factor) -> None:
        left[0], right[1] = gap, 1.0
        made, powers = dict(zip(self.rows, right, strict=True)), dict(enumerate(left, 1))
        for power in range(2, self.width + 1):
            np.multiply(*_halves(power, powers), out=powers[power])
        for (part, power), row in [*made.items()][2:]:
            if not power:
                _begin(row, gap, factor(part), bool(part[2]))
            else:
                np.multiply(made[part, 0], _power(power, powers), out=row)


def _power(power: int, powers: dict[int, Array]) -> Array:
    """d to a power, made of others where it is not there."""
    if power not in powers:
        powers[power] = np.multiply(*_halves(power, powers))
    return powers[power]


def _halves(power: int, powers: dict[int, Array]) -> tuple[Array, Array]:
    return _power(power // 2, powers), _power(power - power // 2, powers)


def _begin(row: Array, gap: Array, factor: Array | None, signed: bool) -> None:
    """A part by itself; where d is 0 no power of it asks for its sign."""
    if signed:
        _sign(gap, row)
    if factor is not None:
        np.multiply(row, factor, out=row) if signed else np.copyto(row, factor)


def _sign(gap: Array, row: Array) -> None:
    """−1 or 1, by its bit: half the time of numpy's sign."""
    bits = row.view(np.int64)
    np.bitwise_and(gap.view(np.int64), _MINUS, out=bits)
    np.bitwise_or(bits, _ONE, out=bits)


_MINUS, _ONE = np.array([-0.0, 1.0]).view(np.int64)
