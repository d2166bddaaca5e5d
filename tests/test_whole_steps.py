"""What needs a step's rows together: M2PO's cut, normalised weights, advantages made of rewards."""

from __future__ import annotations

import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from offpol_diag.core import whole_steps
from offpol_diag.dump.read import Dump
from offpol_diag.presets import Preset, Reject, Weight, catalogue
from tests import oracles
from tests.oracles import write
from tests.reading import analyze


def m2po(upper=0.02):
    return Preset("m2", "", reject=(Reject("k2", "batch", upper=upper),))


NORMAL = Preset("n", "", weight=Weight(upper=2.0, normalize=True))


def made(steps, sigma=0.3):
    """Make one row per entry of `steps`, each with a reward, in groups that are scattered."""
    rows = oracles.make_rows(sigma, 7, len(steps))
    draw = np.random.default_rng(3)
    for at, (row, step) in enumerate(zip(rows, steps, strict=True)):
        row |= {"step": step, "group_id": f"g{(at * 7) % 13}", "rewards": float(draw.integers(0, 2))}
        del row["advantages"]
    return rows


STEPS = [1, 2, 1, None, 2, 3, 1, 1, None, 2, 2, 1] * 3
STEPLESS = [{k: v for k, v in row.items() if k != "step"} for row in made([0] * 30, 0.5)]
TWO = [{"rollout_log_probs": [-2.0, -3.0], "old_log_probs": [-1.0, -2.0]}]
FIVE = [{"rollout_log_probs": [-2.0] * 5, "old_log_probs": [-1.0, -1.0, -2.0, -2.0, -2.0]}]


@pytest.mark.parametrize(
    ("rows", "upper", "batch_tokens"),
    [
        *((made(STEPS, 0.4), *case) for case in ((5e-5, 10**6), (0.005, 150), (0.02, 37), (25.0, 150))),
        (STEPLESS, 0.02, 10**6),
        (TWO, 0.02, 10**6),  # never every token: Δ² = 1 of both, so that no removal helps
        (FIVE, 0.15, 10**6),  # Δ² = 1, 1, 0, 0, 0: without one the mean is 0.25; of equals none goes first
    ],
    ids=["least", "less", "usual", "none", "without steps", "two", "five"],
)
def test_m2po_removes_the_largest_squares_of_each_step_until_the_rest_is_below(
    tmp_path, rows, upper, batch_tokens
):
    preset, out = m2po(upper), tmp_path / "sequences.parquet"
    path = write(rows, tmp_path / "dump.parquet")
    analyze([path], presets=[preset], sequences=out, batch_tokens=batch_tokens)
    found = pq.read_table(out)["m2.kept_tokens"].to_pylist()

    data = oracles.sequences(rows)
    cuts = oracles.cuts_of(data, preset)
    assert found == [oracles.apply(one, preset, cuts[one.step]).kept_tokens for one in data]
    assert sum(found) == {id(TWO): 2, id(FIVE): 3}.get(id(rows), sum(found))


def test_normalised_numbers_stay_exact_when_every_weight_is_near_one(tmp_path):
    rows = made([1, 2] * 100, 1e-6)
    away = []
    for step in (1, 2):
        deltas = (d for one in oracles.sequences(rows) if one.step == step for d in one.delta("old"))
        pool = [math.expm1(d) for d in deltas]
        mean = oracles.mean(pool)
        away += [(w - mean) / (1 + mean) for w in pool]
    found = analyze([write(rows, tmp_path / "dump.parquet")], presets=[NORMAL]).preset("n")["weight_std"]

    assert found.value == pytest.approx(math.sqrt(oracles.mean([x * x for x in away])), rel=1e-7)


# ---------------------------------------------------------------- advantages made of rewards


def grpo(rewards):
    """Compute (r − mean) / (std with n − 1, + 1e-6); of a group of one, the reward itself over 1 + 1e-6."""
    if len(rewards) == 1:
        return [rewards[0] / (1 + 1e-6)]
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-6) for r in rewards]


REWARDED = made([0, 1] * 30)  # groups of one to six, the same prompts in two steps
REWARDED.append(REWARDED[0] | {"group_id": "alone", "sequence_id": "alone"})


