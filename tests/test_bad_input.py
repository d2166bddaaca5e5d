"""Bad input: what is wrong, where, and what to do about it."""

import math
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
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


def test_a_row_with_two_faults_is_skipped_once(tmp_path):
    change = {"rollout_log_probs": [0.5], "old_log_probs": [NAN], "rewards": NAN}
    dump = open_dump([write(tmp_path / "a.parquet", **spoilt(change))], on_bad_row="skip")
    list(dump.batches())
    assert (dump.seen.skipped.count, len(dump.seen.skipped.examples)) == (1, 1)


FIRST = [  # of several bad ones
    ({"old_log_probs": [[-0.5, NAN], [-2.0], [NAN], [NAN, NAN]]}, "token 1 is nan"),
    (
        {"rollout_log_probs": [GOOD[0], [NAN], *GOOD[2:]], "old_log_probs": [[NAN, NAN], *GOOD[1:]]},
        "token 0 is nan",
    ),
]


@pytest.mark.parametrize(("bad", "says"), FIRST, ids=["tokens", "columns"])
def test_the_error_names_the_first_bad_row_whatever_its_column_and_its_first_bad_token(tmp_path, bad, says):
    message = refusal(write(tmp_path / "a.parquet", **bad)).message
    assert f"row group 0, row 0, column 'old_log_probs': {says}" in message


def test_five_examples_are_kept_however_many_rows_are_skipped(tmp_path):
    rollout = [[-1.0]] * 20
    path = write(tmp_path / "a.parquet", rollout_log_probs=rollout, old_log_probs=[[NAN]] * 19 + [[-1.0]])
    dump = open_dump([path], on_bad_row="skip")
    (batch,) = dump.batches()
    assert batch.sequences == 1
    assert dump.seen.skipped.count == 19
    assert [f"row {i}" in example for i, example in enumerate(dump.seen.skipped.examples)] == [True] * 5


def test_when_every_row_is_skipped_the_first_reason_is_told(tmp_path):
    path = write(tmp_path / "a.parquet", old_log_probs=[[NAN] * len(row) for row in GOOD])
    message = refusal(path, on_bad_row="skip").message
    assert "every row was skipped, all 4" in message
    assert "row 0, column 'old_log_probs': token 0 is nan" in message


def test_the_file_with_the_bad_row_is_named_among_several(tmp_path):
    paths = [
        write(tmp_path / "a.parquet", **spoilt({})),
        write(tmp_path / "b.parquet", **spoilt({"rewards": NAN})),
    ]
    assert refusal(*paths).message.startswith(f"{paths[1]}, row group 1, row 2,")


def test_the_column_is_named_as_the_file_names_it(tmp_path):
    path = write(tmp_path / "a.parquet", rollout_log_probs=None, logprobs=[[-1.0, INF], *GOOD[1:]])
    assert "column 'logprobs': token 1 is inf" in refusal(path).message


def test_a_rollout_column_of_the_wrong_sign_is_guessed_at(tmp_path):
    path = write(tmp_path / "a.parquet", rollout_log_probs=[[-x for x in row] for row in GOOD])
    assert "negate" in refusal(path).hint


def test_a_dump_without_a_token_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", response_mask=[[0] * len(row) for row in GOOD])
    error = refusal(path)
    assert "no token is left in 4 rows" in error.message
    with pytest.raises(DumpError):  # at once: no batch without tokens comes first
        next(open_dump([path], batch_tokens=1).batches())
    assert "'response_mask' excludes every token" in error.hint
    empty = pa.array([[], []], FLOATS)
    error = refusal(write(tmp_path / "b.parquet", rollout_log_probs=empty, old_log_probs=empty))
    assert "no token is left in 2 rows" in error.message


# --- files


def test_a_missing_file_is_named_with_its_neighbours(tmp_path):
    write(tmp_path / "step_100.parquet")
    error = refusal(str(tmp_path / "step_10.parquet"))
    assert "step_10.parquet: no such file or directory" in error.message
    assert "did you mean step_100.parquet?" in error.hint


def test_no_source_at_all_is_refused():
    assert "no dump was named" in refusal().message


@pytest.mark.parametrize("source", ["", "*.parquet", "none*/**", "**.parquet"])
def test_a_place_without_parquet_files_is_refused(tmp_path, source):
    assert "no file is there that can be read" in refusal(f"{tmp_path}/{source}").message


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


