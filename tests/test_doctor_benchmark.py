"""benchmarks/doctor: each fault changes what it says, on responses of an untrained model."""

from __future__ import annotations

import json
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.doctor import faults, make, page
from benchmarks.doctor.faults import BASES, KINDS, PAIRS, Work
from benchmarks.doctor.models import Sampling, Shape, build
from benchmarks.doctor.rollouts import VERSIONS, Base, World

FOLDER = Path("unused")
BYTES = Shape("tiny", "bytes", 16, 1, 1, modern=True, kv_heads=2)
GRU = Shape("tiny-gru", "bytes", 16, 1, 1, gru=True)
MOE = Shape("tiny-moe", "sums", 16, 1, 1, experts=4)
RETENTION = Shape("tiny-retention", "words", 16, 2, 1, retention=True, modern=True)


class Untrained(World):
    """A world of random weights, which are not stored."""

    def __init__(self, shape):
        super().__init__(shape, Path("/nonexistent"))

    @cached_property
    def weights(self):
        return [build(self.shape, self.task.vocabulary).state_dict()] * VERSIONS


@cache
def world(shape):
    return Untrained(shape)


@cache
def sampled(shape, base):
    return world(shape)._sampled(base)


def work(base=None, shape=BYTES):
    rows = sampled(shape, base or Base(rows=16, lengths=(8, 24)))
    many = len(rows.group)
    return Work(rows.take(np.arange(many)), np.ones(many, bool), np.random.default_rng(1), world(shape))


def both(fault, *how, base=None):
    """Return the rows before a fault and after it."""
    before, after = work(base), work(base)
    getattr(faults, fault)(after, *how)
    return before, after


def changed(before, after):
    """Return which tokens' log-probs or mask have changed, [S, L] bool."""
    one, two = before.rows, after.rows
    return (one.q != two.q) | (one.p != two.p) | (one.mask != two.mask)


@pytest.mark.parametrize(
    "shape", [BYTES, *(pytest.param(one, marks=pytest.mark.slow) for one in (GRU, MOE, RETENTION))]
)
def test_the_engine_in_float32_agrees_with_the_trainer(shape):
    rows = work(Base("fp32", rows=8, lengths=(8, 12)), shape).rows

    assert np.abs(rows.p - rows.q)[rows.sampled].max() < 1e-5


def test_a_sentinel_stands_in_its_share_of_the_tokens():
    _, fault = both("sentinel", -100.0, 0.1)
    share = np.mean(fault.rows.q[fault.rows.sampled] == -100.0)
    assert 0.04 < share < 0.2


def test_a_shift_moves_the_column_and_nothing_else():
    before, after = both("off_by_one", 2)

    end = before.rows.ends[0]
    assert np.array_equal(after.rows.q[0, 2:end], before.rows.q[0, : end - 2])
    assert np.array_equal(after.rows.p, before.rows.p)


def test_permuted_rows_are_other_rows_of_their_group():
    before, after = both("row_permutation", "group")

    ends = before.rows.ends
    assert (changed(before, after).sum(axis=1) > 0).all()
    for i, row in enumerate(after.rows.p):
        same = [np.array_equal(row[: ends[j]], before.rows.p[j, : ends[j]]) for j in range(16)]
        assert any(before.rows.group[j] == before.rows.group[i] for j in np.flatnonzero(same) if j != i)


@pytest.mark.parametrize("place", ["last", "first"])
def test_a_boundary_fault_is_one_token_of_each_response(place):
    before, after = both("boundary", place)

    assert changed(before, after).sum(axis=1).tolist() == [1] * 16


def test_a_retokenised_response_differs_from_some_token_on():
    before, after = both("retokenization", "insert", 0.5)

    off = changed(before, after)
    assert off.any(axis=1).sum() == 8
    for row, end in zip(off, before.rows.ends, strict=True):
        assert not row.any() or row[row.argmax() : end].mean() > 0.9


@pytest.mark.parametrize("kind", ["other", "empty", "format"])
def test_another_context_changes_the_train_column_from_the_first_token_on(kind):
    before, after = both("wrong_context", kind)

    assert (before.rows.p != after.rows.p)[:, 0].all()
    assert np.array_equal(before.rows.q, after.rows.q)


def test_inserted_text_is_masked_until_the_mask_is_wrong():
    before, after = both("wrong_mask", "tool", base=Base(rows=32, lengths=(60, 80), inserts=True))

    added = after.rows.sampled & ~before.rows.sampled
    assert added.any()
    assert (after.rows.q[added] == 0.0).all()


def test_a_temperature_on_one_side_is_a_power_of_the_other():
    base = Base("fp32", Sampling(0.5), rows=16, lengths=(8, 24))
    (_, raw), (_, wrong) = both("rollout_raw_logprobs", base=base), both("trainer_temperature", base=base)

    assert np.abs(raw.rows.q - wrong.rows.p)[raw.rows.sampled].max() < 1e-5
    assert np.abs(raw.rows.q - raw.rows.p)[raw.rows.sampled].mean() > 0.01


