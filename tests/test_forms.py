"""Files that are no canonical dump: the general forms, alignment, joins, and what is said of mistakes."""

from __future__ import annotations

import gc
import gzip
import json
import os
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.cli import app
from offpol_diag.errors import DumpError, OffpolError
from offpol_diag.forms import Reading, convert, open_dump
from offpol_diag.forms.conversion import BATCH
from offpol_diag.forms.detect import Found, find
from offpol_diag.forms.form import Row
from offpol_diag.forms.table import FORMS
from tests.factory import Table, converted, unconvertible, write


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


def to_arrow(path: Path, rows: Table, kind: Callable[..., Any] = pa.ipc.new_file) -> Path:
    table = pa.Table.from_pylist(rows)
    with kind(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=5)
    return path


def to_parquet(path: Path, rows: Table) -> Path:
    return Path(write(path, pa.Table.from_pylist(rows)))


def padded(rows: Table) -> dict[str, Any]:
    """Pad columns on the right."""
    most = max(len(row["token_ids"]) for row in rows)
    return {
        name: np.stack([np.pad(row[name], (0, most - len(row[name]))) for row in rows])
        if isinstance(value, list)
        else np.array([row[name] for row in rows])
        for name, value in rows[0].items()
    }


def flat(rows: Table) -> dict[str, Any]:
    """Concatenate columns, with the lengths of the rows."""
    columns = {
        name: np.concatenate([row[name] for row in rows])
        if isinstance(value, list)
        else np.array([row[name] for row in rows])
        for name, value in rows[0].items()
    }
    return columns | {"lengths": np.array([len(row["token_ids"]) for row in rows])}


def to_npz(path: Path, rows: Table) -> Path:
    np.savez(path, **padded(rows))
    return path


def to_flat_npz(path: Path, rows: Table) -> Path:
    columns = flat(rows)
    np.savez(path, cu_seqlens=np.concatenate([[0], np.cumsum(columns.pop("lengths"))]), **columns)
    return path


WRITERS: Mapping[str, Callable[[Path, Table], Any]] = {
    "a.jsonl": to_jsonl,
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "a.arrow": to_arrow,
    "stream.arrow": lambda path, rows: to_arrow(path, rows, pa.ipc.new_stream),
    "a.parquet": to_parquet,
    "a.npz": to_npz,
    "flat.npz": to_flat_npz,
}


def made(path: Path, rows: Table) -> Path:
    """Write the rows to a file, in the form that its name says."""
    WRITERS[path.name](path, rows)
    return path


def without(rows: Table, *names: str) -> Table:
    return [{key: value for key, value in row.items() if key not in names} for row in rows]


@pytest.mark.parametrize("name", WRITERS)
def test_values_come_back_under_any_names_and_from_two_files(name: str, rows: Table, tmp_path: Path) -> None:
    assert converted(made(tmp_path / name, rows))[0] == rows
    names = {"rollout_log_probs": "mine", "old_log_probs": "theirs"}
    renamed = [{names.get(key, key): value for key, value in row.items()} for row in rows]
    columns = {"rollout": "mine", "old": "theirs"}
    found, _ = converted(made(tmp_path / name, renamed), columns=columns)
    assert [{key: row[key] for key in rows[0]} for row in found] == rows
    second = to_parquet(tmp_path / "old.parquet", without(rows, "rollout_log_probs", "rewards")[::-1])
    first = made(tmp_path / name, without(rows, "old_log_probs"))
    found, _ = converted(first, join=f"{second}:old_log_probs")
    assert [row["old_log_probs"] for row in found] == [row["old_log_probs"] for row in rows]


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
    assert "read as jsonl by the names of its columns" in other.dump.notes[0]
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


# ---------------------------------------------------------------- alignment


def whole(row: dict[str, Any], prompt: int, moved: int = 0, after: int = 0) -> dict[str, Any]:
    """Return a row over prompt, response and what comes after; the trainer's column moved to the left."""
    other = {"rollout_log_probs": 0.0, "old_log_probs": -2.0, "response_mask": 0, "token_ids": 7}
    full = row | {key: [one] * prompt + row[key] + [one] * after for key, one in other.items()}
    full["old_log_probs"] = full["old_log_probs"][moved:]
    return full