@pytest.mark.parametrize(("name", "code"), [("step", 2), ("part", 0)])
def test_a_footer_whose_columns_lose_their_nulls_does_not_end_the_process(tmp_path, name, code):
    """Its size statistics no longer fit: a column that is read is refused, another is not."""
    logs = {column: [[-1.0, -2.0]] * 100 for column in ("rollout_log_probs", "old_log_probs")}
    table = pa.table(logs | {"step": [1, None] * 50, "other": [{"part": 1}] * 100})
    pq.write_table(table, path := tmp_path / "d.parquet")
    data = bytearray(path.read_bytes())
    at = data.index(name.encode(), len(data) - 8 - struct.unpack("<I", data[-8:-4])[0])
    assert data[at - 4 : at] == b"\x25\x02\x18\x04"  # optional, a name of four letters
    data[at - 3] = 0  # required
    path.write_bytes(data)
    command = [sys.executable, "-m", "offpol_diag", "doctor", str(path), "-q"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr
    assert ("column 'step': the data cannot be read" in ran.stderr) is (code == 2)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", denied)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", denied)
    assert refusal(path).message == f"{path}: cannot be opened (Permission denied)"


@pytest.mark.parametrize("change", ["vanishes", "is replaced"])
def test_a_file_that_changes_between_opening_and_reading_is_an_error_of_ours(tmp_path, change):
    path = write(tmp_path / "a.parquet")
    dump = open_dump([path])
    (tmp_path / "a.parquet").unlink()
    if change == "is replaced":
        write(tmp_path / "a.parquet", rollout_log_probs=GOOD[:1], old_log_probs=GOOD[:1])
    with pytest.raises(DumpError, match="cannot be opened" if change == "vanishes" else "was changed while"):
        list(dump.batches())


def test_a_dump_without_rows_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", rollout_log_probs=[], old_log_probs=[])
    assert refusal(path).message == f"{path}: the dump is empty: it has no row"


# --- columns and types


def test_a_missing_rollout_column_is_told_with_the_columns_there_are(tmp_path):
    error = refusal(write(tmp_path / "a.parquet", rollout_log_probs=None, prompt=["p"] * 4))
    assert "no column holds rollout_log_probs" in error.message
    assert "--columns rollout=…" in error.hint
    assert "old_log_probs, prompt" in error.hint


def test_every_missing_column_is_named_at_once(tmp_path):
    error = refusal(
        write(tmp_path / "a.parquet", rollout_log_probs=None, old_log_probs=None, prompt=["p"] * 4)
    )
    assert "no column holds rollout_log_probs, and none old_log_probs or current_log_probs" in error.message
    assert error.hint.startswith("name them with --columns rollout=…,old=…; the columns are ")


def test_every_name_that_no_column_has_is_named_at_once(tmp_path):
    path = write(tmp_path / "a.parquet")
    error = refusal(path, columns={"rollout": "old_logprob", "old": "zzz"})
    assert error.message == f"{path}: there are no columns 'old_logprob' and 'zzz'"
    assert error.hint.startswith("did you mean old_log_probs")


def test_a_column_inside_another_is_said_to_be_nested(tmp_path):
    path = write(tmp_path / "a.parquet", data=[{"logprobs": [0.0]}] * 4)
    error = refusal(path, columns={"rollout": "data.logprobs"})
    assert error.message == f"{path}: there is no column 'data.logprobs'"
    assert error.hint == (
        "'data' is nested, and --columns takes names of the top level only: write its fields there (logprobs)"
    )


def test_a_dump_without_any_train_column_is_refused(tmp_path):
    error = refusal(write(tmp_path / "a.parquet", old_log_probs=None))
    assert "no column holds old_log_probs or current_log_probs" in error.message
    assert "the columns are rollout_log_probs" in error.hint


def test_two_candidates_are_settled_by_the_line_in_the_hint(tmp_path):
    path = write(tmp_path / "a.parquet", rollout_log_probs=None, logprobs=GOOD, inference_logprobs=GOOD)
    error = refusal(path)
    assert "inference_logprobs and logprobs can each be the rollout" in error.message
    assert "--columns rollout=inference_logprobs or --columns rollout=logprobs" in error.hint
    assert open_dump([path], columns={"rollout": "logprobs"}).info.columns["rollout_log_probs"] == "logprobs"


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


