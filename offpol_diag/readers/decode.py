"""Tables → arrays → batches without masked tokens, with labels and keys of their sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from offpol_diag import versions
from offpol_diag.batch import Batch
from offpol_diag.engine import bootstrap
from offpol_diag.errors import DumpError
from offpol_diag.readers import columns
from offpol_diag.readers.columns import Plan
from offpol_diag.readers.sources import Location

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

MOST_TOKENS = 1 << 22
"""Most tokens of one sequence, masked ones included."""
MOST_TEXT = 1 << 12
"""Most bytes of a label; the rest of a longer one is replaced by a digest of all of it."""


def starts(lengths: Ints) -> Ints:
    """Return the start offset of each row, and the end, from lengths: [S] → [S+1] int64."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Ragged:
    """A column of lists.

    Attributes:
        values: [N] numbers as wide as they are stored, NaN or 0 where null; read-only.
        null: which values are null, [N] bool, or None when none is.
        lengths: values per row, [S] int64; 0 for a null list.
        absent: which rows hold no list at all, [S] bool.
    """

    values: Array
    null: Flags | None
    lengths: Ints
    absent: Flags

    @cached_property
    def span(self) -> tuple[float, float]:
        """Return the minimum and maximum of the values; see `span`."""
        return span(self.values)


def span(values: Array) -> tuple[float, float]:
    """Return the minimum and maximum of values [N]: NaN if any value is NaN, (0, 0) if there are none."""
    if not values.size:
        return 0.0, 0.0
    with np.errstate(invalid="ignore"):
        return values.min().item(), values.max().item()


def ragged(column: pa.Array) -> Ragged:
    """Convert a column of any Arrow list type; slices and nulls are handled."""
    lengths = pc.list_value_length(column).fill_null(0)
    # Not `.values`, which also covers rows outside a slice and elements under null lists.
    values, null = narrow(column.flatten())
    absent = column.is_null().to_numpy(zero_copy_only=False)
    return Ragged(values, null, lengths.to_numpy(zero_copy_only=False).astype(np.int64), absent)


def narrow(column: pa.Array) -> tuple[Array, Flags | None]:
    """Convert a numeric column in its stored width, with NaN or 0 for nulls; also return the null flags.

    Half floats become float32, in which the checks are faster, and booleans become bytes.
    """
    found = dense(column)
    null = found.is_null().to_numpy(zero_copy_only=False) if found.null_count else None
    if pt.is_floating(found.type):  # nulls turn into NaN here
        values = found.to_numpy(zero_copy_only=False)
        return values.astype(np.float32) if values.dtype == np.float16 else values, null
    if not pt.is_integer(found.type) or pt.is_uint64(found.type):
        found = found.cast(pa.uint8() if pt.is_boolean(found.type) else pa.int64(), safe=False)
    return (found if null is None else found.fill_null(0)).to_numpy(zero_copy_only=False), null


