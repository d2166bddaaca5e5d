"""k̂ against arviz-stats, against frozen values, and where there is nothing to fit.

arviz-stats' `psislw` takes log-*likelihoods* and negates them: it is given −lr for log-weights lr. Its
tail holds ⌊n/5⌋ or ⌊3√n⌋ values, ours (like R's loo and the paper) ⌈min(n/5, 3√n)⌉; sizes here make both
the same number.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from arviz_stats.base import array_stats

from offpol_diag.core import tails
from offpol_diag.core.observe import analyze
from offpol_diag.core.state import largest_of
from tests import oracles


def log_weights(k, n, seed=0):
    """Draw logs of n weights whose tail is a generalised Pareto of shape k."""
    u = np.random.default_rng(seed).random(n)
    return np.log(np.expm1(-k * np.log(u)) / k)


def khat(log):
    fitted = tails.fit(largest_of(log, tails.TAIL), len(log))
    return None if fitted is None else fitted.k


def arviz(log):
    return float(array_stats.psislw(-log)[1])


@pytest.mark.parametrize("n", [100, 225, 400, 2500, 10_000, 250_000])
@pytest.mark.parametrize("k", [0.1, 0.3, 0.7, 1.2])
def test_khat_is_that_of_arviz(n, k):
    log = log_weights(k, n, seed=n)
    assert khat(log) == pytest.approx(arviz(log), rel=1e-9, abs=1e-12)


FROM_PYRO = {
    (-1.5, 5): (0.12360347530901708, 0.5895496791604714),
    (-0.3, 30): (-0.03625421258175282, 0.9184370423500139),
    (0.2, 300): (0.2144782264595555, 0.9937028410924049),
    (0.2, 3000): (0.20141454576233725, 0.9994425405317745),
    (0.7, 5): (0.6490581540584126, 0.718788161331138),
    (0.7, 3000): (0.6992350857252463, 0.9999044081882592),
    (2.0, 300): (1.9354767261079124, 1.0133091898903264),
}
"""(k, n) → shape and scale by pyro-ppl 1.9.2 of n quantiles of a generalised Pareto distribution, scale 1."""


@pytest.mark.parametrize(("k", "n"), FROM_PYRO)
def test_shape_and_scale_are_those_of_pyro(k, n):
    u = (np.arange(n) + 0.5) / n
    assert tails.pareto(np.expm1(-k * np.log1p(-u)) / k) == pytest.approx(FROM_PYRO[k, n], rel=1e-12)


@pytest.mark.parametrize("value", [1.0, 1 / 3])
def test_where_a_point_of_the_grid_is_0_the_fit_is_that_beside_it(value):
    """Of 100 to 120 equal values one is: θ = 0 is the exponential distribution, and −k/θ its scale."""
    few, many, more = (tails.pareto(np.full(n, value)) for n in (99, 110, 121))
    assert few[0] > many[0] > more[0]
    assert few[1] < many[1] < more[1]


@pytest.mark.parametrize("sigma", [1e-4, 0.02, 1.0, 8.0, 300.0])
def test_khat_of_log_normal_weights_is_that_of_arviz(sigma):
    """Small σ: exceedances are differences of weights near 1, of which arviz-stats loses 1e-16/σ."""
    log = sigma * np.random.default_rng(5).standard_normal(10_000)
    assert khat(log) == pytest.approx(arviz(log), rel=max(1e-9, 1e-13 / sigma), abs=max(1e-9, 1e-13 / sigma))


@pytest.mark.parametrize("sigma", [1e-10, 1e-6, 1.0])
def test_khat_of_small_log_weights_keeps_its_digits(sigma):
    """Exceedances of 500 weights, with 50 digits."""
    log = sigma * np.random.default_rng(6).standard_normal(500)
    top = sorted(log, reverse=True)[:69]  # 3√500 = 67.1, and the one below
    with localcontext(prec=50):
        weights = [Decimal(float(x)).exp() for x in top]
        beyond = [float((w - weights[-1]) / weights[0]) for w in reversed(weights[:-1])]
    want, _ = tails.pareto(np.array(beyond))
    assert khat(log) == pytest.approx(want, rel=1e-12)


def test_a_log_weight_that_equals_the_border_but_for_rounding_is_not_in_the_tail():
    log = np.concatenate((np.full(500, 3.0), np.linspace(3.1, 9, 40)))
    rounded = log.copy()
    rounded[:20] += 1e-15
    assert khat(rounded) == pytest.approx(khat(log), rel=1e-12)


@pytest.mark.parametrize(
    ("k", "frozen"), [(0.3, 0.315372684866), (0.7, 0.6804152016359), (1.2, 1.1367223634731)]
)
def test_khat_has_not_moved_whatever_the_scale_of_the_weights(k, frozen):
    """Frozen 2026-11-21 from arviz-stats 0.8.0; of quantiles, so that no random generator matters."""
    u = (np.arange(2500) + 0.5) / 2500
    for scale in (0.0, 600.0, -600.0):
        assert khat(np.log(np.expm1(-k * np.log(u)) / k) + scale) == pytest.approx(frozen, abs=1e-9)


def test_a_constant_or_short_tail_has_no_khat():
    half = np.concatenate((np.full(500, 2.0), np.linspace(-3, 1, 500)))
    assert [khat(log) for log in (np.zeros(1000), half, np.array([0.1, 0.2, 0.3]), np.array([]))] == [
        None
    ] * 4


def test_weights_that_equal_the_border_of_the_tail_are_not_in_it():
    """Most log-ratios of a real dump may be 0: the fit divides by the first quartile of the exceedances."""
    log = np.concatenate((np.zeros(9600), np.linspace(0.1, 2, 200) ** 2))
    tail = log[9600:]
    ties = khat(log)

    assert ties is not None
    # 297 = 3√9800 values are looked at, 97 of them at the border: the fit is that of the 200 beyond it
    assert ties == pytest.approx(khat(np.concatenate((np.full(4223, -9.0), [0.0], tail))), rel=1e-9)
    assert khat(np.concatenate((np.zeros(9996), np.linspace(0.1, 2, 4)))) is None


def test_a_tail_of_equal_weights_is_fitted_wherever_the_grid_falls():
    """Its largest 699 of 54,400 weights are one value, as quantised logits leave them."""
    log = np.zeros(54_400)
    log[:699] = 2.0**-22

    assert math.isfinite(khat(log))


def test_weights_too_small_for_a_reciprocal_are_not_fitted():
    """e^−720 of the largest is no normal number of float64: the fit of it divided by zero."""
    log = np.array([*-np.arange(6.0), -720.0, -721.0, *[-900.0] * 32])

    assert khat(log) > 0
    assert khat(np.where(np.arange(40) < 4, log, log - 720)) is None


def test_the_limit_is_the_published_one():
    """Vehtari et al. 2024: min(1 − 1/log10 S, 0.7)."""
    assert tails.limit(100) == pytest.approx(0.5)
    assert tails.limit(1000) == pytest.approx(2 / 3)
    assert tails.limit(2200) == pytest.approx(0.7, abs=1e-3)
    assert tails.limit(10**7) == 0.7


@pytest.mark.parametrize(("k", "unreliable"), [(0.15, False), (1.3, True)])
def test_a_number_that_leans_on_a_heavy_tail_says_so(tmp_path, k, unreliable):
    rng = np.random.default_rng(3)
    log = log_weights(k, 4000, seed=8)
    log = (log - log.max()).clip(min=-30)
    rows = [
        {"rollout_log_probs": (-40.0 - 0 * part).tolist(), "old_log_probs": (-40.0 + part).tolist()}
        for part in np.split(rng.permutation(log), 400)
    ]
    found = analyze([oracles.write(rows, tmp_path / "dump.parquet")]).whole
    doubted = {
        name: (found[name].note or "").startswith("unreliable") for name in ("ess_tokens", "mean_ratio")
    }
    cautioned = [found[name].note is not None for name in ("khat_tokens", "k3", "tv", "mult_prob_error")]

    assert (found["khat_tokens"].value > tails.limit(4000)) is unreliable
    assert doubted == {"ess_tokens": unreliable, "mean_ratio": unreliable}
    assert found["chi2_token"].note == found["mean_ratio"].note
    assert cautioned == [unreliable] * 4
    assert found["k1"].note is None
    assert math.isclose(found["khat_tokens"].value, khat(log), rel_tol=1e-6)


def test_rows_without_a_token_are_no_part_of_the_sequences_tail(tmp_path):
    rng = np.random.default_rng(4)
    rows = [
        {"rollout_log_probs": [-9.0, -9.0], "old_log_probs": (-9.0 - rng.exponential(1.0, 2)).tolist()}
        for _ in range(100)
    ]
    masked = [{**row, "response_mask": [1, 1]} for row in rows] + [
        {**row, "response_mask": [0, 0]} for row in rows
    ]
    plain = analyze([oracles.write(rows, tmp_path / "a.parquet")]).whole
    more = analyze([oracles.write(masked, tmp_path / "b.parquet")]).whole

    assert more["khat_sequences"].value == plain["khat_sequences"].value
    assert more["khat_sequences"].value == pytest.approx(
        arviz(np.array([math.fsum(row["old_log_probs"]) + 18.0 for row in rows])), rel=1e-6
    )
