"""Draw the answer in a terminal: at most `LINES` lines, within its width, readable without colour."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text as Line

from offpol_diag.metrics import Tone
from offpol_diag.numerals import minus, value_or_dash, written
from offpol_diag.printable import printable
from offpol_diag.report.render.dots import share
from offpol_diag.report.sections.answer import DECIDE, MISSING, Answer, Correction
from offpol_diag.report.sections.diagnosis import NOTHING
from offpol_diag.report.sections.numbers import Tile
from offpol_diag.summary import CandidateCause

LINES, WIDEST = 40, 100
FILES = 3
"""Lines that are left for the names of the files written."""
MOST_EVIDENCE = 2
"""Lines of one piece of evidence."""
MOST_WRAPPED = 4
"""Lines of one fact; of the rest --verbose tells."""
STATEMENT, LEAST_ROOM = 30, 40
"""Width of a candidate's statement, and the least that its evidence needs beside it."""
WORD = 20
"""Width that the last column needs, so that its text is cut and not left out."""
TICKS, TICKS_WIDTH, BAR = "▁▂▃▄▅▆▇█", 9, 16
STYLES: dict[Tone, str] = {"good": "bold green", "info": "bold", "warn": "bold yellow", "bad": "bold red"}
ASCII = str.maketrans(
    dict(zip("▁▂▃▄▅▆▇█·─│•✓✗–−×…’", "_.:-=+*#.-|*vx--x.'", strict=True))
    | {
        "→": "->",
        "≤": "<=",
        "≥": ">=",
        "±": "+-",
        "Δ": "Delta",
        "π": "pi",
        "Π": "prod",
        "∏": "prod",
        "θ": "theta",
    }
    | {"χ": "chi", "²": "2", "κ": "kappa", "λ": "lambda", "Σ": "sum", "∑": "sum", "√": "sqrt", "≈": "~"}
    | {"\u0302": "hat", "←": "<-", "↑": "^", "↓": "v", "∞": "inf", "·": ".", "°": "deg", "‖": "||"}
)
"""Plain spellings of the characters that an encoding may lack."""


def plain(text: str, encoding: str) -> str:
    """Return text that the encoding can hold, spelled in ASCII where it cannot."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "replace").decode(encoding)
    return text


def answer_lines(answer: Answer, width: int, encoding: str = "utf-8") -> list[tuple[str, str]]:
    """Return the lines of an answer, each with its style, in at most `LINES` less what files' names take."""
    width = min(width, WIDEST)
    shorter = _ever_shorter(answer)
    shortest = [replace(shorter[-1], candidates=answer.candidates[:many]) for many in (4, 3, 2)]
    for one, evidence in [*((one, MOST_EVIDENCE) for one in shorter), *((one, 1) for one in shortest)]:
        lines = _lines(one, width, lambda text: plain(printable(text), encoding), evidence)
        if len(lines) <= LINES - FILES:
            break
    return [(plain(text, encoding), style) for text, style in lines]


def print_answer(answer: Answer, console: Console) -> None:
    """Print an answer on a console."""
    for text, style in answer_lines(answer, console.width, console.encoding):
        console.print(Line(text, style=style), soft_wrap=True)


def _ever_shorter(answer: Answer) -> list[Answer]:
    """Return the answer, then with fewer corrections, findings, cautions, sentences and headline numbers."""
    found = [answer]
    short = tuple((label, _first(text) if label == "How sure" else text) for label, text in answer.facts)
    for change in (
        {"corrections": answer.corrections[:4]},
        {"others_at": ""},
        {"findings": answer.findings[:2]},
        {"corrections": answer.corrections[:3]},
        {"corrections": answer.corrections[:2]},
        {"facts": short},
        {"facts": tuple(fact for fact in short if fact[0] != "Warnings")},
        {"cautions": answer.cautions[:2]},
        {"findings": ()},
        {"tiles": answer.tiles[:4]},
        {"corrections": ()},
        {"cautions": answer.cautions[:1]},
        {"facts": tuple(fact for fact in answer.facts if fact[0] not in ("Warnings", MISSING))},
    ):
        found.append(replace(found[-1], **change))
    return found


def _first(text: str) -> str:
    """Return the first sentence."""
    return re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)[0]


Spell = Callable[[str], str]


def _lines(answer: Answer, width: int, spell: Spell, evidence: int) -> list[tuple[str, str]]:
    said = partial(_said, spell)
    about = ", ".join(filter(None, (answer.about, answer.all_read)))
    found = [(line, "") for line in _wrapped(spell(about), width)]
    found += [(line, "yellow") for one in answer.cautions for line in _wrapped(said(f"! {one}"), width, 2)]
    found.append(("", ""))
    found += [
        (line, STYLES[answer.tone]) for one in answer.headline if one for line in _wrapped(said(one), width)
    ]
    found.append(("", ""))
    labels = [label for label, _ in answer.facts] + ["Candidates"] * bool(answer.candidates)
    margin = max(map(len, labels), default=0) + 2
    for label, text in answer.facts:
        if label == DECIDE:
            found += [
                (f"{'' if place else 'Candidates':<{margin}}{line}", "")
                for place, line in enumerate(_candidates(answer, width - margin, said, evidence))
            ]
        for place, line in enumerate(_wrapped(said(text), width - margin, MOST_WRAPPED)):
            found.append((f"{'' if place else label:<{margin}}{line}", ""))
    for block in (_tiles(answer, width, said), _corrections(answer.corrections, width, said)):
        found += [("", ""), *((line, "") for line in block)] if block else []
    found += [(spell(answer.others_at), "")] if answer.others_at else []
    found += [("", "")] if answer.findings else []
    found += [(line, "") for one in answer.findings for line in _wrapped(said(f"• {one}"), width, indent=2)]
    found.append(("", ""))
    read = "" if answer.all_read else spell(f"columns {answer.columns}")
    found += [(line, "") for line in _wrapped(read, width, MOST_WRAPPED, indent=8)]
    found += [(f"{label:<8}{spell(text)}", "") for label, text in answer.commands]
    return found


