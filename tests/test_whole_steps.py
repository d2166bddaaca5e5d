"""What needs a step's rows together: M2PO's cut, normalised weights, advantages made of rewards."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.core import observe
from offpol_diag.dump.read import Dump
from offpol_diag.presets import Preset, Reject, Weight, catalogue
from tests import oracles
from tests.reading import analyze

M2PO = Preset("m2", "", reject=(Reject("k2", "batch", upper=0.02),))
NORMAL = Preset("n", "", weight=Weight(upper=2.0, normalize=True))


def made(steps, seed=0, sigma=0.3, most=30):
    """Make sequences of random length whose log-ratio is heavy-tailed; one row per entry of `steps`."""
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


def saved(rows, path):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def deltas(row):
    return [p - q for p, q in zip(row["old_log_probs"], row["rollout_log_probs"], strict=True)]


def by_step(rows):
    found = {}
    for at, row in enumerate(rows):
        found.setdefault(row.get("step"), []).append(at)
    return found


def sequences(rows, presets, folder, **options):
    out = folder / "sequences.parquet"
    analyze([saved(rows, folder / "dump.parquet")], presets=presets, device="cpu", sequences=out, **options)
    return pl.read_parquet(out)


def kept(rows, upper):
    """Count the kept tokens of each row: of each step those below the cut of the squares."""
    found = [0] * len(rows)
    for members in by_step(rows).values():
        cut = oracles.cut([d * d / 2 for at in members for d in deltas(rows[at])], upper)
        for at in members:
            found[at] = sum(d * d / 2 < cut for d in deltas(rows[at]))
    return found


STEPS = [1, 2, 1, None, 2, 3, 1, 1, None, 2, 2, 1] * 3
STEPLESS = [{k: v for k, v in row.items() if k != "step"} for row in made([0] * 30, sigma=0.5)]
TWO = [{"rollout_log_probs": [-2.0, -3.0], "old_log_probs": [-1.0, -2.0]}]
FIVE = [{"rollout_log_probs": [-2.0] * 5, "old_log_probs": [-1.0, -1.0, -2.0, -2.0, -2.0]}]


@pytest.mark.parametrize(
    ("rows", "upper", "batch_tokens"),
    [
        *((made(STEPS, sigma=0.4), *case) for case in ((5e-5, 10**6), (0.005, 150), (0.02, 37), (25.0, 150))),
        (STEPLESS, 0.02, 10**6),
        (TWO, 0.02, 10**6),  # never every token: Δ² = 1 of both, so that no removal helps
        (FIVE, 0.15, 10**6),  # Δ² = 1, 1, 0, 0, 0: without one the mean is 0.25; of equals none goes first
    ],
    ids=["least", "less", "usual", "none", "without steps", "two", "five"],
)
def test_m2po_removes_the_largest_squares_of_each_step_until_the_rest_is_below(
    tmp_path, rows, upper, batch_tokens
):
    preset = Preset("m2", "", reject=(Reject("k2", "batch", upper=upper),))
    found = sequences(rows, [preset], tmp_path, batch_tokens=batch_tokens)["m2.kept_tokens"].to_list()

    assert found == kept(rows, upper)
    assert sum(found) == {id(TWO): 2, id(FIVE): 3}.get(id(rows), sum(found))


def test_normalised_numbers_stay_exact_when_every_weight_is_near_one(tmp_path):
    rows = made([1, 2] * 100, sigma=1e-6)
    path = saved(rows, tmp_path / "dump.parquet")
    raw = [[math.exp(d) for d in deltas(row)] for row in rows]
    away = []
    for members in by_step(rows).values():
        pool = [w - 1 for at in members for w in raw[at]]
        mean = math.fsum(pool) / len(pool)
        away += [(w - mean) / (1 + mean) for w in pool]

    std = analyze([path], presets=[NORMAL], device="cpu").preset("n")["weight_std"].value

    expected = math.sqrt(math.fsum(x * x for x in away) / len(away))
    assert std == pytest.approx(expected, rel=1e-7)  # exp itself rounds Δ = 1e-6 to 1e-10


def grpo(rewards):
    """Compute (r − mean) / (std with n − 1, + 1e-6); of a group of one, the reward itself over 1 + 1e-6."""
    if len(rewards) == 1:
        return [rewards[0] / (1 + 1e-6)]
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-6) for r in rewards]


def rewarded():
    """Make groups of one to six whose sequences are scattered, the same prompts in two steps."""
    draw = np.random.default_rng(3)
    rows = [row | {"step": at % 2, "group_id": f"g{(at * 7) % 13}"} for at, row in enumerate(made([0] * 60))]
    rows.append(rows[0] | {"group_id": "alone"})
    for row in rows:
        row["reward"] = float(draw.integers(0, 2)) + 1e6 * float(draw.integers(0, 2) == 9)
        row["current_log_probs"] = [x - 0.01 for x in row["old_log_probs"]]
    return rows


def with_advantages(rows):
    groups = {}
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
    presets = catalogue.load().resolve("token_is,opsm,pure_is")
    given = analyze([saved(with_advantages(rows), tmp_path / "a.parquet")], presets=presets, device="cpu")
    made_here = analyze(
        [saved(rows, tmp_path / "b.parquet")], presets=presets, device="cpu", batch_tokens=batch_tokens
    )

    for name in given.presets:
        assert made_here.presets[name].needs == []
        assert {k: n.value for k, n in made_here.preset(name).items()} == pytest.approx(
            {k: n.value for k, n in given.preset(name).items()}, rel=1e-9, abs=1e-12, nan_ok=True
        )
    assert any("made of the rewards" in note for note in made_here.dump.notes)
    assert not any("made of the rewards" in note for note in given.dump.notes)


def test_given_advantages_are_never_replaced(tmp_path):
    rows = [row | {"advantages": 1.0} for row in rewarded()]

    found = analyze([saved(rows, tmp_path / "a.parquet")], presets=[], device="cpu")

    assert [place.key for place in found.at("advantage_sign")] == ["A > 0"]


@pytest.mark.parametrize("column", ["group_id", "reward"])
def test_without_groups_or_rewards_there_are_no_advantages(tmp_path, column):
    rows = [{k: v for k, v in row.items() if k != column} for row in rewarded()]

    found = analyze(
        [saved(rows, tmp_path / "a.parquet")], presets=catalogue.load().resolve("opsm"), device="cpu"
    )

    assert found.presets["opsm"].needs == ["advantages"]


def test_large_rewards_that_hardly_differ_keep_their_advantages(tmp_path):
    rows = [row | {"reward": 1e6 + 0.001 * (at % 3)} for at, row in enumerate(rewarded())]
    path = saved(rows, tmp_path / "a.parquet")
    preset = catalogue.load().resolve("token_is")
    expected = analyze([saved(with_advantages(rows), tmp_path / "b.parquet")], presets=preset, device="cpu")

    found = analyze([path], presets=preset, device="cpu", batch_tokens=60)

    assert found.preset("token_is")["pg_loss"].value == pytest.approx(
        expected.preset("token_is")["pg_loss"].value, rel=1e-5
    )


# ---------------------------------------------------------------- the reading before


def test_a_step_with_too_many_tokens_above_the_bound_is_refused(tmp_path, monkeypatch):
    rows = made(STEPS, sigma=0.4)
    path = saved(rows, tmp_path / "a.parquet")
    squares = [[d * d / 2 for at in some for d in deltas(rows[at])] for some in by_step(rows).values()]
    most = max(sum(x >= 0.02 for x in some) for some in squares)
    monkeypatch.setattr(observe, "MOST_VALUES", most)
    assert most < sum(x >= 0.02 for some in squares for x in some) / 2  # a step's, not the dump's
    assert analyze([path], presets=[M2PO], batch_tokens=37).preset("m2")
    monkeypatch.setattr(observe, "MOST_VALUES", most - 1)
    with pytest.raises(observe.TooMany, match="sorts them in memory"):
        analyze([path], presets=[M2PO], batch_tokens=37)
    assert analyze([path], presets=[NORMAL], batch_tokens=37).preset("n")


@pytest.fixture
def readings(monkeypatch):
    """Collect the dumps that are read, once for each reading."""
    found = []
    batches = Dump.batches

    def counted(dump, *more):
        found.append(dump)
        return batches(dump, *more)

    monkeypatch.setattr(Dump, "batches", counted)
    return found


@pytest.mark.parametrize("presets", [[M2PO], ["token_is"]], ids=["M2PO", "token_is"])
def test_too_many_steps_are_refused_in_one_reading(tmp_path, monkeypatch, readings, presets):
    path = saved(made(list(range(9))), tmp_path / "a.parquet")
    monkeypatch.setattr(observe, "MOST_STEPS", 4)
    with pytest.raises(observe.TooMany, match="more than 4 training steps"):
        analyze([path], presets=presets)
    assert len(readings) == 1


@pytest.mark.parametrize(
    ("presets", "column", "many"),
    [(["token_is"], "reward", 1), ([M2PO], "reward", 2), (["token_is"], "group_id", 1), (["opsm"], None, 2)],
)
def test_a_dump_is_read_twice_only_where_a_step_must_be_known(tmp_path, readings, presets, column, many):
    rows = [{key: x for key, x in row.items() if key != column} for row in rewarded()]
    analyze([saved(rows, tmp_path / "a.parquet")], presets=presets)
    assert len(readings) == many
