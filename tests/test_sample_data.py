from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "sample_data"
SHIPPED = ROOT / "offpol_diag" / "data" / "sample.parquet"
NAMES = ("healthy", "stale", "quantized", "collapse")
LISTS = ("rollout_log_probs", "old_log_probs", "current_log_probs", "response_mask", "token_ids", "entropy")
SCALARS = ("advantages", "rewards", "sequence_id", "group_id", "step", "policy_lag", "tool_calls")
LOG_PROBS = LISTS[:3]

Array = npt.NDArray[Any]


@cache
def columns(name):
    """Return token columns [T] and, for each token, the scalars of its sequence; `row` is the sequence."""
    table = pq.read_table(SAMPLES / f"{name}.parquet")
    lengths = np.array([len(row) for row in table["rollout_log_probs"].to_pylist()])
    tokens = {c: table[c].combine_chunks().flatten().to_numpy() for c in LISTS}
    scalars = {c: np.repeat(table[c].to_numpy(), lengths) for c in SCALARS}
    return {**tokens, **scalars, "row": np.repeat(np.arange(len(lengths)), lengths)}


@cache
def sampled(name):
    """Return the columns of the tokens that the engine sampled, with Δ = old - rollout in float64."""
    given = columns(name)
    mine = {c: v[given["response_mask"] == 1] for c, v in given.items()}
    return {**mine, "delta": mine["old_log_probs"].astype(float) - mine["rollout_log_probs"].astype(float)}


def k3(delta):
    return float(np.mean(np.expm1(delta) - delta))


def mean_and_error(values, groups):
    """Compute a mean over tokens and its standard error when groups, not tokens, are independent."""
    _, codes = np.unique(groups, return_inverse=True)
    mean = float(values.mean())
    residuals = np.bincount(codes, values - mean)
    count = len(residuals)
    return mean, float(np.sqrt(count / (count - 1) * (residuals**2).sum()) / len(values))


def by(name, column):
    data = sampled(name)
    return {int(v): k3(data["delta"][data[column] == v]) for v in np.unique(data[column])}


def test_the_shipped_sample_is_the_stale_dump():
    assert SHIPPED.read_bytes() == (SAMPLES / "stale.parquet").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_small_and_has_every_canonical_column(name):
    assert (SAMPLES / f"{name}.parquet").stat().st_size < 1_000_000
    schema = pq.read_schema(SAMPLES / f"{name}.parquet")
    assert set(schema.names) == {*LISTS, *SCALARS}
    assert {str(schema.field(c).type.value_type) for c in LOG_PROBS} == {"float"}
    facts = {"format": 1, "temperature": 1.0, "top_p": 1.0, "logprobs": "processed"}
    assert json.loads(schema.metadata[b"offpol_diag"]).items() >= facts.items()


@pytest.mark.parametrize("name", NAMES)
def test_values_are_in_range_and_tool_output_stands_under_mask_zero(name):
    data = columns(name)
    assert all(np.isfinite(data[c]).all() for c in (*LOG_PROBS, "entropy", "advantages", "rewards"))
    assert all((data[c] <= 0).all() for c in LOG_PROBS)
    assert (data["entropy"] >= 0).all()
    assert set(np.unique(data["response_mask"])) == {0, 1}
    assert set(np.unique(data["rewards"])) == {0.0, 1.0}
    tool = data["response_mask"] == 0
    assert tool.sum() > 500
    assert not data["rollout_log_probs"][tool].any()
    assert data["old_log_probs"][tool].any()
    assert (data["tool_calls"][tool] > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_there_are_enough_sequences_of_many_lengths_in_groups_of_eight_with_centred_advantages(name):
    data = columns(name)
    rows, first = np.unique(data["row"], return_index=True)
    groups = data["group_id"][first].astype(int)
    _, sizes = np.unique(groups, return_counts=True)
    assert len(rows) >= 500
    assert len(sizes) >= 64
    assert set(sizes) == {8}
    lengths = np.bincount(data["row"])
    assert lengths.min() <= 15
    assert 150 <= lengths.max() <= 256
    assert np.abs(np.bincount(groups, data["advantages"][first])).max() < 1e-5
    assert data["advantages"].any()


@pytest.mark.parametrize("name", NAMES)
def test_surprisal_is_the_entropy_on_average_the_ratio_one_and_k1_not_below_zero(name):
    data = sampled(name)
    groups = data["group_id"]
    mean, error = mean_and_error(-data["rollout_log_probs"].astype(float) - data["entropy"], groups)
    assert abs(mean) < 3 * error
    mean, error = mean_and_error(-data["delta"], groups)
    assert mean > -2 * error
    if name != "collapse":
        mean, error = mean_and_error(np.exp(data["delta"]), groups)
        assert abs(mean - 1) < 3 * error
        assert error < 0.01


def test_healthy_differs_by_precision_only_and_quantized_is_clearly_above_it():
    assert set(columns("healthy")["policy_lag"]) == set(columns("quantized")["policy_lag"]) == {0}
    assert 1e-5 < k3(sampled("healthy")["delta"]) < 1e-3
    assert k3(sampled("quantized")["delta"]) > 4 * k3(sampled("healthy")["delta"])


def test_stale_grows_with_the_lag():
    lags = by("stale", "policy_lag")
    assert list(lags) == [0, 1, 2, 3]
    assert list(lags.values()) == sorted(lags.values())
    assert lags[3] > 50 * lags[0]
    assert set(columns("stale")["step"]) == set(range(3, 11))


def test_collapse_grows_by_orders_of_magnitude():
    steps = list(by("collapse", "step").values())
    assert len(steps) == 9
    assert max(steps) > 500 * steps[0]
    assert min(steps[-3:]) > 100 * steps[0]


def line(name):
    """Return the row of a dump in the table of sample_data/README.md."""
    data = sampled(name)
    ratio = np.exp(data["delta"])
    mean, error = mean_and_error(ratio, data["group_id"])
    k1, k1_error = mean_and_error(-data["delta"], data["group_id"])
    ess = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    _, first = np.unique(columns(name)["row"], return_index=True)
    return (
        f"| `{name}` | {len(first)} | {len(ratio)} | {k1:.1e} ± {k1_error:.0e} | {k3(data['delta']):.1e} "
        f"| {mean:.5f} ± {error:.5f} | {ess:.4f} | {columns(name)['rewards'][first].mean():.2f} |"
    )


def trend(name, column):
    return " · ".join(f"{value:.1e}" for value in by(name, column).values())


def test_the_readme_gives_the_measured_numbers():
    text = (SAMPLES / "README.md").read_text()
    assert all(line(name) in text for name in NAMES)
    assert trend("stale", "policy_lag") in text
    assert trend("collapse", "step") in text
