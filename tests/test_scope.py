"""What looks beyond a sequence: batch-wide cuts, smoothed tails, normalisation, advantages from rewards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arviz_stats.base import array_stats

from offpol_diag.analyze import analyze
from offpol_diag.engine import scope
from offpol_diag.presets import Preset, Reject, Weight, catalogue
from offpol_diag.readers import Dump

M2PO = Preset("m2", "", reject=(Reject("k2", "batch", upper=0.02),))
NORMAL = Preset("n", "", weight=Weight(upper=2.0, normalize=True))


def made(steps: list[int | None], seed: int = 0, sigma: float = 0.3, most: int = 30) -> list[dict[str, Any]]:
    """Sequences of random length whose log-ratio is heavy-tailed; one row per entry of `steps`."""
    draw = np.random.default_rng(seed)
    rows = []
    for at, step in enumerate(steps):
        n = int(draw.integers(0 if at else 5, most))
        rollout = -draw.exponential(1.0, n)
        delta = sigma * draw.standard_t(3, n)
        rows.append(
            {
                "rollout_log_probs": rollout.tolist(),
                "old_log_probs": np.minimum(rollout + delta, 0.0).tolist(),
                "step": step,
                "group_id": at // 4,
            }
        )
    return rows


def saved(rows: list[dict[str, Any]], path: Path) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def deltas(row: dict[str, Any]) -> list[float]:
    return [p - q for p, q in zip(row["old_log_probs"], row["rollout_log_probs"], strict=True)]


def by_step(rows: list[dict[str, Any]]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for at, row in enumerate(rows):
        found.setdefault(row.get("step"), []).append(at)
    return found


def sequences(
    rows: list[dict[str, Any]], presets: list[Preset], folder: Path, **options: Any
) -> pl.DataFrame:
    out = folder / "sequences.parquet"
    analyze([saved(rows, folder / "dump.parquet")], presets=presets, device="cpu", sequences=out, **options)
    return pl.read_parquet(out)


# ---------------------------------------------------------------- M2PO


def kept_by_m2po(rows: list[dict[str, Any]], members: list[int], threshold: float) -> dict[int, int]:
    """Remove the largest Δ² until the mean of the rest is below the threshold; at least one token stays."""
    tokens = sorted(((d * d, at) for at in members for d in deltas(rows[at])), key=lambda pair: -pair[0])
    while len(tokens) > 1 and not math.fsum(x for x, _ in tokens) / len(tokens) < threshold:
        tokens.pop(0)
    return {at: sum(who == at for _, who in tokens) for at in members}


@pytest.mark.parametrize(
    ("threshold", "batch_tokens"), [(1e-4, 10**6), (0.01, 150), (0.04, 37), (0.3, 10**6), (50.0, 150)]
)
def test_m2po_removes_the_largest_squares_of_each_step_until_the_rest_is_below(
    tmp_path, threshold, batch_tokens
):
    rows = made([1, 2, 1, None, 2, 3, 1, 1, None, 2, 2, 1] * 3, sigma=0.4)
    preset = Preset("m2", "", reject=(Reject("k2", "batch", upper=threshold / 2),))

    found = sequences(rows, [preset], tmp_path, batch_tokens=batch_tokens)["m2.kept_tokens"].to_list()

    for members in by_step(rows).values():
        expected = kept_by_m2po(rows, members, threshold)
        assert {at: found[at] for at in members} == expected


def test_m2po_without_steps_takes_the_dump_for_one_batch(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "step"} for row in made([0] * 30, sigma=0.5)]

    found = sequences(rows, [M2PO], tmp_path)["m2.kept_tokens"].to_list()

    assert found == list(kept_by_m2po(rows, list(range(30)), 0.04).values())


def test_m2po_never_removes_every_token(tmp_path):
    """Two tokens with Δ² = 1, and equal: no removal helps, and of equal values none goes before another."""
    rows = [{"rollout_log_probs": [-2.0, -3.0], "old_log_probs": [-1.0, -2.0]}]

    assert sequences(rows, [M2PO], tmp_path)["m2.kept_tokens"].to_list() == [2]


def test_m2po_of_equal_values_at_the_cut_removes_all(tmp_path):
    """Δ² = 1, 1, 0, 0, 0: removing one leaves a mean of 0.25, removing both 0."""
    rows = [{"rollout_log_probs": [-2.0] * 5, "old_log_probs": [-1.0, -1.0, -2.0, -2.0, -2.0]}]
    preset = Preset("m2", "", reject=(Reject("k2", "batch", upper=0.15),))

    assert sequences(rows, [preset], tmp_path)["m2.kept_tokens"].to_list() == [3]


# ---------------------------------------------------------------- Pareto smoothing


@pytest.mark.parametrize("sigma", [0.02, 0.2, 1.0])
def test_smoothed_sequence_weights_are_those_of_arviz(tmp_path, sigma):
    some = made([0] * 400, sigma=sigma, most=12)
    rows = [row for row in some if row["rollout_log_probs"]][:324]  # 3√n is whole: arviz rounds it down
    preset = Preset("p", "", weight=Weight(over="sum", action="psis", safety=None))
    logs = np.array([math.fsum(deltas(row)) for row in rows])

    found = sequences(rows, [preset], tmp_path)
    weights = found["p.weight_sum"].to_numpy() / found["length"].to_numpy()

    assert len(set(logs)) == len(logs)
    assert np.sort(weights) == pytest.approx(np.sort(smoothed(logs)), rel=1e-6)
    assert (
        weights.argsort().tolist() == logs.argsort(kind="stable").tolist()
        or np.diff(np.sort(weights)).min() == 0
    )


def smoothed(logs: np.ndarray) -> np.ndarray:
    """arviz takes −log, and normalises; undone by the smallest weight, which smoothing leaves alone."""
    found, _ = array_stats.psislw(-logs.copy(), r_eff=1.0)
    found = np.asarray(found).ravel()
    return np.exp(found - found[logs.argmin()] + logs.min())


def test_smoothing_is_of_each_step_alone(tmp_path):
    one, two = made([1] * 200, seed=1), made([2] * 200, seed=2, sigma=0.8)
    preset = Preset("p", "", weight=Weight(over="token", action="psis", safety=None))
    mixed = [row for pair in zip(one, two, strict=True) for row in pair]

    together = sequences(mixed, [preset], tmp_path, batch_tokens=1500)["p.weight_sum"].to_list()

    assert together[0::2] == pytest.approx(
        sequences(one, [preset], tmp_path)["p.weight_sum"].to_list(), rel=1e-12
    )
    assert together[1::2] == pytest.approx(
        sequences(two, [preset], tmp_path)["p.weight_sum"].to_list(), rel=1e-12
    )


def test_smoothing_on_policy_changes_nothing(tmp_path):
    rows = [row | {"old_log_probs": row["rollout_log_probs"]} for row in made([0] * 50)]

    for preset in catalogue.load().resolve("psis_token,psis_sequence"):
        found = sequences(rows, [preset], tmp_path)
        assert found[f"{preset.name}.weight_sum"].to_list() == found["length"].to_list()


# ---------------------------------------------------------------- normalisation


def test_weights_are_divided_by_the_mean_of_their_own_step(tmp_path):
    rows = made([7, 7, 8, 9, 8, 7, None, 9, 9, 8] * 3, sigma=0.5)
    path = saved(rows, tmp_path / "dump.parquet")
    raw = [[min(math.exp(max(min(d, 20.0), -20.0)), 2.0) for d in deltas(row)] for row in rows]
    final: list[list[float]] = [[] for _ in rows]
    for members in by_step(rows).values():
        pool = [w for at in members for w in raw[at]]
        for at in members:
            final[at] = [w / (math.fsum(pool) / len(pool)) for w in raw[at]]
    every = [w for one in final for w in one]
    mean = math.fsum(every) / len(every)

    result = analyze([path], presets=[NORMAL], device="cpu", batch_tokens=50).presets["n"].metrics
    table = sequences(rows, [NORMAL], tmp_path, batch_tokens=50)["n.weight_sum"].to_list()

    assert table == pytest.approx([math.fsum(one) for one in final], rel=1e-12)
    assert result["weight_mean"].value == pytest.approx(mean, rel=1e-12)
    assert result["weight_std"].value == pytest.approx(
        math.sqrt(math.fsum((w - mean) ** 2 for w in every) / len(every)), rel=1e-10
    )
    assert result["chi2_token"].value == pytest.approx(
        math.fsum(w * w - 1 for w in every) / len(every), rel=1e-10, abs=1e-13
    )
    assert result["ess_tokens"].value == pytest.approx(
        math.fsum(every) ** 2 / (len(every) * math.fsum(w * w for w in every)), rel=1e-12
    )
    assert result["weight_max"].value == pytest.approx(max(every), rel=1e-12)
    assert result["weight_min"].value == pytest.approx(min(every), rel=1e-12)


def test_normalised_numbers_stay_exact_when_every_weight_is_near_one(tmp_path):
    rows = made([1, 2] * 100, sigma=1e-6)
    path = saved(rows, tmp_path / "dump.parquet")
    raw = [[math.exp(d) for d in deltas(row)] for row in rows]
    away: list[float] = []
    for members in by_step(rows).values():
        pool = [w - 1 for at in members for w in raw[at]]
        mean = math.fsum(pool) / len(pool)
        away += [(w - mean) / (1 + mean) for w in pool]

    std = analyze([path], presets=[NORMAL], device="cpu").presets["n"].metrics["weight_std"].value

    expected = math.sqrt(math.fsum(x * x for x in away) / len(away))
    assert std == pytest.approx(expected, rel=1e-7)  # exp itself rounds Δ = 1e-6 to 1e-10


# ---------------------------------------------------------------- advantages from rewards


def grpo(rewards: list[float]) -> list[float]:
    """(r − mean) / (std with n − 1, + 1e-6); alone: the reward itself over 1 + 1e-6."""
    if len(rewards) == 1:
        return [rewards[0] / (1 + 1e-6)]
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-6) for r in rewards]


def rewarded(seed: int = 3) -> list[dict[str, Any]]:
    """Groups of one to six whose sequences are scattered, the same prompts in two steps."""
    draw = np.random.default_rng(seed)
    rows = [row | {"step": at % 2, "group_id": f"g{(at * 7) % 13}"} for at, row in enumerate(made([0] * 60))]
    rows.append(rows[0] | {"group_id": "alone"})
    for row in rows:
        row["reward"] = float(draw.integers(0, 2)) + 1e6 * float(draw.integers(0, 2) == 9)
        row["current_log_probs"] = [x - 0.01 for x in row["old_log_probs"]]
    return rows


def with_advantages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[Any, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault((row["step"], row["group_id"]), []).append(at)
    filled = [dict(row) for row in rows]
    for members in groups.values():
        for at, advantage in zip(members, grpo([rows[at]["reward"] for at in members]), strict=True):
            filled[at]["advantages"] = advantage
    return filled


@pytest.mark.parametrize("batch_tokens", [150, 10**6])
def test_advantages_made_of_rewards_are_those_of_grpo(tmp_path, batch_tokens):
    rows = rewarded()
    presets = catalogue.load().resolve("token_is,trl_off_policy_mask,pure_is")
    given = analyze([saved(with_advantages(rows), tmp_path / "a.parquet")], presets=presets, device="cpu")
    made_here = analyze(
        [saved(rows, tmp_path / "b.parquet")], presets=presets, device="cpu", batch_tokens=batch_tokens
    )

    for name, expected in given.presets.items():
        found = made_here.presets[name]
        assert found.needs == []
        assert {k: n.value for k, n in found.metrics.items()} == pytest.approx(
            {k: n.value for k, n in expected.metrics.items()}, rel=1e-9, abs=1e-12, nan_ok=True
        )
    assert any("made of the rewards" in note for note in made_here.dump.notes)
    assert not any("made of the rewards" in note for note in given.dump.notes)


def test_given_advantages_are_never_replaced(tmp_path):
    rows = [row | {"advantages": 1.0} for row in rewarded()]

    found = analyze([saved(rows, tmp_path / "a.parquet")], presets=[], device="cpu")

    assert [place.key for place in found.by["advantage_sign"].places] == ["A > 0"]


@pytest.mark.parametrize("column", ["group_id", "reward"])
def test_without_groups_or_rewards_there_are_no_advantages(tmp_path, column):
    rows = [{k: v for k, v in row.items() if k != column} for row in rewarded()]

    found = analyze(
        [saved(rows, tmp_path / "a.parquet")], presets=catalogue.load().resolve("swift_opsm"), device="cpu"
    )

    assert found.presets["swift_opsm"].needs == ["advantages"]


def test_large_rewards_that_hardly_differ_keep_their_advantages(tmp_path):
    rows = [row | {"reward": 1e6 + 0.001 * (at % 3)} for at, row in enumerate(rewarded())]
    path = saved(rows, tmp_path / "a.parquet")
    preset = catalogue.load().resolve("token_is")
    expected = analyze([saved(with_advantages(rows), tmp_path / "b.parquet")], presets=preset, device="cpu")

    found = analyze([path], presets=preset, device="cpu", batch_tokens=60)

    assert found.presets["token_is"].metrics["pg_loss"].value == pytest.approx(
        expected.presets["token_is"].metrics["pg_loss"].value, rel=1e-5
    )


def test_too_many_steps_are_refused_in_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(made(list(range(9))), tmp_path / "a.parquet")
    monkeypatch.setattr(scope, "MOST_STEPS", 4)
    readings: list[Dump] = []
    batches = Dump.batches

    def counted(dump: Dump, *args: Any) -> Any:
        readings.append(dump)
        return batches(dump, *args)

    monkeypatch.setattr(Dump, "batches", counted)
    with pytest.raises(scope.TooManySteps, match="more than 4 training steps"):
        analyze([path], presets=[M2PO])
    assert len(readings) == 1
