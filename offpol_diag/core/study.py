"""What is measured of a dump, fixed before the first batch, and the sums of it as they are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from offpol_diag.core import preset_numbers
from offpol_diag.core.evaluate import Rule, rules_of
from offpol_diag.core.gap import DRIFTS, Drift
from offpol_diag.core.intervals import Reader
from offpol_diag.core.state import State, Table
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import FAMILIES

MOST_COMPARED = 8
"""With more presets than this, what each drops is not compared."""


@dataclass(frozen=True)
class Study:
    """The quantities to measure.

    Attributes:
        presets: those whose columns the dump has, in order.
        columns: canonical columns of the dump, and advantages where they are made.
        makes_advantages: whether advantages are made of rewards, for there are none and groups are known.
        group_by: columns to break the mismatch down by.
        seed: of the bootstrap.
        against: the preset that the others are compared with, or None.
        by_step: numbers requested by training step, besides those of `breakdowns`.
        lag_0: whether to count what each preset keeps of policy lag 0.
    """

    presets: tuple[Preset, ...]
    columns: frozenset[str]
    makes_advantages: bool = False
    group_by: tuple[str, ...] = ()
    seed: int = 0
    against: str | None = None
    by_step: tuple[str, ...] = ()
    lag_0: bool = False

    @classmethod
    def of(cls, columns: Collection[str], presets: Sequence[Preset] = (), **asked: Any) -> Study:
        """Return what a dump with these canonical columns allows; `asked` are other attributes."""
        have = frozenset(columns)
        makes = "advantages" not in have and {"rewards", "group_id"} <= have
        have |= {"advantages"} if makes else set()
        able = tuple(preset for preset in presets if not preset.lacking(have))
        return cls(able, have, makes, **asked)

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """Pairs of policies whose log-probs are in the dump."""
        return tuple(drift for drift in DRIFTS if set(drift.columns) <= self.columns)

    @property
    def main(self) -> Drift:
        """The drift of places, charts and worst rows: drift 1, or the total where there is no π_old."""
        return self.drifts[0]

    @cached_property
    def families(self) -> tuple[Preset, ...]:
        """The presets that a recommendation shows; charts and steps have their weights."""
        named = FAMILIES[self.main.numerator]
        return tuple(preset for preset in self.presets if preset.name in named)

    @cached_property
    def normalised(self) -> tuple[Preset, ...]:
        """Presets whose sums are kept per trainer batch, for their weights are normalised there."""
        return tuple(filter(preset_numbers.normalised, self.presets))

    @cached_property
    def pairs(self) -> tuple[tuple[Preset, Preset], ...]:
        """Who drops and who keeps: each preset and the one compared against, and the same turned round."""
        ours = [preset for preset in self.presets if preset.name == self.against]
        pairs = [(other, one) for one in ours for other in self.presets if other is not one]
        pairs = pairs if len(self.presets) <= MOST_COMPARED else []
        return tuple(way for pair in pairs for way in (pair, pair[::-1]))

    @cached_property
    def batch_rules(self) -> tuple[Rule, ...]:
        """Rules over a whole trainer batch (M2PO)."""
        every = (rule for preset in self.presets for rule in rules_of(preset)[0])
        return tuple(dict.fromkeys(rule for rule in every if rule.reject.over == "batch"))


@dataclass(frozen=True)
class Readout:
    """What was kept of a dump, with the sums of its replicates, which are drawn once."""

    study: Study
    state: State

    @cached_property
    def reader(self) -> Reader:
        """Sums of the dump, and their replicates."""
        study, tables = self.study, self.state.tables
        found = self.at(tables["dump"])
        drawn = {**found.drawn, "longest": np.array([self.state.ranges["response"][1]])}
        for drift in study.drifts:
            drawn |= tables[f"{drift.prefix}products"].drawn(study.seed)
        return replace(found, drawn=drawn | preset_numbers.drawn(self.state, study.presets, study.seed))

    def at(self, table: Table) -> Reader:
        """Read the sums of a table, or of a place of it."""
        return Reader.of(table, self.study.seed, self.state.many)
