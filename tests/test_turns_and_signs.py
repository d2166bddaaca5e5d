"""Near tokens by cells: presets that look at turns, or at the sign of A, are proven against all tokens."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from offpol_diag.analysis.tally import observe
from offpol_diag.engine import moments
from offpol_diag.engine.outcome import apply
from offpol_diag.engine.scene import RADII, Nearness, Scene, signs, splits
from offpol_diag.presets import Clip, Loss, Preset, Reject, Veto, Weight
from tests import oracles
from tests.test_near import ALL, Large, apart, opened, tallied

PARTED = ("slime_opsm", "miles_opsm", "roll_is_segment", "roll_turn")

OF_TURNS = Weight(over="segment", upper=1.2, safety=None)
PLAIN = Preset("p", "", loss="reinforce")
NEGATIVE = Reject("k1", "mean", None, 1e-4, advantage="negative", advantage_of="token")
CLIPPED, BELOW = Clip(0.2, 0.2, 3.0), Clip(0.3, None, None)
AWAY = Reject("tv", "mean", None, 0.01, advantage="away")

# ---------------------------------------------------------------- which presets

numerators = st.sampled_from([None, "old", "current"])
among = st.sampled_from(["all", "all", "left"])
safeties = {
    "safety": st.sampled_from([None, 0.02, 20.0]),
    "safety_at": st.sampled_from(["aggregate", "token"]),
}
turn_weights = st.builds(
    Weight,
    over=st.just("segment"),
    action=st.sampled_from(["truncate", "mask", "none"]),
    upper=st.sampled_from([1.001, 1.2]),
    lower=st.sampled_from([None, 0.99]),
    normalize=st.booleans(),
    strict=st.booleans(),
    overflow=st.sampled_from(["limit", "zero"]),
    among=among,
    **safeties,
)
judged = {"policy": numerators, "strict": st.booleans(), "among": among} | safeties
signs_of = st.sampled_from(["any", "negative", "positive", "against", "against_or_zero", "away"])
signed_rules = st.builds(  # they judge sequences, and drop their tokens by the sign of A
    lambda bounds, **of: Reject("k1", lower=bounds[0], upper=bounds[1], advantage_of="token", **of),
    bounds=st.sampled_from([(None, 1e-3), (-1e-3, None), (-1e-3, 1e-3)]),
    over=st.sampled_from(["sum", "mean", "max", "min"]),
    advantage=signs_of,
    **judged,
)
turn_rules = st.builds(
    Reject,
    statistic=st.just("ratio"),
    over=st.just("segment"),
    lower=st.sampled_from([None, 0.995]),
    upper=st.just(1.005),
    advantage=signs_of,
    **judged,
)
others = [
    Reject("ratio", "token", 0.5, 2.0),
    Reject("ratio", "mean", 0.99, 1.02),
    Reject("k3", "max", None, 1),
]
rules = st.one_of(signed_rules, signed_rules, turn_rules, st.sampled_from(others))
presets = st.builds(
    lambda rules, loss, **of: Preset(
        "", "", reject=tuple(rules), loss=loss, clip=CLIPPED if loss == "ppo_clip" else BELOW, **of
    ),
    policy=st.sampled_from(["old", "current"]),
    weight=st.one_of(
        turn_weights, turn_weights, st.sampled_from([None, Weight(upper=2.0), Weight("mean", upper=2)])
    ),
    rules=st.lists(rules, max_size=3),
    veto=st.sampled_from([None, Veto(lower=1e-4)]),
    loss=st.sampled_from(get_args(Loss)),
    logs=st.sampled_from([None, None, "roll", "slime", "open-instruct", "verl"]),
)


# ---------------------------------------------------------------- dumps


def turned(sigma, seed, signs, many=24):
    """Make rows of several turns; advantages that differ within them, by turn, or not, zeros among them."""
    rows = oracles.make_rows(sigma, seed=seed, many=many)
    draw = torch.Generator().manual_seed(seed)
    for i, row in enumerate(rows):
        n = len(row["advantages"])
        a = {
            "token": torch.randint(-1, 2, (n,), generator=draw),
            "row": torch.full((n,), (1, -1, 0)[i % 3]),
            "turn": (torch.arange(n) // 7 + i) % 3 - 1,
        }[signs]
        row["advantages"] = (a * (1 + 0.1 * i)).tolist()
    return rows


def alike(study, found, batch):
    split, whole = (tallied(study, found, batch, how) for how in (study.near, None))
    assert apart(split, whole, "sums") == {}
    assert apart(split, whole, "logged") == {}
    if study.normalised:
        for label, sums in split.states["normal"].sums.items():
            theirs = whole.states["normal"].sums[label].read()
            for name, x in sums.read().items():
                assert torch.allclose(x, theirs[name], rtol=1e-10, atol=1e-12), (label, name)
    for name in ("length", "group"):
        mine, theirs = (seen.states[name].values for seen in (split, whole))
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12), name
    mine, theirs = (seen.states["ranges"].read() for seen in (split, whole))
    for name, ends in mine.items():
        assert ends == pytest.approx(theirs[name], rel=1e-9, abs=1e-13), name


@settings(max_examples=20, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    st.lists(presets, min_size=1, max_size=4),
    st.sampled_from(["token", "row", "turn"]),
    st.sampled_from([1e-3, 0.02, 0.3]),
    st.integers(0, 99),
    st.sampled_from([30, 10**9]),
)
def test_any_preset_finds_by_turn_and_sign_what_it_finds_in_tokens(
    tmp_path, monkeypatch, found, signs, sigma, seed, block
):
    monkeypatch.setattr(moments, "BLOCK", block)
    tried = [replace(preset, name=f"p{i}") for i, preset in enumerate(found)]
    alike(*opened(turned(sigma, seed, signs), tmp_path, tried))


@pytest.mark.parametrize(
    ("signs", "sigma", "block"), [("token", 1e-3, 30), ("row", 0.02, 10**9), ("turn", 0.3, 30)]
)
def test_all_presets_that_ship_find_by_turn_and_sign_what_they_find_in_tokens(
    tmp_path, monkeypatch, signs, sigma, block
):
    monkeypatch.setattr(moments, "BLOCK", block)
    alike(*opened(turned(sigma, 7, signs), tmp_path))


# ---------------------------------------------------------------- what is looked at


def test_no_preset_that_ships_looks_at_every_token():
    near = Nearness.of(ALL)
    assert [preset.name for preset in ALL if not near.divides(preset)] == []
    assert {preset.name for preset in near.parted} == set(PARTED)


SEGMENTS = Reject("ratio", "segment", 0.9, 1.1, among="left")
PARTS = [  # a preset, and the signs by which its near tokens are parted: none where it looks at all tokens
    (replace(PLAIN, weight=OF_TURNS), ("",)),
    (replace(PLAIN, weight=replace(OF_TURNS, among="left")), ("",)),
    (replace(PLAIN, reject=(NEGATIVE,)), ("1+", "1-", "1=")),
    (replace(PLAIN, reject=(replace(NEGATIVE, advantage="any"),)), ("",)),
    (replace(PLAIN, reject=(SEGMENTS,)), ("",)),
    (replace(PLAIN, weight=replace(OF_TURNS, action="psis", upper=None)), ()),
    (replace(PLAIN, weight=OF_TURNS, veto=Veto(lower=0.99)), ()),
    (replace(PLAIN, weight=OF_TURNS, reject=(Reject("ratio", "token", 0.99, 1.01),)), ()),
    (replace(PLAIN, weight=Weight(upper=1.01), reject=(NEGATIVE,)), ()),
    (replace(PLAIN, reject=(replace(AWAY, among="left"),)), ()),
]


@pytest.mark.parametrize(("preset", "by"), PARTS, ids=str)
def test_by_which_signs_near_tokens_are_parted(preset, by):
    near = Nearness.of([preset])
    assert near.divides(preset) == bool(by)
    assert near.parted == ((preset,) if by else ())
    if by:
        assert signs(preset) == by
        assert not splits(preset, RADII[-1])


@pytest.mark.parametrize(
    ("make", "signs"),
    [
        (lambda i: replace(PLAIN, weight=replace(OF_TURNS, upper=1.2 + i)), "token"),
        (lambda i: replace(PLAIN, reject=(replace(NEGATIVE, upper=1e-4 * (i + 1)),)), "row"),
        (
            lambda i: replace(PLAIN, weight=OF_TURNS, reject=(replace(NEGATIVE, upper=1e-4 * (i + 1)),)),
            "token",
        ),
    ],
    ids=["turns", "sign", "turns and sign"],
)
def test_a_further_preset_of_turns_or_signs_costs_nothing_per_token(tmp_path, make, signs):
    rows = turned(0.005, 2, signs, many=200)
    named = [replace(make(i), name=f"p{i}") for i in range(6)]
    counts = []
    for tried in (named[:1], named):
        study, _, batch = opened(rows, tmp_path, tried)
        scene = Scene.of(batch, 0, 2, near=study.near)
        with Large(9 * batch.tokens // 10) as large:
            observe(study, scene)
        counts.append(large.count)
    assert counts[1] <= counts[0]  # the first one of a process may fill what stays


def test_weights_of_turns_are_those_of_their_tokens(tmp_path):
    """By hand: the geometric mean of r over each contiguous run of the mask."""
    row = oracles.make_rows(0.01, seed=3, many=2)[1]
    old = [-0.99, -0.97, -2.0, -1.04, -1.02]
    row |= {"rollout_log_probs": [-1.0, -1.0, -2.0, -1.0, -1.0], "response_mask": [1, 1, 0, 1, 1]}
    row |= {"old_log_probs": old, "current_log_probs": old, "advantages": [1.0] * 5, "token_ids": [1] * 5}
    preset = replace(PLAIN, weight=replace(OF_TURNS, upper=1.01))
    study, _, batch = opened([row], tmp_path, [preset])
    done = apply(Scene.of(batch, 0, 2, near=study.near), preset)
    expected = 2 * 1.01 + 2 * math.exp(-0.03)
    assert float(done.weight_sum[0]) == pytest.approx(expected, rel=1e-12)
    assert float(done.sums.first[0]) == pytest.approx(expected, rel=1e-12)
    assert float(done.weighed.high[0]) == 2
