"""Read Parquet files: footers, row groups as tables, and explanations of failures."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt
from numpy.typing import NDArray

from offpol_diag.errors import DumpError
from offpol_diag.readers.columns import is_list
from offpol_diag.readers.decode import plain
from offpol_diag.readers.sources import Location, Part
from offpol_diag.readers.stores import outage
from offpol_diag.writer import METADATA_KEY

MAGIC = b"PAR1"
BUFFER, REMOTE_BUFFER = 1 << 20, 8 << 20
"""Bytes of a column per read; larger for remote files, where each read costs a round trip."""
GLIMPSE = 1 << 16
"""Bytes per read where only the beginning of a remote column is looked at."""
FETCHED_WHOLE = 128 << 20
"""Remote row groups up to this many uncompressed bytes are fetched with all columns at once."""
SMALL, FEW = 64, 256
"""Maximum mean bytes of a text that describes a row's origin, and how many of them are looked at."""
MOST_ROWS = 1 << 15
"""Most sequences per table, and per batch: what is computed of each takes memory however short it is."""
READ_ERRORS = (pa.ArrowException, OSError, ValueError)
"""Exceptions that pyarrow raises on damaged files, OSError from codecs and ValueError from text included."""


def open_parquet(path: Location, glimpse: bool = False) -> pq.ParquetFile:
    """Open a file; page checksums are verified where the writer stored them.

    Of a remote file only the footer is fetched; columns are fetched when they are read, for a glimpse no more
    than is looked at.
    """
    if not path.store:  # by its bytes: a name may look like a URI, or not be UTF-8
        stream = pa.OSFile(os.fsencode(path.path))
        return pq.ParquetFile(stream, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True)
    stream = path.open()
    metadata = pq.read_metadata(stream)
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    ahead = max(sizes, default=0) <= FETCHED_WHOLE and not glimpse
    how = {"metadata": metadata, "pre_buffer": ahead, "page_checksum_verification": True}
    return pq.ParquetFile(stream, buffer_size=GLIMPSE if glimpse else REMOTE_BUFFER, **how)


def open_again(part: Part, glimpse: bool = False) -> pq.ParquetFile:
    """Reopen a file of the dump."""
    try:
        found = open_parquet(part.path, glimpse)
        _unchanged(part)
    except READ_ERRORS as error:
        raise unreadable(part.path, error) from error
    return found


def _unchanged(part: Part) -> None:
    """Check that a file is still the one that was opened first: rows of two files must not mix."""
    state, now = part.state, part.path.state()
    elsewhere = len(state) > 2 and state[-1] != now[-1]  # on another machine
    if state[0] != now[0] or (state != now and not elsewhere):
        hint = "wait until its writer has ended, or read a copy; then read again"
        raise DumpError(f"{part.path}: the file was changed while it was read", hint)


def footer(path: Location, numeric: set[str]) -> Part:
    """Read the footer of a file; partition columns in `numeric` hold integers, the others text."""
    try:
        partitions = {
            key: pa.scalar(int(text) if text is not None and key in numeric else text, dtype)
            for key, text in path.partitions.items()
            for dtype in [pa.int64() if key in numeric else pa.string()]
        }
        state = path.state()
        with open_parquet(path) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            partitions = {key: value for key, value in partitions.items() if key not in schema.names}
            for key, value in partitions.items():
                schema = schema.append(pa.field(key, value.type))
            groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
            rows = tuple(group.num_rows for group in groups)
            sizes = tuple(group.total_byte_size for group in groups)
            provenance = _provenance((metadata.metadata or {}).get(METADATA_KEY, b"{}"))
            return Part(path, state, schema, partitions, rows, sizes, provenance)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error


def _provenance(text: bytes) -> dict[str, object]:
    """Parse the provenance metadata; empty if invalid (another tool may have rewritten the file).

    A lone surrogate, which JSON can escape but UTF-8 cannot encode, becomes a question mark; NaN and numbers
    beyond float64, which a result cannot hold, become null.
    """

    def finite(digits: str) -> float | None:
        return number if math.isfinite(number := float(digits)) else None

    try:
        found = json.loads(text, parse_constant=finite, parse_float=finite)
        found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def unreadable(path: Location, error: Exception) -> DumpError:
    """Explain why a file cannot be opened, from its first and last bytes."""
    what, hint = outage(path, error) or _damage(path, error)
    return DumpError(f"{path}: {what}", hint)


