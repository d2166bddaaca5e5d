"""Render sections for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.blocks import Section


def drawn(sections: Sequence[Section]) -> str:
    """Return sections as text for stdout."""
    from offpol_diag.report.render.terminal import draw, make_console

    return draw(sections, make_console())
