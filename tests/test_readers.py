"""From Parquet to packed batches: types, names, files, keys, and how batches are cut."""

import math
import weakref
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offpol_diag.dump.check import TOLERANCE
from offpol_diag.dump.hashes import INCREMENT, mix
from offpol_diag.dump.read import open_dump
from offpol_diag.dump.sources import find
from tests.factory import ALL, OLD, ROLLOUT, plain, read, refusal, write

FLOATS = pa.list_(pa.float64())
MASK = [[1, 0, 1], [1], [], [0, 1]]
LIST_TYPES = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def both(rows):
    """Make the same log-probs of both policies."""
    return {"rollout_log_probs": rows, "old_log_probs": rows}


# ---------------------------------------------------------------- what is packed


@pytest.mark.parametrize("kind", LIST_TYPES, ids=lambda kind: kind.__name__)
def test_every_type_of_lists_numbers_and_masks_gives_the_same_batch(tmp_path, kind):
    expected = plain(read(write(tmp_path / "a.parquet", response_mask=MASK)))
    wide, masks = pa.float64(), (pa.bool_(), pa.int16(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32())
    for width, dtype in [(wide, dtype) for dtype in masks] + [
        (width, pa.int8()) for width in (pa.float16(), pa.float32())
    ]:
        rollout, old = (pa.array(rows, kind(width)) for rows in (ROLLOUT, OLD))
        mask = pa.array([[bool(m) if dtype == pa.bool_() else m for m in row] for row in MASK], kind(dtype))
        path = write(tmp_path / "b.parquet", rollout_log_probs=rollout, old_log_probs=old, response_mask=mask)
        batch = read(path, batch_tokens=1)
        assert (batch.rollout.dtype, plain(batch)) == (np.float64, expected)


@pytest.mark.parametrize("tokens", [1, ALL])
def test_padded_columns_give_the_same_batch_as_ragged_ones(tmp_path, tokens):
    def padded(rows, filler, dtype):
        return pa.array([row + [filler] * (3 - len(row)) for row in rows], pa.list_(dtype, 3))

    logs = {
        "rollout_log_probs": padded(ROLLOUT, math.nan, pa.float32()),
        "old_log_probs": padded(OLD, None, pa.float32()),
    }
    masked = write(tmp_path / "a.parquet", **logs, response_mask=padded(MASK, 0, pa.int32()))
    found = plain(read(masked, batch_tokens=tokens))
    expected = plain(read(write(tmp_path / "b.parquet", response_mask=MASK)))
    assert (found.pop("masked"), len(expected.pop("masked"))) == ([1, 2, 3, 2], 4)
    assert found == expected
    assert open_dump([masked]).notes == ()
    assert "no response_mask" in open_dump([write(tmp_path / "c.parquet", **logs)]).notes[0]


def test_junk_under_a_zero_of_the_mask_does_no_harm(tmp_path):
    junk = {
        "rollout_log_probs": [[-1.0, math.nan, None, math.inf, 7.0, -9999.0]],
        "old_log_probs": [[-2.0, None, -math.inf, math.nan, 9.0, 0.0]],
        "token_ids": [[5, None, 0, 0, 0, 0]],
    }
    path = write(tmp_path / "a.parquet", **junk, response_mask=[[1, 0, 0, 0, 0, 0]])
    for on_bad_row in ("error", "skip"):
        dump = open_dump([path], on_bad_row=on_bad_row)
        (batch,) = dump.batches()
        assert (batch.rollout.tolist(), batch.old.tolist(), batch.token_ids.tolist()) == ([-1.0], [-2.0], [5])
        assert (dump.notes, dump.seen.skipped.count) == ((), 0)
    dump = open_dump([write(tmp_path / "b.parquet", rewards=[1.0, None, 0.0, 0.0])], on_bad_row="skip")
    one, two = ([plain(batch) for batch in dump.batches()] for _ in range(2))  # it can be read again
    assert (one, dump.seen.skipped.count) == (two, 1)


def test_optional_columns_follow_the_mask_and_one_advantage_reaches_all_tokens(tmp_path):
    more = {"current_log_probs": OLD, "response_mask": MASK, "token_ids": [[11, 12, 13], [21], [], [31, 32]]}
    more |= {"entropy": [[0.5, 1.0, 1.5], [2.0], [], [2.5, 3.0]]}
    lists = [[1.0, 2.0, 3.0], [4.0], [], [5.0, 6.0]]
    batch = read(write(tmp_path / "a.parquet", **more, advantages=lists))
    assert batch.current.tolist() == batch.old.tolist() == batch.policy("current").tolist()
    assert (batch.token_ids.tolist(), batch.token_ids.dtype) == ([11, 13, 21, 32], np.int64)
    assert batch.entropy.tolist() == [0.5, 1.5, 2.0, 3.0]
    assert batch.advantages.tolist() == [1.0, 3.0, 4.0, 6.0]
    for values in ([1.0, -2.0, 3.0, -4.0], [1, -2, 3, -4]):
        path = write(tmp_path / "b.parquet", response_mask=MASK, advantages=values, rewards=values)
        batch = read(path)
        assert (batch.advantages.tolist(), batch.rewards.tolist()) == ([1, 1, -2, -4], [1, -2, 3, -4])
        assert batch.advantages.dtype == batch.rewards.dtype == np.float64


def oracle(rollout, mask):
    """Pack rows in plain Python."""
    kept = [
        [(p, x) for p, (x, m) in enumerate(zip(xs, ms, strict=True)) if m]
        for xs, ms in zip(rollout, mask, strict=True)
    ]
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
    logs = {"rollout_log_probs": pa.array(rollout, kind(pa.float64())), "old_log_probs": rollout}
    path = write(tmp_path / "a.parquet", None, group, response_mask=pa.array(mask, kind(pa.bool_())), **logs)
    found = plain(read(path, batch_tokens=tokens))
    expected = oracle(rollout, mask)
    assert {name: found[name] for name in expected} == expected
    assert found["old"] == expected["rollout"]


# ---------------------------------------------------------------- scalars and groups


def test_scalars_reach_the_batch_as_host_lists_and_sequences_without_a_name_are_numbered(tmp_path):
    given = {
        "sequence_id": ["a", "b", "c", None],
        "global_step": [1, 1, 2, 2],
        "rewards": [0.0, 1.0, 0.0, 1.0],
        "group_id": ["p", "q", "p", "é"],
        "host": ["x", "y", "x", None],
        "unused": [1, 2, 3, 4],  # small: the diagnosis looks for groups that stand out
    }
    host, group = pa.array(given["host"]).dictionary_encode(), pa.array(given["group_id"]).cast(pa.binary())
    path = write(tmp_path / "a.parquet", **given | {"host": host, "group_id": group})
    batch = read(path, group_by=["host", "global_step", "step", "rewards"])
    assert batch.scalars == given | {"step": given["global_step"]}
    paths = [write(tmp_path / name) for name in ("b.parquet", "c.parquet")]
    assert read(*paths).scalars["sequence_id"] == list(range(8))


def test_policy_lag_is_the_difference_of_versions_where_it_is_missing(tmp_path):
    versions = {"train_version": [5, 5, 5, None], "rollout_version": [5, 3, None, 1]}
    path = write(tmp_path / "a.parquet", **versions)
    assert read(path, group_by=["policy_lag"]).scalars["policy_lag"] == [0, 2, None, None]
    assert (
        read(write(tmp_path / "b.parquet", policy_lag=[9] * 4, **versions)).scalars["policy_lag"] == [9] * 4
    )


@pytest.mark.parametrize("ids", [["p", "q", "p", "r"], [7.0, 8.0, 7.0, 9.5], [-7, 2**40, -7, None]], ids=str)
def test_sequences_of_a_group_share_a_key_and_others_do_not(tmp_path, ids):
    for column in (pa.array(ids), pa.array(ids).dictionary_encode()):
        key = read(write(tmp_path / "a.parquet", group_id=column)).key.tolist()
        assert key[0] == key[2]
        assert len(set(key)) == 3


def test_without_groups_equal_responses_have_one_key_wherever_they_lie_and_the_two_zeros_are_equal(tmp_path):
    for rollout in ([[-1.0, -2.0], [-2.0, -1.0], [-1.0], [-1.0, -2.0]], [[-0.0], [-1.0], [-2.0], [0.0]]):
        key = read(write(tmp_path / "a.parquet", **both(rollout))).key.tolist()
        assert key[0] == key[3]
        assert len(set(key)) == 3


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.uint64(), pa.float64()])
def test_a_group_has_one_key_in_whatever_numbers_it_is_written(tmp_path, kind):
    """It is splitmix64 of the id modulo 2⁶⁴; for 0 and 1234567 as Vigna's splitmix64.c has it."""
    assert mix(np.array([0, 1234567], np.uint64) + INCREMENT).tolist() == [
        0xE220A8397B1DCDAF,
        6457827717110365317,
    ]
    ids = [3, 100, 2**64 - 1, 2**63] if kind == pa.uint64() else [3, 100, -1, 0]
    expected = mix(np.array([one % 2**64 for one in ids], np.uint64) + INCREMENT).view(np.int64)
    assert read(write(tmp_path / "a.parquet", group_id=pa.array(ids, kind))).key.tolist() == expected.tolist()


