"""From files to packed batches: types, names, files, keys, the form of a row per token, how a dump is cut."""

from __future__ import annotations

import json
import math
import os
import pickle
import weakref
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offpol_diag.dump import convert as forms
from offpol_diag.dump import schema
from offpol_diag.dump.batch import INCREMENT, mix
from offpol_diag.dump.check import TOLERANCE, Seen
from offpol_diag.dump.read import open_dump
from offpol_diag.dump.sources import find
from offpol_diag.errors import DumpError
from tests.factory import ALL, OLD, ROLLOUT, plain, read, refusal, write
from tests.reading import analyze
from tests.test_laws import different

NAN, SKIP = math.nan, {"on_bad_row": "skip"}
MASK = [[1, 0, 1], [1], [], [0, 1]]
LIST_TYPES = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def both(rows: Any) -> dict[str, Any]:
    """Make the same log-probs of both policies."""
    return {"rollout_log_probs": rows, "old_log_probs": rows}


# ---------------------------------------------------------------- what is packed


@pytest.mark.parametrize("kind", LIST_TYPES, ids=lambda kind: kind.__name__)
def test_every_type_of_lists_numbers_and_masks_gives_the_same_batch(tmp_path, kind):
    expected = plain(read(write(tmp_path / "a.parquet", response_mask=MASK)))
    wide, masks = pa.float64(), (pa.bool_(), pa.int16(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32())
    for width, dtype in [
        *((wide, dtype) for dtype in masks),
        (pa.float16(), pa.int8()),
        (pa.float32(), pa.int8()),
    ]:
        rollout, old = (pa.array(rows, kind(width)) for rows in (ROLLOUT, OLD))
        mask = pa.array([[bool(m) if dtype == pa.bool_() else m for m in row] for row in MASK], kind(dtype))
        path = write(tmp_path / "b.parquet", rollout_log_probs=rollout, old_log_probs=old, response_mask=mask)
        batch = read(path, batch_tokens=1)
        assert (batch.rollout.dtype, plain(batch)) == (np.float64, expected)


def test_padded_columns_give_the_same_batch_as_ragged_ones(tmp_path):
    def padded(rows, filler, dtype):
        return pa.array([row + [filler] * (3 - len(row)) for row in rows], pa.list_(dtype, 3))

    logs = {
        "rollout_log_probs": padded(ROLLOUT, NAN, pa.float32()),
        "old_log_probs": padded(OLD, None, pa.float32()),
    }
    masked = write(tmp_path / "a.parquet", **logs, response_mask=padded(MASK, 0, pa.int32()))
    expected = plain(read(write(tmp_path / "b.parquet", response_mask=MASK)))
    for tokens in (1, ALL):
        assert plain(read(masked, batch_tokens=tokens)) == expected | {"masked": [1, 2, 3, 2]}


def test_junk_under_a_zero_of_the_mask_does_no_harm_and_a_dump_can_be_read_again(tmp_path):
    junk = {
        "rollout_log_probs": [[-1.0, NAN, None, math.inf, 7.0, -9999.0]],
        "old_log_probs": [[-2.0, None, -math.inf, NAN, 9.0, 0.0]],
        "token_ids": [[5, None, 0, 0, 0, 0]],
    }
    dump = open_dump([write(tmp_path / "a.parquet", **junk, response_mask=[[1, 0, 0, 0, 0, 0]])])
    for _ in range(2):
        (batch,) = dump.batches()
        assert (batch.rollout.tolist(), batch.old.tolist(), batch.token_ids.tolist()) == ([-1.0], [-2.0], [5])
        assert (dump.notes, dump.seen.above) == ((), {})


def test_optional_columns_follow_the_mask_and_one_advantage_reaches_all_tokens(tmp_path):
    more = {"current_log_probs": OLD, "response_mask": MASK, "token_ids": [[11, 12, 13], [21], [], [31, 32]]}
    more |= {"entropy": [[0.5, 1.0, 1.5], [2.0], [], [2.5, 3.0]]}
    lists = [[1.0, 2.0, 3.0], [4.0], [], [5.0, 6.0]]
    batch = read(write(tmp_path / "a.parquet", **more, advantages=lists))
    assert batch.current.tolist() == batch.old.tolist()
    assert (batch.token_ids.tolist(), batch.token_ids.dtype) == ([11, 13, 21, 32], np.int64)
    assert batch.entropy.tolist() == [0.5, 1.5, 2.0, 3.0]
    assert batch.advantages.tolist() == [1.0, 3.0, 4.0, 6.0]
    values = [1, -2, 3, -4]
    batch = read(write(tmp_path / "b.parquet", response_mask=MASK, advantages=values, rewards=values))
    assert (batch.advantages.tolist(), batch.rewards.tolist()) == ([1, 1, -2, -4], values)
    assert batch.advantages.dtype == batch.rewards.dtype == np.float64


def oracle(rollout, mask):
    """Pack rows in plain Python."""
    pairs = zip(rollout, mask, strict=True)
    kept = [[(p, x) for p, (x, m) in enumerate(zip(xs, ms, strict=True)) if m] for xs, ms in pairs]
    flat = [pair for row in kept for pair in row]
    cu_seqlens, cu_runs = [0], []
    for row in kept:
        begin = cu_seqlens[-1]
        cu_runs += [begin + i for i, (p, _) in enumerate(row) if i == 0 or row[i - 1][0] != p - 1]
        cu_seqlens.append(begin + len(row))
    return {
        "rollout": [x for _, x in flat],
        "position": [p for p, _ in flat],
        "cu_seqlens": cu_seqlens,
        "cu_runs": [*cu_runs, len(flat)],
        "masked": [len(ms) - len(row) for ms, row in zip(mask, kept, strict=True)],
    }


rows = st.lists(
    st.lists(st.tuples(st.floats(-1e4, 0.0), st.booleans()), max_size=8), min_size=1, max_size=8
).filter(lambda rows: any(keep for row in rows for _, keep in row))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows, tokens=st.integers(1, 40), group=st.integers(1, 8), kind=st.sampled_from(LIST_TYPES))
def test_packing_is_what_the_oracle_says(tmp_path, rows, tokens, group, kind):
    rollout = [[x for x, _ in row] for row in rows]
    mask = [[keep for _, keep in row] for row in rows]
    logs = both(pa.array(rollout, kind(pa.float64())))
    path = write(tmp_path / "a.parquet", None, group, response_mask=pa.array(mask, kind(pa.bool_())), **logs)
    found = plain(read(path, batch_tokens=tokens))
    expected = oracle(rollout, mask)
    assert {name: found[name] for name in expected} == expected
    assert found["old"] == expected["rollout"]


