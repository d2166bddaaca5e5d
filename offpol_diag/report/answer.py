"""The answer of a command, before it is drawn: terminal, Markdown and page say the same of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offpol_diag.metrics import Tone
from offpol_diag.number import Number
from offpol_diag.numerals import minus, written
from offpol_diag.report.plot import Chart
from offpol_diag.table import Table

Mark = Literal["ok", "no", "un", ""]

EXPLAIN = "offpol-diag doctor --explain"
"""What prints all that is known of a cause."""


@dataclass(frozen=True)
class Line:
    """A line of evidence: whether a check passed, failed or could not be made; `detail` explains it.

    `brief` is whether a short answer says it too.
    """

    text: str
    mark: Mark = ""
    detail: str = ""
    brief: bool = False


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


@dataclass(frozen=True)
class Tile:
    """A headline number: its name, how it is judged, and a small curve of it.

    Attributes:
        number: the number, or what is said in its place.
        interval: what stands below; empty for the number's own interval.
        below: at the foot: the ends of the curve, or a remark.
        key: the number's name for the gate.
        unit, doubt, remark: what stands beside value and interval.
        short: whether it stands in the short answer.
        flat, log: whether the curve shows no trend, and is drawn on a log scale.
    """

    label: str
    number: Number | str
    band: str = ""
    tone: Tone | None = None
    interval: str = ""
    below: str = ""
    key: str = ""
    curve: Sequence[float | None] = ()
    unit: str = ""
    doubt: bool = False
    remark: str = ""
    short: bool = False
    flat: bool = False
    log: bool = False

    @property
    def value(self) -> str:
        """The value as text; unmarked, as `doubt` says that it is unreliable."""
        return minus(self.number) if isinstance(self.number, str) else minus(self._written[0])

    @property
    def beside(self) -> str:
        """The interval as text, or what stands in its place."""
        return minus(self.interval or ("" if isinstance(self.number, str) else self._written[1]))

    @property
    def _written(self) -> tuple[str, str]:
        assert isinstance(self.number, Number)
        value, interval = written(replace(self.number, note=None))
        return (value, interval) if self.number.known else ("–", "")


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
