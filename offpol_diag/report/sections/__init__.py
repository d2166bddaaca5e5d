"""Compose the sections of a report: one function each, from a Summary to blocks. Computes no number."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from offpol_diag.blocks import Section
from offpol_diag.report.sections.charts import charts
from offpol_diag.report.sections.comparison import comparison
from offpol_diag.report.sections.data import data
from offpol_diag.report.sections.diagnosis import diagnosis
from offpol_diag.report.sections.logs import logs
from offpol_diag.report.sections.numbers import numbers
from offpol_diag.report.sections.presets import presets
from offpol_diag.report.sections.runs import runs
from offpol_diag.report.sections.sweep import sweep
from offpol_diag.report.sections.tokens import tokens
from offpol_diag.report.sections.verdict import verdict
from offpol_diag.summary import Summary

SECTIONS: Mapping[str, Callable[[Summary], Section | None]] = {
    "diagnosis": diagnosis,
    "runs": runs,
    "comparison": comparison,
    "sweep": sweep,
    "verdict": verdict,
    "numbers": numbers,
    "charts": charts,
    "presets": presets,
    "tokens": tokens,
    "logs": logs,
    "data": data,
}
"""Id → function that makes the section, in reading order; it returns None if there is nothing to report."""

OF_TWO = frozenset({"diagnosis", "runs", "data"})
"""Sections shown for a comparison of two runs; the others belong to the report of a single run."""


def sections(summary: Summary, among: Container[str] = SECTIONS) -> tuple[Section, ...]:
    """Return the sections of the report; `among` restricts them to some ids."""
    known: Container[str] = SECTIONS if summary.against is None else OF_TWO
    made = (make(summary) for name, make in SECTIONS.items() if name in known and name in among)
    return tuple(section for section in made if section is not None)
