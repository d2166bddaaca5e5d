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
from offpol_diag.core.observe import analyze
from offpol_diag.dump import convert as conversion
from offpol_diag.dump import forms
from offpol_diag.dump.convert import GROUP, convert, form_of, open_dump
from offpol_diag.dump.forms import FORMS, Row
from offpol_diag.errors import DumpError
from tests.factory import Table, converted, unconvertible, write
from tests.forms import pickled, written


@pytest.fixture
def rows() -> Table:
    """Make sixteen sequences of 8 to 20 response tokens, float32."""
    random = np.random.default_rng(5)
    made = []
    for i in range(16):
        n = int(random.integers(8, 21))
        rollout = -random.exponential(1, n).astype(np.float32)
        old = np.minimum(rollout + random.normal(0, 0.02, n).astype(np.float32), 0)
        mask = [1] * n
        mask[3] = 0
        made.append(
            {
                "sequence_id": f"s{i}",
                "group_id": i // 4,
                "rollout_log_probs": rollout.tolist(),
                "old_log_probs": old.tolist(),
                "response_mask": mask,
                "token_ids": random.integers(0, 1000, n).tolist(),
                "rewards": float(i % 2),
                "host": "a" if i < 8 else "b",
            }
        )
    return made


def lines(rows: Table) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def to_jsonl(path: Path, rows: Table) -> Path:
    path.write_bytes(lines(rows))
    return path


def to_parquet(path: Path, rows: Table) -> Path:
    return Path(write(path, pa.Table.from_pylist(rows)))


WRITERS: Mapping[str, Callable[[Path, Table], Any]] = {
    "a.jsonl": to_jsonl,
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "a.parquet": to_parquet,
}


def made(path: Path, rows: Table) -> Path:
    """Write the rows to a file, in the form that its name says."""
    WRITERS[path.name](path, rows)
    return path


def without(rows: Table, *names: str) -> Table:
    return [{key: value for key, value in row.items() if key not in names} for row in rows]


@pytest.mark.parametrize("name", WRITERS)
def test_values_come_back_under_any_names(name: str, rows: Table, tmp_path: Path) -> None:
    assert converted(made(tmp_path / name, rows))[0] == rows
    names = {"rollout_log_probs": "mine", "old_log_probs": "theirs"}
    renamed = [{names.get(key, key): value for key, value in row.items()} for row in rows]
    columns = {"rollout": "mine", "old": "theirs"}
    found, _ = converted(made(tmp_path / name, renamed), columns=columns)
    assert [{key: row[key] for key in rows[0]} for row in found] == rows


def test_an_analysis_of_another_form_is_that_of_the_dump(rows: Table, tmp_path: Path) -> None:
    plain = analyze(to_parquet(tmp_path / "a.parquet", rows), device="cpu")
    renamed = [
        {"logprobs": row["rollout_log_probs"], **without([row], "rollout_log_probs")[0]} for row in rows
    ]
    other = analyze(to_jsonl(tmp_path / "a.jsonl", renamed), device="cpu")
    assert {name: one.value for name, one in other.whole.items()} == pytest.approx(
        {name: one.value for name, one in plain.whole.items()}, nan_ok=True
    )
    assert other.dump.files == [str(tmp_path / "a.jsonl")]
    assert other.dump.columns["rollout_log_probs"] == "logprobs"
    assert "read as jsonl" in other.dump.notes[0]
    assert not [note for note in plain.dump.notes if "read as" in note]


def test_a_temporary_dump_goes_when_nobody_needs_it(
    rows: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "here"))
    (tmp_path / "here").mkdir()
    for i in range(4):
        source = to_jsonl(tmp_path / f"{i}.jsonl", rows)
        dump = open_dump([str(source)])
        path = Path(dump.parts[0].path.path)
        assert path.exists()
        assert path.parent.stat().st_mode & 0o777 == 0o700
        del dump
        gc.collect()
    assert not list((tmp_path / "here").iterdir())


# ---------------------------------------------------------------- mistakes


def spoiled(*records: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in records)


LOGS = {"logprobs": [-1.0], "old_logprobs": [-1.0]}
LINES: Mapping[str, tuple[bytes, str]] = {
    "list": (spoiled(LOGS, [1]), "line 2: list, no JSON object"),
    "empty": (b"", "the file is empty"),
    "other": (spoiled({"prompt": "a", "text": "b"}), "line 1: no log-probs of the rollout and none of"),
    "text": (b"hello", "line 1: no JSON"),
    "nested": (spoiled(LOGS | {"logprobs": [[-1.0]]}), "(logprobs is no list of num"),
    "words": (spoiled(LOGS | {"logprobs": ["a"]}), "(logprobs is no list of num"),
    "deep": (b"{" + b'"a":{' * 100_000, "line 1: no JSON"),
    "lone": (spoiled({"logprobs": [-1.0]}), "line 1: no log-probs of the trainer"),
    "uneven": (spoiled(LOGS | {"old_logprobs": [-1.0, -2.0]}), "old_log_probs, sequence 0: 2 tokens"),
    "changing": (spoiled(LOGS, {"logprobs": [-1.0], "log_prob": [-1.0]}), "line 2: no old_log_probs, which"),
    "twice": (spoiled(LOGS | {"rollout_logps": [-1.0]}), "can each be"),
    "mask": (spoiled(LOGS | {"loss_mask": [0.5]}), "response_mask"),
    "masked": (spoiled({"logprobs": [], "old_logps": []}), "no sequence that counts"),
}


