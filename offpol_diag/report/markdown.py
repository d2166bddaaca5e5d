"""An answer in GitHub flavoured Markdown: for a pull request, with the tables behind it folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from offpol_diag.metrics import Tone
from offpol_diag.numerals import minus
from offpol_diag.printable import printable, printable_lines
from offpol_diag.report.answer import Answer, Fact
from offpol_diag.report.cells import footnotes, shown
from offpol_diag.report.terminal import evidence, tile_text
from offpol_diag.table import Table

ICONS: dict[Tone, str] = {"good": "✅", "warn": "⚠️", "bad": "❌", "info": "ℹ️"}
LIMIT = 60_000
"""Maximum bytes; GitHub refuses comments of 65 536 characters."""
LEFT_OUT = "The rest is left out: a comment holds no more. The report has all."


def markdown(answer: Answer) -> str:
    """Return an answer as Markdown, in at most `LIMIT` bytes."""
    more = f" {escaped(answer.more)}" if answer.more else ""
    parts = [
        f"# {answer.heading}",
        f"{ICONS[answer.tone]} **{escaped(answer.headline)}**{more}",
        escaped(answer.about),
        *(f"⚠️ {escaped(line)}" for line in answer.cautions),
        "\n".join(line for fact in answer.facts for line in _fact(fact)),
        *_tiles(answer),
        *(_table(table) for table in answer.tables if table.rows and table.shown == "always"),
        *(f"{escaped(caption)}:\n\n````\n{text.replace('````', '')}\n````" for caption, text in answer.code),
        *map(escaped, answer.remarks),
        *_evidence(answer),
        *(
            _folded(one.caption, _table(one, False))
            for one in answer.tables
            if one.rows and one.shown in ("more", "folded")
        ),
        *_charts(answer),
    ]
    return printable_lines("\n\n".join(_within([part for part in parts if part])) + "\n")


def _within(parts: Sequence[str]) -> Iterator[str]:
    """Yield parts until the limit, and what was left out."""
    room = LIMIT - len(LEFT_OUT) - 100
    for part in parts:
        room -= len(part.encode()) + 2
        if room < 0:
            yield LEFT_OUT
            return
        yield part


def _fact(fact: Fact) -> Iterator[str]:
    if fact.sentence:
        yield f"- **{escaped(fact.label)}** {escaped(fact.sentence)}"
    elif fact.spelled:
        yield f"- **{fact.label}**"
        yield from (f"  {escaped(line.text)} {escaped(line.detail)}" for line in fact.lines)


def _evidence(answer: Answer) -> Iterator[str]:
    """Yield what the facts rest on; of candidates it is said with them."""
    rows = [
        f"- **{escaped(fact.label)}** {escaped(line)}"
        for fact in answer.facts
        if not fact.spelled
        for line in evidence(fact)
    ]
    if rows:
        yield _folded("What it rests on", "\n".join(rows))


def _tiles(answer: Answer) -> Iterator[str]:
    rows = [
        (one.label, tile_text(one), one.band, f"{'no trend, ' if one.flat else ''}{one.below}")
        for one in answer.tiles
        if one.short
    ]
    if rows:
        notes = (f"* {answer.heavy}",) if answer.heavy else ()
        yield _table(Table("tiles", "", ("number", "value", "band", answer.over), rows, notes))


def _charts(answer: Answer) -> Iterator[str]:
    found = [f"- {escaped(one.title)}" for one in answer.charts]
    if found:
        yield _folded("What the charts show", "\n".join(found))


def _folded(caption: str, text: str) -> str:
    return f"<details><summary>{escaped(caption)}</summary>\n\n{text}\n\n</details>"


def _table(table: Table, captioned: bool = True) -> str:
    cells = [[shown(cell) for cell in row] for row in table.rows]
    marks = {note: f"({number})" for note, number in footnotes(cells).items()}
    rows = [
        [" ".join(filter(None, (one.text, one.interval, marks.get(one.note, "")))) for one in row]
        for row in cells
    ]
    footed = (*(f"{mark} {note}" for note, mark in marks.items()), *table.notes)
    notes = "".join(f"\n\n{escaped(note)}" for note in footed)
    caption = f"**{escaped(table.caption)}**\n\n" if table.caption and captioned else ""
    head = "\n".join(map(_row, (table.header, ["---"] * len(table.header))))
    return "\n".join((caption + head, *(_row([*map(escaped, row)]) for row in rows))) + notes


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """Escape text for Markdown and HTML, on one line."""
    one_line = printable(" ".join(minus(text).split())).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|~]|(?<=\])\()", r"\\\1", one_line)
