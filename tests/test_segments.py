"""Reductions over ragged runs, against lists."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offpol_diag.engine import segments
from tests.devices import DEVICES

RUNS = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=7), max_size=8)


def packed(runs: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([v for run in runs for v in run], dtype=torch.float64)
    return x, torch.tensor(
        [0, *torch.tensor([len(run) for run in runs]).cumsum(0).tolist()], dtype=torch.int64
    )


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None)  # the first tensor on a GPU takes its time
@given(runs=RUNS)
def test_every_reduction_is_that_of_the_list(device, runs):
    x, offsets = (one.to(device) for one in packed(runs))

    assert segments.lengths(offsets).tolist() == [len(run) for run in runs]
    assert segments.total(x, offsets).tolist() == pytest.approx([math.fsum(run) for run in runs], abs=1e-8)
    assert segments.largest(x, offsets).tolist() == [max(run, default=-math.inf) for run in runs]
    assert segments.smallest(x, offsets).tolist() == [min(run, default=math.inf) for run in runs]
    means = [math.fsum(run) / len(run) if run else 0.0 for run in runs]
    assert segments.mean(x, offsets).tolist() == pytest.approx(means, abs=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None)
@given(runs=RUNS, rows=st.integers(1, 3))
def test_a_reduction_of_rows_is_that_of_each(device, runs, rows):
    x, offsets = (one.to(device) for one in packed(runs))
    every = torch.stack([x + row for row in range(rows)])

    for reduce in (segments.total, segments.largest, segments.smallest):
        found = segments.of_rows(reduce, every, offsets)
        assert found.tolist() == [reduce(row, offsets).tolist() for row in every]


@given(RUNS)
def test_counts_are_those_of_the_list(runs):
    x, offsets = packed(runs)
    assert segments.count(x > 0, offsets).tolist() == [sum(v > 0 for v in run) for run in runs]


@given(RUNS)
def test_spreading_gives_every_token_the_value_of_its_run(runs):
    _, offsets = packed(runs)
    spread = segments.spread(torch.arange(len(runs)), offsets)
    assert spread.tolist() == [i for i, run in enumerate(runs) for _ in run]


@given(RUNS, RUNS)
def test_runs_do_not_feel_their_neighbours(left, right):
    x, offsets = packed(left + right)
    y, own = packed(right)
    assert torch.equal(segments.total(x, offsets)[len(left) :], segments.total(y, own))
    assert torch.equal(segments.largest(x, offsets)[len(left) :], segments.largest(y, own))


def test_no_runs_and_empty_runs_reduce_to_their_neutral_elements():
    nothing = torch.zeros(0, dtype=torch.float64)
    for many in (0, 1, 3):
        offsets = torch.zeros(many + 1, dtype=torch.int64)
        assert segments.total(nothing, offsets).tolist() == [0.0] * many
        assert segments.mean(nothing, offsets).tolist() == [0.0] * many
        assert segments.largest(nothing, offsets).tolist() == [-math.inf] * many
        assert segments.smallest(nothing, offsets).tolist() == [math.inf] * many
