"""The long form: one row per token."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.forms import long, open_dump
from offpol_diag.presets.catalogue import load
from offpol_diag.readers.dump import join
from tests.factory import ALL, converted, plain, read, refusal, write
from tests.test_laws import different

TOKEN_COLUMNS = {
    "rollout_log_probs": "rollout_log_prob",
    "old_log_probs": "old_log_prob",
    "current_log_probs": "current_log_prob",
    "response_mask": "loss_mask",
    "advantages": "advantage",
    "token_ids": "token_id",
    "entropy": "entropy",
}


def sequences(seed=0, count=40):
    """Make columns of a list-form dump of `count` sequences of 1 to 30 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 31, count)
    rollout = [-rng.exponential(1.0, n) for n in lengths]
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": [np.minimum(x + 0.1 * rng.normal(size=x.size), 0.0) for x in rollout],
        "current_log_probs": [np.minimum(x + 0.1 * rng.normal(size=x.size), 0.0) for x in rollout],
        "response_mask": [rng.integers(0, 4, n) > 0 for n in lengths],
        "advantages": [rng.normal(size=n) for n in lengths],
        "token_ids": [rng.integers(0, 99, n) for n in lengths],
        "entropy": [rng.exponential(1.0, n) for n in lengths],
        "sequence_id": [f"s{i}" for i in rng.permutation(count)],
        "group_id": [f"g{i // 4}" for i in range(count)],
        "rewards": rng.normal(size=count),
        "step": np.arange(count) // 10,
        "policy_lag": np.arange(count) % 3,
        "host": [f"h{i % 3}" for i in range(count)],
    }


def lengthened(columns):
    """Return the same sequences as a table of one row per token."""
    lengths = [len(row) for row in columns["rollout_log_probs"]]
    flat = {new: np.concatenate(columns[old]) for old, new in TOKEN_COLUMNS.items()}
    for name in columns.keys() - TOKEN_COLUMNS.keys():
        flat[name] = np.repeat(np.asarray(columns[name]), lengths)
    flat["position"] = np.concatenate([np.arange(n) for n in lengths])
    return pa.table(flat)


def small(**changes):
    """Make two sequences, a and b, of three and two tokens; a change of None removes a column."""
    logs = [-0.5, -1.0, -1.5, -2.0, -2.5]
    columns = {"sequence_id": list("aaabb"), "rollout_log_prob": logs, "old_log_prob": logs} | changes
    return pa.table({name: column for name, column in columns.items() if column is not None})


def by_sequence(batch):
    """Return a batch's values by sequence, whatever their order."""
    names = ("rollout", "old", "current", "advantages", "token_ids", "entropy", "position")
    return {
        batch.scalars["sequence_id"][i]: (
            [getattr(batch, name)[begin:end].tolist() for name in names],
            batch.key[i].item(),
            batch.masked[i].item(),
            {name: values[i] for name, values in batch.scalars.items()},
        )
        for i, (begin, end) in enumerate(pairwise(batch.cu_seqlens.tolist()))
    }


def cut(folder, table, files, rows):
    for i, (begin, end) in enumerate(pairwise(np.linspace(0, table.num_rows, files + 1).astype(int))):
        write(folder / f"{i}.parquet", table.slice(begin, end - begin), rows)
    return str(folder)


def shuffled(table, window, seed=0):
    """Shuffle rows within each window."""
    rng = np.random.default_rng(seed)
    begins = range(0, table.num_rows, window)
    order = [b + rng.permutation(min(window, table.num_rows - b)) for b in begins]
    return table.take(np.concatenate(order))


# ---------------------------------------------------------------- the list form says the same


