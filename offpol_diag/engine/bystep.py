"""Any metric by training step, on request: the same sums as of the whole dump, kept per step.

Metrics that are not computed from sums (tails, quantiles, extremes, sequence weights in the log domain) have
no value by step.
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
    """Return step → the numbers requested, as far as sums give them.

    Args:
        steps: sums of the dump's columns, by step.
        apart: the same for presets whose weights are normalised in each step.
        presets: all presets analysed.
        names: as in `gate`: `k3`, `drift2.k3`, `PRESET.ess_tokens`; a preset by name or alias.
        groups: number of groups in the dump.
    """
    rows = {name: found for name in names if (found := _row(name, presets)) is not None}
    return {
        label: _read(_reader(_sums(sums, apart.sums.get(label), presets), groups), rows)
        for label, sums in steps.sums.items()
    }


def _reader(sums: Mapping[str, Tensor], groups: int) -> Reader:
    """Read one step's sums; a step has at most as many groups as sequences."""
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
        except KeyError:  # a column that the dump, or this step, does not have
            continue
    return found


def _row(name: str, presets: Sequence[Preset]) -> tuple[Formula, str] | None:
    """Find the formula of a name, and the prefix of its columns."""
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
