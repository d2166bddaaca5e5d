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
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.errors import DumpError
from offpol_diag.forms import binary, unpickle
from tests.forms import pickled
from tests.forms.written import batch
from tests.test_forms import Rows, converted
from tests.test_forms import rows as rows
from tests.test_trainer_forms import converted as with_notes
from tests.test_trainer_forms import expected, joinable, only

# ---------------------------------------------------------------- any writer


def padded(rows: Rows) -> dict[str, Any]:
    most = max(len(row["token_ids"]) for row in rows)
    made: dict[str, Any] = {}
    for name, value in rows[0].items():
        if isinstance(value, list):
            kind = np.float32 if isinstance(value[0], float) else np.int64
            made[name] = np.stack(
                [np.pad(np.array(row[name], kind), (0, most - len(row[name]))) for row in rows]
            )
        else:
            made[name] = np.array([row[name] for row in rows])
    return made


def flat(rows: Rows) -> dict[str, Any]:
    made = {
        name: np.concatenate([row[name] for row in rows]) if isinstance(value, list) else column(rows, name)
        for name, value in rows[0].items()
    }
    return made | {"lengths": [len(row["token_ids"]) for row in rows]}


def column(rows: Rows, name: str) -> list[Any]:
    return [row[name] for row in rows]


def ragged(rows: Rows) -> dict[str, Any]:
    return {name: column(rows, name) for name in rows[0]}


