"""A dump in pieces is the dump: its sequences, its remarks, its errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.errors import DumpError
from offpol_diag.readers import Dump, open_dump
from offpol_diag.readers.shards import Span, cut, pieces, spans
from tests.factory import write

GROUP = 8
FULL, HUGE = 1 << 18, 1 << 30
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


def apart(dump: Dump, cuts: list[Span]) -> list[Any]:
    """Read each piece by itself, as in another process."""
    return merged(dump, [pickle.loads(pickle.dumps(cut(dump, span))) for span in cuts])


def by_turns(dump: Dump) -> list[Any]:
    """Read pieces by two readers in turn, each of which keeps its file open; and once more."""
    readers, cuts = [pickle.loads(pickle.dumps(dump)) for _ in range(2)], pieces(dump, 64)
    for _ in range(2):
        found = merged(dump, [cut(readers[i % 2], span) for i, span in enumerate(cuts)])
    return found


def merged(dump: Dump, parts: list[Dump]) -> list[Any]:
    found = sequences(*parts)
    dump.merge_findings([part.findings() for part in parts])
    return found


WAYS: dict[str, Callable[[Dump], list[Any]]] = {
    "shards": lambda dump: apart(dump, spans(dump, 1)),
    "larger shards": lambda dump: apart(dump, spans(dump, 1500)),
    "one shard": lambda dump: apart(dump, spans(dump, HUGE)),
    "pieces": lambda dump: apart(dump, pieces(dump, 1)),
    "larger pieces": lambda dump: apart(dump, pieces(dump, 64)),
    "pieces by two readers": by_turns,
}


def outcome(dump: Dump, way: Callable[[Dump], list[Any]]) -> Any:
    """Return the sequences of a pass with the dump's remarks; or its error."""
    try:
        return way(dump), dump.notes, dump.skipped, dump.info
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
    "a sign wrong later": ([of_old(*[-0.5] * 4, *[0.5] * 28)], 4, {}, NOTE),
    "a sign wrong at first": ([of_old(*[0.5] * 4, *[-0.5] * 28)], 4, {}, "wrong sign"),
    "later in a row group": ([of_old(*[-0.5] * 4, *[0.5] * 28)], 32, {"batch_tokens": 32}, NOTE),
    "at first in a row group": ([of_old(*[0.5] * 4, *[-0.5] * 28)], 32, {"batch_tokens": 32}, "wrong sign"),
    "wrong in few tokens of many shards": ([of_old(*[0.5] * 32)], 2, {}, "wrong sign"),
    "wrong in few tokens of many others": ([of_old(*[0.5] * 32)], 3, {}, "wrong sign"),
    "few wrong, enough wrong": (
        [of_old(0.5, 0.5), of_old(*[0.5] * 4, *[-0.5] * 28)],
        GROUP,
        {"batch_tokens": 32},
        "wrong sign",
    ),
    "few right, enough right": (
        [of_old(-0.5, -0.5), of_old(*[-0.5] * 4, *[0.5] * 28)],
        GROUP,
        {"batch_tokens": 32},
        NOTE,
    ),
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
def test_a_dump_in_pieces_is_the_dump(tmp_path, what):
    tables, group, options, says = DUMPS[what]
    for i, table in enumerate(tables):
        partition = f"step={i}" if "rollout_log_probs" in table.column_names else ""
        write(tmp_path / partition / f"{i}.parquet", table, group)
    expected = outcome(open_dump([str(tmp_path)], **options), whole)
    assert says in str(expected[:2] if len(expected) == 2 else expected[1:3])
    for way, act in WAYS.items():
        found = outcome(open_dump([str(tmp_path)], **options), act)
        assert found == expected or ("wrong sign" in says and says in found[0]), way


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("three files", 15),
    ],
)
def test_shards_are_cut_only_where_no_sequence_goes_on(tmp_path, what, expected):
    tables, group, *_ = DUMPS[what]
    for i, table in enumerate(tables):
        write(tmp_path / f"{i}.parquet", table, group)
    dump = open_dump([str(tmp_path)])
    assert len(spans(dump, 1)) == expected
    assert len(spans(dump, HUGE)) == 1


def test_a_dump_that_would_have_too_many_shards_is_cut_into_larger_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("offpol_diag.readers.shards.MOST", 32)
    dump = open_dump([write(tmp_path / "many.parquet", rows(48), 1)])
    assert 16 < len(spans(dump, 1)) <= 32


