"""What a dump leaves behind while it streams by: named mergeable states, and how a batch becomes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offpol_diag.accumulators import Extremes, State, Sums
from offpol_diag.batch import Batch
from offpol_diag.crosswalk import BOOKS
from offpol_diag.metrics import (
    gap,
    method,
    nearsums,
    normal,
    policyloss,
    residual,
    selection,
    tails,
    update,
    where,
    worst,
)
from offpol_diag.metrics.gap import DRIFTS, Drift
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.stack import Stack
from offpol_diag.near import Near
from offpol_diag.presets import Preset

PARTS = (method, residual, policyloss, update)
"""Whose columns are summed of every preset, with an interval."""


@dataclass(frozen=True)
class Study:
    """What is to be measured: fixed before the first batch.

    Attributes:
        presets: those whose columns the dump has, in order.
        columns: canonical columns of the dump.
        group_by: extra location axes.
        seed: of the bootstrap.
        replicates: of the bootstrap.
    """

    presets: tuple[Preset, ...]
    columns: frozenset[str]
    group_by: tuple[str, ...]
    seed: int
    replicates: int

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """The pairs of policies this dump has."""
        return tuple(drift for drift in DRIFTS if set(drift.columns) <= self.columns)

    @property
    def main(self) -> Drift:
        """The drift that places and worst tokens are about: drift 1, or the total of a two-policy dump."""
        return self.drifts[0]

    @cached_property
    def near(self) -> Near:
        """What makes a token near for these presets."""
        return Near.of(self.presets)

    @cached_property
    def normalised(self) -> tuple[Preset, ...]:
        """Presets whose sums are kept per trainer batch."""
        return normal.normalised(self.presets)

    @cached_property
    def once(self) -> tuple[Preset, ...]:
        """All other presets: their sums are those of the dump."""
        return tuple(preset for preset in self.presets if preset not in self.normalised)

    @property
    def logging(self) -> tuple[Preset, ...]:
        """Presets whose trainer's numbers the crosswalk knows."""
        return tuple(preset for preset in self.presets if preset.logs in BOOKS)


@dataclass(frozen=True)
class Tally:
    """Named states; merging two tallies merges each name."""

    states: dict[str, State]

    def merge(self, other: Tally) -> Tally:
        """The tally of both parts together."""
        merged = dict(self.states)
        for name, state in other.states.items():
            merged[name] = merged[name].merge(state) if name in merged else state
        return Tally(merged)


def observe(study: Study, scene: Scene) -> Tally:
    """One batch's states."""
    nearsums.prepare(scene, study.presets)
    stack = Stack.of(scene, study.presets)
    once, normalised = (
        stack.only(lambda one: one in study.once),
        stack.only(lambda one: one in study.normalised),
    )
    states: dict[str, State] = {
        "sums": Sums.of(_resampled(study, once), scene.draws, scene.batch.key),
        "logged": Sums.of(_logged(study, scene), scene.draws[:, :0]),
        "ranges": Extremes.of(_ranges(study, once)),
        "length": selection.by_length(stack),
        "group": selection.by_group(stack),
        "worst.sequences": worst.sequences(scene, study.main),
        "worst.tokens": worst.tokens(scene, study.main),
        "normal": normal.sums(scene, _preset_columns(normalised)),
        "normal.ranges": normal.ranges(normalised),
    }
    for drift in study.drifts:
        states |= tails.states(scene, drift)
    axes = where.places(scene, study.main, study.group_by)
    return Tally(states | {f"where.{axis}": found for axis, found in axes.items()})


def _resampled(study: Study, once: Stack) -> dict[str, Tensor]:
    """Columns whose numbers carry an interval."""
    found = once.scene.counts | update.shared(once.scene)
    for drift in study.drifts:
        found |= gap.columns(once.scene, drift)
    return found | _preset_columns(once)


def _preset_columns(stack: Stack) -> dict[str, Tensor]:
    """What is summed of presets: with `tokens`, so that there is a column when there is no preset."""
    found = {"tokens": stack.n}
    for part in PARTS:
        found |= part.columns(stack)
    return found


def _logged(study: Study, scene: Scene) -> dict[str, Tensor]:
    """Columns that only the crosswalk reads."""
    found = {"masked": scene.batch.masked.to(torch.float64)}
    for preset in study.logging:
        found |= BOOKS[preset.logs or ""].columns(scene, preset)
    return found


def _ranges(study: Study, once: Stack) -> dict[str, tuple[Tensor, Tensor]]:
    scene, n = once.scene, once.n
    longest = n + scene.batch.masked
    found = {"length": (n.min(), n.max()), "response": (longest.min(), longest.max())}
    for drift in study.drifts:
        found |= gap.ranges(scene, drift)
    found |= method.ranges(once)
    for preset in study.logging:
        found |= BOOKS[preset.logs or ""].ranges(scene, preset)
    return found


def tally(study: Study, batch: Batch) -> Tally:
    """Observe one batch."""
    return observe(study, Scene.of(batch, study.seed, study.replicates))
