"""The values behind the intervals: every number of a dump in each bootstrap replicate.

Two numbers read with the same seed are paired by themselves: a group is drawn as often for the one as for the
other, whichever presets, files or runs they come from.
"""

from __future__ import annotations

from torch import Tensor

from offpol_diag.accumulators import LogSums
from offpol_diag.metrics import gap, method, residual, tails
from offpol_diag.metrics.formula import Formula
from offpol_diag.metrics.gap import Drift
from offpol_diag.presets import Preset
from offpol_diag.ratios import OVERFLOW
from offpol_diag.readout import CONDITIONAL, Readout

Replicates = dict[str, Tensor]
"""Number → [1+B]: its value, then its replicates."""


def base(out: Readout) -> Replicates:
    """Of the gap and the raw weights, under the names of `Summary.metrics`; those that have an interval."""
    found: Replicates = {}
    for drift in out.study.drifts:
        rows: list[Formula] = [*gap.ROWS, tails.ESS_TOKENS]
        if f"{drift.prefix}ax" in out.reader.sums:
            rows.append(gap.SURROGATE)
        found |= {drift.prefix + row.name: _values(out, row, drift.prefix) for row in rows}
        found |= _of_sequences(out, drift)
    return found


def _of_sequences(out: Readout, drift: Drift) -> Replicates:
    """Numbers of the weights of sequences, which may be too large for sums."""
    logs = out.tally.states[f"{drift.prefix}log.sequences"]
    assert isinstance(logs, LogSums)
    found = {f"{drift.prefix}{tails.ESS_SEQUENCES.name}": tails.ess_of_sequences(out.reader, logs)}
    if float(logs.shift) <= OVERFLOW:
        row = gap.CHI2_SEQUENCE
        found[drift.prefix + row.name] = _values(out, row, drift.prefix)
    return found


def of_preset(out: Readout, preset: Preset) -> Replicates:
    """Of one preset of the study, under the names of its metrics; those that have an interval."""
    prefix = f"{preset.name}|"
    rows: list[Formula] = [*method.ROWS, *residual.ROWS]
    for more, column, _ in CONDITIONAL:
        rows += more if prefix + column in out.reader.sums else ()
    return {row.name: _values(out, row, prefix) for row in rows}


def _values(out: Readout, row: Formula, prefix: str) -> Tensor:
    return row.of(lambda name: out.reader.column(name, prefix))
