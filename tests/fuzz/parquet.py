"""Small Parquet dumps, damaged in many ways, analyzed.

python tests/fuzz/parquet.py --seconds 60 --seed 0
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import runner

from offpol_diag.readers.columns import LONG

ANALYZE = ("analyze", "dump.parquet", "--presets", "token_is,seq_mis", "--no-html", "-q", "--json", "a.json")
NAN, INF = float("nan"), float("inf")
CODECS = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")
NAMES = [name for role in LONG.roles for name in role.names]

Columns = dict[str, pa.Array]


# ---------------------------------------------------------------- valid dumps


def dump(draw: Random) -> Columns:
    """Make the columns of a small valid dump, one row per sequence or one per token."""
    rows = draw.randint(1, 12)
    lengths = [draw.choice((0, 1, 3, 17)) for _ in range(rows)] + [5]
    logs = [[-draw.expovariate(1.0) for _ in range(n)] for n in lengths]
    width = draw.choice((pa.float16, pa.float32, pa.float64))()
    kind = draw.choice((pa.list_, pa.large_list))
    labels = range(len(lengths))
    if draw.random() < 0.25:
        return _long(logs, width)
    found: Columns = {
        "rollout_log_probs": pa.array(logs, pa.list_(pa.float64())).cast(kind(width)),
        "old_log_probs": pa.array([[x * 1.01 for x in row] for row in logs], kind(pa.float64())),
        "response_mask": pa.array([[draw.randint(0, 3) and 1 for _ in row] for row in logs], kind(pa.int8())),
        "current_log_probs": pa.array(logs, kind(pa.float64())),
        "advantages": pa.array([1.0 - n % 3 for n in lengths]),
        "rewards": pa.array([float(n % 2) for n in lengths]),
        "token_ids": pa.array([[draw.randint(0, 9) for _ in row] for row in logs], kind(pa.int32())),
        "entropy": pa.array([[0.5] * n for n in lengths], kind(pa.float32())),
        "step": pa.array([i // 4 for i in labels]),
        "policy_lag": pa.array([i % 3 for i in labels], pa.int8()),
        "group_id": pa.array([f"prompt {i // 2}" for i in labels]).dictionary_encode(),
        "sequence_id": pa.array([f"s{i}" for i in labels]),
        "other": scalar(draw, len(lengths)),
    }
    optional = [name for name in found if name not in ("rollout_log_probs", "old_log_probs", "other")]
    for name in draw.sample(optional, draw.randint(0, len(optional))):
        del found[name]
    return found


def _long(logs: list[list[float]], width: pa.DataType) -> Columns:
    flat = [x for row in logs for x in row]
    owners = [i for i, row in enumerate(logs) for _ in row]
    return {
        "rollout_log_prob": pa.array(flat, pa.float64()).cast(width),
        "old_log_prob": pa.array(flat, pa.float64()),
        "sequence_id": pa.array(owners),
        "position": pa.array([i for row in logs for i in range(len(row))]),
        "other": pa.array([f"host {i % 2}" for i in owners]),
    }


def scalar(draw: Random, rows: int) -> pa.Array:
    """Draw a column of one of Arrow's scalar types with odd values, some of them null."""
    whole = (0, 1, -1, 3, 2**31 - 1, 2**63 - 1, -(2**63), None)
    unit, zone = draw.choice(("s", "ms", "us", "ns")), draw.choice((None, "UTC", "Europe/Berlin", "Nowhere"))
    makers: tuple[tuple[pa.DataType, tuple[Any, ...]], ...] = (
        (pa.int64(), whole),
        (pa.uint64(), (0, 1, 2**64 - 1, None)),
        (pa.float64(), (0.0, NAN, INF, -INF, 1e308, 1.5, None)),
        (pa.float32(), (0.0, NAN, 2.0, None)),
        (pa.string(), ("a", "", "é\x1b[31m\n", "nan", "inf", "1e999", "x" * 3000, None)),
        (pa.large_string(), ("a", "ä", None)),
        (pa.binary(), (b"a", b"\xff", b"", None)),
        (pa.binary(16), (b"\0" * 16, b"\xff" * 16, None)),
        (pa.bool_(), (True, False, None)),
        (pa.decimal128(38, 3), (Decimal("1.5"), Decimal(-(10**30)), None)),
        (pa.date32(), (0, 1, 2**31 - 1, None)),
        (pa.time64("ns"), (0, 1, 2**63 - 1, None)),
        (pa.timestamp(unit, zone), (0, 1, -1, 2**52, None)),
        (pa.duration(unit), whole),
        (pa.null(), (None,)),
        (pa.struct([("a", pa.int8())]), ({"a": 1}, None)),
        (pa.list_(pa.int8()), ([1], [], None)),
        (pa.map_(pa.string(), pa.int8()), ([("a", 1)], None)),
    )
    dtype, values = draw.choice(makers)
    storage = pa.int32() if dtype == pa.date32() else pa.int64() if pa.types.is_temporal(dtype) else dtype
    found = pa.array([draw.choice(values) for _ in range(rows)], storage)
    found = found.view(dtype) if storage != dtype else found
    encodes = draw.random() < 0.2 and not pa.types.is_nested(dtype) and not pa.types.is_null(dtype)
    return found.dictionary_encode() if encodes else found


