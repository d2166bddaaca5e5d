"""Reports: the answer of every command, drawn in a terminal, as Markdown and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offpol_diag.report.answer import Answer
from offpol_diag.result import Result

if TYPE_CHECKING:
    from offpol_diag.check import Checked


FORMS = ("report", "json", "md", "junit")
"""Forms that a result is written in; `render` draws them, and the terminal's."""


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


def render(result: Result | Checked, form: str, verbose: bool = False, quiet: bool = False) -> str:
    """Return a result in one of its forms: report (the page), json, md, junit or terminal.

    Args:
        result: the result of a command.
        form: what is drawn.
        verbose: whether the terminal shows every table.
        quiet: whether it shows the verdict alone, in one line.
    """
    if form == "json":
        return result.to_json()
    if form == "report":
        from offpol_diag.report.page import page

        return page(result)
    if form == "junit":
        from offpol_diag.report.gate import junit

        return junit(result)  # type: ignore[arg-type]
    if form == "md":
        from offpol_diag.report.markdown import markdown

        return markdown(answered(result))
    from offpol_diag.report.terminal import terminal

    return terminal(answered(result), verbose, quiet)
