"""What a Parquet file says of itself, and why one cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.readers.locations import Location
from offpol_diag.readers.outages import explained, outage
from offpol_diag.readers.sources import File

PROVENANCE = b"offpol_diag"
MAGIC = b"PAR1"
# Bytes of a column read at a time; pyarrow's default takes in a row group's whole columns, compressed.
BUFFER = 1 << 20
# The same over a network, where every piece waits for an answer.
FAR_BUFFER = 8 << 20
# And for a look at where a column begins.
GLIMPSE = 1 << 12
# Row groups up to this many bytes, decoded, are fetched whole: all their columns at once, in one go.
FETCHED_WHOLE = 128 << 20
# Footers that are fetched at once.
AT_ONCE = 16
# Of an integer in the name of a directory, leading zeros counted.
MOST_DIGITS = 64
# What pyarrow raises on a damaged file: its own errors, OSError (codecs), ValueError (text in the footer).
READ_ERRORS = (pa.ArrowException, OSError, ValueError)


@dataclass(frozen=True)
class DumpInfo:
    """What a report says of the dump.

    Attributes:
        files: paths, as read.
        rows: sequences, bad ones included; in the long form known once the dump was read, tokens until then.
        row_groups: of all files.
        bytes: size of the files.
        columns: our name → the column it is read from.
        provenance: what the files' metadata says of how the numbers were made; where files disagree, the list
            of what they say.
    """

    files: tuple[str, ...]
    rows: int
    row_groups: int
    bytes: int
    columns: dict[str, str]
    provenance: dict[str, object]


@dataclass(frozen=True)
class Part:
    """One file of a dump, as its footer describes it.

    Attributes:
        path: the file.
        schema: its columns, those from hive partitions included.
        partitions: partition column → value.
        group_rows: rows of each row group.
        group_bytes: bytes of each row group before compression, as the footer says.
        bytes: size of the file.
        provenance: the JSON object under `PROVENANCE` in its metadata.
        span: the row groups that are read, from one to before another; None for all.
        between: the rows of the one row group of `span` that are read, from one to before another, counted
            from its first; None for all.
    """

    path: Location
    schema: pa.Schema
    partitions: dict[str, pa.Scalar]
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]
    bytes: int
    provenance: dict[str, object]
    span: tuple[int, int] | None = None
    between: tuple[int, int] | None = None

    @property
    def groups(self) -> range:
        """The row groups that are read."""
        return range(*(self.span or (0, len(self.group_rows))))

    @property
    def rows(self) -> int:
        """Rows that are read."""
        if self.between:
            return self.between[1] - self.between[0]
        return sum(self.group_rows[group] for group in self.groups)


def open_parquet(path: Location) -> pq.ParquetFile:
    """The file, opened; page checksums are verified where the writer stored them."""
    if path.far:
        return _open_far(path)
    return pq.ParquetFile(path.path, page_checksum_verification=True, pre_buffer=False, buffer_size=BUFFER)


def _open_far(path: Location) -> pq.ParquetFile:
    """A file in a store: only the footer is fetched now, and later the columns that are read."""
    stream = path.open()
    metadata = pq.read_metadata(stream)
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    whole = max(sizes, default=0) <= FETCHED_WHOLE
    found = pq.ParquetFile(
        stream, metadata=metadata, page_checksum_verification=True, pre_buffer=whole, buffer_size=FAR_BUFFER
    )
    found.glimpse = pq.ParquetFile(stream, metadata=metadata, pre_buffer=False, buffer_size=GLIMPSE)
    return found


def glimpse(parquet: pq.ParquetFile) -> pq.ParquetFile:
    """The file for a look at a column that is not yet to be read, and so not to be fetched."""
    return getattr(parquet, "glimpse", parquet)


def chunk_of(parquet: pq.ParquetFile, group: int, leaf: int) -> pq.ColumnChunkMetaData:
    """What the footer says of a column of a row group.

    Raises:
        Exception: one of `READ_ERRORS`.
    """
    # On a damaged footer, asking for a column's metadata ends the process; reading it raises. So read first:
    # a batch of no rows, which `ParquetFile.iter_batches` refuses, opens the column and decodes nothing.
    reader = glimpse(parquet).reader
    next(reader.iter_batches(0, row_groups=[group], column_indices=[leaf], use_threads=False), None)
    found = parquet.metadata.row_group(group).column(leaf)
    if found.physical_type != parquet.schema.column(leaf).physical_type:  # its statistics end the process too
        raise ValueError(
            f"a column of {found.physical_type} is to hold {parquet.schema.column(leaf).physical_type}"
        )
    return found


def open_again(path: Location) -> pq.ParquetFile:
    """A file that opened before.

    Raises:
        DumpError: it does not any more.
    """
    try:
        return open_parquet(path)
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def describe(files: Sequence[File]) -> list[Part]:
    """The footers of all files.

    Raises:
        DumpError: a file that is not Parquet, is damaged, or cannot be opened.
    """
    numeric = _integer_keys(files)
    if not any(file.path.far for file in files):
        return [_describe(file, numeric) for file in files]
    pool = ThreadPoolExecutor(AT_ONCE, "offpol-diag-footers")
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
    except READ_ERRORS as error:
        raise _unreadable(file.path, error) from error
    partitions = {key: value for key, value in partitions.items() if key not in schema.names}
    schema = _with_partitions(schema, partitions)
    return Part(file.path, schema, partitions, group_rows, group_bytes, size, provenance)


def _with_partitions(schema: pa.Schema, partitions: dict[str, pa.Scalar]) -> pa.Schema:
    for key, value in partitions.items():
        schema = schema.append(pa.field(key, value.type))
    return schema


def _integer_keys(files: Iterable[File]) -> frozenset[str]:
    """Partition keys whose every value reads as an integer of 64 bits."""
    pairs = [(key, text) for file in files for key, text in file.partitions.items()]
    words = {key for key, text in pairs if text is not None and not _is_integer(text)}
    return frozenset(key for key, _ in pairs) - words


def _is_integer(text: str) -> bool:
    """Whether text is an integer that 64 bits hold."""
    if not text.removeprefix("-").isdecimal() or len(text) > MOST_DIGITS:
        return False
    return -(2**63) <= int(text) < 2**63


def _value(text: str | None, numeric: bool) -> pa.Scalar:
    if numeric:
        return pa.scalar(None if text is None else int(text), pa.int64())
    return pa.scalar(text, pa.string())


def _provenance(text: bytes) -> dict[str, object]:
    """The metadata as an object; empty when it is none of ours (another tool may have rewritten the file).

    Half a surrogate pair, which JSON can escape and nothing can write, becomes a question mark.
    """
    try:
        found = json.loads(json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def merged(provenances: Iterable[dict[str, object]]) -> dict[str, object]:
    """One provenance for several files: a value where they agree, the list of different values where not."""
    seen: dict[str, list[object]] = {}
    for provenance in provenances:
        for key, value in provenance.items():
            values = seen.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in seen.items()}


def _unreadable(path: Location, error: Exception) -> DumpError:
    """Why a file does not open, from its first and last bytes."""
    if isinstance(error, UnicodeEncodeError):
        return DumpError(f"{path}: the path is not UTF-8", "rename the file and its directories")
    if path.far and outage(path, error):
        return explained(path, error)
    try:
        with path.open() as stream:
            head = stream.read(4)
            stream.seek(0, 2)
            stream.seek(max(stream.tell() - 4, 0))
            tail = stream.read(4)
    except OSError as failure:
        if path.far:
            return explained(path, failure)
        return DumpError(
            f"{path}: cannot be opened ({failure.strerror})", "check that it exists and may be read"
        )
    causes = (
        (not head, "the file is empty (0 bytes)", "its writer did not finish; dump again"),
        (head != MAGIC, "not a Parquet file", "dumps are Parquet; other forms need converting first"),
        (
            tail != MAGIC,
            "the file is truncated: its Parquet footer is missing",
            "copy it again; or its writer died",
        ),
        (True, f"the Parquet footer is corrupt ({first_line(error)})", "copy or dump the file again"),
    )
    return next(DumpError(f"{path}: {what}", hint) for applies, what, hint in causes if applies)


def first_line(error: Exception) -> str:
    """What a library says, kept to one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