@pytest.mark.parametrize(("files", "rows", "tokens"), [(1, 23, ALL), (3, 50, 1), (3, 5, 37), (4, ALL, 37)])
@pytest.mark.parametrize("far", [None, 60, long.FAR], ids=["in order", "shuffled, near", "shuffled, far"])
def test_batches_are_those_of_the_list_form_however_the_dump_is_cut_or_shuffled(
    tmp_path, monkeypatch, files, rows, tokens, far
):
    columns = sequences(files, 30)
    expected = read(write(tmp_path / "list.parquet", pa.table(columns)), group_by=["host"])
    table = lengthened(columns)
    if far:
        monkeypatch.setattr(long, "FAR", far)
        table = shuffled(table, 30)
    found = read(cut(tmp_path / "long", table, files, rows), group_by=["host"], batch_tokens=tokens)
    say = by_sequence if far else plain
    assert say(found) == say(expected)


def test_only_rows_that_others_may_follow_are_held(tmp_path, monkeypatch):
    table = lengthened(sequences(count=100))
    path = write(tmp_path / "a.parquet", table, 50)
    expected = plain(read(path, batch_tokens=40))
    monkeypatch.setattr(long, "FAR", 5)
    written = []
    monkeypatch.setattr(long._Gathering, "whole", spying(long._Gathering.whole, written))
    assert plain(read(write(tmp_path / "b.parquet", table, 50), batch_tokens=40)) == expected
    assert max(written) < table.num_rows / 6


def spying(function, seen):
    def spy(self, frame):
        seen.append(len(frame))
        return function(self, frame)

    return spy


def test_every_number_of_the_analysis_is_that_of_the_list_form(tmp_path):
    columns = sequences(count=80)
    whole = write(tmp_path / "list.parquet", pa.table(columns))
    folder = cut(tmp_path / "long", shuffled(lengthened(columns), 60), 3, 60)
    options = {"presets": load().resolve("token_is,seq_mis"), "group_by": ["host"], "device": "cpu"}
    one, two = analyze([whole], **options), analyze([folder], **options, batch_tokens=100)
    assert different(one, two) == {}
    stored = {"files", "given", "bytes", "columns"}
    assert one.dump.model_dump(exclude=stored) == two.dump.model_dump(exclude=stored)
    assert one.worst.model_dump() == two.worst.model_dump()


def test_a_long_dump_is_converted(tmp_path):
    columns = sequences(count=12)
    del columns["policy_lag"], columns["host"]
    whole = {name: [list(row) for row in columns[name]] for name in TOKEN_COLUMNS}
    long_one = write(tmp_path / "long.parquet", lengthened(columns), 40)
    found, _ = converted(Path(long_one))
    assert [row["sequence_id"] for row in found] == columns["sequence_id"]
    for name in ("old_log_probs", "response_mask", "token_ids"):
        assert [row[name] for row in found] == [np.float32(row).tolist() for row in whole[name]]


# ---------------------------------------------------------------- order


def test_rows_of_sequences_may_be_interleaved(tmp_path):
    table = small(sequence_id=list("babab"))
    batch = read(write(tmp_path / "a.parquet", table, 2), batch_tokens=1)
    assert batch.scalars["sequence_id"] == ["b", "a"]
    assert batch.rollout.tolist() == [-0.5, -1.5, -2.5, -1.0, -2.0]


def test_tokens_are_sorted_by_position_if_there_is_one_and_a_jump_parts_turns(tmp_path):
    table = small(pos=[2, 0, 1, 8, 7])
    assert read(write(tmp_path / "a.parquet", table)).rollout.tolist() == [-1.0, -1.5, -0.5, -2.5, -2.0]
    plainly = read(write(tmp_path / "b.parquet", table.drop_columns("pos")))
    assert plainly.rollout.tolist() == [-0.5, -1.0, -1.5, -2.0, -2.5]
    assert plainly.position.tolist() == [0, 1, 2, 0, 1]
    batch = read(write(tmp_path / "c.parquet", small(t=[7, 8, 12, 0, 1])))
    assert batch.position.tolist() == [0, 1, 5, 0, 1]
    assert (batch.cu_runs.tolist(), batch.masked.tolist()) == ([0, 2, 3, 5], [0, 0])


# ---------------------------------------------------------------- ids


