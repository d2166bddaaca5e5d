"""Bootstrap draws, resampled sums, sums by code, the largest few."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offpol_diag.engine import bootstrap, worst
from offpol_diag.engine.segments import count_by, sum_by, sums_by

RANDOM = np.random.default_rng(11)


@pytest.mark.parametrize("groups", [1, 3, 30])
def test_neighbours_of_one_group_are_added_before_they_are_drawn(groups):
    key = np.sort(RANDOM.integers(0, groups, 60)) * 977
    columns = RANDOM.standard_normal((2, 60))
    draws = bootstrap.draws(key, 0, 16)
    one, two = bootstrap.resampled(columns, draws), bootstrap.resampled(columns, draws, key)

    assert np.allclose(one, two, rtol=1e-12, atol=1e-12)
    assert np.array_equal(one[:, 0], columns.sum(axis=1))
    assert np.allclose(
        one[:, 1:], [[math.fsum(row * draw) for draw in draws.T] for row in columns], rtol=1e-12
    )


def test_a_group_that_comes_back_later_is_drawn_as_often_as_before():
    key = np.array([5, 5, 5, 9, 9, 9, 5, 5, 5])
    draws = bootstrap.draws(key, 0, 64)

    assert np.array_equal(draws, np.concatenate([bootstrap.draws(key[i : i + 1], 0, 64) for i in range(9)]))


def test_a_number_at_a_step_of_poisson_has_reached_it():
    steps = bootstrap._poisson_steps()
    found = bootstrap._poisson(np.array([step + by for step in steps for by in (-1, 0)], np.uint32))

    assert found.tolist() == [float(n) for at in range(len(steps)) for n in (at, at + 1)]


def test_sums_by_code_are_those_of_a_plain_loop():
    codes, x = RANDOM.integers(0, 6, 97), RANDOM.standard_normal(97)
    counts, sums = count_by(codes, 7), sum_by(codes, 7, x)

    assert counts.tolist() == [(codes == code).sum() for code in range(7)]
    assert sums.tolist() == pytest.approx([math.fsum(x[codes == code]) for code in range(7)], rel=1e-12)
    nothing = np.zeros(0, dtype=np.int64)
    assert sum_by(nothing, 2, np.zeros(0)).dtype == np.float64


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
    rows, draws = np.zeros((3, 6)), bootstrap.draws(np.arange(6), 0, 8)
    rows[1], rows[2, 3] = 2.0, np.nan
    drawn = bootstrap.resampled(rows, draws)[:, 1:]
    assert np.allclose(drawn, rows @ draws, equal_nan=True, rtol=1e-15)


def test_log_sums_are_those_of_plain_python_where_no_float_holds_the_terms():
    x, draws = RANDOM.standard_normal((2, 40)) * 600, bootstrap.draws(np.arange(40), 0, 8)
    found = bootstrap.log_resampled(x, draws)

    for row, got in zip(x, found, strict=True):
        top = row.max()
        exact = [
            top + math.log(math.fsum(np.exp(row - top) * many))
            for many in (np.ones(40), *draws.T)
            if many @ (row == top)
        ]
        drawn = [1.0, *(draws.T @ (row == top))]
        assert got[np.array(drawn) > 0] == pytest.approx(exact, rel=1e-14)


def test_sums_of_places_are_those_of_their_sequences():
    rows, key = RANDOM.standard_normal((3, 20)), np.arange(20) // 4
    draws = bootstrap.draws(key, 0, 8)
    members = {"a": [0, 3, 4], "b": slice(5, 20)}
    found = bootstrap.resampled_by(members, rows, draws, key)

    for got, at in zip(found, members.values(), strict=True):
        assert np.allclose(got, np.column_stack((rows[:, at].sum(1), rows[:, at] @ draws[at])), rtol=1e-13)
