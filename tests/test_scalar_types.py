"""Scalar columns of every Arrow type, in every part that a scalar column can play."""

from __future__ import annotations

import math
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.core.observe import analyze
from offpol_diag.dump import schema as columns
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import DumpError
from tests import factory
from tests.factory import ROLLOUT, read

NAN, INF = math.nan, math.inf
PARTS = (*columns.LABELS, columns.REWARDS, columns.ADVANTAGES, "other")
FAR = 2**63 - 1
INSTANT = 1_700_000_000_123_456_789


def raw(dtype: pa.DataType, *values: int) -> pa.Array:
    """Make an array of raw stored values, which the type may not allow; the last is null."""
    width = np.dtype(f"int{dtype.bit_width}")
    valid = pa.py_buffer(bytes([0b0111]))
    return pa.Array.from_buffers(dtype, 4, [valid, pa.py_buffer(np.array([*values, 0], width))])


def made() -> dict[str, pa.Array]:
    """Make four values of each type that Parquet can hold: the first two differ, the last is null."""
    numbers = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
    found = {name: pa.array([1, 2, 3, None], name) for name in numbers}
    for bits in (16, 32, 64):
        found[f"float{bits}"] = pa.array(np.array([1.0, 2.5, NAN, NAN], f"float{bits}"))
    found["bool"] = pa.array([True, False, True, None])
    found["null"] = pa.nulls(4)
    for bits, digits in ((32, 5), (64, 15), (128, 38), (256, 76)):
        dtype = getattr(pa, f"decimal{bits}")(digits, 2)
        found[f"decimal{bits}"] = pa.array([Decimal("1.50"), Decimal("-2"), Decimal("3"), None], dtype)
    for name in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
        found[name] = pa.array([b"a", b"", b"\xc3\xa9", None], pa.binary()).cast(getattr(pa, name)())
    found["fixed_size_binary"] = pa.array([b"ab", b"\xff\x00", b"\x1b[", None], pa.binary(2))
    found["date32"] = raw(pa.date32(), 1, 2**31 - 1, -(2**31))
    found["date64"] = raw(pa.date64(), 86_400_000, 86_400_000 * 10**9, -86_400_000)
    found["time32 ms"] = raw(pa.time32("ms"), 1, 86_000, -1)
    found["time64 ns"] = raw(pa.time64("ns"), 1, FAR, -1)
    for unit in ("s", "ms", "us", "ns"):
        far = FAR // 1000 if unit == "s" else FAR  # stored as milliseconds
        for zone in (None, "UTC", "Europe/Berlin", "Nowhere/Land"):
            found[f"timestamp {unit} {zone}"] = raw(pa.timestamp(unit, zone), INSTANT // 1000, far, -1)
        found[f"duration {unit}"] = raw(pa.duration(unit), 1500, FAR, -1)
    ids = [uuid.UUID(int=1).bytes, uuid.UUID(int=2).bytes, b"\xff" * 16, None]
    for dtype, values, storage in (
        (pa.uuid(), ids, pa.binary(16)),
        (pa.json_(), ['{"a":1}', "[1]", "{", None], pa.string()),
        (pa.bool8(), [1, 0, 2, None], pa.int8()),
    ):
        found[dtype.extension_name] = pa.ExtensionArray.from_storage(dtype, pa.array(values, storage))
    for name in ("int64", "uint64", "float64", "string", "binary", "date32", "timestamp ns None"):
        found[f"dictionary {name}"] = found[name].dictionary_encode()
    return found


def nested() -> dict[str, pa.Array]:
    """Make columns that hold more than one value in a row."""
    pairs = pa.array([[1, 2]] * 4, pa.list_(pa.int32(), 2))
    return {
        "struct": pa.array([{"a": 1}] * 4),
        "list": pa.array([[1]] * 4),
        "large_list": pa.array([[1]] * 4, pa.large_list(pa.int8())),
        "map": pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int8())),
        "tensor": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), pairs),
    }


SCALARS, NESTED = made(), nested()


def write(folder: Path, store_schema: bool = True, **more: Any) -> str:
    return factory.write(folder / "dump.parquet", pages={"store_schema": store_schema}, **more)


@pytest.mark.parametrize("name", SCALARS)
def test_every_scalar_type_is_a_label_of_which_null_and_nan_are_none(tmp_path, name):
    for part in ("other", columns.GROUP, columns.SEQUENCE):
        batch = read(write(tmp_path, **{part: SCALARS[name]}), group_by=[part])
        labels = batch.scalars[part]
        assert all(isinstance(label, bool | int | float | str | None) for label in labels)
        assert labels[3] is None
        assert name == "null" or len({labels[0], labels[1]} - {None}) == 2
        assert all(label == label for label in labels)  # NaN is not
        assert name == "null" or batch.key[0] != batch.key[1]


SHOWN = {
    "timestamp us None": (0, "2023-11-14 22:13:20.123456"),
    "timestamp us Europe/Berlin": (0, "2023-11-14 22:13:20.123456"),
    "timestamp ms None": (1, f"<value out of range: {FAR}>"),
    "date32": (1, f"<value out of range: {2**31 - 1}>"),
    "time64 ns": (0, "00:00:00.000000001"),
    "arrow.json": (0, '{"a":1}'),
    "decimal128": (0, "1.50"),
}


