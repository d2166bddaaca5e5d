"""States of an analysis by themselves: sums whose columns share rows, draws, tails, the largest few."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest

from offpol_diag.engine import accumulators, worst
from offpol_diag.engine.accumulators import Sums, count_by, sum_by, sums_by
from offpol_diag.engine.tails import TAIL, Tail

RANDOM = np.random.default_rng(11)
S, B = 24, 6
NAMES = tuple("abcdefgh")
WHICH = {  # which of the rows of a part each name has
    "all alike": [0] * 8,
    "two halves": [0, 0, 0, 0, 1, 1, 1, 1],
    "other halves": [0, 1, 0, 1, 0, 1, 0, 1],
    "each its own": [7, 6, 5, 4, 3, 2, 1, 0],
    "as the halves, in another order": [1, 1, 1, 1, 0, 0, 0, 0],
}
SHARED = [
    ["two halves", "two halves"],
    ["two halves", "as the halves, in another order"],
    ["all alike", "two halves", "other halves"],
    ["each its own", "all alike", "other halves"],
    ["other halves", "each its own"],
]


def part(name: str) -> tuple[Sums, Sums]:
    """Make one part of a dump, with shared rows and without."""
    which = np.array(WHICH[name])
    rows = RANDOM.standard_normal((int(which.max()) + 1, S)) * 1e3
    key = RANDOM.integers(0, 9, S) * 977
    draws = accumulators.draws(key, 0, B)
    return Sums.of_stacked(NAMES, rows, draws, which=which), Sums.of_stacked(NAMES, rows[which], draws)


def same(one: Sums, two: Sums) -> bool:
    """Return whether all numbers are the same, in the same order; replicates but for BLAS's rounding."""
    mine, theirs = one.read(), two.read()
    return [*mine] == [*theirs] and all(
        mine[name][0] == theirs[name][0] and np.allclose(mine[name], theirs[name], rtol=1e-13, atol=1e-10)
        for name in mine
    )


@pytest.mark.parametrize("names", SHARED, ids=", ".join)
def test_sums_with_shared_rows_merge_like_those_without(names: list[str]) -> None:
    shared, plain = zip(*map(part, names), strict=True)
    one, two = reduce(Sums.merge, shared), reduce(Sums.merge, plain)

    assert same(one, two)
    assert np.array_equal(one.whole.rest, two.rest)


def test_sums_with_shared_rows_merge_with_sums_without() -> None:
    (one, plain), (_, two) = part("two halves"), part("other halves")

    assert same(one.merge(two), plain.merge(two))
    assert same(two.merge(one), two.merge(plain))


def test_sums_with_shared_rows_and_other_names_are_widened() -> None:
    one, plain = part("two halves")
    draws = np.ones((S, B))
    more = Sums.of({"a": np.ones(S, dtype=np.float64), "z": np.zeros(S, dtype=np.float64)}, draws)

    assert same(one.merge(more), plain.merge(more))
    assert same(more.merge(one), more.merge(plain))


@pytest.mark.parametrize("groups", [1, 3, 30])
def test_neighbours_of_one_group_are_added_before_they_are_drawn(groups):
    key = np.sort(RANDOM.integers(0, groups, 60)) * 977
    columns = {name: RANDOM.standard_normal(60) for name in "ab"}
    draws = accumulators.draws(key, 0, 16)
    one, two = Sums.of(columns, draws).read(), Sums.of(columns, draws, key).read()

    for name in "ab":
        assert one[name].tolist() == pytest.approx(two[name].tolist(), rel=1e-12, abs=1e-12)


def test_a_group_that_comes_back_later_is_drawn_as_often_as_before():
    key = np.array([5, 5, 5, 9, 9, 9, 5, 5, 5])
    draws = accumulators.draws(key, 0, 64)

    assert np.array_equal(
        draws, np.concatenate([accumulators.draws(key[i : i + 1], 0, 64) for i in range(9)])
    )


