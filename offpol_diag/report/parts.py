"""The sections of a page below its answer: charts, corrections, places, worst responses, the dump."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from offpol_diag.diagnosis.recorded import observed
from offpol_diag.metrics import BANDS, REGIMES
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, rounded, say_value, size
from offpol_diag.report.answer import Answer
from offpol_diag.report.plot import Chart
from offpol_diag.report.tokens import strips, title
from offpol_diag.report.tokens import tables as of_tokens
from offpol_diag.result import DumpFacts, Result
from offpol_diag.table import Cell, Table

CONVENTIONS = (
    "Log-ratio Δ = log π_train − log π_rollout, ratio r = e^Δ; every bound is on r. Intervals are 95% and "
    "come from a bootstrap that resamples groups of sequences, never tokens."
)

UNGROUPED = (
    "Without a group_id each sequence is a group of its own, equal ones together, and the intervals are too "
    "narrow if a prompt was sampled more than once."
)


@dataclass(frozen=True)
class Part:
    """A section: paragraphs, charts, strips of tokens, and tables.

    Attributes:
        id: its anchor; `short`: its name in the contents.
    """

    id: str
    title: str
    short: str
    text: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    strips: Any = None
    tables: tuple[Table, ...] = ()


SECTIONS = {"presets": "presets", "dropped-by-length": "presets", "where": "where"}
"""Table → its section; those by place stand with `where`, all others with the dump."""
OPEN = ("presets", "where")
"""Tables that stand unfolded."""


def parts(summary: Result, answer: Answer) -> Iterator[Part]:
    """Yield the sections of a page; of an analysis all of them, of other answers their further numbers."""
    tables = [table for table in answer.tables if table.shown != "always" and table.rows]
    if not any(fact.title for fact in answer.facts):
        if tables:
            yield Part("numbers", "All numbers", "Numbers", tables=tuple(tables))
        yield _dump(summary)
        return
    found: dict[str, list[Table]] = {"presets": [], "where": [], "dump": []}
    for one in tables:
        place = "where" if one.id.startswith("by-") else SECTIONS.get(one.id, "dump")
        found[place].append(replace(one, shown="always", caption="") if one.id in OPEN else one)
    drawn = {
        here: tuple(one for one in answer.charts if (one.name == "where") is here) for here in (False, True)
    }
    worst = tuple(one for one in of_tokens(summary) if one.rows)
    yield Part("charts", "What the mismatch looks like", "Charts", charts=drawn[False])
    if found["presets"]:
        yield Part("presets", "Every correction on this dump", "Presets", tables=tuple(found["presets"]))
    if found["where"]:
        some = tuple(found["where"])
        yield Part("where", "Where the mismatch lives", "Where", charts=drawn[True], tables=some)
    if worst:
        yield Part("tokens", title(summary), "Worst", strips=strips(summary), tables=worst)
    yield _dump(summary, (*found["dump"], _bands()))


def _bands() -> Table:
    """Return the bands of every number, with what they were observed on."""
    rows = []
    for one in chain.from_iterable(BANDS.values()):
        low, high = (None if end is None else rounded(end) for end in (one.low, one.high))
        span = f"{low} to {high}" if low and high else f"below {high}" if high else f"above {low}"
        rows.append((one.metric, one.name, span, one.regime, one.source))
    header = ("number", "band", "range", "regime", "source")
    caption = "Where the bands come from; a value is only comparable within its regime"
    return Table("bands", caption, header, [*rows, *observed(), *REGIMES], shown="page")


def _dump(summary: Result, tables: tuple[Table, ...] = ()) -> Part:
    """Return what was read, how it was computed, and all that the files and the run say of themselves."""
    run, runs = summary.run, {"A": summary.dump} | {one.letter: one.run.dump for one in summary.against}
    text, rows = list[str](), list[tuple[str, Cell]]()
    for letter, facts in runs.items():
        before = f"{letter}: " if len(runs) > 1 else ""
        if "group_id" not in facts.columns:
            text.append(f"{before}{UNGROUPED}")
        rows += [(f"{before}{what}", value) for what, value in _facts(facts)]
    text.append(f"{CONVENTIONS} Seed {run.seed}, {counted(run.replicates, 'replicate')}.")
    rows += [
        ("command", f"{run.command}, offpol-diag {run.version}"),
        ("device and engine", f"{run.device}, {run.engine}"),
        ("peak memory", size(run.peak_rss_bytes)),
        *((f"seconds, {name}", say_value(round(value, 3))) for name, value in run.seconds.items()),
    ]
    every = Table("dump", "Columns, provenance, files and run", ("what", "value"), rows, shown="page")
    return Part("dump", "The dump", "Dump", tuple(text), tables=(*tables, every))


def _facts(facts: DumpFacts) -> Iterator[tuple[str, Cell]]:
    """Yield counts, columns, provenance and files of a dump."""
    yield "rows", facts.rows
    yield "rows skipped as bad", facts.skipped.count
    yield "sequences", facts.sequences
    yield "groups (a prompt of a step)", f"{'' if facts.groups_exact else 'about '}{count(facts.groups)}"
    yield "unmasked response tokens", facts.tokens
    yield "masked tokens, left out", facts.masked_tokens
    yield "mean length, unmasked tokens", Number(facts.mean_length)
    yield "longest sequence", facts.max_length
    yield from ((f"column {role}", f"read from {column}") for role, column in facts.columns.items())
    if {"rewards", "group_id"} <= set(facts.columns) and "advantages" not in facts.columns:
        yield "column advantages", "made of the rewards, within each group of a step"
    yield "columns read by their own names", ", ".join(facts.others) or "none"
    yield "columns ignored", "not known" if facts.ignored is None else ", ".join(facts.ignored) or "none"
    for key, value in facts.provenance.items():
        yield f"metadata {key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not facts.provenance:
        yield "metadata", "the files say nothing of trainer, engine, temperature, top-p"
    yield from ((f"file {place}", name) for place, name in enumerate(facts.files, 1))