def test_the_id_goes_by_several_names_or_one_that_is_given(tmp_path):
    for name in ("sample_id", "rollout_id", "trajectory_id", "request_id", "mine"):
        table = small().rename_columns([name, "rollout_log_prob", "old_log_prob"])
        path = write(tmp_path / f"{name}.parquet", table)
        assert read(path, columns={"sequence_id": name} if name == "mine" else {}).lengths.tolist() == [3, 2]
    error = refusal(path)
    assert "no column holds sequence_id" in error.message
    assert "the columns are mine, rollout_log_prob, old_log_prob" in error.hint
    two = small(sequence_id=None, request_id=list("aaabb"), sample_id=list("aaabb"))
    error = refusal(write(tmp_path / "a.parquet", two))
    assert "sample_id and request_id can each be the sequence_id" in error.message


TEXT = pa.array(list("xxxyy"))
IDS = [pa.array([7, 7, 7, 9, 9]), pa.array([7.5, 7.5, 7.5, 9.0, 9.0]), TEXT.cast(pa.binary())]
IDS += [TEXT.dictionary_encode(), TEXT.cast(pa.large_string()), TEXT.cast(pa.string_view())]


@pytest.mark.parametrize("ids", IDS, ids=lambda ids: str(ids.type))
def test_an_id_of_any_type_is_read(tmp_path, ids):
    assert read(write(tmp_path / "a.parquet", small(sequence_id=ids), 2)).lengths.tolist() == [3, 2]


@pytest.mark.parametrize("bad", [None, math.nan])
def test_a_row_without_an_id_is_an_error_even_where_bad_rows_are_skipped(tmp_path, bad):
    ids = pa.array([1.0, 1.0, 1.0, bad, 2.0], from_pandas=False)
    path = write(tmp_path / "a.parquet", small(sequence_id=ids), 2)
    message = refusal(path, on_bad_row="skip").message
    assert message.startswith(f"{path}, row group 1, row 3, column 'sequence_id': it is null")


@pytest.mark.parametrize("tokens", [1, 3, ALL])
@pytest.mark.parametrize("rows", [1, 4, ALL])
def test_an_id_that_comes_back_too_late_is_an_error_and_one_row_sooner_is_not(
    tmp_path, monkeypatch, rows, tokens
):
    monkeypatch.setattr(long, "FAR", 3)
    logs = {"rollout_log_prob": [-1.0] * 8, "old_log_prob": [-1.0] * 8}
    late = write(tmp_path / "a.parquet", pa.table({"sequence_id": list("xabcdxef")} | logs), rows)
    error = refusal(late, batch_tokens=tokens, on_bad_row="skip")
    assert error.message.startswith(f"{late}, row group {5 // min(rows, 8)}, row 5, column 'sequence_id'")
    assert "sequence 'x' comes back after more than 3 rows" in error.message
    assert "sort the dump by 'sequence_id'" in error.hint
    soon = write(tmp_path / "b.parquet", pa.table({"sequence_id": list("xabcxdef")} | logs), rows)
    assert read(soon, batch_tokens=tokens).scalars["sequence_id"] == list("xabcdef")


# ---------------------------------------------------------------- values


SPOILT = {
    **{
        f"a log-prob that is {bad}": ({"old_log_prob": [-1.0, -1.0, -1.0, -1.0, bad]}, "token 1 is ")
        for bad in (None, math.nan, -math.inf)
    },
    "a reward that is NaN": ({"rewards": [1.0, 1.0, 1.0, math.nan, math.nan]}, "it is null, NaN or infinite"),
    "a position twice": ({"position": [0, 1, 2, 4, 4]}, "two rows of the sequence are at position 4"),
    "a position that is null": ({"position": [0, 1, 2, None, 1]}, "it is null"),
    **{
        f"two values of {name}": ({name: [1, 1, 1, 2, 3]}, "a sequence has one value")
        for name in ("rewards", "group_id", "step", "host")
    },
}


