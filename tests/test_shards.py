"""A dump in shards is the dump: its sequences, its remarks, its errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offpol_diag.dump.check import Seen
from offpol_diag.dump.read import Dump, open_dump
from offpol_diag.errors import DumpError
from tests.factory import write

GROUP = 8
HUGE = 1 << 30
NAN = float("nan")


def rows(count: int = 40, seed: int = 0, **changes: Any) -> pa.Table:
    """Make sequences of 0 to 6 tokens; some tokens masked."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, count)
    lengths[:2] = 6
    logs = [-rng.exponential(0.5, n) for n in lengths]
    columns = {
        "rollout_log_probs": logs,
        "old_log_probs": [x - 0.01 for x in logs],
        "response_mask": [rng.random(n) < 0.8 for n in lengths],
    }
    return pa.table({name: pa.array(map(list, column)) for name, column in (columns | changes).items()})


def full(count: int = 64, length: int = 8) -> pa.Table:
    logs = np.full((count, length), -0.5) - np.arange(count)[:, None] / 100
    return pa.table({"rollout_log_probs": logs.tolist(), "old_log_probs": (logs - 0.01).tolist()})


def of_old(*old: Any) -> pa.Table:
    """Make sequences of eight tokens with these values of `old`."""
    logs = [[value] * 8 if isinstance(value, float) else value for value in old]
    return pa.table({"rollout_log_probs": [[-0.5] * 8] * len(logs), "old_log_probs": logs})


def spoilt(table: pa.Table, row: int) -> pa.Table:
    """Remove the mask, and put a NaN in the first row from `row` on that has a token."""
    values = table["old_log_probs"].to_pylist()
    next(values[i] for i in range(row, len(values)) if values[i])[0] = NAN
    return table.select(["rollout_log_probs"]).append_column("old_log_probs", pa.array(values))


def sequences(*dumps: Any) -> list[Any]:
    """Return every sequence of dumps or lists of batches as plain values."""
    found = []
    for dump in dumps:
        for batch in dump.batches() if isinstance(dump, Dump) else dump:
            at = batch.cu_seqlens.tolist()
            for i in range(batch.sequences):
                tokens = slice(at[i], at[i + 1])
                scalars = {name: values[i] for name, values in batch.scalars.items()}
                logs = [getattr(batch, name)[tokens].tolist() for name in ("rollout", "old", "position")]
                found.append((logs, scalars, int(batch.key[i]), int(batch.masked[i])))
    return found


def whole(dump: Dump) -> list[Any]:
    return sequences(dump)


def apart(dump: Dump, size: int) -> list[Any]:
    """Read each shard by itself, as in another process."""
    parts = [pickle.loads(pickle.dumps(part)) for part in dump.shards(size)]
    found, dump.seen = sequences(*parts), Seen()
    for part in parts:
        dump.seen.add(part.seen)
    dump.judge()
    return found


def outcome(dump: Dump, way: Callable[[Dump], list[Any]]) -> Any:
    """Return the sequences of a pass with the dump's remarks; or its error."""
    try:
        return way(dump), dump.notes, dump.seen.skipped, dump.info
    except DumpError as error:
        return error.message, error.hint


Given = tuple[list[pa.Table], int, dict[str, Any], str]
NOTE = "tokens ("  # of positive log-probs
SKIP = {"on_bad_row": "skip"}
BAD = [0.5] * 3 + [-0.5] * 5
POSITIVE = [rows(seed=i) for i in range(2)]
POSITIVE = [
    one.set_column(
        0, "rollout_log_probs", pa.array([[0.5] * len(x) for x in one["old_log_probs"].to_pylist()])
    )
    for one in POSITIVE
]
MASKED = rows(
    response_mask=[[]] * 40, **{name: [np.zeros(0)] * 40 for name in ("rollout_log_probs", "old_log_probs")}
)
DUMPS: dict[str, Given] = {  # the files, rows of a row group, options, what must be said of it
    "three files": ([rows(seed=i) for i in range(3)], GROUP, {}, ""),
    "row groups of all sizes": ([rows(100), rows(100, 1)], 30, {"batch_tokens": 20}, ""),
    "a bad row": ([rows(), spoilt(rows(), 30)][1:], GROUP, {}, "row group 3, row 3"),
    "a bad row in a row group": ([spoilt(full(), 40)], 64, {}, "row group 0, row 40,"),
    "the same, skipped": ([spoilt(full(), 40)], 64, SKIP, "row group 0, row 40,"),
    "two bad files, skipped": ([*POSITIVE, rows(seed=2)], GROUP, SKIP, "count="),
    "nothing but bad rows": ([of_old(*[NAN] * 40)], GROUP, SKIP, "every row was skipped, all 40"),
    "a file that is masked": ([MASKED, rows()], GROUP, {}, ""),
    "a dump that is masked": ([MASKED], GROUP, {}, "no token is left in 40 rows"),
    "a sign wrong in few": ([of_old(*[-0.5] * 20, *[0.5] * 12)], 4, {}, NOTE),
    "a sign wrong in most": ([of_old(*[-0.5] * 4, *[0.5] * 28)], 4, {}, "wrong sign"),
    "wrong in few tokens of many shards": ([of_old(*[0.5] * 32)], 2, {}, "wrong sign"),
    "few wrong, many right": (
        [of_old(0.5, 0.5), of_old(*[-0.5] * 32)],
        GROUP,
        {"batch_tokens": 300},
        NOTE,
    ),
    "some wrong in each sequence": (
        [of_old(BAD, BAD), of_old(*[BAD] * 14)],
        GROUP,
        {"batch_tokens": 16},
        NOTE,
    ),
}


@pytest.mark.parametrize("what", DUMPS)
def test_a_dump_in_shards_is_the_dump(tmp_path, what):
    tables, group, options, says = DUMPS[what]
    for i, table in enumerate(tables):
        partition = f"step={i}" if "rollout_log_probs" in table.column_names else ""
        write(tmp_path / partition / f"{i}.parquet", table, group)
    expected = outcome(open_dump([str(tmp_path)], **options), whole)
    assert says in str(expected[:2] if len(expected) == 2 else expected[1:3])
    for size in (1, 1500, HUGE):
        found = outcome(open_dump([str(tmp_path)], **options), lambda dump, size=size: apart(dump, size))
        assert found == expected, size


def test_shards_are_row_groups_and_no_more_than_can_be_handled(tmp_path, monkeypatch):
    for i in range(3):
        write(tmp_path / f"{i}.parquet", rows(seed=i), GROUP)
    dump = open_dump([str(tmp_path)])
    assert len(dump.shards(1)) == 15
    assert len(dump.shards(HUGE)) == 1
    monkeypatch.setattr("offpol_diag.dump.read.MOST_SHARDS", 10)
    assert 5 < len(dump.shards(1)) <= 10


def test_a_shard_keeps_its_name_and_is_read_from_another_folder(tmp_path, monkeypatch):
    for i in range(3):
        write(tmp_path / "d" / f"{i}.parquet", rows(seed=i), GROUP)
    monkeypatch.chdir(tmp_path)
    piece, counted = open_dump(["d"]).shards(1)[5], []
    monkeypatch.chdir("/")
    assert [str(part.path) for part in piece.parts] == ["d/1.parquet"]
    assert len(sequences(list(piece.batches(counted.append)))) == 8
    assert sum(counted) == piece.rows == 8