def _damage(path: Location, error: Exception) -> tuple[str, str]:
    if isinstance(error, UnicodeEncodeError):  # the value of a hive partition
        return "the path is not UTF-8", "rename the file and its directories"
    if isinstance(error, MemoryError):  # Arrow's is one
        what = f"there is not enough memory to read its footer ({first_line(error)})"
        return what, "leave more memory free, or say --threads 1"
    try:
        with path.open() as stream:
            head = stream.read(4)
            stream.seek(max(stream.seek(0, 2) - 4, 0))
            tail = stream.read(4)
    except OSError as failure:
        if path.store:
            return outage(path, failure, always=True) or ("", "")
        return f"cannot be opened ({failure.strerror})", "check that it exists and may be read"
    if not head:
        return "the file is empty (0 bytes)", "its writer did not finish; dump again"
    if head != MAGIC:
        return "not a Parquet file", "dumps are Parquet; other forms need converting first"
    if tail != MAGIC:
        return "the file is truncated: its Parquet footer is missing", "copy it again, or dump again"
    return f"the Parquet footer is corrupt ({first_line(error)})", "copy or dump the file again"


def first_line(error: Exception) -> str:
    """Return the first line of an error message, or the name of the error's type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------- row groups


def tables(
    part: Part, names: Sequence[str], tokens: int, glimpse: bool = False
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a part in order: row group, table of about `tokens` values of the first column.

    `glimpse` says that only the beginning is wanted.
    """
    flat = not is_list(part.schema.field(names[0]).type)
    with open_again(part, glimpse) as parquet:
        for group in part.groups:
            done, rows = 0, part.group_rows[group]
            size = tokens if flat else min(int(tokens * rows / tokens_in(part, group)), MOST_ROWS)
            try:
                for table in parquet.iter_batches(max(size, 1), [group], names):
                    if not part.path.store:
                        _unchanged(part)
                    yield group, table
                    done += table.num_rows
            except READ_ERRORS as error:
                raise _corrupt(part, group, done, names, error) from error
            if done != rows:
                raise _corrupt(part, group, done, names, EOFError("not the rows its footer had"))


def numbered(
    part: Part, names: Sequence[str], most: int
) -> Iterator[tuple[int, pa.RecordBatch, NDArray[np.int64]]]:
    """Yield the same with hive partitions as columns, and the numbers of the rows in their file."""
    at, done = -1, 0
    for group, table in tables(part, names, most):
        if group != at:
            at, done = group, sum(part.group_rows[:group])
        numbers, done = np.arange(done, done + table.num_rows), done + table.num_rows
        for key, value in part.partitions.items():
            table = table.append_column(key, pa.repeat(value, table.num_rows))
        yield group, table, numbers
        del table


def tokens_in(part: Part, group: int) -> float:
    """Estimate the tokens in a row group by its bytes before compression, masked ones included.

    What the footer says of a single column is not asked: with a damaged footer that ends the process.
    """
    lists = [one.type.value_type for one in part.schema if is_list(one.type)]
    wide = (one.bit_width / 8 for one in lists if pt.is_floating(one) or pt.is_integer(one))
    size = sum(width for width in wide if width > 1) or 1.0
    return float(max(part.group_bytes[group], part.group_rows[group], 1) / size)


def short(part: Part, names: Sequence[str]) -> set[str]:
    """Return the columns of text whose first values take at most `SMALL` bytes each."""
    found = set[str]()
    for name in names:
        with suppress(DumpError):
            _, table = next(tables(part, [name], FEW, glimpse=True))
            if (pc.mean(pc.binary_length(plain(table.column(0)))).as_py() or 0) <= SMALL:
                found.add(name)
    return found


def fingerprint(part: Part) -> bytes:
    """Return the footer's bytes: sizes, offsets and statistics of all columns."""
    with open_again(part) as parquet:
        found = pa.BufferOutputStream()
        parquet.metadata.write_metadata_file(found)
    return bytes(found.getvalue())


def _corrupt(part: Part, group: int, done: int, names: Sequence[str], error: Exception) -> DumpError:
    """Return the error of a row group that cannot be read; raise it if the file was changed meanwhile."""
    first = sum(part.group_rows[:group]) + done
    where = f"{part.path}, row group {group}, from row {first} on"
    with suppress(*READ_ERRORS):
        _unchanged(part)
    if lost := outage(part.path, error):
        return DumpError(f"{where}: {lost[0]}", lost[1])
    if isinstance(error, MemoryError):  # Arrow's is one
        hint = "leave more memory free, say --threads 1, or write smaller row groups"
        return DumpError(f"{where}: there is not enough memory to read it ({first_line(error)})", hint)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "allow more open files (ulimit -n), or say --threads 1"
        return DumpError(f"{where}: the file cannot be opened ({error.strerror})", hint)
    culprits = ", ".join(repr(name) for name in names if not _reads(part, group, name)) or "unknown"
    what = f"the data cannot be read ({first_line(error)})"
    hint = "the file is damaged: copy it again and compare sizes; if the error stays, dump again"
    return DumpError(f"{where}, column {culprits}: {what}", hint)


def _reads(part: Part, group: int, name: str) -> bool:
    """Return whether a column of a row group can be read."""
    try:
        with open_parquet(part.path) as parquet:
            for _ in parquet.iter_batches(1024, row_groups=[group], columns=[name]):
                pass
    except READ_ERRORS:
        return False
    return True
