"""Formulas of one token against mpmath with 40 digits, at tiny and at huge drift; on numpy and on torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offpol_diag.core import formulas
from tests import oracles
from tests.oracles import mpmath as mp

LOG_RATIOS = [s * x for x in (0.0, 1e-15, 1e-9, 1e-4, 0.01, 0.7, 5.0, 40.0, 300.0) for s in (1, -1)]
ROLLOUT = [-1e-12, -1e-6, -0.01, -0.7, -5.0, -40.0, -600.0]
PAIRS = [(d, q) for d in LOG_RATIOS for q in ROLLOUT]
FOUND = {
    "k1": lambda d, q: formulas.k1(d),
    "k2": lambda d, q: formulas.k2(d),
    "k3": lambda d, q: formulas.k3(d, formulas.namespace(d).expm1(d)),
    "k3_reverse": lambda d, q: formulas.k3_reverse(d),
    "mult_prob_error": lambda d, q: formulas.ratio_either_way(d),
    "prob_diff": lambda d, q: formulas.probability_difference(q + d, q),
    "tv": lambda d, q: formulas.total_variation(formulas.namespace(d).expm1(d)),
    "binary_kl": formulas.binary_kl,
    "binary_kl_max": formulas.binary_kl_larger,
}
"""Divergence → what the formula gives, from Δ and log π_rollout."""
CANCELS = {"k3", "k3_reverse", "binary_kl", "binary_kl_max"}
"""Divergences that are what larger terms leave: a double has 1e-16 of the terms, |Δ| or 1."""


@pytest.mark.parametrize("name", FOUND)
def test_a_divergence_is_what_mpmath_says(name):
    d, q = (np.array(x) for x in zip(*PAIRS, strict=True))
    with np.errstate(over="ignore"):
        found = FOUND[name](d, q)
    on_torch = FOUND[name](torch.from_numpy(d), torch.from_numpy(q))

    for x, y, (delta, rollout) in zip(found, on_torch.tolist(), PAIRS, strict=True):
        given = (rollout + delta) - mp.mpf(rollout) if name == "prob_diff" else delta  # it gets log π_train
        exact = oracles.EXACT[name](mp.mpf(given), mp.mpf(rollout))
        room = 4e-16 * max(abs(delta), 1.0) * (name in CANCELS)
        relative = 1e-14 + 2.3e-16 * (abs(rollout) + abs(delta))  # of log-probs, rounded before exp
        assert float(abs(mp.mpf(float(x)) - exact)) <= relative * float(abs(exact)) + room, (delta, rollout)
        assert y == pytest.approx(float(x), rel=1e-14, abs=room), (delta, rollout)


@pytest.mark.parametrize(("upper", "cut"), [(10.0, math.inf), (2.0, 8.0), (1.5, 2.0), (0.5, 2.0)])
def test_the_largest_of_a_batch_are_cut_until_the_mean_of_the_rest_is_below_the_bound(upper, cut):
    values = np.array([8.0, 1.0, 2.0, 1.0, 2.0])
    assert formulas.batch_cut(values, upper) == formulas.batch_cut(torch.from_numpy(values), upper) == cut


def test_a_ratio_is_finite_whatever_the_log_ratio():
    found = formulas.importance_ratio(np.array([-np.inf, -800.0, 0.0, 800.0, np.inf]))
    assert np.isfinite(found**2).all()
