"""The dump's contents, the provenance of the numbers, and the definition of each."""

from __future__ import annotations

import json

from offpol_diag.blocks import Block, Cell, Section, Table, Text
from offpol_diag.numerals import count, counted, say_value, size
from offpol_diag.report.sections import columns
from offpol_diag.summary import DumpFacts, Number, Numbers, Run, Summary

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


def data(summary: Summary) -> Section:
    """Return counts, columns, provenance, files, the run, and every name with its formula and unit."""
    run, other = summary.run, summary.against
    first: Numbers = {}
    for preset in summary.presets.values():
        first = {**preset.metrics, **first}
    definitions = [
        (prefix + name, one.formula or "as named", one.over or "–", one.unit or "1")
        for prefix, some in (("", summary.metrics), ("PRESET.", first))
        for name, one in some.items()
    ]
    all_numbers = f"Definitions of all {count(len(definitions))} numbers"
    defined = ("number", "formula", "over", "unit")
    runs = {"": summary.dump} if other is None else {"A": summary.dump, "B": other.b.dump}
    blocks: tuple[Block, ...] = (
        *(Text(f"{f'{name}: ' if name else ''}{_sentence(facts)}") for name, facts in runs.items()),
        Text(f"{CONVENTIONS} Seed {run.seed}, {counted(run.replicates, 'replicate')}."),
        *(block for name, facts in runs.items() for block in _of_dump(facts, name)),
        Table("run", "The run", WHAT, _run(run), folded=True),
        *(_files(facts, name) for name, facts in runs.items()),
        Table("definitions", all_numbers, defined, definitions, collapsed=True),
    )
    return Section("data", "Data and provenance", blocks, "Data")


def _of_dump(facts: DumpFacts, run: str) -> tuple[Block, ...]:
    """Return counts, columns and provenance of a dump; `run` is A or B where there are two."""
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
    return (
        Table(_id("counts", run), _titled("Counts", run), WHAT, _counts(facts), folded=True),
        Table(_id("columns", run), _titled(read_from, run), ("name", "read from"), named, folded=True),
        _provenance(facts, run),
    )


def _files(facts: DumpFacts, run: str) -> Table:
    files = list(enumerate(facts.files, 1))
    title = _titled(f"Files ({count(len(files))})", run)
    return Table(_id("files", run), title, ("no.", "file"), files, collapsed=True)


def _id(name: str, run: str) -> str:
    return f"{name}-b" if run == "B" else name


def _titled(title: str, run: str) -> str:
    return f"{run}: {title}" if run else title


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


def _provenance(facts: DumpFacts, run: str) -> Block:
    """Return what the files state: text unchanged, anything else as JSON."""
    if not facts.provenance:
        said = "The files say nothing of their provenance (trainer, engine, temperature, top-p)."
        return Text(_titled(said, run))
    rows = [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in facts.provenance.items()
    ]
    title = _titled("Provenance, as the files state it", run)
    return Table(_id("provenance", run), title, WHAT, rows, folded=True)


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
