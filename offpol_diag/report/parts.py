"""The sections of a page below its answer: charts, corrections, places, worst responses, the dump."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from offpol_diag import files
from offpol_diag.diagnosis.metadata import observed
from offpol_diag.errors import UsageError, install
from offpol_diag.metrics import BANDS
from offpol_diag.number import Number
from offpol_diag.numerals import counted, rounded
from offpol_diag.printable import printable
from offpol_diag.report.answer import Answer
from offpol_diag.report.charts import Chart
from offpol_diag.result import DumpFacts, Result, Run, WorstSequence
from offpol_diag.table import Cell, Table

CONVENTIONS = (
    "Log-ratio Δ = log π_train − log π_rollout, ratio r = e^Δ; every bound is on r. Intervals are 95% and "
    "come from a bootstrap that resamples groups of sequences, never tokens."
)
UNGROUPED = (
    "Without a group_id each sequence is a group of its own, equal ones together, and the intervals are too "
    "narrow if a prompt was sampled more than once."
)


class Token(NamedTuple):
    """A token: its text, its colour (n1 to n4: less likely under the trainer; p1 to p4), a remark."""

    text: str
    look: str
    remark: str


@dataclass(frozen=True)
class Part:
    """A section: its anchor, which is its name in the contents, paragraphs, charts, strips, and tables."""

    id: str
    title: str
    text: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    strips: Sequence[tuple[str, Sequence[Token]]] = ()
    tables: Sequence[Table] = ()


def parts(summary: Result, answer: Answer) -> Iterator[Part]:
    """Yield the sections of a page; of an analysis all of them, of other answers their further numbers."""
    tables = [table for table in answer.tables if table.shown != "always"]
    if not answer.tiles:
        if tables:
            yield Part("numbers", "All numbers", tables=tables)
        yield _dump(summary, [])
        return
    presets = [one for one in tables if one.id in ("presets", "dropped-by-length")]
    where = [one for one in tables if one.id == "where" or one.id.startswith("by-")]
    yield Part("charts", "What the mismatch looks like", charts=answer.charts)
    for id_, title, some in (
        ("presets", "Every correction on this dump", presets),
        ("where", "Where the mismatch lives", where),
    ):
        unfolded = [replace(one, shown="always", caption="") if one.id == id_ else one for one in some]
        if unfolded:
            yield Part(id_, title, tables=unfolded)
    if summary.worst:
        yield Part("worst", "The worst responses", strips=strips(summary), tables=[_worst(summary)])
    yield _dump(summary, [*(one for one in tables if one not in (*presets, *where)), _bands()])


def _bands() -> Table:
    """Return the bands of every number, with what they were observed on."""
    rows = []
    for metric, band in ((metric, band) for metric, bands in BANDS.items() for band in bands):
        low, high = (None if end is None else rounded(end) for end in (band.low, band.high))
        span = f"{low} to {high}" if low and high else f"below {high}" if high else f"above {low}"
        rows.append((metric, band.name, span, band.regime, band.source))
    header = ("number", "band", "range", "regime", "source")
    caption = "Where the bands come from; a value is only comparable within its regime"
    return Table("bands", caption, header, [*rows, *observed()], shown="page")


def _dump(summary: Result, tables: Sequence[Table]) -> Part:
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
    return Part("dump", "The dump", text, tables=[*tables, table])


def _facts(before: str, given: DumpFacts | Run) -> Iterator[tuple[str, Cell]]:
    """Yield name and value of each field; of a field with names, of each."""
    for field, value in given.model_dump(mode="json").items():
        named = {f": {key}": one for key, one in value.items()} if isinstance(value, dict) else {"": value}
        for key, one in named.items():
            text = ", ".join(map(str, one)) or "none" if isinstance(one, list) else one
            plain = isinstance(text, str) or type(text) is int
            yield (
                f"{before}{field.replace('_', ' ')}{key}",
                text if plain else json.dumps(text, ensure_ascii=False),
            )


# ---------------------------------------------------------------- the worst responses

STEPS = (1.1, 2.0, 10.0, 1000.0)
"""Factors between the policies at which the colour of a token changes."""


def _worst(result: Result) -> Table:
    """Return the worst responses, without columns that the dump lacks."""
    rows: list[tuple[Cell, ...]] = []
    for one in result.worst:
        numbers = (one.k3_mean, one.log_ratio_sum, one.max_abs_log_ratio)
        known = (one.sequence_id, one.step, one.policy_lag, one.length, *map(Number, numbers))
        rows.append((*known, None if one.reward is None else Number(one.reward)))
    caption = f"{counted(len(rows), 'sequence')} with the largest mean K3"
    header = ("sequence", "step", "lag", "length", "K3, mean", "ΣΔ, nats", "max |Δ|, nats", "reward")
    table = Table("worst-sequences", caption, header, rows, shown="page")
    return table.without_empty()


def strips(result: Result) -> Sequence[tuple[str, Sequence[Token]]]:
    """Return id and tokens of the worst responses; none where the texts of their tokens are not known."""
    texts = result.charts.token_texts
    return [(one.sequence_id, _tokens(one, texts)) for one in result.worst if one.token_ids and texts]


def _tokens(one: WorstSequence, texts: Mapping[str, str]) -> list[Token]:
    found = [Token(f"[{counted(one.first, 'token')} before]", "mk", "")] if one.first else []
    last = one.positions[0] - 1
    for token, at, delta, *logs in zip(
        one.token_ids, one.positions, one.log_ratios, one.rollout_log_probs, one.train_log_probs, strict=True
    ):
        if at > last + 1:
            found.append(Token(f"[{at - last - 1} masked]", "mk", ""))
        q, p = (math.exp(min(log, 700)) for log in logs)  # log-probs above 0 are a bug, and may be any
        remark = f"position {at}: Δ {delta:+.3g}, π_rollout {q:.3g}, π_train {p:.3g}"
        found.append(Token(texts.get(str(token), str(token)), shade(delta), remark))
        last = at
    return found


def shade(delta: float) -> str:
    """Return the colour of a token by its log-ratio; empty if both policies agree within a factor of 1.1."""
    strength = sum(abs(delta) >= math.log(step) for step in STEPS)
    return f"{'n' if delta < 0 else 'p'}{strength}" if strength else ""


# ---------------------------------------------------------------- texts of ids, from a tokenizer.json

MOST = 256 << 20
"""Most bytes of a tokenizer.json."""
SHOWN = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})
"""White space, made visible."""


def with_texts(result: Result, path: Path | None) -> Result:
    """Add the text of every token id that a report shows, if a tokenizer.json is given.

    White space is made visible, and a token without a text of its own has its name in the vocabulary.
    """
    if path is None:
        return result
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        what = "--tokenizer needs the package tokenizers, which is not installed"
        raise UsageError(what, install("tokenizer")) from error
    try:
        tokenizer = Tokenizer.from_buffer(files.read(path, MOST))
    except Exception as error:  # tokenizers raises Exception itself
        reason = error.strerror if isinstance(error, OSError) else str(error)
        what = f"--tokenizer: cannot read {printable(str(path))}: {printable(str(reason))}"
        raise UsageError(what, "give the tokenizer.json beside the model's weights") from None
    ids = {one for row in result.worst for one in row.token_ids}
    texts = {}
    for one in sorted(one for one in ids if 0 <= one < 1 << 32):
        text = tokenizer.decode([one], skip_special_tokens=False)
        if not text or "\ufffd" in text:  # bytes that are no text by themselves
            text = tokenizer.id_to_token(one) or ""
        if text:
            texts[str(one)] = printable(text.translate(SHOWN))
    charts = result.charts.model_copy(update={"token_texts": texts})
    return result.model_copy(update={"charts": charts})
