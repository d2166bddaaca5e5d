"""Render sections for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.blocks import Section
    from offpol_diag.summary import Summary


def drawn(sections: Sequence[Section], stack: bool = True) -> str:
    """Return sections as text for stdout."""
    from offpol_diag.report.render.terminal import draw, make_console

    return draw(sections, make_console(), stack)


def drawn_report(summary: Summary, whole: bool = False) -> str:
    """Return the report's summary as text for stdout; `whole` moves columns that do not fit below."""
    from offpol_diag.report.render.terminal import BRIEF, brief
    from offpol_diag.report.sections import sections

    return drawn(brief(sections(summary, BRIEF)), stack=whole)


def drawn_diagnosis(summary: Summary) -> str:
    """Return the diagnosis as text for stdout, starting with its first sentence."""
    from dataclasses import replace

    from offpol_diag.report.sections import sections

    return drawn([replace(one, title="") for one in sections(summary, ("diagnosis",))])
