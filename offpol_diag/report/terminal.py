"""An answer in a terminal: at most 36 lines of 80 columns, and with --verbose the tables behind it.

What does not fit is left out from the right, and named; a pipe is `PIPE_WIDTH` wide and omits nothing: there
columns move below. Intervals always stand with their numbers, and nothing depends on colour.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NoReturn

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text as Styled

from offpol_diag.metrics import Tone
from offpol_diag.number import Number
from offpol_diag.numerals import minus, written
from offpol_diag.printable import disarmed, printable
from offpol_diag.report.answer import Answer, Fact, Tile
from offpol_diag.report.cells import footnotes, shown
from offpol_diag.table import Table

PIPE_WIDTH, PROSE_WIDTH = 120, 100
TICKS, TICKS_WIDTH = "▁▂▃▄▅▆▇█", 9
LINES, MOST_EVIDENCE = 36, 2
"""Lines of the short answer, and of the evidence of a candidate in it."""
SHORTER = (
    *((4, 4, 5), (4, 2, 5), (3, 2, 5), (2, 2, 5), (2, 0, 5), (1, 0, 5)),
    *((1, 0, 4), (1, 0, 3), (1, 0, 2), (1, 0, 0)),
)
"""Forms of the short answer, tried until it has its lines: lines of a fact, of the warnings, corrections."""
MOST, CAUTIONS = 4, 3
"""Lines of what to do and of what would decide, in every form; cautions in the short answer."""
SENTENCES = re.compile(r"(?<=[.?!]) (?=[A-ZΔχπ|0-9])")
PADDING, TEXT_WIDTH, WORD_WIDTH = 2, 14, 48
"""Blanks between columns; least width of text; width up to which words stay whole in a pipe."""
STYLES: dict[Tone, str] = {"good": "bold green", "info": "bold", "warn": "bold yellow", "bad": "bold red"}
ASCII = str.maketrans(
    dict(zip("▁▂▃▄▅▆▇█·─│•✓✗–−×…’", "_.:-=+*#.-|*vx--x.'", strict=True))
    | {"→": "->", "≤": "<=", "≥": ">=", "±": "+-", "Δ": "Delta", "π": "pi", "Π": "prod", "∏": "prod"}
    | {"θ": "theta", "χ": "chi", "²": "2", "κ": "kappa", "λ": "lambda", "Σ": "sum", "∑": "sum", "√": "sqrt"}
    | {"≈": "~", "\u0302": "hat", "←": "<-", "↑": "^", "↓": "v", "∞": "inf", "°": "deg", "‖": "||"}
)
"""Plain spellings of the characters that an encoding may lack."""


class PipeConsole(Console):
    """A console that raises on a broken pipe instead of exiting with 1.

    Attributes:
        whole: whether nothing may be omitted for lack of width.
    """

    whole = False

    def on_broken_pipe(self) -> NoReturn:
        """Re-raise the error, for which the command line has its own exit code."""
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console on stdout, as wide as `COLUMNS` or the terminal; pipes use `PIPE_WIDTH`, complete."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    console = PipeConsole(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width, console.whole = PIPE_WIDTH, True
    return console


def plain(text: str, encoding: str) -> str:
    """Return text that the encoding can hold, spelled in ASCII where it cannot."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "replace").decode(encoding)
    except LookupError:
        return text
    return text


