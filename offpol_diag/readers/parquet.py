"""Open Parquet files, read their footers, and explain failures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.readers.remote import Location, explained, outage
from offpol_diag.readers.sources import File

PROVENANCE = b"offpol_diag"
MAGIC = b"PAR1"
BUFFER, REMOTE_BUFFER = 1 << 20, 8 << 20
"""Bytes of a column per read; larger for remote files, where each read costs a round trip."""
GLIMPSE = 1 << 12
"""Bytes per read when only the beginning of a remote column is inspected."""
FETCHED_WHOLE = 128 << 20
"""Remote row groups up to this many uncompressed bytes are fetched with all columns at once."""
FOOTERS_AT_ONCE = 16
MOST_DIGITS = 64
"""Maximum digits of an integer in a directory name, leading zeros included."""
SMALL = 64
"""Maximum uncompressed bytes per row of a column that describes a row's origin."""
READ_ERRORS = (pa.ArrowException, OSError, ValueError)
"""Exceptions that pyarrow raises on damaged files, OSError from codecs and ValueError from text included."""


@dataclass(frozen=True)
class Part:
    """One file of a dump, as described by its footer.

    Attributes:
        path: the file.
        schema: its columns, those from hive partitions included.
        partitions: partition column → value.
        group_rows: rows of each row group.
        group_bytes: bytes of each row group before compression, as the footer says.
        bytes: size of the file.
        provenance: the JSON object under `PROVENANCE` in its metadata.
        small: its flat columns of at most `SMALL` bytes a row, those from hive partitions among them.
        span: the row groups that are read, as (begin, end); None for all.
        between: the rows that are read, as (begin, end) within the single row group of `span`; None for all.
    """

    path: Location
    schema: pa.Schema
    partitions: dict[str, pa.Scalar]
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]
    bytes: int
    provenance: dict[str, object]
    small: frozenset[str] = frozenset()
    span: tuple[int, int] | None = None
    between: tuple[int, int] | None = None

    @property
    def groups(self) -> range:
        """The row groups that are read."""
        return range(*(self.span or (0, len(self.group_rows))))

    @property
    def rows(self) -> int:
        """Number of rows that are read."""
        if self.between:
            return self.between[1] - self.between[0]
        return sum(self.group_rows[group] for group in self.groups)


def open_parquet(path: Location) -> pq.ParquetFile:
    """Open a file; page checksums are verified where the writer stored them.

    For a remote file only the footer is fetched; columns are fetched when they are read.
    """
    if not path.remote:
        return pq.ParquetFile(
            path.path, page_checksum_verification=True, pre_buffer=False, buffer_size=BUFFER
        )
    stream = path.open()
    metadata = pq.read_metadata(stream)
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    found = pq.ParquetFile(
        stream,
        metadata=metadata,
        page_checksum_verification=True,
        pre_buffer=max(sizes, default=0) <= FETCHED_WHOLE,
        buffer_size=REMOTE_BUFFER,
    )
    found.glimpse = pq.ParquetFile(stream, metadata=metadata, pre_buffer=False, buffer_size=GLIMPSE)
    return found


def open_again(path: Location) -> pq.ParquetFile:
    """Reopen a file.

    Raises:
        DumpError: the file can no longer be opened.
    """
    try:
        return open_parquet(path)
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def chunk_of(parquet: pq.ParquetFile, group: int, leaf: int) -> pq.ColumnChunkMetaData:
    """Return the footer's metadata of a column in a row group.

    Raises:
        Exception: one of `READ_ERRORS`.
    """
    # With a damaged footer, a look at a column's metadata ends the process; reading it raises. So read first:
    # a batch of no rows, which `ParquetFile.iter_batches` refuses, opens the column and decodes nothing.
    reader = getattr(parquet, "glimpse", parquet).reader
    next(reader.iter_batches(0, row_groups=[group], column_indices=[leaf], use_threads=False), None)
    found = parquet.metadata.row_group(group).column(leaf)
    if found.physical_type != parquet.schema.column(leaf).physical_type:  # its statistics end the process too
        raise ValueError(
            f"a column of {found.physical_type} is to hold {parquet.schema.column(leaf).physical_type}"
        )
    return found


