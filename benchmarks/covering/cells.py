"""Count how often printed intervals of drawn dumps hold the true number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.covering.truth import METRICS, PRESETS, Known
from benchmarks.covering.worlds import WORLDS, World, batch
from offpol_diag.compare.presets import of_preset
from offpol_diag.core import readout
from offpol_diag.core.intervals import less
from offpol_diag.core.observe import observe
from offpol_diag.core.study import Study
from offpol_diag.dump.batch import Batch
from offpol_diag.number import Number
from offpol_diag.numerals import doubted
from offpol_diag.presets import catalogue

COLUMNS = frozenset({"rollout_log_probs", "old_log_probs"})


def study() -> Study:
    """Build the study of the presets that have a truth."""
    shipped = catalogue.load()
    presets = (replace(shipped[name], name=short) for short, name in PRESETS.items())
    return Study(tuple(presets), COLUMNS)


@np.errstate(all="ignore")
def numbers(given: Batch) -> dict[str, Number]:
    """Return every number that has a truth, as a result holds it."""
    asked = study()
    out = readout.Readout(asked, observe(asked, given))
    found = readout.of_dump(out)
    for preset in asked.presets:
        metrics = readout.of_preset(out, preset)
        found |= {f"{preset.name}.{name}": number for name, number in metrics.items()}
    found |= _differences(out, found)
    return {name: found[name] for name in METRICS}


def _differences(out: readout.Readout, found: dict[str, Number]) -> dict[str, Number]:
    """Return the differences of two presets, as `compare` prints them."""
    drawn = {preset.name: of_preset(out, preset) for preset in out.study.presets}
    pairs = {name: _parts(name) for name in METRICS if " − " in name}
    return {
        name: less(
            drawn[one][metric], drawn[other][metric], found[f"{one}.{metric}"], out.reader.groups, name
        )
        for name, (one, other, metric) in pairs.items()
    }


def _parts(name: str) -> tuple[str, str, str]:
    presets, metric = name.split(": ")
    one, other = presets.split(" − ")
    return one, other, metric


@dataclass(frozen=True)
class Cell:
    """One number of one world at one number of groups.

    Attributes:
        dumps: how many were drawn; `unreliable` of them said so; `none` gave no interval.
        covered: of the others, how many intervals held the truth.
        below, above: how many lay wholly below it, or above.
        width: median width of an interval over the truth.
        error: standard error of the truth over the median half width.
    """

    dumps: int
    unreliable: int
    none: int
    covered: int
    below: int
    above: int
    width: float
    error: float

    @property
    def judged(self) -> int:
        """Number of intervals held against the truth."""
        return self.dumps - self.unreliable - self.none

    @property
    def coverage(self) -> float:
        """Share of intervals that hold the truth."""
        return self.covered / self.judged if self.judged else math.nan

    @property
    def binomial(self) -> float:
        """Binomial standard error of the coverage."""
        return math.sqrt(0.05 * 0.95 / self.judged) if self.judged else math.nan


def cell(found: Sequence[Number], known: Known) -> Cell:
    """Count how often intervals hold the truth."""
    trusted = [one for one in found if not doubted(one)]
    ends = [one.interval for one in trusted if one.interval is not None]
    low, high = np.array(ends).reshape(-1, 2).T
    slack = 1e-12 * max(abs(known.value), 1.0)
    below, above = int((high < known.value - slack).sum()), int((low > known.value + slack).sum())
    width = float(np.median(high - low)) if len(ends) else math.nan
    return Cell(
        dumps=len(found),
        unreliable=len(found) - len(trusted),
        none=len(trusted) - len(ends),
        covered=len(ends) - below - above,
        below=below,
        above=above,
        width=width / abs(known.value) if known.value else math.nan,
        error=2 * known.error / width if width else math.nan,
    )


def has_truth(known: Known) -> bool:
    """Return whether a number has a true value that is known well enough."""
    return math.isfinite(known.value) and known.error < 0.2 * abs(known.value)


def cells(world: World, known: dict[str, Known], groups: int, dumps: int) -> dict[str, Cell]:
    """Draw dumps of a world and count, number by number; the seed of a dump follows from its place."""
    place = WORLDS.index(world)
    seen = [numbers(batch(world, groups, np.random.default_rng((place, groups, i)))) for i in range(dumps)]
    return {
        name: cell([one[name] for one in seen], known[name]) for name in METRICS if has_truth(known[name])
    }
