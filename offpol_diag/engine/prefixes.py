"""Effective sample size of sequence-level importance sampling, by length of the response.

The weight is the product of the ratios of a response's first T tokens, for T on a fixed grid; responses with
fewer than T tokens are left out at T. ESS is Kish's, over the responses that remain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Annotated

import numpy as np

from offpol_diag.engine import segments
from offpol_diag.engine.accumulators import LogSums
from offpol_diag.engine.fields import COUNTS, Floats, Saved, require
from offpol_diag.engine.formula import Formula, Reader
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import Array
from offpol_diag.engine.terms import Drift, Terms, collected
from offpol_diag.summary import AtLength, Lengths, Number

GRID = tuple(sorted({round(2 ** (half / 2)) for half in range(35)}))
"""T in tokens, two values to an octave, up to 131,072."""
FEWEST = 50
"""Fewest responses for an ESS at a length: each of a few makes up a large share by itself."""
KEPT = 0.1
"""ESS below which sequence-level importance sampling is considered unusable."""
ESS = Formula(
    "ess_sequences",
    "fraction",
    "responses of at least T tokens",
    "(Σw)² / (n Σw²), w = product of the raw ratios of the first T tokens",
    lambda get: get("ess"),
)


@dataclass(frozen=True)
class Prefixes(Saved):
    """Products of ratios over the first T tokens of responses, for every T of `GRID`.

    Attributes:
        logs: Σw and Σw² of the responses with at least T tokens, [G, 1+B] each.
        many: number of those responses, [G, 1+B].
    """

    logs: LogSums
    many: Annotated[Array, Floats(len(GRID), "B", rule=COUNTS)]

    def check(self) -> None:
        """Refuse sums of different shapes."""
        require(self.logs.once.shape == self.many.shape, "logs and many are of one shape")

    @classmethod
    def of(cls, x: Array, lengths: Array, draws: Array) -> Prefixes:
        """Build from log-weights [S, g] at the first g lengths, -inf beyond a response's end, and lengths."""
        reached = (lengths >= np.array(GRID[: x.shape[1]])[:, None]).astype(np.float64)
        many = np.concatenate((reached.sum(axis=1, keepdims=True), reached @ draws), axis=1)
        return cls.padded(LogSums.of(np.ascontiguousarray(x.T), draws), many)

    @classmethod
    def padded(cls, logs: LogSums, many: Array) -> Prefixes:
        """Build from sums at the first lengths, if no response reaches the others."""
        none = np.zeros((len(GRID) - len(many), many.shape[1]))
        shift = np.concatenate((logs.shift, np.full(len(none), -1e300)))
        once, twice, many = (np.concatenate((sums, none)) for sums in (logs.once, logs.twice, many))
        return cls(LogSums(shift, once, twice), many)

    def merge(self, other: Prefixes) -> Prefixes:
        """Merge the sums of two parts of a dump."""
        return Prefixes(self.logs.merge(other.logs), self.many + other.many)

    @cached_property
    def ess(self) -> Array:
        """(Σw)² / (n Σw²), [G, 1+B]; NaN where no response is that long."""
        values: Array = self.logs.once**2 / (self.many * self.logs.twice)
        return values


class Products:
    """Collect log-weights over the first T tokens of every sequence."""

    def __init__(self, scene: Scene, drift: Drift) -> None:
        self.rows: list[slice] = []
        self.parts: list[Array] = []

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        self.rows.append(terms.block.rows)
        self.parts.append(_products(terms.delta, terms.block.offsets))

    def logs(self, scene: Scene) -> Array:
        """Return the log-weights at the first lengths, [S, g]; -inf beyond a response's end."""
        batch, wide = scene.batch, max((part.shape[1] for part in self.parts), default=0)
        x = np.full((batch.sequences, wide), -np.inf)
        for rows, part in zip(self.rows, self.parts, strict=True):
            x[rows, : part.shape[1]] = part
        return x

    def state(self, scene: Scene) -> Prefixes:
        """Build the state from all blocks."""
        return Prefixes.of(self.logs(scene), scene.batch.lengths, scene.draws)


def _products(delta: Array, offsets: Array) -> Array:
    """Compute ΣΔ over the first T tokens [s, g], -inf where there are fewer; up to the longest."""
    lengths = segments.lengths(offsets)
    grid = np.array(GRID[: np.searchsorted(GRID, lengths.max(initial=0), side="right")], np.int64)
    ends = offsets[:-1, None] + np.minimum(grid, lengths[:, None])
    cuts = np.append(np.concatenate((offsets[:-1, None], ends), axis=1), offsets[-1])
    between = segments.total(delta, cuts).reshape(len(lengths), len(grid) + 1)  # the last: what lies beyond
    return np.where(grid <= lengths[:, None], between[:, :-1].cumsum(axis=1), -np.inf)


def sums(scene: Scene, drift: Drift) -> Prefixes:
    """Compute the state of one batch."""
    return collected(scene, drift, Products).state(scene)


# ---------------------------------------------------------------- read out


def lengths(reader: Reader, prefixes: Prefixes) -> Lengths:
    """Read out ESS by length, and the longest response at which a tenth is kept."""
    curve = list(_curve(reader, prefixes))
    return Lengths(longest=_longest(curve), curve=curve)


def _curve(reader: Reader, prefixes: Prefixes) -> Iterator[AtLength]:
    """Yield the points of the curve, as long as there are enough responses."""
    for tokens, many, ess in zip(GRID, prefixes.many[:, 0].tolist(), prefixes.ess, strict=True):
        if many < FEWEST:
            return
        yield AtLength(tokens=tokens, sequences=round(many), ess_sequences=reader.wrap(ess, ESS))


def _longest(curve: Sequence[AtLength]) -> Number:
    """Find the length where the curve first falls below `KEPT`, with an interval."""
    number = Number(
        unit="tokens",
        over="responses",
        formula=f"largest T up to which ESS of the products over the first T tokens stays above {KEPT:.0%}, "
        f"at lengths that at least {FEWEST} responses have",
    )
    if not curve:
        return number.model_copy(update={"unknown": f"fewer than {FEWEST} responses"})
    unknown = next((at.ess_sequences.unknown for at in curve if at.ess_sequences.value is None), None)
    if unknown is not None:
        return number.model_copy(update={"unknown": unknown})
    value = _crossing(curve, [at.ess_sequences.value for at in curve])
    last = curve[-1]
    if value is None:
        why = f"beyond the longest responses ({last.tokens:,} tokens, which {last.sequences:,} have)"
        return number.model_copy(update={"unknown": why})
    known = list(takewhile(lambda at: at.ess_sequences.interval is not None, curve))
    low, high = (_crossing(known, [(at.ess_sequences.interval or ())[end] for at in known]) for end in (0, 1))
    interval = None if low is None else (low, float(last.tokens) if high is None else high)
    return number.model_copy(update={"value": value, "interval": interval})


def _crossing(curve: Sequence[AtLength], ess: Sequence[float | None]) -> float | None:
    """Return the last whole token before ESS first falls below `KEPT`; None where it never does.

    log ESS is interpolated linearly in T, as is exact for log-normal ratios; at T = 0 it is 0.
    """
    before, above = 0, math.log(1 / KEPT)
    for at, share in zip(curve, ess, strict=True):
        left = math.log(max(share or 0.0, 1e-300) / KEPT)
        if left < 0:
            return float(math.floor(before + (at.tokens - before) * above / (above - left)))
        before, above = at.tokens, left
    return None
