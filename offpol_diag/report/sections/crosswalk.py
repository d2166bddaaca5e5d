"""Section on the metrics that each trainer would have logged for this batch, under its own names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from offpol_diag.blocks import Cell, Section, Table, Text
from offpol_diag.report.sections.shortlist import Presets, judged
from offpol_diag.summary import Number, PresetResult, Summary

LEAD = (
    "Below are the numbers the trainer itself would have logged for this batch, under its own names and by "
    "its own definitions, to be put beside its curves. A name it shares with a number above need not mean "
    "the same."
)

NOTE = "–: the trainer does not log that name under that preset."

ACROSS = 8
"""Maximum number of presets side by side; further ones go into another table."""


def crosswalk(summary: Summary) -> Section | None:
    """Return per set of names the numbers equal under all presets, then the rest by preset."""
    logging = {name: preset for name, preset in judged(summary).items() if preset.as_logged}
    sets = dict.fromkeys(one.logs or "" for name, one in summary.presets.items() if name in logging)
    tables = tuple(table for logs in sets for table in _set(logs, logging))
    return Section("crosswalk", "As your trainer logs it", (Text(LEAD), *tables)) if tables else None


def _set(logs: str, logging: Presets, across: int = ACROSS) -> Iterator[Table]:
    """Yield the tables of one set of names."""
    presets = {name: one for name, one in logging.items() if (one.logs or "") == logs}
    same, apart = _split(presets)
    if same:
        yield _same(logs, presets, same)
    if apart and len(apart) <= across < len(presets):
        yield _by_preset(logs, presets, apart)
    elif apart:
        yield from _by_name(logs, presets, apart, across)


def _split(presets: Presets) -> tuple[list[str], list[str]]:
    """Split names into those with equal numbers under all of several presets, and the others."""
    names = dict.fromkeys(name for one in presets.values() for name in one.as_logged)
    same = [name for name in names if len(presets) > 1 and _alike(name, presets)]
    return same, [name for name in names if name not in set(same)]


def _alike(name: str, presets: Presets) -> bool:
    everywhere = all(name in one.as_logged for one in presets.values())
    return everywhere and len({one.as_logged[name] for one in presets.values()}) == 1


def _same(logs: str, presets: Presets, names: list[str]) -> Table:
    first = next(iter(presets.values()))
    caption = f"As {logs} logs it: the same under {_all(presets)}"
    return _folded(
        f"logged-{logs}-same", caption, ("number",), [(name, _logged(first, name)) for name in names]
    )


def _by_preset(logs: str, presets: Presets, names: list[str]) -> Table:
    rows = [(title, *(_logged(one, name) for name in names)) for title, one in presets.items()]
    caption = f"As {logs} logs it: what differs between {_all(presets)}"
    return _folded(f"logged-{logs}", caption, names, rows, "preset")


def _by_name(logs: str, presets: Presets, names: list[str], across: int) -> Iterator[Table]:
    several = len(presets) > across
    for place, some in enumerate(_portions(presets, across), 1):
        here = [name for name in names if any(name in one.as_logged for one in some.values())]
        rows = [(name, *(_logged(one, name) for one in some.values())) for name in here]
        which = f"presets {', '.join(some)}" if several else _all(presets)
        caption = f"As {logs} logs it{': what differs between' if len(presets) > 1 else ', under'} {which}"
        yield _folded(f"logged-{logs}{f'-{place}' if place > 1 else ''}", caption, some, rows)


def _portions(presets: Presets, across: int) -> Iterator[Presets]:
    """Split the presets into groups of similar size, at most `across` each."""
    portions = -(-len(presets) // across)
    left = iter(presets.items())
    while some := dict(islice(left, -(-len(presets) // portions))):
        yield some


def _folded(
    identity: str,
    caption: str,
    columns: Iterable[str],
    rows: Sequence[tuple[Cell, ...]],
    label: str = "name in the trainer",
) -> Table:
    notes = (NOTE,) if any(cell is None for row in rows for cell in row) else ()
    header = (label, *columns)
    return Table(identity, caption, header, tuple(rows), notes, wide=True, collapsed=True, lookup=True)


def _all(presets: Presets) -> str:
    return f"the preset {next(iter(presets))}" if len(presets) == 1 else f"{len(presets)} presets"


def _logged(preset: PresetResult, name: str) -> Number | None:
    """Return the number; None if the trainer does not log that name under this preset."""
    return Number(value=preset.as_logged[name]) if name in preset.as_logged else None
