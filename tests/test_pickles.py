"""Pickles: what trainers write is read, and nothing that a pickle asks for is done."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offpol_diag.forms import unpickle
from tests.factory import Table, converted, unconvertible
from tests.test_forms import flat, padded
from tests.test_forms import rows as rows

# ---------------------------------------------------------------- any writer


def narrowed(columns: dict[str, Any]) -> dict[str, Any]:
    """Narrow arrays to the widths that trainers write."""
    kinds = {"f": np.float32, "i": np.int64}
    return {
        name: value.astype(kinds[value.dtype.kind]) if value.dtype.kind in kinds else value
        for name, value in columns.items()
    }


def ragged(rows: Table) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def tensors(rows: Table) -> dict[str, Any]:
    return {
        name: torch.tensor(value) if value.dtype.kind in "fi" else list(value)
        for name, value in narrowed(padded(rows)).items()
    }


SHAPES: Mapping[str, Callable[[Table], Any]] = {
    "padded": lambda rows: narrowed(padded(rows)),
    "flat": lambda rows: narrowed(flat(rows)) | {"lengths": [len(row["token_ids"]) for row in rows]},
    "column by column": lambda rows: {
        name: np.asfortranarray(value) for name, value in narrowed(padded(rows)).items()
    },
    "ragged": ragged,
    "records": list,
    "samples": lambda rows: {"step": 3, "state": bytearray(b"ab"), "samples": rows},
    "tensors": tensors,
}
WAYS = [(shape, protocol) for shape in SHAPES for protocol in (2, 4, 5, "torch")]
WAYS = [way for way in WAYS if way[0] != "tensors" or way[1] == "torch"]
"""A pickle of tensors holds files that torch.load reads, and is refused."""


@pytest.mark.parametrize(("shape", "protocol"), WAYS)
def test_values_come_back(shape: str, protocol: Any, rows: Table, tmp_path: Path) -> None:
    path = tmp_path / ("a.pt" if protocol == "torch" else "a.pkl")

    def save(value: Any) -> None:
        if protocol == "torch":
            torch.save(value, path)
        else:
            path.write_bytes(pickle.dumps(value, protocol=protocol))

    value = SHAPES[shape](rows)
    save(value)
    assert converted(path)[0] == rows
    if shape in ("padded", "ragged", "tensors"):
        value["mine"], value["theirs"] = value.pop("rollout_log_probs"), value.pop("old_log_probs")
        save(value)
        found, _ = converted(path, columns={"rollout": "mine", "old": "theirs"})
        assert [{key: row[key] for key in rows[0]} for row in found] == rows


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.uint16]
)
def test_views_of_tensors_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    value = {"a": whole, "b": whole.T[2:, 1:3], "c": whole[:, :1].expand(4, 5), "d": whole[:0]}
    torch.save(value, tmp_path / "a.pt")
    found = unpickle.load(tmp_path / "a.pt")
    for name, tensor in value.items():
        assert found[name].tolist() == tensor.tolist()
        assert found[name].shape == tensor.shape


# ---------------------------------------------------------------- hostile pickles


class Calls:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


def raw(*parts: bytes) -> bytes:
    """Make a pickle of instructions."""
    return b"\x80\x04" + b"".join(parts)


def text(word: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(word)) + word.encode()


def name(module: str, word: str) -> bytes:
    return text(module) + text(word) + pickle.STACK_GLOBAL


KEY = pickle.EMPTY_DICT + text("logprobs")
END = pickle.SETITEM + pickle.STOP
SYSTEM = pickle.TUPLE1 + pickle.REDUCE


def within(value: Any, protocol: int = 4) -> bytes:
    return pickle.dumps({"logprobs": [-1.0], "old_logprobs": [-1.0], "more": value}, protocol=protocol)


def doubled(levels: int) -> bytes:
    """Make a list of two lists, which are one, of two lists, …"""
    value: list[Any] = [-1.0] * 8
    for _ in range(levels):
        value = [value, value]
    return pickle.dumps([{"logprobs": value, "old_logprobs": value, "weight_versions": value}])


def deep(levels: int) -> bytes:
    return raw(KEY, pickle.EMPTY_LIST * levels, pickle.APPEND * (levels - 1), END)


def dtype(code: str) -> bytes:
    return name("numpy", "dtype") + text(code) + SYSTEM


def from_buffer(data: bytes, code: str, size: bytes) -> bytes:
    """Make a pickle of an array of bytes."""
    values = b"(" + pickle.SHORT_BINBYTES + bytes([len(data)]) + data
    made = name("numpy._core.numeric", "_frombuffer") + values + dtype(code)
    return raw(KEY, made, size + b"\x85" + text("C") + b"tR", END)


BYTEARRAY = name("builtins", "bytearray")
CALLED = "touch"
PICKLES: Mapping[str, tuple[bytes, str]] = {
    "system": (within(Calls(os.system, CALLED)), "holds posix.system, which"),
    "system, protocol 2": (within(Calls(os.system, CALLED), 2), "holds posix.system, which"),
    "eval": (within(Calls(eval, "1/0")), "holds builtins.eval, which"),
    "getattr": (within(Calls(getattr, OrderedDict, "fromkeys")), "holds builtins.getattr, which"),
    "chain": (raw(KEY, name("numpy", "dtype.__class__"), END), "holds numpy.dtype.__class__, which"),
    "import": (within(Calls(__import__, "os")), "holds builtins.__import__, which"),
    "loader": (raw(KEY, name("torch", "load"), text("x"), SYSTEM, END), "holds torch.load, which"),
    "other": (within(Path("a")), "holds pathlib."),
    "bytearray": (raw(KEY, BYTEARRAY, b"J\xff\xff\xff\x7f", SYSTEM, END), "holds bytes in"),
    "dtype": (raw(KEY, dtype("V9"), END), "holds values of NumPy type 'V9'"),
    "codec": (raw(KEY, name("_codecs", "encode"), text("x"), text("zip"), b"\x86R", END), "holds bytes in"),
    "arguments": (raw(KEY, name("numpy", "dtype"), b")R", END), "a damaged pickle"),
    "dtype's order": (
        raw(KEY, dtype("f4"), b"(K\x03" + text("x") + b"tb", END),
        "holds a damaged NumPy type",
    ),
    "state": (raw(KEY, name("numpy", "dtype"), pickle.EMPTY_DICT, b"b", END), "holds a change of something"),
    "state of a list": (raw(KEY, b"]", pickle.EMPTY_DICT, b"b", END), "holds a change of something"),
    "call of a value": (raw(KEY, b"])R", END), "holds a call of something"),
    "dtype's state": (raw(KEY, dtype("f4"), b"}b", END), "a damaged pickle"),
    "huge bytes": (raw(KEY, pickle.BINBYTES8, struct.pack("<Q", 1 << 42), b"abc"), "a damaged pickle"),
    "huge bytearray": (raw(KEY, pickle.BYTEARRAY8, struct.pack("<Q", 1 << 42), b"abc"), "a damaged pickle"),
    "huge frame": (raw(pickle.FRAME, struct.pack("<Q", 1 << 62), KEY), "a damaged pickle"),
    "huge memo": (raw(KEY, b"]", pickle.LONG_BINPUT, b"\xff\xff\xff\xff", b"h\x00", END), "a damaged pickle"),
    "huge array": (from_buffer(b"", "f4", b"J\xff\xff\xff\x7f"), "holds an array whose size"),
    "objects": (from_buffer(bytes(8), "O8", b"K\x01"), "holds an array of objects"),
    "persistent": (raw(KEY, text("a"), pickle.BINPERSID, END), "holds a reference out of the file"),
    "extension": (raw(KEY, pickle.EXT1, b"\x01", END), "a damaged pickle"),
    "old instance": (b"\x80\x02(ios\nsystem\n.", "a damaged pickle"),
    "cut": (within([-1.0] * 50)[:-20], "a damaged pickle"),
    "no mapping": (pickle.dumps([-1.0]), "not a form of dump"),
    "number": (pickle.dumps(3), "not a form of dump"),
    "nested": (deep(100_000), "'logprobs' is no list of numbers"),
    "doubled": (doubled(200), "'logprobs' is no list of numbers"),
    "itself": (raw(pickle.EMPTY_DICT, b"\x94", text("logprobs"), b"h\x00", END), "no array is"),
    "texts": (pickle.dumps([{"logprobs": ["a"], "old_logprobs": [-1.0]}]), "'logprobs' is no list of"),
    "tensor": (within(torch.zeros(2)), "holds torch.storage._load_from_bytes, which"),
    "large numbers": (pickle.dumps([{"logprobs": [10**400], "old_logprobs": [-1.0]}]), "no list of numbers"),
}


@pytest.mark.parametrize("which", PICKLES)
def test_a_hostile_pickle_is_an_error(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, says = PICKLES[which]
    (tmp_path / "a.pkl").write_bytes(data)
    unconvertible(tmp_path / "a.pkl", says)


def zipped(pickle_: bytes, storage: bytes = b"\0" * 8, method: int = zipfile.ZIP_STORED) -> bytes:
    """Make a `torch.save` file of a pickle and one storage."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        file.writestr("a/data.pkl", pickle_)
        file.writestr("a/byteorder", "little")
        file.writestr("a/data/0", storage)
    return made.getvalue()


