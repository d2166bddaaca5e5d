"""Presets that did the same to a batch: what is summed of one of them is summed of all.

Most thresholds of a dump near on-policy act on nothing, or on the same few tokens. Where values can be looked
at, presets are alike that left equal ones; elsewhere those that share the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from offpol_diag import losses
from offpol_diag.host import here
from offpol_diag.metrics.deeds import Acted, Deed
from offpol_diag.metrics.outcome import Outcome, normalised
from offpol_diag.metrics.pieces import Pieces
from offpol_diag.presets import Preset


def deeds(presets: Sequence[Preset], items: Sequence[Pieces]) -> tuple[Deed, ...]:
    """What each preset did, given its pieces."""
    marks = Marks()
    by_item: dict[int, Deed] = {}
    for item in items:
        if id(item) not in by_item:
            by_item[id(item)] = _deed(item, marks)
    each = zip(presets, items, strict=True)
    return tuple(by_item[id(item)]._replace(normal=normalised(preset)) for preset, item in each)


@dataclass
class Marks:
    """A mark for each tensor, the same for those with equal values; they must all live on meanwhile."""

    _of: dict[int, Hashable] = field(default_factory=dict)
    _parts: dict[int, tuple[Hashable, ...]] = field(default_factory=dict)
    _known: dict[bytes, int] = field(default_factory=dict)

    def of(self, x: Tensor) -> Hashable:
        """The mark of a tensor."""
        if id(x) not in self._of:
            self._of[id(x)] = self._mark(x)
        return self._of[id(x)]

    def of_parts(self, whole: object, *parts: Tensor) -> tuple[Hashable, ...]:
        """The marks of what something consists of, looked at once."""
        if id(whole) not in self._parts:
            self._parts[id(whole)] = tuple(map(self.of, parts))
        return self._parts[id(whole)]

    def of_mask(self, x: Tensor | None) -> Hashable:
        """The mark of flags, where all set is as good as no flags."""
        if x is None or (here(x) and bool(x.all())):
            return None
        return self.of(x)

    def _mark(self, x: Tensor) -> Hashable:
        return self._known.setdefault(x.numpy().tobytes(), len(self._known)) if here(x) else id(x)


def _deed(item: Pieces, marks: Marks) -> Deed:
    kept = item.first.kept
    near: Hashable = id(item) if any(lot.passes is not None for lot in item.near) else len(item.near)
    sequences, vetoed, catastrophic = marks.of_parts(kept, kept.sequences, kept.vetoed, kept.catastrophic)
    return Deed(
        False,
        losses.kind(item.preset),
        losses.weighted(item.preset),
        (id(item.ratios), near, marks.of_mask(kept.tokens)),
        sequences,
        vetoed,
        catastrophic,
        _acted(item.first, marks),
    )


def _acted(first: Outcome, marks: Marks) -> Acted | None:
    weight, weighed = first.preset.weight, first.weighed
    if weight is None or weighed is None:
        return None
    each = (weighed.final.values, weighed.high, weighed.low, weighed.bounded, weighed.tries)
    values, high, low, bounded, tries = marks.of_parts(weighed, *each)
    return Acted(weighed.final.per, weight.over == "token", values, high, low, bounded, tries)
