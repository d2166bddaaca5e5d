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
    """

    lengths: Ints
    position: Ints


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
    arrays["cu_runs"] = _runs(layout)
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
    return Layout(rows.kept_lengths, _position(rows, token, rows.kept_lengths))


def _position(rows: Rows, token: Ints, lengths: Ints) -> Ints:
    """The index of kept tokens [T] in their responses, of which `lengths` [S] are kept, [T].

    The dump may say it, counting from anywhere.
    """
    said = rows.lists.get(columns.POSITION)
    if said is None:
        return np.subtract(token, np.repeat(rows.offsets[:-1], lengths), out=token)
    filled = lengths > 0
    begins = said.values[rows.offsets[:-1][filled]]
    position: Ints = said.values[token] - np.repeat(begins, lengths[filled])
    return position


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
    return {"rewards": rows.numbers[columns.REWARDS]} if columns.REWARDS in rows.numbers else {}


def _keys(piece: Slice, plan: Plan, rollout: Array, layout: Layout) -> Ints:
    def contents() -> Ints:
        return keys.of_contents(rollout, layout.position, layout.lengths)

    if columns.GROUP not in plan.columns:
        return contents()
    return keys.of_groups(piece.table.column(plan.columns[columns.GROUP]), contents)


def _runs(layout: Layout) -> Ints:
    """Where runs of adjacent kept tokens start, and the end, [R+1]."""
    tokens = len(layout.position)
    begins = np.ones(tokens, np.bool_)
    np.not_equal(np.diff(layout.position), 1, out=begins[1:])
    first = starts(layout.lengths)[:-1]
    begins[first[layout.lengths > 0]] = True
    return np.append(np.flatnonzero(begins), tokens)
