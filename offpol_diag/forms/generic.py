"""Records of any writer whose fields bear names that we know, or that `--columns` gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from offpol_diag import versions
from offpol_diag.errors import DumpError
from offpol_diag.forms.files import records, undamaged
from offpol_diag.forms.form import Array, Row, numbers
from offpol_diag.forms.pickles import plain as plain_list
from offpol_diag.readers.columns import (
    ADVANTAGES,
    DIGESTS,
    FINISH_REASON,
    POSITION,
    PROMPT_LENGTH,
    ROLES,
    ROLLOUT,
    WEIGHT_VERSIONS,
    assigned,
    is_list,
)
from offpol_diag.readers.decode import plain

Record = Mapping[str, Any]
PER_TOKEN = frozenset(
    role.name for role in ROLES if role.kind.needs.startswith("a list") or role.name == ADVANTAGES
)
"""Canonical columns with a list per row; advantages may also be one number."""
RECORDED = tuple(
    role for role in ROLES if role.name in (WEIGHT_VERSIONS, PROMPT_LENGTH, FINISH_REASON, *DIGESTS)
)
ROWS = 256
"""Rows of a table that are turned into `Row`s at once."""


def row_of(
    record: Mapping[str, Any],
    where: str,
    columns: Mapping[str, str],
    without: frozenset[str] = frozenset({POSITION}),
    used: Sequence[str] = (),
) -> Row:
    """Return a record (field → value) as a row: its fields by the names we know, `columns` before those.

    Short texts and integers stay as they are; fields `without` are not read, but for those that the caller
    has `used`.
    """
    names = [name for name in record if name not in without]
    mapping = assigned(names, columns, where)
    tokens: dict[str, Array] = {}
    scalars: dict[str, Any] = {}
    for role, name in mapping.items():
        value = record[name]
        if value is None or (role == WEIGHT_VERSIONS and versions.are_runs(value)):
            continue
        if role == FINISH_REASON and isinstance(value, dict):  # as SGLang says it
            value = value.get("type")
        if role in PER_TOKEN and (role != ADVANTAGES or isinstance(value, list | np.ndarray)):
            tokens[role] = numbers(value, name, where)
        else:
            scalars[role] = scalar(value, name, where)
    runs: Any = record.get(mapping.get(WEIGHT_VERSIONS, ""))
    if versions.are_runs(runs):
        tokens[WEIGHT_VERSIONS] = spread(runs, len(tokens.get(ROLLOUT, ())), where)
    known = set(mapping.values())
    for name in (name for name in names if name not in known):  # what may say where a row is from
        value = record[name]
        if isinstance(value, int) or (isinstance(value, str) and len(value) <= LONGEST_TEXT):
            scalars[name] = value
    read = known.union(scalars, used)
    return Row(tokens, scalars, where, mapping, [name for name in record if name not in read])


def spread(runs: Sequence[Any], length: int, where: str, prompt: int = 0) -> Array:
    """Return the version of the weights of each token of a response; see `versions.spread`."""
    try:
        return versions.spread(runs, length, prompt)
    except ValueError as slip:
        hint = f"give a version per token, or runs [[0, 5], [120, 6]]; or --columns {WEIGHT_VERSIONS}=none"
        raise DumpError(f"{where}: {WEIGHT_VERSIONS}: {slip}", hint) from slip


def by_names(
    record: Record,
    where: str,
    names: Mapping[str, str],
    columns: Mapping[str, str],
    more: Sequence[str] = (),
    used: Sequence[str] = (),
) -> Row:
    """Return a record as a row: fields by the roles of `names`, the user's before those, and some more.

    Columns that tell of weights and ends of responses are read by their usual names. Of the others the
    caller has `used` some.
    """
    usual = {
        role.name: name for role in RECORDED for name in role.names if name in record and name not in used
    }
    chosen = {role: name for role, name in {**usual, **names}.items() if record.get(name) is not None}
    names_of = {word: role.name for role in ROLES for word in (*role.names, role.short)}
    chosen |= {names_of.get(word, word): name for word, name in columns.items()}
    kept = {name: record[name] for name in (*chosen.values(), *more) if name in record}
    row = row_of(kept, where, chosen)
    row.unread = [*row.unread, *(name for name in record if name not in kept and name not in used)]
    return row


LONGEST_TEXT = 64
"""Characters of a text that describes a row's origin; longer ones are prompts and responses."""


def scalar(value: object, name: str, where: str) -> object:
    """Return one plain value."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, str | int | float):
        what = f"{name!r} is a {type(value).__name__}, and one value per sequence is needed"
        raise DumpError(f"{where}: {what}", "give the part to another field with --columns")
    return value


def jsonl(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read one JSON object per sequence."""
    for where, record in records(files):
        yield row_of(record, where, columns)


def tables(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read Parquet files with a row per sequence and lists per token."""
    for where, record in table_records(files):
        yield row_of(record, where, columns)


def table_records(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of Parquet files, each with its place."""
    for path in files:
        at = 0
        with undamaged(path), pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                hint = "write the file again with one of them renamed"
                raise DumpError(f"{path}: two columns are called {twice[0]!r}", hint)
            for part in file.iter_batches(ROWS):
                lists = {name: _lists(part.column(name)) for name in names}
                for i in range(part.num_rows):
                    yield f"{path}, row {at + i}", {name: values[i] for name, values in lists.items()}
                at += part.num_rows


def _lists(column: pa.Array) -> list[Any]:
    """Return the values of a column, lists of numbers as arrays, with NaN for null."""
    if is_list(column.type) and not is_list(column.type.value_type):
        kind = column.type.value_type
        if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            return [one.values.to_numpy(zero_copy_only=False) if one.is_valid else None for one in column]
    if pt.is_temporal(column.type):  # Python's own dates end in the year 9999
        column = plain(column)
    try:
        found: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):  # a date beyond it inside a list or a struct, which nobody reads
        return [None] * len(column)
    return found


def record_of(value: object, where: str) -> dict[str, Any]:
    """Return a record of a pickle with its arrays as NumPy's."""
    if not isinstance(value, dict):
        raise DumpError(f"{where}: {type(value).__name__}, no mapping of columns", "was the file changed?")
    return {name: plain_list(one) for name, one in value.items() if isinstance(name, str)}


def sequences(arrays: Mapping[str, Array | list[Any]], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one record per sequence of padded arrays, or of lists with an element per sequence."""
    several = {len(values) for values in arrays.values() if isinstance(values, list) or values.ndim > 1}
    if len(several) != 1:
        what = f"{path}: no array is [sequences, tokens], or they differ in their number of sequences"
        raise DumpError(what, "was the file changed?")
    for i in range(several.pop()):
        record = {}
        for name, values in arrays.items():
            if (isinstance(values, list) or values.ndim) and i < len(values):
                record[name] = values[i].item() if isinstance(values[i], np.generic) else values[i]
        yield f"{path}, sequence {i}", record
