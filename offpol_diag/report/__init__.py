"""Reports: the answer of every command, drawn in a terminal, as Markdown and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offpol_diag.report.answer import Answer
from offpol_diag.result import Result

if TYPE_CHECKING:
    from offpol_diag.check import Checked


def answered(result: Result | Checked) -> Answer:
    """Return the answer to what was asked."""
    from offpol_diag.report import analyze, check, compare, gate, rescore, sweep

    if not isinstance(result, Result):
        return check.answer(result)
    if result.against:
        return compare.of_runs(result)
    if result.comparison is not None:
        return compare.of_presets(result, result.comparison)
    if result.sweep is not None:
        return sweep.answer(result, result.sweep)
    if result.reference is not None and result.run.command == "rescore":
        return rescore.answer(result, result.reference)
    return gate.answer(result) if result.gates else analyze.answer(result)
