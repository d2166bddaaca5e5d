"""A trainer's own numbers as rows: what is summed over the dump, and what each name it logs is made of.

The whole dump is one trainer batch. A trainer is a `Ledger`: columns that are summed per sequence, values
whose extremes are kept, and entries, one per name that the trainer logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from offpol_diag.crosswalk.ends import Columns, Ends, Ranges
from offpol_diag.crosswalk.read import Read
from offpol_diag.crosswalk.view import View
from offpol_diag.metrics.rows import distinct
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Policy, Preset

Logged = dict[str, float]
T = TypeVar("T")


class Book(Protocol):
    """How one trainer, or one generation of it, logs."""

    @property
    def shelf(self) -> str:
        """Whose columns are made together: of presets of all books with this word."""
        ...

    def columns(self, scene: Scene, presets: tuple[Preset, ...]) -> Columns:
        """What is summed of presets of this shelf, [S] each."""
        ...

    def ranges(self, scene: Scene, presets: tuple[Preset, ...]) -> Ranges:
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


Asked = tuple[tuple[str, int], ...]
"""Where a column is kept, and which of the presets asks for it."""


@dataclass(frozen=True, eq=False)
class _Asked(Generic[T]):
    """What is asked of the dump.

    Attributes:
        name: how entries ask for it.
        of: what it is of one batch under one preset.
        own: whether it depends on the preset's weights and rules; else presets of one numerator share it.
        when: under which presets it is needed.
        needs: fields of the batch without which there is no such number: entries that read it are left out.
        by: of one that presets have of their own, what of a preset and of its deed it depends on besides the
            numerator; None: on all of it.
        of_many: the same as `of`, of several presets of one numerator in one go.
    """

    name: str
    of: Callable[[View], T]
    own: bool = field(default=False, kw_only=True)
    when: Callable[[Preset], bool] = field(default=always, kw_only=True)
    needs: tuple[str, ...] = field(default=(), kw_only=True)
    by: Callable[[View], Hashable] | None = field(default=None, kw_only=True)
    of_many: Callable[[Sequence[View]], Sequence[T]] | None = field(default=None, kw_only=True)

    def key(self, logs: str, preset: Preset) -> str:
        """Where it is kept; equal keys mean equal numbers."""
        return f"{preset.name}!{self.name}" if self.own else f"{logs}/{preset.policy}/{self.name}"

    def made(self, view: View) -> T:
        """Of one batch, once for all that share it."""
        if not self.own:
            return view.ratios.once(self, lambda: self.of(view))
        if self.by is None:
            return view.once(self, lambda: self.of(view))
        return view.ratios.once((self, self.by(view)), lambda: self.of(view))

    def under(self, views: Sequence[View], asked: Asked) -> dict[str, T]:
        """By where it is kept, of presets of one numerator; those that share it get it from the first."""
        if not self.own:
            return {key: self.made(views[at]) for key, at in asked}
        by = self.by or id
        first, which = distinct([by(views[at]) for _, at in asked])
        few = [views[asked[row][1]] for row in first]
        found = [self.made(view) for view in few] if self.of_many is None else self.of_many(few)
        return {key: found[row] for (key, _), row in zip(asked, which, strict=True)}


class Column(_Asked[Tensor]):
    """What is summed over the dump, per sequence [S]."""


def together(
    name: str,
    of: Callable[[Sequence[View]], Sequence[Tensor]],
    *,
    when: Callable[[Preset], bool] = always,
    needs: tuple[str, ...] = (),
    by: Callable[[View], Hashable] | None = None,
) -> Column:
    """A column of presets' own that is made of all presets of a numerator in one go."""
    return Column(name, lambda view: of((view,))[0], own=True, when=when, needs=needs, by=by, of_many=of)


class Range(_Asked[Ends]):
    """Whose smallest and largest value over the dump is kept, of each part of the batch.

    ±inf where there is nothing to see.
    """


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

    @property
    def shelf(self) -> str:
        """It stands by itself."""
        return self.logs

    def columns(self, scene: Scene, presets: tuple[Preset, ...]) -> Columns:
        """What is summed, [S] each."""
        return self._made(self.sums, scene, presets)

    def ranges(self, scene: Scene, presets: tuple[Preset, ...]) -> Ranges:
        """Whose smallest and largest value is kept."""
        return self._made(self.extremes, scene, presets)

    def _made(self, of: tuple[_Asked[T], ...], scene: Scene, presets: tuple[Preset, ...]) -> dict[str, T]:
        """Of a batch, those that can be made of it and are asked for."""
        there = tuple([getattr(scene.batch, name) is not None for name in OPTIONAL])
        views = [self._view(scene, preset) for preset in presets]
        found: dict[str, T] = {}
        for one, asked in _asked(self.logs, of, presets, there):
            found |= one.under(views, asked)
        return found

    def logged(self, preset: Preset, read: Read) -> Logged:
        """What the trainer would have logged for the dump as one batch, under its names."""
        every: tuple[Column | Range, ...] = (*self.sums, *self.extremes)
        keys = {column.name: column.key(self.logs, preset) for column in every}
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


@lru_cache(maxsize=256)
def _asked(
    logs: str, of: tuple[_Asked[T], ...], presets: tuple[Preset, ...], there: tuple[bool, ...]
) -> tuple[tuple[_Asked[T], Asked], ...]:
    """Each column that a batch with these fields has, with the presets of one numerator that ask for it.

    Of one that presets share the first of them asks. The same for every batch of a dump.
    """
    has = {name for name, flag in zip(OPTIONAL, there, strict=True) if flag}
    found: dict[tuple[Policy, _Asked[T]], dict[str, int]] = {}
    for at, preset in enumerate(presets):
        for one in of:
            if one.when(preset) and has.issuperset(one.needs):
                found.setdefault((preset.policy, one), {}).setdefault(one.key(logs, preset), at)
    return tuple((one, tuple(keys.items())) for (_, one), keys in found.items())


def _lines(page: Page, entries: Iterable[Entry]) -> Iterator[tuple[str, float]]:
    """Name and number of each entry whose columns were summed."""
    for entry in entries:
        with contextlib.suppress(Absent):
            yield entry.name, entry.of(page)
