"""Rows of a table → a batch without masked tokens, with labels and keys of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from offpol_diag.dump import schema
from offpol_diag.dump.batch import Array, Batch
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


def starts(lengths: Ints) -> Ints:
    """Return the start offset of each row, and the end, from lengths: [S] → [S+1] int64."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


@dataclass(frozen=True)
class Plan:
    """What is read of each row.

    Attributes:
        columns: canonical name → the column's name, of those that an analysis reads.
        extra: further columns with one value per row, by which numbers are broken down.
        described: further small columns, which the diagnosis searches for conspicuous groups.
        prompts: the column of prompt ids; empty: none.
        bare: whether batches lack positions, turns and keys.
    """

    columns: dict[str, str]
    extra: tuple[str, ...] = ()
    described: tuple[str, ...] = ()
    prompts: str = ""
    bare: bool = False

    @property
    def names(self) -> list[str]:
        """All columns to read, the rollout's log-probs first."""
        of_prompts = (self.prompts,) if self.prompts else ()
        return list(dict.fromkeys((*self.columns.values(), *self.extra, *self.described, *of_prompts)))

    def only(self, roles: Sequence[str]) -> Plan:
        """Return a plan that reads some columns only, by canonical name."""
        return Plan({role: name for role, name in self.columns.items() if role in roles}, bare=True)


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Ragged:
    """A column of lists: `values` [N], NaN or 0 where `null`; `lengths` [S], 0 where a row is `absent`."""

    values: Array
    null: Flags | None
    lengths: Ints
    absent: Flags

    @cached_property
    def span(self) -> tuple[float, float]:
        """Return the smallest and the largest value: NaN if any is NaN, (0, 0) if there are none."""
        if not self.values.size:
            return 0.0, 0.0
        with np.errstate(invalid="ignore"):
            return self.values.min().item(), self.values.max().item()


def ragged(column: pa.Array) -> Ragged:
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
    return Ragged(values, null, lengths, column.is_null().to_numpy(zero_copy_only=False))


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
        """The columns of lists."""
        return {role: ragged(one) for role, one in self.columns.items() if is_list(one.type)}

    @cached_property
    def prompts(self) -> Ragged | None:
        """The tokens before each response; None where the dump lacks them."""
        return ragged(self.table.column(self.plan.prompts)) if self.plan.prompts else None

    def numbers(self, *roles: str) -> dict[str, Floats]:
        """Return columns with one number per row, [S], NaN where null."""
        there = [role for role in roles if role in self.columns and not is_list(self.columns[role].type)]
        cast = (dense(self.columns[role]).cast(pa.float64(), safe=False) for role in there)
        return {role: np.array(x.to_numpy(zero_copy_only=False)) for role, x in zip(there, cast, strict=True)}

    @property
    def lengths(self) -> Ints:
        """Tokens per row, masked ones included, [S]."""
        return self.lists[schema.ROLLOUT].lengths

    @cached_property
    def offsets(self) -> Ints:
        """Start offset of each row, and the end, [S+1]."""
        return starts(self.lengths)

    @cached_property
    def live(self) -> Flags:
        """Flags of unmasked tokens, [T] bool; all True without a mask."""
        mask = self.lists.get(schema.MASK)
        return np.ones(int(self.offsets[-1]), np.bool_) if mask is None else np.equal(mask.values, 1)

    @cached_property
    def kept(self) -> Ints:
        """Indices of unmasked tokens, [T] → [kept]."""
        return np.flatnonzero(self.live)

    def unmasked(self, values: Array) -> Array:
        """Return the values of unmasked tokens, [T] → [kept]; read-only."""
        return values if self.kept.size == values.size else values[self.kept]


# ---------------------------------------------------------------- labels


def plain(column: pa.Array) -> pa.Array:
    """Return labels as numbers, booleans or text; NaN is null, and what is no number is cast to text."""
    if pt.is_dictionary(column.type):
        return plain(column.dictionary).take(column.indices)
    column = dense(column)
    kind = column.type
    if is_text(kind):  # Arrow has few functions of views
        views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
        return column.cast(views.get(kind, kind))
    if pt.is_floating(kind):
        wide = column.cast(pa.float64())
        return pc.if_else(pc.is_nan(wide), None, wide)
    if pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_null(kind):
        return column
    if pt.is_fixed_size_binary(kind):
        return pa.array([None if one is None else one.hex() for one in column.to_pylist()], pa.string())
    if pt.is_timestamp(kind):
        column = column.cast(pa.timestamp(kind.unit))  # in UTC
    return (column.cast(pa.int64()) if pt.is_duration(kind) else column).cast(pa.string())


