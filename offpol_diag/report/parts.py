"""The sections of a page below its answer: numbers, charts, presets, tokens, the dump."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from offpol_diag.diagnosis.recorded import observed
from offpol_diag.metrics import BANDS, METRICS, REGIMES
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, rounded, say_value, size
from offpol_diag.report import columns
from offpol_diag.report.answer import Answer
from offpol_diag.report.presets import missing, presets
from offpol_diag.report.tokens import strips, title
from offpol_diag.report.tokens import tables as of_tokens
from offpol_diag.result import DumpFacts, Result, Run
from offpol_diag.table import Cell, Table

EXPECTED = (
    "rollout_log_probs",
    "old_log_probs",
    "current_log_probs",
    "response_mask",
    "advantages",
    "rewards",
    "token_ids",
    "entropy",
    "sequence_id",
    "group_id",
    "step",
    "policy_lag",
)
WHAT = ("what", "value")
CONVENTIONS = (
    "Log-ratio Δ = log π_train − log π_rollout, ratio r = e^Δ; every bound is on r. Intervals are 95% and "
    "come from a bootstrap that resamples groups of sequences, never tokens."
)


@dataclass(frozen=True)
class Part:
    """A section: paragraphs, what a macro of the page draws of it, and its tables.

    Attributes:
        id: its anchor; `short`: its name in the contents.
        macro: the macro of the page that draws something of it; `drawn`: what it draws.
    """

    id: str
    title: str
    short: str
    text: tuple[str, ...] = ()
    macro: str = ""
    drawn: Any = None
    tables: tuple[Table, ...] = ()


def parts(summary: Result, answer: Answer) -> Iterator[Part]:
    """Yield the sections of a page; of an analysis all of them, of other answers their further numbers."""
    tables = tuple(table for table in answer.tables if table.shown != "always" and table.rows)
    rescored = summary.reference is not None and summary.run.command == "rescore"
    other = summary.comparison or summary.against or summary.sweep or summary.gates or rescored
    if other:
        if tables:
            yield Part("numbers", "All numbers", "Numbers", tables=tables)
        yield _data(summary)
        return
    extra = tuple(one for one in (_meanings(summary), _bands(summary)) if one.rows)
    numbers = tuple(one for one in tables if one.id not in ("steps", "pairs"))
    yield Part("numbers", "Headline numbers", "Numbers", macro="Tiles", tables=numbers + extra)
    if answer.charts:
        yield Part(
            "charts", "Where the mismatch is", "Charts", macro="Charts", tables=tuple(by_place(summary))
        )
    if summary.presets:
        every = tuple(one for one in (presets(summary), missing(summary)) if one.rows)
        yield Part("presets", "Every correction on this batch", "Presets", tables=every)
    worst, of_tokens_ = strips(summary), tuple(one for one in of_tokens(summary) if one.rows)
    if of_tokens_:
        macro = "Strips" if worst else ""
        yield Part("tokens", title(summary), "Tokens", macro=macro, drawn=worst, tables=of_tokens_)
    yield _data(summary)


def by_place(summary: Result) -> Iterator[Table]:
    """Yield a table of all numbers for each axis."""
    for axis, found in summary.axes.items():
        places = summary.at(axis)
        names = dict.fromkeys(name for place in places for name in place.numbers)
        rows: list[tuple[Cell, ...]] = [
            (place.key, place.tokens, place.sequences, *(place.numbers.get(name, Number()) for name in names))
            for place in places
        ]
        more = (f"{count(found.left_out)} more places are not listed.",) if found.left_out else ()
        header = (found.title, "tokens", "sequences", *names)
        yield Table(f"by-{axis}", f"All numbers by {found.title}", header, rows, more, shown="page")


# ---------------------------------------------------------------- numbers


def _meanings(summary: Result) -> Table:
    """Return the main numbers of the main pair, each with what it says."""
    known, prefix = summary.whole, summary.prefix
    said = {name: one.meaning for name, one in METRICS.items() if one.meaning}
    keys = {prefix + name: says for name, says in said.items() if prefix + name in known}
    rows = [(key, known[key], says) for key, says in keys.items()]
    caption, header = "What the headline numbers mean", ("number", "value", "what it says")
    return Table("headline", caption, header, rows, shown="page")


def _bands(summary: Result) -> Table:
    rows = []
    for one in chain.from_iterable(BANDS.values()):
        low, high = (None if end is None else rounded(end) for end in (one.low, one.high))
        span = f"{low} to {high}" if low and high else f"below {high}" if high else f"above {low}"
        rows.append((one.metric, one.name, span, one.regime, one.source))
    header = ("number", "band", "range", "regime", "source")
    said = "Where the bands come from; a value is only comparable within its regime"
    known = summary.number("k3").known
    return Table("bands", said, header, [*rows, *observed(), *REGIMES] if known else (), shown="page")


# ---------------------------------------------------------------- the dump and the run


def _data(summary: Result) -> Part:
    """Return counts, columns, provenance, files and the run."""
    run = summary.run
    runs = {"A" if summary.against else "": summary.dump}
    runs |= {one.letter: one.run.dump for one in summary.against}
    text = [f"{name and f'{name}: '}{_sentence(facts)}" for name, facts in runs.items()]
    text += [f"{CONVENTIONS} Seed {run.seed}, {counted(run.replicates, 'replicate')}."]
    silent = "The files say nothing of their provenance (trainer, engine, temperature, top-p)."
    text += [f"{name and f'{name}: '}{silent}" for name, facts in runs.items() if not facts.provenance]
    tables = [[_of_run(name, table) for table in _of_dump(facts)] for name, facts in runs.items()]
    every = [
        *(table for some in tables for table in some[:-1]),
        Table("run", "The run", WHAT, _run(run), shown="page"),
        *(some[-1] for some in tables),
    ]
    return Part("data", "Data and provenance", "Data", tuple(text), tables=tuple(every))


def _of_run(run: str, table: Table) -> Table:
    """Return a table of a dump, named after its run where there are several."""
    name = table.id if run in ("", "A") else f"{table.id}-{run.lower()}"
    return replace(table, id=name, caption=f"{run}: {table.caption}" if run else table.caption)


def _of_dump(facts: DumpFacts) -> Iterator[Table]:
    """Yield counts, columns, provenance and files of a dump."""
    lacks = columns.missing(facts)
    if {"rewards", "group_id"} <= set(facts.columns):
        lacks["advantages"] = "made of the rewards, within each group of a step"
    missing = [
        (name, f"not in this dump: {lacks[name]}" if name in lacks else "not in this dump")
        for name in EXPECTED
        if name not in facts.columns
    ]
    named = [*facts.columns.items(), *missing]
    named += [("read by their own names", columns.whole(facts.others))] if facts.others else []
    named += [("ignored", columns.ignored(facts))]
    read_from = "Columns: what was read, under which name, and what was ignored"
    yield Table("counts", "Counts", WHAT, _counts(facts), shown="page")
    yield Table("columns", read_from, ("name", "read from"), named, shown="page")
    if facts.provenance:
        rows = [
            (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for key, value in facts.provenance.items()
        ]
        yield Table("provenance", "Provenance, as the files state it", WHAT, rows, shown="page")
    files = list(enumerate(facts.files, 1))
    yield Table("files", f"Files ({count(len(files))})", ("no.", "file"), files, shown="page")


def _sentence(facts: DumpFacts) -> str:
    held = f"{counted(len(facts.files), 'file')} with {counted(facts.rows, 'row')} held"
    tokens = f"{counted(facts.sequences, 'sequence')} with {counted(facts.tokens, 'unmasked response token')}"
    groups = f"{'' if facts.groups_exact else 'about '}{counted(facts.groups, 'group')}"
    if "group_id" in facts.columns:
        return f"{held} {tokens}, in {groups} (prompts)."
    return (
        f"{held} {tokens}, in {groups}: without a group_id each sequence is its own, equal ones together, "
        "and the intervals are too narrow if a prompt was sampled more than once."
    )


def _counts(facts: DumpFacts) -> tuple[tuple[Cell, ...], ...]:
    exact = "" if facts.groups_exact else " (estimated)"
    return (
        ("rows", facts.rows),
        ("rows skipped as bad", facts.skipped.count),
        ("sequences with an unmasked token", facts.sequences),
        ("unmasked tokens", facts.tokens),
        ("masked tokens, left out", facts.masked_tokens),
        (f"groups{exact}", facts.groups),
        ("mean length, unmasked tokens", Number(value=facts.mean_length)),
        ("longest sequence", facts.max_length),
    )


def _run(run: Run) -> tuple[tuple[Cell, ...], ...]:
    return (
        ("command", run.command),
        ("offpol-diag", run.version),
        ("device", run.device),
        ("engine", run.engine),
        ("seed", str(run.seed)),
        ("bootstrap replicates", count(run.replicates)),
        ("peak memory", size(run.peak_rss_bytes)),
        *((f"seconds, {name}", say_value(round(value, 3))) for name, value in run.seconds.items()),
    )
