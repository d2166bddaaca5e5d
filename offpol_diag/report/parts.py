"""The sections of a page below its answer: charts, corrections, places, worst responses, the dump."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from offpol_diag.diagnosis.recorded import observed
from offpol_diag.metrics import BANDS, REGIMES
from offpol_diag.numerals import counted, rounded
from offpol_diag.report import tokens
from offpol_diag.report.answer import Answer
from offpol_diag.report.plot import Chart
from offpol_diag.result import DumpFacts, Result, Run
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
    yield Part("charts", "What the mismatch looks like", "Charts", charts=answer.charts)
    if found["presets"]:
        yield Part("presets", "Every correction on this dump", "Presets", tables=tuple(found["presets"]))
    if found["where"]:
        some = tuple(found["where"])
        yield Part("where", "Where the mismatch lives", "Where", tables=some)
    if summary.worst:
        texts = tokens.strips(summary)
        rows = () if texts else (tokens.table(summary),)
        yield Part("tokens", "The worst responses", "Worst", strips=texts, tables=rows)
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
    """Return all that the files and the run say of themselves, and how it was computed."""
    run, runs = summary.run, {"A": summary.dump} | {one.letter: one.run.dump for one in summary.against}
    text = [f"{CONVENTIONS} Seed {run.seed}, {counted(run.replicates, 'replicate')}."]
    rows = list[tuple[str, Cell]]()
    for letter, facts in runs.items():
        before = f"{letter}: " if len(runs) > 1 else ""
        text += [f"{before}{UNGROUPED}"] if "group_id" not in facts.columns else []
        rows += _facts(before, facts)
    every = [*rows, *_facts("run, ", run)]
    table = Table("dump", "Columns, provenance, files and run", ("what", "value"), every, shown="page")
    return Part("dump", "The dump", "Dump", tuple(text), tables=(*tables, table))


def _facts(before: str, given: DumpFacts | Run) -> Iterator[tuple[str, Cell]]:
    """Yield name and value of each field; of a field with names, of each."""
    for field, value in given.model_dump(mode="json").items():
        name = f"{before}{field.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from ((f"{name}: {key}", _text(one)) for key, one in value.items())
        else:
            yield name, _text(value)


def _text(value: object) -> Cell:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return value if isinstance(value, str) or type(value) is int else json.dumps(value, ensure_ascii=False)
