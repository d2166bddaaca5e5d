"""Read Parquet files: footers, row groups as tables, and explanations of failures.

Before memory is taken for a column, the sizes that it declares are checked. A page says how large it will be
when it is decompressed, and how many values it holds; a few damaged bytes can claim gigabytes. What pages say
must agree with the footer, and with the bytes that are there. A column that is the same throughout compresses
ten thousandfold, so no usual ratio is required, only agreement.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.readers.columns import FLAGS, PER_TOKEN
from offpol_diag.readers.decode import is_text
from offpol_diag.readers.sources import Footer, Location, Part
from offpol_diag.readers.stores import outage

PROVENANCE = b"offpol_diag"
MAGIC = b"PAR1"
BUFFER, REMOTE_BUFFER = 1 << 20, 8 << 20
"""Bytes of a column per read; larger for remote files, where each read costs a round trip."""
GLIMPSE = 1 << 12
"""Bytes per read when only the beginning of a remote column is inspected."""
FETCHED_WHOLE = 128 << 20
"""Remote row groups up to this many uncompressed bytes are fetched with all columns at once."""
SMALL = 64
"""Maximum uncompressed bytes per row of a column that describes a row's origin."""
READ_ERRORS = (pa.ArrowException, OSError, ValueError)
"""Exceptions that pyarrow raises on damaged files, OSError from codecs and ValueError from text included."""


