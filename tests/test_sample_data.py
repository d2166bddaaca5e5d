from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "sample_data"
SHIPPED = ROOT / "offpol_diag" / "data" / "sample.parquet"
NAMES = ("healthy", "stale", "quantized", "collapse")
LISTS = ("rollout_log_probs", "old_log_probs", "current_log_probs", "response_mask", "token_ids", "entropy")
SCALARS = ("advantages", "rewards", "sequence_id", "group_id", "step", "policy_lag", "tool_calls")
LOG_PROBS = LISTS[:3]


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