@pytest.mark.parametrize("moved", [0, 1])
def test_a_whole_sequence_is_cut_to_its_response(moved: int, rows: Table, tmp_path: Path) -> None:
    """A list that is one shorter begins at the second token."""
    source = to_jsonl(
        tmp_path / "a.jsonl", [whole(row, 2 + i % 3, moved, i % 2) for i, row in enumerate(rows)]
    )
    assert converted(source, align="full")[0] == rows


def test_padding_on_the_left_is_cut_off(rows: Table, tmp_path: Path) -> None:
    padded = [whole(row, 30 - len(row["token_ids"])) for row in rows]
    source = to_npz(tmp_path / "a.npz", padded)
    assert converted(source, align="left")[0] == rows


def shifted(rows: Table, by: int) -> Table:
    """Move the trainer's column to the left by one token, or to the right."""
    moved = []
    for row in rows:
        old = row["old_log_probs"]
        moved.append(row | {"old_log_probs": [*old[1:], -1.0] if by > 0 else [-1.0, *old[:-1]]})
    return moved


@pytest.mark.parametrize("by", [1, -1])
def test_a_wrong_shift_is_found_and_can_be_chosen(by: int, rows: Table, tmp_path: Path) -> None:
    source = to_jsonl(tmp_path / "a.jsonl", shifted(rows, by))
    says = f"fit the rollout's with shift {by}, not 0"
    with pytest.raises(DumpError, match=says) as caught:
        converted(source)
    assert caught.value.hint == f"read them so with --align shift={by}, or as they are with --align shift=0"
    assert list(tmp_path.iterdir()) == [source]
    found, _ = converted(source, align=f"shift={by}")
    kept = slice(1, None) if by > 0 else slice(0, -1)
    for name in ("old_log_probs", "token_ids"):
        assert [row[name] for row in found] == [row[name][kept] for row in rows]
    _, notes = converted(source, align="shift=0")
    assert any(says in note for note in notes), "what is chosen against the data is noted"


def test_a_broad_mismatch_is_no_wrong_shift(rows: Table, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for row in rows:
        row["old_log_probs"] = (-random.exponential(1, len(row["token_ids"]))).tolist()
    assert len(converted(to_jsonl(tmp_path / "a.jsonl", rows))[0]) == len(rows)


def test_masked_tokens_do_not_count_for_the_shift(rows: Table, tmp_path: Path) -> None:
    """There every second token is sure, in one policy those that are not in the other."""
    masked = [0.0, -9.0] * 10
    for row in rows:
        row |= {"rollout_log_probs": [-0.5, -0.25, *masked], "old_log_probs": [-0.5, -0.25, *masked[::-1]]}
        row |= {"response_mask": [1, 1, *[0] * 20], "token_ids": [7] * 22}
    assert converted(to_jsonl(tmp_path / "a.jsonl", rows))[0] == rows


# ---------------------------------------------------------------- joins


def test_files_are_joined_by_another_column_or_by_their_order(rows: Table, tmp_path: Path) -> None:
    for i, row in enumerate(rows):
        row["trace"] = 100 + i
    names = {"old_log_probs": "mine", "sequence_id": "other"}
    there = [{names.get(key, key): row[key] for key in (*names, "trace")} for row in rows]
    first = to_jsonl(tmp_path / "a.jsonl", without(rows, "old_log_probs", "sequence_id"))
    second = to_jsonl(tmp_path / "b.jsonl", there)
    for on in ("trace", "row"):
        found, _ = converted(first, join=f"{second}:old=mine", on=on)
        assert [row["old_log_probs"] for row in found] == [row["old_log_probs"] for row in rows]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows[1:], "has no sequence_id 's0'"),
        (lambda rows: [*rows, rows[0]], "sequence_id 's0' comes twice"),
        (lambda rows: without(rows, "sequence_id"), "no sequence_id to join by"),
        (lambda rows: without(rows, "old_log_probs"), "there is no column 'old_log_probs' to join"),
        (lambda rows: [row | {"old_log_probs": [-1.0]} for row in rows], "'old_log_probs' has 1 values"),
    ],
)
def test_a_join_that_does_not_fit_is_an_error(
    change: Callable[[Table], Table], says: str, rows: Table, tmp_path: Path
) -> None:
    first = to_jsonl(tmp_path / "a.jsonl", without(rows, "old_log_probs"))
    second = to_jsonl(tmp_path / "b.jsonl", change(without(rows, "rollout_log_probs")))
    unconvertible(first, says, "--join", f"{second}:old_log_probs")


