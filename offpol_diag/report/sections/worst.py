"""Section on the worst sequences, and the worst tokens with their neighbours."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.blocks import Block, Cell, Section, Table
from offpol_diag.numerals import counted
from offpol_diag.summary import Number, Summary, WorstSequence, WorstToken

SEQUENCES = ("sequence", "step", "length", "k3, mean", "ΣΔ, nats", "max |Δ|, nats")
TOKENS = (
    "sequence",
    "step",
    "position",
    "length",
    "token id",
    "log π rollout",
    "log π train",
    "Δ, nats",
    "Δ of the 3 before",
    "Δ of the 3 after",
)
NOTE = "Positions count from 0. Δ = log π_train − log π_rollout."


def worst(summary: Summary) -> Section | None:
    """Return the worst sequences and tokens; None if there is no mismatch."""
    sequences = tuple(_sequence(one) for one in summary.worst.sequences)
    tokens = tuple(_token(one, summary.charts.token_texts) for one in summary.worst.tokens)
    first = f"{counted(len(sequences), 'sequence')} with the largest mean k3"
    then = f"{counted(len(tokens), 'token')} with the largest |Δ|, in context"
    blocks = (
        *_table("worst-sequences", first, SEQUENCES, sequences),
        *_table("worst-tokens", then, TOKENS, tokens),
    )
    return Section("worst", "Worst sequences and tokens", blocks) if blocks else None


def _sequence(one: WorstSequence) -> tuple[Cell, ...]:
    numbers = (one.k3_mean, one.log_ratio_sum, one.max_abs_log_ratio)
    return (one.sequence_id, one.step, one.length, *(Number(value=value) for value in numbers))


def _token(one: WorstToken, texts: Mapping[str, str]) -> tuple[Cell, ...]:
    token = None if one.token_id is None else token_name(one.token_id, texts)
    numbers = (one.rollout_log_prob, one.train_log_prob, one.log_ratio)
    return (
        one.sequence_id,
        one.step,
        one.position,
        one.length,
        token,
        *(Number(value=value) for value in numbers),
        _row(one.before),
        _row(one.after),
    )


def token_name(token_id: int, texts: Mapping[str, str]) -> str:
    """Return a token's id, and its text if it is known."""
    text = texts.get(str(token_id), "")
    return f"{token_id} {text}" if text else str(token_id)


def _row(values: list[float]) -> str:
    return ", ".join(f"{round(value, 3) + 0.0:.3f}" for value in values) or "none"


def _table(
    name: str, caption: str, header: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...]
) -> tuple[Block, ...]:
    """Return a table without columns that the dump lacks, which the notes name."""
    absent = [i for i in range(len(header)) if all(row[i] is None for row in rows)]
    kept = tuple(tuple(_said(cell) for i, cell in enumerate(row) if i not in absent) for row in rows)
    heads = tuple(head for i, head in enumerate(header) if i not in absent)
    notes = (NOTE, *(f"The dump does not say: {header[i]}." for i in absent))
    return (Table(name, caption, heads, kept, notes),) if rows else ()


def _said(cell: Cell) -> Cell:
    return "not in the dump" if cell is None else cell