def tensor(
    count: int = 2, offset: int = 0, size: int = 2, stride: int = 1, kind: str = "FloatStorage"
) -> bytes:
    """Make a pickle of one tensor."""
    storage = b"(" + text("storage") + name("torch", kind) + text("0") + text("cpu")
    whole = b"".join(b"\x8a\x08" + struct.pack("<q", number) for number in (count, offset, size, stride))
    counted, began, sized, strode = (whole[i : i + 10] for i in range(0, 40, 10))
    return raw(
        KEY,
        name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + counted + b"tQ",
        began + sized + b"\x85" + strode + b"\x85\x89}tR",
        END,
    )


def overlapping() -> bytes:
    """Make a zip file whose directory names one member many times."""
    data = bytearray(zipped(tensor(), b"\0" * 1000))
    end = data.rindex(b"PK\x05\x06")
    begin = data.index(b"PK\x01\x02")
    entry = data[data.rindex(b"PK\x01\x02") : end]
    more = b"".join(bytes(entry).replace(b"a/data/0", b"a/data/%d" % i) for i in range(1, 9))
    tail = bytearray(data[end:])
    struct.pack_into("<HHI", tail, 8, 11, 11, end - begin + len(more))
    return bytes(data[:end]) + more + bytes(tail)


def misnamed() -> bytes:
    """Make a zip file with a name that claims to be UTF-8 and is not."""
    data = bytearray(zipped(tensor()).replace(b"a/byteorder", b"a/b\xffteorder"))
    struct.pack_into("<H", data, data.rindex(b"a/b\xffteorder") - 46 + 8, 0x800)
    return bytes(data)