def test_rows_without_a_partner_are_counted_and_none_has_two(rows: Table, tmp_path: Path) -> None:
    first = to_jsonl(tmp_path / "a.jsonl", without(rows[2:], "old_log_probs"))
    second = to_jsonl(tmp_path / "b.jsonl", without(rows, "rollout_log_probs"))
    _, notes = converted(first, join=f"{second}:old_log_probs")
    assert any("2 sequences" in note and "have no partner" in note for note in notes)
    twice = to_jsonl(tmp_path / "c.jsonl", without([*rows, rows[0]], "old_log_probs"))
    unconvertible(twice, "sequence_id 's0' comes twice", "--join", f"{second}:old_log_probs")


# ---------------------------------------------------------------- mistakes


def spoiled(*records: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in records)


LOGS = {"logprobs": [-1.0], "old_logprobs": [-1.0]}
LINES: Mapping[str, tuple[bytes, str]] = {
    "list": (spoiled(LOGS, [1]), "line 2: list, no JSON object"),
    "empty": (b"", "the file is empty"),
    "other": (spoiled({"prompt": "a", "text": "b"}), "not a form of dump"),
    "text": (b"hello", "not a form of dump"),
    "nested": (spoiled(LOGS | {"logprobs": [[-1.0]]}), "'logprobs' is no list of num"),
    "words": (spoiled(LOGS | {"logprobs": ["a"]}), "'logprobs' is no list of num"),
    "deep": (b"{" + b'"a":{' * 100_000, "line 1: no JSON"),
    "lone": (spoiled({"logprobs": [-1.0]}), "line 1: no log-probs of the trainer"),
    "uneven": (spoiled(LOGS | {"old_logprobs": [-1.0, -2.0]}), "'rollout_log_probs' has 1"),
    "changing": (spoiled(LOGS, {"logprobs": [-1.0], "log_prob": [-1.0]}), "line 2: no old_log_probs, which"),
    "twice": (spoiled(LOGS | {"rollout_logps": [-1.0]}), "can each be"),
    "mask": (spoiled(LOGS | {"loss_mask": [0.5]}), "response_mask"),
    "masked": (spoiled({"logprobs": [], "old_logps": []}), "no sequence that counts"),
}
ONES = np.zeros(3)
ARRAYS: Mapping[str, tuple[dict[str, Any], str]] = {
    "objects": ({"logprobs": np.array([None, {}], dtype=object)}, "no archive of plain arrays"),
    "flat": ({"logprobs": ONES, "old_logprobs": ONES}, "no array is"),
    "nothing": ({}, "not a form of dump"),
}
FLAT = {"logprobs": -np.ones(8), "old_logprobs": -np.ones(8)}
NO_OFFSETS: Mapping[str, Any] = {
    "floats": [0.0, 2.0, 5.0, 8.0],
    "fractions": [0.0, 2.5, 5.0, 8.0],
    "nan": [0.0, np.nan, 8.0],
    "flags": [False, True],
    "complex": [0j, 8j],
    "texts": ["0", "8"],
    "not from 0": [2, 5, 8],
    "below 0": [-1, 2, 8],
    "falling": [0, 5, 2, 8],
    "two axes": [[0, 8]],
    "one number": 8,
    "none": [],
    "beyond 64 bits": np.array([0, 2**64 - 1], np.uint64),
}
CUT = {"a.jsonl": "line 16: no JSON", "a.arrow": "damaged, or cut", "a.npz": "a damaged zip file"}


