"""Policy losses against a trainer's: their values, clips and denominators."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest

from offpol_diag.core.steps import weighted
from offpol_diag.presets import Clip, Loss, Veto
from tests.softmax import (
    AGGREGATIONS,
    BAND,
    CASES,
    FAR,
    GEOMETRIC,
    NEAR,
    RAW,
    SEQUENCE,
    TOKEN,
    numbers,
    preset,
    tokens,
    trained,
    world,
)

LOSSES = get_args(Loss)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Make a world with an advantage per token, and one with an advantage per sequence."""
    folder = tmp_path_factory.mktemp("worlds")
    return [world(folder, seed=1), world(folder, seed=2, per_sequence=True)]


@pytest.fixture(scope="module")
def found(worlds):
    return [dict(zip([one.name for one in CASES], numbers(x, *CASES), strict=True)) for x in worlds]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_loss_is_the_trainers(worlds, found, case):
    for x, got in zip(worlds, found, strict=True):
        for how in AGGREGATIONS if x is worlds[0] else AGGREGATIONS[:1]:
            assert got[case.name][how] == pytest.approx(trained(x, case, how), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize(("denominator", "how"), [("kept", "pg_loss"), ("all", "pg_loss_kept")])
def test_the_loss_of_a_preset_has_its_own_denominator(worlds, found, denominator, how):
    own = numbers(worlds[0], *(replace(case, denominator=denominator) for case in CASES))
    for case, got in zip(CASES, own, strict=True):
        assert got["pg_loss_own"] == pytest.approx(found[0][case.name][how], rel=1e-12, abs=1e-15)


def test_the_worlds_clip_on_both_sides_and_reject(worlds, found):
    """Else the comparisons above would show nothing."""
    for got in found:
        assert 0.1 < got["ppo"]["pg_clipfrac"] < 0.9
        assert 0.01 < got["ppo"]["pg_clipfrac_lower"] < 0.5
        assert 0.05 < got["gspo"]["pg_clipfrac"] < 0.9
        assert 0.05 < got["bypass"]["tokens_rejected"] < 0.9


@pytest.mark.parametrize("weight", [TOKEN, SEQUENCE], ids=["of tokens", "of sequences"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_a_loss_around_the_rollout_is_not_corrected_twice(worlds, loss, weight):
    bare = preset("bare", loss, policy="current")
    got, again = numbers(worlds[0], bare, replace(bare, name="weighted", weight=weight))

    assert [again[name] for name in AGGREGATIONS] == [got[name] for name in AGGREGATIONS]
    assert not weighted(bare)
    assert weighted(replace(bare, policy="old"))


# ---------------------------------------------------------------- laws


def test_gspo_of_one_token_sequences_is_ppo(tmp_path):
    x = world(tmp_path, lengths=(1,) * 40, seed=5)
    ppo, gspo = preset("ppo", "ppo_clip", weight=TOKEN), preset("gspo", "gspo", weight=TOKEN)

    assert numbers(x, ppo)[0] == pytest.approx(numbers(x, gspo)[0], rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_the_log_ratio_of_a_loss_is_bounded(worlds, loss):
    """Also where the bound is as tight as nothing but near tokens would need it."""
    for safety in (0.05, 0.4):
        case = preset("bounded", loss, clip=Clip(0.3, 0.4, None, safety))
        value = trained(worlds[0], case, "pg_loss")
        assert numbers(worlds[0], case)[0]["pg_loss"] == pytest.approx(value, rel=1e-9, abs=1e-14)


def test_two_clips_of_one_loss_do_not_share_their_numbers(worlds):
    one, two = preset("one", "ppo_clip"), preset("two", "ppo_clip", clip=Clip(0.3, 0.4, None))

    together, apart = numbers(worlds[0], one, two), [*numbers(worlds[0], one), *numbers(worlds[0], two)]
    assert together == [pytest.approx(each, rel=1e-12, abs=1e-15) for each in apart]


# ---------------------------------------------------------------- the edges


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_a_ratio_on_a_bound_of_the_clip_is_not_clipped(tmp_path, loss):
    """e^u of 2 and of 1/2, as it is in float64, without the clip and with one that ends there."""
    on = math.log(2)
    rows = [[(-2 * on, -2 * on, -on, 1.0)], [(-on, -on, -2 * on, -1.0)], [(-1.0, -1.0, -1.0, 1.0)]]
    free, bounded = (
        tokens(tmp_path, rows, one=preset("one", loss, clip=clip))["one"]
        for clip in (Clip(None, None, None), Clip(0.5, 1.0, None))
    )
    assert bounded["pg_clipfrac"] == 0
    assert bounded["pg_loss"] == free["pg_loss"]
    inside = tokens(tmp_path, rows, one=preset("one", loss, clip=Clip(0.5 - 1e-15, 1 - 1e-15, None)))["one"]
    assert inside["pg_clipfrac"] == pytest.approx(2 / 3)


def test_advantages_of_zero_give_no_loss(tmp_path):
    rows = [[(*FAR, 0.0), (*NEAR, 0.0)], [(*NEAR, 0.0)]]
    for loss in LOSSES:
        got = tokens(tmp_path, rows, one=preset("one", loss, policy="current", weight=RAW))["one"]
        assert got["pg_loss"] == 0


def test_rejecting_everything_leaves_no_loss(tmp_path):
    rows = [[(-1.0, -2.0, -2.0, 1.0)], [(-1.0, -3.0, -3.0, -1.0)]]
    for rule in ({"reject": (BAND,)}, {"reject": (GEOMETRIC,)}, {"veto": Veto(lower=0.9)}):
        got = tokens(tmp_path, rows, one=preset("one", "ppo_clip", weight=TOKEN, **rule))["one"]
        assert (got["pg_loss"], got["pg_loss_own"], got["pg_loss_kept"]) == (None, None, 0)


@pytest.mark.parametrize("loss", LOSSES)
def test_log_ratios_beyond_the_safety_bound_stay_finite(tmp_path, loss):
    rows = [[(-200.0, -200.0, -0.1, -1.0), (-0.1, -0.1, -200.0, 1.0)], [(-200.0, -200.0, -0.1, 1.0)]]
    for clip in (Clip(), Clip(None, None, None)):
        got = tokens(tmp_path, rows, one=preset("one", loss, clip=clip))["one"]
        assert math.isfinite(got["pg_loss"])
