"""The sections of a page below its answer: charts, corrections, places, worst responses, the dump."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from offpol_diag.diagnosis.recorded import observed
from offpol_diag.metrics import BANDS, REGIMES
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, rounded, say_value, size
from offpol_diag.report.analyze import by_place, missing, presets
from offpol_diag.report.answer import Answer
from offpol_diag.report.plot import Chart
from offpol_diag.report.tokens import strips, title
from offpol_diag.report.tokens import tables as of_tokens
from offpol_diag.result import DumpFacts, Result, Run
from offpol_diag.table import Cell, Table

CONVENTIONS = (
    "Log-ratio Δ = log π_train − log π_rollout, ratio r = e^Δ; every bound is on r. Intervals are 95% and "
    "come from a bootstrap that resamples groups of sequences, never tokens."
)


MOST_NAMES, LONG = 500, 200
"""Names of columns that are listed, and characters of one: room for all but those of a very wide dump."""


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


def parts(summary: Result, answer: Answer) -> Iterator[Part]:
    """Yield the sections of a page; of an analysis all of them, of other answers their further numbers."""
    tables = {table.id: table for table in answer.tables if table.shown != "always" and table.rows}
    rescored = summary.reference is not None and summary.run.command == "rescore"
    if summary.comparison or summary.against or summary.sweep or summary.gates or rescored:
        if tables:
            yield Part("numbers", "All numbers", "Numbers", tables=tuple(tables.values()))
        yield _dump(summary)
        return
    where, turns = (tables.pop(name, None) for name in ("where", "turns"))
    tables.pop("steps", None)  # of which the section on places has all numbers
    drawn = [one for one in answer.charts if one.name != "where"]
    yield Part("charts", "What the mismatch looks like", "Charts", charts=tuple(drawn))
    if summary.presets:
        of_presets = (presets(summary), tables.pop("dropped-by-length", None), missing(summary))
        some = tuple(one for one in of_presets if one is not None and one.rows)
        yield Part("presets", "Every correction on this dump", "Presets", tables=some)
    shown = [replace(where, shown="always", caption="")] if where else []
    shown += [replace(turns.without([5]), shown="always")] if turns else []
    located = tuple(one for one in answer.charts if one.name == "where")
    every = (*shown, *by_place(summary))
    if every:
        yield Part("where", "Where the mismatch lives", "Where", charts=located, tables=every)
    worst = tuple(one for one in of_tokens(summary) if one.rows)
    if worst:
        yield Part("tokens", title(summary), "Worst", strips=strips(summary), tables=worst)
    yield _dump(summary, (*tables.values(), _bands(summary)))


def _bands(summary: Result) -> Table:
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
    run = summary.run
    runs = {"A": summary.dump} | {one.letter: one.run.dump for one in summary.against}
    named = len(runs) > 1
    text = [f"{f'{name}: ' * named}{_held(facts)}" for name, facts in runs.items()]
    text += [f"{CONVENTIONS} Seed {run.seed}, {counted(run.replicates, 'replicate')}."]
    rows = [
        (f"{f'{name}: ' * named}{what}", value)
        for name, facts in runs.items()
        for what, value in _facts(facts)
    ]
    every = Table(
        "dump", "Columns, provenance, files and run", ("what", "value"), [*rows, *_run(run)], shown="page"
    )
    return Part("dump", "The dump", "Dump", tuple(text), tables=(*tables, every))


def _held(facts: DumpFacts) -> str:
    """Return what the files held, in a sentence."""
    held = f"{counted(len(facts.files), 'file')} with {counted(facts.rows, 'row')} held"
    tokens = f"{counted(facts.sequences, 'sequence')} with {counted(facts.tokens, 'unmasked response token')}"
    groups = f"{'' if facts.groups_exact else 'about '}{counted(facts.groups, 'group')}"
    if "group_id" in facts.columns:
        return f"{held} {tokens}, in {groups} (prompts)."
    return (
        f"{held} {tokens}, in {groups}: without a group_id each sequence is its own, equal ones together, "
        "and the intervals are too narrow if a prompt was sampled more than once."
    )


def _facts(facts: DumpFacts) -> Iterator[tuple[str, Cell]]:
    """Yield counts, columns, provenance and files of a dump."""
    yield "rows skipped as bad", facts.skipped.count
    yield "masked tokens, left out", facts.masked_tokens
    yield "mean length, unmasked tokens", Number(value=facts.mean_length)
    yield "longest sequence", facts.max_length
    for role, column in facts.columns.items():
        yield f"column {role}", f"read from {column}"
    if {"rewards", "group_id"} <= set(facts.columns) and "advantages" not in facts.columns:
        yield "column advantages", "made of the rewards, within each group of a step"
    yield "columns read by their own names", whole(facts.others) or "none"
    yield "columns ignored", "not known" if facts.ignored is None else whole(facts.ignored) or "none"
    for key, value in facts.provenance.items():
        yield f"metadata {key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not facts.provenance:
        yield "metadata", "the files say nothing of trainer, engine, temperature, top-p"
    for place, name in enumerate(facts.files, 1):
        yield f"file {place}", name


def whole(names: Sequence[str]) -> str:
    """Return a list of names that may take a few pages, but not hundreds."""
    shown = [name if len(name) <= LONG else f"{name[: LONG - 1]}…" for name in names[:MOST_NAMES]]
    more = f" and {count(len(names) - MOST_NAMES)} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(shown)}{more}"


def _run(run: Run) -> Iterator[tuple[str, Cell]]:
    """Yield how it was computed."""
    yield "command", f"{run.command}, offpol-diag {run.version}"
    yield "device and engine", f"{run.device}, {run.engine}"
    yield "peak memory", size(run.peak_rss_bytes)
    for name, value in run.seconds.items():
        yield f"seconds, {name}", say_value(round(value, 3))
