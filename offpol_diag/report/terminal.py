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
from typing import NoReturn

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from offpol_diag.metrics import Tone
from offpol_diag.numerals import minus
from offpol_diag.printable import disarmed, printable
from offpol_diag.report.answer import Answer, Fact, Tile, texts
from offpol_diag.table import Table

Row = tuple[str, str]
"""A line, and its style."""
PIPE_WIDTH, PROSE_WIDTH = 120, 100
LINES, MOST, CAUTIONS = 36, 4, 3
"""In the short answer: lines in all, lines of a paragraph, and cautions."""
TICKS, TICKS_WIDTH = "▁▂▃▄▅▆▇█", 9
WIDE = 30
"""Factor between its ends beyond which a curve is drawn on a log scale, if its number is one for that."""
SENTENCES = re.compile(r"(?<=[.?!]) (?=[A-ZΔχπ|0-9])")
WHOLE, LEAST, WORD = 32, 14, 48
"""Characters of a cell up to which it is never broken, least width of a longer one, and length up to which
words of the first column stay whole."""
STYLES: dict[Tone, str] = {"good": "bold green", "info": "bold", "warn": "bold yellow", "bad": "bold red"}


class PipeConsole(Console):
    """A console that raises on a broken pipe instead of exiting with 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Re-raise the error, for which the command line has its own exit code."""
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console on stdout, as wide as `COLUMNS` or the terminal; a pipe is `PIPE_WIDTH` wide."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    console = PipeConsole(highlight=False, emoji=False, markup=False)
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
        return _drawn([(printable(answer.headline), "")], console)
    width = min(console.width, PIPE_WIDTH if verbose else PROSE_WIDTH)
    said = paragraphs(answer.facts, verbose)
    margin = min(max((len(one.label) for one in said), default=0), 20) + 2
    top, bottom, tiles = (
        _top(answer, width, verbose),
        _bottom(answer, width, verbose),
        _tiles(answer, console),
    )
    tables = [
        row
        for one in answer.tables
        if one.rows and (one.shown == "always" or (verbose and one.shown == "more"))
        for row in _table(one, console)
    ]
    further = answer.further
    if tiles and not verbose:
        room = max(LINES, LINES * 80 // console.width)  # of a narrow terminal the same text
        room += sum(len(code.splitlines()) + 2 for _, code in answer.code)
        room -= len(top) + len(tiles) + len(bottom) + 1
        if _length(said, width - margin) > room - len(tables):
            tables = []
        room -= len(tables)
        shorten(said, room, width - margin)
        further = further[: _length(said, width - margin) < room]
    after = [(f"{label:<8}{command}", "") for label, command in further]
    return _drawn([*top, *_facts(said, margin, width), *tiles, *tables, *bottom, *after], console)


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


def paragraphs(facts: Sequence[Fact], verbose: bool) -> list[Paragraph]:
    """Return what is said of facts: their sentences, and with --verbose what these rest on."""
    found = list[Paragraph]()
    for fact in facts:
        if fact.sentence:
            found.append(Paragraph(fact.label, SENTENCES.split(fact.sentence)))
            found += [Paragraph(fact.label, [one], 3, 2) for one in fact.evidence * verbose]
            continue
        for line in fact.lines if verbose or fact.spelled else ():
            found.append(Paragraph(fact.label, [line.text], hanging=3 * (len(fact.lines) > 1)))
            if line.detail:
                found.append(Paragraph(fact.label, SENTENCES.split(line.detail), 3, 2, optional=True))
    return found


def _length(said: Sequence[Paragraph], width: int) -> int:
    """Return how many lines paragraphs have, each at most `MOST`."""
    return sum(min(len(one.lines(width)), MOST) for one in said)


def shorten(said: Sequence[Paragraph], room: int, width: int) -> None:
    """Drop sentences until the paragraphs have so many lines, each at most `MOST`; a first one stays."""
    for one in said:
        while len(one.sentences) > 1 and len(one.lines(width)) > MOST:
            one.sentences.pop()
    while sum(len(one.lines(width)) for one in said) > room:
        optional = [one for one in said if one.optional and one.sentences]
        longer = optional[-1:] or [one for one in said if len(one.sentences) > 1]
        if not longer:
            return
        max(longer, key=lambda one: len(one.lines(width))).sentences.pop()


def _facts(said: Sequence[Paragraph], margin: int, width: int) -> Iterator[Row]:
    """Yield paragraphs beside their labels, each label once."""
    last = ""
    for one in (one for one in said if one.sentences):
        if not last:
            yield "", ""
        for line in one.lines(width - margin):
            yield f"{'' if one.label == last else one.label:<{margin}}{line}", ""
            last = one.label


def _bottom(answer: Answer, width: int, verbose: bool) -> list[Row]:
    """Return findings of charts, what can be pasted, how it was made, and how to go on."""
    found = [one.title for one in answer.charts if one.name != "where"] if verbose else []
    rows: list[Row] = [("", "")] if found else []
    rows += [row for text in found for row in _text(f"• {text}", width, indent=2)]
    for caption, code in answer.code:
        rows += [("", ""), *_text(f"{caption}:", width), *((line, "") for line in code.splitlines())]
    rows += [("", ""), *(row for text in answer.remarks for row in _text(text, width))]
    hidden = [one.caption for one in answer.tables if one.shown == "more" and one.caption and one.rows]
    if hidden and not verbose and not any(one.short for one in answer.tiles):
        rows += _text(f"-v: {'; '.join(hidden)}.", width, "dim")
    return rows + [(f"{label:<8}{command}", "") for label, command in answer.next]


# ---------------------------------------------------------------- numbers


def _tiles(answer: Answer, console: Console) -> list[Row]:
    """Return the headline numbers of the short answer, with the ends of their curves where there is room."""
    some = [one for one in answer.tiles if one.short]
    curves = [(_curve(one), one.below) for one in some]
    both = [f"{drawn:<{TICKS_WIDTH}}  {ends}" if drawn else "" for drawn, ends in curves]
    rows = [[one.label, one.text, one.band, last] for one, last in zip(some, both, strict=True)]
    if sum(max((cell_len(row[i]) for row in rows), default=0) + 2 for i in range(4)) - 2 > console.width:
        rows = [[*row[:3], drawn] for row, (drawn, _) in zip(rows, curves, strict=True)]
    notes = (f"* {answer.heavy}",) if answer.heavy else ()
    return (
        _table(Table("tiles", "", ("", "value", "band", answer.over), rows, notes), console) if rows else []
    )


def _curve(one: Tile) -> str:
    return "no trend" if one.flat else sparkline(one.curve, one.log)


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
        wide
        if wide <= WHOLE
        else max(LEAST, *(min(cell_len(word), WORD) for text in column for word in text.split()))
        for wide, column in zip(natural, columns, strict=True)
    ]
    rows: list[Row] = [("", ""), *_text(table.caption, console.width)]
    begin = 1
    while begin == 1 or begin < len(columns):
        end = begin + 1
        while (
            end < len(columns) and sum(least[i] + 2 for i in (0, *range(begin, end + 1))) - 2 <= console.width
        ):
            end += 1
        some = [0, *range(begin, min(end, len(columns)))]
        fits = sum(least[i] + 2 for i in some) - 2 <= console.width
        grid = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i in some:
            small = fits and natural[i] <= WHOLE
            grid.add_column(
                Text(columns[i][0]), overflow="fold", no_wrap=small, min_width=least[i] if fits else None
            )
        for row in list(zip(*columns, strict=True))[1:]:
            grid.add_row(*(Text(row[i]) for i in some))
        lines = console.render_lines(grid, console.options, pad=False)
        rows += [("".join(segment.text for segment in line).rstrip(), "") for line in lines]
        begin = end
    for note in (" ".join(marks), *table.notes):
        rows += _text(note, min(console.width, PIPE_WIDTH), "dim", 2 if note.startswith("*") else 0)
    return rows
