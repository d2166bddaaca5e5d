"""Presets that did the same to a batch: what is summed of one of them is summed of all.

Most thresholds of a dump near on-policy act on nothing, or on the same few tokens. Where values can be looked
at, presets are alike that left equal ones; elsewhere those that share the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from offpol_diag import losses
from offpol_diag.host import here
from offpol_diag.metrics.outcome import Outcome, normalised
from offpol_diag.metrics.pieces import Pieces
from offpol_diag.presets import Preset


def firsts(presets: Sequence[Preset], items: Sequence[Pieces]) -> list[int]:
    """For each preset, given its pieces, the first one that did the same to the batch."""
    marks = Marks()
    by_item: dict[Hashable, int] = {}
    by_deed: dict[Hashable, int] = {}
    found: list[int] = []
    for at, (preset, item) in enumerate(zip(presets, items, strict=True)):
        own = id(item), normalised(preset)
        if own not in by_item:
            by_item[own] = by_deed.setdefault((own[1], *_deed(item, marks)), at)
        found.append(by_item[own])
    return found


@dataclass
class Marks:
    """A mark for each tensor, the same for those with equal values; they must all live on meanwhile."""

    _of: dict[int, Hashable] = field(default_factory=dict)
    _known: dict[bytes, int] = field(default_factory=dict)

    def of(self, x: Tensor) -> Hashable:
        """The mark of a tensor."""
        if id(x) not in self._of:
            self._of[id(x)] = self._mark(x)
        return self._of[id(x)]

    def of_mask(self, x: Tensor | None) -> Hashable:
        """The mark of flags, where all set is as good as no flags."""
        if x is None or (here(x) and bool(x.all())):
            return None
        return self.of(x)

    def _mark(self, x: Tensor) -> Hashable:
        return self._known.setdefault(x.numpy().tobytes(), len(self._known)) if here(x) else id(x)


def _deed(item: Pieces, marks: Marks) -> Iterator[Hashable]:
    """All that the columns of a preset depend on."""
    yield id(item.ratios)
    yield losses.kind(item.preset)
    yield id(item) if any(lot.passes is not None for lot in item.near) else len(item.near)
    kept = item.first.kept
    yield marks.of_mask(kept.tokens)
    yield from (marks.of(x) for x in (kept.sequences, kept.vetoed, kept.catastrophic))
    yield from _weights(item.first, marks)


def _weights(first: Outcome, marks: Marks) -> Iterator[Hashable]:
    weight, weighed = first.preset.weight, first.weighed
    if weight is None or weighed is None:
        return
    yield weighed.final.per
    yield weight.over == "token"  # what a mean weight is over
    each = (weighed.final.values, weighed.high, weighed.low, weighed.bounded, weighed.tries)
    yield from (marks.of(x) for x in each)
