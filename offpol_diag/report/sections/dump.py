"""Section on the dump and its data quality."""

from __future__ import annotations

import json

from offpol_diag.blocks import Block, Cell, Section, Table, Text, Verdict
from offpol_diag.numerals import count, counted
from offpol_diag.summary import DumpFacts, Number, Summary

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


def dump(summary: Summary) -> Section:
    """Return files, counts, columns, provenance, notes and skipped rows."""
    facts = summary.dump
    blocks: tuple[Block, ...] = (
        Text(_sentence(facts)),
        *(Verdict("Note", note, "warn") for note in facts.notes),
        Table("counts", "Counts", ("what", "value"), _counts(facts)),
        Table(
            "columns",
            "Columns: what was found, and under which name",
            ("our name", "read from"),
            _columns(facts),
        ),
        *_provenance(facts),
        *_files(facts),
    )
    return Section("dump", "What is in the dump", blocks)


def _sentence(facts: DumpFacts) -> str:
    held = f"{counted(len(facts.files), 'file')} with {counted(facts.rows, 'row')} held"
    tokens = f"{counted(facts.sequences, 'sequence')} with {counted(facts.tokens, 'unmasked response token')}"
    return f"{held} {tokens}, in {_groups(facts)}."


def _groups(facts: DumpFacts) -> str:
    about = "" if facts.groups_exact else "about "
    if "group_id" in facts.columns:
        return f"{about}{counted(facts.groups, 'group')} (prompts)"
    return (
        f"{about}{counted(facts.groups, 'group')}: without a group_id each sequence is its own, equal ones "
        "together, and the intervals are too narrow if a prompt was sampled more than once"
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


def _columns(facts: DumpFacts) -> tuple[tuple[Cell, ...], ...]:
    found = tuple(facts.columns.items())
    missing = tuple((name, "not in this dump") for name in EXPECTED if name not in facts.columns)
    return found + missing


def _provenance(facts: DumpFacts) -> tuple[Block, ...]:
    if not facts.provenance:
        return (Text("The files say nothing of their provenance (trainer, engine, temperature, top-p)."),)
    rows = tuple((key, _stated(value)) for key, value in facts.provenance.items())
    return (Table("provenance", "Provenance, as the files state it", ("what", "value"), rows),)


def _stated(value: object) -> str:
    """Return text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _files(facts: DumpFacts) -> tuple[Block, ...]:
    rows = tuple((number, file) for number, file in enumerate(facts.files, 1))
    return (Table("files", f"Files ({count(len(rows))})", ("no.", "file"), rows, collapsed=True),)