@pytest.mark.parametrize("what", LINES)
def test_a_mistake_in_a_file_of_lines_is_one_error_with_a_hint(what: str, tmp_path: Path) -> None:
    data, says = LINES[what]
    (tmp_path / "a.jsonl").write_bytes(data)
    unconvertible(tmp_path / "a.jsonl", says)


@pytest.mark.parametrize("what", ARRAYS)
def test_a_mistake_in_a_file_of_arrays_is_one_error_with_a_hint(what: str, tmp_path: Path) -> None:
    arrays, says = ARRAYS[what]
    np.savez(tmp_path / "a.npz", **arrays)
    unconvertible(tmp_path / "a.npz", says)


@pytest.mark.parametrize("what", NO_OFFSETS)
def test_what_cannot_be_offsets_of_sequences_is_refused(what: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **FLAT, cu_seqlens=NO_OFFSETS[what])
    unconvertible(tmp_path / "a.npz", "'cu_seqlens' cannot be offsets of sequences")


@pytest.mark.parametrize("lengths", [[2.0, 6.0], [np.nan, 8.0], [-1, 9], 8, ["8"], [True]], ids=str)
def test_what_cannot_be_lengths_of_sequences_is_refused(lengths: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **FLAT, lengths=lengths)
    unconvertible(tmp_path / "a.npz", "'lengths' cannot be counts of tokens")


