"""Blocks in a terminal: the verdict's sentence first, tables fitted to the width, a sparkline for a chart.

What cannot fit is left out by rules, and named: tables meant for reference; `wide` tables that do not fit;
the intervals of a table of many numbers; then columns from the right, since a table puts the more important
first. A pipe is as wide as its content. Nothing depends on colour.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text as Line

from offpol_diag.blocks import Block, Figure, Section, Table, Text, Tone, Verdict
from offpol_diag.render.columns import Fitted, clean, fit

PIPE_WIDTH = 100_000
PROSE_WIDTH = 100
SPARK_WIDTH = 48
TICKS = "▁▂▃▄▅▆▇█"

MARKS: Mapping[Tone, tuple[str, str]] = {
    "good": ("✓", "bold green"),
    "warn": ("!", "bold yellow"),
    "bad": ("✗", "bold red"),
    "info": ("•", "bold"),
}


class PipeConsole(Console):
    """A console that lets a broken pipe be known, instead of exiting with 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to the command line, where it has its own exit code."""
        raise BrokenPipeError


def make_console() -> Console:
    """Stdout: a terminal at its width, or `COLUMNS`; a pipe uncut."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    console = PipeConsole(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_WIDTH
    return console


def render_terminal(sections: Sequence[Section], console: Console) -> None:
    """Draw sections, in their order, without trailing blanks."""
    with console.capture() as drawn:
        for section in sections:
            _heading(section.title, console)
            for block in section.blocks:
                DRAW[type(block)](block, console)
    console.file.writelines(f"{line.rstrip()}\n" for line in drawn.get().splitlines())


def _heading(title: str, console: Console) -> None:
    console.print()
    console.print(Line(clean(title), style="bold underline"))


def _prose(line: Line, console: Console, indent: int = 0) -> None:
    """A paragraph: wrapped for a reader, one line for a pipe."""
    width = min(console.width, PROSE_WIDTH) if console.width < PIPE_WIDTH else PIPE_WIDTH
    for part in line.wrap(console, width - indent):
        console.print(Line(" " * indent) + part)


def _text(block: Text, console: Console) -> None:
    mark, style = MARKS[block.tone]
    lead = Line() if block.tone == "info" else Line(f"{mark} ", style=style)
    _prose(lead + Line(clean(block.text)), console)


def _verdict(block: Verdict, console: Console) -> None:
    mark, style = MARKS[block.tone]
    _prose(Line(f"{mark} {clean(block.label)}: ", style=style) + Line(clean(block.text)), console)
    for detail in block.detail:
        _prose(Line(clean(detail), style="dim"), console, indent=4)


def _table(block: Table, console: Console) -> None:
    if block.collapsed:
        return
    fitted = fit(block, console.width)
    _prose(Line(f"\n{clean(block.caption)}"), console)
    if block.wide and fitted.dropped:
        _prose(Line("(too wide for this terminal: see the HTML)", style="dim"), console)
        return
    console.print(fitted.grid)
    for remark in _remarks(block, fitted):
        _prose(Line(clean(remark), style="dim"), console)


def _remarks(block: Table, fitted: Fitted) -> list[str]:
    intervals = ["the intervals"] if fitted.without_intervals else []
    missing = [*fitted.dropped, *intervals]
    left_out = [f"Left out for want of width (see the HTML): {', '.join(missing)}."] if missing else []
    return [*fitted.notes, *block.notes, *left_out]


def _figure(block: Figure, console: Console) -> None:
    spark = sparkline(block.series[0].y, block.y_log) if block.series else ""
    if spark:
        known = [value for value in block.series[0].y if value is not None]
        ends = f"{min(known):.4g} to {max(known):.4g} {block.y_label}"
        _prose(Line(f"\n{clean(block.title)}  {spark}  {clean(ends)}"), console)
    _prose(Line(clean(block.caption), style="dim"), console)


def sparkline(values: Sequence[float | None], log: bool = False) -> str:
    """One tick per value, at most `SPARK_WIDTH` of them; a gap where there is none."""
    step = max(1, math.ceil(len(values) / SPARK_WIDTH))
    heights = [_height(value, log) for value in values[::step]]
    known = [height for height in heights if height is not None]
    if len(known) < 2:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(TICKS) - 1
    return "".join(" " if h is None else TICKS[round(top * (h - low) / span) if span else 0] for h in heights)


def _height(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return math.log10(value) if log else value


DRAW: Mapping[type[Block], Callable[[Any, Console], None]] = {
    Text: _text,
    Verdict: _verdict,
    Table: _table,
    Figure: _figure,
}
