"""k̂ against arviz-stats and pyro, and where there is nothing to fit; quantiles on the lattice.

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
from hypothesis import given
from hypothesis import strategies as st

from offpol_diag.core import histograms, tails
from offpol_diag.core.state import State
from tests import oracles
from tests.reading import analyze


def log_weights(k, n, seed=0):
    """Draw logs of n weights whose tail is a generalised Pareto of shape k."""
    u = np.random.default_rng(seed).random(n)
    return np.log(np.expm1(-k * np.log(u)) / k)


def khat(log):
    """Fit as a state does: to the largest values, falling."""
    fitted = tails.fit(State(largest={"w": np.asarray(log)}).top("w"), len(log))
    return fitted and fitted.k


def arviz(log):
    return float(array_stats.psislw(-log)[1])


@pytest.mark.parametrize("n", [100, 225, 400, 2500, 10_000, 250_000])
@pytest.mark.parametrize("k", [0.1, 0.3, 0.7, 1.2])
def test_khat_is_that_of_arviz_whatever_the_scale_of_the_weights(n, k):
    log = log_weights(k, n, seed=n)
    wanted = pytest.approx(arviz(log), rel=1e-9, abs=1e-12)
    assert [khat(log + scale) for scale in (0.0, 600.0, -600.0)] == [wanted] * 3


@pytest.mark.parametrize("sigma", [1e-4, 0.02, 1.0, 8.0, 300.0])
def test_khat_of_log_normal_weights_is_that_of_arviz(sigma):
    """Small σ: exceedances are differences of weights near 1, of which arviz-stats loses 1e-16/σ."""
    log = sigma * np.random.default_rng(5).standard_normal(10_000)
    assert khat(log) == pytest.approx(arviz(log), rel=max(1e-9, 1e-13 / sigma), abs=max(1e-9, 1e-13 / sigma))


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


TOP, QUANTISED = np.linspace(0.1, 2, 200) ** 2, np.zeros(54_400)
QUANTISED[:699] = 2.0**-22  # the largest 699 are one value
TINY = np.array([*-np.arange(6.0), -720.0, -721.0, *[-900.0] * 32])  # e^−720 is no normal number
ROUNDED = np.concatenate((np.full(20, 3.0 + 1e-15), np.full(480, 3.0), np.linspace(3.1, 9, 40)))
BORDERS = {
    "weights at the border are not in the tail": (  # 97 of the 297 that are looked at
        np.concatenate((np.zeros(9600), TOP)),
        khat(np.concatenate((np.full(4223, -9.0), [0.0], TOP))),
    ),
    "nor those that equal it but for rounding": (ROUNDED, khat(np.where(ROUNDED < 3.05, 3.0, ROUNDED))),
    "too few beyond it": (np.concatenate((np.zeros(9996), np.linspace(0.1, 2, 4))), None),
    "a constant": (np.zeros(1000), None),
    "a constant tail": (np.concatenate((np.full(500, 2.0), np.linspace(-3, 1, 500))), None),
    "three weights": ([0.1, 0.2, 0.3], None),
    "no weight": ([], None),
    "weights too small for a reciprocal": (np.where(np.arange(40) < 4, TINY, TINY - 720), None),
}


@pytest.mark.parametrize(("log", "wanted"), BORDERS.values(), ids=BORDERS)
def test_what_lies_at_the_border_of_the_tail(log, wanted):
    assert khat(log) == (wanted and pytest.approx(wanted, rel=1e-9))


@pytest.mark.parametrize("log", [QUANTISED, TINY], ids=["equal weights", "the smallest weights"])
def test_an_odd_tail_is_fitted(log):
    assert math.isfinite(khat(log))


def test_the_limit_is_the_published_one():
    """Vehtari et al. 2024: min(1 − 1/log10 S, 0.7)."""
    assert [tails.limit(n) for n in (100, 1000, 2200, 10**7)] == [
        pytest.approx(0.5), pytest.approx(2 / 3), pytest.approx(0.7, abs=1e-3), 0.7,
    ]  # fmt: skip


def found(log, folder, rows=400):
    """Return the numbers of a dump whose tokens have these log-ratios, in so many rows."""
    parts = np.split(np.random.default_rng(3).permutation(log), rows)
    made = [{"rollout_log_probs": [-50.0] * len(x), "old_log_probs": (x - 50.0).tolist()} for x in parts]
    return analyze([oracles.write(made, folder / "dump.parquet")]).whole


@pytest.mark.parametrize(("k", "unreliable"), [(0.15, False), (1.3, True)])
def test_a_number_that_leans_on_a_heavy_tail_says_so(tmp_path, k, unreliable):
    log = log_weights(k, 4000, seed=8)
    log = (log - log.max()).clip(min=-30)
    numbers = found(log, tmp_path)
    doubted = [(numbers[name].note or "").startswith("unreliable") for name in ("ess_tokens", "mean_ratio")]
    cautioned = [numbers[name].note is not None for name in ("khat_tokens", "k3", "tv", "mult_prob_error")]

    assert (numbers["khat_tokens"].value > tails.limit(4000)) is unreliable
    assert [*doubted, *cautioned] == [unreliable] * 6
    assert numbers["chi2_token"].note == numbers["mean_ratio"].note
    assert numbers["k1"].note is None
    assert math.isclose(numbers["khat_tokens"].value, khat(log), rel_tol=1e-6)


@pytest.mark.parametrize(("seed", "noted"), [(5, True), (3, False)])
def test_a_short_sample_is_held_to_the_limit_of_its_length(tmp_path, seed, noted):
    d = np.random.default_rng(seed).exponential(0.6, 200)  # k̂ = 0.66 and 0.30; the limit for 200 is 0.57
    number = found(d, tmp_path, rows=1)["khat_tokens"]
    assert number.value < 0.7
    assert (number.note is not None) is noted


def test_the_tail_of_sequences_is_no_word_about_tokens(tmp_path):
    numbers = found(np.random.default_rng(0).normal(0, 0.3, 40_000), tmp_path, rows=100)
    noted = [numbers[name].note is not None for name in ("ess_tokens", "ess_sequences", "chi2_sequence")]
    assert noted == [False, True, True]


def test_rows_without_a_token_are_no_part_of_the_sequences_tail(tmp_path):
    d = np.random.default_rng(4).exponential(1.0, (100, 2))
    rows = [{"rollout_log_probs": [-9.0] * 2, "old_log_probs": (x - 9.0).tolist()} for x in d]
    masked = [row | {"response_mask": mask} for mask in ([1, 1], [0, 0]) for row in rows]
    more = analyze([oracles.write(masked, tmp_path / "a.parquet")]).whole["khat_sequences"].value
    assert more == pytest.approx(arviz(d.sum(axis=1)), rel=1e-6)


# ---------------------------------------------------------------- the lattice

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
FINE = st.floats(2.0**-39, 2.0**90) | st.floats(-(2.0**90), -(2.0**-39)) | st.just(0.0)
EDGES = histograms.edges()


def bins(values):
    return histograms.index(np.array(values))


@given(st.lists(FLOATS, min_size=2, max_size=50))
def test_every_number_lands_between_the_edges_of_its_bin_and_bins_keep_their_order(values):
    at = bins(values)
    assert bins(sorted(values)).tolist() == sorted(at.tolist())
    for x, i in zip(values, at.tolist(), strict=True):
        assert i == 0 or EDGES[i] <= x, "the outermost hold all beyond"
        assert i == histograms.SIZE - 1 or x <= EDGES[i + 1]


def test_edges_rise_are_a_thirty_second_apart_and_belong_to_the_bin_above():
    up = EDGES[EDGES > 0]
    assert len(EDGES) == histograms.SIZE + 1
    assert (np.diff(EDGES) > 0).all()
    assert float((up[1:] / up[:-1]).max()) == pytest.approx(1 + 1 / 32)
    assert float(up[0]) == 2.0**-40
    assert np.array_equal(histograms.index(-up) - histograms.HALF, histograms.HALF - histograms.index(up))
    assert np.array_equal(histograms.index(up[:-1]), np.arange(len(up) - 1) + histograms.HALF + 1)


@given(st.lists(FINE, min_size=1, max_size=80), st.floats(0, 1))
def test_a_quantile_is_within_a_bin_of_an_order_statistic(values, q):
    got = histograms.of_lattice(np.bincount(bins(values), minlength=histograms.SIZE), q)
    near = [float(np.quantile(values, q, method=how)) for how in ("lower", "higher", "inverted_cdf")]
    slack = max(map(abs, near)) / 32 + 2.0**-40
    assert min(near) - slack <= got <= max(near) + slack


def test_quantiles_of_nothing_are_undefined():
    assert math.isnan(histograms.of_lattice(np.zeros(histograms.SIZE), 0.5))


def test_k3_of_a_token_at_60_nats_has_a_bin_of_its_own():
    """k3 = e^60: were the lattice to end earlier, such tokens and milder ones would count as equals."""
    at = bins([math.expm1(d) - d for d in (8.0, 20.0, 30.0, 60.0, 65.0)]).tolist()
    assert len(set(at)) == 5
    assert max(at) < histograms.SIZE - 1
