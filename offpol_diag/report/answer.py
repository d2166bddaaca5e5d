"""The answer of a command, before it is drawn: terminal, Markdown and page say the same of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from offpol_diag.metrics import Tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, doubted, formatted, minus
from offpol_diag.report.plot import Chart
from offpol_diag.table import Cell, Table

EXPLAIN = "offpol-diag doctor --explain"
"""What prints all that is known of a cause."""
MARKS = {"ok": "✓ ", "no": "✗ ", "un": "? ", "": ""}
"""Whether a check passed, failed, or could not be made."""


@dataclass(frozen=True)
class Line:
    """A line of evidence.

    Attributes:
        mark: of a check: a key of `MARKS`.
        detail: what explains it.
        brief: whether the sentence of its fact has this text too.
        said: whether that sentence says all of it, so that only a card of the page has the line.
    """

    text: str
    mark: str = ""
    detail: str = ""
    brief: bool = False
    said: bool = False

    def __str__(self) -> str:
        """Return the line as text."""
        goes_on = self.detail[:1].islower() or self.detail[:1].isdigit()
        detail = f"{': ' if goes_on else '. '}{self.detail}" if self.detail else ""
        return f"{MARKS[self.mark]}{self.text.rstrip('.') if detail else self.text}{detail}"


@dataclass(frozen=True)
class Fact:
    """A labelled sentence, and the card that the page makes of it.

    Attributes:
        label: what it is about.
        sentence: the finding; where it is empty, the lines are said in its place.
        title: the card's heading; "" where the page has no card for it.
        lines: what it rests on.
        table: numbers beside it.
        code: name and text of what is to be pasted.
        spelled: whether the lines are said everywhere, not only where there is room.
    """

    label: str
    sentence: str
    title: str = ""
    lines: tuple[Line, ...] = ()
    table: Table | None = None
    code: tuple[tuple[str, str], ...] = ()
    spelled: bool = False

    @property
    def evidence(self) -> list[str]:
        """What it rests on, a line each, without what its sentence says."""
        return [str(line) for line in self.lines if not line.said]


@dataclass(frozen=True)
class Tile:
    """A headline number: its name, how it is judged, and a small curve of it.

    Attributes:
        number: the number.
        interval: what stands below; empty for the number's own interval.
        below: at the foot: the ends of the curve.
        key: the number's name for the gate.
        remark: what stands beside the interval.
        short: whether it stands in the short answer.
        flat, log: whether the curve shows no trend, and is drawn on a log scale.
    """

    label: str
    number: Number
    band: str = ""
    tone: Tone | None = None
    interval: str = ""
    below: str = ""
    key: str = ""
    curve: Sequence[float | None] = ()
    remark: str = ""
    short: bool = False
    flat: bool = False
    log: bool = False

    @property
    def doubt(self) -> bool:
        """Whether the value is unreliable, and gets a star."""
        return doubted(self.number)

    @property
    def unit(self) -> str:
        """The unit, beside the value."""
        return "nats/token" if self.number.unit == "nats" else ""

    @property
    def value(self) -> str:
        """The value as text, without a star."""
        return minus(formatted(replace(self.number, note=None)).value)

    @property
    def beside(self) -> str:
        """The interval as text, or what stands in its place."""
        return minus(self.interval or formatted(self.number).interval)

    @property
    def text(self) -> str:
        """Value, interval and remark in one line."""
        remark = f"({self.remark})" if self.remark else ""
        return " ".join(filter(None, (f"{self.value}{'*' * self.doubt}", self.beside, remark)))


@dataclass(frozen=True)
class Answer:
    """All that a command found.

    Attributes:
        about: what was read.
        word: a judgement before the sentence; may be empty.
        sentence: the verdict; with `word` and `interval` it is what `--quiet` prints.
        tone: how bad it is.
        interval: the interval of the number in the sentence.
        more: what else is to be said at once.
        cautions: what limits every number.
        facts: further findings.
        lead: what the tiles are; `tiles`: the headline numbers; `over`: what their curves run over.
        heavy: which of them a heavy tail leaves unknown.
        tables: `shown` says which of them stand where.
        charts: the charts.
        code: caption and text to paste.
        next: label and command to go on with; `further`: those that are told where there is room.
        remarks: how it was made, and what was left out.
        heading: the heading in a pull request.
    """

    about: str
    word: str
    sentence: str
    tone: Tone
    interval: str = ""
    more: str = ""
    cautions: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    lead: str = ""
    tiles: tuple[Tile, ...] = ()
    over: str = ""
    heavy: str = ""
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    code: tuple[tuple[str, str], ...] = ()
    next: tuple[tuple[str, str], ...] = ()
    further: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    heading: str = "offpol-diag"

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        word = f"{self.word}: " if self.word else ""
        return f"{word}{self.sentence}{f' {self.interval}' if self.interval else ''}"


def listed(names: Sequence[str]) -> str:
    """Return names as a list in words."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ---------------------------------------------------------------- cells of tables


class Shown(NamedTuple):
    """The parts of a cell.

    Attributes:
        text: the value.
        interval: the interval, or empty.
        note: a caution on the cell, shown as a footnote; of an unknown number the reason.
        kind: `none` where it does not apply.
    """

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
    value, interval = formatted(cell)
    if not cell.known:
        reason = ". ".join(filter(None, (value if cell.unknown else "", cell.note)))
        return Shown("unknown" if cell.unknown else value, "", reason, "unknown")
    return Shown(
        minus(value), minus(interval), minus((cell.note or "").removeprefix("unreliable: ")), "number"
    )


def footnotes(rows: Iterable[Iterable[Shown]]) -> dict[str, int]:
    """Number the notes of a table's cells in reading order; equal notes share a number."""
    notes = dict.fromkeys(cell.note for row in rows for cell in row if cell.note)
    return {note: number for number, note in enumerate(notes, 1)}


def texts(table: Table) -> tuple[list[list[str]], list[str]]:
    """Return a table's cells as text, with their intervals and the numbers of their notes, and the notes."""
    rows = [[shown(cell) for cell in row] for row in table.rows]
    numbers = {note: f"({number})" for note, number in footnotes(rows).items()}
    cells = [
        [" ".join(filter(None, (one.text, one.interval, numbers.get(one.note)))) for one in row]
        for row in rows
    ]
    return cells, [f"{number} {note}" for note, number in numbers.items()]
