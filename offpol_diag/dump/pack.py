"""Rows of a table → a batch without masked tokens, with labels and keys of its sequences."""

from __future__ import annotations

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
from offpol_diag.dump.batch import Array, Batch
from offpol_diag.dump.hashes import INCREMENT, mix
from offpol_diag.dump.schema import is_list, is_text
from offpol_diag.errors import DumpError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

FIELDS = {
    "rollout": (schema.ROLLOUT, np.float64),
    "old": (schema.OLD, np.float64),
    "current": (schema.CURRENT, np.float64),
    "advantages": (schema.ADVANTAGES, np.float64),
    "token_ids": (schema.TOKEN_IDS, np.int64),
    "entropy": (schema.ENTROPY, np.float64),
    "weight_versions": (schema.WEIGHT_VERSIONS, np.int64),
    "reference": (schema.REFERENCE, np.float64),
}
"""Field of a batch with a value per token → its column and type."""


@dataclass(frozen=True)
class Plan:
    """What is read of each row.

    Attributes:
        columns: canonical name → the column's name, of those that an analysis reads.
        extra: further columns with one value per row, by which numbers are broken down.
        described: further small columns, which the diagnosis searches for conspicuous groups.
    """

    columns: dict[str, str]
    extra: tuple[str, ...] = ()
    described: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All columns to read, the rollout's log-probs first."""
        return list(dict.fromkeys((*self.columns.values(), *self.extra, *self.described)))


# ---------------------------------------------------------------- rows


def starts(lengths: Ints) -> Ints:
    """Return the start offset of each row, and the end, from lengths: [S] → [S+1] int64."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


@dataclass(frozen=True)
class Ragged:
    """A column of lists: `values` [N], NaN or 0 where `null`; `lengths` [S], 0 where a row is `absent`."""

    values: Array
    null: Flags | None
    lengths: Ints
    absent: Flags

    @classmethod
    def of(cls, column: pa.Array) -> Ragged:
        """Convert a column of any Arrow list type; slices and nulls are handled."""
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        found = dense(column.flatten())  # not `.values`, which covers rows outside of a slice too
        null = found.is_null().to_numpy(zero_copy_only=False) if found.null_count else None
        if not pt.is_floating(found.type):  # of floats nulls turn into NaN
            if not pt.is_integer(found.type) or pt.is_uint64(found.type):
                found = found.cast(pa.uint8() if pt.is_boolean(found.type) else pa.int64(), safe=False)
            found = found if null is None else found.fill_null(0)
        values = found.to_numpy(zero_copy_only=False)
        values = values.astype(np.float32) if values.dtype == np.float16 else values
        return cls(values, null, lengths, column.is_null().to_numpy(zero_copy_only=False))

    @cached_property
    def offsets(self) -> Ints:
        """Start offset of each row, and the end, [S+1]."""
        return starts(self.lengths)

    @cached_property
    def span(self) -> tuple[float, float]:
        """Return the smallest and the largest value: NaN if any is NaN, (0, 0) if there are none."""
        if not self.values.size:
            return 0.0, 0.0
        with np.errstate(invalid="ignore"):
            return self.values.min().item(), self.values.max().item()


def dense(column: pa.Array) -> pa.Array:
    """Decode a dictionary column, and return an extension column's storage."""
    found = column.dictionary_decode() if pt.is_dictionary(column.type) else column
    return found.storage if isinstance(found.type, pa.BaseExtensionType) else found


@dataclass(frozen=True)
class Rows:
    """S rows, one sequence each, masked tokens included.

    Attributes:
        number: of each row in the whole dump, [S].
        where: file and row group, and `row`: of each row in the file, [S]; for messages.
    """

    table: pa.RecordBatch
    plan: Plan
    number: Ints
    where: str
    row: Ints

    @property
    def many(self) -> int:
        """Number of rows, S."""
        return int(self.table.num_rows)

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
        return {role: self.table.column(name) for role, name in self.plan.columns.items()}

    @cached_property
    def lists(self) -> dict[str, Ragged]:
        """The columns with a value per token."""
        found = {role: one for role, one in self.columns.items() if is_list(one.type)}
        return {role: Ragged.of(one) for role, one in found.items() if role != schema.PROMPT_IDS}

    @cached_property
    def prompts(self) -> Ragged | None:
        """The tokens before each response; None where the dump lacks them."""
        found = self.columns.get(schema.PROMPT_IDS)
        return None if found is None else Ragged.of(found)

    def numbers(self, *roles: str) -> dict[str, Floats]:
        """Return columns with one number per row, [S], NaN where null."""
        there = [role for role in roles if role in self.columns and not is_list(self.columns[role].type)]
        cast = (dense(self.columns[role]).cast(pa.float64(), safe=False) for role in there)
        return {role: np.array(x.to_numpy(zero_copy_only=False)) for role, x in zip(there, cast, strict=True)}

    @property
    def lengths(self) -> Ints:
        """Tokens per row, masked ones included, [S]."""
        return self.lists[schema.ROLLOUT].lengths

    @property
    def offsets(self) -> Ints:
        """Start offset of each row, and the end, [S+1]."""
        return self.lists[schema.ROLLOUT].offsets

    @cached_property
    def live(self) -> Flags:
        """Flags of unmasked tokens, [T] bool; all True without a mask."""
        mask = self.lists.get(schema.MASK)
        return np.ones(int(self.offsets[-1]), np.bool_) if mask is None else np.equal(mask.values, 1)

    @cached_property
    def kept(self) -> Ints:
        """Indices of unmasked tokens, [T] → [kept]."""
        return np.flatnonzero(self.live)


