"""Render a short report in GitHub flavoured Markdown: the answer, and the tables folded under it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from offpol_diag.blocks import Block, Code, Section, Table, Text, Verdict, plain
from offpol_diag.check import Checked
from offpol_diag.metrics import Tone
from offpol_diag.numerals import value_or_dash, written
from offpol_diag.printable import printable, printable_lines
from offpol_diag.report.render.brief import value_of
from offpol_diag.report.render.numbers import footnotes, shown
from offpol_diag.report.sections import check, sections
from offpol_diag.report.sections.answer import DECIDE, Answer, answer
from offpol_diag.report.sections.diagnosis import spoken
from offpol_diag.report.sections.gate import gate, report
from offpol_diag.report.sections.short import short
from offpol_diag.summary import Summary

ICONS: dict[Tone, str] = {"good": "✅", "warn": "⚠️", "bad": "❌", "info": "ℹ️"}

LONG = 20
"""Rows from which a table has a fold of its own."""

LIMIT = 60_000
"""Maximum bytes; GitHub refuses comments of 65 536 characters."""


def render_markdown(summary: Summary) -> str:
    """Render gates, the answer, and the tables behind it in folds, in at most `LIMIT` bytes."""
    parts = [
        "# offpol-diag",
        *(_gate(summary) if summary.gates else ()),
        *(_answer(summary) if not short(summary) else ()),
        *(_block(block) for section in short(summary) for block in section.blocks),
        *(fold for section in sections(summary) for fold in _folds(section)),
    ]
    return printable_lines("\n\n".join(_within(parts)) + "\n")


def render_check(found: Checked) -> str:
    """Render what `check` found, in at most `LIMIT` bytes."""
    blocks = (block for section in check.sections(found) for block in section.blocks)
    return printable_lines("\n\n".join(_within(["# offpol-diag", *map(_block, blocks)])) + "\n")


def _answer(summary: Summary) -> list[str]:
    """Return the verdict, the facts as a list, and the headline numbers and corrections as tables."""
    found = answer(summary)
    first, *rest = (escaped(line) for line in found.headline if line)
    facts = "\n".join(
        (_candidates(found) if label == DECIDE else "") + f"- **{label}** {escaped(text)}"
        for label, text in found.facts
    )
    corrections = [
        (row.name, value_or_dash(row.weighted), written(row.ess).value) for row in found.corrections
    ]
    return [
        " ".join((f"{ICONS[found.tone]} **{first}**", *rest)),
        escaped(found.about),
        escaped(f"Columns: {found.columns}."),
        *(f"⚠️ {escaped(line)}" for line in found.cautions),
        facts,
        _grid(
            ("number", "value", "band", found.steps),
            [(one.label, value_of(one), one.band, one.course) for one in found.tiles if one.short],
        ),
        escaped(f"* {found.heavy}") if found.heavy else "",
        _grid(("correction", "tokens with a weight", "ESS"), corrections),
        *(f"- {escaped(line)}" for line in found.findings),
    ]


def _candidates(found: Answer) -> str:
    """Return the candidates as a list within the list of facts, each with its evidence."""
    lines = (
        f"  {place}. {escaped(one.statement)} {escaped(spoken(one))}\n"
        for place, one in enumerate(found.candidates, 1)
    )
    return f"- **Candidates**\n{''.join(lines)}"


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(map(_row, lines)) if rows else ""


def _gate(summary: Summary) -> list[str]:
    """Return the verdict of the gate and its bounds, which come first."""
    head, *_ = gate(summary.gates).blocks
    return ["## Gate", _block(head), _block(report(summary.gates, whole=False))]


def _folds(section: Section) -> list[str]:
    """Return a section in a fold; a table of many rows is one of its own."""
    known = [one for one in plain(section.blocks) if not (isinstance(one, Table) and one.id == "gates")]
    long = [one for one in known if isinstance(one, Table) and len(one.rows) > LONG]
    texts = "\n\n".join(text for one in known if one not in long and (text := _block(one)))
    return [
        *([_fold(section.title, texts)] if texts else []),
        *(_fold(one.caption, text) for one in long if (text := _block(replace(one, caption="")))),
    ]


def _fold(title: str, text: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>\n\n{text}\n\n</details>"


def _within(pieces: Iterable[str]) -> list[str]:
    """Return as many leading pieces as the limit allows, with a notice if any are omitted."""
    kept: list[str] = []
    room = LIMIT - 200
    for piece in filter(None, pieces):
        room -= len(piece.encode()) + 2
        if room < 0:
            return [*kept, "_The rest does not fit here; the HTML report has it._"]
        kept.append(piece)
    return kept


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return escaped(block.text)
    if isinstance(block, Verdict):
        return _verdict(block)
    if isinstance(block, Code):
        return f"{escaped(block.caption)}:\n\n````\n{block.text.replace('````', '')}````"
    if isinstance(block, Table) and not block.collapsed:
        return _table(block)
    return ""


def _verdict(verdict: Verdict) -> str:
    said = f": {escaped(verdict.text)}" if verdict.text else ""
    head = f"{ICONS[verdict.tone]} **{escaped(verdict.label)}**{said}"
    return "\n".join((head, *(f"- {escaped(line)}" for line in verdict.detail)))


def _table(table: Table) -> str:
    cells = [[shown(cell) for cell in row] for row in table.rows]
    marks = {note: f"({number})" for note, number in footnotes(cells).items()}
    rows = [
        [" ".join(filter(None, (one.text, one.interval, marks.get(one.note, "")))) for one in row]
        for row in cells
    ]
    footed = (*(f"{mark} {note}" for note, mark in marks.items()), *table.notes)
    notes = "".join(f"\n\n{escaped(note)}" for note in footed)
    caption = f"**{escaped(table.caption)}**\n\n" if table.caption else ""
    head = "\n".join(map(_row, (table.header, ["---"] * len(table.header))))
    return "\n".join((caption + head, *(_row([*map(escaped, row)]) for row in rows))) + notes


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """Escape text for Markdown and HTML, on one line."""
    one_line = printable(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|~]|(?<=\])\()", r"\\\1", one_line)
