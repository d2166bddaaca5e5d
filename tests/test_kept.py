"""Columns that a narrow reading decoded are not decoded again by the reading of all columns."""

from dataclasses import fields

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag.readers import open_dump
from offpol_diag.readers.kept import KEPT, Kept
from offpol_diag.readers.shards import Span, cut
from offpol_diag.run.pool import Processes

ROWS, LENGTH = 60, 7
TRAIN, ROLLOUT, MASK = "old_log_probs", "rollout_log_probs", "response_mask"
EVERYTHING = 1 << 30


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 2 * LENGTH, ROWS)
    lists = {name: [-rng.exponential(1.0, n) for n in lengths] for name in (ROLLOUT, TRAIN)}
    mask = [(rng.random(n) < 0.8).astype(np.int8) for n in lengths]
    columns = lists | {MASK: mask, "advantages": rng.standard_normal(ROWS), "step": np.arange(ROWS) // 20}
    pq.write_table(pa.table(columns), tmp_path / "dump.parquet", row_group_size=25)
    return str(tmp_path / "dump.parquet")


@pytest.fixture
def decoded(monkeypatch):
    """The columns that were asked of files, reading by reading of a row group."""
    seen, plain = [], pq.ParquetFile.iter_batches

    def spied(self, *args, columns, **options):
        seen.append(sorted(columns))
        return plain(self, *args, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spied)
    return seen


def same_batches(one, two):
    assert len(one) == len(two)
    for mine, theirs in zip(one, two, strict=True):
        for name in (field.name for field in fields(mine)):
            x, y = getattr(mine, name), getattr(theirs, name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


def whole(path, tokens=1000):
    return open_dump([path], batch_tokens=tokens)


def narrow(path, tokens=1000):
    return whole(path, tokens).only({TRAIN})


@pytest.mark.parametrize("tokens", [5, 40, 1000])
@pytest.mark.parametrize("part", [None, Span(0, 2), Span(1, 2, (3, 19))])
def test_all_columns_are_those_of_a_file_that_is_decoded_once(path, decoded, tokens, part):
    few, dump = (cut(one, part) if part else one for one in (narrow(path, tokens), whole(path, tokens)))
    wanted = list(dump.batches())
    with KEPT.open(EVERYTHING):
        few = list(few.batches())
        decoded.clear()
        found = list(dump.batches())

    assert sum(batch.tokens for batch in few) == sum(batch.tokens for batch in wanted)
    same_batches(found, wanted)
    assert decoded
    again = bool(part and part.rows)  # of a row group in pieces nobody knows when it will be read to its end
    assert all([name in names for name in (ROLLOUT, TRAIN, MASK)] == [again] * 3 for names in decoded)


def test_a_second_narrow_reading_decodes_nothing_and_leaves_what_is_there(path, decoded):
    with KEPT.open(EVERYTHING):
        first = list(narrow(path).batches())
        decoded.clear()
        second = list(narrow(path).batches())
        assert decoded == []
        list(whole(path).batches())

    same_batches(second, first)
    assert ROLLOUT not in {name for names in decoded for name in names}


def test_what_finds_no_room_is_decoded_again(path, decoded):
    with KEPT.open(EVERYTHING):
        list(narrow(path).batches())
        sizes = [table.nbytes for table in KEPT._tables.values()]
    with KEPT.open(sum(sizes[:2])):
        list(narrow(path).batches())
        assert 0 <= KEPT.room < sizes[-1]
        assert len(KEPT._tables) == 2
        decoded.clear()
        list(whole(path).batches())
        assert KEPT.room == sum(sizes[:2])

    assert [ROLLOUT in names for names in decoded] == [False, False, True]


def test_nothing_is_kept_without_a_word_or_after_the_block(path, decoded):
    list(narrow(path).batches())
    assert not KEPT._tables
    with KEPT.open(EVERYTHING):
        list(narrow(path).batches())
        assert KEPT._tables
    assert (KEPT.room, KEPT._tables) == (0, {})


def test_a_row_group_that_was_not_read_to_its_end_is_not_kept():
    kept, batch = Kept(), pa.record_batch({"a": [1, 2]})
    with kept.open(EVERYTHING):
        rows = kept.rows("group", ["a"], True, lambda names: iter([batch, batch]))
        next(rows)
        rows.close()
        assert not kept._tables


def test_another_size_of_pieces_is_another_reading(path, decoded):
    with KEPT.open(EVERYTHING):
        list(narrow(path, 5).batches())
        decoded.clear()
        found = list(open_dump([path], batch_tokens=40).batches())

    assert all(ROLLOUT in names for names in decoded)
    same_batches(found, list(open_dump([path], batch_tokens=40).batches()))


def test_an_engine_of_this_machine_keeps_columns_until_it_is_closed():
    with Processes.on(1):
        assert KEPT.room > 0
    assert KEPT.room == 0
