"""An answer in a terminal: at most 36 lines of 80 columns, and with --verbose the tables behind it.

A short answer drops corrections, then whole sentences, never a part of one, the longest paragraph's first.
Columns of a table that do not fit are left out from the right, and named; a pipe is `PIPE_WIDTH` wide and
omits nothing: there columns move below. Intervals always stand with their numbers, and nothing depends on
colour.
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

Row = tuple[str, str]
"""A line, and its style."""
PIPE_WIDTH, PROSE_WIDTH = 120, 100
TICKS, TICKS_WIDTH = "▁▂▃▄▅▆▇█", 9
LINES, MOST, CAUTIONS, CORRECTIONS = 36, 4, 3, (5, 3, 0)
"""In the short answer: lines in all, and of a paragraph; cautions; corrections, fewer for want of room."""
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
    """A console that raises on a broken pipe instead of exiting with 1; `whole`: nothing may be omitted."""

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
        return _drawn([(printable(answer.headline), "")], console)
    width = min(console.width, PIPE_WIDTH if verbose else PROSE_WIDTH)
    said = paragraphs(answer.facts, verbose)
    margin = min(max((len(one.label) for one in said), default=0), 20) + 2
    top, bottom = _top(answer, width, verbose), _bottom(answer, width, verbose)
    room = max(LINES, LINES * 80 // console.width)  # of a narrow terminal the same text
    room += sum(len(code.splitlines()) + 2 for _, code in answer.code) - len(top) - len(bottom) - 1
    short = any(one.short for one in answer.tiles) and not verbose
    for rows in CORRECTIONS if short else (None,):
        tables = [row for table in _tables(answer, verbose, console, rows) for row in table]
        if length(said, width - margin) <= room - len(tables):
            break
    if short:
        shorten(said, room - len(tables), width - margin)
    fits = length(said, width - margin) < room - len(tables)
    further = answer.further if verbose else answer.further[:fits]
    after = [(f"{label:<8}{command}", "") for label, command in further]
    return _drawn([*top, *_facts(said, margin, width), *tables, *bottom, *after], console)


def tables(found: Sequence[str | Table]) -> str:
    """Return paragraphs and tables as text for stdout."""
    console, rows = make_console(), list[Row]()
    for one in found:
        rows += _table(one, console) if isinstance(one, Table) else [("", ""), *_text(one, console.width)]
    return _drawn(rows, console)


def _drawn(rows: Sequence[Row], console: Console) -> str:
    """Return lines with their styles, as the console's encoding can hold them."""
    with console.capture() as drawn:
        for text, style in rows:
            console.print(Styled(printable(text), style=style), soft_wrap=True)
    lines = drawn.get().split("\n")[:-1]
    return "".join(f"{disarmed(plain(line.rstrip(), console.encoding))}\n" for line in lines)


def _text(text: str, width: int, style: str = "", indent: int = 0) -> list[Row]:
    return [(line, style) for line in _wrapped(printable(minus(text)), width, indent)]


def _wrapped(text: str, width: int, indent: int = 0, least: int = 20) -> list[str]:
    """Break a text into lines, all but the first indented."""
    return textwrap.wrap(text, max(width, least), break_on_hyphens=False, subsequent_indent=" " * indent)


# ---------------------------------------------------------------- the answer


def _top(answer: Answer, width: int, verbose: bool) -> list[Row]:
    """Return what was read, what limits every number, and the verdict."""
    rows = _text(answer.about, width)
    some = answer.cautions if verbose else answer.cautions[:CAUTIONS]
    for one in some:
        lines = _text(f"! {one}", width, "yellow", 2)
        rows += lines if verbose or len(lines) <= MOST else [*lines[: MOST - 1], ("  and more: -v", "yellow")]
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
    optional: bool = False

    def lines(self, width: int) -> list[str]:
        """Return it broken into lines."""
        hanging = 2 if self.indent else 3 * self.sentences[0][:1].isdigit() if self.sentences else 0
        wrapped = _wrapped(" ".join(self.sentences), width - self.indent, hanging)
        return [f"{' ' * self.indent}{line}" for line in wrapped]


def paragraphs(facts: Sequence[Fact], verbose: bool) -> list[Paragraph]:
    """Return what is said of facts: their sentences, and with --verbose what these rest on."""
    found = list[Paragraph]()
    for fact in facts:
        if fact.sentence:
            sentences = SENTENCES.split(minus(printable(fact.sentence)))
            found.append(Paragraph(fact.label, sentences))
            rest = evidence(fact) if verbose else ()
            found += [Paragraph(fact.label, [printable(text)], 3) for text in rest]
            continue
        for line in fact.lines if verbose or fact.spelled else ():
            found.append(Paragraph(fact.label, [minus(printable(line.text))]))
            for side in re.split(r" (?=Against: )", line.detail) if line.detail else ():
                found.append(Paragraph(fact.label, SENTENCES.split(minus(printable(side))), 3, optional=True))
    return found


def length(said: Sequence[Paragraph], width: int) -> int:
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


def _tables(answer: Answer, verbose: bool, console: Console, corrections: int | None) -> Iterator[list[Row]]:
    """Yield the headline numbers, and the tables that stand here; of the corrections so many rows."""
    if short := [one for one in answer.tiles if one.short]:
        notes: tuple[str, ...] = (f"* {answer.heavy}",) if answer.heavy else ()
        for ends in (True, False):  # of the curves, where there is room
            cells = [(one.label, tile_text(one), one.band, _course(one, ends)) for one in short]
            table = Table("tiles", "", ("", "value", "band", answer.over), cells, notes)
            if getattr(console, "whole", False) or _fits(_columns(table, False)[0], console.width):
                break
        yield _table(table, console)
    for table in answer.tables:
        if table.shown == "always" or (verbose and table.shown == "more"):
            if table.id == "corrections" and corrections is not None:
                notes = table.notes if corrections == CORRECTIONS[0] else ()
                table = replace(table, rows=table.rows[:corrections], notes=notes)
            if table.rows:
                yield _table(table, console)


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


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class _Column:
    """A column of formatted cells, with its natural and its least width."""

    header: str
    cells: tuple[str, ...]
    natural: int
    least: int


def _table(table: Table, console: Console) -> list[Row]:
    """Return a table's lines, a grid below the other where its columns do not fit, or else without them."""
    whole = getattr(console, "whole", False)
    columns, notes = _columns(table, whole)
    pages = _pages(columns, console.width)
    some = len(columns) if whole or table.shown == "always" else len(pages[0])
    left = [one.header for one in columns[some:]]
    if left:  # no note is said of them
        table = replace(table, header=table.header[:some], rows=[row[:some] for row in table.rows])
        columns, notes = _columns(table, whole)
        pages = [columns]
    rows: list[Row] = [("", ""), *_text(table.caption, console.width)]
    rows += [(line, "") for page in pages for line in _grid(page, console.width)]
    numbered = " ".join(f"({place}) {note}" for note, place in notes.items())
    more = [f"Left out for want of width: {', '.join(left)} (--json has all)."] if left else []
    for note in (numbered, *table.notes, *more):
        rows += _text(note, min(console.width, PIPE_WIDTH), "dim", 2 if note.startswith("*") else 0)
    return rows


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