# ---------------------------------------------------------------- rows → batch


def plain(column: pa.Array) -> pa.Array:
    """Return labels as numbers, booleans or text, to which Arrow casts what is neither; NaN is null.

    Raises:
        pa.ArrowException: bytes that are no UTF-8, or a type that has no text.
    """
    column = dense(column)
    if pt.is_floating(column.type):
        wide = column.cast(pa.float64())
        return pc.if_else(pc.is_nan(wide), None, wide)
    if pt.is_integer(column.type) or pt.is_boolean(column.type) or pt.is_null(column.type):
        return column
    if pt.is_fixed_size_binary(column.type):  # UUIDs are
        return pa.array([None if one is None else one.hex() for one in column.to_pylist()], pa.string())
    column = column.cast(pa.large_binary()) if is_text(column.type) else column  # which text is not checked
    return column.cast(pa.large_string())


def labels(rows: Rows) -> dict[str, list[Any]]:
    """Return the labels of sequences by name: lists of length S, None where null.

    A missing `sequence_id` is the row's number in the whole dump; a missing `policy_lag` is the difference of
    the versions.
    """
    plan, found = rows.plan, dict[str, list[Any]]()
    names = {role: plan.columns[role] for role in schema.LABELS if role in plan.columns}
    for ours, name in (names | {name: name for name in (*plan.extra, *plan.described)}).items():
        try:
            found[ours] = plain(rows.table.column(name)).to_pylist()
        except pa.ArrowException as error:
            found[ours] = [None] * rows.many
            if name not in plan.described:  # for which nobody asked
                what = (
                    f"{rows.where}, rows {rows.row[0]} to {rows.row[-1]}, column {name!r}: no label ({error})"
                )
                raise DumpError(what, "write the column again as numbers or UTF-8 text") from error
    if schema.SEQUENCE not in found:
        found = {schema.SEQUENCE: rows.number.tolist()} | found
    if schema.ROLLOUT_VERSION in found and schema.TRAIN_VERSION in found:
        pairs = zip(found[schema.TRAIN_VERSION], found[schema.ROLLOUT_VERSION], strict=True)
        found = {schema.LAG: [None if None in pair else pair[0] - pair[1] for pair in pairs]} | found
    if lists := rows.prompts:
        cut = zip(np.split(lists.values, lists.offsets[1:-1]), lists.absent, strict=True)
        ids = [None if none else one for one, none in cut]
        lengths: list[Any] = [None if x is None else len(x) for x in ids]
        found = {schema.PROMPT_LENGTH: lengths, schema.PROMPT_IDS: ids} | found
    return found


def pack(rows: Rows) -> Batch:
    """Pack good rows into a batch."""
    scalars = labels(rows)  # first: it refuses text that the keys could not hash
    offsets, kept = np.searchsorted(rows.kept, rows.offsets), rows.kept
    lengths, all_kept = np.diff(offsets), kept.size == rows.live.size
    arrays: dict[str, Array] = {"cu_seqlens": offsets, "masked": rows.lengths - lengths}
    for field, (role, dtype) in FIELDS.items():
        if role in rows.lists:
            values = rows.lists[role].values  # what Arrow decoded is read-only: it is copied in any case
            arrays[field] = values.astype(dtype) if all_kept else values[kept].astype(dtype, copy=False)
    one = rows.numbers(schema.ADVANTAGES, schema.REWARDS)
    arrays |= {"rewards": one[schema.REWARDS]} if schema.REWARDS in one else {}
    if schema.ADVANTAGES in one:  # one per sequence: every token has it
        arrays["advantages"] = np.repeat(one[schema.ADVANTAGES], lengths)
    filled, position = lengths > 0, kept
    first = rows.offsets[:-1][filled]
    if (stated := rows.lists.get(schema.POSITION)) is not None:  # which may start at any number
        position, first = stated.values[kept].astype(np.int64), stated.values[first]
    position = position - np.repeat(first, lengths[filled])
    begins = np.zeros(len(position) + 1, np.bool_)
    begins[1:-1] = np.diff(position) != 1  # behind a masked token a turn begins
    begins[offsets] = True
    key = keys(scalars.get(schema.GROUP), arrays["rollout"], position, offsets)
    return Batch(**arrays, position=position, cu_runs=np.flatnonzero(begins), key=key, scalars=scalars)


# ---------------------------------------------------------------- keys


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