def labels(rows: Rows) -> dict[str, list[Any]]:
    """Return the labels of sequences by name: lists of length S, None where null.

    A missing `sequence_id` is the row's number in the whole dump; a missing `policy_lag` is the difference of
    the versions.
    """
    plan = rows.plan
    names = {role: plan.columns[role] for role in schema.LABELS if role in plan.columns}
    found = {ours: _listed(rows, name) for ours, name in (names | {one: one for one in plan.extra}).items()}
    for name in (name for name in plan.described if name not in found):
        try:
            found[name] = rows.table.column(name).to_pylist()
        except UnicodeDecodeError:  # nobody asked for this column
            found[name] = [None] * rows.many
    if schema.SEQUENCE not in found:
        found = {schema.SEQUENCE: rows.number.tolist()} | found
    if schema.ROLLOUT_VERSION in found and schema.TRAIN_VERSION in found:
        pairs = zip(found[schema.TRAIN_VERSION], found[schema.ROLLOUT_VERSION], strict=True)
        found = {schema.LAG: [None if None in pair else pair[0] - pair[1] for pair in pairs]} | found
    if lists := rows.prompts:
        cut = zip(np.split(lists.values, starts(lists.lengths)[1:-1]), lists.absent, strict=True)
        ids = [None if none else one for one, none in cut]
        lengths: list[Any] = [None if x is None else len(x) for x in ids]
        found = {schema.PROMPT_LENGTH: lengths, schema.PROMPT_IDS: ids} | found
    return found


def _listed(rows: Rows, name: str) -> list[Any]:
    """Return a column's values; bytes are decoded as text, since some writers store text as bytes."""
    column, found = plain(rows.table.column(name)), list[Any]()
    if not is_text(column.type):
        return list(column.to_pylist())
    try:
        for value in column.cast(pa.large_binary()).to_pylist():
            found.append(None if value is None else value.decode())
    except UnicodeDecodeError as error:
        where = f"{rows.place(len(found))}, column {name!r}"
        raise DumpError(f"{where}: the text is not UTF-8", "write the column again as UTF-8 text") from error
    return found


# ---------------------------------------------------------------- rows → batch


def pack(rows: Rows) -> Batch:
    """Pack good rows into a batch.

    Where the plan is `bare`, a batch has values, lengths and labels alone: its positions and keys are zeros,
    and a turn is a sequence.
    """
    plan, offsets = rows.plan, np.searchsorted(rows.kept, rows.offsets)
    scalars = labels(rows)  # first: it refuses text that the keys could not hash
    lengths = np.diff(offsets)
    arrays: dict[str, Array] = {"cu_seqlens": offsets, "masked": rows.lengths - lengths}
    for field, (role, dtype) in FIELDS.items():
        if role in rows.lists:
            values = rows.lists[role].values
            kept = rows.unmasked(values)  # copied where it is not yet: what Arrow decoded is read-only
            arrays[field] = kept.astype(dtype, copy=kept is values)
    one = rows.numbers(schema.ADVANTAGES, schema.REWARDS)
    arrays |= {"rewards": one[schema.REWARDS]} if schema.REWARDS in one else {}
    if schema.ADVANTAGES in one:  # one per sequence: every token has it
        arrays["advantages"] = np.repeat(one[schema.ADVANTAGES], lengths)
    if plan.bare:
        position, runs, key = np.zeros(rows.kept.size, np.int64), offsets, np.zeros(rows.many, np.int64)
    else:
        filled = lengths > 0
        first, stated = rows.offsets[:-1][filled], rows.lists.get(schema.POSITION)
        position = rows.kept
        if stated is not None:  # which may start at any number
            position, first = rows.unmasked(stated.values).astype(np.int64), stated.values[first]
        position = position - np.repeat(first, lengths[filled])
        begins = np.zeros(len(position) + 1, np.bool_)
        begins[1:-1] = np.diff(position) != 1  # behind a masked token a turn begins
        begins[offsets] = True
        runs = np.flatnonzero(begins)
        contents = partial(keys_of_contents, arrays["rollout"], position, offsets)
        group = plan.columns.get(schema.GROUP)
        key = keys_of_groups(plain(rows.table.column(group)), contents) if group else contents()
    return Batch(**arrays, position=position, cu_runs=runs, key=key, scalars=scalars)


# ---------------------------------------------------------------- keys
# A 64-bit key per sequence identifies its unit of the bootstrap. It depends on the sequence's group id, or
# on its contents, never on its position in the dump, so that splitting or reordering files changes no key.


def mix(x: Words) -> Words:
    """Hash 64-bit words bijectively, [N] → [N] (splitmix64, Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)  # arrays of words wrap around without a warning
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def keys_of_groups(ids: pa.Array, contents: Callable[[], Ints]) -> Ints:
    """Return keys from group ids, [S] → [S] int64; null ids take theirs from `contents()` [S]."""
    encoded = ids if pt.is_dictionary(ids.type) else ids.dictionary_encode()
    words = [_word(value) for value in encoded.dictionary.to_pylist()] or [0]
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    found = mix(np.array(words, np.uint64))[codes].view(np.int64)
    null = encoded.is_null().to_numpy(zero_copy_only=False)
    return np.where(null, contents(), found) if null.any() else found


def _word(value: Any) -> int:
    """Return a 64-bit word for a group id; integers map to themselves, so that 3 and 3.0 agree."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return value % 2**64
    text = value if isinstance(value, bytes) else str(value).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def keys_of_contents(rollout: Floats, position: Ints, offsets: Ints) -> Ints:
    """Return keys from contents: log-probs [T] and positions [T] that count, offsets [S+1] → [S] int64."""
    bits = (rollout + 0.0).view(np.uint64)  # + 0.0: -0.0 and 0.0 are one number
    words = mix(bits ^ mix(position.astype(np.uint64)))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)))  # modulo 2⁶⁴
    return mix(sums[offsets[1:]] - sums[offsets[:-1]]).view(np.int64)
