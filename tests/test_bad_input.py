"""Bad input: what is wrong, where, and what to do about it."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.dump.convert import open_dump
from offpol_diag.errors import DumpError
from tests import factory
from tests.factory import refusal

NAN, INF = math.nan, math.inf
FLOATS = pa.list_(pa.float64())
GOOD = [[-0.5, -1.0], [-2.0], [-0.25], [-0.125, -4.0]]
ROLLOUT, OLD, MASK = "rollout_log_probs", "old_log_probs", "response_mask"


def write(path, **columns):
    """Write a dump of `columns` on top of good rollout and old log-probs, two rows in a row group."""
    return factory.write(path, None, 2, **{ROLLOUT: GOOD, OLD: GOOD} | columns)


# --- bad rows: each case is a change to row 2 (row group 1) of good columns

BAD_ROWS = [
    ({OLD: [-1.0, -1.0]}, "column 'old_log_probs': it holds 2 values and rollout_log_probs holds 1"),
    ({MASK: []}, "column 'response_mask': it holds 0 values"),
    ({"advantages": [1.0, 2.0]}, "column 'advantages': it holds 2 values"),
    ({"token_ids": [1, 2]}, "column 'token_ids': it holds 2 values"),
    ({OLD: None}, "column 'old_log_probs': there is null where a list belongs"),
    ({ROLLOUT: None}, "'rollout_log_probs': there is null where a list"),
    ({MASK: None}, "'response_mask': there is null where a list belongs"),
    ({OLD: [None]}, "'old_log_probs': token 0 is null, and a token that counts needs a finite value"),
    ({"token_ids": [None]}, "'token_ids': token 0 is null"),
    ({MASK: [None]}, "'response_mask': token 0 is null, and a mask is 0 or 1"),
    ({MASK: [2]}, "column 'response_mask': token 0 is 2, and a mask is 0 or 1"),
    ({MASK: [-1]}, "column 'response_mask': token 0 is -1"),
    ({ROLLOUT: [NAN]}, "column 'rollout_log_probs': token 0 is nan"),
    ({OLD: [NAN]}, "column 'old_log_probs': token 0 is nan"),
    ({"current_log_probs": [NAN]}, "column 'current_log_probs': token 0 is nan"),
    ({ROLLOUT: [-INF]}, "column 'rollout_log_probs': token 0 is -inf"),
    ({OLD: [INF]}, "column 'old_log_probs': token 0 is inf"),
    ({"advantages": [NAN]}, "column 'advantages': token 0 is nan"),
    ({"entropy": [NAN]}, "column 'entropy': token 0 is nan"),
    ({ROLLOUT: [0.5]}, "token 0 is 0.5, and a log-probability is at most 0"),
    ({"weight_versions": [-2]}, "token 0 is -2, and a version is at least 0"),
    ({"prompt_length": -1}, "column 'prompt_length': it is -1, and a length is needed"),
    ({"weight_digest_train": None}, "'weight_digest_train': it is null, and weight_digest_rollout is not"),
    ({"weight_digest_rollout": None}, "'weight_digest_rollout': it is null, and weight_digest_train is not"),
    ({"rewards": None}, "column 'rewards': it is nan, and a finite number is needed"),
    ({"step": INF}, "column 'step': it is inf, and a number between -2^63 and 2^63 is needed"),
    ({"policy_lag": 2.0**63}, "column 'policy_lag': it is 9.22337e+18, and a number between"),
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
    "step": [1.0, NAN, 1.0, None],
    "policy_lag": [1.0] * 4,
    "weight_digest_rollout": ["a"] * 4,
    "weight_digest_train": ["a"] * 4,
}
TYPES = {MASK: pa.list_(pa.int8())} | dict.fromkeys(("token_ids", "weight_versions"), pa.list_(pa.int64()))
TYPES |= dict.fromkeys(("rewards", "prompt_length", "step", "policy_lag"), pa.float64())
TYPES |= dict.fromkeys(("weight_digest_rollout", "weight_digest_train"), pa.string())


def spoilt(change, row=2):
    """Return good columns with one value of one row changed."""
    columns = {ROLLOUT: GOOD, OLD: GOOD} | FILLED
    for name, value in change.items():
        columns[name] = [value if i == row else good for i, good in enumerate(columns[name])]
    return {name: pa.array(values, TYPES.get(name, FLOATS)) for name, values in columns.items()}


@pytest.mark.parametrize("tokens", [1, 1_000_000])
@pytest.mark.parametrize(("change", "says"), BAD_ROWS, ids=str)
def test_a_bad_row_is_named_by_its_place_or_left_out_and_counted(tmp_path, change, says, tokens):
    path = write(tmp_path / "dump.parquet", **spoilt(change))
    error = refusal(path, batch_tokens=tokens)
    assert error.message.startswith(f"{path}, row group 1, row 2, column ")
    assert says in error.message
    dump = open_dump([path], on_bad_row="skip", batch_tokens=tokens)
    batches = list(dump.batches())
    assert [name for batch in batches for name in batch.scalars["sequence_id"]] == [0, 1, 3]
    assert [x for batch in batches for x in batch.rollout.tolist()] == [-0.5, -1.0, -2.0, -0.125, -4.0]
    assert (dump.seen.skipped.count, dump.seen.skipped.examples) == (1, [error.message])


def test_versions_of_a_response_may_be_unknown_and_do_not_fall(tmp_path):
    given = [[-1, 3], [2], [5], [4, -1]]
    path = write(tmp_path / "a.parquet", weight_versions=given)
    assert factory.read(path).weight_versions.tolist() == [-1, 3, 2, 5, 4, -1]
    path = write(tmp_path / "a.parquet", weight_versions=[*given[:3], [4, 3]])
    assert "row 3, column 'weight_versions': token 1 is 3, and the tokens before" in refusal(path).message
    logs = [[-0.5] * 3]
    path = factory.write(
        tmp_path / "b.parquet", None, **{ROLLOUT: logs, OLD: logs}, weight_versions=[[5, -1, 4]]
    )
    assert "token 2 is 4, and the tokens before it are of a later version" in refusal(path).message


NOTHING = dict.fromkeys((ROLLOUT, OLD), pa.array([[], []], FLOATS))
FIRST = [  # columns, what the error says: of several bad rows the first is named
    ({OLD: [[-0.5, NAN], [-2.0], [NAN], [NAN, NAN]]}, "row 0, column 'old_log_probs': token 1 is nan"),
    ({ROLLOUT: [GOOD[0], [NAN], *GOOD[2:]], OLD: [[NAN, NAN], *GOOD[1:]]}, "row 0, column 'old_log_probs'"),
    ({ROLLOUT: None, "logprobs": [[-1.0, INF], *GOOD[1:]]}, "column 'logprobs': token 1 is inf"),
    ({MASK: [[0] * len(row) for row in GOOD]}, "no token is left in 4 rows"),
    (NOTHING, "no token is left in 2 rows"),
    ({ROLLOUT: [], OLD: []}, "the dump is empty: it has no row"),
]


@pytest.mark.parametrize(("columns", "says"), FIRST)
def test_what_is_wrong_is_said_at_once(tmp_path, columns, says):
    path = write(tmp_path / "a.parquet", **columns)
    assert says in refusal(path).message
    with pytest.raises(DumpError):  # no batch without tokens comes first
        next(open_dump([path], batch_tokens=1).batches())


def test_five_skipped_rows_are_described_and_where_all_are_it_is_an_error(tmp_path):
    change = {ROLLOUT: [0.5], OLD: [NAN], "rewards": NAN}
    dump = open_dump([write(tmp_path / "a.parquet", **spoilt(change))], on_bad_row="skip")
    list(dump.batches())
    assert (dump.seen.skipped.count, len(dump.seen.skipped.examples)) == (1, 1), "two faults are one row"
    odd = {ROLLOUT: [GOOD[0], [NAN], *GOOD[2:]], OLD: [[NAN, NAN], *GOOD[1:]]}
    dump = open_dump([write(tmp_path / "a.parquet", **odd)], on_bad_row="skip")
    list(dump.batches())
    assert [x.partition(", column")[0][-5:] for x in dump.seen.skipped.examples] == ["row 0", "row 1"]
    old = [[NAN]] * 19 + [[-1.0]]
    path = write(tmp_path / "a.parquet", rollout_log_probs=[[-1.0]] * 20, old_log_probs=old)
    for tokens in (1, 1000):
        dump = open_dump([path], on_bad_row="skip", batch_tokens=tokens)
        assert sum(batch.sequences for batch in dump.batches()) == 1
        assert dump.seen.skipped.count == 19
        assert [f"row {i}," in example for i, example in enumerate(dump.seen.skipped.examples)] == [True] * 5
    path = write(tmp_path / "a.parquet", old_log_probs=[[NAN] * len(row) for row in GOOD])
    message = refusal(path, on_bad_row="skip").message
    assert "every row was skipped, all 4; the first: " in message
    assert "row 0, column 'old_log_probs': token 0 is nan" in message


# --- files


def test_a_missing_file_is_named_with_its_neighbours(tmp_path):
    write(tmp_path / "step_100.parquet")
    error = refusal(str(tmp_path / "step_10.parquet"))
    assert "step_10.parquet: no such file or directory" in error.message
    assert "did you mean step_100.parquet?" in error.hint
    assert "no dump was named" in refusal().message


@pytest.mark.parametrize("source", ["", "*.parquet", "none*/**", "**.parquet"])
def test_a_place_without_parquet_files_is_refused(tmp_path, source):
    assert "no file is there that can be read" in refusal(f"{tmp_path}/{source}").message


def good_bytes(tmp_path, **options):
    """Return a file of two row groups, of rounded numbers: a codec stores noise as it is."""
    logs = -np.random.default_rng(0).exponential(size=(400, 20)).round(1)
    path = tmp_path / "good.bin"
    made = pa.table({ROLLOUT: [*logs], OLD: [*logs]})
    pq.write_table(made, path, row_group_size=200, use_dictionary=False, **options)
    return path.read_bytes(), pq.read_metadata(path)


BAD_FILES = {
    "text": (lambda data: b'{"rollout_log_probs": [-1.0]}\n', "Parquet magic bytes not found"),
    "truncated": (lambda data: data[: len(data) // 2], "Parquet magic bytes not found"),
    "a footer of noise": (lambda data: data[:-200] + b"\xff" * 192 + data[-8:], "Couldn't deserialize"),
}


@pytest.mark.parametrize(("spoil", "says"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_does_not_open_is_refused_in_arrows_words(tmp_path, spoil, says):
    path = tmp_path / "bad.parquet"
    path.write_bytes(spoil(good_bytes(tmp_path)[0]))
    assert refusal(str(path)).message.startswith(f"{path}: cannot be read as Parquet ({says}")


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize(
    "how", [{"compression": "zstd"}, {"compression": "none", "write_page_checksum": True}]
)
def test_corruption_inside_a_page_is_found_and_placed(tmp_path, how, on_bad_row):
    data, metadata = good_bytes(tmp_path, **how)
    chunk, path = metadata.row_group(1).column(1), tmp_path / "bad.parquet"
    at = chunk.data_page_offset + chunk.total_compressed_size // 2
    path.write_bytes(data[:at] + bytes(b ^ 0xFF for b in data[at : at + 64]) + data[at + 64 :])
    place = f"{path}, row group 1, from row 200 on, column 'old_log_probs': the data cannot be read"
    assert refusal(str(path), on_bad_row=on_bad_row).message.startswith(place)


def test_a_file_that_may_not_be_read_or_vanishes_is_refused(tmp_path, monkeypatch):
    dump = open_dump([write(tmp_path / "a.parquet")])
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
    with pytest.raises(DumpError, match=r"a\.parquet: cannot be read as Parquet"):
        list(dump.batches())

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pyarrow.OSFile", denied)
    assert refusal(str(tmp_path / "b.parquet")).message.endswith("([Errno 13] Permission denied)")


# --- columns and types


LACKS = "no column holds "
COLUMNS = [  # columns of the file, --columns or --group-by, what is said, and to do
    (
        {ROLLOUT: None, "prompt": ["p"] * 4},
        {},
        f"{LACKS}rollout_log_probs",
        "name it with --columns rollout=…; the columns are old_log_probs, prompt",
    ),
    (
        {ROLLOUT: None, OLD: None, "prompt": ["p"] * 4},
        {},
        f"{LACKS}rollout_log_probs, and none old_log_probs or current_log_probs",
        "name them with --columns rollout=…,old=…; the columns are ",
    ),
    ({OLD: None}, {}, f"{LACKS}old_log_probs or current_log_probs", "the columns are rollout"),
    (
        {},
        {"rollout": "old_logprob", "old": "zzz"},
        "no columns 'old_logprob' and 'zzz'",
        "did you mean old_log",
    ),
    (
        {"data": [{"logprobs": [0.0]}] * 4},
        {"rollout": "data.logprobs"},
        "there is no column 'data.logprobs'",
        "is nested, and --columns takes names of the top level only: write its fields there (logprobs)",
    ),
    (
        {ROLLOUT: None, "logprobs": GOOD, "inference_logprobs": GOOD},
        {},
        "inference_logprobs and logprobs can each be the rollout",
        "--columns rollout=inference_logprobs or --columns rollout=logprobs",
    ),
    (
        {"logprobs": GOOD},
        {},
        "rollout_log_probs and logprobs can each be the rollout",
        "say which: --columns rollout=rollout_log_probs or --columns rollout=logprobs",
    ),
    (
        {
            "output_versions": [[1] * len(row) for row in GOOD],
            "weight_versions": [[1] * len(row) for row in GOOD],
        },
        {},
        "weight_versions and output_versions can each be the ",
        "--columns weight_versions=output_versions",
    ),
    ({}, {"rolout": "x"}, "no part is called 'rolout'", "did you mean rollout"),
    ({}, {"zzz": "x"}, "no part is called 'zzz'", "the parts are rollout_log_probs,"),
    ({}, {"old": "old_logprob"}, "there is no column 'old_logprob'", "did you mean old_log_probs"),
    ({}, {"old": "zzz"}, "there is no column 'zzz'", "the columns are rollout_log_probs,"),
    ({}, {"old": OLD, "current": OLD}, "'old_log_probs' is given two parts", "a column of its own"),
    ({"host": ["x"] * 4}, "hots", "--group-by: there is no column 'hots'", "did you mean host?"),
    ({"pairs": [[1, 2]] * 4}, "pairs", "column 'pairs' holds list<element: int64>", "group by"),
]


@pytest.mark.parametrize(("made", "given", "says", "hint"), COLUMNS, ids=str)
def test_columns_that_cannot_be_meant_are_refused_with_a_way(tmp_path, made, given, says, hint):
    how = {"group_by": [given]} if isinstance(given, str) else {"columns": given}
    error = refusal(write(tmp_path / "a.parquet", **made), **how)
    assert says in error.message
    assert hint in error.hint


def test_an_alias_of_both_forms_is_one_candidate(tmp_path):
    more = {ROLLOUT: [-1.0], OLD: None, "old_logp": [-1.0], "sequence_id": [0]}
    assert open_dump([write(tmp_path / "a.parquet", **more)]).info.columns[OLD] == "old_logp"


WRONG_TYPES = [
    (ROLLOUT, [["-1"]] * 4, "a list of floats"),
    (ROLLOUT, [-1.0] * 4, "a list of floats"),
    (OLD, [[1]] * 4, "a list of floats"),
    (OLD, [[{"logprob": -1.0}]] * 4, "a list of floats"),
    (OLD, [[[-1.0]]] * 4, "a list of floats"),
    ("current_log_probs", ["[-1.0]"] * 4, "a list of floats"),
    (MASK, [["1"]] * 4, "a list of 0 and 1"),
    (MASK, [1] * 4, "a list of 0 and 1"),
    ("token_ids", [[1.0]] * 4, "a list of integers"),
    ("rewards", [[1.0]] * 4, "one number per row"),
    ("advantages", ["1"] * 4, "one number or a list of numbers"),
    ("weight_versions", [1] * 4, "a list of integers"),
    ("weight_versions", [[1.0]] * 4, "a list of integers"),
    ("step", ["one"] * 4, "one number per row"),
    ("policy_lag", [True, False] * 2, "one number per row"),
    ("prompt_length", ["7"] * 4, "one number per row"),
    ("finish_reason", [1] * 4, "one text per row"),
    ("group_id", [{"a": 1}] * 4, "one value per row"),
]


@pytest.mark.parametrize(("name", "column", "needs"), WRONG_TYPES, ids=str)
def test_a_column_of_the_wrong_type_is_refused(tmp_path, name, column, needs):
    path = write(tmp_path / "a.parquet", **{name: pa.array(column)})
    error = refusal(path, on_bad_row="skip")
    assert error.message.startswith(f"{path}: column {name!r} holds ")
    assert needs in error.message


def test_two_columns_of_one_name_are_refused_where_they_are_needed(tmp_path):
    for names, how in (((ROLLOUT, OLD, OLD), {}), ((ROLLOUT, OLD, "x", "x"), {"group_by": ["x"]})):
        path = str(tmp_path / "a.parquet")
        pq.write_table(pa.Table.from_arrays([pa.array(GOOD)] * len(names), names=names), path)
        assert f"two columns are called '{names[-1]}'" in refusal(path, **how).message
    assert factory.read(path).tokens == 6


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
        said = refusal(path, group_by=["host"] if name == "host" else []).message
        assert said.startswith(f"{path}, row group 1, rows 2 to 3, column {name!r}: ")
        assert "UTF8" in said
    assert factory.read(write(tmp_path / "b.parquet", host=column)).tokens == 6, "nobody asked for it"
