"""A trainer's own numbers as rows: what is summed over the dump, and what each name it logs is made of.

The whole dump is one trainer batch. A trainer is a `Ledger`: columns that are summed per sequence, values
whose extremes are kept, and entries, one per name that the trainer logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offpol_diag.accumulators import extremes
from offpol_diag.batch import Batch
from offpol_diag.crosswalk.spread import Columns, Ranges, Read
from offpol_diag.metrics.outcome import Outcome, outcome
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios

Logged = dict[str, float]


class Book(Protocol):
    """How one trainer, or one generation of it, logs."""

    def columns(self, scene: Scene, preset: Preset) -> Columns:
        """What is summed, [S] each."""
        ...

    def ranges(self, scene: Scene, preset: Preset) -> Ranges:
        """Whose smallest and largest value is kept."""
        ...

    def logged(self, preset: Preset, read: Read) -> Logged:
        """What the trainer would have logged for the dump as one batch, under its names."""
        ...

    def names(self) -> Mapping[str, str]:
        """Each name (`*` where an option's name stands) → what it means there, and how it differs."""
        ...


@dataclass(frozen=True)
class View:
    """One batch under one preset, as a column sees it."""

    scene: Scene
    preset: Preset

    @property
    def batch(self) -> Batch:
        """The packed batch."""
        return self.scene.batch

    @property
    def ratios(self) -> Ratios:
        """Of the preset's numerator."""
        return self.scene.ratios(self.preset.policy)

    @property
    def done(self) -> Outcome:
        """The preset applied."""
        return outcome(self.scene, self.preset)


@dataclass(frozen=True)
class Column:
    """What is summed over the dump, or whose extremes are kept.

    Attributes:
        name: how entries ask for it.
        of: per sequence [S] where it is summed; any shape where extremes are kept.
        own: whether it depends on the preset's weights and rules; else presets of one numerator share it.
    """

    name: str
    of: Callable[[View], Tensor]
    own: bool = False

    def key(self, logs: str, preset: Preset) -> str:
        """Where its sum is kept; equal keys mean equal numbers."""
        return f"{preset.name}!{self.name}" if self.own else f"{logs}/{preset.policy}/{self.name}"


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
        """A column's sum over the dump."""
        return self._read.sums[self._keys[column]]

    def low(self, column: str) -> float:
        """The smallest value."""
        return self._read.ranges[self._keys[column]][0]

    def high(self, column: str) -> float:
        """The largest value."""
        return self._read.ranges[self._keys[column]][1]

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


def always(preset: Preset) -> bool:
    """Whatever the preset."""
    return True


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


@dataclass(frozen=True)
class Ledger:
    """A trainer's book.

    Attributes:
        logs: the word by which presets name it.
        sums: columns that are summed.
        extremes: columns whose smallest and largest value are kept.
        entries: what is logged, in the trainer's order.
    """

    logs: str
    sums: tuple[Column, ...]
    extremes: tuple[Column, ...]
    entries: tuple[Entry, ...]

    def columns(self, scene: Scene, preset: Preset) -> Columns:
        """What is summed, [S] each."""
        return {column.key(self.logs, preset): self._made(column, scene, preset) for column in self.sums}

    def _made(self, column: Column, scene: Scene, preset: Preset) -> Tensor:
        view = View(scene, preset)
        if column.own:
            return column.of(view)
        return view.ratios.once(("logged", column.key(self.logs, preset)), lambda: column.of(view))

    def ranges(self, scene: Scene, preset: Preset) -> Ranges:
        """Whose smallest and largest value is kept."""
        view = View(scene, preset)
        return {column.key(self.logs, preset): extremes(column.of(view)) for column in self.extremes}

    def logged(self, preset: Preset, read: Read) -> Logged:
        """What the trainer would have logged for the dump as one batch, under its names."""
        keys = {column.name: column.key(self.logs, preset) for column in (*self.sums, *self.extremes)}
        page = Page(preset, read, keys)
        return {entry.name: entry.of(page) for entry in self.entries if entry.when(preset)}

    def names(self) -> Mapping[str, str]:
        """Each name → what it means there."""
        return {entry.name: entry.meaning for entry in self.entries}
