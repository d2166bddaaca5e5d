"""Check the sizes that a column declares before memory is taken for them.

A page says how large it will be when it is decompressed, and how many values it holds; a few damaged bytes
can claim gigabytes. What pages say must agree with the footer, and with the bytes that are there. A column
that is the same throughout compresses ten thousandfold, so no usual ratio is required, only agreement.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO, NamedTuple

import pyarrow.parquet as pq

Struct = dict[int, Any]
"""The fields of a thrift struct by their numbers."""

RATIOS = {"UNCOMPRESSED": 1, "SNAPPY": 24, "LZ4": 256, "LZ4_RAW": 256, "GZIP": 1_040, "ZSTD": 33_000}
"""Maximum compression ratio of each codec; unlimited for codecs not listed."""
SLACK = 64 << 20
"""Bytes by which pages may exceed the footer's size, since some writers count differently."""
LONGEST = 1 << 24
"""Mean values per row that are accepted whatever the compressed size."""
PER_BYTE = 64
"""Values per compressed byte that are accepted beyond `LONGEST` values per row."""
WINDOWS = (1 << 10, 1 << 16, 1 << 24)
"""Bytes read for a page header, tried in turn until the header is complete."""
FRAME = 1 << 10
"""Bytes by which a page may exceed its maximum ratio, for the codec's fixed overhead."""
DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
DETAILS = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}
"""Kind of page → field of its header that holds the number of values."""


class Implausible(ValueError):
    """A column declares an impossible size."""


def check(chunk: pq.ColumnChunkMetaData, rows: int, size: int, stream: BinaryIO | None) -> None:
    """Check the sizes declared by a column of a row group.

    Args:
        chunk: its metadata in the footer.
        rows: rows of the row group.
        size: bytes of the file.
        stream: the file, to check page headers too; None to check the footer only.

    Raises:
        Implausible: a size is impossible.
    """
    if not chunk.num_values:
        return  # nothing is read, and writers say of no page where it is
    begin = _begin(chunk)
    end = begin + chunk.total_compressed_size
    if not 0 < begin <= end <= size:
        raise Implausible(f"it lies at bytes {begin} to {end} of a file of {size}")
    values, backed = chunk.num_values, PER_BYTE * chunk.total_compressed_size
    if values < 0 or values > max(LONGEST * rows, backed):
        raise Implausible(f"{values} values in {rows} rows and {chunk.total_compressed_size} bytes")
    if stream is not None:
        _pages(chunk, stream, begin, end)


def _begin(chunk: pq.ColumnChunkMetaData) -> int:
    data, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    return int(dictionary if dictionary and 0 < dictionary < data else data)


def _pages(chunk: pq.ColumnChunkMetaData, stream: BinaryIO, at: int, end: int) -> None:
    """Check the pages in order, until all values are accounted for."""
    most = 2 * chunk.total_uncompressed_size + SLACK
    values = size = 0
    while values < chunk.num_values and at < end:
        header, at = _header(stream, at, end)
        page = _page(header, chunk.compression)
        at, size = at + page.small, size + page.large
        if at > end or size > most:
            raise Implausible(f"its pages claim {size} bytes, and the footer {most - SLACK >> 1}")
        values += 0 if page.kind in (INDEX, DICTIONARY) else page.values
    if values != chunk.num_values:
        raise Implausible(f"its pages claim {values} values, and the footer {chunk.num_values}")


class Page(NamedTuple):
    """Sizes declared in a page header.

    Attributes:
        kind: kind of page.
        large: uncompressed bytes.
        small: compressed bytes.
        values: number of values.
    """

    kind: int
    large: int
    small: int
    values: int


def _page(header: Struct, codec: str) -> Page:
    """Parse a page header and check that its sizes are possible."""
    kind, large, small = (header.get(field) for field in (1, 2, 3))
    held: Struct = next((header[at] for page, at in DETAILS.items() if page == kind and at in header), {})
    values = held.get(1, 0) if isinstance(held, dict) else None
    if not all(isinstance(x, int) and x >= 0 for x in (kind, large, small, values)):
        raise Implausible("the header of a page is damaged")
    page = Page(*(int(x) for x in (kind, large, small, values) if x is not None))
    if codec in RATIOS and page.large > RATIOS[codec] * page.small + FRAME:
        raise Implausible(f"a page of {page.small} bytes claims {page.large} by {codec.lower()}")
    if page.kind == DICTIONARY and page.values > page.large:
        raise Implausible(f"a dictionary of {page.large} bytes claims {page.values} values")
    return page


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


# ---------------------------------------------------------------- page headers

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
DEEPEST = 16
"""Maximum nesting of structs; Parquet's own headers need five levels."""


def struct(data: bytes) -> tuple[Struct, int]:
    """Parse a struct in Thrift's compact protocol; return it with its length in bytes.

    Text and floats become None; maps, which no header has, are refused.

    Raises:
        IndexError: the data end within the struct.
        ValueError: the data are no struct.
    """
    reader = _Compact(data)
    return reader.struct(0), reader.at


class _Compact:
    """Reader of Thrift's compact protocol, as far as Parquet's headers need it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def struct(self, depth: int) -> Struct:
        if depth > DEEPEST:
            raise ValueError("structs are nested too deeply")
        found: Struct = {}
        number = 0
        while head := self._byte():
            kind, delta = head & 15, head >> 4
            number = number + delta if delta else self._integer()
            found[number] = kind == TRUE if kind in (TRUE, FALSE) else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (TRUE, FALSE, BYTE):
            return self._byte()
        if kind in (I16, I32, I64):
            return self._integer()
        if kind in (DOUBLE, BINARY):
            return self._skip(8 if kind == DOUBLE else self._unsigned())
        if kind in (LIST, SET):
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._unsigned()
            return [self._value(head & 15, depth) for _ in range(size)]
        if kind == STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"there is no type {kind} in a header")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise IndexError("the data end within a value")

    def _unsigned(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
            if shift > 63:
                raise ValueError("an integer has more than 64 bits")

    def _integer(self) -> int:
        found = self._unsigned()
        return (found >> 1) ^ -(found & 1)
