"""Numbers that a trainer logs of a training step of a dump: of all its rows, or means over parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from offpol_diag.analysis.first_pass import of_batch
from offpol_diag.analysis.study import Study
from offpol_diag.batch import Batch, joined
from offpol_diag.engine import scope
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array, sum_by
from offpol_diag.presets import Preset
from offpol_diag.trainers import logs
from offpol_diag.trainers.tokens import Tokens

Values = dict[str, float]
Parts = Sequence[Sequence[int]]


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


@dataclass(frozen=True)
class Logged:
    """What a trainer's log adds up, of each sequence of one training step.

    Attributes:
        preset: the correction that runs.
        context: the sequences.
        found: summands and numbers whose extremes are logged, of each sequence.
        sums: summands by which a variant may multiply a mean, [S] each: `tokens`, `rows`.
    """

    preset: Preset
    context: BatchContext
    found: logs.Collected
    sums: dict[str, Array]

    @classmethod
    def of(cls, batch: Batch, preset: Preset, columns: frozenset[str], masked: bool = False) -> Logged:
        """Compute them; `columns` are the canonical ones of the dump, `masked` counts masked tokens too."""
        study = Study.of(columns, (preset,), (), 0, 2)
        found = of_batch(batch, [preset], "advantages" in study.columns and batch.advantages is None)
        context = BatchContext.of(found.filled(batch), 0, 2, found.fits)
        t = Tokens(context, preset, masked)
        return cls(preset, context, logs.collected(t), {"tokens": t.counted, "rows": t.one})

    @property
    def counted(self) -> Array:
        """Tokens of each sequence that denominators count, [S]."""
        return self.sums["tokens"]

    def values(self, parts: Parts = ()) -> list[Values]:
        """Return logged name → value of each part of the sequences, those without a token left out.

        Without parts all sequences are one.
        """
        which = np.zeros(len(self.counted), np.int64)
        for part, rows in enumerate(parts):
            which[list(rows)] = part
        many = max(len(parts), 1)

        def sum_at(at: int) -> Array:
            return sum_by(which, many, self.found.sums[at])

        def ends_at(at: int) -> tuple[Array, Array]:
            low, high = np.full(many, np.inf), np.full(many, -np.inf)
            np.minimum.at(low, which, self.found.ends[at])
            np.maximum.at(high, which, self.found.ends[at])
            return low, high

        none = BatchContext(self.context.batch.rows(0, 0), self.context.draws[:0], self.context.fits)
        read = logs.read(Tokens(none, self.preset), logs.Merged(sum_at, ends_at))
        made = {name: np.broadcast_to(x, many).tolist() for name, x in read.items()}
        there = np.flatnonzero(sum_by(which, many, self.counted) > 0).tolist()
        return [{name: x[part] for name, x in made.items()} for part in there]

    def averaged(self, parts: Parts, weighted: bool = False, outermost: bool = True) -> Values:
        """Return the mean over parts of what is logged of each, unweighted or weighted by their tokens.

        With `outermost` maxima and minima are those of the whole.
        """
        sizes = [float(self.counted[list(rows)].sum()) for rows in parts]
        weights = [size if weighted else 1.0 for size in sizes if size]
        made, ends = self.values(parts), logs.of_whole(self.preset) if outermost else ()
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
