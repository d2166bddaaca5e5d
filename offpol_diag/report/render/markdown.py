"""Render a short report in GitHub flavoured Markdown, for pull requests and job summaries."""

from __future__ import annotations

import re
from dataclasses import replace

from offpol_diag.blocks import Block, Code, Section, Table, Text, Tone, Verdict
from offpol_diag.printable import printable, printable_lines
from offpol_diag.report.render.numbers import Shown, footnotes, shown
from offpol_diag.report.sections import sections
from offpol_diag.report.sections.gate import gate, report
from offpol_diag.summary import Summary

PARTS = ("diagnosis", "comparison", "runs", "verdict", "numbers", "presets")
"""Sections of the short report."""

ICONS: dict[Tone, str] = {"good": "✅", "warn": "⚠️", "bad": "❌", "info": "ℹ️"}

LIMIT = 60_000
"""Maximum bytes; GitHub refuses comments of 65 536 characters."""


def render_markdown(summary: Summary) -> str:
    """Render gates, diagnosis, recommendation, headline numbers and presets, in at most `LIMIT` bytes."""
    chosen = [_without_gates(section) for section in sections(summary, PARTS)]
    parts = [*_gate(summary), *chosen]
    pieces = ["# offpol-diag", *(piece for section in parts for piece in _section(section))]
    return printable_lines("\n\n".join(_within(pieces)) + "\n")


def _gate(summary: Summary) -> list[Section]:
    """Return the gate's section, if bounds were given; it comes first."""
    if not summary.gates:
        return []
    head, *_ = gate(summary.gates).blocks
    return [Section("gate", "Gate", (head, report(summary.gates, whole=False)))]


def _without_gates(section: Section) -> Section:
    return replace(
        section, blocks=tuple(block for block in section.blocks if getattr(block, "id", "") != "gates")
    )


def _within(pieces: list[str]) -> list[str]:
    """Return as many leading blocks as the limit allows, with a notice if any are omitted."""
    kept: list[str] = []
    room = LIMIT - 200
    for piece in pieces:
        room -= len(piece.encode()) + 2
        if room < 0:
            return [*kept, "_The rest does not fit here; the HTML report has it._"]
        kept.append(piece)
    return kept


def _section(section: Section) -> list[str]:
    return [f"## {escaped(section.title)}", *(text for block in section.blocks if (text := _block(block)))]


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return escaped(block.text)
    if isinstance(block, Verdict):
        return _verdict(block)
    if isinstance(block, Code):
        return f"{escaped(block.caption)}:\n\n````\n{block.text.replace('````', '')}````"
    if isinstance(block, Table) and not block.collapsed and not block.wide:
        return _table(block)
    return ""


def _verdict(verdict: Verdict) -> str:
    head = f"{ICONS[verdict.tone]} **{escaped(verdict.label)}**: {escaped(verdict.text)}"
    return "\n".join((head, *(f"- {escaped(line)}" for line in verdict.detail)))


def _table(table: Table) -> str:
    lines = (table.header, tuple("---" for _ in table.header))
    head = "\n".join(_row(line) for line in lines)
    cells = [[shown(cell) for cell in row] for row in table.rows]
    marks = footnotes(cells)
    body = "\n".join(_row(tuple(_cell(cell, marks) for cell in row)) for row in cells)
    footed = (*(f"({number}) {note}" for note, number in marks.items()), *table.notes)
    notes = "".join(f"\n\n{escaped(note)}" for note in footed)
    return f"**{escaped(table.caption)}**\n\n{head}\n{body}{notes}"


def _cell(cell: Shown, marks: dict[str, int]) -> str:
    mark = f"({marks[cell.note]})" if cell.note else ""
    return escaped(" ".join(part for part in (cell.text, cell.interval, mark) if part))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """Escape text for Markdown and HTML, on one line."""
    one_line = printable(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|~]|(?<=\])\()", r"\\\1", one_line)
