"""Sizes that a damaged file declares: found out before memory is taken; honest dumps may compress at will."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.errors import DumpError
from offpol_diag.readers import open_dump, parquet
from offpol_diag.readers.parquet import Implausible, check_sizes, struct

CODECS = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")
LAYOUTS = {
    "dictionary": {},
    "plain": {"use_dictionary": False},
    "second version": {"use_dictionary": False, "data_page_version": "2.0"},
    "small pages": {"data_page_size": 100, "write_batch_size": 1},
    "large pages": {"data_page_size": 1 << 30, "use_dictionary": False},
    "checksums": {"write_page_checksum": True},
    "row groups": {"row_group_size": 7},
}


def constant(rows: int, length: int) -> pa.Table:
    """Make a dump of responses of one length in which every column is constant."""
    lengths = pa.array(np.arange(rows + 1) * length, pa.int32())

    def lists(value: float, kind: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(lengths, pa.repeat(pa.scalar(value, kind), rows * length))

    return pa.table(
        {
            "rollout_log_probs": lists(0.0, pa.float32()),
            "old_log_probs": lists(0.0, pa.float64()),
            "response_mask": lists(1, pa.int8()),
            "token_ids": lists(7, pa.int64()),
            "step": pa.repeat(3, rows),
            "group_id": pa.repeat("the same prompt", rows),
            "rewards": pa.nulls(rows, pa.float64()).fill_null(1.0),
        }
    )


def tokens(path: Path) -> int:
    return sum(batch.tokens for batch in open_dump([str(path)]).batches())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_constant_columns_are_read_however_they_are_compressed(tmp_path, codec, layout):
    path = tmp_path / "a.parquet"
    pq.write_table(constant(50, 1000), path, compression=codec, **layout)
    assert tokens(path) == 50_000


@pytest.mark.parametrize("layout", [{}, {"use_dictionary": False}], ids=["runs", "plain"])
def test_millions_of_equal_tokens_in_a_few_bytes_are_read(tmp_path, layout):
    path = tmp_path / "a.parquet"
    pq.write_table(constant(1000, 3000), path, compression="zstd", **layout)
    assert path.stat().st_size < 3_000_000 / 50
    assert tokens(path) == 3_000_000


def test_too_many_equal_values_of_one_row_group_are_not_called_damage(tmp_path):
    path = tmp_path / "a.parquet"
    logs = pa.LargeListArray.from_arrays([0, *[0] * 60, 17_000_000], pa.repeat(pa.scalar(0.0), 17_000_000))
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs})
    pq.write_table(table, path, compression="zstd", write_batch_size=1 << 22)
    with pytest.raises(DumpError, match="too many values of one row group") as caught:
        tokens(path)
    assert "damaged" not in caught.value.hint
    assert "write row groups of up to 16,777,216 values" in caught.value.hint


def test_short_memory_is_not_called_damage(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(constant(5, 10), path)

    def short(*args, **more):
        raise pa.ArrowMemoryError("malloc of size 64 failed")
        yield

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", short)
    with pytest.raises(DumpError, match="not enough memory") as caught:
        tokens(path)
    assert "damaged" not in caught.value.hint


def test_statistics_of_long_text_do_not_hide_a_page(tmp_path):
    path = tmp_path / "a.parquet"
    table = constant(4, 3).set_column(5, "group_id", pa.array(["x" * 100_000 + str(i) for i in range(4)]))
    pq.write_table(table, path, data_page_version="2.0")
    assert tokens(path) == 12


# --- damage


def zigzag(number: int, width: int = 1) -> bytes:
    """Encode an integer as thrift does, in so many bytes or more."""
    number, found = number << 1 if number >= 0 else -2 * number - 1, []
    while number > 127 or len(found) + 1 < width:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


@pytest.mark.parametrize("codec", CODECS[1:])
@pytest.mark.parametrize("field", ["bytes", "values"])
def test_a_page_that_claims_too_much_is_refused_with_little_memory(tmp_path, codec, field):
    path = tmp_path / "a.parquet"
    layout = {"use_dictionary": False, "data_page_size": 1 << 30, "write_batch_size": 1 << 20}
    pq.write_table(constant(40, 50_000), path, compression=codec, **layout)
    data = bytearray(path.read_bytes())
    begin = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    found, size = struct(bytes(data[begin : begin + 1000]))
    true = zigzag(found[2] if field == "bytes" else found[5][1])
    at = data.index(true, begin, begin + size)
    data[at : at + len(true)] = zigzag((1 << 7 * len(true) - 1) - 1)
    path.write_bytes(data)
    with pytest.raises(DumpError) as caught:
        tokens(path)
    assert f"{path}, row group 0, from row 0 on, column 'rollout_log_probs': " in caught.value.message
    assert "claim" in caught.value.message
    assert "the file is damaged" in caught.value.hint


def header(kind: int = 0, large: int = 8, small: int = 8, values: int = 1) -> bytes:
    """Encode a page's header: its kind, sizes and number of values."""
    numbers = b"".join(bytes([0x15]) + zigzag(number) for number in (kind, large, small))
    place = {0: 0x2C, 2: 0x4C, 3: 0x5C}.get(kind, 0x2C)
    return numbers + bytes([place, 0x15]) + zigzag(values) + b"\0\0"


