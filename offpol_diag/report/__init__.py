"""Reports: the answer of every command, drawn in a terminal, as Markdown and as a page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from offpol_diag.metrics import Tone
from offpol_diag.numerals import minus
from offpol_diag.printable import printable_lines
from offpol_diag.report.answer import Answer, texts
from offpol_diag.report.charts import TEMPLATES
from offpol_diag.result import Result

if TYPE_CHECKING:
    from offpol_diag.check import Checked

FORMS = ("report", "json", "md", "junit")
"""Forms that a result is written in; `render` draws them, and the terminal's."""
ICONS: dict[Tone, str] = {"good": "✅", "warn": "⚠️", "bad": "❌", "info": "ℹ️"}
LIMIT = 60_000
"""Most bytes of Markdown: GitHub refuses comments of 65,536 characters."""


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
    """Return a result as the page (`report`), `json`, `md`, `junit` or for the `terminal`.

    Of the terminal `verbose` shows every table, and `quiet` the verdict alone, in one line.
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
        return markdown(answered(result))
    from offpol_diag.report.terminal import terminal

    return terminal(answered(result), verbose, quiet)


def markdown(answer: Answer) -> str:
    """Return an answer in GitHub flavoured Markdown: for a pull request, with the tables behind it folded.

    Beyond `LIMIT` bytes what is folded is left out.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True)
    environment.finalize, environment.filters["texts"] = escaped, texts
    tables, template = [answer.numbers, *answer.tables], environment.get_template("answer.md.j2")
    for folded in (True, False):
        drawn = template.render(answer=answer, icon=ICONS[answer.tone], tables=tables, folded=folded)
        text = printable_lines(re.sub(r" +(?=\n)|(?<=\n\n)\n+", "", drawn).strip() + "\n")
        if len(text.encode()) < LIMIT:
            break
    return text


def escaped(value: object) -> object:
    """Escape a text for Markdown and HTML, on one line; what a template calls safe stays."""
    if hasattr(value, "__html__") or not isinstance(value, str):
        return value
    one_line = " ".join(minus(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|~]|(?<=\])\()", r"\\\1", one_line)
