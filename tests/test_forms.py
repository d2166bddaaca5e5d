"""Files that are no canonical dump: JSON lines, what is converted, and what is said of mistakes."""

from __future__ import annotations

import gc
import gzip
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.dump import convert as conversion
from offpol_diag.dump import forms
from offpol_diag.dump.convert import convert, form_of, open_dump
from offpol_diag.dump.forms import FORMS, Row
from offpol_diag.errors import DumpError
from tests.factory import Table, converted, unconvertible, write
from tests.forms import pickled, written
from tests.reading import analyze


def row(i: int) -> dict[str, Any]:
    """Make a sequence of 8 to 20 tokens whose numbers float32 holds."""
    random = np.random.default_rng(i)
    n = int(random.integers(8, 21))
    rollout = -random.exponential(1, n).astype(np.float32)
    return {
        "sequence_id": f"s{i}",
        "group_id": i // 4,
        "rollout_log_probs": rollout.tolist(),
        "old_log_probs": (rollout * np.float32(0.5)).tolist(),
        "response_mask": [int(at != 3) for at in range(n)],
        "token_ids": random.integers(0, 1000, n).tolist(),
        "rewards": float(i % 2),
        "host": "a" if i < 8 else "b",
        "weight_versions": [5 + at // 4 for at in range(n)],
        "prompt_length": i if i % 3 else None,
        "finish_reason": "stop" if i % 3 else None,
        "weight_digest_rollout": "a" if i % 4 else None,
        "weight_digest_train": f"b{i % 2}" if i % 4 else None,
    }


ROWS: Table = [row(i) for i in range(16)]


def lines(rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def to_jsonl(path: Path, rows: Any) -> Path:
    path.write_bytes(lines(rows))
    return path


WRITERS: Mapping[str, Callable[[Path, Table], Any]] = {
    "a.jsonl": to_jsonl,
    "windows.jsonl": lambda path, rows: path.write_bytes(
        b"\xef\xbb\xbf" + lines(rows).replace(b"\n", b"\r\n\r\n")
    ),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "a.parquet": lambda path, rows: write(path, pa.Table.from_pylist(rows)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_values_come_back_under_any_names(name: str, tmp_path: Path) -> None:
    names = {"rollout_log_probs": "mine", "old_log_probs": "theirs"}
    given = {"rollout": "mine", "old": "theirs"}
    for words, columns in ({}, {}), ({"response_mask": "mask"}, {}), (names, given):
        more = {"prompt": "p" * 100, "unread_log_probs": [-1.5]}
        WRITERS[name](tmp_path / name, [{words.get(x, x): y for x, y in one.items()} | more for one in ROWS])
        found, _ = converted(tmp_path / name, columns=columns)
        assert [{key: one[key] for key in ROWS[0]} for one in found] == ROWS


def test_an_analysis_of_another_form_is_that_of_the_dump(tmp_path: Path) -> None:
    plain = analyze(write(tmp_path / "a.parquet", pa.Table.from_pylist(ROWS)), device="cpu")
    names = {"rollout_log_probs": "logprobs", "response_mask": "mask"}
    renamed = [{names.get(x, x): y for x, y in one.items()} for one in ROWS]
    renamed[9]["note"] = [9]
    other = analyze(to_jsonl(tmp_path / "a.jsonl", renamed), device="cpu")
    assert {name: one.value for name, one in other.whole.items()} == pytest.approx(
        {name: one.value for name, one in plain.whole.items()}, nan_ok=True
    )
    assert other.dump.files == [str(tmp_path / "a.jsonl")]
    assert [other.dump.columns[x] for x in names] == [*names.values()]
    assert other.dump.others == ["host"]
    assert "read as jsonl" in other.dump.notes[0]
    assert not [note for note in plain.dump.notes if "read as" in note]


def test_a_temporary_dump_is_private_and_goes_when_nobody_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, here = to_jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(here))
    for _ in range(2):
        dump = open_dump([str(source)])
        assert [path.stat().st_mode & 0o777 for path in here.iterdir()] == [0o700]
        del dump
        gc.collect()
    assert not list(here.iterdir())


# ---------------------------------------------------------------- mistakes

LOGS = {"logprobs": [-1.0], "old_logprobs": [-1.0]}
LINES: Mapping[str, tuple[bytes, str]] = {
    "list": (lines([LOGS, [1]]), "line 2: list, no JSON object"),
    "empty": (b"", "the file is empty"),
    "other": (
        lines([{"prompt": "a", "text": "b"}]),
        "line 1: no column holds rollout_log_probs, and none old_",
    ),
    "infinite": (
        lines([LOGS | {"step": float("inf")}]),
        "step is not one plain value per sequence: Float value inf",
    ),
    "text": (b"hello", "line 1: no JSON"),
    "nested": (lines([LOGS | {"logprobs": [[-1.0]]}]), "(logprobs is no list of num"),
    "words": (lines([LOGS | {"logprobs": ["a"]}]), "(logprobs is no list of num"),
    "deep": (b"{" + b'"a":{' * 100_000, "line 1: no JSON"),
    "lone": (lines([{"logprobs": [-1.0]}]), "line 1: no column holds old_log_probs or current_log_probs"),
    "uneven": (lines([LOGS | {"old_logprobs": [-1.0, -2.0]}]), "old_log_probs, sequence 0: 2 tokens"),
    "changing": (lines([LOGS, {"logprobs": [-1.0], "log_prob": [-1.0]}]), "line 2: no old_log_probs, which"),
    "twice": (lines([LOGS | {"rollout_logps": [-1.0]}]), "can each be"),
    "mask": (lines([LOGS | {"loss_mask": [0.5]}]), "response_mask"),
    "masked": (lines([{"logprobs": [], "old_logps": []}]), "no sequence that counts"),
    "cut off": (lines(ROWS)[:-40], "line 16: no JSON"),
}


@pytest.mark.parametrize("what", LINES)
def test_a_mistake_in_a_file_of_lines_is_one_error_with_a_hint(what: str, tmp_path: Path) -> None:
    data, says = LINES[what]
    (tmp_path / "a.jsonl").write_bytes(data)
    unconvertible(tmp_path / "a.jsonl", says)


def test_what_unfolds_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of blanks, which fold to a thousandth, and one line without end."""
    monkeypatch.setattr(forms, "FREE", 1 << 20)
    for line, most, says in (
        (b" " * 99 + b"\n", 1 << 28, "unfolds to more than 100 times its size"),
        (b" ", 1 << 20, "is longer than"),
    ):
        monkeypatch.setattr(forms, "MOST_LINE", most)
        with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
            file.write(line * ((8 << 20) // len(line)))
        unconvertible(tmp_path / "a.jsonl.gz", says)


def test_an_error_about_the_temporary_dump_names_the_file(tmp_path: Path) -> None:
    source = str(to_jsonl(tmp_path / "a.jsonl", ROWS))
    for how, says in (
        ({"group_by": ["nosuch"]}, f"{source}: --group-by: there is no column 'nosuch'"),
        ({"columns": {"rollout": "nothing"}}, f"{source}, line 1: there is no column 'nothing'"),
    ):
        with pytest.raises(DumpError) as caught:
            open_dump([source], **how)
        assert caught.value.message == says


def test_files_of_several_forms_are_one_error_that_names_each(tmp_path: Path) -> None:
    other, path = to_jsonl(tmp_path / "b.jsonl", ROWS), tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    for sources in ([str(tmp_path / "*")], [str(path), str(other)]):
        with pytest.raises(DumpError) as caught:
            open_dump(sources)
        assert caught.value.message == f"the files are of several forms: {path} is parquet; {other} is jsonl"
        assert "offpol-diag convert SRC --to FILE" in caught.value.hint
    written.prime_rl(tmp_path / "d", written.batch())
    pickled.slime(tmp_path / "d", written.batch())
    with pytest.raises(DumpError, match="of several forms"):
        open_dump([str(tmp_path / "d")])


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_dump_replaces_no_directory_no_device_and_nothing_that_is_read(kind: str, tmp_path: Path) -> None:
    """A pipe stands for /dev/null, which a rename by root would make a file."""
    source, target = to_jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "there"
    os.mkfifo(target) if kind == "pipe" else target.mkdir()
    for to, says in (target, "directory"), (source, "is what is read"):
        result = CliRunner().invoke(app, ["convert", str(source), "--to", str(to)])
        assert (result.exit_code, says in result.stderr) == (2, True), result.stderr
    assert (target.is_fifo(), target.is_dir()) == (kind == "pipe", kind != "pipe")
    assert len([*tmp_path.iterdir()]) == 2


# ---------------------------------------------------------------- what is read


def test_files_of_a_folder_or_glob_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for i, one in enumerate(ROWS):
        to_jsonl(tmp_path / f"step_{i}.jsonl", [one])
    assert converted(tmp_path)[0] == converted(tmp_path / "step_*.jsonl")[0] == ROWS


def test_labels_of_several_kinds_are_text_and_what_is_missing_is_null(tmp_path: Path) -> None:
    """A number may be written 1 or 1.0; what a later table has is stored as the first one is."""
    change: Table = [{"step": None, "attempt": 1}, {"step": 3, "attempt": "b"}, {"step": 4.0, "host": 7}]
    change += [{"step": float("nan"), "host": None}]
    found, _ = converted(to_jsonl(tmp_path / "a.jsonl", [a | b for a, b in zip(ROWS, change, strict=False)]))
    assert [one["step"] for one in found] == [None, 3, 4, None]
    assert [one["host"] for one in found] == ["a", "a", "7", None]
    assert [one["attempt"] for one in found] == ["1", "b", None, None]


def test_a_canonical_dump_is_read_as_it_is(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", pa.Table.from_pylist(ROWS))
    to_jsonl(tmp_path / "a.jsonl", ROWS)
    assert form_of([source], {}) is form_of([str(tmp_path)], {}) is None


def test_no_more_than_a_group_of_rows_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = most = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def rows(*_: Any) -> Iterator[tuple[str, Row]]:
        nonlocal alive, most
        for i in range(500):
            column = np.full(5000, -0.5, np.float32)
            weakref.finalize(column, gone)
            alive += 1
            most = max(most, alive)
            yield f"row {i}", {"rollout_log_probs": column, "old_log_probs": column}

    monkeypatch.setattr(forms, "FORMS", (FORMS[0]._replace(path="", fields="logprobs", rows=rows),))
    convert([str(to_jsonl(tmp_path / "a.jsonl", [LOGS]))], tmp_path / "out.parquet")
    assert most * 5000 < 2 * conversion.GROUP
    groups = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [105] * 4 + [80]
