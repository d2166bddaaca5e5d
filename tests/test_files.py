"""Which files a dump is made of: names of any kind, each file once, pipes, files that change meanwhile."""

import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
import pytest

import offpol_diag
from offpol_diag.dump import convert as forms
from offpol_diag.dump.read import open_dump
from offpol_diag.dump.sources import find
from offpol_diag.errors import DumpError
from tests.factory import DumpFile, refusal, write

ODD = ["step:100.parquet", "s3:a.parquet", b"a\xff.parquet", "run:1/a.parquet", "a b%20.parquet"]


@pytest.mark.parametrize("name", ODD)
def test_a_file_of_any_name_is_written_and_read(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = Path(os.fsdecode(name))
    path.parent.mkdir(exist_ok=True)
    with DumpFile(path if isinstance(name, str) else "other.parquet") as writer:
        writer.write(rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]])
    if isinstance(name, bytes):
        Path("other.parquet").rename(path)
    url = [] if isinstance(name, bytes) else [f"file://{quote(str(tmp_path / path))}"]
    for source in (str(path), "**/*.parquet", str(tmp_path), *url):
        assert sum(batch.sequences for batch in open_dump([source]).batches()) == 1


def test_a_file_is_read_once_however_it_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d" / "a.parquet")
    Path("link.parquet").symlink_to("d/a.parquet")
    Path("hard.parquet").hardlink_to("d/a.parquet")
    same = ["./d/a.parquet", str(tmp_path / "d"), f"file://{tmp_path}/d/a.parquet", "d/../d/*.parquet"]
    found = find(["d/a.parquet", *same, "link.parquet", "hard.parquet"])
    assert [str(file) for file in found] == ["d/a.parquet"]
    shutil.copy("d/a.parquet", "copy.parquet")
    assert len(find(["d/a.parquet", "copy.parquet"])) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", ["pipe.parquet", "p*.parquet", "/dev/null"])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for_or_left_out(tmp_path, monkeypatch, source):
    os.mkfifo(tmp_path / "pipe.parquet")
    write(tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert refusal(source).message.endswith("a device or a pipe, no file")
    assert [file.shown.rpartition("/")[2] for file in find([str(tmp_path)])] == ["a.parquet"]


def shifted(path, by):
    """Write a dump of six row groups, every value of which tells the file's version."""
    logs = pa.array([[-0.5 - by] * 5] * 60)
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs})
    return write(path, table, 10, {"compression": "none", "use_dictionary": False})


def by_rename(path):
    Path(shifted(path.with_name("new"), 0.25)).rename(path)


def in_place(path):
    with path.open("r+b") as stream:
        stream.write(Path(shifted(path.with_name("new"), 0.25)).read_bytes())


@pytest.mark.parametrize("change", [by_rename, in_place])
@pytest.mark.parametrize("read", [0, 1])
def test_rows_of_a_file_and_of_its_successor_are_not_mixed(tmp_path, change, read):
    path = tmp_path / "a.parquet"
    dump = open_dump([shifted(path, 0.0)], batch_tokens=50)
    batches = dump.batches()
    seen = [next(batches) for _ in range(read)]
    change(path)
    with pytest.raises(DumpError, match=r"a\.parquet: the file was changed while it was read"):
        seen.extend(batches)
    with pytest.raises(DumpError, match="was changed while it was read"):
        next(dump.batches())
    assert {value for batch in seen for value in batch.rollout.tolist()} <= {-0.5}


LABELS = ("group_id", "step", "rollout_version", "train_version", "policy_lag")
NAN = float("nan")
LABELLED = [
    {"rollout_log_probs": [-1.0, -0.5], "old_log_probs": [-1.0, -0.5]} | dict.fromkeys(LABELS, label)
    for label in (1.0, NAN, NAN, 2.0)
]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_label_that_is_nan_is_null_in_every_column_and_form(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    write(tmp_path / "a.parquet", pa.Table.from_pylist(LABELLED))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, LABELLED)))
    (batch,) = forms.open_dump([str(path)]).batches()
    for name in LABELS:
        assert batch.scalars[name] == [1, None, None, 2], name
    assert len(set(batch.key.tolist())) == 3, "equal responses without a group are one"


@pytest.mark.parametrize("frame", [pd.DataFrame, pa.Table.from_pylist])
def test_a_frame_with_nan_for_labels_has_as_many_groups_as_one_with_none(frame):
    found = offpol_diag.analyze(frame(LABELLED), presets=["token_is"]).summary
    assert found.dump.groups == 3
    assert [place.key for place in found.at("step")] == ["1.0", "2.0", "∅"]


ROW = '{"rollout_log_probs": [-1.0, -0.5], "old_log_probs": [-1.0, -0.5]}\n'


def test_a_file_of_another_form_is_read_once_and_must_not_change_meanwhile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(ROW)
    Path("link.jsonl").symlink_to("a.jsonl")
    Path("hard.jsonl").hardlink_to("a.jsonl")
    same = ["./a.jsonl", f"file://{tmp_path}/a.jsonl", "*.jsonl", "link.jsonl", "hard.jsonl", str(tmp_path)]
    assert sum(batch.sequences for batch in forms.open_dump(["a.jsonl", *same]).batches()) == 1
    made = forms._table

    def touched(*args):
        os.utime("a.jsonl", (0, 0))
        return made(*args)

    Path("a.jsonl").write_text(ROW * 4)
    monkeypatch.setattr(forms, "GROUP", 2)
    monkeypatch.setattr(forms, "_table", touched)
    with pytest.raises(DumpError, match=r"a\.jsonl: the file was changed while it was read"):
        forms.open_dump(["a.jsonl"])
