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
CONVENTIONS = (
    "Log-ratio Δ = log π_train − log π_rollout, ratio r = e^Δ; every bound is on r. Intervals are 95% and "
    "come from a bootstrap that resamples groups of sequences, never tokens."
)


def data(summary: Summary) -> Section:
    """Return counts, columns, provenance, files, the run, and every name with its formula and unit."""
    facts, run = summary.dump, summary.run
    first: Numbers = {}
    for preset in summary.presets.values():
        first = {**preset.metrics, **first}
    definitions = [
        (prefix + name, one.formula or "as named", one.over or "–", one.unit or "1")
        for prefix, some in (("", summary.metrics), ("PRESET.", first))
        for name, one in some.items()
    ]
    lacks = columns.missing(facts)
    missing = [
        (name, f"not in this dump: {lacks[name]}" if name in lacks else "not in this dump")
        for name in EXPECTED
        if name not in facts.columns
    ]
    named = [*facts.columns.items(), *missing]
    named += [("read by their own names", columns.whole(facts.others))] if facts.others else []
    named += [("ignored", columns.ignored(facts))]
    read_from = "Columns: what was read, under which name, and what was ignored"
    files = list(enumerate(facts.files, 1))
    all_numbers = f"Definitions of all {count(len(definitions))} numbers"
    what, defined = ("what", "value"), ("number", "formula", "over", "unit")
    blocks: tuple[Block, ...] = (
        Text(_sentence(facts)),
        Text(f"{CONVENTIONS} Seed {run.seed}, {counted(run.replicates, 'replicate')}."),
        Table("counts", "Counts", what, _counts(facts), folded=True),
        Table("columns", read_from, ("name", "read from"), named, folded=True),
        _provenance(facts),
        Table("run", "The run", what, _run(run), folded=True),
        Table("files", f"Files ({count(len(files))})", ("no.", "file"), files, collapsed=True),
        Table("definitions", all_numbers, defined, definitions, collapsed=True),
    )
    return Section("data", "Data and provenance", blocks, "Data")


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


def _provenance(facts: DumpFacts) -> Block:
    """Return what the files state: text unchanged, anything else as JSON."""
    if not facts.provenance:
        return Text("The files say nothing of their provenance (trainer, engine, temperature, top-p).")
    rows = [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in facts.provenance.items()
    ]
    return Table("provenance", "Provenance, as the files state it", ("what", "value"), rows, folded=True)


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