# ---------------------------------------------------------------- scalars and groups


def test_scalars_reach_the_batch_as_lists_and_sequences_without_a_name_are_numbered(tmp_path):
    given = {
        "sequence_id": ["a", "b", "c", None],
        "global_step": [1, 1, 2, 2],
        "rewards": [0.0, 1.0, 0.0, 1.0],
        "group_id": ["p", "q", "p", "é"],
        "host": ["x", "y", "x", None],
        "unused": [1, 2, 3, 4],  # small: the diagnosis looks for groups that stand out
        "prompt": ["long " * 99 + str(i) for i in range(4)],  # too long for that
    }
    host, group = pa.array(given["host"]).dictionary_encode(), pa.array(given["group_id"]).cast(pa.binary())
    path = write(tmp_path / "a.parquet", **given | {"host": host, "group_id": group})
    batch = read(path, group_by=["host", "global_step", "step", "rewards"])
    del given["prompt"]
    assert batch.scalars == given | {"step": given["global_step"]}
    paths = [write(tmp_path / name) for name in ("b.parquet", "c.parquet")]
    assert read(*paths).scalars["sequence_id"] == list(range(8))


def test_policy_lag_is_the_difference_of_versions_where_it_is_missing(tmp_path):
    versions = {"train_version": [5, 5, 5, None], "rollout_version": [5, 3, None, 1]}
    batch = read(write(tmp_path / "a.parquet", **versions), group_by=["policy_lag"])
    assert batch.scalars["policy_lag"] == [0, 2, None, None]
    own = read(write(tmp_path / "b.parquet", policy_lag=[9] * 4, **versions))
    assert own.scalars["policy_lag"] == [9] * 4


