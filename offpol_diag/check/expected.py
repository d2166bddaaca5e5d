"""Numbers that a trainer logs of a training step of a dump: of all its rows, or means over parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import numpy as np

from offpol_diag.analysis.first_pass import of_batch
from offpol_diag.analysis.tally import PARTS, Study
from offpol_diag.batch import Batch, joined
from offpol_diag.engine import gap, normal, preset_sums, scope
from offpol_diag.engine.accumulators import sum_by
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import Array
from offpol_diag.presets import Preset
from offpol_diag.trainers import LOGS
from offpol_diag.trainers.base import Range, Read
from offpol_diag.trainers.measures import Measure
from offpol_diag.trainers.view import View

Values = dict[str, float]
Parts = Sequence[Sequence[int]]
PROBABILITY_GAP = Measure("|π_train − π_rollout|", lambda x: abs(x.ratios.difference()))


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
        scope.refuse_steps(len(found), 0)
    return {step: joined(parts) for step, parts in sorted(found.items())}


def extremes(preset: Preset) -> frozenset[str]:
    """Return the names of maxima and minima: parts of a batch keep the outermost, which is the whole's."""
    return frozenset(
        entry.name
        for entry in LOGS[preset.logs or ""].entries_of(preset)
        if any(isinstance(one, Range) for one in entry.value.columns) or entry.name.endswith("_diff_max")
    )


@dataclass(frozen=True)
class Logged:
    """The summands of a trainer's metrics, of each sequence of one training step.

    Attributes:
        preset: the correction that runs.
        sums: name → summand of each sequence, [S].
        ranges: name → smallest and largest of each sequence, [S] each.
        counted: tokens of each sequence that denominators count, [S].
    """

    preset: Preset
    sums: dict[str, Array]
    ranges: dict[str, tuple[Array, Array]]
    counted: Array

    @classmethod
    def of(cls, batch: Batch, preset: Preset, columns: frozenset[str], masked: bool = False) -> Logged:
        """Compute them; `columns` are the canonical ones of the dump, `masked` counts masked tokens too."""
        study = Study.of(columns, (preset,), (), 0, 2)
        found = of_batch(batch, [preset], "advantages" in study.columns and batch.advantages is None)
        batch = found.filled(batch)
        scene = Scene.of(batch, 0, 2, found.fits)
        sums = dict(scene.counts)
        log = LOGS[preset.logs or ""]
        if preset_sums.normalised(preset) or any(not entry.value.columns for entry in log.entries_of(preset)):
            of_presets = PresetSums.of(scene, study.presets)
            sums = reduce(dict.__or__, (gap.columns(scene, drift) for drift in study.drifts), sums)
            for some in (part.columns(of_presets) for part in PARTS):
                sums |= zip(some.names, some.values, strict=True) if some.names else {}
        view = View(scene, preset, masked)
        more, ranges = log.columns(view)
        longest = (batch.lengths + batch.masked).astype(np.float64)
        ranges |= {"response": (longest, longest)}
        if batch.old is not None:
            ranges |= {"pd": View(scene, replace(preset, policy="old")).ends(PROBABILITY_GAP)}
        return cls(preset, sums | more | {"tokens": view.counted}, ranges, view.counted)

    def values(self, parts: Parts = ()) -> list[Values]:
        """Return logged name → value of each part of the sequences, those without a token left out.

        Without parts all sequences are one.
        """
        which = np.zeros(len(self.counted), np.int64)
        for part, rows in enumerate(parts):
            which[list(rows)] = part
        many = max(len(parts), 1)
        totals = {name: sum_by(which, many, x) for name, x in self.sums.items()}
        if preset_sums.normalised(self.preset):
            scaled = {name: x for name, x in totals.items() if name.startswith(f"{self.preset.name}|")}
            totals |= normal.rescaled(scaled, self.preset)
        read = {name: x.tolist() for name, x in totals.items()}
        ends = {name: (np.full(many, np.inf), np.full(many, -np.inf)) for name in self.ranges}
        for name, (low, high) in self.ranges.items():
            np.minimum.at(ends[name][0], which, low)
            np.maximum.at(ends[name][1], which, high)
        found = []
        for part in range(many):
            own: dict[str, float] = {name: x[part] for name, x in read.items()}
            outer = {name: (float(low[part]), float(high[part])) for name, (low, high) in ends.items()}
            if own["tokens"]:
                with suppress(ZeroDivisionError):
                    found.append(LOGS[self.preset.logs or ""].logged(self.preset, Read(own, outer)))
        return found

    def averaged(self, parts: Parts, weighted: bool = False, outermost: bool = True) -> Values:
        """Return the mean over parts of what is logged of each, unweighted or weighted by their tokens.

        With `outermost` maxima and minima are those of the whole.
        """
        sizes = [float(self.counted[list(rows)].sum()) for rows in parts]
        weights = [size if weighted else 1.0 for size in sizes if size]
        made, ends = self.values(parts), extremes(self.preset) if outermost else ()
        if len(made) < len(weights):
            return {}
        whole = sum(weights)
        found = {
            name: sum(one[name] * weight for one, weight in zip(made, weights, strict=True)) / whole
            for name in (made[0] if made else ())
            if all(name in one for one in made)
        }
        if outermost:
            found |= {name: x for every in self.values() for name, x in every.items() if name in ends}
        return found
