"""Dumps that are refused: what is wrong, where, and what to do about it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.dump.read import open_dump
from tests import factory
from tests.factory import refusal

NAN, INF = math.nan, math.inf
FLOATS = pa.list_(pa.float64())
GOOD = [[-0.5, -1.0], [-2.0], [-0.25], [-0.125, -4.0]]
ROLLOUT, OLD, MASK = "rollout_log_probs", "old_log_probs", "response_mask"


def write(path, **columns):
    """Write a dump of `columns` on top of good rollout and old log-probs, two rows in a row group."""
    return factory.write(path, None, 2, **{ROLLOUT: GOOD, OLD: GOOD} | columns)


# ---------------------------------------------------------------- rows

LONG = pa.repeat(pa.scalar(-1.0), 5_000_000)
BAD_ROWS = [  # what row 2 (row group 1) has in place of a good value, and what is said of it
    ({OLD: [-1.0, -1.0]}, "column 'old_log_probs': it holds 2 values and rollout_log_probs holds 1"),
    ({MASK: []}, "column 'response_mask': it holds 0 values"),
    ({ROLLOUT: None}, "'rollout_log_probs': there is null where a list"),
    ({OLD: [None]}, "'old_log_probs': token 0 is nan, and a token that counts needs a finite value"),
    ({"token_ids": [None]}, "'token_ids': token 0 is null"),
    ({MASK: [None]}, "'response_mask': token 0 is null, and a mask is 0 or 1"),
    ({MASK: [2]}, "column 'response_mask': token 0 is 2, and a mask is 0 or 1"),
    ({ROLLOUT: [-INF]}, "column 'rollout_log_probs': token 0 is -inf"),
    ({OLD: [INF]}, "column 'old_log_probs': token 0 is inf"),
    ({"advantages": [NAN]}, "column 'advantages': token 0 is nan"),
    ({"entropy": [NAN]}, "column 'entropy': token 0 is nan"),
    ({ROLLOUT: [0.5]}, "token 0 is 0.5, and a log-probability is at most 0"),
    ({"weight_versions": [-2]}, "token 0 is -2, and a version is at least 0"),
    ({"prompt_length": -1}, "column 'prompt_length': it is -1, and a length is needed"),
    ({"prompt_ids": [1, None]}, "column 'prompt_ids': token 1 is null, and a prompt is token ids"),
    ({"rewards": None}, "column 'rewards': it is nan, and a finite number is needed"),
    ({"step": INF}, "column 'step': it is inf, and a number within 64 bits is needed"),
    ({"policy_lag": 2.0**63}, "column 'policy_lag': it is 9.22337e+18, and a number within 64 bits"),
]
FILLED = {
    MASK: [[1] * len(row) for row in GOOD],
    "token_ids": [[7] * len(row) for row in GOOD],
    "advantages": GOOD,
    "entropy": [[1.0] * len(row) for row in GOOD],
    "current_log_probs": GOOD,
    "rewards": [1.0] * 4,
    "weight_versions": [[3] * len(row) for row in GOOD],
    "prompt_length": [7.0] * 4,
    "prompt_ids": [[1]] * 4,
    "step": [1.0, NAN, 1.0, None],
    "policy_lag": [1.0] * 4,
}
TYPES = {MASK: pa.list_(pa.int8())}
TYPES |= dict.fromkeys(("token_ids", "weight_versions", "prompt_ids"), pa.list_(pa.int64()))
TYPES |= dict.fromkeys(("rewards", "prompt_length", "step", "policy_lag"), pa.float64())


def spoilt(change, row=2):
    """Return good columns with some values of one row changed."""
    columns = {ROLLOUT: GOOD, OLD: GOOD} | FILLED
    for name, value in change.items():
        columns[name] = [value if i == row else good for i, good in enumerate(columns[name])]
    return {name: pa.array(values, TYPES.get(name, FLOATS)) for name, values in columns.items()}


@pytest.mark.parametrize(("change", "says"), BAD_ROWS, ids=str)
def test_a_bad_row_is_named_by_its_place_or_left_out_and_counted(tmp_path, change, says):
    path = write(tmp_path / "dump.parquet", **spoilt(change))
    for tokens in (1, 1_000_000):
        error = refusal(path, batch_tokens=tokens)
        assert error.message.startswith(f"{path}, row group 1, row 2, column ")
        assert says in error.message
        dump = open_dump([path], on_bad_row="skip", batch_tokens=tokens)
        batches = list(dump.batches())
        assert [name for batch in batches for name in batch.scalars["sequence_id"]] == [0, 1, 3]
        assert [x for batch in batches for x in batch.rollout.tolist()] == [-0.5, -1.0, -2.0, -0.125, -4.0]
        assert (dump.seen.skipped, dump.seen.examples) == (1, [error.message])


NOTHING = dict.fromkeys((ROLLOUT, OLD), pa.array([[], []], FLOATS))
TOO_LONG = dict.fromkeys((ROLLOUT, OLD), pa.ListArray.from_arrays(pa.array([0, len(LONG)], pa.int32()), LONG))
FIRST = [  # columns, what the error says: of several bad rows the first is named
    ({OLD: [[-0.5, NAN], [-2.0], [NAN], [NAN, NAN]]}, "row 0, column 'old_log_probs': token 1 is nan"),
    ({ROLLOUT: [GOOD[0], [NAN], *GOOD[2:]], OLD: [[NAN, NAN], *GOOD[1:]]}, "row 0, column 'old_log_probs'"),
    ({ROLLOUT: None, "logprobs": [[-1.0, INF], *GOOD[1:]]}, "column 'logprobs': token 1 is inf"),
    ({MASK: [[0] * len(row) for row in GOOD]}, "no token is left in 4 rows"),
    (NOTHING, "no token is left in 2 rows"),
    ({ROLLOUT: [], OLD: []}, "the dump is empty: it has no row"),
    (TOO_LONG, "it holds 5000000 tokens, and a sequence has at most 4194304"),
    ({OLD: [[0.5, 1.0], [2.0], [3.0], [-1.0, -1.0]]}, "4 of 6 tokens are above 0: it has the wrong sign"),
]


@pytest.mark.parametrize(("columns", "says"), FIRST, ids=[says for _, says in FIRST])
def test_the_first_thing_that_is_wrong_is_said(tmp_path, columns, says):
    assert says in refusal(write(tmp_path / "a.parquet", **columns)).message


def test_five_skipped_rows_are_described_and_where_all_are_it_is_an_error(tmp_path):
    two_faults = spoilt({ROLLOUT: [0.5], OLD: [NAN], "rewards": NAN})
    nineteen = {ROLLOUT: [[-1.0]] * 20, OLD: [[NAN]] * 19 + [[-1.0]]}
    for columns, count, rows in ((two_faults, 1, [2]), (nineteen, 19, [0, 1, 2, 3, 4])):
        for tokens in (1, 1000):
            path = write(tmp_path / "a.parquet", **columns)
            dump = open_dump([path], on_bad_row="skip", batch_tokens=tokens)
            list(dump.batches())
            assert dump.seen.skipped == count
            assert [f"row {i}," in said for i, said in zip(rows, dump.seen.examples, strict=True)]
    path = write(tmp_path / "a.parquet", old_log_probs=[[NAN] * len(row) for row in GOOD])
    message = refusal(path, on_bad_row="skip").message
    assert "every row was skipped, all 4; the first: " in message
    assert "row 0, column 'old_log_probs': token 0 is nan" in message


# ---------------------------------------------------------------- files


def test_a_missing_file_is_named_with_its_neighbours(tmp_path):
    write(tmp_path / "step_100.parquet")
    error = refusal(str(tmp_path / "step_10.parquet"))
    assert "step_10.parquet: no such file or directory" in error.message
    assert "did you mean step_100.parquet?" in error.hint
    assert "no dump was named" in refusal().message
    for source in ("", "*.pq", "none*/**"):
        assert "no file is there that can be read" in refusal(f"{tmp_path / 'no'}*/{source}").message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", ["pipe.parquet", "p*.parquet", "/dev/null"])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path, monkeypatch, source):
    os.mkfifo(tmp_path / "pipe.parquet")
    write(tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert refusal(source).message.endswith("a device or a pipe, no file")
    assert factory.read(str(tmp_path)).sequences == 4


def good_bytes(tmp_path, **options):
    """Return a file of two row groups, of rounded numbers: a codec stores noise as it is."""
    logs = -np.random.default_rng(0).exponential(size=(400, 20)).round(1)
    path = tmp_path / "good.bin"
    made = pa.table({ROLLOUT: [*logs], OLD: [*logs]})
    pq.write_table(made, path, row_group_size=200, use_dictionary=False, **options)
    return path.read_bytes(), pq.read_metadata(path)


BAD_FILES = {
    "text": (lambda data: b'{"rollout_log_probs": [-1.0]}\n', "Parquet magic bytes not found"),
    "empty": (lambda data: b"", "Parquet file size is 0 bytes"),
    "truncated": (lambda data: data[: len(data) // 2], "Parquet magic bytes not found"),
    "a footer of noise": (lambda data: data[:-200] + b"\xff" * 192 + data[-8:], "Couldn't deserialize"),
}


@pytest.mark.parametrize(("spoil", "says"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_does_not_open_is_refused_in_arrows_words(tmp_path, monkeypatch, spoil, says):
    path = tmp_path / "bad.parquet"
    path.write_bytes(spoil(good_bytes(tmp_path)[0]))
    assert refusal(str(path)).message.startswith(f"{path}: cannot be read as Parquet ({says}")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pyarrow.OSFile", denied)
    assert refusal(str(path)).message.endswith("([Errno 13] Permission denied)")


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize(
    "how", [{"compression": "zstd"}, {"compression": "none", "write_page_checksum": True}]
)
def test_corruption_inside_a_page_is_found_and_placed(tmp_path, how, on_bad_row):
    data, metadata = good_bytes(tmp_path, **how)
    chunk, path = metadata.row_group(1).column(1), tmp_path / "bad.parquet"
    at = chunk.data_page_offset + chunk.total_compressed_size // 2
    path.write_bytes(data[:at] + bytes(b ^ 0xFF for b in data[at : at + 64]) + data[at + 64 :])
    place = f"{path}, row group 1, from row 200 on: the data cannot be read"
    assert refusal(str(path), on_bad_row=on_bad_row).message.startswith(place)


# ---------------------------------------------------------------- columns and types

NAME_IT = "name it with --columns rollout=…,old=…; the columns are prompt"
WITHOUT = {ROLLOUT: None, OLD: None, "prompt": ["p"] * 4}
# fmt: off
COLUMNS = [  # columns of the file, --columns or --group-by, what is said, and to do
    ({ROLLOUT: None}, {}, "no column holds rollout_log_probs", "name it with --columns rollout=…;"),
    (WITHOUT, {}, "no column holds rollout_log_probs, and none old_log_probs or current_log_probs", NAME_IT),
    (WITHOUT | {"completion": ["c"] * 4}, {}, "no column holds", "docs/trainers/trl.md has a hook"),
    ({OLD: None}, {}, "no column holds old_log_probs or current_log_probs", "the columns are rollout"),
    ({}, {"old": "old_logprob"}, "there is no column 'old_logprob'", "did you mean old_log_probs"),
    ({}, {"old": "zzz"}, "there is no column 'zzz'", "the columns are rollout_log_probs,"),
    ({"logprobs": GOOD}, {}, "rollout_log_probs and logprobs can each be the rollout",
     "say which: --columns rollout=rollout_log_probs or --columns rollout=logprobs"),
    ({}, {"rolout": "x"}, "no part is called 'rolout'", "did you mean rollout"),
    ({}, {"old": OLD, "current": OLD}, "'old_log_probs' is given two parts", "a column of its own"),
    ({"host": ["x"] * 4}, "hots", "--group-by: there is no column 'hots'", "did you mean host?"),
    ({"pairs": [[1, 2]] * 4}, "pairs", "column 'pairs' holds list<element: int64>", "group by"),
    *(
        ({name: pa.array(column)}, {}, f": column {name!r} holds ", "write the column again in that type")
        for name, column in (
            (ROLLOUT, [["-1"]] * 4), (ROLLOUT, [-1.0] * 4), (OLD, [[1]] * 4), (OLD, [[{"p": -1.0}]] * 4),
            (OLD, [[[-1.0]]] * 4), (OLD, ["[-1.0]"] * 4), (MASK, [["1"]] * 4), (MASK, [1] * 4),
            ("token_ids", [[1.0]] * 4), ("rewards", [[1.0]] * 4), ("advantages", ["1"] * 4),
            ("weight_versions", [1] * 4), ("step", ["one"] * 4), ("policy_lag", [True, False] * 2),
            ("finish_reason", [1] * 4), ("group_id", [{"a": 1}] * 4),
        )
    ),
]
# fmt: on


@pytest.mark.parametrize(("made", "given", "says", "hint"), COLUMNS, ids=[says for _, _, says, _ in COLUMNS])
def test_columns_that_cannot_be_meant_are_refused_with_a_way(tmp_path, made, given, says, hint):
    how = {"group_by": [given]} if isinstance(given, str) else {"columns": given}
    error = refusal(write(tmp_path / "a.parquet", **made), on_bad_row="skip", **how)
    assert says in error.message
    assert hint in error.hint


def test_two_columns_of_one_name_are_refused_where_they_are_needed(tmp_path):
    for names, how in (((ROLLOUT, OLD, OLD), {}), ((ROLLOUT, OLD, "x", "x"), {"group_by": ["x"]})):
        pq.write_table(
            pa.Table.from_arrays([pa.array(GOOD)] * len(names), names=names), tmp_path / "a.parquet"
        )
        assert f"two columns are called '{names[-1]}'" in refusal(str(tmp_path), **how).message
    assert factory.read(str(tmp_path)).tokens == 6


MIXED = [
    ({"token_ids": [[1]] * 4}, {}, "token_ids"),
    ({}, {"rewards": [1.0] * 4}, "rewards"),
    ({"group_id": [1] * 4}, {"group_id": ["1"] * 4}, "group_id"),
    ({"advantages": [1.0] * 4}, {"advantages": GOOD}, "advantages"),
    ({"log_prob": GOOD}, {"current_log_probs": GOOD}, "current_log_probs"),
]


@pytest.mark.parametrize(("one", "two", "column"), MIXED, ids=str)
def test_files_that_differ_are_both_named(tmp_path, one, two, column):
    paths = [write(tmp_path / "a.parquet", **one), write(tmp_path / "b.parquet", **two)]
    error = refusal(str(tmp_path), on_bad_row="skip")
    assert error.message.startswith(f"{paths[0]} and {paths[1]} differ: column {column!r}")


@pytest.mark.parametrize("name", ["group_id", "sequence_id", "host"])
def test_text_that_is_not_utf8_is_refused(tmp_path, name):
    raw = pa.array([b"a", b"b", b"a", b"\xff\xfe"])
    for column in (raw, pa.Array.from_buffers(pa.string(), 4, raw.buffers())):
        path = write(tmp_path / "a.parquet", **{name: column})
        said = refusal(path, group_by=["host"] if name == "host" else []).message
        assert said.startswith(f"{path}, row group 1, rows 2 to 3, column {name!r}: ")
        assert "UTF8" in said
    assert factory.read(write(tmp_path / "b.parquet", host=column)).tokens == 6, "nobody asked for it"
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/host=\xff"))
    folder.mkdir()
    (folder / "dump.parquet").write_bytes(Path(write(tmp_path / "c.parquet")).read_bytes())
    assert "cannot be read" in refusal(str(folder)).message
