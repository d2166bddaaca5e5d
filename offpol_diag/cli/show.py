"""The terminal: what every command prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.blocks import Section
    from offpol_diag.summary import Summary

IN_THE_HTML = "more rows are in the HTML."
WITH_HTML = "more rows come with an HTML report: -o FILE, without --no-html."
"""What a table that was cut says, with an HTML file beside it and without."""


def show(sections: Sequence[Section], stack: bool = True) -> None:
    """Draw sections on stdout."""
    from offpol_diag.render.terminal import make_console, render_terminal

    render_terminal(sections, make_console(), stack)


def show_report(summary: Summary, html: bool = True) -> None:
    """Draw the summary of the report on stdout; without an HTML file nothing is said to be in it."""
    from offpol_diag.render.terminal import brief
    from offpol_diag.sections import sections

    short = brief(sections(summary))
    show(short if html else [_without_html(section) for section in short], stack=not html)


def _without_html(section: Section) -> Section:
    """The section, saying of the rows that were cut how to have them."""
    from offpol_diag.blocks import Table

    blocks = (
        replace(block, notes=tuple(note.replace(IN_THE_HTML, WITH_HTML) for note in block.notes))
        if isinstance(block, Table)
        else block
        for block in section.blocks
    )
    return replace(section, blocks=tuple(blocks))