def _floats(column: pa.Array) -> Floats:
    """Copy a numeric column to a float64 array, NaN where null."""
    return np.array(dense(column).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def dense(column: pa.Array) -> pa.Array:
    """Decode a dictionary column, and return an extension column's storage."""
    found = column.dictionary_decode() if pt.is_dictionary(column.type) else column
    return found.storage if isinstance(found.type, pa.BaseExtensionType) else found


@dataclass(frozen=True)
class Rows:
    """S rows of a row group, one sequence each, masked tokens included.

    Attributes:
        rows: number of each row in the file, from 0, [S].
        before: rows in the files before this one.
    """

    table: pa.RecordBatch
    plan: Plan
    file: Location
    row_group: int
    rows: Ints
    before: int

    def place(self, index: int) -> str:
        """Return the location of a row, for messages."""
        return self.file.place(self.row_group, int(self.rows[index]))

    def only(self, good: Flags) -> Rows:
        """Return the rows flagged in `good` [S]."""
        return replace(self, rows=self.rows[good], table=self.table.filter(pa.array(good)))

    def between(self, begin: int, end: int) -> Rows:
        """Return the rows with indices `begin` to `end` − 1."""
        return replace(self, rows=self.rows[begin:end], table=self.table.slice(begin, end - begin))

    @cached_property
    def columns(self) -> dict[str, pa.Array]:
        """The columns by role."""
        return {role: self.table.column(name) for role, name in self.plan.columns.items()}

    @cached_property
    def lists(self) -> dict[str, Ragged]:
        """The columns of lists, runs of versions as a version per token."""
        found = {role: one for role, one in self.columns.items() if columns.is_list(one.type)}
        return {
            role: self.spread if columns.has_runs(one.type) else ragged(one) for role, one in found.items()
        }

    @cached_property
    def prompts(self) -> Ragged | None:
        """The tokens before each response; None where a file lacks them."""
        return ragged(self.table.column(columns.PROMPT_IDS)) if self.plan.prompts else None

    @cached_property
    def spread(self) -> Ragged:
        """The version of each token where the dump has runs of them; see `odd_runs`."""
        column = self.columns[columns.WEIGHT_VERSIONS]
        lengths = pc.list_value_length(self.columns[columns.ROLLOUT]).fill_null(0).to_numpy()
        found = []
        for i, (runs, length) in enumerate(zip(column.to_pylist(), lengths.tolist(), strict=True)):
            try:
                found.append(versions.spread(runs or [], 0 if runs is None else length))
            except ValueError as slip:
                self.odd_runs[i] = str(slip)
                found.append(np.full(length, versions.UNKNOWN))
        many = np.array([len(values) for values in found], np.int64)
        absent = column.is_null().to_numpy(zero_copy_only=False)
        return Ragged(np.concatenate([np.zeros(0, np.int64), *found]), None, many, absent)

    @cached_property
    def odd_runs(self) -> dict[int, str]:
        """Row → what is wrong with its runs of versions, filled by `spread`."""
        return {}

    @cached_property
    def numbers(self) -> dict[str, Floats]:
        """Rewards and advantages of sequences, [S], NaN where null."""
        found = {columns.REWARDS, columns.ADVANTAGES} & self.columns.keys() - self.lists.keys()
        return {role: _floats(self.columns[role]) for role in sorted(found)}

    @cached_property
    def counts(self) -> dict[str, Floats]:
        """Steps, lags and versions, [S], NaN where null."""
        return {role: _floats(self.columns[role]) for role in columns.COUNTS if role in self.columns}

    @property
    def lengths(self) -> Ints:
        """Tokens per row, masked ones included, [S]."""
        return self.lists[columns.ROLLOUT].lengths

    @cached_property
    def offsets(self) -> Ints:
        """Start offset of each row, and the end, [S+1]."""
        return starts(self.lengths)

    @cached_property
    def live(self) -> Flags:
        """Flags of unmasked tokens, [T] bool; all True without a mask."""
        mask = self.lists.get(columns.MASK)
        return np.ones(int(self.offsets[-1]), np.bool_) if mask is None else np.equal(mask.values, 1)

    @cached_property
    def kept(self) -> int:
        """Number of unmasked tokens."""
        return int(np.count_nonzero(self.live))

    @cached_property
    def kept_lengths(self) -> Ints:
        """Unmasked tokens per row, [S]."""
        return self.lengths if self.whole else self.counted(self.live)

    def counted(self, flags: Flags) -> Ints:
        """Count the flagged tokens of each row, [T] → [S]."""
        found = np.zeros(len(self.lengths), np.int64)
        filled = np.flatnonzero(self.lengths)  # of an empty row reduceat gives another one's token
        if filled.size:
            found[filled] = np.add.reduceat(flags.view(np.int8), self.offsets[filled], dtype=np.int32)
        return found

    @property
    def whole(self) -> bool:
        """True if no token is masked."""
        return self.kept == int(self.offsets[-1])

    def unmasked(self, values: Array) -> Array:
        """Return the values of unmasked tokens, [T] → [kept]; read-only."""
        return values if self.kept == len(values) else values[self.live]


# ---------------------------------------------------------------- labels


def plain(column: pa.Array) -> pa.Array:
    """Rewrite labels of any scalar type as numbers, booleans, text or bytes; other types stay as they are.

    Python's own dates end in the year 9999 and at microseconds, so Arrow writes temporal values as text. A
    label that is NaN becomes null.
    """
    return next((rewrite(column) for applies, rewrite in REWRITES if applies(column.type)), column)


def _shortened(column: pa.Array) -> pa.Array:
    """Shorten texts of more than `MOST_TEXT` bytes to their beginning and a digest."""
    if (pc.max(pc.binary_length(column)).as_py() or 0) <= MOST_TEXT:
        return column
    long = pt.is_large_string(column.type) or pt.is_large_binary(column.type)
    held = pa.large_binary() if long else pa.binary()
    return pa.array(map(_short, column.view(held).to_pylist()), held).view(column.type)


def _short(text: bytes | None) -> bytes | None:
    if text is None or len(text) <= MOST_TEXT:
        return text
    try:
        text.decode()
    except UnicodeDecodeError:
        return text[: MOST_TEXT // 2] + b"\xff"  # no text either
    head = text[: MOST_TEXT // 2].decode(errors="ignore")
    return f"{head} … {blake2b(text, digest_size=16).hexdigest()}".encode()


def _without_nan(column: pa.Array) -> pa.Array:
    wide = column.cast(pa.float32()) if pt.is_float16(column.type) else column
    return pc.if_else(pc.is_nan(wide), None, wide)


def _time(column: pa.Array) -> pa.Array:
    """Format times as `00:00:01.500`, without a fraction of zeros."""
    return pc.replace_substring_regex(column.cast(pa.string()), r"\.0+$", "")


def _timestamp(column: pa.Array) -> pa.Array:
    """Format timestamps as `2026-01-31 00:00:01.500`, in UTC with a Z where the type has a time zone."""
    naive = _time(column.cast(pa.int64()).cast(pa.timestamp(column.type.unit)))
    return naive if column.type.tz is None else pc.binary_join_element_wise(naive, "Z", "")


def _duration(column: pa.Array) -> pa.Array:
    """Format durations as `1500 ms`."""
    return pc.binary_join_element_wise(column.cast(pa.int64()).cast(pa.string()), column.type.unit, " ")


def _each(column: pa.Array, text: Callable[[bytes], str]) -> pa.Array:
    return pa.array([None if one is None else text(one) for one in column.to_pylist()], pa.string())


def _text_or_hex(value: bytes) -> str:
    """Return bytes as text if printable, else as hexadecimal, which is longer than any text of the column."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    return text if text.isprintable() else value.hex()


def is_text(dtype: pa.DataType) -> bool:
    """Return whether values are text or bytes of any length."""
    return dtype in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _is_extension(name: str) -> Callable[[pa.DataType], bool]:
    return lambda dtype: isinstance(dtype, pa.BaseExtensionType) and dtype.extension_name == name


REWRITES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]], ...] = (
    (pt.is_dictionary, lambda column: plain(column.dictionary).take(column.indices)),  # each shortened once
    (is_text, _shortened),
    (_is_extension("arrow.uuid"), lambda column: _each(column.storage, lambda one: str(UUID(bytes=one)))),
    (_is_extension("arrow.bool8"), lambda column: column.storage.cast(pa.bool_())),
    (lambda dtype: isinstance(dtype, pa.BaseExtensionType), lambda column: plain(column.storage)),
    (pt.is_floating, _without_nan),
    (pt.is_timestamp, _timestamp),
    (pt.is_time, _time),
    (pt.is_duration, _duration),
    (pt.is_fixed_size_binary, lambda column: _each(column, _text_or_hex)),
    (lambda dtype: pt.is_temporal(dtype) or pt.is_decimal(dtype), lambda column: column.cast(pa.string())),
)
"""Test of a label's type → function that rewrites the column."""


def labels(rows: Rows) -> dict[str, list[object]]:
    """Return the labels of sequences by name: lists of length S, None where null.

    A missing `sequence_id` is the row's number in the whole dump; a missing `policy_lag` is the difference of
    the versions.
    """
    plan = rows.plan
    names = {role: plan.columns[role] for role in columns.SCALARS if role in plan.columns}
    found = {ours: _listed(rows, name) for ours, name in (names | {one: one for one in plan.extra}).items()}
    found |= {name: _described(rows, name) for name in plan.described if name not in found}
    if columns.SEQUENCE not in found:
        found = {columns.SEQUENCE: (rows.rows + rows.before).tolist()} | found
    if columns.ROLLOUT_VERSION in found and columns.TRAIN_VERSION in found:
        pairs = zip(found[columns.TRAIN_VERSION], found[columns.ROLLOUT_VERSION], strict=True)
        found = {columns.LAG: [None if None in pair else pair[0] - pair[1] for pair in pairs]} | found
    return found


def _prompts(rows: Rows) -> dict[str, list[Any]]:
    """Return the tokens of the prompts as arrays, None where null, and their number."""
    lists = rows.prompts
    if lists is None:
        return {}
    cut = zip(np.split(lists.values, starts(lists.lengths)[1:-1]), lists.absent, strict=True)
    ids = [None if none else one for one, none in cut]
    return {columns.PROMPT_LENGTH: [None if x is None else len(x) for x in ids], columns.PROMPT_IDS: ids}


def _listed(rows: Rows, name: str) -> list[Any]:
    """Return a column's values; bytes are decoded as text, since some writers store text as bytes."""
    column = plain(rows.table.column(name))
    found: list[Any] = []
    try:
        for scalar in column:
            value = scalar.as_py()
            found.append(value.decode() if isinstance(value, bytes) else value)
    except UnicodeDecodeError as error:
        where = f"{rows.place(len(found))}, column {name!r}"
        raise DumpError(f"{where}: the text is not UTF-8", "write the column again as UTF-8 text") from error
    return found


def _described(rows: Rows, name: str) -> list[Any]:
    """Return the values of a column without a role, all None where it cannot be read as text."""
    try:
        return list(rows.table.column(name).to_pylist())
    except UnicodeDecodeError:
        return [None] * len(rows.rows)


# ---------------------------------------------------------------- rows → batch

PER_TOKEN: dict[str, tuple[str, type[np.generic]]] = {
    "rollout": (columns.ROLLOUT, np.float64),
    "old": (columns.OLD, np.float64),
    "current": (columns.CURRENT, np.float64),
    "advantages": (columns.ADVANTAGES, np.float64),
    "token_ids": (columns.TOKEN_IDS, np.int64),
    "entropy": (columns.ENTROPY, np.float64),
    "weight_versions": (columns.WEIGHT_VERSIONS, np.int64),
    "reference": (columns.REFERENCE, np.float64),
}
"""Per-token field of a batch → its column and type."""


def pack(rows: Rows) -> Batch:
    """Pack good rows into a batch.

    Where the plan is `bare`, a batch has values, lengths and labels alone: its positions and keys are zeros,
    and a turn is a sequence.
    """
    plan = rows.plan
    scalars = _prompts(rows) | labels(rows)  # first: it refuses text that the keys could not hash
    lengths = rows.kept_lengths
    arrays = _values(rows, lengths)
    arrays |= {"cu_seqlens": starts(lengths), "masked": rows.lengths - lengths}
    if plan.bare:
        where, runs = np.zeros(len(arrays["rollout"]), np.int64), arrays["cu_seqlens"]
        key = np.zeros(len(lengths), np.int64)
    else:
        where, runs = _positions(rows, lengths)
        contents = partial(keys_of_contents, arrays["rollout"], where, lengths)
        group = plan.columns.get(columns.GROUP)
        key = keys_of_groups(plain(rows.table.column(group)), contents) if group else contents()
    arrays |= {"position": where, "cu_runs": runs, "key": key}
    return Batch(**arrays, scalars=scalars)


def _values(rows: Rows, lengths: Ints) -> dict[str, Array]:
    """Return the per-token value arrays of a batch; `lengths` [S] counts unmasked tokens."""
    found: dict[str, Array] = {}
    for name, (role, dtype) in PER_TOKEN.items():
        if role in rows.lists:
            values = rows.lists[role].values
            kept = rows.unmasked(values)  # copied where it is not yet: what Arrow decoded is read-only
            found[name] = kept.astype(dtype, copy=kept is values)
    if columns.ADVANTAGES in rows.numbers:  # one per sequence: every token has it
        found["advantages"] = np.repeat(rows.numbers[columns.ADVANTAGES], lengths)
    if columns.REWARDS in rows.numbers:
        found["rewards"] = rows.numbers[columns.REWARDS]
    return found


def _positions(rows: Rows, lengths: Ints) -> tuple[Ints, Ints]:
    """Return each unmasked token's index in its response [T], and the starts of contiguous runs [R+1]."""
    token = np.arange(rows.kept) if rows.whole else np.flatnonzero(rows.live)
    stated = rows.lists.get(columns.POSITION)
    if stated is None:
        masked = np.zeros(0, np.int64) if rows.whole else np.flatnonzero(~rows.live)
        breaks = masked - np.arange(len(masked))  # kept tokens before each masked one
        np.subtract(token, np.repeat(rows.offsets[:-1], lengths), out=token)
    else:  # positions may start at any number
        filled = lengths > 0
        begins = stated.values[rows.offsets[:-1][filled]]
        token = stated.values[token] - np.repeat(begins, lengths[filled])
        breaks = np.flatnonzero(np.diff(token) != 1) + 1
    run_begins = np.zeros(len(token) + 1, np.bool_)
    run_begins[breaks] = True
    run_begins[starts(lengths)] = True
    return token, np.flatnonzero(run_begins)


# ---------------------------------------------------------------- keys
# A 64-bit key per sequence identifies its unit of the bootstrap. It depends on the sequence's group id, or
# on its contents, never on its position in the dump, so that splitting or reordering files changes no key.


def mix(x: Words) -> Words:
    """Hash 64-bit words bijectively, [N] → [N] (splitmix64, Steele et al. 2014)."""
    # arrays of words wrap around without a warning
    return bootstrap.mix(x + np.uint64(0x9E3779B97F4A7C15)).view(np.uint64)


def keys_of_groups(ids: pa.Array, contents: Callable[[], Ints]) -> Ints:
    """Return keys from group ids, [S] → [S] int64; null ids take theirs from `contents()` [S]."""
    encoded = ids if pt.is_dictionary(ids.type) else ids.dictionary_encode()
    uniques = _of_labels(encoded.dictionary) if len(encoded.dictionary) else np.zeros(1, np.uint64)
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    found = mix(uniques)[codes].view(np.int64)
    null = encoded.is_null().to_numpy(zero_copy_only=False)
    return np.where(null, contents(), found) if null.any() else found


def _of_labels(values: pa.Array) -> Words:
    """Apply `_of_label` to each value, [N]; vectorised for integers."""
    if pt.is_integer(values.type) and not values.null_count:
        return np.asarray(values.to_numpy(), np.uint64)
    return np.array([_of_label(value) for value in values.to_pylist()], dtype=np.uint64)


def _of_label(value: Any) -> int:
    """Return a 64-bit word for a group id; integers map to themselves, so that 3 and 3.0 agree."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return value % 2**64
    text = value if isinstance(value, bytes) else str(value).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def keys_of_contents(rollout: Floats, position: Ints, lengths: Ints) -> Ints:
    """Return keys from contents: unmasked log-probs [T], their positions [T] and lengths [S] → [S] int64."""
    bits = (rollout + 0.0).view(np.uint64)  # + 0.0: -0.0 and 0.0 are one number
    words = mix(bits ^ mix(position.astype(np.uint64)))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)))  # modulo 2⁶⁴
    ends = starts(lengths)
    return mix(sums[ends[1:]] - sums[ends[:-1]]).view(np.int64)
