"""Steps of the Poisson draws, sums by code, and sums of logarithms where no float holds the terms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offpol_diag.engine import bootstrap
from offpol_diag.engine.segments import sums_by

RANDOM = np.random.default_rng(11)


def test_a_number_at_a_step_of_poisson_has_reached_it():
    steps = bootstrap._poisson_steps()
    found = bootstrap._poisson(np.array([step + by for step in steps for by in (-1, 0)], np.uint32))

    assert found.tolist() == [float(n) for at in range(len(steps)) for n in (at, at + 1)]


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