@pytest.mark.parametrize("ids", [["p", "q", "p", "r"], [7.0, 8.0, 7.0, 9.5], [-7, 2**40, -7, None]], ids=str)
def test_sequences_of_a_group_share_a_key_and_others_do_not(tmp_path, ids):
    for column in (pa.array(ids), pa.array(ids).dictionary_encode()):
        key = read(write(tmp_path / "a.parquet", group_id=column)).key.tolist()
        assert key[0] == key[2]
        assert len(set(key)) == 3


def test_without_groups_equal_responses_have_one_key_and_the_two_zeros_are_equal(tmp_path):
    for rollout in ([[-1.0, -2.0], [-2.0, -1.0], [-1.0], [-1.0, -2.0]], [[-0.0], [-1.0], [-2.0], [0.0]]):
        key = read(write(tmp_path / "a.parquet", **both(rollout))).key.tolist()
        assert key[0] == key[3]
        assert len(set(key)) == 3


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.uint64(), pa.float64()])
def test_a_group_has_one_key_in_whatever_numbers_it_is_written(tmp_path, kind):
    """It is splitmix64 of the id modulo 2⁶⁴; for 0 and 1234567 as Vigna's splitmix64.c has it."""
    first = mix(np.array([0, 1234567], np.uint64) + INCREMENT).tolist()
    assert first == [0xE220A8397B1DCDAF, 6457827717110365317]
    ids = [3, 100, 2**64 - 1, 2**63] if kind == pa.uint64() else [3, 100, -1, 0]
    expected = mix(np.array([one % 2**64 for one in ids], np.uint64) + INCREMENT).view(np.int64)
    assert read(write(tmp_path / "a.parquet", group_id=pa.array(ids, kind))).key.tolist() == expected.tolist()


