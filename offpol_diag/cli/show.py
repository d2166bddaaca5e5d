"""The terminal: what every command prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.blocks import Section
    from offpol_diag.summary import Summary


def drawn(sections: Sequence[Section], stack: bool = True) -> str:
    """Sections as stdout shows them."""
    from offpol_diag.report.render.terminal import draw, make_console

    return draw(sections, make_console(), stack)


def drawn_report(summary: Summary, whole: bool = False) -> str:
    """The summary of the report as stdout shows it; `whole`: wide tables below rather than left out."""
    from offpol_diag.report.render.terminal import BRIEF, brief
    from offpol_diag.report.sections import sections

    return drawn(brief(sections(summary, BRIEF)), stack=whole)


def drawn_diagnosis(summary: Summary) -> str:
    """The diagnosis as stdout shows it, from its first sentence on."""
    from dataclasses import replace

    from offpol_diag.report.sections import sections

    return drawn([replace(one, title="") for one in sections(summary, ("diagnosis",))])
