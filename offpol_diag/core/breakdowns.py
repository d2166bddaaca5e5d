"""The mismatch by place, as it is read: numbers at every place, and any number that is made of sums by step.

Beside them the ESS of sequence weights by the length of the prefix that they are products over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from offpol_diag.core import gap, preset_numbers
from offpol_diag.core.gap import DRIFTS, Terms
from offpol_diag.core.intervals import Formula
from offpol_diag.core.places import LAG, LENGTH, OF_TOKENS, PREFIX, STEP, By, of_octave, of_sequences
from offpol_diag.core.preset_numbers import DROPPED
from offpol_diag.core.segments import Segments
from offpol_diag.core.state import OTHERS, Array, Table
from offpol_diag.core.study import Readout
from offpol_diag.core.tails import ESS_TOKENS
from offpol_diag.number import Number, Numbers
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import plain
from offpol_diag.result import AtLength, Axis, place_of

_GAP = {row.name: row for row in (*gap.ROWS, ESS_TOKENS)}
ROWS = [
    _GAP[one] for one in ("k3", "k1", "mean_ratio", "ess_tokens", "abs_log_ratio", "prob_diff_mean", "f_2")
]
"""Numbers at every place."""
MOST_LISTED = 400
"""Most places of an axis that are listed; a longer one is thinned when it is read."""

# ---------------------------------------------------------------- numbers at places


def places(out: Readout) -> tuple[dict[str, Axis], dict[str, Numbers]]:
    """Read out every axis, and by subject the numbers at its places; any number by step that is asked for."""
    study, tables = out.study, out.state.tables
    axes, found = dict[str, Axis](), dict[str, Numbers]()
    for by in (*of_sequences(study.group_by), *OF_TOKENS):
        table = tables.get(PREFIX + by.name)
        if table is not None and len(table.labels) >= by.fewest:
            axes[by.name], at_places = _axis(out, by, table)
            found |= {place_of(by.name, place): numbers for place, numbers in at_places.items()}
    able = [preset.name for preset in study.presets if DROPPED.name not in preset_numbers.idle(preset)]
    for octave, table in tables[PREFIX + LENGTH].by_place().items():
        shares = out.at(table).all([(DROPPED, f"{name}|") for name in able])
        for name, number in zip(able, shares, strict=True):
            found[place_of(LENGTH, of_octave(octave), f"preset/{name}")] = {DROPPED.name: number}
    if study.by_step and STEP in axes:
        for subject, name, number in _by_step(out, axes[STEP].places):
            found.setdefault(subject, {})[name] = number
    return axes, found


def _by_step(out: Readout, steps: Sequence[str]) -> Iterator[tuple[str, str, Number]]:
    """Yield subject, name and value of the numbers that are asked for at every step."""
    study, tables = out.study, out.state.tables["steps"].by_place()
    batches = out.state.tables["batches"].by_place() if study.normalised else {}
    rows = [*filter(None, (row_by_step(name, study.presets) for name in dict.fromkeys(study.by_step)))]
    for step in (step for step in steps if step in tables):
        reader, sums = out.at(tables[step]), batches[step].drawn(study.seed) if step in batches else {}
        for preset in study.normalised if sums else ():
            reader = replace(reader, drawn={**reader.drawn, **preset_numbers.divided(sums, preset)})
        for row, prefix in rows:
            of_preset = prefix.endswith("|")
            subject = place_of(STEP, step, f"preset/{prefix[:-1]}" if of_preset else "dump")
            with suppress(KeyError):  # a column that the dump, or this step, does not have
                yield subject, row.name if of_preset else prefix + row.name, reader.number(row, prefix)


def _axis(out: Readout, by: By, table: Table) -> tuple[Axis, dict[str, Numbers]]:
    """Read out one axis, its places in the order of numbers where they are numbers."""
    tables = table.by_place()
    others = tables.pop(OTHERS, None)
    every = sorted((float(at) if by.labels else _number(at), at) for at in tables)
    many, listed = len(every), every
    if many > MOST_LISTED and not out.study.by_step:
        listed = [every[round(at * (many - 1) / (MOST_LISTED - 1))] for at in range(MOST_LISTED)]
    readers = {by.labels[at] if by.labels else at: out.at(tables[at]) for _, at in listed}
    if others is not None:
        readers["all others"] = out.at(others)
    axis = Axis(
        title=by.title,
        places=[*readers],
        tokens=[round(reader.sum("tokens")) for reader in readers.values()],
        sequences=[round(reader.sum("sequences")) for reader in readers.values()],
        left_out=many - len(listed),
    )
    rows, names = [(row, "") for row in ROWS], [row.name for row in ROWS]
    numbers = {place: dict(zip(names, reader.all(rows), strict=True)) for place, reader in readers.items()}
    return axis, numbers


def _number(place: str) -> float:
    """Return a place as a number; inf if it is none."""
    try:
        return found if math.isfinite(found := float(place)) else math.inf
    except ValueError:
        return math.inf


def at_lag_0(out: Readout, preset: Preset) -> Number | None:
    """Return the share that a preset keeps of policy lag 0; None where that was not asked for."""
    table = out.state.tables.get(PREFIX + LAG)
    at_0 = table.by_place().get("0") if out.study.lag_0 and table is not None else None
    return None if at_0 is None else out.at(at_0).number(preset_numbers.AT_LAG_0, f"{preset.name}|")


# ---------------------------------------------------------------- which numbers there are by step

_PRESET = {row.name: row for row in (*preset_numbers.ROWS, *preset_numbers.LOSSES)}


def row_by_step(name: str, presets: Sequence[Preset]) -> tuple[Formula, str] | None:
    """Find the formula of such a number, and the prefix of its columns; None of another.

    Args:
        name: as in `gate`: `k3`, `drift2.k3`, `PRESET.ess_tokens`; a preset by name or alias.
        presets: all presets analysed.
    """
    of, dot, metric = name.rpartition(".")
    if metric in _GAP and of + dot in [drift.prefix for drift in DRIFTS]:
        return _GAP[metric], of + dot
    named = [one for one in presets if plain(of) in map(plain, (one.name, *one.aliases))]
    return (_PRESET[metric], f"{named[0].name}|") if named and metric in _PRESET else None


# ---------------------------------------------------------------- sequence weights by prefix

PREFIXES = "prefixes"
GRID = tuple(sorted({round(2 ** (half / 2)) for half in range(35)}))
"""Lengths T of prefixes in tokens, two to an octave, up to 131,072."""
FEWEST = 50
"""Fewest responses for an ESS at a length: each of a few makes up a large share by itself."""
KEPT = 0.1
"""ESS below which sequence-level importance sampling is considered unusable."""
ESS = Formula(
    "ess_sequences",
    "(Σw)² / (n Σw²), w = product of the raw ratios of the first T tokens",
    lambda get: np.exp(2 * get("w") - get("ww") - get("many")),
    "fraction",
    "responses of at least T tokens",
)


def prefixes(terms: Terms, buckets: Array) -> Table:
    """Sum w and w² over the responses of at least T tokens, w the product of the ratios of the first T.

    As log Σw, log Σw² and the log of their number, at places T.
    """
    batch, grid = terms.tokens.batch, np.array(GRID)
    grid = grid[: np.searchsorted(grid, batch.lengths.max(initial=0), side="right")]
    ends = batch.cu_seqlens[:-1, None] + np.minimum(grid, batch.lengths[:, None])
    cuts = np.concatenate((batch.cu_seqlens[:-1, None], ends), axis=1)
    between = Segments(np.append(cuts, batch.tokens), batch.tokens).sum(
        terms.log_ratio
    )  # the last: what lies beyond
    logs = between.reshape(-1, len(grid) + 1)[:, :-1].cumsum(axis=1)
    sequence, at = np.nonzero(grid <= batch.lengths[:, None])
    x = logs[sequence, at]
    columns = {"w": x, "ww": 2 * x, "many": np.zeros_like(x)}
    return Table.of(columns, buckets[sequence], grid[at], kind="logs")


def curve(out: Readout) -> list[AtLength]:
    """Return ESS by the length of the prefix, as long as there are enough responses."""
    found = []
    for tokens, table in out.state.tables[PREFIXES].by_place().items():
        logs = table.drawn(out.study.seed)
        many = round(math.exp(logs["many"][0]))
        if many < FEWEST:
            break
        (ess,) = replace(out.reader, drawn=logs).all([(ESS, "")])
        found.append(AtLength(tokens=tokens, sequences=many, ess_sequences=ess))
    return found


def longest(curve: Sequence[AtLength]) -> int | None:
    """Find how many tokens keep an ESS of at least `KEPT`: the last whole one before it first falls below.

    log ESS is interpolated linearly in T, as is exact for log-normal ratios; at T = 0 it is 0. None where it
    never falls below, or is not known.
    """
    before, above = 0, math.log(1 / KEPT)
    for at in curve:
        if at.ess_sequences.value is None:
            return None
        left = math.log(max(at.ess_sequences.value, 1e-300) / KEPT)
        if left < 0:
            return math.floor(before + (at.tokens - before) * above / (above - left))
        before, above = at.tokens, left
    return None