def describe(files: Sequence[File]) -> list[Part]:
    """Read the footers of all files.

    Raises:
        DumpError: a file that is not Parquet, is damaged, or cannot be opened.
    """
    numeric = _integer_keys(files)
    if not any(file.path.remote for file in files):
        return [_describe(file, numeric) for file in files]
    pool = ThreadPoolExecutor(FOOTERS_AT_ONCE, "offpol-diag-footers")
    try:
        return list(pool.map(lambda file: _describe(file, numeric), files))
    finally:
        pool.shutdown(cancel_futures=True)


def _describe(file: File, numeric: frozenset[str]) -> Part:
    try:
        partitions = {key: _value(text, key in numeric) for key, text in file.partitions.items()}
        with open_parquet(file.path) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
            group_rows = tuple(group.num_rows for group in groups)
            group_bytes = tuple(group.total_byte_size for group in groups)
            provenance = _provenance((metadata.metadata or {}).get(PROVENANCE, b"{}"))
            size = file.path.size()
            small = _small(groups) | partitions.keys()
    except READ_ERRORS as error:
        raise _unreadable(file.path, error) from error
    partitions = {key: value for key, value in partitions.items() if key not in schema.names}
    for key, value in partitions.items():
        schema = schema.append(pa.field(key, value.type))
    return Part(file.path, schema, partitions, group_rows, group_bytes, size, provenance, small)


def _small(groups: Sequence[pq.RowGroupMetaData]) -> frozenset[str]:
    """Return top-level columns without lists of at most `SMALL` bytes per row."""
    rows = sum(group.num_rows for group in groups)
    sizes: dict[str, int] = {}
    for group in groups:
        for column in map(group.column, range(group.num_columns)):
            name = column.path_in_schema
            sizes[name] = sizes.get(name, 0) + column.total_uncompressed_size
    return frozenset(name for name, size in sizes.items() if size <= SMALL * max(rows, 64))


def _integer_keys(files: Iterable[File]) -> frozenset[str]:
    """Return partition keys whose values are all 64-bit integers."""
    pairs = [(key, text) for file in files for key, text in file.partitions.items()]
    words = {key for key, text in pairs if text is not None and not _is_integer(text)}
    return frozenset(key for key, _ in pairs) - words


def _is_integer(text: str) -> bool:
    """Return whether text is a 64-bit integer."""
    if not text.removeprefix("-").isdecimal() or len(text) > MOST_DIGITS:
        return False
    return -(2**63) <= int(text) < 2**63


def _value(text: str | None, numeric: bool) -> pa.Scalar:
    if numeric:
        return pa.scalar(None if text is None else int(text), pa.int64())
    return pa.scalar(text, pa.string())


def _provenance(text: bytes) -> dict[str, object]:
    """Parse the provenance metadata; empty if invalid (another tool may have rewritten the file).

    A lone surrogate, which JSON can escape but UTF-8 cannot encode, becomes a question mark.
    """
    try:
        found = json.loads(json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def merged(provenances: Iterable[dict[str, object]]) -> dict[str, object]:
    """Merge the provenance of several files: one value where they agree, else the list of distinct values."""
    seen: dict[str, list[object]] = {}
    for provenance in provenances:
        for key, value in provenance.items():
            values = seen.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in seen.items()}


def _unreadable(path: Location, error: Exception) -> DumpError:
    """Explain why a file cannot be opened, from its first and last bytes."""
    if isinstance(error, UnicodeEncodeError):
        return DumpError(f"{path}: the path is not UTF-8", "rename the file and its directories")
    if outage(path, error):
        return explained(path, error)
    try:
        with path.open() as stream:
            head = stream.read(4)
            stream.seek(0, 2)
            stream.seek(max(stream.tell() - 4, 0))
            tail = stream.read(4)
    except OSError as failure:
        if path.remote:
            return explained(path, failure)
        return DumpError(
            f"{path}: cannot be opened ({failure.strerror})", "check that it exists and may be read"
        )
    if not head:
        what, hint = "the file is empty (0 bytes)", "its writer did not finish; dump again"
    elif head != MAGIC:
        what, hint = "not a Parquet file", "dumps are Parquet; other forms need converting first"
    elif tail != MAGIC:
        what, hint = (
            "the file is truncated: its Parquet footer is missing",
            "copy it again; or its writer died",
        )
    else:
        what = f"the Parquet footer is corrupt ({first_line(error)})"
        hint = "copy or dump the file again"
    return DumpError(f"{path}: {what}", hint)


def first_line(error: Exception) -> str:
    """Return the first line of an error message, or the name of the error's type."""
    return (str(error).splitlines() or [type(error).__name__])[0]
