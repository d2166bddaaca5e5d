"""What each trainer would have logged for this batch, under its own names."""

from __future__ import annotations

from offpol_diag.blocks import Section, Table, Text
from offpol_diag.summary import Number, PresetResult, Summary

LEAD = (
    "Below are the numbers the trainer itself would have logged for this batch, under its own names and by "
    "its own definitions, to be put beside its curves. A name it shares with a number above need not mean "
    "the same."
)

NOTE = "–: the trainer does not log that name under that preset."


def crosswalk(summary: Summary) -> Section | None:
    """One folded table per set of names, with a column for each preset that is logged under them."""
    logging = {name: preset for name, preset in summary.presets.items() if preset.as_logged}
    sets = dict.fromkeys(preset.logs for preset in logging.values())
    tables = tuple(
        _table(logs, {name: preset for name, preset in logging.items() if preset.logs == logs})
        for logs in sets
    )
    return Section("crosswalk", "As your trainer logs it", (Text(LEAD), *tables)) if tables else None


def _table(logs: str | None, presets: dict[str, PresetResult]) -> Table:
    names = dict.fromkeys(name for preset in presets.values() for name in preset.as_logged)
    rows = tuple((name, *(_logged(preset, name) for preset in presets.values())) for name in names)
    header = ("name in the trainer", *presets)
    caption = f"As {logs} logs it, under {len(presets)} {'preset' if len(presets) == 1 else 'presets'}"
    return Table(f"logged-{logs}", caption, header, rows, (NOTE,), wide=True, collapsed=True)


def _logged(preset: PresetResult, name: str) -> Number | None:
    """The number; None where the trainer does not log that name under this preset."""
    return Number(value=preset.as_logged[name]) if name in preset.as_logged else None