def test_lengths_beside_padded_arrays_may_be_floats(tmp_path: Path) -> None:
    x = -np.ones((2, 4))
    np.savez(tmp_path / "a.npz", logprobs=x, old_logprobs=x, lengths=[4.0, 4.0])
    assert sum(batch.tokens for batch in open_dump([str(tmp_path / "a.npz")]).batches()) == 8


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_a_member_of_an_archive_that_is_no_array_is_named(content: bytes, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", logprobs=ONES)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as file:
        file.writestr("old_logprobs.npy", content)
    unconvertible(tmp_path / "a.npz", "'old_logprobs' is empty, or no array")


@pytest.mark.parametrize("form", [one.name for one in FORMS])
def test_an_empty_file_of_a_form_that_is_named_is_an_error(form: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(OffpolError) as refused:
        open_dump([str(tmp_path / "a")], reading=Reading(form=form))
    assert refused.value.hint


def pairs_of(column: str) -> pa.Table:
    """Return a table for a join with two columns of one name."""
    names = ["sequence_id", column, "old_log_probs"]
    some = {"sequence_id": pa.array([1, 2]), "old_log_probs": pa.array([[-1.0], [-2.0]])}
    return pa.table([some[name] for name in names], names)


@pytest.mark.parametrize("column", ["sequence_id", "old_log_probs"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_file_to_join_with_two_columns_of_a_name_is_refused(column, suffix, tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"rollout_log_probs": [[-1.0], [-2.0]], "sequence_id": [1, 2]}), tmp_path / "a.parquet"
    )
    table, second = pairs_of(column), tmp_path / f"b.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, second)
    else:
        with pa.ipc.new_file(second, table.schema) as out:
            out.write_table(table)
    with pytest.raises(DumpError, match=f"b.{suffix}: two columns are called '{column}'"):
        open_dump([str(tmp_path / "a.parquet")], reading=Reading(join=f"{second}:old_log_probs"))


@pytest.mark.parametrize("names", ["old_log_probs,old_log_probs", "old_log_probs,old=other"])
def test_a_column_to_join_is_named_once(names: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"rollout_log_probs": [[-1.0]], "sequence_id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(OffpolError, match="'old_log_probs' is named twice"):
        open_dump([str(tmp_path / "a.parquet")], reading=Reading(join=f"b.parquet:{names}"))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e400])
def test_a_number_among_integers_that_is_none_becomes_null(odd: float, tmp_path: Path) -> None:
    lines = [json.dumps(LOGS | {"step": step}) for step in (1, odd, 2)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    steps = [
        step for batch in open_dump([str(tmp_path / "a.jsonl")]).batches() for step in batch.scalars["step"]
    ]
    assert steps == [1, None, 2]


@pytest.mark.parametrize(
    "kind", [pa.date32(), pa.date64(), pa.timestamp("us"), pa.timestamp("s", "UTC")], ids=str
)
@pytest.mark.parametrize("name", ["host", "group_id"])
def test_dates_beyond_the_year_9999_are_labels_in_every_form(
    kind: pa.DataType, name: str, tmp_path: Path
) -> None:
    far = {"date32[day]": 2**31 - 1, "date64[ms]": 86_400_000 * 2**30}.get(str(kind), 2**60)
    table = pa.table({"logprobs": [[-1.0]], "old_logprobs": [[-1.0]], name: pa.array([far], kind)})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    dump = open_dump([str(tmp_path / "a.arrow")], group_by=[name])
    assert [type(one) for batch in dump.batches() for one in batch.scalars[name]] == [str]


def test_an_archive_of_an_unknown_compression_is_one_error_with_a_hint(tmp_path):
    np.savez(tmp_path / "a.npz", logprobs=ONES)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[data.rindex(b"PK\x01\x02") + 10] = 99
    (tmp_path / "a.npz").write_bytes(data)
    unconvertible(tmp_path / "a.npz", "compression method is not supported")


@pytest.mark.parametrize("name", CUT)
def test_a_file_that_is_cut_off_is_one_error_with_a_hint(name: str, rows: Table, tmp_path: Path) -> None:
    path = made(tmp_path / name, rows)
    path.write_bytes(path.read_bytes()[:-40])
    unconvertible(path, CUT[name])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--form", "nemorl"], "no such form"),
        (["--align", "sideways"], "'sideways' is no alignment"),
        (["--join", "other.parquet"], "names no column"),
        (["--on", "uid"], "there is none"),
        (["--columns", "rollout=nothing"], "there is no column 'nothing'"),
        (["--join", "nothing.parquet:old_log_probs"], "nothing.parquet: no such file or directory"),
        (["--join", "https://example.invalid/a.parquet:old_log_probs"], "a URL is read as Parquet only"),
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
    to_npz(tmp_path / "a.npz", rows)
    with pytest.raises(OffpolError, match="of several forms"):
        open_dump([str(tmp_path)])
    assert open_dump([str(tmp_path)], reading=Reading(form="npz")).rows == len(rows)


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
        f"name the files of one form, or convert the others first: offpol-diag convert {other} --to FILE"
    )


@pytest.mark.parametrize("names", [["data.rollout"], ["data.rollout", "data.old"]])
def test_names_of_nested_fields_are_an_error_that_says_so(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"data": {"rollout": [-1.0], "old": [-1.0]}}) + "\n", encoding="utf-8")

    with pytest.raises(DumpError) as caught:
        open_dump([str(path)], columns=dict(zip(("rollout", "old"), names, strict=False)))
    some = "no fields 'data.rollout' and 'data.old'" if len(names) > 1 else "no field 'data.rollout'"
    assert caught.value.message == f"{path}: it has {some}"
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
    to_npz(tmp_path / "other.npz", rows)
    assert converted(tmp_path / "rank_*.jsonl")[0] == rows


def test_a_canonical_dump_is_read_as_it_is(rows: Table, tmp_path: Path) -> None:
    source = to_parquet(tmp_path / "a.parquet", rows)
    to_jsonl(tmp_path / "a.jsonl", rows)
    assert find([str(source)], None, {}) is find([str(tmp_path)], None, {}) is None
    moved, _ = converted(source, align="shift=1")
    assert [len(row["token_ids"]) + 1 for row in moved] == [len(row["token_ids"]) for row in rows]


def test_the_list_names_every_form() -> None:
    result = CliRunner().invoke(app, ["convert", "--list"])
    assert result.exit_code == 0
    assert all(form.name in result.stdout for form in FORMS)


