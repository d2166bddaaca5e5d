"""What is measured of a dump, and the tally of one batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce

import numpy as np

from offpol_diag.engine import (
    bootstrap,
    breakdowns,
    charts,
    drops,
    gap,
    method,
    normal,
    policyloss,
    prefixes,
    residual,
    sample,
    scope,
    selection,
    tails,
    worst,
)
from offpol_diag.engine.bootstrap import resampled
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.gap import DRIFTS
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns
from offpol_diag.engine.tally import Arrays, Names, Tally
from offpol_diag.engine.terms import Drift, walk
from offpol_diag.presets import Preset, families

Ranges = dict[str, tuple[float, float]]
"""Name → (smallest, largest)."""
PARTS = (method, residual, policyloss)
"""Modules whose columns are summed for every preset and carry an interval."""


@dataclass(frozen=True)
class Study:
    """The quantities to measure, fixed before the first batch.

    Attributes:
        presets: those whose columns the dump has, in order.
        columns: canonical columns of the dump.
        group_by: extra location axes.
        against: the preset that the others are compared with, or None.
        by_step: numbers requested by training step, besides those of `breakdowns`.
        kept: columns of `group_by` with many values, and those that are kept.
        lag_0: whether to count what each preset keeps of policy lag 0.
    """

    presets: tuple[Preset, ...]
    columns: frozenset[str]
    group_by: tuple[str, ...]
    seed: int
    replicates: int
    against: str | None = None
    by_step: tuple[str, ...] = ()
    kept: tuple[breakdowns.Kept, ...] = ()
    lag_0: bool = False

    @classmethod
    def of(
        cls,
        columns: Collection[str],
        presets: Sequence[Preset],
        group_by: Sequence[str],
        seed: int,
        replicates: int = bootstrap.REPLICATES,
    ) -> Study:
        """Return what a dump with these canonical columns allows: of the presets, those whose columns it has.

        Advantages are made of rewards where there are none and groups are known.
        """
        have = frozenset(columns)
        if {"rewards", "group_id"} <= have:
            have |= {"advantages"}
        able = tuple(preset for preset in presets if not preset.lacking(have))
        return cls(able, have, tuple(group_by), seed, replicates)

    @cached_property
    def pairs(self) -> tuple[tuple[Preset, Preset], ...]:
        """Pairs of the preset compared against and each other preset; none where there are too many."""
        if len(self.presets) > drops.MOST:
            return ()
        ours = [preset for preset in self.presets if preset.name == self.against]
        return tuple((one, other) for one in ours for other in self.presets if other is not one)

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """Pairs of policies whose log-probs are in the dump."""
        return tuple(drift for drift in DRIFTS if set(drift.columns) <= self.columns)

    @cached_property
    def families(self) -> tuple[Preset, ...]:
        """Those presets that a recommendation shows; pictures and steps have their weights."""
        named = families.FAMILIES[self.main.numerator]
        return tuple(preset for preset in self.presets if preset.name in named)

    @property
    def main(self) -> Drift:
        """The main drift, used for locations and worst tokens: drift 1, or the total in a two-policy dump."""
        return self.drifts[0]

    def ready(self) -> Study:
        """Compute the cached properties that every worker needs, so that they are pickled with the study."""
        for name in ("families", "normalised"):
            getattr(self, name)
        return self

    @cached_property
    def normalised(self) -> tuple[Preset, ...]:
        """Presets whose sums are kept per trainer batch, for their weights are normalised there."""
        return normal.normalised(self.presets)

    @cached_property
    def of_whole(self) -> tuple[Preset, ...]:
        """All other presets, whose sums are over the whole dump."""
        return tuple(preset for preset in self.presets if preset not in self.normalised)


PER_STEP = ("batches", "steps", f"{breakdowns.PREFIX}{breakdowns.STEP}")
"""What is kept by training step, each with its sums."""


def refuse_steps(tally: Tally) -> Tally:
    """Return a tally, unless it keeps sums of more steps than can be kept.

    Raises:
        TooManySteps: it does.
    """
    for name in PER_STEP:
        if name in tally.by_key:
            sums = tally.by_key[name].arrays.sums["columns"]
            scope.refuse_steps(len(sums), sums[:1].nbytes)
    return tally


@np.errstate(all="ignore")
def observe(study: Study, context: BatchContext) -> Tally:
    """Compute the tally of one batch."""
    scope.refuse_steps(scope.count(context.batch), 0)
    every = (gap.Gap, tails.Tails)
    first = (breakdowns.ByPlace, worst.Largest, prefixes.Products, charts.Pictures)
    sums = PresetSums.of(context, study.presets)  # a GPU computes them while the host goes on
    walk(context, {drift: (*first, *every) if drift is study.main else every for drift in study.drifts})
    parts = [
        breakdowns.tally(context, study.main, study.group_by, study.kept),
        Tally(prefixes.arrays(context, study.main)),
        *(Tally(tails.arrays(context, drift)) for drift in study.drifts),
    ]
    result, ranges = _of_presets(study, sums)
    del sums
    if study.pairs:
        parts.append(drops.tally(context, study.main, study.pairs))
    masked = np.array([context.batch.masked.sum()], np.float64)
    records = {
        "worst.sequences": worst.sequences(context, study.main),
        "worst.typical": worst.typical(context, study.main),
        "worst.tokens": worst.tokens(context, study.main),
        "sample": sample.sample(context, study.main),
    }
    left_out = Arrays(sums={"masked": masked}, names={"masked": Names(("masked",))})
    parts += [result, Tally(left_out), Tally(_extremes(ranges), records=records)]
    return reduce(Tally.merge, parts)


def _extremes(ranges: Ranges) -> Arrays:
    """Return the largest values of −x and x by name, [K, 2]."""
    ends = np.array([(-low, high) for low, high in ranges.values()]).reshape(-1, 2)
    return Arrays(maxima={"ranges": ends}, names={"ranges": Names(tuple(ranges))})


def _of_presets(study: Study, sums: PresetSums) -> tuple[Tally, Ranges]:
    """Tally all presets; the per-sequence columns are freed on return."""
    context, apart = sums.context, frozenset(preset.name for preset in study.normalised)
    parts = [part.columns for part in PARTS] + [selection.at_lag_0] * study.lag_0
    columns = Columns.joined(*(columns_of(sums) for columns_of in parts if sums.presets))
    of_whole, normalised = (columns.only(at) for at in _parted(columns.names, apart))
    of_all = context.counts | gap.rewards(context)
    of_all |= selection.lag_0(context) if study.lag_0 else {}
    for drift in study.drifts:
        of_all |= gap.columns(context, drift)
    every = Columns.joined(Columns.of(of_all), of_whole)
    arrays = Arrays(
        sums={"columns": resampled(every.parts, context.draws, context.batch.key)},
        names={"columns": Names(every.names, every.which)},
    )
    by_batch = Columns.joined(Columns.of({"tokens": sums.n}), normalised.trimmed)
    by_key = {
        "groups": selection.groups_of(context.batch.key),
        "dropped": selection.by_octave(sums),
        "batches": normal.by_batch(context, by_batch, normal.ranges(sums, apart)),
    }
    if study.by_step:
        scope.refuse_steps(scope.count(context.batch), 8 * len(every.names) * context.draws.shape[1])
        by_key["steps"] = normal.by_batch(context, every)
    pictures = charts.tally(context, study.drifts, sums.only(lambda preset: preset in study.families))
    return Tally(arrays, by_key).merge(pictures), _ranges(study, sums)


@cache
def _parted(columns: tuple[str, ...], apart: frozenset[str]) -> tuple[list[int], list[int]]:
    """Return the indices of the columns of other presets, and of the presets that are kept apart."""
    flags = [name.rpartition("|")[0] in apart for name in columns]
    of_whole, normalised = ([at for at, flag in enumerate(flags) if flag is x] for x in (False, True))
    return of_whole, normalised


def _ranges(study: Study, sums: PresetSums) -> Ranges:
    n = sums.n
    longest = n + sums.batch.masked
    result = {"length": (n.min(), n.max()), "response": (longest.min(), longest.max())}
    for drift in study.drifts:
        result |= gap.ranges(sums.context, drift)
    weights = method.ranges(sums) if sums.presets else {}
    return result | {name: weights[name] for name in (f"{preset.name}|weight" for preset in study.of_whole)}
