"""Rows of a table → a batch without masked tokens, with labels and keys of its sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from offpol_diag.dump import schema
from offpol_diag.dump.batch import FIELDS, INCREMENT, Array, Batch, mix
from offpol_diag.errors import DumpError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NULL = np.iinfo(np.int64).min
"""Stands for null among integers; among floats NaN does."""


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Ragged:
    """A column of lists: `values` [N], null as NaN or `NULL`; `lengths` [S], 0 where a row is `absent`."""

    values: Array
    lengths: Ints
    absent: Flags

    @classmethod
    def of(cls, column: pa.Array) -> Ragged:
        """Convert a column of any Arrow list type."""
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = dense(column.flatten())  # not `.values`, which covers rows outside of a slice too
        if pt.is_null(flat.type) or pt.is_boolean(flat.type):
            flat = flat.cast(pa.float64() if pt.is_null(flat.type) else pa.uint8())
        if pt.is_integer(flat.type) and (flat.null_count or pt.is_uint64(flat.type)):
            flat = flat.cast(pa.int64(), safe=False).fill_null(NULL)
        absent = column.is_null().to_numpy(zero_copy_only=False)
        return cls(flat.to_numpy(zero_copy_only=False), lengths, absent)

    @cached_property
    def offsets(self) -> Ints:
        """Start offset of each row, and the end, [S+1]."""
        return np.concatenate(([0], np.cumsum(self.lengths)))


def dense(column: pa.Array) -> pa.Array:
    """Decode a dictionary column."""
    return column.dictionary_decode() if pt.is_dictionary(column.type) else column


@dataclass(frozen=True)
class Rows:
    """S rows, one sequence each, masked tokens included.

    Attributes:
        roles: canonical name → the table's column, of those that an analysis reads.
        others: further columns with one value per row, for breakdowns and for the diagnosis.
        number: number of each row in the whole dump, [S].
        where: file and row group, for messages.
        row: number of each row in its file, [S], for messages.
    """

    table: pa.RecordBatch
    roles: Mapping[str, str]
    others: Sequence[str]
    number: Ints
    where: str
    row: Ints

    def place(self, index: int) -> str:
        """Return where a row lies, for messages."""
        return f"{self.where}, row {self.row[index]}"

    def only(self, good: Flags) -> Rows:
        """Return the rows flagged in `good` [S]."""
        table = self.table.filter(pa.array(good))
        return replace(self, table=table, number=self.number[good], row=self.row[good])

    @cached_property
    def columns(self) -> dict[str, pa.Array]:
        """The columns by canonical name."""
        return {role: self.table.column(name) for role, name in self.roles.items()}

    @cached_property
    def lists(self) -> dict[str, Ragged]:
        """The columns of lists; those of prompts have lengths of their own."""
        return {role: Ragged.of(x) for role, x in self.columns.items() if schema.is_list(x.type)}

    def numbers(self, role: str) -> Floats:
        """Return a column with one number per row, [S], NaN where null."""
        wide = dense(self.columns[role]).cast(pa.float64(), safe=False)
        return np.array(wide.to_numpy(zero_copy_only=False))

    @property
    def rollout(self) -> Ragged:
        """The rollout's log-probs, as long as all columns of tokens, masked ones included."""
        return self.lists[schema.ROLLOUT]

    @cached_property
    def live(self) -> Flags:
        """Flags of unmasked tokens, [T] bool; all True without a mask."""
        mask = self.lists.get(schema.MASK)
        return np.ones(int(self.rollout.offsets[-1]), np.bool_) if mask is None else np.equal(mask.values, 1)

    @cached_property
    def kept(self) -> Ints:
        """Indices of unmasked tokens, [T] → [kept]."""
        return np.flatnonzero(self.live)


# ---------------------------------------------------------------- labels


def plain(column: pa.Array, place: str) -> list[Any]:
    """Return labels as numbers, booleans or text, to which Arrow casts what is neither; NaN is null.

    Raises:
        DumpError: bytes that are no UTF-8, or a type that has no text.
    """
    column = dense(column)
    try:
        if pt.is_floating(column.type):
            wide = column.cast(pa.float64())
            column = pc.if_else(pc.is_nan(wide), None, wide)
        elif not (pt.is_integer(column.type) or pt.is_boolean(column.type) or pt.is_null(column.type)):
            column = column.cast(pa.large_string())
        found: list[Any] = column.to_pylist()
    except (pa.ArrowException, ValueError) as error:
        raise DumpError(f"{place}: no label ({error})", "write the column again as UTF-8 text") from error
    return found


