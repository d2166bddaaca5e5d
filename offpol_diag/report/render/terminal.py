"""Draw a result in a terminal: by default the answer, with --verbose all sections, with --quiet one line.

What does not fit is omitted in this order, and named: reference tables; then columns from the right, or they
are moved below. Only short forms with many numbers omit intervals: elsewhere columns move below for them.
A pipe is `PIPE_WIDTH` wide and omits nothing. Nothing depends on colour.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text as Line

from offpol_diag.blocks import Block, Code, Figure, Section, Table, Text, Tone, Verdict
from offpol_diag.blocks import plain as basic
from offpol_diag.check import Checked
from offpol_diag.numerals import minus
from offpol_diag.printable import disarmed, printable
from offpol_diag.report.render.brief import plain, print_answer
from offpol_diag.report.render.columns import fit
from offpol_diag.report.render.dots import dots
from offpol_diag.report.sections import sections
from offpol_diag.report.sections.answer import answer, headline
from offpol_diag.report.sections.columns import sentences
from offpol_diag.report.sections.short import short
from offpol_diag.summary import Summary

PIPE_WIDTH = 120
PROSE_WIDTH = 100

MARKS: Mapping[Tone, tuple[str, str]] = {
    "good": ("✓", "bold green"),
    "warn": ("!", "bold yellow"),
    "bad": ("✗", "bold red"),
    "info": ("•", "bold"),
}


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


def terminal(
    summary: Summary | Checked,
    verbose: bool = False,
    quiet: bool = False,
    given: Sequence[Section] = (),
    whole: bool = False,
) -> str:
    """Return a result as text for stdout.

    Args:
        summary: the result.
        verbose: whether to draw the tables; else the answer, or the short form of what was asked.
        quiet: whether to draw one line, if not verbose.
        given: sections to draw instead (of a gate or a check).
        whole: whether columns that do not fit are moved below, for want of a page that has them.
    """
    console = make_console()

    def line(said: str) -> str:
        return f"{disarmed(plain(printable(said), console.encoding))}\n"

    if given or isinstance(summary, Checked):
        return line(_first(given)) if quiet and not verbose else draw(given, console)
    of_one = summary.against is None and summary.comparison is None and summary.sweep is None
    if quiet and not verbose:
        return line(headline(summary)[0] if of_one else _first(short(summary)))
    if not of_one:
        names = ("sweep",) if summary.sweep is not None else ("diagnosis", "comparison", "runs")
        if not verbose:
            return draw(short(summary), console, intervals=False)
        read = Section("columns", "", (Text(sentences(summary.dump)),)) if summary.against is None else None
        return draw((*sections(summary, names), *((read,) if read else ())), console)
    with console.capture() as drawn:
        print_answer(answer(summary), console)
    text = "".join(f"{disarmed(line.rstrip())}\n" for line in drawn.get().split("\n")[:-1])
    if verbose:
        return text + draw(sections(summary), console, stack=whole)
    config = summary.recommendation and summary.recommendation.config
    asked = Code("The configuration, ready to paste", config) if config else None
    return text + (draw([Section("config", "", (asked,))], console) if asked else "")


def _first(found: Sequence[Section]) -> str:
    """Return the conclusion of the first section in one line."""
    for block in (block for section in found for block in section.blocks):
        if isinstance(block, Verdict):
            return f"{block.label}: {block.text}" if block.text else block.label
    return next((block.text for section in found for block in section.blocks if isinstance(block, Text)), "")


@dataclass(frozen=True)
class Canvas:
    """A console to draw on, with the treatment of tables that are too wide.

    Attributes:
        stack: whether columns that do not fit are moved below; else they are omitted.
        whole: whether nothing is omitted, intervals included.
        intervals: whether columns are moved below rather than intervals omitted.
    """

    console: Console
    stack: bool
    whole: bool = False
    intervals: bool = True

    def print(self, line: Line, indent: int = 0) -> None:
        """Print a paragraph, wrapped to a readable width."""
        width = min(self.console.width, PROSE_WIDTH)
        for part in line.wrap(self.console, max(width - indent, 1)):
            self.console.print(Line(" " * indent) + part)


def render_terminal(sections: Sequence[Section], console: Console, stack: bool = True) -> None:
    """Draw sections on a console."""
    console.file.write(draw(sections, console, stack))


def draw(sections: Sequence[Section], console: Console, stack: bool = True, intervals: bool = True) -> str:
    """Return sections as text for the console, in order, without trailing blanks."""
    canvas = Canvas(console, stack, getattr(console, "whole", False), intervals)
    with console.capture() as drawn:
        for section in sections:
            if section.title:
                canvas.print(Line("\n") + Line(printable(section.title), style="bold underline"))
            for block in basic(section.blocks):
                DRAW[type(block)](block, canvas)
    return "".join(
        f"{disarmed(plain(line.rstrip(), console.encoding))}\n" for line in drawn.get().split("\n")[:-1]
    )


def _text(block: Text, canvas: Canvas) -> None:
    mark, style = MARKS[block.tone]
    lead = Line() if block.tone == "info" else Line(f"{mark} ", style=style)
    canvas.print(lead + Line(printable(minus(block.text))))


def _code(block: Code, canvas: Canvas) -> None:
    canvas.print(Line(f"\n{printable(block.caption)}:"))
    for line in block.text.splitlines():
        canvas.console.print(Line(printable(line)), soft_wrap=True)
    canvas.print(Line())


def _verdict(block: Verdict, canvas: Canvas) -> None:
    mark, style = MARKS[block.tone]
    label = f"{mark} {printable(block.label)}{': ' if block.text else ''}"
    canvas.print(Line(label, style=style) + Line(printable(minus(block.text))))
    for detail in block.detail:
        canvas.print(Line(printable(minus(detail)), style="dim"), indent=4)


def _table(block: Table, canvas: Canvas) -> None:
    if block.collapsed:
        return
    fitted = fit(block, canvas.console.width, canvas.stack, canvas.whole, canvas.intervals)
    canvas.print(Line(f"\n{printable(block.caption)}") if block.caption else Line())
    for grid in fitted.grids:
        canvas.console.print(grid)
    missing = [*fitted.dropped, *(["the intervals"] if fitted.without_intervals else [])]
    left_out = [f"Left out for want of width: {', '.join(missing)}."] if missing else []
    for remark in (*fitted.notes, *block.notes, *left_out):
        canvas.print(Line(printable(remark), style="dim"))


def _figure(block: Figure, canvas: Canvas) -> None:
    canvas.print(Line(f"\n{printable(block.title)}"))
    for line in dots(block, canvas.console.width):
        canvas.console.print(Line(printable(line)), soft_wrap=True)


DRAW: Mapping[type[Block], Callable[[Any, Canvas], None]] = {
    Text: _text,
    Verdict: _verdict,
    Code: _code,
    Table: _table,
    Figure: _figure,
}
