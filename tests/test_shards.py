"""A dump in pieces is the dump: the same sequences in order, the same remarks, the same errors."""

import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag.errors import DumpError
from offpol_diag.readers import Dump, open_dump
from offpol_diag.readers.shards import Span, cut, pieces, spans

GROUP = 8


def rows(count=40, seed=0, **changes):
    """Sequences of 0 to 6 tokens; some tokens masked."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, count)
    lengths[:2] = 6
    logs = [-rng.exponential(0.5, n) for n in lengths]
    columns = {
        "rollout_log_probs": logs,
        "old_log_probs": [x - 0.01 for x in logs],
        "response_mask": [rng.random(n) < 0.8 for n in lengths],
    }
    return pa.table(
        {name: pa.array([list(x) for x in column]) for name, column in (columns | changes).items()}
    )


def write(path, table, group=GROUP):
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(table, path, row_group_size=group)
    return str(path)


def dump_of(folder, files=3, **changes):
    for i in range(files):
        write(folder / f"{i}.parquet", rows(seed=i, **changes))
    return str(folder)


def shards(dump, size):
    return [cut(dump, span) for span in spans(dump, size)]


def sequences(*dumps):
    """Every sequence as plain values."""
    found = []
    for dump in dumps:
        for batch in dump.batches():
            at = batch.cu_seqlens.tolist()
            for i in range(batch.sequences):
                tokens = slice(at[i], at[i + 1])
                scalars = {name: values[i] for name, values in batch.scalars.items()}
                logs = [getattr(batch, name)[tokens].tolist() for name in ("rollout", "old", "position")]
                found.append((logs, scalars, int(batch.key[i]), int(batch.masked[i])))
    return found


def read_apart(dump, size):
    pieces = [pickle.loads(pickle.dumps(piece)) for piece in shards(dump, size)]
    found = sequences(*pieces)
    dump.merge_findings([piece.findings() for piece in pieces])
    return found


def refusal(act):
    with pytest.raises(DumpError) as caught:
        act()
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize("size", [1, 1500, 1 << 30])
def test_shards_hold_the_sequences_of_the_dump_in_order(tmp_path, size):
    folder = dump_of(tmp_path)
    whole, apart = open_dump([folder]), open_dump([folder])
    assert sequences(whole) == read_apart(apart, size)
    assert len(spans(apart, size)) == {1: 15, 1 << 30: 1}.get(size, len(spans(apart, size)))
    assert apart.info == whole.info
    assert apart.notes == whole.notes


def test_a_dump_that_would_have_too_many_shards_is_cut_into_larger_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("offpol_diag.readers.shards.MOST", 32)
    dump = open_dump([write(tmp_path / "many.parquet", rows(48), group=1)])
    assert 16 < len(spans(dump, 1)) <= 32


def test_a_bad_row_is_named_by_its_place_in_the_whole_file(tmp_path):
    table = rows()
    values = table.column("old_log_probs").to_pylist()
    place = next(i for i in range(30, 40) if values[i])
    values[place][0] = float("nan")
    table = table.set_column(1, "old_log_probs", pa.array(values)).drop(["response_mask"])
    path = write(tmp_path / "bad.parquet", table)
    whole = refusal(lambda: sequences(open_dump([path])))
    assert f"row {place}," in whole[0]
    assert refusal(lambda: sequences(*shards(open_dump([path]), 1))) == whole


def test_skipped_rows_are_counted_and_told_as_in_one_reading(tmp_path):
    for i in range(2):
        table = rows(seed=i)
        logs = [[0.5] * len(x) for x in table.column("rollout_log_probs").to_pylist()]
        write(tmp_path / f"{i}.parquet", table.set_column(0, "rollout_log_probs", pa.array(logs)))
    write(tmp_path / "2.parquet", rows(seed=2))
    whole, apart = (open_dump([str(tmp_path)], on_bad_row="skip") for _ in range(2))
    assert sequences(whole) == read_apart(apart, 1)
    assert apart.skipped == whole.skipped
    assert len(whole.skipped.examples) == 5


def test_that_every_row_is_skipped_is_the_same_error(tmp_path):
    table = rows()
    logs = [[0.5] * 6] * len(table)
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs})
    path = write(tmp_path / "all.parquet", table)
    whole = refusal(lambda: sequences(open_dump([path], on_bad_row="skip")))
    assert refusal(lambda: read_apart(open_dump([path], on_bad_row="skip"), 1)) == whole


def test_shards_without_a_token_are_no_error_and_a_dump_without_one_is(tmp_path):
    masked = write(tmp_path / "0.parquet", rows(response_mask=[np.zeros(0, bool)] * 40, **EMPTY))
    full = write(tmp_path / "1.parquet", rows())
    whole = sequences(open_dump([masked, full]))
    assert read_apart(open_dump([masked, full]), 1) == whole
    assert refusal(lambda: read_apart(open_dump([masked]), 1)) == refusal(
        lambda: sequences(open_dump([masked]))
    )


EMPTY = {name: [np.zeros(0)] * 40 for name in ("rollout_log_probs", "old_log_probs")}


def signed(folder, before, after, group=GROUP):
    """Four sequences of 8 tokens in a row group; `old` is positive as told, before and after row 4."""
    old = [[before] * 8] * 4 + [[after] * 8] * 28
    table = pa.table({"rollout_log_probs": [[-0.5] * 8] * 32, "old_log_probs": old})
    return write(folder / "signs.parquet", table, group)


def test_a_wrong_sign_is_judged_by_the_first_tokens_of_the_dump_alone(tmp_path):
    right = signed(tmp_path / "a", -0.5, 0.5, group=4)
    apart, whole = open_dump([right]), open_dump([right])
    assert read_apart(apart, 1) == sequences(whole)
    assert apart.notes == whole.notes
    assert len(whole.notes) == 1
    wrong = signed(tmp_path / "b", 0.5, -0.5, group=4)
    assert refusal(lambda: read_apart(open_dump([wrong]), 1)) == refusal(
        lambda: sequences(open_dump([wrong]))
    )


@pytest.mark.parametrize("group", [2, 3])
def test_a_wrong_sign_is_found_where_the_first_shards_have_too_few_tokens_to_judge(tmp_path, group):
    wrong = signed(tmp_path, 0.5, 0.5, group)
    assert "wrong sign" in refusal(lambda: read_apart(open_dump([wrong]), 1))[0]


def eights(path, group, *old):
    """Sequences of eight tokens with these values of `old`."""
    rows = [[value] * 8 if isinstance(value, float) else value for value in old]
    table = pa.table({"rollout_log_probs": [[-0.5] * 8] * len(rows), "old_log_probs": rows})
    return write(path, table, group)


SIGNS = {  # values of `old` in a small file, in a larger one, tokens of a batch, whether the sign is wrong
    "few wrong, enough wrong": ([0.5] * 2, [0.5] * 4 + [-0.5] * 28, 32, True),
    "few right, enough right": ([-0.5] * 2, [-0.5] * 4 + [0.5] * 28, 32, False),
    "few wrong, many right": ([0.5] * 2, [-0.5] * 32, 300, False),
    "some wrong in each sequence": ([[0.5] * 3 + [-0.5] * 5] * 2, [[0.5] * 3 + [-0.5] * 5] * 14, 16, False),
}


@pytest.mark.parametrize(("few", "more", "tokens", "wrong"), SIGNS.values(), ids=SIGNS)
def test_signs_of_small_shards_are_judged_together(tmp_path, few, more, tokens, wrong):
    paths = [eights(tmp_path / "0.parquet", GROUP, *few), eights(tmp_path / "1.parquet", GROUP, *more)]
    whole, apart = (open_dump(paths, batch_tokens=tokens) for _ in range(2))
    if wrong:
        assert "wrong sign" in refusal(lambda: sequences(whole))[0]
        assert "wrong sign" in refusal(lambda: read_apart(apart, 1))[0]
    else:
        assert sequences(whole) == read_apart(apart, 1)
        assert whole.notes == apart.notes
        assert len(whole.notes) == 1


def test_partitions_and_numbers_of_rows_are_those_of_the_whole(tmp_path):
    for step in (3, 4):
        write(tmp_path / f"step={step}" / "x.parquet", rows(seed=step))
    found = read_apart(open_dump([str(tmp_path)]), 1)
    assert [one[1]["sequence_id"] for one in found] == list(range(80))
    assert [one[1]["step"] for one in found] == [3] * 40 + [4] * 40


def test_a_shard_is_read_from_another_folder_under_the_same_name(tmp_path, monkeypatch):
    dump_of(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    dump = open_dump(["d"])
    piece = cut(dump, Span(5, 7))
    monkeypatch.chdir("/")
    assert [str(part.path) for part in piece.parts] == ["d/1.parquet"]
    assert len(sequences(piece)) == 16


def test_progress_counts_the_rows_of_the_shard(tmp_path):
    piece = shards(open_dump([dump_of(tmp_path)]), 1)[1]
    counted = []
    for _ in piece.batches(counted.append):
        pass
    assert sum(counted) == piece.rows == GROUP


# ---------------------------------------------------------------- pieces of row groups


def full(count=64, length=8):
    logs = np.full((count, length), -0.5) - np.arange(count)[:, None] / 100
    return pa.table({"rollout_log_probs": logs.tolist(), "old_log_probs": (logs - 0.01).tolist()})


def read_pieces(dump, least):
    found = [cut(dump, span) for span in pieces(dump, least)]
    read = sequences(*found)
    dump.merge_findings([piece.findings() for piece in found])
    return read


@pytest.mark.parametrize(
    ("group", "least", "expected"),
    [
        (64, 1 << 18, 1),
        (64, 128, 4),  # one row group of 512 tokens is parted
        (64, 1, 16),  # into no more than MANY
        (4, 128, 4),  # small ones go together
        (16, 128, 4),
        (24, 64, 8),  # 192, 192 and 128 tokens, each parted
    ],
)
def test_pieces_are_of_about_one_size_whatever_the_row_groups(tmp_path, group, least, expected):
    path = write(tmp_path / "x.parquet", full(), group)
    whole, apart = open_dump([path]), open_dump([path])
    found = pieces(apart, least)
    assert len(found) == expected
    assert sequences(whole) == read_pieces(apart, least)
    assert apart.info == whole.info
    sizes = [cut(apart, span).rows for span in found]
    assert max(sizes) <= 2 * min(sizes)


def test_pieces_read_by_turns_by_two_readers_are_the_dump(tmp_path):
    write(tmp_path / "a.parquet", rows(100), 100)
    write(tmp_path / "b.parquet", rows(100, seed=1), 30)
    whole = open_dump([str(tmp_path)], batch_tokens=20)
    readers = [pickle.loads(pickle.dumps(whole)) for _ in range(2)]
    found = [sequences(cut(readers[i % 2], span)) for i, span in enumerate(pieces(whole, 10))]
    assert len(found) > 8
    assert [one for piece in found for one in piece] == sequences(whole)


def growing(path):
    """40 sequences of one token and 40 of 99, in row groups of 20: 20, 20, 1980 and 1980 tokens."""
    logs = [[-0.5] * n for n in [1] * 40 + [99] * 40]
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs})
    pq.write_table(table, path, row_group_size=20, use_dictionary=False, compression="none")
    return str(path)


def test_where_sequences_grow_pieces_are_cut_by_tokens_not_by_rows(tmp_path):
    dump = open_dump([growing(tmp_path / "x.parquet")])
    assert dump.tokens == pytest.approx(4000, rel=0.8)
    found = pieces(dump, 2000)
    assert [(one.begin, one.end) for one in found] == [(0, 3), (3, 4)]


def test_a_footer_without_sizes_counts_rows_instead(tmp_path):
    dump = open_dump([growing(tmp_path / "x.parquet")])
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
    assert len(read_pieces(dump, 128)) == 64
    assert cut(dump, Span(0, 1)).tokens == 0


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
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
    ],
)
def test_a_dump_has_as_many_pieces_as_cores_share_well(tmp_path, monkeypatch, tokens, expected):
    dump = open_dump([write(tmp_path / "x.parquet", full(6400), 100)])
    monkeypatch.setattr(Dump, "group_tokens", [tokens * (1 << 20) / 64] * 64)
    found = pieces(dump)
    assert len(found) == pytest.approx(expected, abs=expected // 12)
    assert found[-1].end == 64


def test_a_bad_row_in_the_middle_of_a_row_group_is_named_as_in_one_reading(tmp_path):
    table = full()
    values = table.column("old_log_probs").to_pylist()
    values[40][3] = float("nan")
    path = write(tmp_path / "bad.parquet", table.set_column(1, "old_log_probs", pa.array(values)), 64)
    whole = refusal(lambda: sequences(open_dump([path])))
    assert "row 40," in whole[0]
    assert refusal(lambda: read_pieces(open_dump([path]), 64)) == whole
    apart, skipping = (open_dump([path], on_bad_row="skip") for _ in range(2))
    assert read_pieces(apart, 64) == sequences(skipping)
    assert apart.skipped == skipping.skipped


def test_a_wrong_sign_is_judged_at_the_first_piece_of_a_row_group_alone(tmp_path):
    right, wrong = signed(tmp_path / "a", -0.5, 0.5, 32), signed(tmp_path / "b", 0.5, -0.5, 32)
    whole, apart = (open_dump([right], batch_tokens=32) for _ in range(2))
    assert sequences(whole) == read_pieces(apart, 32)
    assert whole.notes == apart.notes
    assert "wrong sign" in refusal(lambda: read_pieces(open_dump([wrong]), 32))[0]


def test_damage_in_a_row_group_is_told_alike_by_every_piece_behind_it(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(full(4000, 16), path, row_group_size=4000, compression="none", use_dictionary=False)
    bytes_ = bytearray(path.read_bytes())
    at = len(bytes_) // 2
    bytes_[at : at + 20_000] = b"\xff" * 20_000
    path.write_bytes(bytes(bytes_))
    dump = open_dump([str(path)], batch_tokens=1000)
    whole = refusal(lambda: sequences(dump))
    cuts = pieces(dump, 1000)
    assert refusal(lambda: sequences(*(cut(dump, span) for span in cuts))) == whole
    assert refusal(lambda: sequences(cut(dump, cuts[-1]))) == whole


# ---------------------------------------------------------------- one row per token


def tokens(ids):
    x = -torch.linspace(0.1, 2, len(ids), dtype=torch.float64).numpy()
    return pa.table({"sequence_id": ids, "rollout_log_prob": x, "old_log_prob": x - 0.01})


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([i // 8 for i in range(64)], 8),  # sequences fill row groups
        ([i // 12 for i in range(64)], 3),  # a border of both at 24 and 48
        ([f"{i // 16:03}" for i in range(64)], 4),
        ([i % 4 for i in range(64)], 1),  # rows of a sequence everywhere
        ([-(i // 8) for i in range(64)], 1),  # apart, but not in rising order
    ],
)
def test_one_row_per_token_is_cut_only_where_no_sequence_goes_on(tmp_path, ids, expected):
    path = write(tmp_path / "long.parquet", tokens(ids))
    whole, apart = open_dump([path]), open_dump([path])
    assert len(spans(apart, 1)) == expected
    assert sequences(whole) == read_apart(apart, 1)
    assert apart.info == whole.info


def test_a_sequence_that_goes_on_in_the_next_file_is_not_parted(tmp_path):
    for i in range(2):
        write(tmp_path / f"{i}.parquet", tokens([j // 8 + 3 * i for j in range(32)]))
    dump = open_dump([str(tmp_path)])
    assert [span.begin for span in spans(dump, 1)] == [0, 1, 2, 3, 5, 6, 7]
    assert len(read_apart(dump, 1)) == 7


def test_a_footer_without_bounds_leaves_one_shard(tmp_path):
    path = tmp_path / "long.parquet"
    pq.write_table(tokens([i // 8 for i in range(64)]), path, row_group_size=8, write_statistics=False)
    assert len(spans(open_dump([str(path)]), 1)) == 1