def labels(rows: Rows) -> dict[str, list[Any]]:
    """Return the labels of sequences by name: lists of length S, None where null.

    A missing `sequence_id` is the row's number in the whole dump; a missing `policy_lag` is the difference of
    the versions; `prompt_length` is that of `prompt_ids` where these are there.
    """
    found = dict[str, list[Any]]()
    names = {role: rows.roles[role] for role in schema.LABELS if role in rows.roles}
    for ours, name in (names | {name: name for name in rows.others}).items():
        place = f"{rows.where}, rows {rows.row[0]} to {rows.row[-1]}, column {name!r}"
        found[ours] = plain(rows.table.column(name), place)
        if ours in schema.COUNTS:
            found[ours] = [None if one is None else int(one) for one in found[ours]]
    if schema.SEQUENCE not in found:
        found = {schema.SEQUENCE: rows.number.tolist()} | found
    if schema.ROLLOUT_VERSION in found and schema.TRAIN_VERSION in found:
        pairs = zip(found[schema.TRAIN_VERSION], found[schema.ROLLOUT_VERSION], strict=True)
        found = {schema.LAG: [None if None in pair else pair[0] - pair[1] for pair in pairs]} | found
    if prompts := rows.lists.get(schema.PROMPT_IDS):
        cut = zip(np.split(prompts.values, prompts.offsets[1:-1]), prompts.absent, strict=True)
        ids = [None if none else one for one, none in cut]
        lengths: list[Any] = [None if x is None else len(x) for x in ids]
        found = {schema.PROMPT_LENGTH: lengths, schema.PROMPT_IDS: ids} | found
    return found


# ---------------------------------------------------------------- rows → batch


def pack(rows: Rows) -> Batch:
    """Pack good rows into a batch."""
    scalars, kept = labels(rows), rows.kept
    offsets = np.searchsorted(kept, rows.rollout.offsets)
    lengths, all_kept = np.diff(offsets), kept.size == rows.live.size
    arrays: dict[str, Array] = {"cu_seqlens": offsets, "masked": rows.rollout.lengths - lengths}
    for field, role in FIELDS.items():
        dtype = np.int64 if pt.is_integer(schema.COLUMNS[role].stored) else np.float64
        if role in rows.lists:
            values = rows.lists[role].values  # what Arrow decoded is read-only: it is copied in any case
            arrays[field] = values.astype(dtype) if all_kept else values[kept].astype(dtype, copy=False)
        elif role == schema.ADVANTAGES and role in rows.columns:  # one per sequence: every token has it
            arrays[field] = np.repeat(rows.numbers(role), lengths)
    if schema.REWARDS in rows.columns:
        arrays["rewards"] = rows.numbers(schema.REWARDS)
    filled, position = lengths > 0, kept
    first = rows.rollout.offsets[:-1][filled]
    if recorded := rows.lists.get(schema.POSITION):  # which may start at any number
        position, first = recorded.values[kept].astype(np.int64), recorded.values[first]
    position = position - np.repeat(first, lengths[filled])
    begins = np.zeros(len(position) + 1, np.bool_)
    begins[1:-1] = np.diff(position) != 1  # behind a masked token a turn begins
    begins[offsets] = True
    key = keys(scalars.get(schema.GROUP), arrays["rollout"], position, offsets)
    return Batch(**arrays, position=position, cu_runs=np.flatnonzero(begins), key=key, scalars=scalars)


def keys(groups: list[Any] | None, rollout: Floats, position: Ints, offsets: Ints) -> Ints:
    """Return a 64-bit key of each sequence's group, the unit of the bootstrap, [S] int64.

    It depends on the group's id (`groups` [S], or None), or without one on the sequence's log-probs [T] and
    their positions [T], never on its place in the dump: splitting or reordering files changes no key. A whole
    number is hashed as itself, so that 3 and 3.0 agree.
    """
    words = np.zeros(len(offsets) - 1, np.uint64)
    if groups is None or None in groups:
        bits = (rollout + 0.0).view(np.uint64)  # + 0.0: -0.0 and 0.0 are one number
        each = mix((bits ^ mix(position.astype(np.uint64) + INCREMENT)) + INCREMENT)
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)))  # modulo 2⁶⁴
        words = sums[offsets[1:]] - sums[offsets[:-1]]
    if groups is not None:
        known = dict[Any, int]()
        for one in {*groups} - {None}:
            whole = isinstance(one, int) or (isinstance(one, float) and one.is_integer())
            digest = b"" if whole else blake2b(str(one).encode(), digest_size=8).digest()
            known[one] = int(one) % 2**64 if whole else int.from_bytes(digest, "little")
        words = np.array([known.get(one, own) for one, own in zip(groups, words, strict=True)], np.uint64)
    return mix(words + INCREMENT).view(np.int64)
