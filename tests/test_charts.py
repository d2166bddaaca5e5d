"""The numbers that pictures are drawn from, against plain Python over the rows of a dump."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict

import numpy as np
import pytest

from offpol_diag.core import histograms, tails
from offpol_diag.core.observe import examine
from offpol_diag.core.state import MOST_STEP_GROUPS, TAIL
from offpol_diag.presets import catalogue
from offpol_diag.presets.catalogue import FAMILIES
from tests import oracles
from tests.oracles import mean
from tests.reading import analyze, opened

CLOSE = {"rel": 1e-10, "abs": 1e-13}


def rows_of(sigma, seed, many, steps=4, outliers=0.0):
    rows = oracles.make_rows(sigma, seed, many, outliers)
    rng = np.random.default_rng(seed + 99)
    for i, row in enumerate(rows):
        row["step"] = i * steps // many
        row["policy_lag"] = min(row["step"], 2)
        row["rewards"] = float(rng.integers(0, 2))
    return rows


ROWS = rows_of(0.8, 5, 400, outliers=0.02)
TOKENS = [  # those that are not masked
    {"at": t, "q": q, "p": p, "d": p - q, "k3": math.expm1(p - q) - (p - q)}
    | {"step": row["step"], "lag": row["policy_lag"]}
    for row in ROWS
    for t, (q, p) in enumerate(zip(row["rollout_log_probs"], row["old_log_probs"], strict=True))
    if row["response_mask"][t]
]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = oracles.write(ROWS, tmp_path_factory.mktemp("charts") / "a.parquet")
    return analyze([path], presets=FAMILIES["old"])


@pytest.fixture
def found(result):
    return result.charts


def test_density_counts_every_token_by_both_probabilities(found):
    edges, size = histograms.DENSITY_LOGS, histograms.BINS
    want = [[0] * size for _ in range(size)]
    for one in TOKENS:
        want[bisect_left(edges, one["q"])][bisect_left(edges, one["p"])] += 1

    bounds = [0.0, *map(math.exp, edges), 1.0]
    assert found.density == (sorted(bounds), want)


def test_the_tokens_that_are_likely_for_the_rollout_alone_and_their_share_of_k3(found):
    lost = [x for x in TOKENS if x["q"] > math.log(0.9) and x["p"] < math.log(0.5)]
    assert found.lost.tokens == len(lost) > 0
    assert found.lost.share == pytest.approx(len(lost) / len(TOKENS), **CLOSE)
    k3, whole = (math.fsum(x["k3"] for x in some) for some in (lost, TOKENS))
    assert found.lost.k3_share == pytest.approx(k3 / whole, **CLOSE)
    less, more = (sum(sign * x["d"] > math.log(2) for x in TOKENS) for sign in (-1, 1))
    assert (found.less, found.more) == pytest.approx((less / len(TOKENS), more / len(TOKENS)), **CLOSE)


def test_quantiles_of_the_size_by_probability_are_exact_to_a_bin(found):
    by_bin = defaultdict(list)
    for one in TOKENS:
        by_bin[bisect_left(histograms.NOISE_LOGS, one["q"])].append(one)
    assert len(found.noise) == len(histograms.NOISE_EDGES) + 1
    for at, (_, _, median, p90, p99, synced_tokens, synced_p90) in enumerate(found.noise):
        synced = [x for x in by_bin[at] if x["lag"] == 0]
        assert synced_tokens == len(synced)
        known = {0.5: median, 0.9: p90, 0.99: p99}
        for value, q, tokens in (*((x, q, by_bin[at]) for q, x in known.items()), (synced_p90, 0.9, synced)):
            sizes = sorted(abs(x["d"]) for x in tokens)
            want = sizes[max(math.ceil(q * len(sizes)) - 1, 0)] if sizes else None
            assert value == (None if want is None else pytest.approx(want, rel=1 / 15, abs=1e-7))


def test_the_bars_of_the_histogram_hold_every_token_and_those_in_sync(result):
    low, high, many, many_synced = zip(*result.charts.log_ratios, strict=True)
    every, synced = ([x["d"] for x in TOKENS if x["lag"] <= most] for most in (2, 0))
    cuts = high[:-1]  # bins touch, and a value on an edge is counted away from 0
    for counts, values in ((many_synced, synced), (many, every)):
        want = Counter(bisect_right(cuts, x) if x > 0 else bisect_left(cuts, x) for x in values)
        assert list(counts) == [want[at] for at in range(len(counts))]
    assert sum(many) == len(every)
    assert (low[0], high[-1], low[1:]) == (min(every), max(every), high[:-1])
    assert (np.diff(low) > 0).all()


def test_token_thresholds(found):
    n = len(TOKENS)
    for b, ess, truncated, kept in found.token_thresholds:
        w = [min(math.exp(one["d"]), b) for one in TOKENS]
        assert ess == pytest.approx(mean(w) ** 2 / mean([x * x for x in w]), **CLOSE)
        assert truncated == sum(one["d"] >= math.log(b) for one in TOKENS) / n
        assert kept == sum(-math.log(b) <= one["d"] < math.log(b) for one in TOKENS) / n


def test_by_step(result):
    steps = result.charts.steps
    assert steps.first == steps.last == [0, 1, 2, 3]
    for at, step in enumerate(steps.first):
        data = [one for one in oracles.sequences(ROWS) if one.step == step]
        rewards = [row["rewards"] for row in ROWS if row["step"] == step and any(row["response_mask"])]
        want = {"reward": mean(rewards), "policy_lag": min(step, 2)}
        for prefix in oracles.DRIFTS:
            want |= {f"{prefix}{name}": x for name, x in oracles.policy_gap(data, prefix).items()}
        want |= oracles.raw_weights(data, "") | {"chi2_sequence": float(oracles.chi2_sequence(data, ""))}
        for name in ("token_is", "seq_mis"):
            numbers, *_ = oracles.preset_metrics(data, catalogue.load()[name])
            want[f"{name}.tokens_rejected"] = numbers["tokens_rejected"]
        assert {"k3", "drift2.k3", "total.k3", "reward", "seq_mis.tokens_rejected"} < steps.series.keys()
        for name, series in steps.series.items():
            if name in want:  # the others are presets' rejections
                assert series[at].value == pytest.approx(want[name], rel=1e-9), name
            assert series[at].interval is None or series[at].interval[0] <= series[at].value


def test_evidence_by_lag(found):
    k3 = [mean([x["k3"] for x in TOKENS if x["step"] == step]) for step in range(4)]
    lag = found.lag
    assert (lag.lag, lag.steps) == (2, (2, 3))
    assert (lag.in_sync.value, lag.growth) == pytest.approx((k3[0], k3[3] / k3[2]), rel=1e-9)


def test_crossings_are_the_first_steps_in_a_worse_band(tmp_path):
    trained = {step: [-1.0 - 0.01 * 4**step * (-1) ** t for t in range(20)] for step in range(6)}
    rows = [{"rollout_log_probs": [-1.0] * 20, "old_log_probs": p, "step": at} for at, p in trained.items()]
    found = analyze([oracles.write(rows * 3, tmp_path / "a.parquet")], presets=()).charts
    levels = {"elevated": 1e-3, "high": 0.015, "severe": 0.1}
    each = [math.cosh(0.01 * 4**step) - 1 for step in range(6)]
    want = [(name, next(step for step in range(6) if each[step] >= bound)) for name, bound in levels.items()]
    assert [(band, step) for band, _, step in found.crossings] == want


def test_tail_points_are_the_largest_weights_and_the_fit_runs_through_them(found, result):
    one = found.tails["tokens"]
    logs = sorted((x["d"] for x in TOKENS), reverse=True)
    assert one.weights == len(logs)
    ranks, weights, fits = zip(*one.points, strict=True)
    assert list(weights) == [logs[rank - 1] for rank in ranks]
    assert one.khat.value == result.whole["khat_tokens"].value
    assert (ranks[0], len(ranks) <= 60) == (1, True)
    fitted = tails.fit(np.array(logs), len(logs))
    for rank, log in zip(ranks, fits, strict=True):
        p = 1 - (rank - 0.5) / len(fitted.logs)
        quantile = ((1 - p) ** -one.khat.value - 1) / one.khat.value
        want = math.exp(fitted.above) + math.exp(logs[0]) * fitted.scale * quantile
        assert log == pytest.approx(math.log(want), rel=1e-9)


def test_states_do_not_grow_with_tokens(tmp_path):
    sizes = []
    for many in (100, 400):
        path = oracles.write(rows_of(0.5, 8, many, steps=90), tmp_path / f"{many}.parquet")
        found = examine(opened(path), presets=())
        state, steps = found.state, found.summary().charts.steps
        sizes.append({name: x.shape for name, x in state.counts.items()})
        assert all(len(x) <= 4 * TAIL for x in state.largest.values())
        assert len(state.tables["by_step"].labels) <= MOST_STEP_GROUPS
    assert sizes[0] == sizes[1]
    assert (len(steps.first), steps.first[:2], steps.last[:2]) == (45, [0, 2], [1, 3])  # two to a group
