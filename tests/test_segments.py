"""Reductions over ragged runs against lists; exponentials and transfers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offpol_diag.engine import segments
from tests.devices import DEVICES, present

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


# ---------------------------------------------------------------- host and device

X = [
    0.0,
    -0.0,
    1e-300,
    -1e-9,
    3e-5,
    -0.04,
    0.7,
    -2.5,
    30.0,
    -345.0,
    690.0,
    800.0,
    -800.0,
    math.inf,
    -math.inf,
]


def plain(function, x):
    try:
        return function(x)
    except OverflowError:
        return math.inf


@pytest.mark.parametrize("name", ["exp", "expm1"])
@pytest.mark.parametrize("wide", [True, False])
def test_exponentials_are_those_of_the_standard_library(name, wide, monkeypatch):
    monkeypatch.setattr(segments, "wide", lambda name: wide)
    expected = [plain(getattr(math, name), x) for x in X]

    found = getattr(segments, name)(torch.tensor(X, dtype=torch.float64))

    assert found.tolist() == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("name", ["exp", "expm1"])
def test_a_slope_goes_through_and_what_is_not_here_is_torchs(name, monkeypatch):
    monkeypatch.setattr(segments, "wide", lambda name: True)
    x = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    getattr(segments, name)(x).sum().backward()
    monkeypatch.setattr(segments, "on_host", lambda x: False)
    monkeypatch.setattr(torch.Tensor, "numpy", None)

    assert x.grad.item() == pytest.approx(math.exp(0.3))
    assert getattr(segments, name)(torch.zeros(2, dtype=torch.float64)).shape == (2,)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_is_the_same_there(device):
    x = torch.tensor([1.5, -math.inf, 3.0], dtype=torch.float64)
    with present(device):
        there = segments.sent(x, torch.device(device))

    assert str(there.device) == device
    assert there.tolist() == x.tolist()
    assert segments.sent(torch.empty(0), torch.device("cpu")).shape == (0,)