OVERRIDES = {
    "an unknown part": ({"rolout": "x"}, "no part is called 'rolout'", "did you mean rollout"),
    "a part unlike any": ({"zzz": "x"}, "no part is called 'zzz'", "the parts are rollout_log_probs,"),
    "a missing column": (
        {"old": "old_logprob"},
        "there is no column 'old_logprob'",
        "did you mean old_log_probs",
    ),
    "a column unlike any": ({"old": "zzz"}, "there is no column 'zzz'", "the columns are rollout_log_probs,"),
    "one column twice": (
        {"old": "old_log_probs", "current": "old_log_probs"},
        "'old_log_probs' is given two parts",
        "a column of its own",
    ),
}


@pytest.mark.parametrize(("columns", "says", "hint"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_an_override_that_cannot_be_meant_is_refused(tmp_path, columns, says, hint):
    error = refusal(write(tmp_path / "a.parquet"), columns=columns)
    assert says in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("extra", "says", "hint"),
    [
        ("hots", "--group-by: there is no column 'hots'", "did you mean host?"),
        ("pairs", "column 'pairs' holds list<element: int64>", ""),
    ],
)
def test_a_group_by_column_must_be_there_and_hold_one_value_per_row(tmp_path, extra, says, hint):
    path = write(tmp_path / "a.parquet", host=["x"] * 4, pairs=[[1, 2]] * 4)
    error = refusal(path, group_by=[extra])
    assert says in error.message
    assert hint in error.hint
    assert "--columns" not in error.hint


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
    "a struct for a group": ("group_id", pa.array([{"a": 1}] * 4), "one value per row"),
}


@pytest.mark.parametrize(("name", "column", "needs"), WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_a_column_of_the_wrong_type_is_refused(tmp_path, name, column, needs):
    path = write(tmp_path / "a.parquet", **{name: column})
    error = refusal(path, on_bad_row="skip")
    assert error.message.startswith(f"{path}: column {name!r} holds ")
    assert needs in error.message


@pytest.mark.parametrize("name", ["step", "policy_lag", "rollout_version", "train_version"])
def test_a_count_that_is_a_boolean_is_refused(tmp_path, name):
    column = pa.array([True, False] * 2)
    pq.write_table(
        pa.table({"rollout_log_probs": GOOD, "old_log_probs": GOOD, name: column}), tmp_path / "a.parquet"
    )
    with pytest.raises(DumpError, match=f"column '{name}' holds .*bool.*, and one number per row is needed"):
        open_dump([str(tmp_path / "a.parquet")])


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


def test_a_wrong_type_is_found_in_the_second_file_too(tmp_path):
    write(tmp_path / "a.parquet")
    second = write(tmp_path / "b.parquet", old_log_probs=[[-1]] * 4)
    assert refusal(str(tmp_path)).message.startswith(
        f"{second}: column 'old_log_probs' holds list<element: int64>"
    )


def test_a_partition_that_only_some_files_have_is_refused(tmp_path):
    write(tmp_path / "step=1" / "a.parquet")
    write(tmp_path / "z.parquet")
    assert "differ: column 'step'" in refusal(str(tmp_path)).message


@pytest.mark.parametrize("name", ["group_id", "sequence_id", "host"])
@pytest.mark.parametrize("encoded", ["plain", "bytes"])
def test_text_that_is_not_utf8_is_refused(tmp_path, name, encoded):
    raw = pa.array([b"a", b"b", b"a", b"\xff\xfe"])
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    forms = {"plain": text, "bytes": raw}
    path = write(tmp_path / "a.parquet", **{name: forms[encoded]})
    error = refusal(path, group_by=["host"] if name == "host" else [])
    assert error.message == f"{path}, row group 1, row 3, column {name!r}: the text is not UTF-8"


def test_dictionary_text_that_is_not_utf8_is_refused(tmp_path):
    raw = pa.array([b"a", b"\xff\xfe"])
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    path = write(
        tmp_path / "a.parquet", group_id=pa.DictionaryArray.from_arrays(pa.array([0, 0, 1, 1]), text)
    )
    message = refusal(path).message  # pyarrow refuses the whole dictionary, so the row is not known
    assert message.startswith(
        f"{path}, row group 0, from row 0 on, column 'group_id': the data cannot be read"
    )
    assert "UTF8" in message


# --- dumps that only look bad


def test_weights_that_all_vanish_have_no_largest_share(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.parquet", rollout_log_probs=[[], [-1.0]], old_log_probs=[[], [-1e308]])
    ran = CliRunner().invoke(
        app, ["analyze", path, "--presets", "token_is", "--no-html", "--json", "a.json", "-q"]
    )
    assert "Traceback" not in ran.stderr
    assert "ZeroDivisionError" not in ran.stderr
