"""Pickles: what trainers write is read, and nothing that a pickle asks for is done."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from offpol_diag.dump import forms as pickles
from offpol_diag.errors import DumpError


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool])
def test_views_of_tensors_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    value = {"a": whole, "b": whole.T[2:, 1:3], "c": whole[:, :1].expand(4, 5), "d": whole[:0]}
    torch.save(value, tmp_path / "a.pt")
    found = pickles.load(tmp_path / "a.pt")
    for name, tensor in value.items():
        assert found[name].tolist() == tensor.tolist()
        assert found[name].shape == tensor.shape


class Calls:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


def within(value: Any, protocol: int = 4) -> bytes:
    return pickle.dumps({"logprobs": [-1.0], "old_logprobs": [-1.0], "more": value}, protocol=protocol)


def saved(value: Any, stored: bytes = b"", instead: bytes = b"") -> bytes:
    """Return what `torch.save` writes, with other bytes in place of some."""
    made = io.BytesIO()
    torch.save({"logprobs": torch.full((3, 4), -1.0), "old_logprobs": value}, made)
    data = made.getvalue()
    assert stored in data
    return data.replace(stored, instead) if stored else data


CALLED = "touch"
SYSTEM = Calls(os.system, CALLED)
BYTES: Mapping[str, tuple[bytes, str]] = {
    "system.pkl": (within(SYSTEM), "holds posix.system, which"),
    "system, protocol 2.pkl": (within(SYSTEM, 2), "holds posix.system, which"),
    "system in a zip file.pt": (saved(SYSTEM), "holds posix.system, which"),
    "old instance.pkl": (b"\x80\x02(ios\nsystem\n.", "holds os.system, which"),
    "eval.pkl": (within(Calls(eval, "1/0")), "holds builtins.eval, which"),
    "getattr.pkl": (within(Calls(getattr, OrderedDict, "fromkeys")), "holds builtins.getattr, which"),
    "import.pkl": (within(Calls(__import__, "os")), "holds builtins.__import__, which"),
    "attribute.pkl": (
        b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.",
        "holds numpy.dtype.__class__, which",
    ),
    "loader.pkl": (b"ctorch\nload\n.", "holds torch.load, which"),
    "tensor.pkl": (within(torch.zeros(2)), "holds torch.storage._load_from_bytes, which"),
    "class.pkl": (within(Path("a")), "holds pathlib."),
    "extension.pkl": (b"\x80\x04\x82\x01.", "a damaged pickle"),
    "cut.pkl": (within([-1.0] * 50)[:-20], "a damaged pickle"),
    "cut.pt": (saved(SYSTEM)[:-30], "a damaged pickle"),
    "byte.pt": (saved(1, struct.pack("<f", -1.0), struct.pack("<f", -1.5)), "Bad CRC-32"),
    "big-endian.pt": (saved(1, b"little", b"biggie"), "a damaged pickle"),
}


@pytest.mark.parametrize("name", BYTES)
def test_no_code_of_a_pickle_runs_and_damage_is_one_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, says = BYTES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DumpError) as refused:
        pickles.load(tmp_path / name)
    assert says in refused.value.message
    assert refused.value.hint
    assert not (tmp_path / CALLED).exists()
