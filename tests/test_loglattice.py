"""The lattice: every number has its bin, and quantiles are right to the width of one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offpol_diag.core import tails as lattice
from offpol_diag.core.state import Array

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
FINE = st.floats(2.0**-39, 2.0**90) | st.floats(-(2.0**90), -(2.0**-39)) | st.just(0.0)


def bins(values: list[float]) -> Array:
    return lattice.index(np.array(values))


@given(st.lists(FLOATS, min_size=1, max_size=50))
def test_every_number_lands_between_the_edges_of_its_bin(values):
    edges = lattice.edges()
    at = bins(values)
    assert ((at >= 0) & (at < lattice.SIZE)).all()
    for x, i in zip(values, at.tolist(), strict=True):
        low, high = float(edges[i]), float(edges[i + 1])
        inside = low <= x <= high
        beyond = (i == 0 and x <= high) or (i == lattice.SIZE - 1 and x >= low)
        assert inside or beyond


@given(st.lists(FLOATS, min_size=2, max_size=50))
def test_bins_keep_the_order_of_numbers(values):
    ordered = sorted(values)
    assert bins(ordered).tolist() == sorted(bins(values).tolist())


@given(FINE)
def test_a_number_and_its_negative_have_mirrored_bins(x):
    first, second = bins([x, -x]).tolist()
    assert first - lattice.HALF == lattice.HALF - second


def test_edges_rise_and_are_a_thirty_second_apart():
    edges = lattice.edges()
    up = edges[edges > 0]
    assert len(edges) == lattice.SIZE + 1
    assert (np.diff(edges) > 0).all()
    assert float((up[1:] / up[:-1]).max()) == pytest.approx(1 + 1 / 32)
    assert float(up[0]) == 2.0**-40


def test_an_edge_belongs_to_the_bin_above_it():
    edges = lattice.edges()
    up = edges[edges > 0][:-1]
    assert np.array_equal(lattice.index(up), np.arange(len(up)) + lattice.HALF + 1)


@given(st.lists(FINE, min_size=1, max_size=80), st.floats(0, 1))
def test_a_quantile_is_within_a_bin_of_an_order_statistic(values, q):
    got = lattice.quantile(np.bincount(bins(values), minlength=lattice.SIZE), q)
    near = [float(np.quantile(values, q, method=how)) for how in ("lower", "higher", "inverted_cdf")]
    slack = max(map(abs, near)) / 32 + 2.0**-40
    assert min(near) - slack <= got <= max(near) + slack


def test_quantiles_of_nothing_are_undefined():
    assert math.isnan(lattice.quantile(np.zeros(lattice.SIZE), 0.5))


def test_k3_of_a_token_at_60_nats_has_a_bin_of_its_own():
    """k3 = e^60: were the lattice to end earlier, such tokens and milder ones would count as equals."""
    k3 = [math.expm1(d) - d for d in (8.0, 20.0, 30.0, 60.0, 65.0)]
    assert len(set(bins(k3).tolist())) == 5
    assert max(bins(k3).tolist()) < lattice.SIZE - 1
