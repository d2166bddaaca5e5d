"""The largest values of a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offpol_diag.accumulators.fields import NUMBERS, UNSAVED, Count, Floats, Saved, require
from offpol_diag.host import here

TAIL = 1 << 15
"""Largest values kept for a tail fit: enough for M = 3√n up to n = 1.2e8; beyond that a smaller tail is
fitted.
"""


class Floor:
    """A bound that rises while the parts of a sample come; it does not travel.

    Attributes:
        at: `TAIL` values of the parts that came so far are not below it; -inf while that is not known.
    """

    at: float = -math.inf

    def rise(self, to: float) -> None:
        """Learn a bound; a lower one than is known teaches nothing."""
        self.at = max(self.at, to)

    def __reduce__(self) -> tuple[type[Floor], tuple[()]]:
        return Floor, ()


@dataclass(frozen=True)
class Tail(Saved):
    """The largest values of a sample.

    Attributes:
        n: how many values there were.
        kept: the `TAIL` largest of them and perhaps more, in no order.
        cut: no value below it need be kept: `TAIL` are not below it. -inf where that is not known.
        floor: is told of the cut, for parts still to come.
    """

    n: Count
    kept: Annotated[Tensor, Floats("kept", rule=NUMBERS)]
    cut: Annotated[float, *UNSAVED] = -math.inf
    floor: Annotated[Floor | None, *UNSAVED] = field(default=None, compare=False, repr=False)

    def check(self) -> None:
        """Refuse fewer values than are kept of so many, and more."""
        most = min(self.n, 2 * TAIL)
        require(min(self.n, TAIL) <= len(self.kept) <= most, f"{len(self.kept)} of {self.n} values are kept")

    @classmethod
    def of(cls, x: Tensor, floor: Floor | None = None) -> Tail:
        """From all values of a sample.

        With a `floor`, from those of a part of it, all of whose parts will be merged: what lies below the
        floor is of no use.
        """
        n, known = x.numel(), -math.inf if floor is None else floor.at
        if not here(x):  # no shape may depend on values: the host would wait for them
            return cls(n, torch.topk(x, min(n, TAIL), sorted=False).values, floor=floor)
        if known > -math.inf:
            return cls._largest(n, _not_below(x, known), known, floor)
        if n <= TAIL:
            return cls(n, x.clone(), floor=floor)
        return cls._above(n, x, _below_the_largest(x.numpy()), floor)

    @classmethod
    def _above(cls, n: int, x: Tensor, cut: float, floor: Floor | None) -> Tail:
        kept = _not_below(x, cut)
        if len(kept) < TAIL:
            return cls._cut(n, x, floor)
        return cls._largest(n, kept, cut, floor)

    @classmethod
    def _largest(cls, n: int, kept: Tensor, cut: float, floor: Floor | None) -> Tail:
        """Of n values those that are not below a cut, or fewer where they are many."""
        return cls(n, kept, cut, floor)._told() if len(kept) <= 2 * TAIL else cls._cut(n, kept, floor)

    @classmethod
    def _cut(cls, n: int, x: Tensor, floor: Floor | None) -> Tail:
        largest = np.partition(x.numpy(), len(x) - TAIL)[-TAIL:]
        return cls(n, torch.from_numpy(largest.copy()), float(largest[0]), floor)._told()

    def _told(self) -> Tail:
        if self.floor is not None:
            self.floor.rise(self.cut)
        return self

    def merge(self, other: Tail) -> Tail:
        """The largest of both."""
        n, cut = self.n + other.n, max(self.cut, other.cut)
        kept = torch.cat([one.kept if one.cut == cut else _not_below(one.kept, cut) for one in (self, other)])
        floor = self.floor or other.floor
        if len(kept) > 2 * TAIL:
            fewer = Tail.of(kept)
            kept, cut = fewer.kept, fewer.cut
        return Tail(n, kept, cut, floor)._told()

    @property
    def top(self) -> Tensor:
        """The `TAIL` largest, in falling order."""
        return torch.topk(self.kept, min(TAIL, len(self.kept))).values


def _below_the_largest(x: npt.NDArray[np.float64]) -> float:
    """A guess from every few values: a little more than `TAIL` of x are larger."""
    some = x[:: max(len(x) >> 13, 1)]
    rank = max(len(some) - math.ceil(len(some) * min(1.15 * TAIL / len(x), 1.0)), 0)
    return float(np.partition(some, rank)[rank])


def _not_below(x: Tensor, cut: float) -> Tensor:
    values = x.numpy()
    return torch.from_numpy(
        values[np.flatnonzero(values >= cut)]
    )  # few are: their places cost less than a mask