@pytest.mark.parametrize("rows", [1, 2, ALL])
@pytest.mark.parametrize("what", SPOILT)
def test_a_bad_sequence_is_named_by_the_row_it_begins_in_or_skipped(tmp_path, what, rows):
    change, says = SPOILT[what]
    (name,) = change
    path = write(tmp_path / "a.parquet", small(**change), rows)
    options = {"group_by": ["host"] if name == "host" else []}
    message = refusal(path, **options).message
    assert message.startswith(f"{path}, row group {3 // min(rows, 5)}, row 3, column '{name}': {says}")
    assert "this one has 2 where it begins and 3 in row 4 of" in message or "one value" not in says
    dump = open_dump([path], on_bad_row="skip", **options)
    (batch,) = join(dump.batches(), ALL)
    assert (batch.scalars["sequence_id"], dump.skipped.count) == (["a"], 1)
    odd = name == "position" or says.startswith("a sequence has one value")
    assert [note for note in dump.notes if "sequences are skipped" in note and says in note] == (
        [dump.notes[0]] if odd else []
    )


def test_junk_under_the_mask_does_no_harm(tmp_path):
    table = small(old_log_prob=[None, -1.0, math.nan, -2.0, 9.0], action_mask=[0, 1, 0, 1, 0])
    batch = read(write(tmp_path / "a.parquet", table))
    assert (batch.old.tolist(), batch.masked.tolist(), batch.position.tolist()) == ([-1, -2], [2, 1], [1, 0])


def test_a_dump_of_which_nothing_is_left_is_an_error(tmp_path):
    masked = write(tmp_path / "a.parquet", small(response_mask=[0] * 5))
    assert "no token is left in 2 rows" in refusal(masked).message
    bad = write(tmp_path / "b.parquet", small(old_log_prob=[math.nan] * 5))
    assert "every row was skipped, all 2" in refusal(bad, on_bad_row="skip").message


def test_nulls_and_nans_are_values_that_agree(tmp_path):
    table = small(step=[None, None, None, 2, 2], host=[math.nan] * 5)
    assert read(write(tmp_path / "a.parquet", table, 1), group_by=["host"]).scalars["step"] == [None, 2]


def test_widths_may_differ_between_files_and_row_groups_may_be_empty(tmp_path):
    table = small(loss_mask=[1, 1, 0, 1, 1])
    with pq.ParquetWriter(write(tmp_path / "d" / "a.parquet", table), table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 1), table.slice(0, 0), table.slice(1, 1)):
            writer.write_table(part)
    narrow = [("sequence_id", pa.large_string()), ("rollout_log_prob", pa.float16())]
    narrow += [("old_log_prob", pa.float32()), ("loss_mask", pa.bool_())]
    write(tmp_path / "d" / "b.parquet", table.slice(2).cast(pa.schema(narrow)))
    assert plain(read(str(tmp_path / "d"))) == plain(read(write(tmp_path / "c.parquet", table)))


# ---------------------------------------------------------------- the form


def test_the_two_forms_are_not_mixed(tmp_path):
    path = write(tmp_path / "a.parquet", small(old_log_prob=None, old_log_probs=[[-1.0]] * 5))
    assert refusal(path, columns={"rollout": "rollout_log_prob"}).message == (
        f"{path}: column 'rollout_log_prob' holds double, and a list of floats per row is needed"
    )
    write(tmp_path / "d" / "a.parquet", lengthened(sequences()))
    write(tmp_path / "d" / "b.parquet", pa.table(sequences()))
    assert "differ" in refusal(str(tmp_path / "d")).message
    columns = sequences() | {"t": np.arange(40), "rollout_log_prob": np.zeros(40)}
    found = open_dump([write(tmp_path / "b.parquet", pa.table(columns))]).info.columns
    assert found.keys() == sequences().keys() - {"host"}, (
        "names of the long form are other columns of a list form"
    )


def test_a_column_with_a_value_per_token_is_nothing_to_group_by(tmp_path):
    path = write(tmp_path / "a.parquet", small(entropy=[1.0] * 5))
    assert "'entropy' holds a value per token" in refusal(path, group_by=["entropy"]).message
