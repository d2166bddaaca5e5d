"""One batch under one preset, as a column sees it: sums and ends over tokens, the near ones once for all.

A trainer's sums over tokens are taken piece by piece (`near.py`): over the few far tokens preset by preset,
over the near ones under what is left of the preset for them, which most presets of a book have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Generic, TypeVar

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.crosswalk.ends import Ends, outer, rows
from offpol_diag.crosswalk.measures import Mask, Measure
from offpol_diag.crosswalk.parting import as_is, free, parting, without_rules
from offpol_diag.memo import Memo
from offpol_diag.metrics.outcome import Outcome, applied, of
from offpol_diag.metrics.pieces import Pieces, pieces
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Policy, Preset
from offpol_diag.ratios import Ratios

T = TypeVar("T")


@dataclass(eq=False)
class View:
    """One batch, or some of its tokens, under one preset.

    Attributes:
        scene: the batch.
        preset: the preset; of near tokens, what is left of it for them.
        part: the ratios of those tokens; None for all of them.
        close: whether they are the near ones.
    """

    scene: Scene
    preset: Preset
    part: Ratios | None = None
    close: bool = False
    _memo: Memo = field(default_factory=Memo, repr=False)

    @classmethod
    def at(cls, scene: Scene, preset: Preset) -> View:
        """The whole batch; the same view for all that is asked of a preset."""
        return scene.once(("view", preset.name, id(preset)), lambda: cls(scene, preset))

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, computed once per key for this preset."""
        return self._memo.once(key, make)

    def has(self, key: object) -> bool:
        """Whether that is there already."""
        return key in self._memo

    def __post_init__(self) -> None:
        self.ratios: Ratios = self.scene.ratios(self.preset.policy) if self.part is None else self.part

    def of(self, policy: Policy) -> Ratios:
        """Of another numerator."""
        return self.ratios.of(policy)

    def did(self, *what: str) -> Hashable:
        """These fields of the preset's deed; all of the preset, where its deed does not tell of it."""
        deed = self.scene.deeds.get(self.preset.name)
        if deed is None or not self.preset.apply:
            return self.preset
        return tuple([getattr(deed, name) for name in what])

    @property
    def batch(self) -> Batch:
        """The packed tokens."""
        return self.ratios.batch

    @property
    def n(self) -> Tensor:
        """Tokens of each sequence, [S] float64."""
        return self.ratios.once("n", lambda: self.batch.lengths.to(torch.float64))

    @property
    def divisor(self) -> Tensor:
        """What means over the tokens of a sequence divide by: their number, or 1."""
        return self.ratios.once("n or 1", lambda: self.n.clamp(min=1))

    @property
    def there(self) -> Tensor:
        """Sequences with a token, [S] bool."""
        return self.ratios.once("there", lambda: self.batch.lengths > 0)

    @property
    def zeros(self) -> Tensor:
        """[S] float64."""
        return self.ratios.once("zeros", lambda: torch.zeros_like(self.n))

    @cached_property
    def done(self) -> Outcome:
        """The preset applied to these tokens."""
        return of(self.ratios, applied(self.preset))

    @cached_property
    def pieces(self) -> Pieces:
        """The preset applied to the whole batch."""
        return pieces(self.scene, self.preset)

    @property
    def parts(self) -> tuple[View, ...]:
        """Far tokens, then near ones; or all, where the preset looks beyond single tokens or sequences."""
        return self._parts or (self,)

    @cached_property
    def _parts(self) -> tuple[View, ...]:
        """Empty where this is the only one: what knows itself is let go of late, and it knows the batch."""
        return tuple(
            View(self.scene, as_is(rules, self.preset), ratios, at > 0)
            for at, (ratios, rules) in enumerate(self._apart)
        )

    @cached_property
    def _apart(self) -> tuple[tuple[Ratios, Preset], ...]:
        """Far and near tokens, with what is left of the preset for them; empty where they are not parted."""
        asked = None if self.part is not None else parting(self.preset)
        return () if asked is None else self.scene.parts(asked)

    @property
    def far(self) -> Ratios:
        """Of the tokens on which a rule or a bound can act."""
        return self._apart[0][0] if self._apart else self.ratios

    @property
    def first(self) -> View:
        """The same, under what acts on them."""
        return self.parts[0]

    @property
    def unruled(self) -> tuple[View, ...]:
        """The same for what no rule has to do with: rules on cells leave near tokens together."""
        preset = self.preset
        if self.part is not None or not preset.reject or (preset.weight and preset.weight.among == "left"):
            return self.parts
        return self._unruled.parts

    @cached_property
    def _unruled(self) -> View:
        return View(self.scene, without_rules(self.preset))

    @property
    def split(self) -> tuple[View, ...]:
        """Far and near tokens, whatever the preset: for what depends on no rule."""
        return (self,) if self.part is not None else self.ratios.once("split", self._split)

    def _split(self) -> tuple[View, ...]:
        each = enumerate(self.scene.parts(free(self.preset.policy)))
        return tuple(View(self.scene, self.preset, ratios, at > 0) for at, (ratios, _) in each)

    @property
    def undivided(self) -> View:
        """All tokens of the batch as one piece."""
        return View(self.scene, self.preset, self.ratios)

    @property
    def reach(self) -> float:
        """No |Δ| of these tokens is larger, nats: inf where that is not known."""
        near = self.scene.near
        return near.radius if self.close and near is not None else math.inf

    def free(self, low: float, high: float) -> bool:
        """Whether bounds on r cannot act on these tokens, all of them being near."""
        return (low <= 0 or math.log(low) < -self.reach) and (high > 0 and math.log(high) > self.reach)

    def total(self, measure: Measure, mask: Mask | None = None) -> Tensor:
        """Σ over the tokens of each sequence that the mask leaves, [S]."""
        shared = self._shared(measure, mask)
        if shared is not None:
            return shared * self.n
        return self._merged(_TOTAL, measure, mask)

    def count(self, measure: Measure) -> Tensor:
        """How many tokens of each sequence have a flag, [S] float64."""
        return self._merged(_COUNT, measure, None)

    def ends(self, measure: Measure, mask: Mask | None = None) -> Ends:
        """The smallest and largest of each sequence, [S] each; (+inf, -inf) where the mask leaves none."""
        shared = self._shared(measure, mask)
        if shared is not None:
            return rows(shared, self.there)
        return self._merged(_ENDS, measure, mask)

    def part_total(self, measure: Measure, mask: Mask | None = None) -> Tensor:
        """`total` of these tokens alone."""
        return self._made(_TOTAL, measure, mask)

    def part_ends(self, measure: Measure, mask: Mask | None = None) -> Ends:
        """`ends` of these tokens alone."""
        return self._made(_ENDS, measure, mask)

    def _shared(self, measure: Measure, mask: Mask | None) -> Tensor | None:
        return None if measure.shared is None or mask is not None else measure.shared(self)

    def values(self, measure: Measure) -> Tensor:
        """A measure of these tokens, [T]."""
        key = "measure", measure.name, measure.by and measure.by(self)
        return self.ratios.once(key, lambda: measure.of(self))

    def left(self, measure: Measure, mask: Mask | None, absent: float) -> Tensor:
        """The same where the mask leaves them, else something that is not seen."""
        x, left = self.values(measure), None if mask is None else mask.of(self)
        return x if left is None else torch.where(left, x, absent)

    def _merged(self, way: _Way[T], measure: Measure, mask: Mask | None) -> T:
        """Of far and near tokens together; each is made once for all presets that it does not depend on."""
        if measure.by is None and mask is None:
            return self.ratios.once(
                (way.what, measure.name),
                lambda: reduce(way.join, (view._made(way, measure, mask) for view in self.split)),
            )
        parts = self.unruled if mask is None else self.parts
        return reduce(way.join, (view._made(way, measure, mask) for view in parts))

    def _made(self, way: _Way[T], measure: Measure, mask: Mask | None) -> T:
        by = measure.by and measure.by(self)
        key = (way.what, measure.name, by, mask and mask.by(self))
        if self.close and self.scene.learned is not None:
            asked, preset = self.scene.learned, self.preset
            asked[self.ratios.policy, key] = lambda scene, ratios: way.make(
                View(scene, preset, ratios, True), measure, mask
            )
        return self.ratios.once(key, lambda: way.make(self, measure, mask))


@dataclass(frozen=True)
class _Way(Generic[T]):
    """How numbers of tokens become one of each sequence.

    Attributes:
        what: of the values of a measure.
        make: of the tokens of a view that a mask leaves.
        join: of far and of near ones.
    """

    what: str
    make: Callable[[View, Measure, Mask | None], T]
    join: Callable[[T, T], T]


def _total(view: View, measure: Measure, mask: Mask | None) -> Tensor:
    return segments.total(view.left(measure, mask, 0.0), view.batch.cu_seqlens)


def _count(view: View, measure: Measure, mask: Mask | None) -> Tensor:
    return segments.count(measure.of(view), view.batch.cu_seqlens)


def _ends(view: View, measure: Measure, mask: Mask | None) -> Ends:
    low, high = (view.left(measure, mask, absent) for absent in (torch.inf, -torch.inf))
    offsets = view.batch.cu_seqlens
    return segments.smallest(low, offsets), segments.largest(high, offsets)


_TOTAL, _COUNT = _Way("Σ", _total, torch.add), _Way("#", _count, torch.add)
_ENDS = _Way("ends", _ends, outer)
