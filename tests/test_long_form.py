"""One row per token: the rows of a sequence lie in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offpol_diag.dump.convert import open_dump
from tests.factory import converted, plain, read, refusal, write
from tests.reading import analyze
from tests.test_laws import different

TOKENS = {
    "rollout_log_probs": "rollout_log_prob",
    "old_log_probs": "old_log_prob",
    "current_log_probs": "current_log_prob",
    "response_mask": "loss_mask",
    "advantages": "advantage",
    "token_ids": "token_id",
    "entropy": "entropy",
    "weight_versions": "weight_version",
}


def sequences(count: int = 40) -> dict[str, Any]:
    """Make columns of a dump of `count` sequences of 1 to 30 tokens, a list per row."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 31, count)
    lists = {
        name: [rng.integers(0, 99, n) for n in lengths] for name in ("token_ids", "entropy", "advantages")
    }
    return {
        **{
            name: [-rng.exponential(1.0, n) for n in lengths] for name in TOKENS if name.endswith("log_probs")
        },
        **{
            name: [row * 0.5 for row in rows] if name != "token_ids" else rows for name, rows in lists.items()
        },
        "response_mask": [(rng.integers(0, 4, n) > 0).astype(np.int8) for n in lengths],
        "weight_versions": [5 + np.arange(n) // 4 for n in lengths],
        "prompt_length": np.arange(count),
        "finish_reason": ["length" if i % 3 else "stop" for i in range(count)],
        "weight_digest_rollout": [f"a{i % 2}" for i in range(count)],
        "weight_digest_train": ["a0"] * count,
        "sequence_id": [f"s{i}" for i in rng.permutation(count)],
        "group_id": [f"g{i // 4}" for i in range(count)],
        "rewards": rng.normal(size=count),
        "step": np.arange(count) // 10,
        "host": [f"h{i % 3}" for i in range(count)],
    }


def lengthened(columns: dict[str, Any]) -> pa.Table:
    """Return the same sequences as a table of one row per token."""
    lengths = [len(row) for row in columns["rollout_log_probs"]]
    flat = {new: np.concatenate(columns[old]) for old, new in TOKENS.items()}
    for name in columns.keys() - TOKENS.keys():
        flat[name] = np.repeat(np.asarray(columns[name]), lengths)
    return pa.table(flat | {"position": np.concatenate([np.arange(n) for n in lengths])})


@pytest.mark.parametrize("group", [7, 64, 10_000])
@pytest.mark.parametrize("tokens", [9, 1_000_000])
def test_batches_are_those_of_the_list_form_however_the_dump_is_cut(
    tmp_path: Path, group: int, tokens: int
) -> None:
    columns = sequences()
    whole = plain(read(write(tmp_path / "a.parquet", pa.table(columns)), group_by=["host"]))
    long = write(tmp_path / "b.parquet", lengthened(columns), group)
    assert plain(read(long, group_by=["host"], batch_tokens=tokens)) == whole


def test_every_number_of_the_analysis_is_that_of_the_list_form(tmp_path: Path) -> None:
    columns = sequences()
    one = write(tmp_path / "a.parquet", pa.table(columns))
    two = write(tmp_path / "b.parquet", lengthened(columns), 50)
    how: dict[str, Any] = {"presets": "token_is,seq_mis", "group_by": ["host"], "device": "cpu"}
    found = analyze([two], **how)
    assert different(analyze([one], **how), found) == {}
    assert found.dump.rows == 40


def test_a_long_dump_is_converted(tmp_path: Path) -> None:
    columns = sequences(12)
    found, _ = converted(Path(write(tmp_path / "long.parquet", lengthened(columns), 40)))
    assert [row["sequence_id"] for row in found] == columns["sequence_id"]
    for name in ("old_log_probs", "response_mask", "token_ids"):
        assert [row[name] for row in found] == [row.tolist() for row in columns[name]]


def rows(**more: Any) -> pa.Table:
    logs = {"rollout_log_prob": [-1.0, -0.5, -2.0, -0.25], "old_log_prob": [-1.0, -0.5, -2.0, -0.25]}
    return pa.table(logs | {"sequence_id": [0, 0, 1, 1]} | more)


def test_positions_may_jump_where_a_turn_ends(tmp_path: Path) -> None:
    batch = read(write(tmp_path / "a.parquet", rows(position=[3, 7, 0, 1])))
    assert (batch.position.tolist(), batch.cu_runs.tolist()) == ([0, 4, 0, 1], [0, 1, 2, 4])
    for ids in (["a", "a", "b", "b"], [1.0, 1.0, 2.5, 2.5], [b"a", b"a", b"b", b"b"]):
        assert read(write(tmp_path / "b.parquet", rows(sequence_id=ids))).sequences == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"sequence_id": [0, 1, 0, 1]}, "row 2: the sequence '0' comes back after another one"),
        ({"sequence_id": [0, None, 1, 1]}, "row 1, column 'sequence_id': it is null"),
        ({"position": [1, 0, 0, 1]}, "row 1: positions do not rise within a sequence"),
        ({"position": [0, 1, 0, 0]}, "row 3: positions do not rise within a sequence"),
    ],
)
def test_rows_that_do_not_lie_in_one_piece_are_refused(tmp_path: Path, more: Any, says: str) -> None:
    assert says in refusal(write(tmp_path / "a.parquet", rows(**more)), on_bad_row="skip").message


def test_a_sequence_lies_in_one_file_and_the_two_forms_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows())
    write(tmp_path / "b.parquet", rows())
    error = refusal(str(tmp_path))
    assert "b.parquet, row 0: the sequence '0' comes back after another one" in error.message
    assert "sort" in error.hint
    write(tmp_path / "b.parquet", None, sequence_id=[5, 6, 7, 8])
    assert "differ" in refusal(str(tmp_path)).message


def test_a_bad_sequence_is_named_by_the_row_it_begins_in_or_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows(rollout_log_prob=[-1.0, -0.5, -2.0, float("nan")]))
    assert refusal(path).message.startswith(f"{path}, row 2, column 'rollout_log_prob': token 1 is nan")
    dump = open_dump([path], on_bad_row="skip")
    assert [batch.sequences for batch in dump.batches()] == [1]
    assert dump.seen.skipped.count == 1
