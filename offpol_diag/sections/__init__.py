"""What a report says: one function per section, from a Summary to blocks. No number is computed here."""

from __future__ import annotations

from collections.abc import Callable

from offpol_diag.blocks import Section
from offpol_diag.sections.comparison import comparison
from offpol_diag.sections.crosswalk import crosswalk
from offpol_diag.sections.dump import dump
from offpol_diag.sections.families import families
from offpol_diag.sections.headline import headline
from offpol_diag.sections.made import made
from offpol_diag.sections.policies import policies
from offpol_diag.sections.presets import presets
from offpol_diag.sections.runs import runs
from offpol_diag.sections.sweep import sweep
from offpol_diag.sections.verdict import verdict
from offpol_diag.sections.where import where
from offpol_diag.sections.worst import worst
from offpol_diag.summary import Summary

SECTIONS: tuple[Callable[[Summary], Section | None], ...] = (
    comparison,
    sweep,
    verdict,
    headline,
    dump,
    presets,
    families,
    policies,
    where,
    worst,
    crosswalk,
    made,
)
"""In reading order; None where the Summary holds nothing to say."""


OF_TWO = (runs, made)
"""Where two runs were compared: what is said of one alone is in its own report."""


def sections(summary: Summary) -> tuple[Section, ...]:
    """The report, section by section."""
    parts = SECTIONS if summary.against is None else OF_TWO
    return tuple(section for make in parts if (section := make(summary)) is not None)