@pytest.mark.parametrize(("name", "shown"), SHOWN.items(), ids=SHOWN)
def test_labels_are_shown_as_text_that_can_be_read(tmp_path, name, shown):
    at, text = shown
    assert read(write(tmp_path, other=SCALARS[name]), group_by=["other"]).scalars["other"][at] == text


@pytest.mark.parametrize("store_schema", [True, False], ids=["arrow schema", "parquet types"])
@pytest.mark.parametrize("part", PARTS)
def test_every_type_is_read_or_refused_in_every_part(tmp_path, part, store_schema):
    for column in (*SCALARS.values(), *NESTED.values()):
        path = write(tmp_path, store_schema, **{part: column})
        refused = None
        try:
            read(path, group_by=["other"] if part == "other" else [])
        except DumpError as error:
            refused = error
        assert refused is None or (repr(part) in refused.message and refused.hint)
        assert part != "other" or read(path).tokens == 6, "nothing needs it"


def test_a_report_groups_by_columns_of_every_type_at_once(tmp_path):
    columns = {f"c{i}": SCALARS[name] for i, name in enumerate(SCALARS) if name != "null"}
    found = analyze(write(tmp_path, **columns), presets=["token_is"], group_by=[*columns])
    assert all(found.at(name) for name in columns)


# --- numbers that are labels


@pytest.mark.parametrize("part", columns.COUNTS)
@pytest.mark.parametrize("value", [INF, -INF, 1e300], ids=str)
def test_a_number_that_64_bits_do_not_hold_is_a_bad_row(tmp_path, part, value):
    path = write(tmp_path, **{part: [1.0, value, NAN, None]})
    with pytest.raises(DumpError, match=f"row 1, column '{part}': it is .*, and a number between"):
        read(path)
    assert read(path, on_bad_row="skip").scalars[part] == [1.0, None, None]


def test_steps_keep_their_values(tmp_path):
    """Unsigned ones as far as 64 bits with a sign hold them; a fraction is a trainer batch of its own."""
    for steps in (pa.array([2**62, 1, 2, None], pa.uint64()), pa.array([0.5, 0.5, 1.5, 2.0])):
        assert read(write(tmp_path, step=steps)).scalars["step"] == steps.to_pylist()


def test_unsigned_numbers_beyond_64_bits_with_a_sign_are_no_step(tmp_path):
    with pytest.raises(DumpError, match=r"row 0, column 'step': it is 1.84467e\+19"):
        read(write(tmp_path, step=pa.array([2**64 - 1, 1, 2, None], pa.uint64())))


def test_a_label_that_reads_as_infinity_or_nan_is_text(tmp_path):
    path = write(tmp_path, other=["nan", "inf", "1e999", "7"])
    found = analyze(path, presets=["token_is"], group_by=["other"]).at("other")
    assert [place.key for place in found] == ["7", "1e999", "inf", "nan"]


# --- names


def test_columns_of_one_name_that_nothing_needs_are_no_harm(tmp_path):
    arrays = [pa.array(ROLLOUT), pa.array(ROLLOUT), pa.array([1] * 4), pa.array(["a"] * 4)]
    table = pa.Table.from_arrays(arrays, names=["rollout_log_probs", "old_log_probs", "x", "x"])
    path = factory.write(tmp_path / "a.parquet", table)
    assert read(path).tokens == 6
    with pytest.raises(DumpError, match="two columns are called 'x'"):
        open_dump([path], group_by=["x"])


@pytest.mark.parametrize("value", ["9223372036854775808", "1" * 100])
def test_an_integer_beyond_64_bits_in_a_path_is_text(tmp_path, value):
    assert read(write(tmp_path / f"host={value}"), group_by=["host"]).scalars["host"] == [value] * 4


def test_a_path_that_is_no_utf8_is_refused(tmp_path):
    folder = tmp_path / b"host=\xff".decode(errors="surrogateescape")
    folder.mkdir()
    (folder / "dump.parquet").write_bytes(Path(write(tmp_path)).read_bytes())
    with pytest.raises(DumpError, match="the path is not UTF-8"):
        open_dump([str(folder)])


# ---------------------------------------------------------------- more values than are kept


def crowd(folder: Path) -> str:
    """Write 1,000 hosts with two rows each, and 500 with one, in an order that mixes them."""
    hosts = [f"h{i % 1500}" for i in range(2500)]
    logs = [[-1.0 - i % 7, -2.0] for i in range(2500)]
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs, "host": hosts})
    pq.write_table(table, folder / "crowd.parquet", row_group_size=300)
    return str(folder / "crowd.parquet")


@pytest.mark.parametrize("tokens", [None, 100])
def test_of_a_column_with_many_values_the_largest_groups_are_listed_and_the_others_are_one(tmp_path, tokens):
    found = analyze(crowd(tmp_path), group_by=["host"], device="cpu", batch_tokens=tokens)
    *listed, others = found.at("host")
    assert {place.key: place.sequences for place in listed} == {f"h{i}": 2 for i in range(1000)}
    assert (others.key, others.sequences, others.tokens) == ("all others, 500 values", 500, 1000)
    assert any("1,500 values; the 1,000 largest groups" in note for note in found.dump.notes)


def test_of_equally_large_groups_the_first_in_order_are_listed(tmp_path):
    dump = open_dump([crowd(tmp_path)], group_by=["host"])
    kept, others = dump.largest("host", 1001)
    assert (kept, others) == ({f"h{i}" for i in range(1000)} | {"h1000"}, 499)
    assert dump.largest("host", 1500) is None
