"""Scalar columns of every Arrow type, as labels, numbers, and groups."""

from __future__ import annotations

import math
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offpol_diag.dump import schema
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import DumpError
from tests import factory
from tests.factory import read
from tests.reading import analyze

NAN = math.nan
NUMBERS = {
    name: pa.array([1, 2, 3, None], name)
    for bits in (8, 16, 32, 64)
    for name in (f"int{bits}", f"uint{bits}")
}
FLOATS = {f"float{bits}": pa.array(np.array([1.0, 2.5, NAN, NAN], f"float{bits}")) for bits in (16, 32, 64)}
TEXTS = {
    name: pa.array([b"a", b"", b"\xc3\xa9", None], pa.binary()).cast(getattr(pa, name)())
    for name in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
}
IDS = pa.array([uuid.UUID(int=1).bytes, uuid.UUID(int=2).bytes, b"\xff" * 16, None], pa.binary(16))
OTHERS = {
    "bool": pa.array([True, False, True, None]),
    "null": pa.nulls(4),
    "decimal": pa.array([Decimal("1.50"), Decimal(-2), Decimal(3), None], pa.decimal128(5, 2)),
    "date": pa.array([1, 2, -3, None], pa.date32()),
    "time": pa.array([1, 2, 3, None], pa.time64("us")),
    "timestamp": pa.array([1, 2, -3, None], pa.timestamp("us")),
    "timestamp in Berlin": pa.array([1, 2, -3, None], pa.timestamp("ns", "Europe/Berlin")),
    "duration": pa.array([1, 2, 3, None], pa.duration("s")),
    "fixed_size_binary": IDS,
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), IDS),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a":1}', "[1]", "{", None])),
    "dictionary of text": TEXTS["string"].dictionary_encode(),
    "dictionary of numbers": NUMBERS["int64"].dictionary_encode(),
}
SCALARS = {**NUMBERS, **FLOATS, **TEXTS, **OTHERS}
NESTED = {
    "struct": pa.array([{"a": 1}] * 4),
    "list": pa.array([[1]] * 4),
    "map": pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int8())),
    "a zone that is none": pa.array([1, 2, -3, None], pa.timestamp("us", "Nowhere/Land")),
}
SHOWN = {
    "timestamp": "1970-01-01 00:00:00.000001",
    "decimal": "1.50",
    "json": '{"a":1}',
    "uuid": uuid.UUID(int=1).hex,
    "binary": "a",
    "float32": 1.0,
}


def write(folder: Path, **more: Any) -> str:
    return factory.write(folder / "dump.parquet", **more)


@pytest.mark.parametrize("name", SCALARS)
def test_every_scalar_type_is_a_label_of_which_null_and_nan_are_none(tmp_path, name):
    for part in ("other", schema.GROUP, schema.SEQUENCE):
        batch = read(write(tmp_path, **{part: SCALARS[name]}), group_by=[part])
        labels = batch.scalars[part]
        assert all(isinstance(label, bool | int | float | str | None) for label in labels)
        assert labels[3] is None
        assert name == "null" or len({labels[0], labels[1]} - {None}) == 2
        assert all(label == label for label in labels)  # NaN is not
        assert name == "null" or batch.key[0] != batch.key[1]
        assert labels[0] == SHOWN.get(name, labels[0])


@pytest.mark.parametrize("part", [*schema.LABELS, schema.REWARDS, schema.ADVANTAGES, "other"])
def test_every_type_is_read_or_refused_in_every_part(tmp_path, part):
    for column in (*SCALARS.values(), *NESTED.values()):
        path, refused = write(tmp_path, **{part: column}), None
        try:
            read(path, group_by=["other"] if part == "other" else [])
        except DumpError as error:
            refused = error
        assert refused is None or (repr(part) in refused.message and refused.hint)
        assert part != "other" or read(path).tokens == 6, "nothing needs it"


def test_a_report_groups_by_columns_of_every_type_at_once(tmp_path):
    columns = {f"c{i}": SCALARS[name] for i, name in enumerate(SCALARS) if name != "null"}
    columns |= {"odd": ["nan", "inf", "1e999", "7"]}
    found = analyze(write(tmp_path, **columns), presets=["token_is"], group_by=[*columns])
    assert all(found.at(name) for name in columns)
    assert [place.key for place in found.at("odd")] == ["7", "1e999", "inf", "nan"], "which are text"


def test_steps_keep_their_values_as_far_as_64_bits_with_a_sign_hold_them(tmp_path):
    """A fraction is a trainer batch of its own."""
    for steps in (pa.array([2**62, 1, 2, None], pa.uint64()), pa.array([0.5, 0.5, 1.5, 2.0])):
        assert read(write(tmp_path, step=steps)).scalars["step"] == steps.to_pylist()
    with pytest.raises(DumpError, match=r"row 0, column 'step': it is 1.84467e\+19"):
        read(write(tmp_path, step=pa.array([2**64 - 1, 1, 2, None], pa.uint64())))


@pytest.mark.parametrize("value", ["9223372036854775808", "1" * 100])
def test_an_integer_beyond_64_bits_in_a_path_is_text(tmp_path, value):
    assert read(write(tmp_path / f"host={value}"), group_by=["host"]).scalars["host"] == [value] * 4


def test_a_path_that_is_no_utf8_is_refused(tmp_path):
    folder = tmp_path / b"host=\xff".decode(errors="surrogateescape")
    folder.mkdir()
    (folder / "dump.parquet").write_bytes(Path(write(tmp_path)).read_bytes())
    with pytest.raises(DumpError, match="cannot be read"):
        open_dump([str(folder)])


def test_of_a_column_with_many_values_the_table_says_how_many_it_leaves_out(tmp_path):
    hosts = [f"h{i % 5000}" for i in range(6000)]
    logs = [[-1.0 - i % 7, -2.0] for i in range(6000)]
    path = factory.write(tmp_path / "a.parquet", None, rollout_log_probs=logs, old_log_probs=logs, host=hosts)
    found = analyze(path, group_by=["host"], device="cpu")
    places = found.at("host")
    assert places[-1].key.startswith("all others, about ")
    assert len(places) + found.axes["host"].left_out == 4097