def with_advantages(rows):
    groups = {}
    for at, row in enumerate(rows):
        groups.setdefault((row["step"], row["group_id"]), []).append(at)
    filled = [dict(row) for row in rows]
    for members in groups.values():
        for at, advantage in zip(members, grpo([rows[at]["rewards"] for at in members]), strict=True):
            filled[at]["advantages"] = advantage
    return filled


def without(column):
    return [{key: x for key, x in row.items() if key != column} for row in REWARDED]


@pytest.mark.parametrize("batch_tokens", [150, 10**6])
def test_advantages_made_of_rewards_are_those_of_grpo(tmp_path, batch_tokens):
    presets = catalogue.load().resolve("token_is,opsm,pure_is")
    given = analyze([write(with_advantages(REWARDED), tmp_path / "a.parquet")], presets=presets)
    path = write(REWARDED, tmp_path / "b.parquet")
    made_here = analyze([path], presets=presets, batch_tokens=batch_tokens)

    for name in given.presets:
        assert made_here.presets[name].needs == []
        assert {k: n.value for k, n in made_here.preset(name).items()} == pytest.approx(
            {k: n.value for k, n in given.preset(name).items()}, rel=1e-9, abs=1e-12, nan_ok=True
        )
    assert any("made of the rewards" in note for note in made_here.dump.notes)
    assert not any("made of the rewards" in note for note in given.dump.notes)


def test_given_advantages_are_never_replaced_and_without_groups_or_rewards_there_are_none(tmp_path):
    given = [row | {"advantages": 1.0} for row in REWARDED]
    found = analyze([write(given, tmp_path / "a.parquet")], presets=[])
    assert [place.key for place in found.at("advantage_sign")] == ["A > 0"]

    for column in ("group_id", "rewards"):
        found = analyze([write(without(column), tmp_path / "b.parquet")], presets="opsm")
        assert found.presets["opsm"].needs == ["advantages"]


def test_large_rewards_that_hardly_differ_keep_their_advantages(tmp_path):
    rows = [row | {"rewards": 1e6 + 0.001 * (at % 3)} for at, row in enumerate(REWARDED)]
    given, found = (
        analyze([write(some, tmp_path / "a.parquet")], presets="token_is", batch_tokens=60).preset("token_is")
        for some in (with_advantages(rows), rows)
    )
    assert found["pg_loss"].value == pytest.approx(given["pg_loss"].value, rel=1e-5)


# ---------------------------------------------------------------- the reading before


def test_a_step_with_too_many_tokens_above_the_bound_is_refused(tmp_path, monkeypatch):
    rows = made(STEPS, 0.4)
    path, above = write(rows, tmp_path / "a.parquet"), dict.fromkeys(STEPS, 0)
    for one in oracles.sequences(rows):
        above[one.step] += sum(d * d / 2 >= 0.02 for d in one.delta("old"))
    most = max(above.values())
    assert most < sum(above.values())  # a step's, not the dump's
    monkeypatch.setattr(whole_steps, "MOST_VALUES", most)
    assert analyze([path], presets=[m2po()], batch_tokens=37).preset("m2")
    monkeypatch.setattr(whole_steps, "MOST_VALUES", most - 1)
    with pytest.raises(whole_steps.TooMany, match="sorts them in memory"):
        analyze([path], presets=[m2po()], batch_tokens=37)
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


@pytest.mark.parametrize("presets", [[m2po()], ["token_is"]], ids=["M2PO", "token_is"])
def test_too_many_steps_are_refused_in_one_reading(tmp_path, monkeypatch, readings, presets):
    path = write(made(list(range(9))), tmp_path / "a.parquet")
    monkeypatch.setattr(whole_steps, "MOST_STEPS", 4)
    with pytest.raises(whole_steps.TooMany, match="more than 4 training steps"):
        analyze([path], presets=presets)
    assert len(readings) == 1


@pytest.mark.parametrize(
    ("presets", "column", "many"),
    [
        (["token_is"], "rewards", 1),
        ([m2po()], "rewards", 2),
        (["token_is"], "group_id", 1),
        (["opsm"], "", 2),
    ],
)
def test_a_dump_is_read_twice_only_where_a_step_must_be_known(tmp_path, readings, presets, column, many):
    analyze([write(without(column), tmp_path / "a.parquet")], presets=presets)
    assert len(readings) == many