# ---------------------------------------------------------------- how the dump is cut


def many(seed=0, rows=60):
    """Make the columns of a dump of `rows` sequences of 0 to 40 tokens."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 41, rows)
    ragged = [-generator.exponential(1.0, n) for n in lengths]
    return {
        "rollout_log_probs": ragged,
        "old_log_probs": [row * 1.01 for row in ragged],
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


def of_lengths(path, lengths, group):
    """Write a dump of sequences of such lengths."""
    rng = np.random.default_rng(0)
    return write(path, None, group, **both([(-rng.exponential(1.0, n)).astype(np.float32) for n in lengths]))


@pytest.mark.parametrize("tokens", [1, 8, 10, 17, 1000])
@pytest.mark.parametrize("group", [1000, 1, 7])
def test_batches_are_whole_sequences_and_no_larger_than_asked(tmp_path, group, tokens):
    path = of_lengths(tmp_path / "a.parquet", LENGTHS, group)
    found = [batch.lengths.tolist() for batch in open_dump([path], batch_tokens=tokens).batches()]
    assert len(found) == 1 or tokens < 1000
    assert [n for batch in found for n in batch] == LENGTHS
    assert all(sum(batch) <= tokens or len(batch) == 1 for batch in found)


@pytest.mark.parametrize("group", [1000, 8], ids=["one row group", "many"])
def test_a_batch_is_freed_before_the_next_is_read(tmp_path, group):
    path, made, alive = of_lengths(tmp_path / "a.parquet", [10] * 80, group), [], []
    for batch in open_dump([path], batch_tokens=80).batches():
        made.append(weakref.ref(batch))
        alive.append(sum(one() is not None for one in made))
        del batch
    assert (len(made), max(alive)) == (10, 1)


@pytest.mark.parametrize("group", [100, 7], ids=["one row group", "many that are joined"])
def test_a_batch_has_so_many_rows_at_most_however_few_tokens_they_have(tmp_path, monkeypatch, group):
    monkeypatch.setattr("offpol_diag.dump.read.MOST_ROWS", 10)
    path = write(tmp_path / "a.parquet", None, group, **both(pa.array([[], [-1.0]] * 50, FLOATS)))
    found = [batch.sequences for batch in open_dump([path]).batches()]
    assert (sum(found), max(found) <= 10) == (100, True)


def test_a_sequence_has_so_many_tokens_at_most(tmp_path):
    logs = pa.LargeListArray.from_arrays(
        pa.array([0, 5_000_000]), pa.repeat(pa.scalar(0.0, pa.float32()), 5_000_000)
    )
    said = refusal(write(tmp_path / "a.parquet", None, **both(logs))).message
    assert "holds 5000000 tokens, and a sequence has at most 4194304" in said


# ---------------------------------------------------------------- files


def test_directories_and_globs_are_searched_and_hidden_files_left_out(tmp_path, monkeypatch):
    def names(*sources):
        return [str(file) for file in find(sources)]

    monkeypatch.chdir(tmp_path)
    for name in ("b", "a", "sub/c", "_tmp/x", ".x", "_y", "a[1]"):
        write(tmp_path / "d" / f"{name}.parquet")
    (tmp_path / "d" / "notes.txt").write_text("no dump")
    found = ["d/a.parquet", "d/a[1].parquet", "d/b.parquet", "d/sub/c.parquet"]
    assert names("d") == names("d/**/*.parquet") == found
    assert names("d/*.parquet") == found[:3]
    assert names(f"{tmp_path}/d/s*") == [f"{tmp_path}/d/sub/c.parquet"]
    assert names("d/b.parquet", "d") == ["d/b.parquet", "d/a.parquet", "d/a[1].parquet", "d/sub/c.parquet"]
    monkeypatch.chdir(tmp_path / "d" / "sub")
    assert names("../b*.parquet") == ["../b.parquet"]


def test_hive_partitions_are_columns(tmp_path):
    for step, own in ((3, [1, 1, 1, 1]), (10, None)):
        write(tmp_path / "d" / f"step={step}" / "engine=v%201" / "part-0.parquet", rewards=own)
    batch = read(str(tmp_path / "d" / "step=10"), group_by=["engine"])
    assert (batch.scalars["step"], batch.scalars["engine"]) == ([10] * 4, ["v 1"] * 4)
    assert read(f"{tmp_path}/d/step=3/*/*.parquet").scalars["step"] == [3] * 4
    for env in ("7", "maths", "__HIVE_DEFAULT_PARTITION__"):
        write(tmp_path / "e" / f"env={env}" / "a.parquet")
    found = read(str(tmp_path / "e"), group_by=["env"]).scalars["env"]
    assert set(found) == {"7", "maths", None}, "integers only if all are"
    write(tmp_path / "f" / "step=3" / "a.parquet", step=[1, 1, 1, 1])
    assert read(str(tmp_path / "f")).scalars["step"] == [1] * 4, "a column of the file goes first"


def test_files_may_differ_in_types_be_empty_or_null_and_have_columns_nobody_reads(tmp_path):
    write(tmp_path / "a.parquet", junk=["x"] * 4, step=[1, 2, 3, 4], group_id=["p"] * 4)
    rollout, old = (pa.array(logs, pa.large_list(pa.float32())) for logs in (ROLLOUT, OLD))
    more = {"step": [1, 2, 3, 4], "group_id": ["p"] * 4}
    write(tmp_path / "b.parquet", rollout_log_probs=rollout, old_log_probs=old, **more)
    nothing = pa.array([[], []], pa.list_(pa.null()))
    write(tmp_path / "c.parquet", step=pa.nulls(2), group_id=pa.nulls(2), **both(nothing))
    write(tmp_path / "d.parquet", step=[], group_id=[], **both([]))
    batch = read(str(tmp_path))
    assert batch.rollout[:6].tolist() == batch.rollout[6:].tolist()
    assert batch.scalars["step"] == [1, 2, 3, 4, 1, 2, 3, 4, None, None]
    assert batch.scalars["group_id"] == ["p"] * 8 + [None] * 2


@pytest.mark.parametrize(
    "words", ["rollout_logprobs prev_logprobs loss_mask", "logprobs old_per_token_logps completion_mask"]
)
def test_a_trainers_names_are_known(tmp_path, words):
    rollout, old, mask = words.split()
    columns = {"rollout_log_probs": None, "old_log_probs": None, rollout: ROLLOUT, old: OLD, mask: MASK}
    found = open_dump([write(tmp_path / "a.parquet", **columns)]).info.columns
    assert found == {"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": mask}


def test_columns_that_are_named_go_before_all_others(tmp_path):
    path = write(tmp_path / "a.parquet", mine=OLD, pi=[1, 2, 3, 4], **{"pi.rollout": OLD})
    for word in ("rollout", "rollout_log_probs"):
        batch = read(path, columns={word: "mine"})
        assert batch.rollout.tolist() == batch.old.tolist()
    batch = read(path, columns={"rollout": "pi.rollout"}, group_by=["pi"])
    assert (batch.rollout[0], batch.scalars["pi"]) == (-0.75, [1, 2, 3, 4])
    path = write(tmp_path / "b.parquet", old_log_probs=None, current_log_probs=OLD)
    assert read(path, columns={"old": "current_log_probs"}).current is None, "it plays no other part"


# ---------------------------------------------------------------- what is said of the dump


def test_positive_train_log_probs_are_told_and_read(tmp_path):
    old = [[-1.0, 0.5, -1.0], [-1.0], [], [-1.0, 0.25]]
    dump = open_dump([write(tmp_path / "a.parquet", old_log_probs=old)], batch_tokens=1)
    assert sum(batch.tokens for batch in dump.batches()) == 6
    (note,) = dump.notes
    assert "2 of 6 tokens (33.33%) of 'old_log_probs'" in note
    assert "row group 0, row 0, column 'old_log_probs': token 1 is 0.5" in note
    assert "no log-probabilities" in note
    dump = open_dump([write(tmp_path / "b.parquet", old_log_probs=[[1.0] * len(row) for row in ROLLOUT])])
    list(dump.batches())
    assert "6 of 6 tokens" in dump.notes[0], "a few tokens are no proof of a wrong sign"


def test_a_log_prob_above_zero_by_rounding_is_not_worth_a_word(tmp_path):
    """The bound is exact however narrow the values are: TOLERANCE in float32 is a little above it."""
    fine = np.nextafter(np.float32(TOLERANCE), np.float32(0))
    for value, bad in ((TOLERANCE, False), (np.float32(TOLERANCE), True), (fine, False)):
        kind = pa.list_(pa.from_numpy_dtype(np.asarray(value).dtype))
        path = write(tmp_path / "a.parquet", **both(pa.array([[value, value], [-1.0]], kind)))
        if bad:
            assert "token 0 is" in refusal(path).message
            continue
        dump = open_dump([path])
        (batch,) = dump.batches()
        assert (batch.rollout.tolist(), dump.notes) == ([value, value, -1.0], ())


@pytest.mark.parametrize("tokens", [1, ALL])
def test_a_column_of_the_wrong_sign_is_an_error(tmp_path, tokens):
    logs = {"rollout_log_probs": [[-0.5, 0.0] * 10] * 4, "old_log_probs": [[0.5, 0.0] * 10] * 4}
    error = refusal(write(tmp_path / "a.parquet", **logs), batch_tokens=tokens, on_bad_row="skip")
    assert "wrong sign" in error.message
    assert "a.parquet, row group 0, row 0, column 'old_log_probs': token 0 is 0.5" in error.message
    assert "negate" in error.hint
    logs["rollout_log_probs"] = logs["old_log_probs"]
    assert "negate" in refusal(write(tmp_path / "b.parquet", **logs)).hint
