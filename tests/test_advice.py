"""The worlds of the advice benchmark: what is called true is true, and what is called exact is exact."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.advice import draws, judge, methods, regimes, rollouts, truth, worlds
from benchmarks.advice.worlds import Array, Reward, World, log_softmax
from offpol_diag.candidates import CANDIDATES

REWARDS: tuple[Reward, ...] = ("found", "ladder", "dense", "drifting")


def small(reward: Reward, seed: int = 3, longest: int = 6) -> World:
    return worlds.make(longest, reward, seed, vocabulary=3, prompts=2)


def value(world: World, theta: Array) -> Array:
    """Mean reward of each prompt under the policy, [Q]."""
    return truth.backward(world, np.exp(log_softmax(theta))).start


def slope(world: World, theta: Array, at: tuple[int, int, int]) -> Array:
    step = np.zeros_like(theta)
    step[at] = 1e-5
    return (value(world, theta + step) - value(world, theta - step)) / 2e-5


@pytest.mark.parametrize("reward", REWARDS)
def test_the_true_gradient_is_the_slope_of_the_mean_reward_times_what_normalising_makes_of_it(
    reward: Reward,
) -> None:
    world = small(reward)
    found = truth.gradient(world)

    for at in ((0, 0, 0), (1, 2, 1), (0, 3, 2), (1, 3, 0)):
        one = slope(world, world.theta, at)[at[0]] / len(world.theta)
        if world.sparse:
            succeeds, fails = worlds.mean_advantages(float(value(world, world.theta)[at[0]]), world.group)
            one *= succeeds - fails
        else:
            one *= 1 - 1 / world.group
        assert found[at] == pytest.approx(one, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("chance", [0.0, 0.03, 0.5, 1.0])
def test_mean_advantages_of_a_group_are_those_of_all_its_outcomes(chance: float) -> None:
    world = small("found")
    totals = {0: 0.0, 1: 0.0}
    for outcome in range(2**4):
        rewards = np.array([outcome >> k & 1 for k in range(4)], float)
        weight = math.prod(chance if one else 1 - chance for one in rewards[1:])
        spread = math.sqrt(sum((one - rewards.mean()) ** 2 for one in rewards) / 3)
        totals[int(rewards[0])] += weight * (rewards[0] - rewards.mean()) / (spread + worlds.TINY)

    assert worlds.mean_advantages(chance, 4) == pytest.approx((totals[1], totals[0]))
    assert world.group == 8


@pytest.mark.parametrize("reward", REWARDS)
def test_an_expected_gradient_on_policy_is_the_true_one(reward: Reward) -> None:
    world = small(reward)

    found = judge.expectations(world, rollouts.Fixed((log_softmax(world.theta),)))

    for name in methods.TOKEN:
        np.testing.assert_allclose(found[name], truth.gradient(world).ravel(), atol=1e-15)


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("make", [rollouts.noise(0.3), rollouts.quantised(0.5), rollouts.replay(4, 2, 0.5)])
def test_drawn_gradients_agree_with_the_exact_ones(reward: Reward, make: rollouts.Make) -> None:
    world = small(reward)
    theta, rollout = make(world, np.random.default_rng(1))
    world = world.at(theta)
    exact = judge.expectations(world, rollout)
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(6, theta.size))

    drawn = draws.draw(world, rollout, 8192, rng)
    for name, found in draws.gradients(world, drawn, drawn.weights()).items():
        if name in exact:
            along = found @ directions.T
            error = along.std(0, ddof=1) / math.sqrt(len(along))
            assert np.all(np.abs(along.mean(0) - directions @ exact[name]) < 4 * error), name


def test_an_uncorrected_gradient_is_not_the_true_one_off_policy() -> None:
    world = small("dense")
    theta, rollout = rollouts.quantised(0.5)(world, np.random.default_rng(1))

    found = judge.expectations(world.at(theta), rollout)

    assert np.abs(found["none"] - truth.gradient(world).ravel()).max() > 0.01


def test_lengths_are_uniform_between_half_of_the_longest_and_the_longest() -> None:
    world = small("found", longest=8)
    rollout = rollouts.Fixed((log_softmax(world.theta),))

    lengths = draws.draw(world, rollout, 4000, np.random.default_rng(0)).lengths

    counts = np.bincount(lengths, minlength=9)
    assert counts[:4].sum() == 0
    assert np.abs(counts[4:] - 800).max() < 4 * math.sqrt(800)


def test_the_methods_judged_are_the_candidates_that_can_be_recommended() -> None:
    assert set(methods.NAMES) == {one.name for one in CANDIDATES}
    assert set(methods.SEQUENCE) == {one.name for one in CANDIDATES if one.judges == "sequence"}


def test_the_alignment_of_drawn_batches_is_the_one_that_is_computed() -> None:
    world = small("dense")
    theta, rollout = rollouts.quantised(0.5)(world, np.random.default_rng(1))
    world = world.at(theta)
    found = judge.judge(world, rollout, 8192, seed=0)

    drawn = draws.draw(world, rollout, 64 * 600, np.random.default_rng(5))
    true = truth.gradient(world).ravel()
    for name, groups in draws.gradients(world, drawn, drawn.weights()).items():
        batches = groups.reshape(600, 8, -1).mean(1)
        along = batches @ true / np.linalg.norm(true)
        aligned = along.mean() / math.sqrt(np.square(batches).sum(1).mean())
        error = found.error(name) if name in methods.SEQUENCE else 0.0
        assert aligned == pytest.approx(found.alignment(name, 64), abs=0.06 + 4 * error), name


def test_the_best_in_hindsight_counts_sampled_methods_by_what_they_surely_reach() -> None:
    exact = {name: judge.Moments(0.5, 1.0, 0.0) for name in methods.TOKEN}
    sampled = {name: judge.Moments(0.6, 1.0, 0.0) for name in methods.SEQUENCE}
    blocks = {name: (judge.Moments(0.5, 1.0, 0.0),) * judge.BLOCKS for name in (judge.NEAREST, *sampled)}
    shaken = tuple(judge.Moments(0.6 + 0.02 * (-1) ** k, 1.0, 0.0) for k in range(judge.BLOCKS))

    sure = judge.Judgement(8, exact | sampled, blocks)
    doubtful = judge.Judgement(8, exact | sampled, blocks | dict.fromkeys(methods.SEQUENCE, shaken))

    assert sure.best(64)[1] == pytest.approx(0.6)
    assert doubtful.best(64) == ("none", 0.5)
    assert doubtful.reached("seq_tis_2.0", 64) == 1


def test_held_out_regimes_share_no_world_and_no_rollout_with_the_others() -> None:
    every = list(regimes.regimes())
    tuned, held_out = ([one for one in every if one.held_out is which] for which in (False, True))

    assert len({one.name for one in every}) == len(every)
    assert {one.seed for one in tuned}.isdisjoint(one.seed for one in held_out)
    assert {one.kind.name for one in tuned}.isdisjoint(one.kind.name for one in held_out)
    assert {one.reward for one in tuned}.isdisjoint(one.reward for one in held_out)
    assert {one.kind.kind for one in tuned} == {one.kind.kind for one in held_out}