@pytest.mark.parametrize("what", LINES)
def test_a_mistake_in_a_file_of_lines_is_one_error_with_a_hint(what: str, tmp_path: Path) -> None:
    data, says = LINES[what]
    (tmp_path / "a.jsonl").write_bytes(data)
    unconvertible(tmp_path / "a.jsonl", says)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e400])
def test_a_number_among_integers_that_is_none_becomes_null(odd: float, tmp_path: Path) -> None:
    lines = [json.dumps(LOGS | {"step": step}) for step in (1, odd, 2)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    steps = [
        step for batch in open_dump([str(tmp_path / "a.jsonl")]).batches() for step in batch.scalars["step"]
    ]
    assert steps == [1, None, 2]


def test_a_file_that_is_cut_off_is_one_error_with_a_hint(rows: Table, tmp_path: Path) -> None:
    path = to_jsonl(tmp_path / "a.jsonl", rows)
    path.write_bytes(path.read_bytes()[:-40])
    unconvertible(path, "line 16: no JSON")


def test_what_unfolds_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of blanks, which fold to a thousandth, and one line without end."""
    monkeypatch.setattr(forms, "FREE", 1 << 20)
    for line, says in (
        (b" " * 99 + b"\n", "unfolds to more than 100 times its size"),
        (b" ", "is longer than"),
    ):
        monkeypatch.setattr(forms, "MOST_LINE", 1 << 28 if len(line) > 1 else 1 << 20)
        with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
            file.write(line * ((8 << 20) // len(line)))
        unconvertible(tmp_path / "a.jsonl.gz", says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--columns", "rollout=nothing"], "there is no column 'nothing'"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "analyze"])
def test_an_option_that_cannot_be_used_is_an_error(
    command: str, options: list[str], says: str, rows: Table, tmp_path: Path
) -> None:
    source = to_jsonl(tmp_path / "a.jsonl", rows)
    to = ["--to", str(tmp_path / "out.parquet")] if command == "convert" else ["--no-html"]
    result = CliRunner().invoke(app, [command, str(source), *to, *options])
    assert (result.exit_code, says in result.stderr) == (2, True), result.stderr


def test_an_error_about_the_temporary_dump_names_the_file(rows: Table, tmp_path: Path) -> None:
    source = to_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DumpError) as caught:
        open_dump([str(source)], group_by=["nosuch"])
    assert caught.value.message == f"{source}: --group-by: there is no column 'nosuch'"


def test_files_of_two_forms_are_not_mixed(rows: Table, tmp_path: Path) -> None:
    to_jsonl(tmp_path / "a.jsonl", rows)
    written.prime_rl(tmp_path, written.batch())
    pickled.slime(tmp_path, written.batch())
    with pytest.raises(DumpError, match="of several forms"):
        open_dump([str(tmp_path)])


@pytest.mark.parametrize("glob", [True, False])
def test_parquet_beside_another_form_is_named_with_the_form_of_both(
    glob: bool, rows: Table, tmp_path: Path
) -> None:
    other = to_jsonl(tmp_path / "b.jsonl", rows)
    open_dump([str(other)])  # which reads alone
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)

    with pytest.raises(DumpError) as caught:
        open_dump([str(tmp_path / "*")] if glob else [str(path), str(other)])
    assert caught.value.message == f"the files are of several forms: {path} is parquet; {other} is jsonl"
    assert caught.value.hint == (
        "name the files of one form, or convert the others first: offpol-diag convert SRC --to FILE"
    )


@pytest.mark.parametrize("names", [["data.rollout"], ["data.rollout", "data.old"]])
def test_names_of_nested_fields_are_an_error_that_says_so(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"data": {"rollout": [-1.0], "old": [-1.0]}}) + "\n", encoding="utf-8")

    with pytest.raises(DumpError) as caught:
        open_dump([str(path)], columns=dict(zip(("rollout", "old"), names, strict=False)))
    assert "data.rollout" in caught.value.message
    assert "'data' is nested, and --columns takes names of the top level only" in caught.value.hint


def test_files_of_a_directory_are_read_in_the_order_of_their_numbers(rows: Table, tmp_path: Path) -> None:
    for i, row in enumerate(rows):
        to_jsonl(tmp_path / f"step_{i}.jsonl", [row])
    assert converted(tmp_path)[0] == rows


def test_blank_lines_a_mark_at_the_beginning_and_windows_line_ends_are_no_mistake(
    rows: Table, tmp_path: Path
) -> None:
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    assert converted(tmp_path / "a.jsonl")[0] == rows


def test_scalars_have_the_type_of_the_first_ones(rows: Table, tmp_path: Path) -> None:
    """Fields that are missing, or of another type, are null; a number may be written 1 or 1.0."""
    change: Table = [
        {"step": None, "attempt": 1},
        {"step": 3.0, "attempt": "b"},
        {"step": 4, "host": 7},
        {"step": 5},
    ]
    changed = [row | more for row, more in zip(rows, change, strict=False)]
    del changed[3]["host"]
    found, _ = converted(to_jsonl(tmp_path / "a.jsonl", changed))
    assert [row["step"] for row in found] == [None, 3, 4, 5]
    assert [row["host"] for row in found] == ["a", "a", "7", None]
    assert [row["attempt"] for row in found] == [1, None, None, None]


def test_a_glob_stands_for_its_files(rows: Table, tmp_path: Path) -> None:
    to_jsonl(tmp_path / "rank_0.jsonl", rows[:8])
    to_jsonl(tmp_path / "rank_1.jsonl", rows[8:])
    assert converted(tmp_path / "rank_*.jsonl")[0] == rows


def test_a_canonical_dump_is_read_as_it_is(rows: Table, tmp_path: Path) -> None:
    source = to_parquet(tmp_path / "a.parquet", rows)
    to_jsonl(tmp_path / "a.jsonl", rows)
    assert form_of([str(source)], {}) is form_of([str(tmp_path)], {}) is None


def test_the_list_names_every_form() -> None:
    result = CliRunner().invoke(app, ["convert", "--list"])
    assert result.exit_code == 0
    assert all(form.name in result.stdout for form in FORMS)


def test_no_more_than_a_group_of_rows_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are freed as they are written, however many there are, in row groups of a million tokens."""
    alive = most = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def rows() -> Iterator[tuple[str, Row]]:
        nonlocal alive, most
        for i in range(500):
            column = np.full(5000, -0.5, np.float32)
            weakref.finalize(column, gone)
            alive += 1
            most = max(most, alive)
            yield f"row {i}", {"rollout_log_probs": column, "old_log_probs": column}

    form = FORMS[-1]._replace(rows=lambda files, columns: rows())
    monkeypatch.setattr(forms, "FORMS", (form,))
    to_jsonl(tmp_path / "a.jsonl", [{"logprobs": [-1.0], "old_logprobs": [-1.0]}])
    monkeypatch.setattr(conversion, "FORMS", (form,))
    convert([str(tmp_path / "a.jsonl")], tmp_path / "out.parquet")
    assert most * 5000 < 2 * GROUP
    groups = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [105] * 4 + [80]


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_dump_replaces_no_directory_and_no_device(rows, tmp_path, kind):
    """A pipe stands for /dev/null, which a rename by root would make a file."""
    source, target = to_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "there"
    os.mkfifo(target) if kind == "pipe" else target.mkdir()
    result = CliRunner().invoke(app, ["convert", str(source), "--to", str(target)])
    assert (result.exit_code, "directory" in result.stderr) == (2, True)
    assert (target.is_fifo(), target.is_dir(), len([*tmp_path.iterdir()])) == (
        kind == "pipe",
        kind != "pipe",
        2,
    )


# ---------------------------------------------------------------- what is left


def renamed(rows: Table, name: str) -> Table:
    """Give the mask another name, and add a text and a list that nobody reads."""
    more = {"prompt": "p" * 100}
    return [
        {name if key == "response_mask" else key: value for key, value in row.items()}
        | more
        | {"ref_log_probs": [-1.5] * len(row["token_ids"])}
        for row in rows
    ]


@pytest.mark.parametrize("name", WRITERS)
def test_every_form_knows_a_column_called_mask(rows: Table, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path, renamed(rows, "mask"))
    found, _ = converted(path)
    assert [row["response_mask"] for row in found] == [row["response_mask"] for row in rows]


def test_fields_that_nobody_reads_are_listed(rows: Table, tmp_path: Path) -> None:
    some = [row | ({"note": [i]} if i == 9 else {}) for i, row in enumerate(renamed(rows, "mask"))]
    info = open_dump([str(to_jsonl(tmp_path / "a.jsonl", some))]).info
    assert info.columns["response_mask"] == "mask"
    assert info.others == ("host",)
