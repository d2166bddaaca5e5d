"""Rows → a packed batch: what the mask excludes ends here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offpol_diag.batch import Batch
from offpol_diag.readers import columns, keys
from offpol_diag.readers.labels import labels
from offpol_diag.readers.ragged import Array, Flags, Ints, starts
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


@dataclass(frozen=True)
class Layout:
    """Where kept tokens stand.

    Attributes:
        live: which tokens are kept, [N] bool.
        lengths: kept tokens per sequence, [S].
        position: index of each kept token in its response, [T].
    """

    live: Flags
    lengths: Ints
    position: Ints


def pack(piece: Slice, rows: Rows, plan: Plan) -> Batch:
    """The batch that good rows make, on the CPU.

    Raises:
        DumpError: text that is not UTF-8.
    """
    layout = _layout(rows)
    scalars = labels(piece, plan)  # first: it refuses text that the keys could not hash
    arrays = _token_arrays(rows, layout) | _sequence_arrays(rows)
    arrays["key"] = _keys(piece, plan, arrays["rollout"], layout)
    arrays["cu_seqlens"] = starts(layout.lengths)
    arrays["cu_runs"] = _runs(layout)
    arrays["position"] = layout.position
    arrays["masked"] = rows.lengths - layout.lengths
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch(**tensors, scalars=scalars)


def _layout(rows: Rows) -> Layout:
    live, offsets = rows.live, rows.offsets
    kept = np.concatenate(([0], np.cumsum(live, dtype=np.int64)))[offsets]
    return Layout(live, np.diff(kept), _position(rows)[live])


def _position(rows: Rows) -> Ints:
    """The index of every token in its response, [N]; the dump may say it, counting from anywhere."""
    said = rows.lists.get(columns.POSITION)
    position: Ints = np.arange(int(rows.offsets[-1])) if said is None else said.values
    filled = rows.lengths > 0
    return position - np.repeat(position[rows.offsets[:-1][filled]], rows.lengths[filled])


def _token_arrays(rows: Rows, layout: Layout) -> dict[str, Array]:
    found = {
        name: rows.lists[role].values[layout.live].astype(dtype, copy=False)
        for name, (role, dtype) in PER_TOKEN.items()
        if role in rows.lists
    }
    if columns.ADVANTAGES in rows.numbers:  # one per sequence: every token has it
        found["advantages"] = np.repeat(rows.numbers[columns.ADVANTAGES], layout.lengths)
    return found


def _sequence_arrays(rows: Rows) -> dict[str, Array]:
    return {"rewards": rows.numbers[columns.REWARDS]} if columns.REWARDS in rows.numbers else {}


def _keys(piece: Slice, plan: Plan, rollout: Array, layout: Layout) -> Ints:
    contents = keys.of_contents(rollout, layout.position, layout.lengths)
    if columns.GROUP not in plan.columns:
        return contents
    return keys.of_groups(piece.table.column(plan.columns[columns.GROUP]), contents)


def _runs(layout: Layout) -> Ints:
    """Where runs of adjacent kept tokens start, and the end, [R+1]."""
    tokens = len(layout.position)
    begins = np.diff(layout.position, prepend=-1) != 1
    first = starts(layout.lengths)[:-1]
    begins[first[layout.lengths > 0]] = True
    return np.append(np.flatnonzero(begins), tokens)
