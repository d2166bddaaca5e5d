"""Per-sequence columns that stay on the host: ids, steps, versions, and what a report groups by."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns, kinds
from offpol_diag.readers.schemas import Plan
from offpol_diag.readers.slices import Slice

Labels = dict[str, list[object]]


def labels(piece: Slice, plan: Plan) -> Labels:
    """The scalars of a slice by name, lists of length S, None where null.

    A missing `sequence_id` is the row's number in the whole dump; a missing `policy_lag` is the difference of
    the versions.

    Raises:
        DumpError: text that is not UTF-8.
    """
    names = {role: plan.columns[role] for role in columns.SCALARS if role in plan.columns}
    names |= {name: name for name in plan.extra}
    found = {ours: _listed(piece, name) for ours, name in names.items()}
    found |= {name: _described(piece, name) for name in plan.described if name not in found}
    if columns.SEQUENCE not in found:
        found = {columns.SEQUENCE: (piece.rows + piece.before).tolist()} | found
    return _lag(found) | found


def _lag(found: dict[str, list[Any]]) -> Labels:
    if columns.ROLLOUT_VERSION not in found or columns.TRAIN_VERSION not in found:
        return {}
    pairs = zip(found[columns.TRAIN_VERSION], found[columns.ROLLOUT_VERSION], strict=True)
    return {columns.LAG: [None if None in pair else pair[0] - pair[1] for pair in pairs]}


def _listed(piece: Slice, name: str) -> list[Any]:
    column = piece.table.column(name)
    try:
        found = column.to_pylist()
        return [*map(_text, found)] if kinds.is_bytes(column.type) else found
    except UnicodeDecodeError as error:
        raise DumpError(
            f"{piece.place(_first_undecodable(column))}, column {name!r}: the text is not UTF-8",
            "write the column again as UTF-8 text",
        ) from error


def _described(piece: Slice, name: str) -> list[Any]:
    """A column that nothing needs: where it cannot be read as text there is nothing in it."""
    try:
        return list(piece.table.column(name).to_pylist())
    except UnicodeDecodeError:
        return [None] * len(piece.rows)


def _text(value: Any) -> Any:
    """The value; some writers store text as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _first_undecodable(column: pa.Array) -> int:
    for index in range(len(column)):
        try:
            _text(column[index].as_py())
        except UnicodeDecodeError:
            return index
    return 0
