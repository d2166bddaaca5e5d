"""A finished tally, its states under their types; each is read once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from offpol_diag.accumulators import Extremes, GroupSample, Places, State, Sums
from offpol_diag.crosswalk.read import Read
from offpol_diag.metrics import method, normal, selection
from offpol_diag.metrics.formula import Reader
from offpol_diag.metrics.selection import Grid
from offpol_diag.readout.rows import of_presets
from offpol_diag.summary import Number, Numbers
from offpol_diag.tally import Study, Tally

S = TypeVar("S")


def typed(state: State, kind: type[S]) -> S:
    """A state, which is of that type."""
    assert isinstance(state, kind)
    return state


@dataclass(frozen=True)
class Readout:
    """A tally, its states under their types."""

    study: Study
    tally: Tally

    @cached_property
    def reader(self) -> Reader:
        """Sums and replicates."""
        sums = typed(self.tally.states["sums"], Sums).read()
        sums |= normal.read(self.normal, self.study.normalised)
        sums |= method.own_denominators(self.study.presets, sums)
        longest = torch.tensor([self.ranges["response"][1]], dtype=torch.float64)
        return Reader(sums | {"longest": longest}, self.groups.groups)

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Extremes by name."""
        return typed(self.tally.states["ranges"], Extremes).read()

    @cached_property
    def groups(self) -> GroupSample:
        """The sample of groups."""
        return typed(self.tally.states["group"], GroupSample)

    @cached_property
    def selected(self) -> dict[str, Numbers]:
        """Whom each preset drops."""
        found = selection.numbers(typed(self.tally.states["length"], Grid), self.groups)
        return {preset.name: numbers for preset, numbers in zip(self.study.presets, found, strict=True)}

    @cached_property
    def rows(self) -> dict[str, dict[str, Number]]:
        """Row → preset → its number, of those whose columns were summed."""
        return dict(of_presets(self.study.presets, self.reader))

    @property
    def normal(self) -> Places[Sums]:
        """Sums per trainer batch of presets that are normalised in it."""
        return typed(self.tally.states["normal"], Places)

    @cached_property
    def factors(self) -> dict[str, dict[str, float]]:
        """Preset → trainer batch → what its weights are divided by."""
        return normal.factors(self.normal, self.study.normalised)

    @cached_property
    def logged(self) -> Read:
        """What the crosswalk reads."""
        both = {**typed(self.tally.states["logged"], Sums).read(), **self.reader.sums}
        both |= normal.norms(self.normal, self.study.normalised)
        return Read({name: float(values.numpy()[0]) for name, values in both.items()}, self.ranges)