def _said(spell: Spell, text: str) -> str:
    """Spell what is read, and not copied, with minus signs."""
    return spell(minus(text))


def _wrapped(text: str, width: int, most: int = 100, indent: int = 0) -> list[str]:
    hanging = {"subsequent_indent": " " * indent, "max_lines": most, "placeholder": " …"}
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False, **hanging)  # type: ignore[arg-type]


def _candidates(answer: Answer, width: int, spell: Spell, most: int) -> list[str]:
    """Return each candidate's statement, and beside or below it the weightiest evidence for and against."""
    found: list[str] = []
    beside = width - STATEMENT - 2
    for place, one in enumerate(answer.candidates, 1):
        statement = spell(f"{place}. {one.statement.rstrip('.')}")
        said = [
            line
            for side, texts in _sides(one)
            for line in _wrapped(
                spell(f"{side}: {texts[0] if texts else NOTHING}"),
                beside if beside >= LEAST_ROOM else width - 2,
                most,
                indent=2,
            )
        ]
        if beside < LEAST_ROOM:
            found += [*_wrapped(statement, width, indent=3), *(f"  {line}" for line in said)]
            continue
        left = _wrapped(statement, STATEMENT, indent=3)
        found += [f"{a:<{STATEMENT + 2}}{b}".rstrip() for a, b in zip_longest(left, said, fillvalue="")]
    return found


def _sides(one: CandidateCause) -> Iterator[tuple[str, Sequence[str]]]:
    if one.for_ or one.against:
        yield from (("for", one.for_), ("against", one.against))
    else:
        yield "for and against", ()


def _tiles(answer: Answer, width: int, spell: Spell) -> list[str]:
    found = [tile for tile in answer.tiles if tile.short]
    if not found:
        return []
    header = ["", "value", "band", answer.steps]
    rows = []
    for tile in found:
        known = [value for value in tile.curve if value is not None]
        log = tile.number.unit != "fraction" and len(known) > 1 and max(known) > 30 * min(known) > 0
        drawn = "no trend" if tile.flat else sparkline(tile.curve, log, TICKS_WIDTH)
        ticks = f"{drawn:<{TICKS_WIDTH}}  {tile.ends}"
        rows.append([tile.label, value_of(tile), tile.band, ticks if len(known) > 1 else ""])
    return [
        *_columns([header, *rows], width, spell),
        *_wrapped(spell(f"* {answer.heavy}") if answer.heavy else "", width, indent=2),
    ]


def value_of(tile: Tile) -> str:
    """Return a tile's value with its interval, and what stands beside it."""
    parts = (*written(tile.number), f"({tile.beside})" if tile.beside else "")
    return " ".join(part for part in parts if part) if tile.number.known else ""


def _corrections(rows: Sequence[Correction], width: int, spell: Spell) -> list[str]:
    if not rows:
        return []
    cells = [["", "tokens with a weight", "ESS", "rule"]]
    for row in rows:
        share = row.weighted.value
        bar = "" if share is None else f"{_bar(share)} {value_or_dash(row.weighted):>5}"
        cells.append([row.name, bar, written(row.ess).value, row.what])
    return _columns(cells, width, spell)


def _bar(share: float) -> str:
    """Return a bar that is full, or empty, only where the share is exactly 1, or 0."""
    full = round(BAR * share)
    full = min(max(full, int(share > 0)), BAR - int(share < 1))
    return "█" * full + "·" * (BAR - full)


def _columns(rows: Sequence[Sequence[str]], width: int, spell: Spell) -> list[str]:
    """Return rows in columns, under a rule; columns from the right go where there is no room for them."""
    cells = [[spell(cell) for cell in row] for row in rows]
    while True:
        widths = [max(cell_len(cell) for cell in column) for column in zip(*cells, strict=True)]
        total = sum(widths) + 2 * (len(widths) - 1)
        if total <= width or len(widths) == 2:
            break
        room = width - total + widths[-1]
        if room >= WORD:
            cells = [[*row[:-1], (_wrapped(row[-1], room, 1) or [""])[0]] for row in cells]
        else:
            cells = [row[:-1] for row in cells]
    lines = [
        "  ".join(cell + " " * (w - cell_len(cell)) for cell, w in zip(row, widths, strict=True))
        for row in cells
    ]
    head, *body = (line.rstrip()[:width] for line in lines)
    return [head, spell("─" * min(total, width)), *body]


def sparkline(values: Sequence[float | None], log: bool = False, width: int = 32) -> str:
    """Return a sparkline of at most `width` ticks, with gaps for missing values; empty for fewer than two."""
    step = max(1, math.ceil(len(values) / width))
    heights = [
        None
        if value is None or not math.isfinite(value) or (log and value <= 0)
        else math.log10(value)
        if log
        else value
        for value in values[::step]
    ]
    known = [height for height in heights if height is not None]
    if len(known) < 2:
        return ""
    low, high, top = min(known), max(known), len(TICKS) - 1
    return "".join(" " if h is None else TICKS[round(top * share(h, low, high))] for h in heights)