def test_no_more_than_a_batch_of_rows_is_held(tmp_path: Path) -> None:
    """Rows are freed as they are written, however many there are, in row groups of a million tokens."""
    alive = most = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def rows() -> Iterator[Row]:
        nonlocal alive, most
        for i in range(500):
            column = np.full(5000, -0.5, np.float32)
            weakref.finalize(column, gone)
            alive += 1
            most = max(most, alive)
            yield Row({"rollout_log_probs": column, "old_log_probs": column}, {}, f"row {i}")

    form = replace(FORMS[0], read=lambda files, columns: rows())
    (tmp_path / "a").touch()
    convert(Found((tmp_path / "a",), form), tmp_path / "out.parquet", Reading(align="response"), {})
    assert most * 5000 < 3 * BATCH  # one is gathered while one is written
    groups = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [200, 200, 100]


def test_a_file_that_is_joined_is_not_overwritten(rows: Table, tmp_path: Path) -> None:
    first = to_jsonl(tmp_path / "a.jsonl", without(rows, "old_log_probs"))
    second = to_parquet(tmp_path / "old.parquet", rows)
    call = ["convert", str(first), "--join", f"{second}:old_log_probs", "--to", str(second)]
    result = CliRunner().invoke(app, call)
    assert (result.exit_code, "is what is read" in result.stderr) == (2, True)


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_dump_replaces_no_directory_and_no_device(rows, tmp_path, kind):
    """A pipe stands for /dev/null, which a rename by root would make a file."""
    source, target = to_npz(tmp_path / "a.npz", rows), tmp_path / "there"
    os.mkfifo(target) if kind == "pipe" else target.mkdir()
    result = CliRunner().invoke(app, ["convert", str(source), "--to", str(target)])
    assert (result.exit_code, "directory" in result.stderr) == (2, True)
    with pytest.raises(ValueError, match="a directory or a device, no file"):
        DumpWriter(target)
    assert (target.is_fifo(), target.is_dir(), len([*tmp_path.iterdir()])) == (
        kind == "pipe",
        kind != "pipe",
        2,
    )


# ---------------------------------------------------------------- a mask that nobody names, and what is left


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


@pytest.mark.parametrize("name", WRITERS)
def test_every_form_names_a_column_that_looks_like_a_mask(rows: Table, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path, renamed(rows, "sampled"))
    with pytest.raises(DumpError) as caught:
        open_dump([str(path)])
    assert f"{path}: column 'sampled' holds only 0 and 1" in caught.value.message
    assert "--columns mask=sampled" in caught.value.hint
    tokens = sum(batch.tokens for batch in open_dump([str(path)], columns={"mask": "sampled"}).batches())
    assert tokens == sum(sum(row["response_mask"]) for row in rows)
    assert sum(batch.tokens for batch in open_dump([str(path)], columns={"mask": "none"}).batches()) > tokens


def test_a_field_that_holds_another_number_in_one_row_is_no_mask(rows: Table, tmp_path: Path) -> None:
    changed = renamed(rows, "turn")
    changed[-1]["turn"][0] = 2
    assert open_dump([str(to_jsonl(tmp_path / "a.jsonl", changed))]).info.ignored


def test_a_conversion_without_the_mask_leaves_nothing(rows: Table, tmp_path: Path) -> None:
    path = to_jsonl(tmp_path / "a.jsonl", renamed(rows, "sampled"))
    unconvertible(path, "column 'sampled' holds only 0 and 1")


def test_fields_that_nobody_reads_are_listed(rows: Table, tmp_path: Path) -> None:
    some = [row | ({"note": [i]} if i == 9 else {}) for i, row in enumerate(renamed(rows, "mask"))]
    info = open_dump([str(to_jsonl(tmp_path / "a.jsonl", some))]).info
    assert info.columns["response_mask"] == "mask"
    assert info.others == ("host",)
    assert info.ignored == ("prompt", "ref_log_probs", "note")


def test_padding_in_a_converted_file_is_named_with_the_file(rows: Table, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    columns = padded(rows)
    del columns["response_mask"]
    np.savez(path, **columns)
    with pytest.raises(DumpError, match="both exactly 0 from some token to the end") as caught:
        list(open_dump([str(path)]).batches())
    assert caught.value.message.startswith(str(path))
    read = list(open_dump([str(path)], columns={"mask": "none"}).batches())
    assert sum(batch.sequences for batch in read) == len(rows)
