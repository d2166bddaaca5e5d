"""Bad input: what is wrong, where, and what to do about it."""

import math
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.dump import schema as roles
from offpol_diag.dump.convert import open_dump
from offpol_diag.errors import DumpError
from tests import factory
from tests.factory import refusal

NAN, INF = math.nan, math.inf
FLOATS = pa.list_(pa.float64())
GOOD = [[-0.5, -1.0], [-2.0], [-0.25], [-0.125, -4.0]]


def write(path, **columns):
    """Write a dump of `columns` on top of good rollout and old log-probs, two rows in a row group."""
    return factory.write(path, None, 2, **{"rollout_log_probs": GOOD, "old_log_probs": GOOD} | columns)


# --- bad rows: each case is a change to row 2 (row group 1) of good columns

BAD_ROWS = {
    "lists of different length": (
        {"old_log_probs": [-1.0, -1.0]},
        "column 'old_log_probs': it holds 2 values and rollout_log_probs holds 1",
    ),
    "a mask of another length": ({"response_mask": []}, "column 'response_mask': it holds 0 values"),
    "advantages of another length": ({"advantages": [1.0, 2.0]}, "column 'advantages': it holds 2 values"),
    "token ids of another length": ({"token_ids": [1, 2]}, "column 'token_ids': it holds 2 values"),
    "a null list": ({"old_log_probs": None}, "column 'old_log_probs': there is null where a list belongs"),
    "a null rollout list": ({"rollout_log_probs": None}, "'rollout_log_probs': there is null where a list"),
    "a null mask": ({"response_mask": None}, "'response_mask': there is null where a list belongs"),
    "a null log-prob": ({"old_log_probs": [None]}, "'old_log_probs': token 0 is null"),
    "a null token id": ({"token_ids": [None]}, "'token_ids': token 0 is null"),
    "a null in the mask": (
        {"response_mask": [None]},
        "'response_mask': token 0 is null, and a mask is 0 or 1",
    ),
    "a NaN in rollout": ({"rollout_log_probs": [NAN]}, "column 'rollout_log_probs': token 0 is nan"),
    "a NaN in old": ({"old_log_probs": [NAN]}, "column 'old_log_probs': token 0 is nan"),
    "a NaN in current": ({"current_log_probs": [NAN]}, "column 'current_log_probs': token 0 is nan"),
    "an infinity": ({"rollout_log_probs": [-INF]}, "column 'rollout_log_probs': token 0 is -inf"),
    "a positive infinity": ({"old_log_probs": [INF]}, "column 'old_log_probs': token 0 is inf"),
    "a NaN advantage": ({"advantages": [NAN]}, "column 'advantages': token 0 is nan"),
    "a NaN entropy": ({"entropy": [NAN]}, "column 'entropy': token 0 is nan"),
    "a mask of 2": ({"response_mask": [2]}, "column 'response_mask': token 0 is 2, and a mask is 0 or 1"),
    "a mask of -1": ({"response_mask": [-1]}, "column 'response_mask': token 0 is -1"),
    "a positive rollout": (
        {"rollout_log_probs": [0.5]},
        "token 0 is 0.5, and a log-probability is at most 0",
    ),
    "versions of another length": ({"weight_versions": [3, 3]}, "'weight_versions': it holds 2 values"),
    "null versions": ({"weight_versions": None}, "'weight_versions': there is null where a list belongs"),
    "a null version": ({"weight_versions": [None]}, "'weight_versions': token 0 is null"),
    "a version of -2": ({"weight_versions": [-2]}, "token 0 is -2, and a version is at least 0"),
    "a prompt of -1 tokens": ({"prompt_length": -1}, "column 'prompt_length': it is -1, and no length"),
    "a prompt of half a token": ({"prompt_length": 0.5}, "column 'prompt_length': it is 0.5, and no length"),
    "a digest of the rollout only": (
        {"weight_digest_train": None},
        "column 'weight_digest_train': it is null, and weight_digest_rollout is not",
    ),
    "a digest of the trainer only": (
        {"weight_digest_rollout": None},
        "column 'weight_digest_rollout': it is null, and weight_digest_train is not",
    ),
    "a null reward": ({"rewards": None}, "column 'rewards': it is null, NaN or infinite"),
    "a NaN reward": ({"rewards": NAN}, "column 'rewards': it is null, NaN or infinite"),
}
FILLED = {
    "response_mask": [[1] * len(row) for row in GOOD],
    "token_ids": [[7] * len(row) for row in GOOD],
    "advantages": GOOD,
    "entropy": [[1.0] * len(row) for row in GOOD],
    "current_log_probs": GOOD,
    "rewards": [1.0] * 4,
    "weight_versions": [[3] * len(row) for row in GOOD],
    "prompt_length": [7.0] * 4,
    "weight_digest_rollout": ["a"] * 4,
    "weight_digest_train": ["a"] * 4,
}
TYPES = {"response_mask": pa.list_(pa.int8()), "token_ids": pa.list_(pa.int64()), "rewards": pa.float64()}
TYPES |= {"weight_versions": pa.list_(pa.int64()), "prompt_length": pa.float64()}
TYPES |= dict.fromkeys(("weight_digest_rollout", "weight_digest_train"), pa.string())


