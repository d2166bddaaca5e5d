"""Check the estimated error of an update under each candidate, and its paired differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.presets.candidates import CANDIDATES, NOTHING
from tests import oracles

WEIGHTS = {
    "none": lambda r: 1.0,
    "token_tis_2.0": lambda r: min(r, 2.0),
    "token_icepop_0.5_5.0": lambda r: r if 0.5 <= r <= 5 else 0.0,
}
TIS = "token_tis_2.0"


def error(rows, name, policy="old"):
    """Compute √(bias² + variance / 256) of Σ w·A / Σ w against Σ r·A / Σ r, the variance over sequences."""
    data = [one for one in oracles.sequences(rows) if one.n]
    ratios = [[math.exp(d) for d in one.delta(policy)] for one in data]
    pairs = [list(zip(r, one.advantages, strict=True)) for r, one in zip(ratios, data, strict=True)]
    weight = WEIGHTS[name]
    x = [math.fsum(weight(r) * a for r, a in one) for one in pairs]
    w = [math.fsum(weight(r) for r, _ in one) for one in pairs]
    exact = math.fsum(r * a for one in pairs for r, a in one) / math.fsum(r for one in pairs for r, _ in one)
    m = math.fsum(x) / math.fsum(w)
    variance = len(data) * math.fsum((a - m * b) ** 2 for a, b in zip(x, w, strict=True)) / math.fsum(w) ** 2
    return math.sqrt((m - exact) ** 2 + variance / 256)


@pytest.mark.parametrize("policy", ["old", "current"])
@pytest.mark.parametrize("sigma", [1e-4, 0.05, 0.8])
def test_the_error_is_what_plain_python_makes_of_every_token(tmp_path, sigma, policy):
    """Near and far tokens, masked ones, and empty rows."""
    rows = oracles.make_rows(sigma, many=60, outliers=0.02)
    if policy == "current":
        rows = [{name: x for name, x in row.items() if name != "old_log_probs"} for row in rows]
    found = analyze([oracles.write(rows, tmp_path / "d.parquet")], presets=()).candidates
    full = oracles.make_rows(sigma, many=60, outliers=0.02)

    assert list(found) == [one.name for one in CANDIDATES]
    for name, numbers in found.items():
        wanted = error(full, name, policy)
        assert numbers["error"].value == pytest.approx(wanted, rel=1e-9), name
        for other in found.keys() - {name}:
            above = wanted / error(full, other, policy) - 1
            assert numbers[f"error_above.{other}"].value == pytest.approx(above, rel=1e-7, abs=1e-9), name


def drifted(tmp_path, along, many=256, shift=0.0):
    """Make sequences whose tokens have moved by `along` times the advantage, plus noise of 0.02."""
    chance = np.random.default_rng(0)
    rows = []
    for at in range(many):
        a = float(chance.normal())
        rollout = -chance.exponential(1, 40) - 1
        old = rollout + along * a + 0.02 * chance.normal(size=40)
        columns = {"rollout_log_probs": rollout, "old_log_probs": old, "advantages": np.full(40, a + shift)}
        rows.append({name: x.tolist() for name, x in columns.items()} | {"group_id": f"g{at // 4}"})
    return analyze([oracles.write(rows, tmp_path / "d.parquet")], presets=()).candidates


def test_a_shift_along_the_advantages_makes_no_correction_significantly_worse(tmp_path):
    moved, still = (drifted(tmp_path, along)["none"][f"error_above.{TIS}"] for along in (0.1, 0.0))

    assert moved.interval[0] > 0.02
    assert abs(still.value) < 1e-3
    assert still.interval[0] < 0 < still.interval[1]
    assert moved.unit == "fraction"


def test_the_interval_of_a_difference_is_paired(tmp_path):
    """It is narrower by far than those of the two errors: a prompt is drawn equally often for both."""
    found = drifted(tmp_path, 0.0)
    low, high = found[TIS]["error"].interval
    below, above = found[TIS]["error_above.none"].interval

    assert above - below < 0.05 * (high - low) / found[TIS]["error"].value


def test_a_constant_added_to_all_advantages_changes_no_error(tmp_path):
    one, other = (drifted(tmp_path, 0.1, shift=x) for x in (0.0, 5.0))
    for name in one:
        assert other[name]["error"].value == pytest.approx(one[name]["error"].value, rel=1e-9)


def test_without_advantages_there_is_no_error(tmp_path):
    rows = oracles.make_rows(0.1)
    for row in rows:
        del row["advantages"]
    found = analyze([oracles.write(rows, tmp_path / "d.parquet")], presets=()).candidates
    assert not [key for key in found[NOTHING.name] if key.startswith("error")]


def test_the_interval_of_a_mean_reward_stays_within_the_rewards_seen(tmp_path):
    rows = [row | {"rewards": float(i in (3, 4))} for i, row in enumerate(oracles.make_rows(0.1, many=60))]
    found = analyze([oracles.write(rows, tmp_path / "d.parquet")], presets=())
    low, high = found.whole["mean_reward"].interval
    assert 0 <= low < found.whole["mean_reward"].value < high <= 1
    series = found.charts.steps.series["reward"] if found.charts.steps else None
    assert series is None or all(low is None or low >= 0 for low in series.low)


def test_the_mean_reward_is_that_of_the_sequences_with_a_token(tmp_path):
    chance = np.random.default_rng(1)
    rows = oracles.make_rows(0.1, many=60)
    rewards = chance.normal(size=len(rows)).tolist()
    given = [row | {"rewards": reward} for row, reward in zip(rows, rewards, strict=True)]
    found = analyze([oracles.write(given, tmp_path / "d.parquet")], presets=()).whole["mean_reward"]
    there = [x for one, x in zip(oracles.sequences(rows), rewards, strict=True) if one.n]

    assert found.value == pytest.approx(math.fsum(there) / len(there), rel=1e-12)
    assert found.interval[0] < found.value < found.interval[1]
    assert found.interval == pytest.approx((2 * found.value - found.interval[1], found.interval[1]))
    bare = analyze([oracles.write(rows, tmp_path / "e.parquet")], presets=()).whole["mean_reward"]
    assert bare.unknown == "missing column rewards"
