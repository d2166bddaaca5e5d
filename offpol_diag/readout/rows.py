"""The numbers of all presets that carry an interval: row by row, a row of all presets at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from offpol_diag.metrics import method, policyloss, residual, update
from offpol_diag.metrics.formula import Formula, Reader
from offpol_diag.presets import Preset
from offpol_diag.summary import Number

CONDITIONAL: tuple[tuple[tuple[Formula, ...], str, tuple[str, ...]], ...] = (
    (method.SIGN_ROWS, "positive", ("advantages",)),
    (update.ROWS, "update", ("advantages",)),
    (policyloss.ROWS, "loss", ("current_log_probs", "advantages")),
)
"""Rows, a column that is there where they can be read, and what the dump needs for it."""


def of_presets(presets: Sequence[Preset], reader: Reader) -> Iterator[tuple[str, dict[str, Number]]]:
    """Each row's numbers; what cannot happen is not counted, so that its 0 is exact."""
    idle = {preset.name: method.idle(preset) for preset in presets}
    for row, names in _rows(presets, reader):
        found: dict[str, Number] = {}
        for exact in (False, True):
            some = [name for name in names if (row.name in idle[name]) is exact]
            read = replace(row, counts=row.counts and not exact)
            found |= zip(some, reader.numbers(read, [f"{name}|" for name in some]), strict=True)
        yield row.name, found


def of_weights(preset: Preset, reader: Reader) -> Iterator[tuple[str, Number]]:
    """The numbers of one preset that tell what its weights are."""
    idle = method.idle(preset)
    for row in method.WEIGHTS:
        read = replace(row, counts=row.counts and row.name not in idle)
        yield row.name, reader.number(read, f"{preset.name}|")


def _rows(presets: Sequence[Preset], reader: Reader) -> Iterator[tuple[Formula, list[str]]]:
    """Every row, and the presets whose columns it reads were summed."""
    names = [preset.name for preset in presets]
    yield from ((row, names) for row in (*method.ROWS, *residual.ROWS))
    for rows, column, _ in CONDITIONAL:
        have = [name for name in names if f"{name}|{column}" in reader.sums]
        yield from ((row, have) for row in rows)
