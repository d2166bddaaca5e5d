"""The answer of a command as data, which terminal, Markdown and page draw: they say the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offpol_diag.metrics import Tone, tone
from offpol_diag.number import UNRELIABLE, Number
from offpol_diag.numerals import count, doubted, formatted, minus
from offpol_diag.report.charts import Chart
from offpol_diag.table import Cell, Table

EXPLAIN = "offpol-diag doctor --explain"
"""What prints all that is known of a cause."""
MARKS = {"ok": "✓ ", "no": "✗ ", "un": "? ", "": ""}
"""Whether a check passed, failed, or could not be made."""
TICKS, MOST_TICKS = "▁▂▃▄▅▆▇█", 9


@dataclass(frozen=True)
class Line:
    """A line of evidence: of a check with its mark, a key of `MARKS`; `detail` explains it, in sentences."""

    text: str
    mark: str = ""
    detail: str = ""

    def __str__(self) -> str:
        """Return the line as text."""
        text = f"{self.text.rstrip('.')}. {self.detail}" if self.detail else self.text
        return f"{MARKS[self.mark]}{text}"


@dataclass(frozen=True)
class Fact:
    """A finding under its label.

    Attributes:
        label: what it is about.
        sentence: the finding, or what follows its title.
        title: the finding in a phrase, where the page makes a card of it, whose heading it is.
        lines: what it rests on, where there is room.
        table: numbers beside it, on its card.
        code: name and text of what is to be pasted, on its card.
    """

    label: str
    sentence: str
    title: str = ""
    lines: tuple[Line, ...] = ()
    table: Table | None = None
    code: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """Title and sentence in a row."""
        title = f"{self.title.rstrip('.')}." if self.title else ""
        return f"{title} {self.sentence}".strip()


@dataclass(frozen=True)
class Tile:
    """A headline number.

    Attributes:
        label: its name for readers; `key`: its name for the gate.
        number: its value, with the interval.
        band: how it is judged; empty where a heavy tail or a bug decides the number.
        remark: what else there is to say of the value.
        curve: its heights over the steps, on a log scale where its metric has one; none without a trend.
        trend: the ends of the curve, or that there is no trend; empty where nothing is known of the steps.
    """

    label: str
    key: str
    number: Number
    band: str = ""
    remark: str = ""
    curve: Sequence[float | None] = ()
    trend: str = ""

    @property
    def tone(self) -> Tone | None:
        """How bad its band is."""
        return tone(self.band) if self.band else None

    @property
    def doubt(self) -> bool:
        """Whether the value is unreliable, and gets a star."""
        return doubted(self.number)

    @property
    def value(self) -> str:
        """The value as text, without a star."""
        return minus(formatted(self.number).value.removesuffix("*"))

    @property
    def interval(self) -> str:
        """The interval as text."""
        return minus(formatted(self.number).interval)


@dataclass(frozen=True)
class Answer:
    """All that a command found.

    Attributes:
        about: what was read.
        word: a judgement before the sentence; may be empty.
        sentence: the verdict; with `word` it is what `--quiet` prints.
        tone: how bad it is.
        more: what else is to be said at once.
        cautions: what limits every number.
        facts: further findings.
        tiles: the headline numbers; `heavy`: which of them a heavy tail leaves unknown.
        tables: `shown` says which of them stand where.
        charts: the charts.
        config: the configuration to paste.
        next: label and command to go on with.
        remarks: how it was made, and what was left out.
        heading: the heading in a pull request.
    """

    about: str
    word: str
    sentence: str
    tone: Tone
    more: str = ""
    cautions: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    tiles: tuple[Tile, ...] = ()
    heavy: str = ""
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    config: str = ""
    next: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    heading: str = "offpol-diag"

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        return f"{self.word}: {self.sentence}" if self.word else self.sentence

    @property
    def numbers(self) -> Table:
        """The tiles as a table of texts: value with its interval, band, and remark or curve."""
        rows = [
            (
                one.label,
                f"{one.value}{'*' * one.doubt} {one.interval}".strip(),
                one.band,
                one.remark or "  ".join(filter(None, (sparkline(one.curve), one.trend))),
            )
            for one in self.tiles
        ]
        notes = (f"* {self.heavy}",) if self.heavy else ()
        steps = "by step" if any(one.trend for one in self.tiles) else ""
        return Table("tiles", "", ("number", "value [95% interval]", "band", steps), rows, notes)


def sparkline(heights: Sequence[float | None]) -> str:
    """Return a curve in at most `MOST_TICKS` characters, blank where a height is missing."""
    some = heights[:: max(1, math.ceil(len(heights) / MOST_TICKS))]
    known = [y for y in some if y is not None]
    if len(known) < 2:
        return ""
    low, top = min(known), len(TICKS) - 1
    span = max(known) - low or 1.0
    return "".join(" " if y is None else TICKS[round(top * (y - low) / span)] for y in some)


def listed(names: Sequence[str]) -> str:
    """Return names as a list in words."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ---------------------------------------------------------------- cells of tables


class Shown(NamedTuple):
    """A cell as text; `note`: a caution on it, of an unknown number the reason; `none`: it does not apply."""

    text: str
    interval: str = ""
    note: str = ""
    kind: Literal["number", "text", "unknown", "none"] = "text"


def shown(cell: Cell) -> Shown:
    """Return the parts of a cell."""
    if cell is None:
        return Shown("–", kind="none")
    if isinstance(cell, str):
        return Shown(cell)
    if isinstance(cell, int):
        return Shown(count(cell), kind="number")
    value, interval = map(minus, formatted(cell))
    if cell.known:
        return Shown(value, interval, minus((cell.note or "").removeprefix(UNRELIABLE)), "number")
    reason = ". ".join(filter(None, (value if cell.unknown else "", cell.note)))
    return Shown("unknown" if cell.unknown else value, "", reason, "unknown")


def footnotes(rows: Iterable[Iterable[Shown]]) -> dict[str, int]:
    """Number the notes of a table's cells in reading order; equal notes share a number."""
    notes = dict.fromkeys(cell.note for row in rows for cell in row if cell.note)
    return {note: number for number, note in enumerate(notes, 1)}


def texts(table: Table) -> tuple[list[list[str]], list[str]]:
    """Return a table's cells as text, with their intervals and the numbers of their notes, and the notes."""
    rows = [[shown(cell) for cell in row] for row in table.rows]
    numbers = {note: f"({number})" for note, number in footnotes(rows).items()}
    parts = [[(one.text, one.interval, numbers.get(one.note)) for one in row] for row in rows]
    cells = [[" ".join(filter(None, cell)) for cell in row] for row in parts]
    return cells, [f"{number} {note}" for note, number in numbers.items()]
