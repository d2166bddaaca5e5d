"""The same numbers of tokens under several presets of one numerator, in one pass over those parted alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.crosswalk.counts import chunks
from offpol_diag.crosswalk.measures import Mask, Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.metrics.rows import Rows, distinct, joined, woven

T = TypeVar("T")
Views = Sequence[View]
Measures = Sequence[Measure]


@dataclass(frozen=True)
class _Way:
    """One way to make a number of each sequence out of its tokens'.

    Attributes:
        absent: what a token counts as that is not left.
        reduce: of values of tokens.
        join: of far tokens and of near ones.
        part: the same of one part of a preset's tokens, where that is known already.
    """

    absent: float
    reduce: Callable[[Tensor, Tensor], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]
    part: Callable[[View, Measure, Mask], Tensor]


_WAYS = (
    _Way(0.0, segments.total, torch.add, View.part_total),
    _Way(math.inf, segments.smallest, torch.minimum, lambda *one: View.part_ends(*one)[0]),
    _Way(-math.inf, segments.largest, torch.maximum, lambda *one: View.part_ends(*one)[1]),
)


def once(views: Views, key: object, make: Callable[[Views], Sequence[T]]) -> list[T]:
    """Something of each view, made in one go for those that have not got it yet."""
    new = [view for view in views if not view.has(key)]
    for view, found in zip(new, make(new) if new else (), strict=True):
        view.once(key, lambda found=found: found)  # type: ignore[misc]
    return [view.once(key, lambda: make((view,))[0]) for view in views]  # noqa: B023


class Sums(NamedTuple):
    """K measures of each sequence under presets, [R, K, S] each: their sum, the smallest and the largest."""

    total: Rows
    low: Rows
    high: Rows


def sums(views: Views, measures: Measures, mask: Mask) -> Sums:
    """Over the tokens that the mask leaves; where that is none 0, inf and -inf."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for at, view in enumerate(views):
        alike.setdefault(tuple([id(part.ratios) for part in view.parts]), []).append(at)
    found = {tuple(each): _of_alike([views[at] for at in each], measures, mask) for each in alike.values()}
    return Sums(*(woven(dict(zip(found, each, strict=True))) for each in zip(*found.values(), strict=True)))


def _of_alike(views: Views, measures: Measures, mask: Mask) -> list[Rows]:
    """Under presets that part the tokens alike."""
    parts = [_of_part(part, measures, mask) for part in zip(*(view.parts for view in views), strict=True)]
    return [
        reduce(lambda one, two, way=way: joined(way.join, one, two), each)  # type: ignore[misc]
        for way, each in zip(_WAYS, zip(*parts, strict=True), strict=True)
    ]


def _of_part(views: Views, measures: Measures, mask: Mask) -> list[Rows]:
    """Of the same tokens under each preset."""
    own = [tuple([of.by and of.by(view) for of in measures]) for view in views]
    first, at = distinct([(mask.by(view), *key) for view, key in zip(views, own, strict=True)])
    few = [views[row] for row in first]
    if few[0].close:
        return [Rows(_known(few, measures, mask, way), at) for way in _WAYS]
    alike = len({own[row] for row in first}) == 1
    return [Rows(x, at) for x in _of_tokens(few, measures, mask, alike)]


def _known(views: Views, measures: Measures, mask: Mask, way: _Way) -> Tensor:
    """Of near tokens, which may be known without a look at them: [V, K, S]."""
    each = torch.stack([way.part(view, of, mask) for view in views for of in measures])
    return each.view(len(views), len(measures), -1)


def _of_tokens(views: Views, measures: Measures, mask: Mask, alike: bool) -> list[Tensor]:
    """[V, K, S]; `alike` says that the measures do not depend on the preset."""
    few = chunks(len(measures), views[0].batch.cu_seqlens)
    parts = [_of_few(views, measures[of], mask, alike) for of in few]
    return [_joined(each, dim=1) for each in zip(*parts, strict=True)]


def _of_few(views: Views, measures: Measures, mask: Mask, alike: bool) -> list[Tensor]:
    """The same of measures that are looked at together."""
    offsets = views[0].batch.cu_seqlens
    shared = _values(views[:1], measures) if alike else None
    parts = []
    for some in chunks(len(views), offsets, len(measures)):
        x = _values(views[some], measures) if shared is None else shared
        left = _stacked([mask.of(view) for view in views[some]])
        many = len(views[some])  # one row stands for all where nothing tells them apart
        parts.append([_reduced(x, left, way, offsets).expand(many, -1, -1) for way in _WAYS])
    return [_joined(each) for each in zip(*parts, strict=True)]


def _reduced(x: Tensor, left: Tensor | None, way: _Way, offsets: Tensor) -> Tensor:
    """[V, K, T] → [V, K, S]."""
    seen = x if left is None else torch.where(left[:, None], x, way.absent)
    return segments.of_rows(way.reduce, seen.flatten(0, 1), offsets).view(*seen.shape[:2], -1)


def _values(views: Views, measures: Measures) -> Tensor:
    """[V, K, T]."""
    each = [view.values(of) for view in views for of in measures]
    return (each[0][None] if len(each) == 1 else torch.stack(each)).view(len(views), len(measures), -1)


def _stacked(left: Sequence[Tensor | None]) -> Tensor | None:
    """[V, T]; None where nothing is lost."""
    some = next((flags for flags in left if flags is not None), None)
    if some is None or len(left) == 1:
        return None if some is None else some[None]
    every = torch.ones_like(some)
    return torch.stack([every if flags is None else flags for flags in left])


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