def written(draw: Random, names: list[str], arrays: list[pa.Array], provenance: bytes = b"") -> bytes:
    """Write columns with random settings of Parquet."""
    table = pa.Table.from_arrays(arrays, names=names)
    if provenance:
        table = table.replace_schema_metadata({b"offpol_diag": provenance})
    sink = pa.BufferOutputStream()
    encodes = draw.random() < 0.5
    pq.write_table(
        table,
        sink,
        compression=draw.choice(CODECS),
        use_dictionary=encodes,
        use_byte_stream_split=not encodes and draw.random() < 0.2 and _all_split(arrays),
        data_page_version=draw.choice(("1.0", "2.0")),
        row_group_size=draw.choice((1, 3, 1000)),
        data_page_size=draw.choice((16, 1 << 20)),
        write_statistics=draw.random() < 0.7,
        write_page_checksum=draw.random() < 0.2,
        store_schema=draw.random() < 0.7,
        version=draw.choice(("1.0", "2.4", "2.6")),
    )
    return bytes(sink.getvalue())


def _all_split(arrays: list[pa.Array]) -> bool:
    return all(pa.types.is_floating(array.type) for array in arrays)


def valid(draw: Random) -> bytes:
    """Write a valid dump; draws that cannot be written are repeated."""
    while True:
        found = dump(draw)
        try:
            return written(draw, list(found), list(found.values()))
        except (pa.ArrowException, ValueError, OSError):
            continue


# ---------------------------------------------------------------- ways to damage one


def damaged_bytes(draw: Random) -> bytes:
    """Change, clear, remove or insert bytes anywhere."""
    data = bytearray(valid(draw))
    for _ in range(draw.choice((1, 1, 2, 8))):
        _strike(draw, data, 0, len(data))
    return bytes(data)


def damaged_footer(draw: Random) -> bytes:
    """Damage bytes of the footer, whose length stays true."""
    data = valid(draw)
    size = struct.unpack("<I", data[-8:-4])[0]
    footer = bytearray(data[-8 - size : -8])
    for _ in range(draw.choice((1, 1, 2, 4))):
        _strike(draw, footer, 0, len(footer))
    return data[: -8 - size] + bytes(footer) + struct.pack("<I", len(footer)) + b"PAR1"


def damaged_pages(draw: Random) -> bytes:
    """Damage bytes at the beginning of pages, where their headers are."""
    data = bytearray(valid(draw))
    metadata = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata
    for _ in range(draw.choice((1, 1, 2))):
        group = metadata.row_group(draw.randrange(metadata.num_row_groups))
        chunk = group.column(draw.randrange(group.num_columns))
        begin = draw.choice((chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset))
        _strike(draw, data, begin, min(begin + 60, len(data)), keeps_length=True)
    return bytes(data)


def damaged_numbers(draw: Random) -> bytes:
    """Replace integers of the footer by extreme ones."""
    data = valid(draw)
    size = struct.unpack("<I", data[-8:-4])[0]
    footer = bytearray(data[-8 - size : -8])
    for _ in range(draw.choice((1, 1, 2, 3))):
        tags = [at for at in range(len(footer) - 2) if footer[at] & 15 in (5, 6) and 0 < footer[at] >> 4 < 5]
        if tags:
            begin = draw.choice(tags) + 1
            end = begin
            while end < len(footer) and footer[end] & 128:
                end += 1
            footer[begin : end + 1] = _varint(draw.choice((0, 1, 2, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1)))
    return data[: -8 - size] + bytes(footer) + struct.pack("<I", len(footer)) + b"PAR1"


