"""Sums by code, neighbours drawn alike, tails and the largest few: short ways to the same numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offpol_diag import resample, segments, tables
from offpol_diag.accumulators import TAIL, Sums, Tail
from offpol_diag.metrics import worst
from tests.devices import DEVICES

RANDOM = np.random.default_rng(7)
CODES = {
    "in long runs": np.repeat([0, 3, 1, 5], [40, 25, 1, 30]),
    "in long runs that come back": np.repeat([2, 3, 2, 0, 2], 20),
    "of every token its own": RANDOM.integers(0, 6, 97),
    "none": np.zeros(0, np.int64),
    "one": np.array([4]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CODES)
def test_sums_by_code_are_those_of_a_plain_loop(name, device):
    codes = CODES[name]
    x, y = RANDOM.standard_normal((2, len(codes)))
    at, one, two = (torch.from_numpy(values).to(device) for values in (codes, x, y))
    counts, sums = tables.by_code(at, 7, {"x": one, "y": two})

    assert counts.tolist() == [int((codes == code).sum()) for code in range(7)]
    for found, column in ((sums["x"], x), (sums["y"], y)):
        expected = [math.fsum(column[codes == code].tolist()) for code in range(7)]
        assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_runs_begin_where_a_code_changes_and_end_at_the_end():
    assert tables.runs(torch.tensor([4, 4, 1, 1, 1, 4])).tolist() == [0, 2, 5, 6]
    assert tables.runs(torch.tensor([9])).tolist() == [0, 1]
    assert tables.runs(torch.zeros(0, dtype=torch.int64)).tolist() == [0]


@pytest.mark.parametrize("groups", [1, 3, 30])
def test_neighbours_of_one_group_are_added_before_they_are_drawn(groups):
    key = torch.from_numpy(np.sort(RANDOM.integers(0, groups, 60)) * 977)
    columns = {name: torch.from_numpy(RANDOM.standard_normal(60)) for name in "ab"}
    draws = resample.draws(key, 0, 16)
    one, two = Sums.of(columns, draws).read(), Sums.of(columns, draws, key).read()

    for name in "ab":
        assert one[name].tolist() == pytest.approx(two[name].tolist(), rel=1e-12, abs=1e-12)


def test_a_group_that_comes_back_later_is_drawn_as_often_as_before():
    key = torch.tensor([5, 5, 5, 9, 9, 9, 5, 5, 5])
    draws = resample.draws(key, 0, 64)

    assert torch.equal(draws, torch.cat([resample.draws(key[i : i + 1], 0, 64) for i in range(9)]))


def test_a_number_at_a_step_of_poisson_has_reached_it():
    steps = resample._poisson_steps()
    found = resample._poisson(torch.tensor([step + by for step in steps for by in (-1, 0)]))

    assert found.tolist() == [float(n) for at in range(len(steps)) for n in (at, at + 1)]


def test_tokens_above_a_bound_are_counted_without_those_at_it():
    offsets = torch.tensor([0, 3, 3, 5])
    x = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.5], dtype=torch.float64)

    assert segments.count_above(x, 2.0, offsets).tolist() == [1.0, 0.0, 1.0]


ORDERS = {
    "shuffled": lambda x: x,
    "rising": np.sort,
    "falling": lambda x: -np.sort(-x),
    "every eighth large": lambda x: np.concatenate(np.array_split(np.sort(x), 8)).reshape(8, -1).T.ravel(),
    "all equal": np.zeros_like,
    "mostly equal": lambda x: np.maximum(x, 0.5),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [TAIL - 1, TAIL, TAIL + 1, 4 * TAIL])
@pytest.mark.parametrize("order", ORDERS)
def test_a_tail_holds_the_largest_in_whatever_order_they_come(order, n, device):
    n = n if n % 8 == 0 or order != "every eighth large" else 4 * TAIL
    x = torch.from_numpy(ORDERS[order](np.random.default_rng(n).standard_normal(n)).copy())
    tail = Tail.of(x.to(device))

    assert torch.equal(tail.top.cpu(), torch.sort(x, descending=True).values[:TAIL])
    assert len(tail.kept) <= 2 * TAIL
    assert tail.n == n


def test_a_merged_tail_stays_small_and_exact():
    parts = [torch.from_numpy(np.random.default_rng(i).standard_normal(2 * TAIL) + i % 3) for i in range(6)]
    merged = Tail.of(parts[0])
    for part in parts[1:]:
        merged = merged.merge(Tail.of(part))

    assert torch.equal(merged.top, torch.sort(torch.cat(parts), descending=True).values[:TAIL])
    assert len(merged.kept) <= 2 * TAIL


@pytest.mark.parametrize("n", [0, 1, 3, 19, 20, 21, 5000])
@pytest.mark.parametrize("values", ["distinct", "few", "equal", "zero"])
def test_the_largest_few_are_those_of_a_full_sort(n, values):
    x = {
        "distinct": RANDOM.standard_normal(n),
        "few": RANDOM.integers(-2, 3, n).astype(np.float64),
        "equal": np.ones(n),
        "zero": np.zeros(n),
    }[values]
    scores = torch.from_numpy(x)
    found = worst._largest(scores, 20)
    order = [i for i in np.argsort(-x, kind="stable").tolist() if x[i] > 0]
    last = x[order[19]] if len(order) >= 20 else 0.0

    assert found.tolist() == [i for i in order if x[i] >= last][: 20 + worst.TIES]