def moved() -> bytes:
    """Make a zip file one of whose members begins behind the end of the file."""
    data = bytearray(zipped(tensor()))
    struct.pack_into("<H", data, data.index(b"a/data/0") - 2, 60_000)
    return bytes(data)


ARCHIVES: Mapping[str, tuple[bytes, str]] = {
    "system": (zipped(within(Calls(os.system, CALLED), 2)), "holds posix.system, which"),
    "large": (zipped(tensor(size=1 << 40)), "holds a tensor larger than its storage"),
    "expanded": (zipped(tensor(size=1 << 40, stride=0)), "holds a tensor larger than its storage"),
    "outside": (zipped(tensor(offset=1)), "holds a tensor larger than its storage"),
    "negative": (zipped(tensor(offset=-1)), "holds a damaged tensor"),
    "backwards": (zipped(tensor(stride=-1)), "holds a damaged tensor"),
    "kind": (zipped(tensor(kind="QInt8Storage")), "holds torch.QInt8Storage, which"),
    "reference": (zipped(tensor().replace(b"storage", b"another")), "holds a reference out of the file"),
    "big-endian": (zipped(tensor()).replace(b"little", b"biggie"), "holds numbers of a big-endian machine"),
    "moved": (moved(), "holds members outside of the file"),
    "odd bytes": (zipped(tensor(), b"\0" * 7), "a damaged pickle"),
    "bomb": (zipped(tensor(), b"\0" * (1 << 24), zipfile.ZIP_DEFLATED), "holds members larger than the file"),
    "compressed": (
        zipped(tensor(), np.random.default_rng(0).bytes(99), zipfile.ZIP_DEFLATED),
        "holds compressed members",
    ),
    "overlapping": (overlapping(), "holds members larger than the file"),
    "cut": (zipped(tensor())[:-30], "a damaged zip file"),
    "name": (misnamed(), "a damaged zip file"),
}


@pytest.mark.parametrize("which", ARCHIVES)
def test_a_hostile_archive_is_an_error(which: str, tmp_path: Path) -> None:
    data, says = ARCHIVES[which]
    (tmp_path / "a.pt").write_bytes(data)
    unconvertible(tmp_path / "a.pt", says)


def test_a_directory_with_other_pickles_is_read(rows: Table, tmp_path: Path) -> None:
    (tmp_path / "model.pkl").write_bytes(within(Calls(os.system, CALLED)).replace(b"logprobs", b"weightss"))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.pt")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(rows))
    assert converted(tmp_path)[0] == rows
