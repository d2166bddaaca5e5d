"""What a trainer logs of one training step of a dump, as a whole or of some of its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from offpol_diag.analysis.first_pass import Needs, settle
from offpol_diag.analysis.tally import PARTS, Study
from offpol_diag.batch import Batch, joined
from offpol_diag.engine import gap, normal, outcome
from offpol_diag.engine.outcome import Outcomes
from offpol_diag.engine.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.torch import Whole
from offpol_diag.trainers import LOGS
from offpol_diag.trainers.base import Read
from offpol_diag.trainers.view import View


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some sequences of a batch, rising."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(rows), 1) if b != a + 1), len(rows)]
    return joined([batch.rows(rows[a], rows[b - 1] + 1) for a, b in pairwise(cuts)])


def by_step(batches: Iterable[Batch]) -> dict[int, Batch]:
    """Divide a dump by training step; without a column of steps nothing is returned."""
    found: dict[int, list[Batch]] = {}
    for batch in batches:
        rows: dict[int, list[int]] = {}
        for row, step in enumerate(batch.scalars.get("step", ())):
            if isinstance(step, int):
                rows.setdefault(step, []).append(row)
        for step, at in rows.items():
            found.setdefault(step, []).append(rows_of(batch, at))
    return {step: joined(parts) for step, parts in sorted(found.items())}


@dataclass(frozen=True)
class Logged:
    """The summands of a trainer's metrics, of each sequence of one training step.

    Attributes:
        preset: the correction that runs.
        sums: name → summand of each sequence, [S].
        ranges: name → smallest and largest of each sequence, [S] each.
        masked: masked tokens of each sequence, [S].
    """

    preset: Preset
    sums: dict[str, Tensor]
    ranges: dict[str, tuple[Tensor, Tensor]]
    masked: Tensor

    @classmethod
    def of(cls, batch: Batch, preset: Preset, columns: frozenset[str]) -> Logged:
        """Compute them; `columns` are the canonical ones of the dump."""
        whole: Any = Whole(batch)
        study = Study.of(columns, (preset,), (), 0, 2)
        needs = Needs.of([preset], "advantages" in study.columns and batch.advantages is None)
        found = settle(whole, whole, needs)
        batch = found.filled(batch)
        scene = Scene.of(batch, 0, 2, found.settled)
        outcomes = Outcomes.of(scene, study.presets)
        own = [part.columns(outcomes) for part in PARTS]
        sums = reduce(dict.__or__, (gap.columns(scene, drift) for drift in study.drifts), dict(scene.counts))
        for some in own:
            sums |= zip(some.names, some.values, strict=True) if some.names else {}
        more, ranges = LOGS[preset.logs or ""].columns(View(scene, preset))
        return cls(preset, sums | more, ranges, batch.masked.to(torch.float64))

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.masked)

    def values(self, rows: slice | list[int] = slice(None), masked: bool = False) -> dict[str, float]:
        """Return logged name → value of some sequences as one batch; `masked` counts masked tokens too."""
        sums = {name: x[rows].sum()[None] for name, x in self.sums.items()}
        if outcome.normalised(self.preset):
            own = {name: x for name, x in sums.items() if name.startswith(f"{self.preset.name}|")}
            sums |= normal.rescaled(own, self.preset)
        read = {name: float(x[0]) for name, x in sums.items()}
        if masked:
            read["tokens"] += float(self.masked[rows].sum())
        ranges = {
            name: (float(low[rows].min()), float(high[rows].max()))
            for name, (low, high) in self.ranges.items()
        }
        try:
            return LOGS[self.preset.logs or ""].logged(self.preset, Read(read, ranges))
        except ZeroDivisionError:  # no token among these sequences
            return {}


def swapped(batch: Batch, preset: Preset) -> Batch:
    """Exchange the policy that sampled and the one that is trained."""
    train = batch.policy(preset.policy)
    assert train is not None
    return replace(batch, **{"rollout": train, preset.policy: batch.rollout})  # type: ignore[arg-type]
