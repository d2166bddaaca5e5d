"""Rows → a packed batch: what the mask excludes ends here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offpol_diag.batch import Batch
from offpol_diag.readers import columns, keys
from offpol_diag.readers.labels import labels
from offpol_diag.readers.ragged import Array, Ints, starts
from offpol_diag.readers.rows import Rows
from offpol_diag.readers.schemas import Plan
from offpol_diag.readers.slices import Slice

# Field of a batch → its column and type, for fields with a value per token.
PER_TOKEN: dict[str, tuple[str, type[np.generic]]] = {
    "rollout": (columns.ROLLOUT, np.float64),
    "old": (columns.OLD, np.float64),
    "current": (columns.CURRENT, np.float64),
    "advantages": (columns.ADVANTAGES, np.float64),
    "token_ids": (columns.TOKEN_IDS, np.int64),
    "entropy": (columns.ENTROPY, np.float64),
}

# Bytes; freeing the largest block that counts teaches the GNU allocator to keep smaller ones.
LESSON = (32 << 20) - (64 << 10)


def keep_memory() -> None:
    """Have the memory of one batch kept for the next.

    Left alone, the allocator hands the arrays of a batch back to the system, which clears every page of the
    next ones: a tenth of the time of a reading. The block is never touched, so it takes no memory itself.
    """
    np.empty(LESSON, np.uint8)


@dataclass(frozen=True)
class Layout:
    """Where kept tokens stand.

    Attributes:
        lengths: kept tokens per sequence, [S].
        position: index of each kept token in its response, [T].
        runs: where runs of adjacent kept tokens start, and the end, [R+1].
    """

    lengths: Ints
    position: Ints
    runs: Ints


def pack(piece: Slice, rows: Rows, plan: Plan) -> Batch:
    """The batch that good rows make, on the CPU.

    Raises:
        DumpError: text that is not UTF-8.
    """
    if plan.bare:
        return _bare(piece, rows, plan)
    layout = _layout(rows)
    scalars = labels(piece, plan)  # first: it refuses text that the keys could not hash
    arrays = _token_arrays(rows, layout.lengths) | _sequence_arrays(rows)
    arrays["key"] = _keys(piece, plan, arrays["rollout"], layout)
    arrays["cu_seqlens"] = starts(layout.lengths)
    arrays["cu_runs"] = layout.runs
    arrays["position"] = layout.position
    arrays["masked"] = rows.lengths - layout.lengths
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch(**tensors, scalars=scalars)


def _bare(piece: Slice, rows: Rows, plan: Plan) -> Batch:
    """Values, lengths and labels alone; what a batch must have besides is zeros, and a turn is a sequence."""
    lengths = rows.kept_lengths
    arrays = _token_arrays(rows, lengths) | _sequence_arrays(rows)
    offsets = torch.from_numpy(starts(lengths))
    zeros = torch.zeros(1, dtype=torch.int64)
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch(
        **tensors,
        cu_seqlens=offsets,
        cu_runs=offsets,
        position=zeros.expand(len(arrays["rollout"])),
        key=zeros.expand(len(lengths)),
        masked=torch.from_numpy(rows.lengths - lengths),
        scalars=labels(piece, plan),
    )


def _layout(rows: Rows) -> Layout:
    token = np.arange(rows.kept) if rows.whole else np.flatnonzero(rows.live)
    lengths, said = rows.kept_lengths, rows.lists.get(columns.POSITION)
    if said is not None:
        position = _said(said.values, rows, token)
        return Layout(lengths, position, _runs(lengths, np.flatnonzero(np.diff(position) != 1) + 1))
    breaks = _breaks(rows)
    np.subtract(token, np.repeat(rows.offsets[:-1], lengths), out=token)
    return Layout(lengths, token, _runs(lengths, breaks))


def _said(values: Array, rows: Rows, token: Ints) -> Ints:
    """The index of kept tokens [T] in their responses as the dump says it, counting from anywhere."""
    filled = rows.kept_lengths > 0
    begins = values[rows.offsets[:-1][filled]]
    position: Ints = values[token] - np.repeat(begins, rows.kept_lengths[filled])
    return position


def _breaks(rows: Rows) -> Ints:
    """How many tokens are kept before each that is not: most often few are not."""
    masked = np.zeros(0, np.int64) if rows.whole else np.flatnonzero(~rows.live)
    return masked - np.arange(len(masked))


def _token_arrays(rows: Rows, lengths: Ints) -> dict[str, Array]:
    """Fields with a value per token, of sequences that keep so many, [S]."""
    found = {
        name: _copied(rows, rows.lists[role].values, dtype)
        for name, (role, dtype) in PER_TOKEN.items()
        if role in rows.lists
    }
    if columns.ADVANTAGES in rows.numbers:  # one per sequence: every token has it
        found["advantages"] = np.repeat(rows.numbers[columns.ADVANTAGES], lengths)
    return found


def _copied(rows: Rows, values: Array, dtype: type[np.generic]) -> Array:
    """What the mask lets through, in memory of its own, which values as they were read do not have."""
    kept = rows.let_through(values)
    return kept.astype(dtype, copy=kept is values)


def _sequence_arrays(rows: Rows) -> dict[str, Array]:
    found: dict[str, Array] = {}
    if columns.REWARDS in rows.numbers:
        found["rewards"] = rows.numbers[columns.REWARDS]
    if columns.ADVANTAGES in rows.lists:
        found["masked_negative"] = _masked_negative(rows)
    return found


def _masked_negative(rows: Rows) -> Ints:
    """Masked tokens with A < 0 in each row, [S]."""
    if rows.whole:
        return np.zeros(len(rows.lengths), np.int64)
    return rows.counted(np.less(rows.lists[columns.ADVANTAGES].values, 0) & ~rows.live)


def _keys(piece: Slice, plan: Plan, rollout: Array, layout: Layout) -> Ints:
    def contents() -> Ints:
        return keys.of_contents(rollout, layout.position, layout.lengths)

    if columns.GROUP not in plan.columns:
        return contents()
    return keys.of_groups(piece.table.column(plan.columns[columns.GROUP]), contents)


def _runs(lengths: Ints, breaks: Ints) -> Ints:
    """Where runs start, and the end, [R+1]: where sequences of such lengths do [S], and at breaks within."""
    offsets = starts(lengths)
    begins = np.zeros(offsets[-1] + 1, np.bool_)
    begins[breaks] = True
    begins[offsets] = True
    return np.flatnonzero(begins)