def tensors(made: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.tensor(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "fi"
        else list(value)
        for name, value in made.items()
    }


SHAPES: Mapping[str, Callable[[Rows], Any]] = {
    "padded": padded,
    "flat": flat,
    "ragged": ragged,
    "records": list,
    "samples": lambda rows: {"step": 3, "samples": rows},
    "tensors": lambda rows: tensors(padded(rows)),
}
NOT = [("tensors", protocol) for protocol in (2, 4, 5)]
"""A pickle of tensors holds files that torch.load reads, and is refused."""


@pytest.mark.parametrize(
    ("shape", "protocol"),
    [
        (shape, protocol)
        for shape in SHAPES
        for protocol in (2, 4, 5, "torch")
        if (shape, protocol) not in NOT
    ],
)
def test_what_was_put_in_comes_out(shape: str, protocol: int | str, rows: Rows, tmp_path: Path) -> None:
    path = tmp_path / ("a.pt" if protocol == "torch" else "a.pkl")
    value = SHAPES[shape](rows)
    if protocol == "torch":
        torch.save(value, path)
    else:
        path.write_bytes(pickle.dumps(value, protocol=int(protocol)))
    assert converted(path, to=tmp_path / "out.parquet") == rows


@pytest.mark.parametrize("name", ["a.pt", "a.pkl"])
def test_other_names_are_given_by_columns(name: str, rows: Rows, tmp_path: Path) -> None:
    value = padded(rows)
    value["mine"], value["theirs"] = value.pop("rollout_log_probs"), value.pop("old_log_probs")
    if name == "a.pt":
        torch.save(tensors(value), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(pickle.dumps(value))
    columns = {"rollout": "mine", "old": "theirs"}
    found = converted(tmp_path / name, to=tmp_path / "out.parquet", columns=columns)
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


# ---------------------------------------------------------------- slime


@pytest.mark.parametrize("beside", [False, True])
def test_slime(beside: bool, tmp_path: Path) -> None:
    made = batch()
    path = pickled.slime(tmp_path, made)
    if beside:
        pickled.slime_rollout(tmp_path, made)
    found, notes = with_notes(path, tmp_path / "out.parquet")
    assert only(found) == expected(made)
    assert [row["advantages"][0] for row in found] == made.advantages
    assert [row["sequence_id"] for row in found] == [f"13/{40 + i}" for i in range(8)]
    assert {row["step"] for row in found} == {13}
    assert found[0]["entropy"] == [0.5] * len(made.responses[0])
    assert [row.get("group_id") for row in found] == [i // 2 if beside else None for i in range(8)]
    assert [row.get("rollout_version") for row in found] == [11 if beside else None] * 8
    assert "read as slime (slime); log-probs: response only, shift 0" in notes[0]


@pytest.mark.parametrize("miles", [False, True])
def test_slime_rollouts_are_completed_by_another_file(miles: bool, tmp_path: Path) -> None:
    made = batch()
    path = pickled.slime_rollout(tmp_path, made, miles=miles)
    with pytest.raises(DumpError, match="no log-probs of the trainer"):
        with_notes(path, tmp_path / "out.parquet")
    train = pickled.slime(tmp_path, made)
    found, _ = with_notes(path, tmp_path / "out.parquet", join=f"{train}:old_log_probs")
    assert only(found) == expected(made)
    other = joinable(tmp_path, made, "old_log_probs")
    found, _ = with_notes(path, tmp_path / "out.parquet", join=f"{other}:old_log_probs", on="row")
    assert only(found) == expected(made)


# ---------------------------------------------------------------- slime up to 0.3.1, miles


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("miles", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_files_of_ranks_are_put_together(
    context: int, padded: bool, miles: bool, beside: bool, tmp_path: Path
) -> None:
    """Data, tensor, pipeline and context parallel; up to 0.3.1 the files do not say which is which."""
    made = batch()
    path = pickled.ranks(tmp_path, made, context, miles, padded)
    if beside:
        pickled.slime_rollout(tmp_path, made)
    found, notes = with_notes(path, tmp_path / "out.parquet")
    order = {f"13/{40 + i}": i for i in range(8)}
    found.sort(key=lambda row: order[row["sequence_id"]])
    assert only(found, *TOKENS) == only(expected(made), *TOKENS)
    assert [row["advantages"] for row in found] == [
        [made.advantages[i]] * len(made.responses[i]) for i in range(8)
    ]
    assert [row["rewards"] for row in found] == (made.rewards if beside else made.advantages)
    assert found[3].get("group_id") == (1 if beside else None)
    assert "read as slime up to 0.3.1, miles (ranks)" in notes[0]


TOKENS = ("rollout_log_probs", "old_log_probs", "response_mask", "token_ids")


def test_slices_lie_where_the_trainer_cuts_them() -> None:
    for total in range(2, 40):
        for response in range(1, total):
            for count in (2, 4):
                one = binary.Slice({}, total, response, total)
                for rank in range(count):
                    assert one.spans(rank, count) == pickled.spans(total, response, rank, count)


@pytest.mark.parametrize("miles", [False, True])
def test_a_missing_rank_is_an_error(miles: bool, tmp_path: Path) -> None:
    path = pickled.ranks(tmp_path, batch(), 2, miles)
    for rank in (0, 1):  # one part of the context, of one data-parallel group, in the first stage
        (path / f"13_{rank + 8}.pt").unlink()
    for rank in (0, 1):
        (path / f"13_{rank}.pt").unlink()
    with pytest.raises(DumpError, match="context-parallel ranks") as caught:
        with_notes(path, tmp_path / "out.parquet")
    assert (
        caught.value.hint == "convert the files of all ranks of a rollout together, and none of another run"
    )


def test_miles_columns_are_completed_by_the_train_dump(tmp_path: Path) -> None:
    made = batch()
    path = pickled.miles_columns(tmp_path, made)
    train = pickled.ranks(tmp_path, made, 2)
    with pytest.raises(DumpError, match="no log-probs of the trainer"):
        with_notes(path, tmp_path / "out.parquet")
    found, _ = with_notes(path, tmp_path / "out.parquet", join=f"{train}:old_log_probs")
    assert only(found, *TOKENS) == only(expected(made), *TOKENS)


@pytest.mark.parametrize("context", [1, 2])
def test_policy_loss(context: int, tmp_path: Path) -> None:
    made = batch()
    found, _ = with_notes(pickled.policy_loss(tmp_path, made, context), tmp_path / "out.parquet")
    names = [name for name in TOKENS if name != "token_ids"]
    assert only(found, *names) == only(expected(made), *names)
    assert [row["current_log_probs"] for row in found] == [
        (row - np.float32(0.25)).tolist() for row in made.old
    ]
    assert len({row["sequence_id"] for row in found}) == 8


# ---------------------------------------------------------------- SkyRL, verl


@pytest.mark.parametrize("appended", [False, True])
def test_skyrl(appended: bool, tmp_path: Path) -> None:
    """A token that was appended, not sampled, is masked."""
    made = batch()
    found, notes = with_notes(pickled.skyrl(tmp_path, made, appended=appended), tmp_path / "out.parquet")
    assert [row["advantages"][0] for row in found] == made.advantages
    assert [row["group_id"] for row in found] == [i // 2 for i in range(8)]
    assert [row["sequence_id"] for row in found] == [f"6/{i}" for i in range(8)]
    assert "response only, shift 0, padded on the left" in notes[0]
    if appended:
        assert [row["response_mask"] for row in found] == [[*row[:-1].tolist(), 0] for row in made.mask]
    else:
        assert only(found, *TOKENS) == only(expected(made), *TOKENS)


@pytest.mark.parametrize("numpy", [False, True])
def test_verl(numpy: bool, tmp_path: Path) -> None:
    made = batch()
    found, _ = with_notes(pickled.verl(tmp_path, made, numpy=numpy), tmp_path / "out.parquet")
    assert only(found) == expected(made)
    assert [row["group_id"] for row in found] == [f"u{i // 2}" for i in range(8)]
    assert [(row["step"], row["rollout_version"]) for row in found] == [(5, i) for i in range(8)]


def test_verl_without_a_response_mask(tmp_path: Path) -> None:
    made = batch(tool=False)
    found, _ = with_notes(pickled.verl(tmp_path, made, mask=False), tmp_path / "out.parquet")
    assert only(found) == expected(made)


@pytest.mark.parametrize("queue", [False, True])
def test_a_skip_cache_of_verl_is_completed_by_another_file(queue: bool, tmp_path: Path) -> None:
    made = batch()
    path = pickled.verl_queue(tmp_path, made) if queue else pickled.verl(tmp_path, made, old=False)
    with pytest.raises(DumpError, match="no log-probs of the trainer"):
        with_notes(path, tmp_path / "out.parquet")
    other = joinable(tmp_path, made, "old_log_probs")
    found, _ = with_notes(path, tmp_path / "out.parquet", join=f"{other}:old_log_probs", on="row")
    assert only(found) == expected(made)
    assert found[3]["group_id"] == ("0a-1b1" if queue else "u1")
    assert {row["step"] for row in found} == {5}


# ---------------------------------------------------------------- hostile pickles


class Calls:
    """A pickle that calls a function with arguments."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.made = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.made


def raw(*parts: bytes) -> bytes:
    """A pickle of instructions."""
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
    """A list of two lists, which are one, of two lists, …"""
    value: list[Any] = [-1.0] * 8
    for _ in range(levels):
        value = [value, value]
    return pickle.dumps([{"logprobs": value, "old_logprobs": value, "weight_versions": value}])


def deep(levels: int) -> bytes:
    return raw(KEY, pickle.EMPTY_LIST * levels, pickle.APPEND * (levels - 1), END)


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
    "bytearray": (
        raw(KEY, name("builtins", "bytearray"), b"J\xff\xff\xff\x7f", SYSTEM, END),
        "holds bytes in",
    ),
    "dtype": (raw(KEY, name("numpy", "dtype"), text("V9"), SYSTEM, END), "holds values of NumPy type 'V9'"),
    "codec": (raw(KEY, name("_codecs", "encode"), text("x"), text("zip"), b"\x86R", END), "holds bytes in"),
    "arguments": (raw(KEY, name("numpy", "dtype"), b")R", END), "a damaged pickle"),
    "state": (raw(KEY, name("numpy", "dtype"), pickle.EMPTY_DICT, b"b", END), "holds a change of something"),
    "state of a list": (raw(KEY, b"]", pickle.EMPTY_DICT, b"b", END), "holds a change of something"),
    "call of a value": (raw(KEY, b"])R", END), "holds a call of something"),
    "dtype's state": (raw(KEY, name("numpy", "dtype"), text("f4"), SYSTEM, b"}b", END), "a damaged pickle"),
    "huge bytes": (raw(KEY, pickle.BINBYTES8, struct.pack("<Q", 1 << 42), b"abc"), "a damaged pickle"),
    "huge bytearray": (raw(KEY, pickle.BYTEARRAY8, struct.pack("<Q", 1 << 42), b"abc"), "a damaged pickle"),
    "huge frame": (raw(pickle.FRAME, struct.pack("<Q", 1 << 62), KEY), "a damaged pickle"),
    "huge memo": (raw(KEY, b"]", pickle.LONG_BINPUT, b"\xff\xff\xff\xff", b"h\x00", END), "a damaged pickle"),
    "huge array": (
        raw(
            KEY,
            name("numpy._core.numeric", "_frombuffer") + b"(" + pickle.SHORT_BINBYTES + b"\x00",
            name("numpy", "dtype") + text("f4") + SYSTEM,
            b"J\xff\xff\xff\x7f\x85" + text("C") + b"tR",
            END,
        ),
        "holds an array whose size",
    ),
    "persistent": (raw(KEY, text("a"), pickle.BINPERSID, END), "holds a reference out of the file"),
    "extension": (raw(KEY, pickle.EXT1, b"\x01", END), "a damaged pickle"),
    "old instance": (b"\x80\x02(ios\nsystem\n.", "a damaged pickle"),
    "cut": (within([-1.0] * 50)[:-20], "a damaged pickle"),
    "no mapping": (pickle.dumps([-1.0]), "not a form of dump"),
    "number": (pickle.dumps(3), "not a form of dump"),
    "nested": (deep(100_000), "'logprobs' is no list of numbers"),
    "doubled": (doubled(200), "'logprobs' is no list of numbers"),
    "itself": (raw(pickle.EMPTY_DICT, b"\x94", text("logprobs"), b"h\x00", END), "no array is"),
    "texts": (
        pickle.dumps([{"logprobs": ["a"], "old_logprobs": [-1.0]}]),
        "'logprobs' is no list of numbers",
    ),
    "tensor": (within(torch.zeros(2)), "holds torch.storage._load_from_bytes, which"),
    "large numbers": (pickle.dumps([{"logprobs": [10**400], "old_logprobs": [-1.0]}]), "no list of numbers"),
}


def refused(path: Path, says: str) -> None:
    """Check that a file is one error with a hint, and that nothing else happens."""
    target = path.with_name("out.parquet")
    result = CliRunner().invoke(app, ["convert", str(path), "--to", str(target)])
    assert result.exit_code == 2, (result.stderr, result.exception)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("error: ") == result.stderr.count("hint: ") == 1
    assert "Traceback" not in result.stderr
    assert says in " ".join(result.stderr.split()), result.stderr
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name]


@pytest.mark.parametrize("which", PICKLES)
def test_a_hostile_pickle_is_an_error(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, says = PICKLES[which]
    (tmp_path / "a.pkl").write_bytes(data)
    refused(tmp_path / "a.pkl", says)


def zipped(pickle_: bytes, storage: bytes = b"\0" * 8, method: int = zipfile.ZIP_STORED) -> bytes:
    """A `torch.save` file of a pickle and one storage."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        file.writestr("a/data.pkl", pickle_)
        file.writestr("a/byteorder", "little")
        file.writestr("a/data/0", storage)
    return made.getvalue()


def tensor(
    count: int = 2, offset: int = 0, size: int = 2, stride: int = 1, kind: str = "FloatStorage"
) -> bytes:
    """A pickle of one tensor."""
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
    """A zip file whose directory names one member many times."""
    data = bytearray(zipped(tensor(), b"\0" * 1000))
    end = data.rindex(b"PK\x05\x06")
    begin = data.index(b"PK\x01\x02")
    entry = data[data.rindex(b"PK\x01\x02") : end]
    more = b"".join(bytes(entry).replace(b"a/data/0", b"a/data/%d" % i) for i in range(1, 9))
    tail = bytearray(data[end:])
    struct.pack_into("<HHI", tail, 8, 11, 11, end - begin + len(more))
    return bytes(data[:end]) + more + bytes(tail)


def misnamed() -> bytes:
    """A zip file with a name that says to be UTF-8 and is not."""
    data = bytearray(zipped(tensor()).replace(b"a/byteorder", b"a/b\xffteorder"))
    struct.pack_into("<H", data, data.rindex(b"a/b\xffteorder") - 46 + 8, 0x800)
    return bytes(data)


ARCHIVES: Mapping[str, tuple[bytes, str]] = {
    "system": (zipped(within(Calls(os.system, CALLED), 2)), "holds posix.system, which"),
    "large": (zipped(tensor(size=1 << 40)), "holds a tensor larger than its storage"),
    "expanded": (zipped(tensor(size=1 << 40, stride=0)), "holds a tensor larger than its storage"),
    "outside": (zipped(tensor(offset=1)), "holds a tensor larger than its storage"),
    "negative": (zipped(tensor(offset=-1)), "holds a damaged tensor"),
    "backwards": (zipped(tensor(stride=-1)), "holds a damaged tensor"),
    "kind": (zipped(tensor(kind="QInt8Storage")), "holds torch.QInt8Storage, which"),
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
    refused(tmp_path / "a.pt", says)


def test_a_directory_with_other_pickles_is_read(rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "model.pkl").write_bytes(within(Calls(os.system, CALLED)).replace(b"logprobs", b"weightss"))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.pt")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(rows))
    assert converted(tmp_path, to=tmp_path / "out.parquet") == rows


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Path]:
    """Write a train dump of slime after a change."""

    def write(folder: Path) -> Path:
        path = pickled.slime(folder, batch())
        value = torch.load(path)
        change(value)
        torch.save(value, path)
        return path

    return write


def of_rank(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Path]:
    """Write the train dump of one rank after a change."""

    def write(folder: Path) -> Path:
        path = pickled.ranks(folder, batch()) / "13_4.pt"
        value = torch.load(path)
        change(value)
        for one in path.parent.iterdir():
            one.unlink()
        torch.save(value, path)
        return path

    return write


def replaced(
    make: Callable[[Path, Any], Path], this: bytes, other: bytes, count: int = -1
) -> Callable[[Path], Path]:
    """Write a file with some of its bytes replaced."""

    def write(folder: Path) -> Path:
        path = make(folder, batch())
        data = path.read_bytes()
        assert this in data
        path.write_bytes(data.replace(this, other, count))
        for one in path.parent.glob("*.json"):
            one.unlink()
        return path

    return write


def loss(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Path]:
    """Write one file of policy_loss_debug after a change of its first sample."""

    def write(folder: Path) -> Path:
        path = pickled.policy_loss(folder, batch(), 2) / "rank_0_call_1.pt"
        value = torch.load(path)
        change(value["samples"][0])
        for one in path.parent.iterdir():
            one.unlink()
        torch.save(value, path)
        return path

    return write


BROKEN: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "no samples": (changed(lambda value: value.update(samples=3)), "no 'samples' is in it"),
    "words": (changed(lambda value: value.update(samples=["a"])), "sample 0: str, no mapping"),
    "no mask": (changed(lambda value: value["samples"][3].pop("loss_masks")), "sample 3: no response_mask"),
    "no log-probs": (
        changed(lambda value: value["samples"][0].pop("log_probs")),
        "no log-probs of the trainer",
    ),
    "length": (
        changed(lambda value: value["samples"][2].update(response_lengths=10**6)),
        "sample 2: the response has no length",
    ),
    "short": (
        changed(lambda value: value["samples"][1].update(log_probs=torch.zeros(3))),
        "sample 1: 'old_log_probs' has 3 values",
    ),
    "rank: no lengths": (
        of_rank(lambda value: value["rollout_data"].pop("response_lengths")),
        "no 'response_lengths' is in its 'rollout_data'",
    ),
    "rank: words": (
        of_rank(lambda value: value["rollout_data"].update(response_lengths=["a"])),
        "sample 0: 'response_lengths' is no length",
    ),
    "rank: log-probs": (
        of_rank(lambda value: value["rollout_data"].update(log_probs=[["a"]] * 4)),
        "'log_probs' is no list of numbers",
    ),
    "rank: many": (of_rank(lambda value: value.update(cp_size=1 << 30)), "ranks are more than 64"),
    "rank: long": (
        of_rank(
            lambda value: value["rollout_data"].update(response_lengths=[1 << 30] * 4) or value.pop("cp_rank")
        ),
        "fit no number of context-parallel",
    ),
    "rank: another size": (
        of_rank(lambda value: value.update(cp_size=2)),
        "some of its 2 context-parallel ranks",
    ),
    "miles: no list": (
        lambda folder: replace_column(pickled.miles_columns(folder, batch()), "response_length", [999] * 8),
        "row 0: the response has no length, or one that exceeds",
    ),
    "loss: one slice": (loss(lambda one: None), "fit no number of context-parallel"),
    "loss: no length": (loss(lambda one: one.pop("total_length")), "sample 0: 'total_length' is no length"),
    "loss: words": (loss(lambda one: one.update(advantages=["a"])), "'advantages' is no list of numbers"),
    "skyrl: no mask": (
        replaced(pickled.skyrl, b"loss_mask", b"loss_musk"),
        "no 'loss_mask' [sequences, tokens]",
    ),
    "skyrl: size": (replaced(pickled.skyrl, b"float32", b"float16"), "is a damaged tensor"),
    "skyrl: type": (replaced(pickled.skyrl, b"float32", b"floatxx"), "is a damaged tensor"),
    "skyrl: class": (
        replaced(pickled.skyrl, b"TrainingInputBatch", b"TrainingInputBotch"),
        "training_batch.TrainingInputBotch, which is not read",
    ),
    "verl: class": (
        replaced(pickled.verl, b"DataProto", b"DataPrato"),
        "holds verl.protocol.DataPrato, which",
    ),
    "verl: class within": (
        replaced(pickled.verl, b"_reductions", b"_reductionz"),
        "holds tensordict._reductionz._rebuild_tensordict_files_consolidated, which",
    ),
    "verl: archive": (replaced(pickled.verl, b"data.pkl", b"data.pkx"), "a damaged pickle"),
    "verl: leaves": (replaced(pickled.verl, b"leaves", b"leavez"), "a damaged pickle ('leaves')"),
    "queue: offsets": (replaced(pickled.verl_queue, b"offsets", b"offsetz"), "a damaged pickle ('offsets')"),
    "queue: no table": (replaced(pickled.verl_queue, b"_tensordict", b"_tensordikt"), "a damaged pickle"),
}


def replace_column(path: Path, name: str, values: list[int]) -> Path:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.names.index(name), name, pa.array(values)), path)
    return path


def test_a_large_batch_is_known_by_its_beginning(tmp_path: Path) -> None:
    made = batch()
    made.responses[0] = np.arange(30_000)
    for column in (made.rollout, made.old, made.mask):
        column[0] = np.resize(column[0], 30_000)
    path = pickled.skyrl(tmp_path, made)
    assert unpickle.peek(path) == (["_rebuild_tensor_batch"], None)


@pytest.mark.parametrize("which", BROKEN)
def test_a_mistake_in_a_dump_is_one_error_with_a_hint(which: str, tmp_path: Path) -> None:
    make, says = BROKEN[which]
    refused(make(tmp_path), says)
