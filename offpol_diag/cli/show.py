"""The terminal: what every command prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.blocks import Section
    from offpol_diag.summary import Summary


def show(sections: Sequence[Section], stack: bool = True) -> None:
    """Draw sections on stdout."""
    from offpol_diag.render.terminal import make_console, render_terminal

    render_terminal(sections, make_console(), stack)


def show_report(summary: Summary, whole: bool = False) -> None:
    """Draw the summary of the report on stdout; `whole`: wide tables below rather than left out."""
    from offpol_diag.render.terminal import BRIEF, brief
    from offpol_diag.sections import sections

    show(brief(sections(summary, BRIEF)), stack=whole)
