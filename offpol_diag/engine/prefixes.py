"""How much of its sample size importance sampling of whole sequences keeps, by the length of the response.

Of every response the first T tokens are taken, for T on a fixed grid: the weight is the product of their
ratios. A response with fewer than T tokens has left by then. ESS is Kish's, over the responses that are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from offpol_diag.engine import host, segments
from offpol_diag.engine.accumulators import LogSums
from offpol_diag.engine.fields import COUNTS, Floats, Saved, require
from offpol_diag.engine.formula import Formula, Reader
from offpol_diag.engine.host import here
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.terms import Pair, Terms, seen
from offpol_diag.summary import AtLength, Lengths, Number

GRID = tuple(sorted({round(2 ** (half / 2)) for half in range(35)}))
"""T in tokens, two to an octave, up to 131,072."""
FEWEST = 50
"""Responses below which ESS at a length is not taken: among few each counts for a large share by itself."""
KEPT = 0.1
"""The share of the sample size below which sequence importance sampling is taken to be unusable."""
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
        many: how many those are, [G, 1+B].
    """

    logs: LogSums
    many: Annotated[Tensor, Floats(len(GRID), "B", rule=COUNTS)]

    def check(self) -> None:
        """Refuse sums at other lengths."""
        require(self.logs.once.shape == self.many.shape, "logs and many are of one shape")

    @classmethod
    def of(cls, x: Tensor, lengths: Tensor, draws: Tensor) -> Prefixes:
        """From log-weights [S, g] at the first g lengths, -inf where a response has left, and lengths [S]."""
        return cls.padded(LogSums.of(x.T.contiguous(), draws), _many(lengths, draws)[: x.shape[1]])

    @classmethod
    def padded(cls, logs: LogSums, many: Tensor) -> Prefixes:
        """From sums at the first lengths, where no response has any of the others."""
        more = len(GRID) - len(many)
        none = many.new_zeros(more, many.shape[1])
        shift = torch.cat((logs.shift, logs.shift.new_full((more,), -1e300)))
        once, twice, many = (torch.cat((sums, none)) for sums in (logs.once, logs.twice, many))
        return cls(LogSums(shift, once, twice), many)

    def merge(self, other: Prefixes) -> Prefixes:
        """Of both parts."""
        return Prefixes(self.logs.merge(other.logs), self.many + other.many)

    @cached_property
    def ess(self) -> Tensor:
        """(Σw)² / (n Σw²), [G, 1+B] on the CPU; NaN where no response is left."""
        return (self.logs.once**2 / (self.many * self.logs.twice)).cpu()


def _many(lengths: Tensor, draws: Tensor) -> Tensor:
    """Responses with at least T tokens, and how often those were drawn, [G, 1+B]."""
    reached = torch.searchsorted(_grid(lengths), lengths.contiguous(), right=True)
    each = torch.cat((torch.ones_like(draws[:, :1]), draws), dim=1)
    by_last = each.new_zeros(len(GRID) + 1, each.shape[1]).index_add_(0, reached, each)
    return by_last.flip(0).cumsum(0).flip(0)[1:]


def _grid(like: Tensor) -> Tensor:
    return host.sent(torch.tensor(GRID), like.device)


class Products:
    """Log-weights over the first T tokens of every sequence."""

    def __init__(self, scene: Scene, drift: Pair) -> None:
        self.rows: list[slice] = []
        self.parts: list[Tensor] = []

    def see(self, terms: Terms) -> None:
        """The next block."""
        self.rows.append(terms.block.rows)
        self.parts.append(_products(torch.as_tensor(terms.delta), terms.block.offsets))

    def state(self, scene: Scene) -> Prefixes:
        """Of all blocks."""
        batch, wide = scene.batch, max((part.shape[1] for part in self.parts), default=0)
        x = batch.rollout.new_full((batch.sequences, wide), -torch.inf)
        for rows, part in zip(self.rows, self.parts, strict=True):
            x[rows, : part.shape[1]] = part
        return Prefixes.of(x, batch.lengths, scene.draws)


def _products(delta: Tensor, offsets: Tensor) -> Tensor:
    """ΣΔ over the first T tokens [s, g], -inf where there are fewer; up to the longest on a host."""
    lengths, grid = segments.lengths(offsets), _grid(offsets)
    if here(offsets):
        grid = grid[: np.searchsorted(GRID, int(lengths.max()) if len(lengths) else 0, side="right")]
    ends = offsets[:-1, None] + torch.minimum(grid, lengths[:, None])
    cuts = torch.cat((torch.cat((offsets[:-1, None], ends), dim=1).flatten(), offsets[-1:]))
    between = segments.total(delta, cuts).view(len(lengths), len(grid) + 1)  # the last: what lies beyond
    return torch.where(grid <= lengths[:, None], between[:, :-1].cumsum(1), -torch.inf)


def sums(scene: Scene, drift: Pair) -> Prefixes:
    """What a batch adds."""
    return seen(scene, drift, Products).state(scene)


# ---------------------------------------------------------------- read out


def lengths(reader: Reader, prefixes: Prefixes) -> Lengths:
    """ESS by length, and the longest response at which a tenth is kept."""
    curve = list(_curve(reader, prefixes))
    return Lengths(longest=_longest(curve), curve=curve)


def _curve(reader: Reader, prefixes: Prefixes) -> Iterator[AtLength]:
    """As far as enough responses go."""
    for tokens, many, ess in zip(GRID, prefixes.many[:, 0].tolist(), prefixes.ess, strict=True):
        if many < FEWEST:
            return
        yield AtLength(tokens=tokens, sequences=round(many), ess_sequences=reader.wrap(ess, ESS))


def _longest(curve: Sequence[AtLength]) -> Number:
    """Where the curve first falls below `KEPT`, with where the ends of its intervals do."""
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
    """The last whole token before ESS first falls below `KEPT`; None where it does not.

    Between two lengths log ESS is taken for a line, as it is for log-normal ratios; of no token it is 0.
    """
    before, above = 0, math.log(1 / KEPT)
    for at, share in zip(curve, ess, strict=True):
        left = math.log(max(share or 0.0, 1e-300) / KEPT)
        if left < 0:
            return float(math.floor(before + (at.tokens - before) * above / (above - left)))
        before, above = at.tokens, left
    return None
