"""Effective sample size of sequence-level importance sampling, by length of the response.

The weight is the product of the ratios of a response's first T tokens, for T on a fixed grid; responses with
fewer than T tokens are left out at T. ESS is Kish's, over the responses that remain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from offpol_diag.core.intervals import Formula, Reader
from offpol_diag.engine import segments
from offpol_diag.engine.bootstrap import log_resampled, resampled
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Arrays, largest_of
from offpol_diag.engine.terms import Drift, Terms, collected
from offpol_diag.number import Number
from offpol_diag.result import AtLength

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


class Products:
    """Collect log-weights over the first T tokens of every sequence."""

    def __init__(self, context: BatchContext, drift: Drift) -> None:
        self.rows: list[slice] = []
        self.parts: list[Array] = []

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        self.rows.append(terms.block.rows)
        self.parts.append(_products(terms.delta, terms.block.offsets))

    def logs(self, context: BatchContext) -> Array:
        """Return the log-weights, [S, G]; -inf beyond a response's end."""
        x = np.full((context.batch.sequences, len(GRID)), -np.inf)
        for rows, part in zip(self.rows, self.parts, strict=True):
            x[rows, : part.shape[1]] = part
        return x


def _products(delta: Array, offsets: Array) -> Array:
    """Compute ΣΔ over the first T tokens [s, g], -inf where there are fewer; up to the longest."""
    lengths = segments.lengths(offsets)
    grid = np.array(GRID[: np.searchsorted(GRID, lengths.max(initial=0), side="right")], np.int64)
    ends = offsets[:-1, None] + np.minimum(grid, lengths[:, None])
    cuts = np.append(np.concatenate((offsets[:-1, None], ends), axis=1), offsets[-1])
    between = segments.total(delta, cuts).reshape(len(lengths), len(grid) + 1)  # the last: what lies beyond
    return np.where(grid <= lengths[:, None], between[:, :-1].cumsum(axis=1), -np.inf)


TOP = 2048
"""Largest log-weights kept of a sample for k̂: all that a fit uses up to 466,000 weights."""


def arrays(context: BatchContext, drift: Drift) -> Arrays:
    """Compute log Σw and log Σw² of the responses of at least T tokens, their number, and the largest w.

    They are [2, G, 1+B], [G, 1+B] and [G, TOP], for T in `GRID`.
    """
    x = collected(context, drift, Products).logs(context).T
    most = int(np.searchsorted(GRID, context.batch.lengths.max(initial=0), side="right"))
    reached = segments.numbers(context.batch.lengths >= np.array(GRID)[:, None])
    logs = np.full((2, len(GRID), 1 + context.draws.shape[1]), -np.inf)
    logs[:, :most] = log_resampled(np.stack((x[:most], 2 * x[:most])), context.draws)
    return Arrays(
        sums={"prefixes.many": resampled(reached, context.draws)},
        log_sums={"prefixes": logs},
        largest={"prefixes": largest_of(x, TOP)},
    )


# ---------------------------------------------------------------- read out


def curve(reader: Reader, arrays: Arrays) -> Iterator[AtLength]:
    """Yield the points of the curve, as long as there are enough responses."""
    many_of, (once, twice) = arrays.sums["prefixes.many"], arrays.log_sums["prefixes"]
    every = np.exp(2 * once - twice) / many_of
    for tokens, many, ess in zip(GRID, many_of[:, 0].tolist(), every, strict=True):
        if many < FEWEST:
            return
        yield AtLength(tokens=tokens, sequences=round(many), ess_sequences=reader.wrap(ess, ESS))


def longest(curve: Sequence[AtLength]) -> Number:
    """Find the length where the curve first falls below `KEPT`, with an interval."""
    number = Number(
        unit="tokens",
        over="responses",
        formula=f"largest T up to which ESS of the products over the first T tokens stays above {KEPT:.0%}, "
        f"at lengths that at least {FEWEST} responses have",
    )
    if not curve:
        return replace(number, unknown=f"fewer than {FEWEST} responses")
    unknown = next((at.ess_sequences.unknown for at in curve if at.ess_sequences.value is None), None)
    if unknown is not None:
        return replace(number, unknown=unknown)
    value = _crossing(curve, [at.ess_sequences.value for at in curve])
    last = curve[-1]
    if value is None:
        why = f"beyond the longest responses ({last.tokens:,} tokens, which {last.sequences:,} have)"
        return replace(number, unknown=why)
    known = list(takewhile(lambda at: at.ess_sequences.interval is not None, curve))
    low, high = (_crossing(known, [(at.ess_sequences.interval or ())[end] for at in known]) for end in (0, 1))
    interval = None if low is None else (low, float(last.tokens) if high is None else high)
    return replace(number, value=value, interval=interval)


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
