"""What the recommendation weighed: every method at every threshold, and the configuration to paste."""

from __future__ import annotations

from offpol_diag.blocks import Block, Cell, Code, Table
from offpol_diag.numerals import count
from offpol_diag.summary import Alignment, AlignmentRow, Number, Recommendation

WEIGHTS = (
    "ess_tokens",
    "ess_sequences",
    "tokens_rejected",
    "truncated_high",
    "weight_mean",
    "weight_max",
    "truncated_low",
    "sequences_dropped",
)
"""Columns of what is told of the method and of those beside it."""
HEADER = ("method", "alignment", "measured", "noise", "weight kept", "refused")


def advice(given: Recommendation, alignment: Alignment | None) -> tuple[Block, ...]:
    """The table of candidates, and the configuration where a trainer is named."""
    config = (Code("The configuration, ready to paste", given.config),) if given.config else ()
    if alignment is None or not any(row.score is not None for row in alignment.rows.values()):
        return config
    rows = tuple(_row(row) for row in alignment.rows.values())
    return (*config, Table("candidates", _caption(alignment), HEADER, rows, wide=True))


def weights(given: Recommendation) -> tuple[Block, ...]:
    """What the method, the runner-up and no correction do to the weights, each at its own threshold."""
    rows: list[tuple[Cell, ...]] = [
        (title, *map(metrics.get, WEIGHTS)) for title, metrics in given.numbers.items() if metrics
    ]
    caption = "The method and those beside it, each at its own threshold"
    return (Table("numbers", caption, ("method", *WEIGHTS), tuple(rows)),) if rows else ()


def _caption(alignment: Alignment) -> str:
    update = count(round(alignment.batch_sequences))
    blind = "" if alignment.direction else "; without token ids and advantages only the noise can be seen"
    reference = alignment.rows[alignment.reference].title
    return f"Alignment of the gradient in updates of {update} sequences, relative to {reference}{blind}"


def _row(row: AlignmentRow) -> tuple[str | Number, ...]:
    kept, noise = Number(value=row.kept), Number(value=row.noise)
    return row.title, row.alignment, row.seen, noise, kept, row.refused or "–"
