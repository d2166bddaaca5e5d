"""Any number by training step, where it is asked for: the sums of a dump, kept apart by step.

What is no sum (tails, quantiles, extremes, weights of whole sequences in the log domain) has no number by
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from offpol_diag.engine import gap, method, normal, policyloss, residual, update
from offpol_diag.engine.accumulators import Places, Sums
from offpol_diag.engine.formula import Formula, Reader
from offpol_diag.engine.gap import DRIFTS
from offpol_diag.engine.scope import Label
from offpol_diag.engine.tails import ESS_TOKENS
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import plain
from offpol_diag.summary import Numbers

GAP = (*gap.ROWS, ESS_TOKENS)
PRESET = (*method.ROWS, *method.SIGN_ROWS, *residual.ROWS, *update.ROWS, *policyloss.ROWS)


def numbers(
    steps: Places[Sums],
    apart: Places[Sums],
    presets: Sequence[Preset],
    names: Sequence[str],
    groups: int,
) -> dict[Label, Numbers]:
    """Step → the numbers named, as far as sums give them.

    Args:
        steps: what is summed of a dump, by step.
        apart: the same of presets that are normalised in each step.
        presets: all of them.
        names: as in the gate: `k3`, `drift2.k3`, `PRESET.ess_tokens`; a preset by name or alias.
        groups: of the dump.
    """
    rows = {name: found for name in names if (found := _row(name, presets)) is not None}
    return {
        label: _read(_reader(_sums(sums, apart.sums.get(label), presets), groups), rows)
        for label, sums in steps.sums.items()
    }


def _reader(sums: Mapping[str, Tensor], groups: int) -> Reader:
    """No step has more groups than sequences."""
    return Reader(sums, min(groups, round(float(sums["sequences"][0]))))


def _sums(sums: Sums, apart: Sums | None, presets: Sequence[Preset]) -> dict[str, Tensor]:
    read = sums.read()
    divided = normal.normalised(presets)
    if apart is not None and divided:
        own = apart.read()
        for preset in divided:
            read |= normal.rescaled(own, preset)
    return read | method.own_denominators(presets, read)


def _read(reader: Reader, rows: Mapping[str, tuple[Formula, str]]) -> Numbers:
    found: Numbers = {}
    for name, (row, prefix) in rows.items():
        try:
            found[name] = reader.number(row, prefix)
        except KeyError:  # a column that this dump, or a single step, does not have
            continue
    return found


def _row(name: str, presets: Sequence[Preset]) -> tuple[Formula, str] | None:
    """The formula of a name, and the prefix of its columns."""
    for prefix, metric, rows in _readings(name, presets):
        found = next((row for row in rows if row.name == metric), None)
        if found is not None:
            return found, prefix
    return None


def _readings(name: str, presets: Sequence[Preset]) -> Iterator[tuple[str, str, Sequence[Formula]]]:
    for drift in DRIFTS:
        if name.startswith(drift.prefix):
            yield drift.prefix, name.removeprefix(drift.prefix), GAP
    for preset in presets:
        for word in (preset.name, *preset.aliases):
            if plain(name).startswith(plain(word) + "."):
                yield f"{preset.name}|", name[len(word) + 1 :], PRESET
