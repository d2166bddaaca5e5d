"""How a dump is read: in pieces, flat in memory, in batches that are full."""

import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.errors import DumpError
from offpol_diag.readers import decode, open_dump
from offpol_diag.readers.checks import CHECKS, TOLERANCE
from offpol_diag.readers.decode import Ragged, Rows

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def write(path, lengths, row_group, odd=None):
    """A dump of sequences of such lengths; `odd` is (row, token, value)."""
    rng = np.random.default_rng(0)
    rows = [(-rng.exponential(1.0, n)).astype(np.float32) for n in lengths]
    if odd:
        rows[odd[0]][odd[1]] = odd[2]
    table = pa.table({"rollout_log_probs": rows, "old_log_probs": rows})
    pq.write_table(table, path, row_group_size=row_group)
    return str(path)


def sizes(path, tokens):
    """Lengths of the sequences of each batch."""
    return [batch.lengths.tolist() for batch in open_dump([path], batch_tokens=tokens).batches()]


def filled(lengths, tokens):
    """Lengths put into batches one after the other, by hand."""
    batches = [[]]
    for n in lengths:
        if batches[-1] and sum(batches[-1]) + n > tokens:
            batches.append([])
        batches[-1].append(n)
    return batches


@pytest.mark.parametrize("tokens", [1, 8, 10, 17, 40, 1000])
def test_the_batches_of_a_row_group_are_as_full_as_whole_sequences_allow(tmp_path, tokens):
    path = write(tmp_path / "a.parquet", LENGTHS, 1000)
    assert sizes(path, tokens) == filled(LENGTHS, tokens)


@pytest.mark.parametrize("row_group", [1, 3, 7])
def test_the_rows_of_small_row_groups_come_once_and_in_order(tmp_path, row_group):
    path = write(tmp_path / "a.parquet", LENGTHS, row_group)
    found = sizes(path, 12)
    assert [n for batch in found for n in batch] == LENGTHS
    assert all(sum(batch) <= 12 for batch in found)


def test_a_bad_row_is_placed_by_its_number_wherever_pieces_are_cut(tmp_path):
    path = write(tmp_path / "a.parquet", LENGTHS, 8, odd=(13, 4, np.nan))
    for tokens in (1, 9, 30, 1000):
        with pytest.raises(DumpError, match=r"row group 1, row 13, .*: token 4 is nan"):
            list(open_dump([path], batch_tokens=tokens).batches())


def test_a_bad_row_before_damaged_data_is_told_first(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", LENGTHS, 1000, odd=(0, 1, np.nan))
    whole = pq.ParquetFile.iter_batches

    def breaks(self, *args, **options):
        yield next(iter(whole(self, *args, **options)))
        raise OSError("torn")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", breaks)
    with pytest.raises(DumpError, match=r"row 0, .*: token 1 is nan"):
        list(open_dump([path], batch_tokens=30).batches())


def test_values_stay_as_narrow_as_they_are_stored_and_bounds_are_exact():
    at = np.float32(TOLERANCE)  # a little above it
    assert float(at) > TOLERANCE
    for value, bad in ((at, True), (np.nextafter(at, np.float32(0)), False)):
        column = Ragged(np.array([-1, value], np.float32), None, np.array([2]), np.array([False]))
        rows = Rows({"rollout_log_probs": column}, {})
        assert any(problem for check in CHECKS for problem in check(rows)) == bad


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.uint64(), pa.float64(), pa.uint16()])
def test_a_group_has_one_key_in_whatever_numbers_it_is_written(kind):
    signed = not pa.types.is_unsigned_integer(kind)
    ids = [3, 0, None, 100, 3, -7 if signed else 7]
    found = decode.keys_of_groups(pa.array(ids, kind), lambda: np.full(6, 5))
    expected = [
        5 if one is None else int(decode.mix(np.array([one % 2**64], np.uint64)).view(np.int64)[0])
        for one in ids
    ]
    assert found.tolist() == expected
    assert (
        decode.keys_of_groups(pa.array(ids, kind).dictionary_encode(), lambda: np.full(6, 5)).tolist()
        == expected
    )


def test_the_largest_ids_are_kept_apart():
    ids = [2**64 - 1, 2**63, 2**63 - 1]
    found = decode.keys_of_groups(pa.array(ids, pa.uint64()), lambda: np.zeros(3, np.int64))
    assert found.tolist() == decode.mix(np.array(ids, np.uint64)).view(np.int64).tolist()
    assert decode.keys_of_groups(pa.array([-1]), lambda: np.zeros(1, np.int64))[0] == found[0]


GROWN = """
    import resource, sys
    from offpol_diag.readers import open_dump
    peaks = []
    for path in sys.argv[1:]:
        for _ in open_dump([path], batch_tokens=1 << 15).batches(): pass
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux alone")
def test_a_row_group_sixteen_times_as_large_takes_no_more_memory(tmp_path):
    small = write(tmp_path / "small.parquet", [1000] * 256, 1 << 20)
    large = write(tmp_path / "large.parquet", [1000] * 4096, 1 << 20)  # 4 M tokens, 33 MB of log-probs
    command = [sys.executable, "-c", textwrap.dedent(GROWN), small, large]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 16 << 10


def test_a_batch_has_so_many_rows_at_most_however_few_tokens_they_have(tmp_path, monkeypatch):
    for module in ("decode", "dump"):
        monkeypatch.setattr(f"offpol_diag.readers.{module}.MOST_ROWS", 10)
    logs = pa.array([[], [-1.0]] * 50, pa.list_(pa.float64()))
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs})
    for size in (100, 7):  # one row group, and many that are joined
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=size)
        found = [batch.sequences for batch in open_dump([str(tmp_path / "a.parquet")]).batches()]
        assert sum(found) == 100
        assert max(found) <= 10
