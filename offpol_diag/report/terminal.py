"""An answer in a terminal: at most 36 lines of 80 columns, and with --verbose the tables behind it.

A short answer leaves out tables of presets, then whole sentences, never a part of one, the longest
paragraph's first. Columns of a table that do not fit stand below the others; nothing is cut. Intervals always
stand with their numbers, and nothing depends on colour. A pipe is `PIPE_WIDTH` wide.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from offpol_diag.metrics import Tone
from offpol_diag.numerals import minus
from offpol_diag.printable import disarmed, printable
from offpol_diag.report.answer import Answer, Fact, texts
from offpol_diag.table import Table

Row = tuple[str, str]
"""A line, and its style."""
PIPE_WIDTH, PROSE_WIDTH = 120, 100
LINES, CAUTIONS = 36, 3
"""Lines of the short answer, and cautions in it."""
TICKS, TICKS_WIDTH = "▁▂▃▄▅▆▇█", 9
WIDE = 30
"""Factor between its ends beyond which a curve is drawn on a log scale, if its number is one for that."""
SENTENCES = re.compile(r"(?<=[.?!]) (?=[A-ZΔχπ|0-9])")
WHOLE, WORD = 32, 48
"""Characters of a cell up to which it is never broken, and of a word in a longer one."""
STYLES: dict[Tone, str] = {"good": "bold green", "info": "bold", "warn": "bold yellow", "bad": "bold red"}


def make_console() -> Console:
    """Return a console on stdout, as wide as `COLUMNS` or the terminal; a pipe is `PIPE_WIDTH` wide."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_WIDTH
    return console


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
        return _drawn([(answer.headline, "")], console)
    width = min(console.width, PIPE_WIDTH if verbose else PROSE_WIDTH)
    shown = ("always", "more") if verbose else ("always",)
    some = [one for one in answer.tables if one.rows and one.shown in shown]
    top, tiles, bottom = (
        _top(answer, width, verbose),
        _tiles(answer, console),
        _bottom(answer, width, verbose),
    )
    tables = [row for one in some for row in _table(one, console)]
    said = list(_paragraphs(answer.facts, verbose))
    margin = min(max((len(one.label) for one in said), default=0), 20) + 2
    if tiles and not verbose:
        room = max(LINES, LINES * 80 // console.width)  # of a narrow terminal the same text
        room += sum(len(code.splitlines()) + 2 for _, code in answer.code)
        room -= len(top) + len(tiles) + len(bottom) + 1
        tables = tables if sum(one.height(width - margin) for one in said) <= room - len(tables) else []
        _shorten(said, room - len(tables), width - margin)
    rows: list[Row] = [("", "")] if said else []
    last = ""
    for one in said:
        for line in one.lines(width - margin):
            rows.append((f"{'' if one.label == last else one.label:<{margin}}{line}", ""))
            last = one.label
    return _drawn([*top, *rows, *tiles, *tables, *bottom], console)


def tables(found: Sequence[str | Table]) -> str:
    """Return paragraphs and tables as text for stdout."""
    console, rows = make_console(), list[Row]()
    for one in found:
        rows += _table(one, console) if isinstance(one, Table) else [("", ""), *_text(one, console.width)]
    return _drawn(rows, console)


def _drawn(rows: Sequence[Row], console: Console) -> str:
    """Return lines with their styles."""
    with console.capture() as drawn:
        for text, style in rows:
            console.print(Text(printable(text), style=style), soft_wrap=True)
    return "".join(f"{disarmed(line.rstrip())}\n" for line in drawn.get().split("\n")[:-1])


def _text(text: str, width: int, style: str = "", indent: int = 0) -> list[Row]:
    """Break a text into lines, all but the first indented."""
    lines = textwrap.wrap(
        printable(minus(text)), max(width, 20), break_on_hyphens=False, subsequent_indent=" " * indent
    )
    return [(line, style) for line in lines]


# ---------------------------------------------------------------- sentences


def _top(answer: Answer, width: int, verbose: bool) -> list[Row]:
    """Return what was read, what limits every number, and the verdict."""
    rows = _text(answer.about, width)
    some = answer.cautions if verbose else answer.cautions[:CAUTIONS]
    rows += [row for one in some for row in _text(f"! {one}", width, "yellow", 2)]
    if more := len(answer.cautions) - len(some):
        rows.append((f"! {more} more: -v", "yellow"))
    rows += [("", ""), *_text(answer.headline, width, STYLES[answer.tone])]
    return rows + _text(answer.more, width, STYLES[answer.tone] if answer.tone != "good" else "")


@dataclass
class Paragraph:
    """A paragraph beside its label, as sentences; an optional one may go whole where there is no room."""

    label: str
    sentences: list[str]
    indent: int = 0
    hanging: int = 0
    optional: bool = False

    def lines(self, width: int) -> list[str]:
        """Return it broken into lines."""
        rows = _text(" ".join(self.sentences), width - self.indent, indent=self.hanging)
        return [f"{' ' * self.indent}{line}" for line, _ in rows]

    def height(self, width: int) -> int:
        """Return how many lines it has."""
        return len(self.lines(width))


def _paragraphs(facts: Sequence[Fact], verbose: bool) -> Iterator[Paragraph]:
    """Yield what is said of facts: their sentences, and with --verbose what these rest on."""
    for fact in facts:
        if fact.sentence:
            yield Paragraph(fact.label, SENTENCES.split(fact.sentence))
            yield from (Paragraph(fact.label, [one], 3, 2) for one in fact.evidence * verbose)
        elif verbose or fact.spelled:
            for line in fact.lines:
                yield Paragraph(fact.label, [line.text], hanging=3)
                if line.detail:
                    yield Paragraph(fact.label, SENTENCES.split(line.detail), 3, 2, optional=True)


def _shorten(said: Sequence[Paragraph], room: int, width: int) -> None:
    """Drop optional sentences from the last, then of the longest paragraph; each keeps its first."""
    while sum(one.height(width) for one in said) > room:
        optional = [one for one in said if one.optional and one.sentences]
        longer = optional[-1:] or [one for one in said if len(one.sentences) > 1]
        if not longer:
            return
        max(longer, key=lambda one: one.height(width)).sentences.pop()


def _bottom(answer: Answer, width: int, verbose: bool) -> list[Row]:
    """Return findings of charts, what can be pasted, how it was made, and how to go on."""
    found = [one.title for one in answer.charts] if verbose else []
    rows: list[Row] = [("", "")] if found else []
    rows += [row for text in found for row in _text(f"• {text}", width, indent=2)]
    for caption, code in answer.code:
        rows += [("", ""), *_text(f"{caption}:", width), *((line, "") for line in code.splitlines())]
    rows += [("", ""), *(row for text in answer.remarks for row in _text(text, width))]
    further = answer.further if verbose else answer.further[:1]
    return rows + [(f"{label:<8}{command}", "") for label, command in (*answer.next, *further)]


# ---------------------------------------------------------------- numbers


def _tiles(answer: Answer, console: Console) -> list[Row]:
    """Return the headline numbers of the short answer, with the ends of their curves where there is room."""
    rows = [
        [one.label, one.text, one.band, drawn and f"{drawn:<{TICKS_WIDTH}}  {one.below}"]
        for one in answer.tiles
        if one.short
        for drawn in ["no trend" if one.flat else sparkline(one.curve, one.log)]
    ]
    if sum(max((cell_len(row[i]) for row in rows), default=0) + 2 for i in range(4)) - 2 > console.width:
        rows = [[*row[:3], row[3][:TICKS_WIDTH]] for row in rows]
    notes = (f"* {answer.heavy}",) if answer.heavy else ()
    return (
        _table(Table("tiles", "", ("", "value", "band", answer.over), rows, notes), console) if rows else []
    )


def sparkline(values: Sequence[float | None], log: bool = False, width: int = TICKS_WIDTH) -> str:
    """Return a sparkline of at most `width` ticks, with gaps for missing values; empty for fewer than two.

    `log`: on a log scale, if its values span more than a factor of `WIDE`.
    """
    some = [
        y if y is not None and math.isfinite(y) else None
        for y in values[:: max(1, math.ceil(len(values) / width))]
    ]
    known = [y for y in some if y is not None]
    if len(known) < 2:
        return ""
    if log and max(known) > WIDE * min(known) > 0:
        some, known = [y and math.log10(y) for y in some], [math.log10(y) for y in known]
    low, half = min(known) / 2, max(known) / 2 - min(known) / 2  # which does not overflow
    return "".join(
        " " if y is None else TICKS[round((len(TICKS) - 1) * (y / 2 - low) / half) if half else 0]
        for y in some
    )


def _table(table: Table, console: Console) -> list[Row]:
    """Return a table's lines, columns that do not fit below the others, each time with the first column."""
    cells, marks = texts(table)
    columns = [[printable(cell) for cell in column] for column in zip(table.header, *cells, strict=True)]
    natural = [max(map(cell_len, column)) for column in columns]
    least = [
        wide if wide <= WHOLE else max(min(cell_len(word), WORD) for word in " ".join(column).split())
        for wide, column in zip(natural, columns, strict=True)
    ]
    rows: list[Row] = [("", ""), *_text(table.caption, console.width)]
    for some in _pages(least, console.width):
        fits = sum(least[i] + 2 for i in some) - 2 <= console.width
        grid = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i in some:
            whole = fits and natural[i] <= WHOLE
            grid.add_column(Text(columns[i][0]), overflow="fold", no_wrap=whole, min_width=least[i] * fits)
        for row in [*zip(*columns, strict=True)][1:]:
            grid.add_row(*(Text(row[i]) for i in some))
        lines = console.render_lines(grid, console.options, pad=False)
        rows += [("".join(segment.text for segment in line).rstrip(), "") for line in lines]
    for note in (" ".join(marks), *table.notes):
        rows += _text(note, min(console.width, PIPE_WIDTH), "dim", 2 if note.startswith("*") else 0)
    return rows


def _pages(least: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the columns of each grid: as many as fit beside the first."""
    some = [0]
    for i in range(1, len(least)):
        if len(some) > 1 and sum(least[j] + 2 for j in (*some, i)) - 2 > width:
            yield some
            some = [0]
        some.append(i)
    yield some