def test_only_what_was_sampled_with_top_p_is_above_the_trainer_s_log_probs():
    base = Base("fp32", Sampling(1.0, 0.7), rows=16, lengths=(8, 24))
    honest, fault = both("truncated_sampling", base=base)

    assert np.abs(honest.rows.p - honest.rows.q)[fault.rows.sampled].max() < 1e-5
    assert (fault.rows.p - fault.rows.q)[fault.rows.sampled].max() < -0.1


def test_storage_in_bf16_leaves_values_of_its_grid():
    _, fault = both("low_precision_storage", "bf16")
    assert not np.any(fault.rows.q[fault.rows.sampled].view(np.int32) & 0xFFFF)


def test_a_kernel_that_forgets_agrees_up_to_its_position():
    rows = work(Base("fp32", rows=16, lengths=(30, 40), kernel=("window", 20, 4))).rows
    off = np.abs(rows.p - rows.q) * rows.sampled
    assert off[:, :20].max() < 1e-5
    assert off[:, 20:].max() > 1e-3


def test_plans_are_of_all_causes_and_share_no_model():
    plans = {split: make.plan(split) for split in make.SHAPES}

    assert sum(map(len, plans.values())) >= 600
    shapes = [one for cases in plans.values() for one in {case.shape for case in cases}]
    assert len(shapes) == len(set(shapes))
    for cases in plans.values():
        assert {kind.cause for kind in KINDS} <= {cause for one in cases for cause in one.causes}
        assert all(one.base in BASES for one in cases)
    assert all(base in BASES for base, _ in PAIRS)


def test_a_dump_is_written_with_what_is_known_of_it(tmp_path, monkeypatch):
    plan = make.plan("development")
    case = next(one for one in plan if one.causes == ("off_by_one",) and one.place == "host")
    monkeypatch.setattr(make, "world", lambda shape, folder: world(BYTES))
    monkeypatch.setattr(World, "rows", lambda self, base: sampled(self.shape, Base(rows=64, lengths=(8, 24))))

    make.make([case], tmp_path, FOLDER)

    (entry,) = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    table = pq.read_table(tmp_path / entry["path"])
    assert entry["causes"] == ["off_by_one"]
    assert entry["where"] in set(table["host"].to_pylist())
    assert entry["sequences"] == table.num_rows
    assert entry["off_tokens"] > 0


def row(cause, verdict, named=(), candidates=(), also=()):
    """Return what the page needs of a diagnosed dump."""
    verdicts = ["healthy", "honest_mismatch"] if cause in faults.HONEST else ["bug"]
    names = {"causes": [cause], "also": [*also], "verdicts": verdicts, "verdict": verdict}
    return names | {"named": [*named], "candidates": [*candidates]}


@pytest.mark.parametrize(
    ("diagnosed", "in_causes", "in_candidates", "likeliest", "misled", "judged"),
    [
        (row("stale", "honest_mismatch", ["stale"]), True, False, False, False, True),
        (row("stale", "cannot_tell", (), ["stale", "frozen_sync"]), False, True, True, False, True),
        (row("frozen_sync", "cannot_tell", (), ["stale", "frozen_sync"]), False, True, False, False, True),
        (row("stale", "cannot_tell", (), ["quantized_rollout"]), False, False, False, False, False),
        (row("stale", "honest_mismatch", ["quantized_rollout"]), False, False, False, True, True),
        (row("quantized_rollout", "honest_mismatch", ["numerics"]), False, False, False, False, True),
        (row("wrong_context", "bug", ["boundary"]), False, False, False, True, True),
        (row("wrong_context", "cannot_tell", (), ["wrong_context"]), False, True, True, False, True),
        (row("int8", "cannot_tell", (), ["stale"], also=["stale"]), False, True, True, False, True),
    ],
)
def test_a_cause_that_is_named_and_one_that_is_a_candidate_are_counted_apart(
    diagnosed, in_causes, in_candidates, likeliest, misled, judged
):
    """Only a wrong cause with a fix misleads; several causes that fit, a true one among them, are right."""
    found = (page.among, page.considered, page.likeliest, page.misled, page.judged)
    assert tuple(one(diagnosed) for one in found) == (in_causes, in_candidates, likeliest, misled, judged)


def test_every_other_dump_records_the_precision_of_its_engine():
    found = {one.base: make._recorded(one) for one in make.plan("development")}
    said = [make._recorded(one) for one in make.plan("development")]
    assert 0.4 < np.mean([bool(one) for one in said]) < 0.6
    assert all(one in ({}, {"rollout_dtype": BASES[base].precision}) for base, one in found.items())


def test_the_page_is_made_of_the_results_that_are_kept():
    if page.RESULTS.exists():
        assert page.DOCS.read_text(encoding="utf-8") == page.text(page.results()), "run `page.write()`"
