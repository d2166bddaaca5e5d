"""Where the cut of a batch-wide rule falls, to the value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import loglattice
from offpol_diag.accumulators import Bins
from offpol_diag.batch import Batch
from offpol_diag.presets import Reject
from offpol_diag.ratios import Ratios
from offpol_diag.scope import Label
from offpol_diag.settle.asked import Cut
from offpol_diag.settle.look import values_of
from offpol_diag.settle.spans import Spans


def bin_of(bins: Bins, rule: Reject) -> int:
    """The bin in which the cut falls; 0 where nothing need be dropped (no unsigned value has that bin)."""
    assert rule.upper is not None
    counts, sums = torch.cumsum(bins.counts, 0), torch.cumsum(bins.sums, 0)
    below = (counts > 0) & (sums < rule.upper * counts)
    if bool(below[-1]) or not float(counts[-1]):
        return 0
    lowest = int(torch.nonzero(counts > 0)[0])
    left = torch.nonzero(below)
    return int(left[-1]) + 1 if len(left) else lowest


@dataclass(frozen=True)
class _Values:
    """All values that share the bin of a cut, by rule and trainer batch."""

    parts: dict[tuple[Cut, Label], Tensor]

    def merge(self, other: _Values) -> _Values:
        both = dict(self.parts)
        for key, values in other.parts.items():
            both[key] = torch.cat((both[key], values)) if key in both else values
        return _Values(both)


@dataclass(frozen=True)
class Gather:
    """The job of the second reading: `bins` says in which bin each cut falls."""

    bins: dict[Cut, dict[Label, int]]

    def __call__(self, batch: Batch) -> _Values:
        """The values of one batch in those bins."""
        ratios, spans, parts = Ratios(batch, "rollout"), Spans.of(batch), {}
        for cut, wanted in self.bins.items():
            for label, values in spans.split(values_of(ratios, cut)):
                parts[cut, label] = values[loglattice.index(values) == wanted[label]]
        ratios.forget()
        return _Values(parts)


def falls_at(bins: Bins, at: int, inside: Tensor | None, rule: Reject) -> float:
    """The smallest value that goes, from the top of the bin down until the mean of the rest is below."""
    if not at or inside is None or not len(inside):
        return math.inf
    assert rule.upper is not None
    rising = torch.sort(inside).values
    counts = bins.counts[:at].sum() + torch.arange(len(rising), device=rising.device)
    sums = bins.sums[:at].sum() + torch.cumsum(torch.cat((rising.new_zeros(1), rising[:-1])), 0)
    enough = (counts > 0) & (sums < rule.upper * counts)  # of dropping this value and all above it
    if not bool(enough.any()):
        return math.nextafter(float(rising[0]), math.inf)  # never everything: the smallest stay
    return float(rising[int(torch.nonzero(enough)[-1])])