TEXT = pa.array([b"a", b"", b"\xc3\xa9", None], pa.binary())
TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
ODD = [1, 2, -3, None]
SCALARS = {
    **{name: pa.array([1, 2, 3, None], name) for name in ("int8", "uint16", "int32", "int64", "uint64")},
    **{f"float{bits}": pa.array(np.array([1.0, 2.5, NAN, NAN], f"float{bits}")) for bits in (16, 32, 64)},
    **{name: TEXT.cast(getattr(pa, name)()) for name in TEXTS},
    "bool": pa.array([True, False, True, None]),
    "null": pa.nulls(4),
    "decimal": pa.array([Decimal("1.50"), Decimal(-2), Decimal(3), None], pa.decimal128(5, 2)),
    "date": pa.array(ODD, pa.date32()),
    "duration": pa.array(ODD, pa.duration("s")),
    "timestamp": pa.array(ODD, pa.timestamp("us")),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a":1}', "[1]", "{", None])),
}
SCALARS |= {f"dictionary of {name}": SCALARS[name].dictionary_encode() for name in ("string", "int64")}
SHOWN = {"timestamp": "1970-01-01 00:00:00.000001", "decimal": "1.50", "json": '{"a":1}', "binary": "a"}


@pytest.mark.parametrize("name", SCALARS)
def test_every_scalar_type_is_a_label_of_which_null_and_nan_are_none(tmp_path, name):
    for part in ("other", schema.GROUP, schema.SEQUENCE):
        batch = read(write(tmp_path / "a.parquet", **{part: SCALARS[name]}), group_by=[part])
        labels = batch.scalars[part]
        assert all(isinstance(label, bool | int | float | str | None) and label == label for label in labels)
        assert labels[3] is None
        assert labels[0] == SHOWN.get(name, labels[0])
        assert name == "null" or batch.key[0] != batch.key[1]


def test_a_report_groups_by_columns_of_every_type_at_once(tmp_path):
    columns = {f"c{i}": SCALARS[name] for i, name in enumerate(SCALARS) if name != "null"}
    columns |= {"odd": ["nan", "inf", "1e999", "7"]}
    found = analyze(write(tmp_path / "a.parquet", **columns), presets=["token_is"], group_by=[*columns])
    assert all(found.at(name) for name in columns)
    assert [place.key for place in found.at("odd")] == ["7", "1e999", "inf", "nan"], "which are text"


LABELS = ("group_id", "step", "rollout_version", "train_version", "policy_lag")
LABELLED = [both([-1.0, -0.5]) | dict.fromkeys(LABELS, label) for label in (1.0, NAN, NAN, 2.0)]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_label_that_is_nan_is_null_in_every_column_and_form(tmp_path, ending):
    write(tmp_path / "a.parquet", pa.Table.from_pylist(LABELLED))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, LABELLED)))
    (batch,) = forms.open_dump([str(tmp_path / f"a.{ending}")]).batches()
    for name in LABELS:
        assert batch.scalars[name] == [1, None, None, 2], name
    assert len(set(batch.key.tolist())) == 3, "equal responses without a group are one"


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["step:1.parquet", "s3:a.parquet", b"a\xff.parquet", "run:1/a.parquet"])
def test_a_file_of_any_name_is_read(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = os.fsdecode(name)
    Path(write(tmp_path / "x" / "a.parquet")).rename(write(tmp_path / Path(path)) if "/" in path else path)
    for source in (path, "*/*.parquet" if "/" in path else "*.parquet", str(tmp_path)):
        assert read(source).sequences == 4


def test_directories_and_globs_are_searched_each_file_once_and_hidden_ones_left_out(tmp_path, monkeypatch):
    def names(*sources):
        return [str(file) for file in find(sources)]

    monkeypatch.chdir(tmp_path)
    for name in ("b", "step_10", "step_9", "sub/c", "_tmp/x", ".x", "_y", "a[1]"):
        write(tmp_path / "d" / f"{name}.parquet")
    (tmp_path / "d" / "notes.txt").write_text("no dump")
    Path("link.parquet").symlink_to("d/b.parquet")
    found = [f"d/{name}.parquet" for name in ("a[1]", "b", "step_9", "step_10", "sub/c")]
    assert names("d") == names("d/**/*.parquet") == found
    assert names("d/*.parquet") == found[:4]
    assert names(f"{tmp_path}/d/s*") == [f"{tmp_path}/{name}" for name in (*found[2:4], "d/sub/c.parquet")]
    assert names("d/b.parquet", "./d", str(tmp_path / "d"), "link.parquet") == [
        "d/b.parquet",
        found[0],
        *found[2:],
    ]


def test_hive_partitions_are_columns(tmp_path):
    for step, own in ((3, [1, 1, 1, 1]), (10, None)):
        write(tmp_path / "d" / f"step={step}" / "engine=v%201" / "part-0.parquet", rewards=own)
    batch = read(str(tmp_path / "d" / "step=10"), group_by=["engine"])
    assert (batch.scalars["step"], batch.scalars["engine"]) == ([10] * 4, ["v 1"] * 4)
    assert read(f"{tmp_path}/d/step=3/*/*.parquet").scalars["step"] == [3] * 4
    for env in ("7", "maths", "1" * 100, "__HIVE_DEFAULT_PARTITION__"):
        write(tmp_path / "e" / f"env={env}" / "a.parquet")
    found = read(str(tmp_path / "e"), group_by=["env"]).scalars["env"]
    assert set(found) == {"7", "maths", "1" * 100, None}
    write(tmp_path / "f" / "step=3" / "a.parquet", step=[1, 1, 1, 1])
    assert read(str(tmp_path / "f")).scalars["step"] == [1] * 4, "a column of the file goes first"


def test_files_may_differ_in_types_be_empty_or_null_and_have_columns_nobody_reads(tmp_path):
    more = {"step": [1, 2, 3, 4], "group_id": ["p"] * 4}
    write(tmp_path / "a.parquet", junk=["x"] * 4, **more)
    rollout, old = (pa.array(logs, pa.large_list(pa.float32())) for logs in (ROLLOUT, OLD))
    write(tmp_path / "b.parquet", rollout_log_probs=rollout, old_log_probs=old, **more)
    nothing = pa.array([[], []], pa.list_(pa.null()))
    write(tmp_path / "c.parquet", step=pa.nulls(2), group_id=pa.nulls(2), **both(nothing))
    write(tmp_path / "d.parquet", step=[], group_id=[], **both([]))
    batch = read(str(tmp_path))
    assert batch.rollout[:6].tolist() == batch.rollout[6:].tolist()
    assert batch.scalars["step"] == [1, 2, 3, 4, 1, 2, 3, 4, None, None]
    assert batch.scalars["group_id"] == ["p"] * 8 + [None] * 2


def test_names_of_trainers_are_known_and_columns_that_are_named_go_first(tmp_path):
    for words in ("rollout_logprobs prev_logprobs loss_mask", "logprobs old_per_token_logps completion_mask"):
        rollout, old, mask = words.split()
        columns = {"rollout_log_probs": None, "old_log_probs": None, rollout: ROLLOUT, old: OLD, mask: MASK}
        found = open_dump([write(tmp_path / "a.parquet", **columns)]).info.columns
        assert found == {"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": mask}
    path = write(tmp_path / "a.parquet", mine=OLD)
    for word in ("rollout", "rollout_log_probs"):
        batch = read(path, columns={word: "mine"})
        assert batch.rollout.tolist() == batch.old.tolist()
    path = write(tmp_path / "b.parquet", old_log_probs=None, current_log_probs=OLD)
    assert read(path, columns={"old": "current_log_probs"}).current is None, "it plays no other part"


# ---------------------------------------------------------------- log-probs above 0


def test_log_probs_of_the_trainer_above_zero_are_told_and_read_beyond_rounding(tmp_path):
    old = [[-1.0, 0.5, -1.0], [-1.0], [], [-1.0, 0.25]]
    dump = open_dump([write(tmp_path / "a.parquet", old_log_probs=old)], batch_tokens=1)
    assert sum(batch.tokens for batch in dump.batches()) == 6
    assert dump.seen.above == {"old_log_probs": 2}
    fine = np.nextafter(np.float32(TOLERANCE), np.float32(0))  # TOLERANCE in float32 is a little above it
    for value, bad in ((TOLERANCE, False), (np.float32(TOLERANCE), True), (fine, False)):
        kind = pa.list_(pa.from_numpy_dtype(np.asarray(value).dtype))
        path = write(tmp_path / "a.parquet", **both(pa.array([[value, value], [-1.0]], kind)))
        if bad:
            assert "token 0 is" in refusal(path).message
        else:
            assert read(path).rollout.tolist() == [value, value, -1.0]


# ---------------------------------------------------------------- a row per token

TOKENS = {
    **{name: name[:-1] for name in ("rollout_log_probs", "old_log_probs", "current_log_probs", "advantages")},
    "response_mask": "loss_mask",
    "token_ids": "token_id",
    "entropy": "entropy",
    "weight_versions": "weight_version",
}


def sequences(count: int = 40) -> dict[str, Any]:
    """Make columns of a dump of `count` sequences of 1 to 30 tokens, a list per row."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 31, count)
    return {
        **{
            name: [-rng.exponential(1.0, n) for n in lengths] for name in TOKENS if name.endswith("log_probs")
        },
        **{name: [rng.random(n) for n in lengths] for name in ("entropy", "advantages")},
        "token_ids": [rng.integers(0, 99, n) for n in lengths],
        "response_mask": [(rng.integers(0, 4, n) > 0).astype(np.int8) for n in lengths],
        "weight_versions": [5 + np.arange(n) // 4 for n in lengths],
        "prompt_length": np.arange(count),
        "finish_reason": ["length" if i % 3 else "stop" for i in range(count)],
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
def test_a_row_per_token_is_the_list_form_however_the_dump_is_cut(tmp_path, group, tokens):
    columns = sequences()
    whole = plain(read(write(tmp_path / "a.parquet", pa.table(columns)), group_by=["host"]))
    long = write(tmp_path / "b.parquet", lengthened(columns), group)
    assert plain(read(long, group_by=["host"], batch_tokens=tokens)) == whole


def test_numbers_of_a_row_per_token_are_those_of_the_list_form(tmp_path):
    columns, how = sequences(), {"presets": "token_is,seq_mis", "group_by": ["host"], "device": "cpu"}
    one = write(tmp_path / "a.parquet", pa.table(columns))
    two = write(tmp_path / "b.parquet", lengthened(columns), 50)
    assert different(analyze([one], **how), analyze([two], **how)) == {}


def by_token(**more: Any) -> pa.Table:
    logs = {"rollout_log_prob": [-1.0, -0.5, -2.0, -0.25], "old_log_prob": [-1.0, -0.5, -2.0, -0.25]}
    return pa.table(logs | {"sequence_id": [0, 0, 1, 1]} | more)


def test_positions_may_jump_where_a_turn_ends(tmp_path):
    batch = read(write(tmp_path / "a.parquet", by_token(position=[3, 7, 0, 1])))
    assert (batch.position.tolist(), batch.cu_runs.tolist()) == ([0, 4, 0, 1], [0, 1, 2, 4])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"sequence_id": [0, 1, 0, 1]}, "row 2: the sequence '0' comes back after another one"),
        ({"sequence_id": [0, None, 1, 1]}, "row 1, column 'sequence_id': it is null"),
        ({"position": [1, 0, 0, 1]}, "row 1: positions do not rise within a sequence"),
        ({"rollout_log_prob": [-1.0, -0.5, -2.0, NAN]}, "row 2, column 'rollout_log_prob': token 1 is nan"),
    ],
)
def test_rows_of_tokens_that_are_no_sequences_are_refused(tmp_path, more, says):
    assert says in refusal(write(tmp_path / "a.parquet", by_token(**more))).message
    for name in "bc":
        write(tmp_path / "d" / f"{name}.parquet", by_token())
    assert "c.parquet, row 0: the sequence '0' comes back" in refusal(str(tmp_path / "d")).message


# ---------------------------------------------------------------- how the dump is cut


def many(seed=0, rows=60):
    """Make the columns of a dump of `rows` sequences of 0 to 40 tokens."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 41, rows)
    return {
        **both([-generator.exponential(1.0, n) for n in lengths]),
        "response_mask": [generator.integers(0, 2, n) for n in lengths],
        "advantages": [generator.normal(size=n) for n in lengths],
        "rewards": generator.normal(size=rows),
        "step": np.arange(rows) // 10,
    }


@pytest.mark.parametrize("tokens", [1, 50, 333, ALL])
@pytest.mark.parametrize(("files", "group"), [(1, 1), (1, 60), (4, 7)])
def test_how_the_dump_is_cut_changes_nothing(tmp_path, files, group, tokens):
    columns = many()
    for i, (begin, end) in enumerate(pairwise(np.linspace(0, 60, files + 1).astype(int))):
        piece = {name: column[begin:end] for name, column in columns.items()}
        write(tmp_path / "cut" / f"{i}.parquet", None, group, **piece)
    whole = read(write(tmp_path / "whole.parquet", **columns))
    dump, seen = open_dump([str(tmp_path / "cut")], batch_tokens=tokens), []
    assert plain(read(str(tmp_path / "cut"), batch_tokens=tokens)) == plain(whole)
    assert len(list(dump.batches(seen.append))) == 1 or tokens < ALL, "small row groups make one batch"
    assert sum(seen) == dump.rows == 60


LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.mark.parametrize("tokens", [1, 8, 17, 1000])
@pytest.mark.parametrize("group", [1000, 1, 7])
def test_batches_are_whole_sequences_and_no_larger_than_asked(tmp_path, monkeypatch, group, tokens):
    path = write(tmp_path / "a.parquet", None, group, **both([[-0.5] * n for n in LENGTHS]))
    found = [batch.lengths.tolist() for batch in open_dump([path], batch_tokens=tokens).batches()]
    assert len(found) == 1 or tokens < 1000
    assert [n for batch in found for n in batch] == LENGTHS
    assert all(sum(batch) <= tokens or len(batch) == 1 for batch in found)
    monkeypatch.setattr("offpol_diag.dump.read.MOST_ROWS", 4)
    found = [batch.sequences for batch in open_dump([path], batch_tokens=tokens).batches()]
    assert (sum(found), max(found) <= 4) == (20, True)


@pytest.mark.parametrize("group", [1000, 8], ids=["one row group", "many"])
def test_a_batch_is_freed_before_the_next_is_read(tmp_path, group):
    path, made, alive = write(tmp_path / "a.parquet", None, group, **both([[-0.5] * 10] * 80)), [], []
    for batch in open_dump([path], batch_tokens=80).batches():
        made.append(weakref.ref(batch))
        alive.append(sum(one() is not None for one in made))
        del batch
    assert (len(made), max(alive)) == (10, 1)


def of_old(*first):
    """Make a sequence of eight tokens for each value of `old`."""
    old = [[one] * 8 for one in first]
    return both([[-0.5] * 8] * len(old)) | {"old_log_probs": old}


PARTS = {  # columns of each file, rows of a row group, options, what must be said of the dump
    "row groups of all sizes": ([many(0, 100), many(1, 100)], 30, {"batch_tokens": 20}, ""),
    "a bad row": ([of_old(*[-0.5] * 20, NAN, *[-0.5] * 19)], 8, {}, "row group 2, row 20,"),
    "a bad row, skipped": ([of_old(*[-0.5] * 40, NAN, *[-0.5] * 23)], 64, SKIP, "row group 0, row 40,"),
    "nothing but bad rows": ([of_old(*[NAN] * 40)], 8, SKIP, "every row was skipped, all 40"),
    "a sign wrong in few": ([of_old(*[-0.5] * 20, *[0.5] * 12)], 4, {}, "'old_log_probs': 96"),
    "a sign wrong in most": ([of_old(*[-0.5] * 4, *[0.5] * 28)], 4, {}, "wrong sign"),
}


def outcome(dump, size=0):
    """Return what a pass finds, or its error; by ranges of a size, each read as in another process."""
    parts = [pickle.loads(pickle.dumps(part)) for part in dump.shards(size)] if size else [dump]
    try:
        found = [one for part in parts for batch in part.batches() for one in split(batch)]
        if size:
            dump.seen = Seen()
            for part in parts:
                dump.seen.add(part.seen)
            dump.judge()
    except DumpError as error:
        return [], error.message, error.hint
    return found, dump.notes, dump.seen, dump.info


def split(batch):
    """Return every sequence of a batch as plain values."""
    cuts = pairwise(batch.cu_seqlens)
    lists = [[getattr(batch, x)[a:b].tolist() for x in ("rollout", "old", "position")] for a, b in cuts]
    scalars = [{name: values[i] for name, values in batch.scalars.items()} for i in range(batch.sequences)]
    return list(zip(lists, scalars, batch.key.tolist(), batch.masked.tolist(), strict=True))


@pytest.mark.parametrize("what", PARTS)
def test_a_dump_in_ranges_is_the_dump(tmp_path, what):
    tables, group, options, says = PARTS[what]
    for i, table in enumerate(tables):
        write(tmp_path / f"part={i}" / f"{i}.parquet", None, group, **table)
    expected = outcome(open_dump([str(tmp_path)], **options))
    assert says in str(expected[1:3])
    for size in (1, 1500, 1 << 30):
        assert outcome(open_dump([str(tmp_path)], **options), size) == expected, size


def test_ranges_are_whole_row_groups_not_too_many_and_read_from_another_folder(tmp_path, monkeypatch):
    for i in range(3):
        write(tmp_path / "d" / f"{i}.parquet", None, 8, **many(i, 40))
    monkeypatch.chdir(tmp_path)
    dump = open_dump(["d"])
    parts = dump.shards(1)
    assert (len(parts), len(dump.shards(1 << 30))) == (15, 1)
    monkeypatch.chdir("/")
    assert [str(file.path) for file, _ in parts[5].groups] == ["d/1.parquet"]
    assert sum(batch.sequences for batch in parts[5].batches()) == parts[5].rows == 8
    monkeypatch.setattr("offpol_diag.dump.read.MOST_SHARDS", 10)
    assert 5 < len(dump.shards(1)) <= 10
