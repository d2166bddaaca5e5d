"""The numbers that each trainer would have logged for this batch, under its own names."""

from __future__ import annotations

from dataclasses import replace

from offpol_diag.blocks import Section, Table, Text
from offpol_diag.report.sections.answer import trainer_of
from offpol_diag.report.sections.presets import FEW, Presets, by_family
from offpol_diag.summary import Number, Summary

LEAD = (
    "The numbers that the trainer itself would have logged for this batch, under its own names and by its "
    "own definitions, to be put beside its curves. A name shared with a number above need not mean the same. "
    "What differs between presets stands in the JSON (`as_logged`)."
)
NOTE = "–: the trainer does not log that name under that preset."


def logs(summary: Summary) -> Section | None:
    """Return per set of names the numbers equal under all presets; of the recommended preset, all."""
    every = {name: one for name, one in by_family(summary).items() if one.as_logged}
    chosen = (summary.recommendation and summary.recommendation.method) or ""
    first = {name: one for name, one in every.items() if name == chosen}
    tables = [_differing(next(iter(first.values())).logs or "", first)] if first else []
    for name in dict.fromkeys(one.logs or "" for one in every.values()):
        some = {key: one for key, one in every.items() if (one.logs or "") == name}
        tables += _same(name, some) if len(some) > 1 else [] if first == some else [_differing(name, some)]
    many, own = len(every) > FEW, trainer_of(summary)
    tables = [
        replace(one, collapsed=many and place > 0 and not (own and one.id.startswith(f"logged-{own}")))
        for place, one in enumerate(tables)
    ]
    more = " So do the names of other trainers." if any(one.collapsed for one in tables) else ""
    left_out = len(summary.run.logs_left_out)
    if left_out:
        more += f" The {left_out} other presets' are computed with `--presets all`."
    blocks = (Text(LEAD + more), *tables)
    return Section("logs", "As your trainer logs it", blocks, "Logs") if tables else None


def _same(logs: str, presets: Presets) -> list[Table]:
    """Return the names that all presets of one set log with one number."""
    first, *others = (one.as_logged for one in presets.values())
    rows = [
        (name, Number(value=value))
        for name, value in first.items()
        if all(name in one and one[name] == value for one in others)
    ]
    caption = f"As {logs} logs it: the same under {len(presets)} presets"
    header = ("name in the trainer", "number")
    return [Table(f"logged-{logs}-same", caption, header, rows, folded=True)] if rows else []


def _differing(logs: str, presets: Presets) -> Table:
    """Return all names of some presets, side by side."""
    names = dict.fromkeys(name for one in presets.values() for name in one.as_logged)
    rows = tuple(
        (name, *(Number(value=o.as_logged[name]) if name in o.as_logged else None for o in presets.values()))
        for name in names
    )
    notes = (NOTE,) if any(None in row for row in rows) else ()
    caption = f"As {logs} logs it, under {', '.join(presets)}"
    return Table(f"logged-{logs}", caption, ("name in the trainer", *presets), rows, notes, folded=True)