def terminal(
    answer: Answer, verbose: bool = False, quiet: bool = False, console: Console | None = None
) -> str:
    """Return an answer as text for stdout.

    Args:
        answer: the answer.
        verbose: whether to draw the tables behind it and the findings of its charts.
        quiet: whether to draw the verdict in one line, if not verbose.
        console: where it would be drawn; None for stdout.
    """
    console = console or make_console()
    if quiet and not verbose:
        return f"{disarmed(plain(printable(answer.headline), console.encoding))}\n"
    room = max(LINES, LINES * 80 // console.width)  # of a narrow terminal the same text
    room += sum(len(code.splitlines()) + 2 for _, code in answer.code)
    found: list[str] = []
    further = "".join(f"{_command(*one, console)}\n" for one in answer.further[: None if verbose else 1])
    shorten = not verbose and any(one.short for one in answer.tiles)
    for form in SHORTER if shorten else SHORTER[:1]:
        with console.capture() as drawn:
            _Screen(console, verbose, *form).draw(answer)
        found.append(_settled(drawn.get(), console))
        if found[-1].count("\n") <= room:
            break
    else:
        found = found[:3]  # where there is no room for it, no sentence is cut for it
    fits = verbose or found[-1].count("\n") < room
    return found[-1] + further * fits


def _command(label: str, command: str, console: Console) -> str:
    """Return a command to go on with, on a line."""
    return disarmed(plain(printable(f"{label:<8}{command}"), console.encoding))


def tables(found: Sequence[str | Table]) -> str:
    """Return paragraphs and tables as text for stdout."""
    console = make_console()
    with console.capture() as drawn:
        screen = _Screen(console, True)
        for one in found:
            if isinstance(one, Table):
                screen.table(one)
            else:
                screen.blank()
                screen.text(one)
    return _settled(drawn.get(), console)


def _settled(text: str, console: Console) -> str:
    lines = text.split("\n")[:-1]
    return "".join(f"{disarmed(plain(line.rstrip(), console.encoding))}\n" for line in lines)


@dataclass(frozen=True)
class _Screen:
    """A console, whether everything is drawn on it, and else the form of the short answer."""

    console: Console
    verbose: bool
    most: int = SHORTER[0][0]
    warnings: int = SHORTER[0][1]
    rows: int = SHORTER[0][2]

    @property
    def width(self) -> int:
        return min(self.console.width, PIPE_WIDTH if self.verbose else PROSE_WIDTH)

    @property
    def whole(self) -> bool:
        return getattr(self.console, "whole", False)

    def draw(self, answer: Answer) -> None:
        """Draw an answer: verdict, facts, numbers, tables, what can be pasted, and how to go on."""
        self.text(answer.about)
        cautions = answer.cautions if self.verbose else answer.cautions[:CAUTIONS]
        for one in cautions:
            self.text(f"! {one}", "yellow", 2, 100 if self.verbose else self.most)
        if more := len(answer.cautions) - len(cautions):
            self.text(f"! {more} more: -v", "yellow")
        self.blank()
        self.text(answer.headline, STYLES[answer.tone])
        self.text(answer.more, STYLES[answer.tone] if answer.tone != "good" else "")
        if answer.facts:
            self.blank()
            self.facts(answer.facts)
        if short := [one for one in answer.tiles if one.short]:
            self.tiles(short, answer)
        hidden = [one.caption for one in answer.tables if one.shown == "more" and one.caption and one.rows]
        for table in answer.tables:
            if table.rows and (table.shown == "always" or (self.verbose and table.shown == "more")):
                cut = table.id == "corrections" and not self.verbose
                few = replace(
                    table, rows=table.rows[: self.rows], notes=table.notes if self.warnings > 2 else ()
                )
                if few.rows or not cut:
                    self.table(few if cut else table)
        found = [one.title for one in answer.charts] if self.verbose else []
        self.blank(bool(found))
        for text in found:
            self.text(f"• {text}", indent=2)
        for caption, code in answer.code:
            self.blank()
            self.text(f"{caption}:")
            for line in code.splitlines():
                self.console.print(Styled(printable(line)), soft_wrap=True)
        self.blank()
        for text in answer.remarks:
            self.text(text)
        if hidden and not self.verbose and not any(one.short for one in answer.tiles):
            self.text(f"-v: {'; '.join(hidden)}.", "dim")
        for label, command in answer.next:
            self.console.print(Styled(printable(f"{label:<8}{command}")), soft_wrap=True)

    def blank(self, wanted: bool = True) -> None:
        """Draw an empty line."""
        if wanted:
            self.console.print()

    def text(self, text: str, style: str = "", indent: int = 0, most: int = 1000) -> None:
        """Draw a paragraph, wrapped to a readable width, at most so many lines; further ones are indented."""
        for line in _wrapped(printable(minus(text)), self.width, most, indent):
            self.console.print(Styled(line, style=style))

    def facts(self, facts: Sequence[Fact]) -> None:
        """Draw facts beside their labels; of long ones the first lines."""
        tabled = self.verbose  # with -v a table has all that is shortened first
        facts = [one for one in facts if self._sentence(one) and not (tabled and one.shortened == "first")]
        margin = min(max((len(one.label) for one in facts), default=0), 20) + 2
        last = ""
        for one in facts:
            label = "" if one.label == last else printable(one.label)
            for line in self._lines(one, self.width - margin):
                self.console.print(Styled(f"{label:<{margin}}{line}"))
                label = ""
            last = one.label

    def _sentence(self, fact: Fact) -> bool:
        return bool(fact.sentence or (fact.lines and (self.verbose or fact.spelled)))

    def _lines(self, fact: Fact, width: int) -> Iterator[str]:
        most = {"last": MOST, "first": self.warnings}.get(fact.shortened, self.most)
        if fact.sentence and not self.verbose:
            yield from _sentences(printable(minus(fact.sentence)), width, most, MOST) if most else ()
            return
        yield from _wrapped(printable(minus(fact.sentence)), width)
        if fact.sentence:
            yield from (row for text in evidence(fact) for row in _wrapped(printable(text), width, indent=3))
            return
        for line in fact.lines:
            yield from _wrapped(printable(minus(line.text)), width, indent=3)
            least = 100 if self.verbose else min(MOST_EVIDENCE, self.most, self.rows)
            for side in re.split(r" (?=Against: )", line.detail) if line.detail and least else ():
                rows = _sentences(printable(minus(side)), width - 3, least, least, 2)
                yield from (f"   {row}" for row in rows)

    def tiles(self, tiles: Sequence[Tile], answer: Answer) -> None:
        """Draw headline numbers with their bands and curves."""
        notes = (f"* {answer.heavy}",) if answer.heavy else ()
        header = ("", "value", "band", answer.over)
        for ends in (True, False):  # of the curves, where there is room
            rows = [(one.label, tile_text(one), one.band, _course(one, ends)) for one in tiles]
            table = Table("tiles", "", header, rows, notes)
            if self.whole or _fits(_columns(table, False)[0], self.console.width):
                break
        self.table(table)

    def table(self, table: Table) -> None:
        """Draw a table, a grid below the other where its columns do not fit, or else without them."""
        columns, notes = _columns(table, self.whole)
        pages = _pages(columns, self.console.width)
        some = len(columns) if self.whole or table.shown == "always" else len(pages[0])
        left = [one.header for one in columns[some:]]
        if left:  # no note is said of them
            table = replace(table, header=table.header[:some], rows=[row[:some] for row in table.rows])
            columns, notes = _columns(table, self.whole)
            pages = [columns]
        self.blank()
        self.text(table.caption)
        for page in pages:
            for line in _grid(page, self.console.width):
                self.console.print(Styled(line), soft_wrap=True)
        numbered = [f"({place}) {note}" for note, place in notes.items()]
        more = [f"Left out for want of width: {', '.join(left)} (--json has all)."] if left else []
        for note in (" ".join(numbered), *table.notes, *more):
            self.text(note, "dim", 2 if note.startswith("*") else 0)


def evidence(fact: Fact) -> Iterator[str]:
    """Yield what a fact rests on, a line each, without the sentences that the fact itself says."""
    said = fact.sentence.lower()
    for line in fact.lines:
        mark = {"ok": "✓ ", "no": "✗ ", "un": "? "}.get(line.mark, "")
        parts = SENTENCES.split(line.text)
        text = " ".join(part for part in parts if line.detail or part.lower().rstrip(".") not in said)
        between = ": " if line.detail[:1].islower() or line.detail[:1].isdigit() else ". "
        if text:
            yield minus(f"{mark}{text.rstrip('.')}{between}{line.detail}" if line.detail else f"{mark}{text}")


def _course(one: Tile, ends: bool) -> str:
    drawn = "no trend" if one.flat else sparkline(one.curve, one.log and _wide(one.curve), TICKS_WIDTH)
    return f"{drawn:<{TICKS_WIDTH}}{f'  {one.below}' if ends else ''}" if drawn else ""


def tile_text(one: Tile) -> str:
    """Return the value of a tile with its interval and what stands beside it."""
    if isinstance(one.number, str):
        return one.number
    value, interval = written(one.number)
    beside = f"({one.interval})" if one.interval else one.remark and f"({one.remark})"
    return minus(" ".join(part for part in (value, interval, beside) if part))


def _wide(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value is not None]
    return len(known) > 1 and max(known) > 30 * min(known) > 0


def _sentences(text: str, width: int, most: int, first: int, indent: int = 0) -> list[str]:
    """Break as many sentences of a text as have room in so many lines; of the first one `first` lines."""
    said = SENTENCES.split(text)
    for many in range(len(said), 1, -1):
        rows = _wrapped(" ".join(said[:many]), width, indent=indent)
        if len(rows) <= most:
            return rows
    return _wrapped(said[0], width, first, indent)


def _wrapped(text: str, width: int, most: int = 1000, indent: int = 0, least: int = 20) -> list[str]:
    """Break a text into lines, at most so many."""
    hanging = {"subsequent_indent": " " * indent, "max_lines": most, "placeholder": " …"}
    return textwrap.wrap(text, max(width, least), break_on_hyphens=False, **hanging)  # type: ignore[arg-type]


# ---------------------------------------------------------------- columns


@dataclass(frozen=True)
class _Column:
    """A column of formatted cells, with its natural and its least width."""

    header: str
    cells: tuple[str, ...]
    natural: int
    least: int


def _columns(table: Table, whole: bool) -> tuple[list[_Column], dict[str, int]]:
    """Return the columns of a table as text, and the notes on its cells by their number."""
    cells = [[shown(cell, terse=True) for cell in row] for row in table.rows]
    notes, columns = footnotes(cells), []
    for place, head in enumerate(table.header):
        marked = ((one, f"({notes[one.note]})" if one.note else "") for one in (row[place] for row in cells))
        texts = tuple(printable(" ".join(filter(None, (*one[:2], mark)))) for one, mark in marked)
        numeric = any(isinstance(row[place], int | Number) for row in table.rows) or table.id == "tiles"
        header = printable(head)
        natural = max(cell_len(text) for text in (header, *texts))
        unbroken = (word for text in texts if whole or place == 0 for word in text.split())
        words = max(map(cell_len, unbroken), default=0)
        least = natural if numeric else min(natural, max(TEXT_WIDTH, min(words, WORD_WIDTH)))
        columns.append(_Column(header, texts, natural, least))
    return columns, notes


def _pages(columns: Sequence[_Column], width: int) -> list[Sequence[_Column]]:
    """Split the columns into groups that fit, each with the first column and at least one other."""
    label, rest = columns[:1], list(columns[1:])
    pages: list[Sequence[_Column]] = []
    while rest or not pages:
        many = max((n for n in range(2, len(rest) + 1) if _fits([*label, *rest[:n]], width)), default=1)
        pages.append([*label, *rest[:many]])
        rest = rest[many:]
    return pages


def _fits(columns: Sequence[_Column], width: int) -> bool:
    return sum(column.least + PADDING for column in columns) - PADDING <= width


def _grid(columns: Sequence[_Column], width: int) -> Iterator[str]:
    """Yield the lines of a grid: the header over a rule, then the rows; long texts are wrapped."""
    widths = [column.natural for column in columns]
    room = width - PADDING * (len(columns) - 1)
    while sum(widths) > room:
        spare = [at for at, column in enumerate(columns) if widths[at] > column.least]
        spare = spare or [at for at, wide in enumerate(widths) if wide > TEXT_WIDTH]  # two are too wide
        if not spare:
            break
        widths[max(spare, key=lambda at: widths[at])] -= 1
    for place, row in enumerate(zip(*((one.header, *one.cells) for one in columns), strict=True)):
        cells = [_wrapped(cell, at, least=1) or [""] for cell, at in zip(row, widths, strict=True)]
        for line in zip_longest(*cells, fillvalue=""):
            yield (" " * PADDING).join(
                text + " " * (at - cell_len(text)) for text, at in zip(line, widths, strict=True)
            )
        if place == 0:
            yield "─" * (sum(widths) + PADDING * (len(columns) - 1))


def sparkline(values: Sequence[float | None], log: bool = False, width: int = 32) -> str:
    """Return a sparkline of at most `width` ticks, with gaps for missing values; empty for fewer than two."""
    step = max(1, math.ceil(len(values) / width))
    heights = [
        None
        if value is None or not math.isfinite(value) or (log and value <= 0)
        else math.log10(value)
        if log
        else value
        for value in values[::step]
    ]
    known = [height for height in heights if height is not None]
    if len(known) < 2:
        return ""
    low, high, top = min(known), max(known), len(TICKS) - 1
    span = high / 2 - low / 2  # which does not overflow
    places = (None if h is None else (h / 2 - low / 2) / span if span > 0 else 0.0 for h in heights)
    return "".join(" " if at is None else TICKS[round(top * at)] for at in places)
