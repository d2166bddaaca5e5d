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
"""Bytes that one byte can become at most, by how a codec writes a run; where none is named, any number."""
SLACK = 64 << 20
"""Bytes by which pages may be larger than the footer says: some writers count in another way."""
LONGEST = 1 << 24
"""Values of a row, on average, that need no bytes behind them."""
PER_BYTE = 64
"""Values that are plausible for each byte, where rows are longer than that."""
WINDOWS = (1 << 10, 1 << 16, 1 << 24)
"""Bytes of a page's header that are read; the next one where it is longer."""
FRAME = 1 << 10
"""Bytes by which a page may be larger than its ratio allows: what a codec writes around an empty one."""
DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
DETAILS = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}
"""Kind of page → the field of its header with the number of values."""


class Implausible(ValueError):
    """What a column says of its size cannot be."""


def check(chunk: pq.ColumnChunkMetaData, rows: int, size: int, stream: BinaryIO | None) -> None:
    """Check the sizes that a column of a row group declares.

    Args:
        chunk: what the footer says of it.
        rows: of the row group.
        size: bytes of the file.
        stream: the file, for a look at the pages' headers; None to believe them.

    Raises:
        Implausible: they cannot be true.
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
    """The pages in their order, until all values have come."""
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
    """What a page's header says.

    Attributes:
        kind: of page.
        large: its bytes, decompressed.
        small: its bytes in the file.
        values: how many it holds.
    """

    kind: int
    large: int
    small: int
    values: int


def _page(header: Struct, codec: str) -> Page:
    """A page that can be as its header says."""
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
    """A page's header, and where the page begins."""
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
"""Structs in structs; Parquet's own headers have five."""


def struct(data: bytes) -> tuple[Struct, int]:
    """The struct that bytes begin with, in thrift's compact protocol, and where it ends.

    Text and floats are skipped, and are None; maps, which no header has, are refused.

    Raises:
        IndexError: the data end before it does.
        ValueError: what is there is no struct.
    """
    reader = _Compact(data)
    return reader.struct(0), reader.at


class _Compact:
    """Reads thrift's compact protocol, as far as Parquet's headers need it."""

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
