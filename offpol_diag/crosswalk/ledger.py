"""A trainer's own numbers as rows: what is summed over the dump, and what each name it logs is made of.

The whole dump is one trainer batch. A trainer is a `Ledger`: columns that are summed per sequence, values
whose extremes are kept, and entries, one per name that the trainer logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeVar

from torch import Tensor

from offpol_diag.crosswalk.ends import Ends
from offpol_diag.crosswalk.spread import Columns, Ranges, Read
from offpol_diag.crosswalk.view import View
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset

Logged = dict[str, float]
T = TypeVar("T")


class Book(Protocol):
    """How one trainer, or one generation of it, logs."""

    def columns(self, scene: Scene, preset: Preset) -> Columns:
        """What is summed, [S] each."""
        ...

    def ranges(self, scene: Scene, preset: Preset) -> Ranges:
        """Whose smallest and largest value is kept, of any parts of the batch (`ends.outermost`)."""
        ...

    def logged(self, preset: Preset, read: Read) -> Logged:
        """What the trainer would have logged for the dump as one batch, under its names."""
        ...

    def names(self) -> Mapping[str, str]:
        """Each name (`*` where an option's name stands) → what it means there, and how it differs."""
        ...


def always(preset: Preset) -> bool:
    """Whatever the preset."""
    return True


class Absent(LookupError):
    """A column was not summed, because the dump lacks what it needs or the preset does not ask for it."""


@dataclass(frozen=True, eq=False)
class _Asked:
    """What is asked of the dump.

    Attributes:
        name: how entries ask for it.
        own: whether it depends on the preset's weights and rules; else presets of one numerator share it.
        when: under which presets it is needed.
        needs: fields of the batch without which there is no such number: entries that read it are left out.
        by: of one that presets have of their own, what of a preset and of its deed it depends on besides the
            numerator; None: on all of it.
    """

    name: str
    own: bool = field(default=False, kw_only=True)
    when: Callable[[Preset], bool] = field(default=always, kw_only=True)
    needs: tuple[str, ...] = field(default=(), kw_only=True)
    by: Callable[[View], Hashable] | None = field(default=None, kw_only=True)

    def key(self, logs: str, preset: Preset) -> str:
        """Where it is kept; equal keys mean equal numbers."""
        return f"{preset.name}!{self.name}" if self.own else f"{logs}/{preset.policy}/{self.name}"

    def once(self, view: View, make: Callable[[], T]) -> T:
        """Made once for all that share it."""
        if not self.own:
            return view.ratios.once(self, make)
        return view.once(self, make) if self.by is None else view.ratios.once((self, self.by(view)), make)


@dataclass(frozen=True, eq=False)
class Column(_Asked):
    """What is summed over the dump.

    Attributes:
        of: per sequence [S].
    """

    of: Callable[[View], Tensor]

    def made(self, view: View) -> Tensor:
        """Of one batch, [S]."""
        return self.once(view, lambda: self.of(view))


@dataclass(frozen=True, eq=False)
class Range(_Asked):
    """Whose smallest and largest value over the dump is kept.

    Attributes:
        of: the smallest and the largest of each part of the batch; ±inf where there is nothing to see.
    """

    of: Callable[[View], Ends]

    def made(self, view: View) -> Ends:
        """Of one batch."""
        return self.once(view, lambda: self.of(view))


A = TypeVar("A", Column, Range)
Keyed = tuple[tuple[str, A], ...]
"""Columns, each with where it is kept."""


@dataclass(frozen=True)
class Page:
    """What an entry reads: the sums and extremes of one preset, by column name.

    Attributes:
        preset: the preset whose numbers these are.
    """

    preset: Preset
    _read: Read
    _keys: Mapping[str, str]

    def __call__(self, column: str) -> float:
        """A column's sum over the dump.

        Raises:
            Absent: it was not summed.
        """
        return _of(self._read.sums, self._keys[column])

    def low(self, column: str) -> float:
        """The smallest value."""
        return _of(self._read.ranges, self._keys[column])[0]

    def high(self, column: str) -> float:
        """The largest value."""
        return _of(self._read.ranges, self._keys[column])[1]

    @property
    def tokens(self) -> float:
        """Unmasked tokens of the dump."""
        return self._read.sums["tokens"]

    @property
    def rows(self) -> float:
        """Sequences, those without a token included."""
        return self._read.sums["rows"]

    @property
    def sequences(self) -> float:
        """Sequences with a token."""
        return self._read.sums["sequences"]

    @property
    def longest(self) -> float:
        """Tokens of the longest response, masked ones included: how wide a padded batch would be."""
        return self._read.ranges["response"][1]


def _of(found: Mapping[str, T], key: str) -> T:
    if key not in found:
        raise Absent(key)
    return found[key]


@dataclass(frozen=True)
class Entry:
    """One name that the trainer logs.

    Attributes:
        name: as it is logged, prefix and all.
        meaning: its definition there in our words, and what it is not.
        of: its value.
        when: under which presets it is logged.
    """

    name: str
    meaning: str
    of: Callable[[Page], float]
    when: Callable[[Preset], bool] = always


@dataclass(frozen=True, eq=False)
class Ledger:
    """A trainer's book.

    Attributes:
        logs: the word by which presets name it.
        sums: columns that are summed.
        extremes: whose smallest and largest value are kept.
        entries: what is logged, in the trainer's order.
        form: what of a preset the columns depend on besides its loss and what it did to the batch; None: on
            all of it.
    """

    logs: str
    sums: tuple[Column, ...]
    extremes: tuple[Range, ...]
    entries: tuple[Entry, ...]
    form: Callable[[Preset], object] | None = None

    def _view(self, scene: Scene, preset: Preset) -> View:
        """The batch under a preset, or under the first one that has the same columns."""
        if self.form is None or preset.name not in scene.deeds:
            return View.at(scene, preset)
        key = "stands for", self.logs, scene.deeds[preset.name], self.form(preset)
        return View.at(scene, scene.once(key, lambda: preset))

    def columns(self, scene: Scene, preset: Preset) -> Columns:
        """What is summed, [S] each."""
        view = self._view(scene, preset)
        shared, own = self._asked(self.sums, view, preset)
        found = view.ratios.once(("columns", shared), lambda: {key: one.made(view) for key, one in shared})
        return found | {key: one.made(view) for key, one in own}

    def ranges(self, scene: Scene, preset: Preset) -> Ranges:
        """Whose smallest and largest value is kept."""
        view = self._view(scene, preset)
        shared, own = self._asked(self.extremes, view, preset)
        found = view.ratios.once(("ranges", shared), lambda: {key: one.made(view) for key, one in shared})
        return found | {key: one.made(view) for key, one in own}

    def _asked(self, of: tuple[A, ...], view: View, preset: Preset) -> tuple[Keyed[A], Keyed[A]]:
        """Those that can be made of this batch and are asked for: shared ones, and the preset's own."""
        there = tuple([getattr(view.batch, name) is not None for name in OPTIONAL])
        return _of_form(self.logs, of, view.preset, preset, there)

    def logged(self, preset: Preset, read: Read) -> Logged:
        """What the trainer would have logged for the dump as one batch, under its names."""
        keys = {column.name: column.key(self.logs, preset) for column in (*self.sums, *self.extremes)}
        page = Page(preset, read, keys)
        return dict(_lines(page, (entry for entry in self.entries if entry.when(preset))))

    def names(self) -> Mapping[str, str]:
        """Each name → what it means there; where that depends on the preset, all that it can mean."""
        found: dict[str, dict[str, None]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, {})[entry.meaning] = None
        return {name: ". Under other presets: ".join(meanings) for name, meanings in found.items()}


OPTIONAL = ("old", "current", "advantages", "rewards", "entropy")
"""Fields of a batch that a dump may lack."""


@lru_cache(maxsize=4096)
def _of_form(
    logs: str, of: tuple[A, ...], form: Preset, preset: Preset, there: tuple[bool, ...]
) -> tuple[Keyed[A], Keyed[A]]:
    """The same for every batch that has these fields; `form` is the preset that this one's columns are of."""
    has = {name for name, flag in zip(OPTIONAL, there, strict=True) if flag}
    asked = [(one.key(logs, preset), one) for one in of if one.when(form) and has.issuperset(one.needs)]
    shared, own = (tuple(each for each in asked if each[1].own is flag) for flag in (False, True))
    return shared, own


def _lines(page: Page, entries: Iterable[Entry]) -> Iterator[tuple[str, float]]:
    """Name and number of each entry whose columns were summed."""
    for entry in entries:
        with contextlib.suppress(Absent):
            yield entry.name, entry.of(page)