def test_a_number_at_a_step_of_poisson_has_reached_it():
    steps = accumulators._poisson_steps()
    found = accumulators._poisson(np.array([step + by for step in steps for by in (-1, 0)], np.uint32))

    assert found.tolist() == [float(n) for at in range(len(steps)) for n in (at, at + 1)]


def test_sums_by_code_are_those_of_a_plain_loop():
    codes, x = RANDOM.integers(0, 6, 97), RANDOM.standard_normal(97)
    counts, sums = count_by(codes, 7), sum_by(codes, 7, x)

    assert counts.tolist() == [(codes == code).sum() for code in range(7)]
    assert sums.tolist() == pytest.approx([math.fsum(x[codes == code]) for code in range(7)], rel=1e-12)
    nothing = np.zeros(0, dtype=np.int64)
    assert sum_by(nothing, 2, np.zeros(0)).dtype == np.float64


ORDERS = {
    "shuffled": lambda x: x,
    "rising": np.sort,
    "falling": lambda x: -np.sort(-x),
    "every eighth large": lambda x: np.concatenate(np.array_split(np.sort(x), 8)).reshape(8, -1).T.ravel(),
    "all equal": np.zeros_like,
    "mostly equal": lambda x: np.maximum(x, 0.5),
}


@pytest.mark.parametrize("n", [TAIL - 1, TAIL, TAIL + 1, 4 * TAIL])
@pytest.mark.parametrize("order", ORDERS)
def test_a_tail_holds_the_largest_in_whatever_order_they_come(order, n):
    n = n if n % 8 == 0 or order != "every eighth large" else 4 * TAIL
    x = ORDERS[order](np.random.default_rng(n).standard_normal(n)).copy()
    tail = Tail.of(x)

    assert np.array_equal(np.sort(tail.kept), np.sort(x)[-TAIL:])
    assert tail.n == n


@pytest.mark.parametrize("n", [0, 1, 3, 19, 20, 21, 5000])
@pytest.mark.parametrize("values", ["distinct", "few", "equal", "zero"])
def test_the_largest_few_are_those_of_a_full_sort(n, values):
    x = {
        "distinct": RANDOM.standard_normal(n),
        "few": RANDOM.integers(-2, 3, n).astype(np.float64),
        "equal": np.ones(n),
        "zero": np.zeros(n),
    }[values]
    found = worst._largest(x, 20)
    order = [i for i in np.argsort(-x, kind="stable").tolist() if x[i] > 0]
    last = x[order[19]] if len(order) >= 20 else 0.0

    assert found.tolist() == [i for i in order if x[i] >= last][: 20 + worst.TIES]


@pytest.mark.parametrize("longest", [1, 3, 40, 400])
def test_sums_by_code_are_those_of_plain_python_for_short_and_long_runs(longest: int) -> None:
    random = np.random.default_rng(longest)
    codes = np.repeat(random.integers(0, 11, 70), random.integers(1, longest + 1, 70))
    x = random.standard_normal(len(codes))

    found = sums_by(codes, 12, {"x": x, "twice": 2 * x})

    for code in range(12):
        exact = math.fsum(x[codes == code].tolist())
        assert found["x"][code].item() == pytest.approx(exact, rel=1e-13, abs=1e-14)
        assert found["twice"][code].item() == pytest.approx(2 * exact, rel=1e-13, abs=1e-14)
    assert sums_by(codes[:0], 3, {"x": x[:0]})["x"].tolist() == [0.0] * 3


def test_rows_of_zeros_are_resampled_as_all_others():
    rows, draws = np.zeros((3, 6)), accumulators.draws(np.arange(6), 0, 8)
    rows[1], rows[2, 3] = 2.0, np.nan
    drawn = accumulators.Sums.of_stacked(("a", "b", "c"), rows, draws).drawn
    assert np.allclose(drawn, rows @ draws, equal_nan=True, rtol=1e-15)
