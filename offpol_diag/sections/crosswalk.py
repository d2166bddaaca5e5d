"""What each trainer would have logged for this batch, under its own names."""

from __future__ import annotations

from offpol_diag.blocks import Section, Table, Text
from offpol_diag.summary import Number, PresetResult, Summary

LEAD = (
    "Below are the numbers the trainer itself would have logged for this batch, under its own names and by "
    "its own definitions, to be put beside its curves. A name it shares with a number above need not mean "
    "the same."
)


def crosswalk(summary: Summary) -> Section | None:
    """One folded table per preset."""
    tables = tuple(_table(name, preset) for name, preset in summary.presets.items() if preset.as_logged)
    return Section("crosswalk", "As your trainer logs it", (Text(LEAD), *tables)) if tables else None


def _table(name: str, preset: PresetResult) -> Table:
    rows = tuple((key, Number(value=value)) for key, value in preset.as_logged.items())
    caption = f"{name}, as {preset.logs} logs it" if preset.logs else name
    return Table(f"logged-{name}", caption, ("name in the trainer", "value"), rows, wide=True, collapsed=True)