def open_parquet(path: Location, texts: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a file; page checksums are verified where the writer stored them.

    For a remote file only the footer is fetched; columns are fetched when they are read. Columns `texts` are
    read as dictionaries, so that a text that many rows share is held once.
    """
    more: dict[str, Any] = {"page_checksum_verification": True, "read_dictionary": list(texts)}
    if not path.store:  # by its bytes: a name may look like a URI, or not be UTF-8
        stream = pa.OSFile(os.fsencode(path.path))
        return pq.ParquetFile(stream, pre_buffer=False, buffer_size=BUFFER, **more)
    stream = path.open()
    metadata = pq.read_metadata(stream)
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    more |= {"metadata": metadata, "pre_buffer": max(sizes, default=0) <= FETCHED_WHOLE}
    found = pq.ParquetFile(stream, buffer_size=REMOTE_BUFFER, **more)
    found.glimpse = pq.ParquetFile(stream, metadata=metadata, pre_buffer=False, buffer_size=GLIMPSE)
    return found


def open_again(part: Part, texts: Sequence[str] = ()) -> pq.ParquetFile:
    """Reopen a file of the dump; `texts` as of `open_parquet`."""
    try:
        found = open_parquet(part.path, texts)
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


def chunk_of(parquet: pq.ParquetFile, group: int, leaf: int) -> pq.ColumnChunkMetaData:
    """Return the footer's metadata of a column in a row group."""
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


def footer(path: Location) -> Footer:
    """Read the footer of a file."""
    with open_parquet(path) as parquet:
        metadata = parquet.metadata
        groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
        return Footer(
            parquet.schema_arrow,
            tuple(group.num_rows for group in groups),
            tuple(group.total_byte_size for group in groups),
            _provenance((metadata.metadata or {}).get(PROVENANCE, b"{}")),
            _small(parquet),
            _binary(parquet),
        )


def _small(parquet: pq.ParquetFile) -> frozenset[str]:
    """Return top-level columns without lists of at most `SMALL` bytes per row, unless damaged."""
    groups, most = range(parquet.metadata.num_row_groups), SMALL * max(parquet.metadata.num_rows, 64)
    found, names = set[str](), set(parquet.schema_arrow.names)  # Arrow makes the schema anew at each look
    for leaf in range(len(parquet.schema)):
        path = parquet.schema.column(leaf).path
        if path in names:
            with suppress(*READ_ERRORS):
                if sum(chunk_of(parquet, at, leaf).total_uncompressed_size for at in groups) <= most:
                    found.add(path)
    return frozenset(found)


def _binary(parquet: pq.ParquetFile) -> frozenset[str]:
    """Return columns of numbers, none below 0 or above 1 in the first row group as far as is known."""
    kinds = (FLAGS, PER_TOKEN[FLAGS])
    numbers = {one.name for one in parquet.schema_arrow if any(kind.accepts(one.type) for kind in kinds)}
    leaves = _leaves(parquet) if numbers and parquet.metadata.num_row_groups else {}
    found = set()
    for name in numbers & leaves.keys():  # of other types Arrow may have no value in Python
        with suppress(*READ_ERRORS):
            known = _extent(chunk_of(parquet, 0, leaves[name]))
            if known is None or known.within(0, 1):
                found.add(name)
    return frozenset(found)


def _leaves(parquet: pq.ParquetFile) -> dict[str, int]:
    """Return the columns, each with its first leaf: a list's is called NAME.list.element, or otherwise."""
    names, found = set(parquet.schema_arrow.names), dict[str, int]()
    for leaf in range(len(parquet.schema)):
        path = parquet.schema.column(leaf).path
        for name in (path, *(path[: dot.start()] for dot in re.finditer(r"\.", path))):
            if name in names:
                found.setdefault(name, leaf)
    return found


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
        return what, "leave more memory free, or say --workers 1"
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
        return "the file is truncated: its Parquet footer is missing", "copy it again; or its writer died"
    return f"the Parquet footer is corrupt ({first_line(error)})", "copy or dump the file again"


def first_line(error: Exception) -> str:
    """Return the first line of an error message, or the name of the error's type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------- row groups


def tables(part: Part, names: Sequence[str], tokens: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a part in order: row group, table of about `tokens` values of the first column."""
    texts = [name for name in names if is_text(part.schema.field(name).type)]
    with open_again(part, texts) as parquet:
        for group in part.groups:
            done, rows = 0, part.group_rows[group]
            try:
                values = _checked(parquet, part, group, names)[names[0]]
                size = max(1, tokens * rows // max(values, 1))
                leaves = [i for i in range(len(parquet.schema)) if parquet.schema.column(i).path in texts]
                sizes = [chunk_of(parquet, group, leaf).total_uncompressed_size for leaf in leaves]
                size = max(1, min(size, TEXT_AT_ONCE * rows // max([1, *sizes])))
                for table in parquet.iter_batches(size, row_groups=[group], columns=names):
                    if not part.path.store:
                        _unchanged(part)
                    yield group, table
                    done += table.num_rows
            except READ_ERRORS as error:
                raise _corrupt(part, group, done, names, error) from error
            if done != rows:
                raise _corrupt(part, group, done, names, EOFError("not the rows its footer had"))


def values_in(part: Part, group: int, name: str) -> int:
    """Return the number of values of a column in a row group; an empty list counts as one."""
    with open_again(part) as parquet:
        try:
            return _checked(parquet, part, group, [name])[name]
        except READ_ERRORS as error:
            raise _corrupt(part, group, 0, [name], error) from error


def bounds(part: Part, name: str) -> list[tuple[Any, Any]]:
    """Return the minimum and maximum of a flat column in each row group, from the footer."""
    with open_again(part) as parquet:
        leaf = [parquet.schema.column(i).path for i in range(len(parquet.schema))].index(name)
        found = [chunk_of(parquet, group, leaf).statistics for group in range(len(part.group_rows))]
    if any(statistics is None or not statistics.has_min_max for statistics in found):
        raise ValueError(f"{part.path}: no bounds of {name!r}")
    return [(statistics.min, statistics.max) for statistics in found]


class Extent(NamedTuple):
    """Minimum and maximum of a column, and its number of values; an empty list counts as one."""

    low: float
    high: float
    values: int

    def within(self, low: float, high: float) -> bool:
        """Return whether all values lie between two numbers."""
        return low <= self.low and self.high <= high


def extents(part: Part, names: Sequence[str], most: int | None = None) -> dict[str, Extent]:
    """Return what the footer says of columns of numbers or lists; columns that it passes over are left out.

    Args:
        part: the file.
        names: the columns.
        most: row groups that are looked at; None for all.
    """
    found: dict[str, Extent] = {}
    with open_again(part) as parquet:
        leaves = _leaves(parquet)
        for name in (name for name in names if name in leaves):
            for group in part.groups[:most]:
                one = _extent(chunk_of(parquet, group, leaves[name]))
                if one is not None:
                    low, high, values = found.get(name, one._replace(values=0))
                    found[name] = Extent(min(low, one.low), max(high, one.high), values + one.values)
    return found


def _extent(chunk: pq.ColumnChunkMetaData) -> Extent | None:
    """Return what the footer says of a column of numbers in a row group."""
    known = chunk.statistics
    if known is None or not known.has_min_max or isinstance(known.min, bytes):  # of float16
        return None
    return Extent(float(known.min), float(known.max), chunk.num_values)


def fingerprint(part: Part) -> bytes:
    """Return the footer's bytes: sizes, offsets and statistics of all columns."""
    with open_again(part) as parquet:
        found = pa.BufferOutputStream()
        parquet.metadata.write_metadata_file(found)
    return bytes(found.getvalue())


def _checked(parquet: pq.ParquetFile, part: Part, group: int, names: Sequence[str]) -> dict[str, int]:
    """Check the declared sizes of columns in a row group; return each column's number of values.

    For remote files, where each page header costs a request, only the first column's pages are checked.
    """
    paths = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
    remote, found = part.path.store, dict[str, int]()
    with nullcontext() if remote else part.path.open() as stream:
        for name in names[:1] if remote else names:
            for leaf, path in enumerate(paths):
                if f"{path}.".startswith(f"{name}."):
                    chunk = chunk_of(parquet, group, leaf)
                    others = next(iter(found.values()), None)
                    check_sizes(chunk, part.group_rows[group], part.bytes, stream, others)
                    found.setdefault(name, int(chunk.num_values))
    return found


def _corrupt(part: Part, group: int, done: int, names: Sequence[str], error: Exception) -> DumpError:
    """Return the error of a row group that cannot be read; raise it if the file was changed meanwhile."""
    first = sum(part.group_rows[:group]) + done
    where = f"{part.path}, row group {group}, from row {first} on"
    with suppress(*READ_ERRORS):
        _unchanged(part)
    if lost := outage(part.path, error):
        return DumpError(f"{where}: {lost[0]}", lost[1])
    if isinstance(error, MemoryError):  # Arrow's is one
        hint = "leave more memory free, say --workers 1, or write smaller row groups"
        return DumpError(f"{where}: there is not enough memory to read it ({first_line(error)})", hint)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "allow more open files (ulimit -n), or say --workers 1"
        return DumpError(f"{where}: the file cannot be opened ({error.strerror})", hint)
    culprits = ", ".join(repr(name) for name in names if not _reads(part, group, name)) or "unknown"
    what = f"the data cannot be read ({first_line(error)})"
    hint = "the file is damaged: copy it again and compare sizes; if the error stays, dump again"
    if isinstance(error, TooMany):
        what = f"too many values of one row group ({error})"
        hint = (
            f"so few bytes hold them only where all are equal; write row groups of up to {LONGEST:,} values"
        )
    return DumpError(f"{where}, column {culprits}: {what}", hint)


def _reads(part: Part, group: int, name: str) -> bool:
    """Return whether a column of a row group can be read."""
    try:
        with open_parquet(part.path) as parquet:
            _checked(parquet, part, group, [name])
            for _ in parquet.iter_batches(1024, row_groups=[group], columns=[name]):
                pass
    except READ_ERRORS:
        return False
    return True


# ---------------------------------------------------------------- sizes that a column declares

RATIOS = {"UNCOMPRESSED": 1, "SNAPPY": 24, "LZ4": 256, "LZ4_RAW": 256, "GZIP": 1_040, "ZSTD": 33_000}
"""Maximum compression ratio of each codec; unlimited for codecs not listed."""
SLACK = 64 << 20
"""Bytes by which pages may exceed the footer's size, since some writers count differently."""
LONGEST = 1 << 24
"""Values of a column in a row group that are accepted whatever the compressed size."""
PER_BYTE = 64
"""Values of the first column per compressed byte that are accepted beyond `LONGEST`."""
MOST_PAGE = 1 << 28
"""Most bytes of a page when it is decompressed; writers aim at one MiB."""
TEXT_AT_ONCE = 1 << 26
"""Most bytes of text that are decoded at once, at the mean of the row group."""
WINDOWS = (1 << 10, 1 << 16, 1 << 24)
"""Bytes read for a page header, tried in turn until the header is complete."""
FRAME = 1 << 10
"""Bytes by which a page may exceed its maximum ratio, for the codec's fixed overhead."""
DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
DETAILS = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}
"""Kind of page → field of its header that holds the number of values."""


class Implausible(ValueError):
    """A column declares an impossible size."""


class TooMany(Implausible):
    """A column declares more values than are read of so few bytes; the file may be in order."""


def check_sizes(
    chunk: pq.ColumnChunkMetaData, rows: int, size: int, stream: BinaryIO | None, others: int | None = None
) -> None:
    """Check the sizes declared by a column of a row group of `rows` rows in a file of `size` bytes.

    With a stream page headers are checked too. `others` is the number of values of the first column, which
    all columns of tokens share; None for the first itself.
    """
    if not chunk.num_values:
        return  # nothing is read, and writers say of no page where it is
    data, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    begin = int(dictionary if dictionary and 0 < dictionary < data else data)
    end = begin + chunk.total_compressed_size
    if not 0 < begin <= end <= size:
        raise Implausible(f"it lies at bytes {begin} to {end} of a file of {size}")
    values, backed = chunk.num_values, PER_BYTE * chunk.total_compressed_size
    if others is not None:  # a mask may be the same throughout, and compress at will
        backed = max(backed, 2 * others, rows)
    if values < 0:
        raise Implausible(f"{values} values")
    if values > max(LONGEST, backed):
        raise TooMany(f"{values} values in {rows} rows and {chunk.total_compressed_size} bytes")
    if stream is not None:
        _check_pages(chunk, stream, begin, end)


def _check_pages(chunk: pq.ColumnChunkMetaData, stream: BinaryIO, at: int, end: int) -> None:
    """Check the pages in order, until all values are accounted for."""
    most = 2 * chunk.total_uncompressed_size + SLACK
    values = size = 0
    while values < chunk.num_values and at < end:
        header, at = _header(stream, at, end)
        kind, large, small, count = _page(header, chunk.compression)
        at, size = at + small, size + large
        if at > end or size > most:
            raise Implausible(f"its pages claim {size} bytes, and the footer {most - SLACK >> 1}")
        if large > MOST_PAGE:
            raise Implausible(f"a page claims {large} bytes, and {MOST_PAGE} is the most that is read")
        values += 0 if kind in (INDEX, DICTIONARY) else count
    if values != chunk.num_values:
        raise Implausible(f"its pages claim {values} values, and the footer {chunk.num_values}")


def _page(header: Struct, codec: str) -> tuple[int, int, int, int]:
    """Return a page's kind, uncompressed and compressed bytes and values, after checking that they can be."""
    held: Any = next(
        (header[at] for page, at in DETAILS.items() if page == header.get(1) and at in header), {}
    )
    sizes: list[Any] = [header.get(1), header.get(2), header.get(3)]
    sizes.append(held.get(1, 0) if isinstance(held, dict) else None)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise Implausible("the header of a page is damaged")
    kind, large, small, values = sizes
    if codec in RATIOS and large > RATIOS[codec] * small + FRAME:
        raise Implausible(f"a page of {small} bytes claims {large} by {codec.lower()}")
    if kind == DICTIONARY and values > large:
        raise Implausible(f"a dictionary of {large} bytes claims {values} values")
    return kind, large, small, values


def _header(stream: BinaryIO, at: int, end: int) -> tuple[Struct, int]:
    """Read a page header; return it with the offset of the page's data."""
    for window in WINDOWS:
        stream.seek(at, io.SEEK_SET)
        data = stream.read(min(window, end - at))
        try:
            header, size = struct(data)
        except IndexError:
            continue
        except ValueError as error:
            raise Implausible(f"the page header at byte {at} is damaged ({error})") from error
        return header, at + size
    raise Implausible(f"the page header at byte {at} does not end")


Struct = dict[int, Any]
"""The fields of a Thrift struct by their numbers."""
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
DEEPEST = 16
"""Maximum nesting of structs; Parquet's own headers need five levels."""


def struct(data: bytes) -> tuple[Struct, int]:
    """Parse a struct in Thrift's compact protocol; return it with its length in bytes.

    Text and floats become None; maps, which no header has, are refused.
    """
    at = 0

    def unsigned() -> int:
        nonlocal at
        found = shift = 0
        while True:
            byte, at = data[at], at + 1
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
            if shift > 63:
                raise ValueError("an integer has more than 64 bits")

    def integer() -> int:
        found = unsigned()
        return (found >> 1) ^ -(found & 1)

    def value(kind: int, depth: int) -> Any:
        nonlocal at
        if kind in (I16, I32, I64):
            return integer()
        if kind in (TRUE, FALSE, BYTE):
            at += 1
            return data[at - 1]
        if kind in (DOUBLE, BINARY):
            size = 8 if kind == DOUBLE else unsigned()
            at += size
            if at > len(data):
                raise IndexError("the data end within a value")
            return None
        if kind in (LIST, SET):
            head, at = data[at], at + 1
            size = head >> 4 if head >> 4 < 15 else unsigned()
            return [value(head & 15, depth) for _ in range(size)]
        if kind == STRUCT:
            return fields(depth + 1)
        raise ValueError(f"there is no type {kind} in a header")

    def fields(depth: int) -> Struct:
        nonlocal at
        if depth > DEEPEST:
            raise ValueError("structs are nested too deeply")
        found: Struct = {}
        number = 0
        while True:
            head, at = data[at], at + 1
            if not head:
                return found
            kind = head & 15
            number = number + (head >> 4) if head >> 4 else integer()
            found[number] = kind == TRUE if kind in (TRUE, FALSE) else value(kind, depth)

    return fields(0), at