def spoilt(change, row=2):
    """Return good columns with one value of one row changed."""
    columns = {"rollout_log_probs": GOOD, "old_log_probs": GOOD} | FILLED
    for name, value in change.items():
        columns[name] = [value if i == row else good for i, good in enumerate(columns[name])]
    return {name: pa.array(values, TYPES.get(name, FLOATS)) for name, values in columns.items()}


@pytest.mark.parametrize("tokens", [1, 1_000_000])
@pytest.mark.parametrize(("change", "says"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_by_its_place_or_left_out_and_counted(tmp_path, change, says, tokens):
    path = write(tmp_path / "dump.parquet", **spoilt(change))
    error = refusal(path, batch_tokens=tokens)
    assert error.message.startswith(f"{path}, row group 1, row 2, column ")
    assert says in error.message
    dump = open_dump([path], on_bad_row="skip", batch_tokens=tokens)
    batches = list(dump.batches())
    assert [name for batch in batches for name in batch.scalars["sequence_id"]] == [0, 1, 3]
    assert [x for batch in batches for x in batch.rollout.tolist()] == [-0.5, -1.0, -2.0, -0.125, -4.0]
    assert (dump.seen.skipped.count, str(dump.seen.skipped.examples[0])) == (1, error.message)


FIRST = {  # columns → what the error says: of several bad rows the first is named
    "a later token": (
        {"old_log_probs": [[-0.5, NAN], [-2.0], [NAN], [NAN, NAN]]},
        "row 0, column 'old_log_probs': token 1 is nan",
    ),
    "a later column": (
        {"rollout_log_probs": [GOOD[0], [NAN], *GOOD[2:]], "old_log_probs": [[NAN, NAN], *GOOD[1:]]},
        "row 0, column 'old_log_probs': token 0 is nan",
    ),
    "by its own name": (
        {"rollout_log_probs": None, "logprobs": [[-1.0, INF], *GOOD[1:]]},
        "column 'logprobs': token 1 is inf",
    ),
    "nothing but masked": ({"response_mask": [[0] * len(row) for row in GOOD]}, "no token is left in 4 rows"),
    "no token": (
        dict.fromkeys(("rollout_log_probs", "old_log_probs"), pa.array([[], []], FLOATS)),
        "no token is left in 2 rows",
    ),
    "no row": ({"rollout_log_probs": [], "old_log_probs": []}, "the dump is empty: it has no row"),
}


@pytest.mark.parametrize(("columns", "says"), FIRST.values(), ids=FIRST)
def test_what_is_wrong_is_said_at_once(tmp_path, columns, says):
    path = write(tmp_path / "a.parquet", **columns)
    assert says in refusal(path).message
    with pytest.raises(DumpError):  # no batch without tokens comes first
        next(open_dump([path], batch_tokens=1).batches())


def test_five_skipped_rows_are_described_and_where_all_are_it_is_an_error(tmp_path):
    change = {"rollout_log_probs": [0.5], "old_log_probs": [NAN], "rewards": NAN}
    dump = open_dump([write(tmp_path / "a.parquet", **spoilt(change))], on_bad_row="skip")
    list(dump.batches())
    assert (dump.seen.skipped.count, len(dump.seen.skipped.examples)) == (1, 1), "two faults are one row"
    old = [[NAN]] * 19 + [[-1.0]]
    path = write(tmp_path / "a.parquet", rollout_log_probs=[[-1.0]] * 20, old_log_probs=old)
    dump = open_dump([path], on_bad_row="skip")
    assert sum(batch.sequences for batch in dump.batches()) == 1
    assert dump.seen.skipped.count == 19
    assert [f"row {i}" in example for i, example in enumerate(dump.seen.skipped.examples)] == [True] * 5
    path = write(tmp_path / "a.parquet", old_log_probs=[[NAN] * len(row) for row in GOOD])
    message = refusal(path, on_bad_row="skip").message
    assert "every row was skipped, all 4; the first: " in message
    assert "row 0, column 'old_log_probs': token 0 is nan" in message


def test_the_file_with_the_bad_row_is_named_among_several(tmp_path):
    paths = [write(tmp_path / f"{i}.parquet", **spoilt({"rewards": NAN} if i else {})) for i in range(2)]
    assert refusal(*paths).message.startswith(f"{paths[1]}, row group 1, row 2,")


# --- files


def test_a_missing_file_is_named_with_its_neighbours(tmp_path):
    write(tmp_path / "step_100.parquet")
    error = refusal(str(tmp_path / "step_10.parquet"))
    assert "step_10.parquet: no such file or directory" in error.message
    assert "did you mean step_100.parquet?" in error.hint


@pytest.mark.parametrize("source", ["", "*.parquet", "none*/**", "**.parquet"])
def test_a_place_without_parquet_files_is_refused(tmp_path, source):
    assert "no file is there that can be read" in refusal(f"{tmp_path}/{source}").message
    assert "no dump was named" in refusal().message


def good_bytes(tmp_path, **options):
    rng = np.random.default_rng(0)  # rounded: a codec stores noise as it is and would not notice
    columns = {
        name: list(-rng.exponential(size=(400, 20)).round(1))
        for name in ("rollout_log_probs", "old_log_probs")
    }
    path = tmp_path / "good" / "a.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=200, use_dictionary=False, **options)
    return path.read_bytes(), pq.read_metadata(path)


def with_broken_footer(data):
    """Write a Parquet file whose footer is noise of the right length."""
    (length,) = struct.unpack("<I", data[-8:-4])
    return data[: -8 - length] + b"\xff" * length + data[-8:]


BAD_FILES = {
    "empty": (lambda data: b"", "the file is empty (0 bytes)"),
    "text": (lambda data: b'{"rollout_log_probs": [-1.0]}\n', "not a Parquet file"),
    "truncated": (lambda data: data[: len(data) // 2], "the file is truncated"),
    "a footer of noise": (with_broken_footer, "the Parquet footer is corrupt"),
}


@pytest.mark.parametrize(("spoil", "says"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_does_not_open_is_refused(tmp_path, spoil, says):
    data, _ = good_bytes(tmp_path)
    path = tmp_path / "bad.parquet"
    path.write_bytes(spoil(data))
    assert refusal(str(path)).message.startswith(f"{path}: {says}")


@pytest.mark.parametrize(
    "options", [{"compression": "zstd"}, {"compression": "none", "write_page_checksum": True}]
)
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_corruption_inside_a_page_is_found_and_placed(tmp_path, options, on_bad_row):
    data, metadata = good_bytes(tmp_path, **options)
    chunk = metadata.row_group(1).column(1)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    path = tmp_path / "bad.parquet"
    path.write_bytes(
        data[:middle] + bytes(b ^ 0xFF for b in data[middle : middle + 64]) + data[middle + 64 :]
    )
    error = refusal(str(path), on_bad_row=on_bad_row)
    assert error.message.startswith(
        f"{path}, row group 1, from row 200 on, column 'old_log_probs': the data cannot be read"
    )


def test_a_file_that_may_not_be_read_or_vanishes_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet")
    dump = open_dump([path])
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
    with pytest.raises(DumpError, match="cannot be opened"):
        list(dump.batches())

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pyarrow.OSFile", denied)
    assert refusal(str(tmp_path / "b.parquet")).message.endswith(
        "cannot be opened ([Errno 13] Permission denied)"
    )


# --- columns and types


COLUMNS = {  # columns of the file, --columns, --group-by → what is said, and to do
    "no rollout": (
        {"rollout_log_probs": None, "prompt": ["p"] * 4},
        {},
        "no column holds rollout_log_probs",
        "name it with --columns rollout=…; the columns are old_log_probs, prompt",
    ),
    "no policy at all": (
        {"rollout_log_probs": None, "old_log_probs": None, "prompt": ["p"] * 4},
        {},
        "no column holds rollout_log_probs, and none old_log_probs or current_log_probs",
        "name them with --columns rollout=…,old=…; the columns are ",
    ),
    "no trainer": (
        {"old_log_probs": None},
        {},
        "no column holds old_log_probs or current_log_probs",
        "the columns are rollout",
    ),
    "two names": (
        {},
        {"rollout": "old_logprob", "old": "zzz"},
        "there are no columns 'old_logprob' and 'zzz'",
        "did you mean old_log_probs",
    ),
    "a nested name": (
        {"data": [{"logprobs": [0.0]}] * 4},
        {"rollout": "data.logprobs"},
        "there is no column 'data.logprobs'",
        "is nested, and --columns takes names of the top level only: write its fields there (logprobs)",
    ),
    "two candidates": (
        {"rollout_log_probs": None, "logprobs": GOOD, "inference_logprobs": GOOD},
        {},
        "inference_logprobs and logprobs can each be the rollout",
        "--columns rollout=inference_logprobs or --columns rollout=logprobs",
    ),
    "an unknown part": ({}, {"rolout": "x"}, "no part is called 'rolout'", "did you mean rollout"),
    "a part unlike any": ({}, {"zzz": "x"}, "no part is called 'zzz'", "the parts are rollout_log_probs,"),
    "a missing column": (
        {},
        {"old": "old_logprob"},
        "there is no column 'old_logprob'",
        "did you mean old_log_probs",
    ),
    "a column unlike any": (
        {},
        {"old": "zzz"},
        "there is no column 'zzz'",
        "the columns are rollout_log_probs,",
    ),
    "one column twice": (
        {},
        {"old": "old_log_probs", "current": "old_log_probs"},
        "'old_log_probs' is given two parts",
        "a column of its own",
    ),
    "a group that is not there": (
        {"host": ["x"] * 4},
        "hots",
        "--group-by: there is no column 'hots'",
        "did you mean host?",
    ),
    "a group of lists": (
        {"pairs": [[1, 2]] * 4},
        "pairs",
        "column 'pairs' holds list<element: int64>",
        "group by",
    ),
}


@pytest.mark.parametrize(("made", "given", "says", "hint"), COLUMNS.values(), ids=COLUMNS)
def test_columns_that_cannot_be_meant_are_refused_with_a_way(tmp_path, made, given, says, hint):
    how = {"group_by": [given]} if isinstance(given, str) else {"columns": given}
    error = refusal(write(tmp_path / "a.parquet", **made), **how)
    assert says in error.message
    assert hint in error.hint


@pytest.mark.parametrize("long", [False, True], ids=["list", "long"])
def test_a_canonical_name_beside_an_alias_is_ambiguous_in_every_column(tmp_path, long):
    logs = [-1.0] * 4 if long else GOOD
    columns = {"rollout_log_probs": logs, "old_log_probs": logs} | (
        {"sequence_id": [0, 0, 1, 1]} if long else {}
    )
    for one in roles.TABLE:
        for alias in (name for name in one.called(long)[1:] if name != "mask"):
            kind = int if one.stored not in (pa.float32(), pa.float64(), pa.string()) else float
            listed = one.holds in ("tokens", "list") and not (long and one.holds == "tokens")
            values = [[kind(1)] * len(row) for row in GOOD] if listed else [kind(i // 2) for i in range(4)]
            values = (
                logs
                if one.name in roles.LOG_PROBS
                else [0, 1, 0, 1]
                if one.name == roles.POSITION
                else values
            )
            path = write(tmp_path / "a.parquet", **columns | {one.name: values, alias: values})
            error, word = refusal(path), one.short or one.name
            assert f"{one.name} and {alias} can each be the {word}" in error.message
            assert error.hint == f"say which: --columns {word}={one.name} or --columns {word}={alias}"


def test_an_alias_of_both_forms_is_one_candidate(tmp_path):
    more = {"rollout_log_probs": [-1.0], "old_log_probs": None, "old_logp": [-1.0], "sequence_id": [0]}
    assert open_dump([write(tmp_path / "a.parquet", **more)]).info.columns["old_log_probs"] == "old_logp"


STRUCTS = pa.list_(pa.struct([("logprob", pa.float32())]))
WRONG_TYPES = {
    "strings for log-probs": ("rollout_log_probs", pa.array([["-1"]] * 4), "a list of floats"),
    "one number for log-probs": ("rollout_log_probs", pa.array([-1.0] * 4), "a list of floats"),
    "integers for log-probs": ("old_log_probs", pa.array([[1]] * 4), "a list of floats"),
    "structs for log-probs": (
        "old_log_probs",
        pa.array([[{"logprob": -1.0}]] * 4, STRUCTS),
        "a list of floats",
    ),
    "lists of lists": ("old_log_probs", pa.array([[[-1.0]]] * 4), "a list of floats"),
    "text for log-probs": ("current_log_probs", pa.array(["[-1.0]"] * 4), "a list of floats"),
    "strings for a mask": ("response_mask", pa.array([["1"]] * 4), "a list of 0 and 1"),
    "one number for a mask": ("response_mask", pa.array([1] * 4), "a list of 0 and 1"),
    "floats for token ids": ("token_ids", pa.array([[1.0]] * 4), "a list of integers"),
    "a list for a reward": ("rewards", pa.array([[1.0]] * 4), "one number per row"),
    "text for a step": ("step", pa.array(["one"] * 4), "one number per row"),
    "text for advantages": ("advantages", pa.array(["1"] * 4), "one number or a list of numbers"),
    "text for versions": ("weight_versions", pa.array([["1"]] * 4), "a list of integers"),
    "one number for versions": ("weight_versions", pa.array([1] * 4), "a list of integers"),
    "floats for versions": ("weight_versions", pa.array([[1.0]] * 4), "a list of integers"),
    "text for a prompt's length": ("prompt_length", pa.array(["7"] * 4), "one number per row"),
    "a number for a reason": ("finish_reason", pa.array([1] * 4), "one text per row"),
    **{
        f"a boolean for {name}": (name, pa.array([True, False] * 2), "one number per row")
        for name in ("step", "policy_lag", "rollout_version", "train_version")
    },
    "a struct for a group": ("group_id", pa.array([{"a": 1}] * 4), "one value per row"),
}


@pytest.mark.parametrize(("name", "column", "needs"), WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_a_column_of_the_wrong_type_is_refused(tmp_path, name, column, needs):
    path = write(tmp_path / "a.parquet", **{name: column})
    error = refusal(path, on_bad_row="skip")
    assert error.message.startswith(f"{path}: column {name!r} holds ")
    assert needs in error.message


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    names = ["rollout_log_probs", "old_log_probs", "old_log_probs"]
    pq.write_table(pa.Table.from_arrays([pa.array(GOOD)] * 3, names=names), path)
    assert "two columns are called 'old_log_probs'" in refusal(str(path)).message


MIXED = {
    "missing in the second": ({"token_ids": [[1]] * 4}, {}, "token_ids"),
    "missing in the first": ({}, {"rewards": [1.0] * 4}, "rewards"),
    "number and string": ({"group_id": [1] * 4}, {"group_id": ["1"] * 4}, "group_id"),
    "another alias": ({"log_prob": GOOD}, {"current_log_probs": GOOD}, "current_log_probs"),
}


@pytest.mark.parametrize(("one", "two", "column"), MIXED.values(), ids=MIXED.keys())
def test_files_that_differ_are_both_named(tmp_path, one, two, column):
    paths = [write(tmp_path / "a.parquet", **one), write(tmp_path / "b.parquet", **two)]
    error = refusal(str(tmp_path), on_bad_row="skip")
    assert error.message.startswith(f"{paths[0]} and {paths[1]} differ: column {column!r}")


def test_every_file_is_looked_at(tmp_path):
    write(tmp_path / "a" / "a.parquet")
    second = write(tmp_path / "a" / "b.parquet", old_log_probs=[[-1]] * 4)
    says = f"{second}: column 'old_log_probs' holds list<element: int64>"
    assert refusal(str(tmp_path / "a")).message.startswith(says)
    write(tmp_path / "b" / "step=1" / "a.parquet")
    write(tmp_path / "b" / "z.parquet")
    assert "differ: column 'step'" in refusal(str(tmp_path / "b")).message


@pytest.mark.parametrize("name", ["group_id", "sequence_id", "host"])
def test_text_that_is_not_utf8_is_refused(tmp_path, name):
    raw = pa.array([b"a", b"b", b"a", b"\xff\xfe"])
    for column in (raw, pa.Array.from_buffers(pa.string(), 4, raw.buffers())):
        path = write(tmp_path / "a.parquet", **{name: column})
        error = refusal(path, group_by=["host"] if name == "host" else [])
        assert error.message == f"{path}, row group 1, row 3, column {name!r}: the text is not UTF-8"