def judged(pages: bytes, size: int = 10**6, rows: int = 1, stream: bool = True, **footer: object) -> None:
    said = {
        "data_page_offset": 4,
        "dictionary_page_offset": None,
        "total_compressed_size": len(pages),
        "total_uncompressed_size": 100,
        "num_values": 1,
        "compression": "ZSTD",
    }
    check_sizes(SimpleNamespace(**said | footer), rows, size, io.BytesIO(b"PAR1" + pages) if stream else None)


PAGE = header() + b"\0" * 8
LIES = {
    "a column beyond the end of the file": (PAGE, {"size": 10}, "it lies at bytes 4 to"),
    "a column before the file": (PAGE, {"data_page_offset": -7}, "it lies at bytes -7"),
    "a column of negative size": (PAGE, {"total_compressed_size": -1}, "it lies at bytes 4 to 3"),
    "values of no row": (PAGE, {"num_values": 2**40}, "1099511627776 values in 1 rows"),
    "negative values": (PAGE, {"num_values": -1}, "-1 values"),
    "more bytes than its codec can make": (
        header(large=2**31 - 1) + b"\0" * 8,
        {},
        "a page of 8 bytes claims 2147483647 by zstd",
    ),
    "more bytes than the footer says": (
        header(large=2**31 - 1) + b"\0" * 8,
        {"compression": "BROTLI"},
        "its pages claim 2147483647 bytes, and the footer 100",
    ),
    "more values than the footer says": (
        header(values=2**31 - 1) + b"\0" * 8,
        {},
        "its pages claim 2147483647 values, and the footer 1",
    ),
    "fewer values than the footer says": (PAGE, {"num_values": 3}, "claim 1 values, and the footer 3"),
    "a page beyond its column": (header(small=9) + b"\0" * 8, {}, "its pages claim"),
    "a page of negative size": (header(small=-1), {}, "the header of a page is damaged"),
    "a page of no kind": (b"\0" * 20, {}, "the header of a page is damaged"),
    "a header that does not end": (header()[:-1], {}, "the page header at byte 4 does not end"),
    "a header of another protocol": (b"\xff" * 40, {}, "the page header at byte 4 is damaged"),
    "an integer without end": (b"\x15" + b"\xff" * 40, {}, "an integer has more than 64 bits"),
    "structs in structs": (b"\x1c" * 100, {}, "structs are nested too deeply"),
    "a dictionary larger than its bytes": (
        header(2, values=9) + b"\0" * 8 + PAGE,
        {},
        "a dictionary of 8 bytes claims 9 values",
    ),
}


@pytest.mark.parametrize(("pages", "footer", "says"), LIES.values(), ids=LIES)
def test_impossible_sizes_are_refused(pages, footer, says):
    with pytest.raises(Implausible) as caught:
        judged(pages, **footer)
    assert says in str(caught.value)


def test_possible_sizes_pass():
    judged(PAGE)
    judged(b"", num_values=0, data_page_offset=0)
    judged(PAGE + PAGE, num_values=2)
    judged(header(2, values=2) + b"\0" * 8 + PAGE)
    judged(header(3) + b"\0" * 8)
    judged(PAGE, num_values=1 << 24, stream=False)
    judged(header(large=8 * 30_000, values=10**6) + b"\0" * 8, num_values=10**6)


def test_a_header_longer_than_a_window_is_read():
    long = b"\x15\x00\x15\x10\x15\x10\x2c\x15\x02\x48" + b"\xa0\x8d\x06" + b"x" * 100_000 + b"\0\0"
    judged(long + b"\0" * 8)


def test_rows_that_share_a_long_text_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "TEXT_AT_ONCE", 1 << 12)
    texts = [f"{i % 2}{'x' * 1000}" for i in range(100)]
    logs = pa.array([[-1.0]] * 100)
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs, "group_id": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    dump = open_dump([str(tmp_path / "a.parquet")])

    assert max(len(piece.rows) for part in dump.parts for piece in dump._tables(part, 0)) <= 4
    assert [one for batch in dump.batches() for one in batch.scalars["group_id"]] == texts


def test_three_million_rows_of_one_token_are_refused_by_their_footer(tmp_path):
    ends = pa.array(np.arange(3_000_001), pa.int32())
    logs = pa.ListArray.from_arrays(ends, pa.repeat(pa.scalar(-1.0, pa.float32()), 3_000_000))
    pq.write_table(pa.table({"rollout_log_probs": logs, "old_log_probs": logs}), tmp_path / "a.parquet")
    with pytest.raises(DumpError, match="more than 1,000,000 rows of fewer than two tokens") as caught:
        open_dump([str(tmp_path / "a.parquet")])
    assert "--tally" in caught.value.hint


def test_millions_of_rows_without_tokens_are_refused_by_their_footer(tmp_path, monkeypatch):
    logs = pa.array([[]] * 99 + [[-1.0, -2.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"rollout_log_probs": logs, "old_log_probs": logs}), tmp_path / "a.parquet")
    (batch,) = open_dump([str(tmp_path / "a.parquet")]).batches()
    assert batch.tokens == 2
    monkeypatch.setattr("offpol_diag.readers.dump.MOST_SHORT", 99)
    with pytest.raises(DumpError, match=r"100 rows have at most 101 tokens .*more than 99 rows"):
        open_dump([str(tmp_path / "a.parquet")])
