"""An answer in a terminal: at most 36 lines of 80 columns, and with --verbose what it rests on.

An answer with headline numbers is short without tables; what is too long loses whole sentences, those of the
last paragraph first. Columns of a table that do not fit stand below the others. Intervals always stand with
their numbers, and nothing depends on colour. A pipe is `PIPE_WIDTH` wide.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from offpol_diag.metrics import Tone
from offpol_diag.numerals import minus
from offpol_diag.printable import disarmed, printable
from offpol_diag.report.answer import Answer, Line, texts
from offpol_diag.table import Table

Row = tuple[str, str]
"""A line, and its style."""
Paragraph = tuple[str, list[str], tuple[Line, ...]]
"""A label, sentences beside it, and lines of evidence below."""
PIPE_WIDTH, PROSE_WIDTH = 120, 100
LINES, CAUTIONS = 36, 2
"""Lines of the short answer, and cautions in it."""
SENTENCES = re.compile(r"(?<=[.?!]) (?=[A-ZΔχπ|0-9])")
WHOLE = 32
"""Characters of a cell up to which its column is not made narrower."""
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
        verbose: whether to draw what it rests on, the tables behind it and the findings of its charts.
        quiet: whether to draw the verdict in one line, if not verbose.
        console: where it would be drawn; None for stdout.
    """
    console = console or make_console()
    if quiet and not verbose:
        return _drawn([(answer.headline, "")], console)
    width = min(console.width, PIPE_WIDTH if verbose else PROSE_WIDTH)
    top, bottom = _top(answer, width, verbose), _bottom(answer, width, verbose)
    tiles = _table(answer.numbers, console, short=not verbose) if answer.tiles else []
    shown = ("always", "more") if verbose else () if tiles else ("always",)
    drawn = [one for one in answer.tables if one.rows and one.shown in shown]
    below = [row for one in drawn for row in _table(one, console)]
    facts: list[Paragraph] = [
        (one.label, SENTENCES.split(one.text), one.lines if verbose else ())
        for one in answer.facts
        if one.text
    ]
    if tiles and not verbose:
        room = LINES - len(top) - len(tiles) - len(bottom)
        room += len(answer.config.splitlines()) + 2 if answer.config else 0
        for _, sentences, _ in reversed(facts):
            while len(sentences) > 1 and len(_facts(facts, width)) > room:
                sentences.pop()
    return _drawn([*top, *_facts(facts, width), *tiles, *below, *bottom], console)


def tables(found: Iterable[str | Table]) -> str:
    """Return paragraphs and tables as text for stdout."""
    console, rows = make_console(), list[Row]()
    for one in found:
        rows += _table(one, console) if isinstance(one, Table) else [("", ""), *_text(one, console.width)]
    return _drawn(rows[1:], console)


def _drawn(rows: Sequence[Row], console: Console) -> str:
    """Return lines with their styles."""
    with console.capture() as drawn:
        for text, style in rows:
            console.print(Text(printable(text), style=style), soft_wrap=True)
    return "".join(f"{disarmed(line.rstrip())}\n" for line in drawn.get().split("\n")[:-1])


def _text(text: str, width: int, style: str = "", label: str = "") -> list[Row]:
    """Break a text into lines beside a label."""
    wrapper = textwrap.TextWrapper(
        max(width, 20 + len(label)), label, " " * len(label), break_on_hyphens=False
    )
    return [(line, style) for line in wrapper.wrap(printable(minus(text)))]


# ---------------------------------------------------------------- sentences


def _top(answer: Answer, width: int, verbose: bool) -> list[Row]:
    """Return what was read, what limits every number, and the verdict."""
    rows = _text(answer.about, width)
    some = answer.cautions if verbose else answer.cautions[:CAUTIONS]
    rows += [row for one in some for row in _text(one, width, "yellow", "! ")]
    if more := len(answer.cautions) - len(some):
        rows.append((f"! {more} more: -v", "yellow"))
    rows += [("", ""), *_text(answer.headline, width, STYLES[answer.tone])]
    return rows + _text(answer.more, width, STYLES[answer.tone] if answer.tone != "good" else "")


def _facts(facts: Sequence[Paragraph], width: int) -> list[Row]:
    """Return paragraphs beside their labels, which are as wide as the widest; the same label stands once."""
    margin = min(max((len(label) for label, *_ in facts), default=0), 20) + 2
    rows: list[Row] = [("", "")] if facts else []
    last = ""
    for label, sentences, lines in facts:
        rows += _text(" ".join(sentences), width, label=f"{label if label != last else '':<{margin}}")
        for line in lines:
            rows += _text(str(line), width, label=f"{'':<{margin}}{'' if line.mark else '- '}")
        last = label
    return rows


def _bottom(answer: Answer, width: int, verbose: bool) -> list[Row]:
    """Return findings of charts, what can be pasted, how it was made, and how to go on."""
    found = [one.title for one in answer.charts] if verbose else []
    rows: list[Row] = [("", "")] if found else []
    rows += [row for text in found for row in _text(text, width, label="• ")]
    config = ["", "The configuration, ready to paste:", *answer.config.splitlines()] if answer.config else []
    rows += [(line, "") for line in config]
    rows += [("", ""), *(row for text in answer.remarks for row in _text(text, width))]
    return rows + [(f"{label:<8}{command}", "") for label, command in answer.next]


# ---------------------------------------------------------------- tables


def _table(table: Table, console: Console, short: bool = False) -> list[Row]:
    """Return a table's lines; columns that do not fit stand below the others, or if `short` nowhere."""
    cells, marks = texts(table)
    columns = [[printable(cell) for cell in column] for column in zip(table.header, *cells, strict=True)]
    widths = [min(max(map(cell_len, column)), WHOLE) for column in columns]
    rows: list[Row] = [("", ""), *_text(table.caption, console.width)]
    for some in [*_pages(widths, console.width)][: 1 if short else None]:
        grid = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i in some:
            least = min(widths[i], console.width // 2)
            grid.add_column(Text(columns[i][0]), overflow="fold", min_width=least)
        for row in [*zip(*columns, strict=True)][1:]:
            grid.add_row(*(Text(row[i]) for i in some))
        lines = console.render_lines(grid, console.options, pad=False)
        rows += [("".join(segment.text for segment in line).rstrip(), "") for line in lines]
    for note in (" ".join(marks), *table.notes):
        label = "* " if note.startswith("* ") else ""
        rows += _text(note.removeprefix(label), min(console.width, PIPE_WIDTH), "dim", label)
    return rows


def _pages(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the columns of each grid: the first one, and as many as fit beside it."""
    some = [0]
    for i in range(1, len(widths)):
        if len(some) > 1 and sum(widths[j] + 2 for j in (*some, i)) - 2 > width:
            yield some
            some = [0]
        some.append(i)
    yield some
