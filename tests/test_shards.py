"""A dump in ranges of row groups, as tasks read it, is the dump: its sequences, its remarks, its errors."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from offpol_diag.dump.check import Seen
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import DumpError
from tests.factory import write

HUGE, NAN, SKIP = 1 << 30, float("nan"), {"on_bad_row": "skip"}


def ragged(seed=0, count=40, masked=0.2):
    """Make sequences of 0 to 6 tokens; some tokens masked, or all."""
    rng = np.random.default_rng(seed)
    logs = [(-rng.exponential(0.5, n)).tolist() for n in rng.integers(0, 7, count)]
    mask = [(rng.random(len(x)) >= masked).tolist() for x in logs]
    return pa.table({"rollout_log_probs": logs, "old_log_probs": logs, "response_mask": mask})


def of_old(*first):
    """Make a sequence of eight tokens for each value of `old`, or for what `old` begins with."""
    old = [[one] * 8 if isinstance(one, float) else [*one] + [-0.5] * (8 - len(one)) for one in first]
    return pa.table({"rollout_log_probs": [[-0.5] * 8] * len(old), "old_log_probs": old})


FINE, BAD, POSITIVE = [-0.5], [NAN], [0.5] * 3
DUMPS = {  # the files, rows of a row group, options, what must be said of it
    "three files": ([ragged(0), ragged(1), ragged(2)], 8, {}, ""),
    "row groups of all sizes": ([ragged(0, 100), ragged(1, 100)], 30, {"batch_tokens": 20}, ""),
    "a bad row": ([of_old(*[FINE] * 20, BAD, *[FINE] * 19)], 8, {}, "row group 2, row 20,"),
    "a bad row, skipped": ([of_old(*[FINE] * 40, BAD, *[FINE] * 23)], 64, SKIP, "row group 0, row 40,"),
    "nothing but bad rows": ([of_old(*[NAN] * 40)], 8, SKIP, "every row was skipped, all 40"),
    "a file that is masked": ([ragged(masked=2), ragged(1)], 8, {}, ""),
    "a dump that is masked": ([ragged(masked=2)], 8, {}, "no token is left in 40 rows"),
    "a sign wrong in few": ([of_old(*[-0.5] * 20, *[0.5] * 12)], 4, {}, "tokens ("),
    "a sign wrong in most": ([of_old(*[-0.5] * 4, *[0.5] * 28)], 4, {}, "wrong sign"),
    "wrong in few tokens of many ranges": ([of_old(*[0.5] * 32)], 2, {}, "wrong sign"),
    "few wrong, many right": ([of_old(0.5, 0.5), of_old(*[-0.5] * 32)], 8, {"batch_tokens": 300}, "tokens ("),
    "some wrong in each": ([of_old(*[POSITIVE] * 16)], 8, {"batch_tokens": 16}, "tokens ("),
}


def sequences(dump):
    """Return every sequence of a dump as plain values."""
    for batch in dump.batches():
        for i, (begin, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
            lists = [getattr(batch, name)[begin:end].tolist() for name in ("rollout", "old", "position")]
            scalars = {name: values[i] for name, values in batch.scalars.items()}
            yield lists, scalars, int(batch.key[i]), int(batch.masked[i])


def outcome(dump, size=0):
    """Return what a pass finds, or its error; by ranges of a size, each read as in another process."""
    try:
        if not size:
            found = [*sequences(dump)]
        else:
            parts = [pickle.loads(pickle.dumps(part)) for part in dump.shards(size)]
            found, dump.seen = [one for part in parts for one in sequences(part)], Seen()
            for part in parts:
                dump.seen.add(part.seen)
            dump.judge()
    except DumpError as error:
        return [], error.message, error.hint
    return found, dump.notes, dump.seen.skipped, dump.info


@pytest.mark.parametrize("what", DUMPS)
def test_a_dump_in_ranges_is_the_dump(tmp_path, what):
    tables, group, options, says = DUMPS[what]
    for i, table in enumerate(tables):
        write(tmp_path / f"step={i}" / f"{i}.parquet", table, group)
    expected = outcome(open_dump([str(tmp_path)], **options))
    assert says in str(expected[1:3])
    for size in (1, 1500, HUGE):
        assert outcome(open_dump([str(tmp_path)], **options), size) == expected, size


def test_ranges_are_whole_row_groups_not_too_many_and_read_from_another_folder(tmp_path, monkeypatch):
    for i in range(3):
        write(tmp_path / "d" / f"{i}.parquet", ragged(i), 8)
    monkeypatch.chdir(tmp_path)
    dump = open_dump(["d"])
    parts = dump.shards(1)
    assert (len(parts), len(dump.shards(HUGE))) == (15, 1)
    monkeypatch.chdir("/")
    assert [str(part.path) for part in parts[5].parts] == ["d/1.parquet"]
    assert len([*sequences(parts[5])]) == parts[5].rows == 8
    monkeypatch.setattr("offpol_diag.dump.read.MOST_SHARDS", 10)
    assert 5 < len(dump.shards(1)) <= 10