def test_a_shard_keeps_its_name_and_is_read_from_another_folder(tmp_path, monkeypatch):
    for i in range(3):
        write(tmp_path / "d" / f"{i}.parquet", rows(seed=i), GROUP)
    monkeypatch.chdir(tmp_path)
    piece, counted = cut(open_dump(["d"]), Span(5, 7)), []
    monkeypatch.chdir("/")
    assert [str(part.path) for part in piece.parts] == ["d/1.parquet"]
    assert len(sequences(list(piece.batches(counted.append)))) == 16
    assert sum(counted) == piece.rows == 16


# ---------------------------------------------------------------- pieces of row groups


@pytest.mark.parametrize(
    ("group", "least", "expected"),
    [
        (64, FULL, 1),
        (64, 128, 4),  # one row group of 512 tokens is parted
        (64, 1, 16),  # into no more than MANY
        (4, 128, 4),  # small ones go together
        (16, 128, 4),
        (24, 64, 8),  # 192, 192 and 128 tokens, each parted
    ],
)
def test_pieces_are_of_about_one_size_whatever_the_row_groups(tmp_path, group, least, expected):
    dump = open_dump([write(tmp_path / "x.parquet", full(), group)])
    sizes = [cut(dump, span).rows for span in pieces(dump, least)]
    assert (len(sizes), sum(sizes)) == (expected, 64)
    assert max(sizes) <= 2 * min(sizes)


def test_pieces_are_cut_by_tokens_or_by_rows_if_the_footer_has_no_sizes(tmp_path):
    """40 sequences of one token and 40 of 99, in row groups of 20: 20, 20, 1980 and 1980 tokens."""
    logs = [[-0.5] * n for n in [1] * 40 + [99] * 40]
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs})
    path = write(tmp_path / "x.parquet", table, 20, {"use_dictionary": False, "compression": "none"})
    dump = open_dump([path])
    assert dump.tokens == pytest.approx(4000, rel=0.8)
    assert [(one.begin, one.end) for one in pieces(dump, 2000)] == [(0, 3), (3, 4)]
    dump = open_dump([path])
    dump.parts = [replace(part, group_bytes=(0,) * 4) for part in dump.parts]
    assert dump.tokens == 80
    assert [(one.begin, one.end) for one in pieces(dump, 40)] == [(0, 2), (2, 4)]


def test_a_dump_that_begins_with_an_empty_row_group_is_cut_alike(tmp_path):
    path = tmp_path / "x.parquet"
    with pq.ParquetWriter(path, full().schema) as writer:
        for table in (full().slice(0, 0), full(), full().slice(0, 0)):
            writer.write_table(table)
    dump = open_dump([str(path)])
    assert dump.tokens == 512
    assert len(apart(dump, pieces(dump, 128))) == 64
    assert cut(dump, Span(0, 1)).tokens == 0


MILLIONS = [
    (0, 1),
    (1.1, 1),
    (1.3, 2),
    (2.3, 2),
    (2.5, 4),
    (4.1, 4),
    (4.9, 8),
    (9.7, 12),
    (16, 16),
    (30, 16),
    (64, 32),
]


def test_a_dump_has_as_many_pieces_as_cores_share_well(tmp_path, monkeypatch):
    dump = open_dump([write(tmp_path / "x.parquet", full(6400), 100)])
    for tokens, expected in MILLIONS:
        monkeypatch.setattr(Dump, "group_tokens", [tokens * (1 << 20) / 64] * 64)
        found = pieces(dump)
        assert len(found) == pytest.approx(expected, abs=expected // 12), tokens
        assert found[-1].end == 64


def test_damage_in_a_row_group_is_told_alike_by_every_piece_behind_it(tmp_path):
    path = tmp_path / "x.parquet"
    write(path, full(4000, 16), 4000, {"use_dictionary": False, "compression": "none"})
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at : at + 20_000] = b"\xff" * 20_000
    path.write_bytes(data)
    dump = open_dump([str(path)], batch_tokens=1000)
    cuts, expected = pieces(dump, 1000), outcome(dump, whole)
    assert len(expected) == 2
    for some in (cuts, cuts[-1:]):
        assert outcome(dump, lambda dump, some=some: apart(dump, some)) == expected
