"""What a batch leaves of a sweep: sums for every threshold and by length, and the shape of the statistic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.accumulators import Bins, State, Sums
from offpol_diag.batch import Batch
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.selection import LENGTH_BINS, Grid, length_bin
from offpol_diag.presets import Preset, Reject
from offpol_diag.ratios import Level
from offpol_diag.settle import Found
from offpol_diag.sheet import Sheet
from offpol_diag.sweeps.dial import Dial
from offpol_diag.sweeps.floor import Steps
from offpol_diag.sweeps.tables import Table, table, worst_token
from offpol_diag.tally import Study, Tally, observe

CELLS = 1 << 19
"""Thresholds times sequences held at once."""
SHARED = ("tokens", "sequences")
FRESH = "fresh"
"""Sequences of policy lag 0: there only numerics make the policies differ."""


@dataclass(frozen=True)
class Plan:
    """What is swept; it travels to where batches are.

    Attributes:
        study: what is measured beside it, with the preset as it stands.
        found: what trainer batches settle.
        dial: the bound that moves.
        values: the thresholds, rising.
    """

    study: Study
    found: Found
    dial: Dial
    values: tuple[float, ...]

    @property
    def preset(self) -> Preset:
        """The preset that is swept."""
        return self.study.presets[0]


@dataclass(frozen=True)
class Swept:
    """The job of a sweep: the states of an analysis and those of the sweep, of one batch."""

    plan: Plan

    def __call__(self, batch: Batch) -> Tally:
        """All of it."""
        plan, study = self.plan, self.plan.study
        batch = plan.found.filled(batch)
        scene = Scene.of(batch, study.seed, study.replicates, plan.found.settled, study.near)
        tally = observe(study, scene)
        scene.forget()
        more = Tally(swept(plan, batch))
        return tally.merge(more)


def swept(plan: Plan, batch: Batch) -> dict[str, State]:
    """The states of the sweep, a few sequences at a time."""
    size = max(1, CELLS // max(len(plan.values), 1))
    firsts = range(0, batch.sequences, size)
    parts = (batch.rows(first, min(first + size, batch.sequences)) for first in firsts)
    tallies = (Tally(_swept(plan, part)) for part in parts)
    return reduce(lambda one, two: one.merge(two), tallies).states


def _swept(plan: Plan, batch: Batch) -> dict[str, State]:
    study = plan.study
    scene = Scene.of(batch, study.seed, study.replicates, plan.found.settled)
    found = table(scene, plan.preset, plan.dial, plan.values)
    units = statistic(scene, plan.preset, plan.dial)
    states: dict[str, State] = {
        "sweep.sums": _sums(scene, found),
        "sweep.length": _by_length(scene, found),
        "sweep.steps": Steps.of(batch.rollout, scene.ratios(plan.preset.policy).train),
    }
    if units is not None:
        states["sweep.shape"] = Bins.of(in_units(units, batch))
    scene.forget()
    return states


COLUMNS = (
    "kept",
    "left",
    "touched",
    "w",
    "ww",
    "v",
    "vv",
    "residual_ww",
    "residual_vv",
    "residual_left",
    "acted",
)


def columns(found: Table, n: Tensor) -> dict[str, Tensor]:
    """What the formulas read, [N, S] each, by the names of `metrics.method` and `metrics.residual`."""
    kept, sums, there = found.kept, found.sums, n > 0
    weight = sums.first / n.clamp(min=1)
    left = (kept > 0).to(torch.float64)
    away = (sums.excess + kept - n) / n.clamp(min=1)
    return {
        "kept": kept,
        "left": left,
        "touched": ((kept < n) & there).to(torch.float64),
        "w": sums.first,
        "ww": sums.second,
        "v": weight,
        "vv": weight.square(),
        "residual_ww": sums.about_one + 2 * sums.excess,
        "residual_vv": away * (away + 2) * left,
        "residual_left": left,
        "acted": found.acted,
    }


def _sums(scene: Scene, found: Table) -> Sums:
    many = len(found.kept)
    fresh = _fresh(scene.batch)
    rows = columns(found, scene.counts["tokens"])
    extra = {"fresh_kept": rows["kept"] * fresh, "fresh_left": rows["left"] * fresh}
    wide = Sheet(
        tuple(f"{at}|{name}" for name in (*rows, *extra) for at in range(many)),
        tuple((rows | extra).values()),
    )
    shared = {name: scene.counts[name] for name in SHARED}
    shared |= {f"{FRESH}_{name}": x * fresh for name, x in shared.items()}
    sheet = Sheet.joined(Sheet.of(shared), wide)
    return Sums.of_stacked(sheet.names, sheet.values, scene.draws, scene.batch.key)


def _fresh(batch: Batch) -> Tensor:
    """1 for sequences of policy lag 0, [S]; where nothing says so, none is."""
    lags = batch.scalars.get("policy_lag", [None] * batch.sequences)
    return batch.rollout.new_tensor([1.0 if lag == 0 else 0.0 for lag in lags])


def _by_length(scene: Scene, found: Table) -> Grid:
    """[length bins, 2 + N columns]: sequences, tokens, then every column of every threshold."""
    counts = scene.counts
    every = torch.cat(
        (counts["sequences"][None], counts["tokens"][None], *columns(found, counts["tokens"]).values())
    ).T
    at = length_bin(scene.batch.lengths)
    return Grid(every.new_zeros(LENGTH_BINS, every.shape[1]).index_add_(0, at, every))


def statistic(scene: Scene, preset: Preset, dial: Dial) -> Level | None:
    """What the thresholds are compared with, of tokens or sequences; ratios as logarithms.

    None where that depends on other tokens of the preset or on the trainer batch.
    """
    held, ratios = dial.held(preset), scene.ratios(preset.policy)
    if dial.part == "veto":
        return Level(worst_token(ratios, dial), "sequence")
    if held.among == "left" or getattr(held, "over", "") == "batch":  # type: ignore[union-attr]
        return None
    if isinstance(held, Reject):
        return correction.statistic(ratios.of(held.policy), held)
    return ratios.log_ratio(held.over, held.safety, held.safety_at)  # type: ignore[union-attr]


def in_units(level: Level, batch: Batch) -> Tensor:
    """The values of all tokens, or of the sequences that have one."""
    return level.values if level.per == "token" else level.values[batch.lengths > 0]
