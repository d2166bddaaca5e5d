"""Sums over each sequence of powers of the log-ratios, and what becomes of them under series (`series.py`).

One pass over the tokens serves every formula: what is left of each is a product of its coefficients with the
sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate

import numpy as np
import torch
from numpy.polynomial.polynomial import polyval
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.metrics.columns import COLUMNS
from offpol_diag.metrics.exponentials import exact
from offpol_diag.metrics.lines import End, Family, Row
from offpol_diag.metrics.moments import Places, Tokens
from offpol_diag.metrics.parts import SIDES

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PowerSums:
    """The sums that some lines are made of.

    Attributes:
        rows: what each line is made of.
    """

    rows: tuple[Row | End, ...]

    @cached_property
    def _exact(self) -> tuple[Row | End, ...]:
        return exact(self.rows)

    @cached_property
    def degrees(self) -> dict[Family, int]:
        """The highest power of each family."""
        found: dict[Family, int] = {}
        for one in self._exact:
            for family, ray in one.items() if isinstance(one, dict) else ():
                found[family] = max(found.get(family, 0), len(ray))
        return found

    @cached_property
    def coefficients(self) -> tuple[Array, tuple[int, ...]]:
        """The distinct rows, [L, F], and which of them each line has; -1 for an end."""
        starts = [0, *accumulate(self.degrees.values())]
        places = dict(zip(self.degrees, starts, strict=False))
        distinct: dict[tuple[float, ...], int] = {}
        which = [
            distinct.setdefault(_spread(one, places, starts[-1]), len(distinct))
            if isinstance(one, dict)
            else -1
            for one in self._exact
        ]
        return np.array([*distinct]).reshape(len(distinct), starts[-1]), tuple(which)

    def values(self, batch: Batch) -> list[Tensor]:
        """Every line on a batch of near tokens, [S] each."""
        matrix, which = self.coefficients
        there = (batch.lengths > 0).numpy()
        moments, places = self._moments(Tokens.of(batch))
        sums = _back(matrix @ moments, there, 0.0)
        ends = dict.fromkeys(one for one in self.rows if isinstance(one, End))
        found = {one: _back(x, there, absent) for one in ends for x, absent in (_end(one, places),)}
        return [
            sums[at] if isinstance(one, dict) else found[one]
            for one, at in zip(self.rows, which, strict=True)
        ]

    def _moments(self, tokens: Tokens) -> tuple[Array, Places]:
        """Sums of the powers of each family, one family after the other [F, N]; places [N]."""
        wanted = {(one.direction, place) for one in self.rows if isinstance(one, End) for place in one.places}
        advantages = tokens.advantages()
        if advantages is None:
            return tokens.reduced(self.degrees, wanted)
        own = _sideless(self.degrees)
        moments, places = tokens.reduced(own, wanted)
        return _sided(moments, own, self.degrees, advantages), places


def _back(x: Array, there: NDArray[np.bool_], absent: float) -> Tensor:
    """[…, N] → […, S], given which sequences have tokens."""
    found = np.full((*x.shape[:-1], len(there)), absent)
    found[..., there] = x
    return torch.from_numpy(found)


def _spread(row: Row, places: Mapping[Family, int], width: int) -> tuple[float, ...]:
    found = [0.0] * width
    for family, ray in row.items():
        found[places[family] : places[family] + len(ray)] = ray
    return tuple(found)


def _end(end: End, places: Mapping[tuple[str, str], Array]) -> tuple[Array, float]:
    """The end of each sequence, [N], and what an empty one has."""
    absent, join = (-np.inf, np.fmax) if end.how == "max" else (np.inf, np.fmin)
    at = [places[end.direction, place] for place in end.places] or [np.zeros(())]
    found = [
        np.where(np.isfinite(d), polyval(np.where(np.isfinite(d), d, 0.0), end.powers), absent) for d in at
    ]
    return reduce(join, found), absent


def _sideless(degrees: Mapping[Family, int]) -> dict[Family, int]:
    """The families without parts of the advantage, which are those times a number of each sequence."""
    found: dict[Family, int] = {}
    for ((column, _, sign), direction), degree in degrees.items():
        family = (column, "", sign), direction
        found[family] = max(found.get(family, 0), degree)
    return found


def _sided(
    moments: Array, own: Mapping[Family, int], degrees: Mapping[Family, int], advantages: Array
) -> Array:
    """The families' moments made of those without parts of the advantage, given that of each sequence [N]."""
    places = dict(zip(own, accumulate(own.values(), initial=0), strict=False))
    none = np.empty_like(advantages)
    sides = {side: COLUMNS[side]({"advantages": advantages}, none.copy()) for side in SIDES}
    sides[""] = np.ones(())
    found = [np.empty((0, len(advantages)))]
    for ((column, side, sign), direction), degree in degrees.items():
        at = places[(column, "", sign), direction]
        found.append(moments[at : at + degree] * sides[side])
    return np.concatenate(found)
