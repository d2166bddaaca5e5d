"""Compose the sections of a report: one function each, from a Summary to blocks. Computes no number."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from offpol_diag.blocks import Section
from offpol_diag.report.sections.comparison import comparison
from offpol_diag.report.sections.crosswalk import crosswalk
from offpol_diag.report.sections.diagnosis import diagnosis
from offpol_diag.report.sections.dump import dump
from offpol_diag.report.sections.families import families
from offpol_diag.report.sections.headline import headline
from offpol_diag.report.sections.made import made
from offpol_diag.report.sections.policies import policies
from offpol_diag.report.sections.presets import presets
from offpol_diag.report.sections.runs import runs
from offpol_diag.report.sections.sweep import sweep
from offpol_diag.report.sections.verdict import verdict
from offpol_diag.report.sections.where import where
from offpol_diag.report.sections.worst import worst
from offpol_diag.summary import Summary

SECTIONS: Mapping[str, Callable[[Summary], Section | None]] = {
    "diagnosis": diagnosis,
    "comparison": comparison,
    "runs": runs,
    "sweep": sweep,
    "verdict": verdict,
    "numbers": headline,
    "dump": dump,
    "presets": presets,
    "families": families,
    "policies": policies,
    "where": where,
    "worst": worst,
    "crosswalk": crosswalk,
    "made": made,
}
"""Id → function that makes the section, in reading order; it returns None if there is nothing to report."""

OF_TWO = frozenset({"diagnosis", "runs", "made"})
"""Sections shown for a comparison of two runs; the others belong to the report of a single run."""


def sections(summary: Summary, among: Container[str] = SECTIONS) -> tuple[Section, ...]:
    """Return the sections of the report; `among` restricts them to some ids."""
    told: Container[str] = SECTIONS if summary.against is None else OF_TWO
    made = (make(summary) for name, make in SECTIONS.items() if name in told and name in among)
    return tuple(section for section in made if section is not None)