def _varint(number: int) -> bytes:
    found = []
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _strike(draw: Random, data: bytearray, begin: int, end: int, keeps_length: bool = False) -> None:
    """Make one change between two places."""
    at = draw.randrange(begin, max(end, begin + 1))
    size = draw.choice((1, 1, 2, 4, 16))
    change = draw.randrange(4 if keeps_length else 7)
    if change == 0 and at < len(data):
        data[at] ^= 1 << draw.randrange(8)
    elif change == 1:
        data[at : at + size] = bytes(draw.choice((0, 127, 128, 255)) for _ in data[at : at + size])
    elif change == 2:
        data[at : at + size] = draw.randbytes(len(data[at : at + size]))
    elif change == 3 and at < len(data):
        data[at] = (data[at] + draw.choice((-1, 1))) % 256
    elif change == 4:
        del data[at : at + size]
    elif change == 5:
        data[at:at] = draw.randbytes(size)
    elif change == 6 and draw.random() < 0.2:
        del data[at:]


def odd_schema(draw: Random) -> bytes:
    """Rename, retype, duplicate or drop columns."""
    while True:
        found = list(dump(draw).items())
        rows = len(found[0][1])
        for _ in range(draw.choice((1, 1, 2, 3))):
            at = draw.randrange(len(found))
            name, array = found[at]
            change = draw.randrange(5)
            if change == 0:
                found[at] = (
                    draw.choice((*NAMES, "", "a.b", "list", "x" * 300, "é\n\x1b[2J", name.upper())),
                    array,
                )
            elif change == 1:
                found[at] = name, scalar(draw, rows)
            elif change == 2:
                found.append((name, draw.choice(found)[1]))
            elif change == 3 and len(found) > 1:
                del found[at]
            elif change == 4:
                found.append((draw.choice(NAMES), scalar(draw, rows)))
        try:
            return written(draw, [name for name, _ in found], [array for _, array in found])
        except (pa.ArrowException, ValueError, OSError):
            continue


def odd_values(draw: Random) -> bytes:
    """Write values that no log-prob, mask or number should have, and lists of other lengths."""
    odd = (None, NAN, INF, -INF, 1e308, -1e308, 0.0, -0.0, 5.0, -1e-320, -1.0, 2.0, -700.0)
    while True:
        found = dump(draw)
        for _ in range(draw.choice((1, 1, 3))):
            name = draw.choice([name for name in found if name != "other"])
            column = found[name].to_pylist()
            for _ in range(draw.choice((1, 2, len(column)))):
                if column:
                    row = draw.randrange(len(column))
                    column[row] = _spoilt(draw, column[row], odd)
            try:
                found[name] = pa.array(column, found[name].type) if column else found[name]
            except (pa.ArrowException, ValueError, TypeError, OverflowError):
                continue
        try:
            return written(draw, list(found), list(found.values()))
        except (pa.ArrowException, ValueError, OSError):
            continue


def _spoilt(draw: Random, value: Any, odd: tuple[Any, ...]) -> Any:
    if not isinstance(value, list):
        return draw.choice(odd)
    if not value or draw.random() < 0.2:
        return draw.choice((None, [], value * 2, value[:-1]))
    at = draw.randrange(len(value))
    return [*value[:at], draw.choice(odd), *value[at + 1 :]]


def odd_provenance(draw: Random) -> bytes:
    """Damage the file's own metadata."""
    texts: tuple[bytes, ...] = (
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"temperature": 1e999, "top_p": NaN}',
        b'{"temperature": ' + b"9" * 5000 + b"}",
        b'{"model": "\\ud800", "\\udfff": 1}',
        b'{"model": "\\u001b[2J\\n::error::x"}',
        json.dumps({"temperature": draw.choice((0, -1, "hot", [1], {"a": 1}, None, True))}).encode(),
        json.dumps(
            {draw.choice(("engine", "trainer", "top_k", "logprobs")): draw.choice((1, [], "x" * 9999))}
        ).encode(),
    )
    while True:
        found = dump(draw)
        try:
            return written(draw, list(found), list(found.values()), draw.choice(texts))
        except (pa.ArrowException, ValueError, OSError):
            continue


MAKERS: dict[str, Callable[[Random], bytes]] = {
    "valid": valid,
    "bytes": damaged_bytes,
    "footer": damaged_footer,
    "pages": damaged_pages,
    "numbers": damaged_numbers,
    "schema": odd_schema,
    "values": odd_values,
    "provenance": odd_provenance,
}


def make(draw: Random) -> runner.Input:
    """Draw a dump, and options to analyze it with."""
    data = draw.choice(list(MAKERS.values()))(draw)
    args = ["--group-by", draw.choice(("other", "step", "policy_lag", "rewards"))] * draw.randint(0, 1)
    args += ["--on-bad-row", "skip"] * draw.randint(0, 1)
    args += ["--columns", f"old={draw.choice(NAMES)}"] * (draw.random() < 0.05)
    args += ["--sequences", "sequences.parquet"] * (draw.random() < 0.3)
    return runner.Input((*ANALYZE, *args), {"dump.parquet": data})


if __name__ == "__main__":
    raise SystemExit(runner.main(make))
