"""A dump that several threads read: the batches, what was noticed, and the errors are those of one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from offpol_diag.analyze import analyze
from offpol_diag.batch import Batch
from offpol_diag.errors import DumpError
from offpol_diag.presets import catalogue
from offpol_diag.readers import Dump, open_dump
from offpol_diag.run import task
from tests import pretended
from tests.devices import REAL, numbers, same

SAMPLE = "sample_data/stale.parquet"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """Many small row groups."""
    path = tmp_path_factory.mktemp("ahead") / "dump.parquet"
    pq.write_table(pq.read_table(SAMPLE), path, row_group_size=16)
    return str(path)


def opened(path: str, tokens: int, **how: Any) -> Dump:
    return open_dump([path], batch_tokens=tokens, **how)


def read(path: str, threads: int, tokens: int = 6000) -> tuple[list[Batch], Dump, list[int]]:
    dump, told = opened(path, tokens), list[int]()
    return list(task.ahead(dump, threads, told.append)), dump, told


def equal(one: Batch, two: Batch) -> bool:
    pairs = [(getattr(one, f.name), getattr(two, f.name)) for f in fields(Batch)]
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def joined(batches: list[Batch], name: str) -> Tensor:
    return torch.cat([getattr(batch, name) for batch in batches])


@pytest.mark.parametrize("threads", [2, 5])
def test_the_number_of_threads_changes_no_batch(path, threads):
    one, two = read(path, 1)[0], read(path, threads)[0]

    assert len(one) > 4
    assert len(one) == len(two)
    assert all(map(equal, one, two))


def test_every_token_is_read_once_and_in_order(path):
    batches, dump, told = read(path, 3)
    plain = opened(path, 6000)
    whole = list(plain.batches())

    for name in ("rollout", "old", "position", "key", "masked", "lengths"):
        assert torch.equal(joined(batches, name), joined(whole, name)), name
    assert sum(told) == dump.rows
    assert len(told) > 4
    assert dump.findings() == plain.findings()


def test_batches_are_about_as_large_as_was_asked_for(path):
    sizes = [batch.tokens for batch in read(path, 2)[0]]

    assert max(sizes) < 2 * 6000
    assert len(sizes) <= 1.5 * sum(sizes) / 6000


def test_a_row_group_of_many_batches_is_not_held_whole(monkeypatch):
    held: list[int] = []
    plain = task._read

    def noted(shard: Dump) -> Any:
        held.append(shard.rows)
        return plain(shard)

    monkeypatch.setattr(task, "_read", noted)
    many = read(SAMPLE, 3, 1000)[0]

    assert len(many) > 10
    assert held == []
    assert read(SAMPLE, 3, 1 << 20)[0]
    assert held


def bad(tmp_path: Any) -> str:
    logs = [np.full(3, -1.0) for _ in range(40)]
    logs[25] = np.array([-1.0, np.nan, -1.0])
    logs[35] = np.array([-1.0, 7.0, -1.0])
    table = pa.table({name: pa.array(map(list, logs)) for name in ("rollout_log_probs", "old_log_probs")})
    pq.write_table(table, tmp_path / "bad.parquet", 5)
    return str(tmp_path / "bad.parquet")


def test_the_first_bad_row_is_the_error(tmp_path):
    where = bad(tmp_path)
    errors = []
    for threads in (1, 4):
        with pytest.raises(DumpError) as caught:
            read(where, threads, 12)
        errors.append(caught.value.message)

    assert errors[0] == errors[1]
    assert "row 25" in errors[0]


def test_rows_that_are_skipped_are_counted(tmp_path):
    dump = opened(bad(tmp_path), 12, on_bad_row="skip")
    rows = sum(batch.sequences for batch in task.ahead(dump, 3, lambda _: None))

    assert rows == 38
    assert dump.skipped.count == 2


def test_nothing_is_left_running_when_nobody_takes_more(path):
    found = task.ahead(opened(path, 6000), 3, lambda _: None)
    next(found)
    found.close()


@pytest.mark.skipif(REAL, reason="a real GPU is here")
def test_an_analysis_on_a_gpu_reads_ahead_and_has_the_numbers_of_the_cpu(path, tmp_path, monkeypatch):
    used: list[int] = []
    real = task.ahead
    monkeypatch.setattr(task, "ahead", lambda *a: (used.append(a[1]), real(*a))[1])
    presets, few = catalogue.load().resolve("token_is,m2po"), str(tmp_path / "few.parquet")
    pq.write_table(pq.read_table(path).slice(0, 128), few, row_group_size=16)
    here = numbers(analyze([few], presets=presets, batch_tokens=6000, device="cpu"))
    assert used == []
    with pretended.gpus():
        there = numbers(analyze([few], presets=presets, batch_tokens=6000))

    assert used
    for part in here:
        assert same(here[part], there[part]), part
