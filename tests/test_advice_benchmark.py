"""The worlds of the advice benchmark: what is called exact is exact."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.advice import judge, mismatch, page, regimes, worlds
from benchmarks.advice.mismatch import Make
from benchmarks.advice.worlds import Family, Reward
from offpol_diag.analyze import analyze
from offpol_diag.presets.candidates import CANDIDATES

WORLDS: list[tuple[Family, Reward]] = [
    ("table", "found"),
    ("table", "drifting"),
    ("network", "ladder"),
    ("network", "dense"),
]


def tiny(family, reward, longest=3):
    made = worlds.make(
        family, longest, reward, 3, vocabulary=3, prompts=2, hidden=4 if family == "network" else 0
    )
    return replace(made, group=3)


def responses(world, policy, q):
    """List every response to a prompt: probability, mean reward, (previous token, token) of each token.

    A sparse reward is 1 or 0, so that a response counts twice, by its chance of each.
    """
    found = []
    for length in range(1, len(world.ends) + 1):
        for tokens in itertools.product(range(world.vocabulary), repeat=length):
            if world.hidden and 0 in tokens[:-1]:
                continue
            chance, state = 1.0, np.eye(world.goal.shape[1])[0]
            steps = list(zip((world.vocabulary, *tokens), tokens, strict=False))
            for place, (before, token) in enumerate(steps):
                ended = 1.0 if world.hidden and token == 0 else world.ends[place]
                chance *= policy[q, before, token] * (ended if place == length - 1 else 1 - ended)
                state = state @ world.moves[q, :, token]
            if world.dense is not None:
                found.append((chance, sum(world.dense[q, b, a] for b, a in steps), steps))
            else:
                success = float(state @ world.goal[q])
                found += [(chance * success, 1.0, steps), (chance * (1 - success), 0.0, steps)]
    return found


def enumerated(world, policy, weights):
    """Compute the expected gradient of a group's first response over all groups of 3, [P] table weights."""
    train, total = np.exp(world.log_probs()), np.zeros_like(policy)
    for q in range(world.prompts):
        every = responses(world, policy, q)
        assert sum(chance for chance, *_ in every) == pytest.approx(1)
        rewards: dict[float, float] = {}
        for chance, reward, _ in every:
            rewards[round(reward, 12)] = rewards.get(round(reward, 12), 0.0) + chance
        for chance, reward, steps in every:
            pairs = itertools.product(rewards.items(), repeat=2)
            advantage = sum(
                one * two * float(worlds.advantages(world, np.array([reward, first, second]))[0])
                for (first, one), (second, two) in pairs
            )
            for before, token in steps:
                slope = np.eye(world.vocabulary)[token] - train[q, before]
                total[q, before] += chance * advantage * weights[q, before, token] * slope
    return world.pullback(total, np.arange(world.prompts)).sum(0) / world.prompts


@pytest.mark.parametrize(("family", "reward"), WORLDS)
def test_exact_gradients_are_those_of_all_responses(family, reward):
    world = tiny(family, reward, 3 if reward in ("found", "ladder") else 2)
    _, rollout = mismatch.per_context(world, np.random.default_rng(1), 0.5)
    policy = rollout.parts[0].mean()
    exact = judge.expected(world, rollout)

    on_policy = enumerated(world, np.exp(world.log_probs()), np.ones_like(policy))
    np.testing.assert_allclose(worlds.gradient(world), on_policy, atol=1e-6)
    for name in ("none", "token_tis_1.5", "token_icepop_0.5_2.0"):
        weights = judge.TOKEN[name](np.exp(rollout.parts[0].log_ratios(world))[0])
        np.testing.assert_allclose(exact[name], enumerated(world, policy, weights), atol=1e-6)


def test_the_gradient_of_a_network_is_that_of_the_expected_reward():
    world = tiny("network", "dense", 4)
    params = torch.from_numpy(world.params).requires_grad_()
    prompt, previous, offset, output, bias = (
        part.reshape(layer.shape)
        for part, layer in zip(
            params.split([layer.size for layer in world.layers()]), world.layers(), strict=True
        )
    )
    policy = (torch.tanh(prompt[:, None] + previous + offset) @ output + bias).softmax(-1)
    reward = torch.from_numpy(world.dense)
    value = torch.zeros(world.prompts, world.vocabulary + 1, dtype=torch.float64)
    goes_on = torch.tensor([0.0] + [1.0] * (world.vocabulary - 1))
    for place in range(4):  # from the last token to the first
        then = (
            goes_on * value[:, : world.vocabulary] if place else torch.zeros(world.prompts, world.vocabulary)
        )
        value = (policy * (reward + then[:, None])).sum(-1)
    value[:, -1].mean().backward()

    assert params.grad is not None
    found = worlds.gradient(world) / (1 - 1 / world.group)
    np.testing.assert_allclose(found, params.grad.numpy(), atol=1e-12)


HOSTS: Make = partial(mismatch.hosts, share=0.4, steps=3)
MAKES: dict[str, tuple[Make, float]] = {
    "per token": (mismatch.per_token, 0.4),
    "hosts": (HOSTS, 0.2),
    "replay": (partial(mismatch.replay, steps=(0, 2)), 0.2),
    "top-p": (partial(mismatch.top_p, p=0.8, raw=True), 0.1),
    "corrupted": (partial(mismatch.corrupted, rate=0.2, nats=2.0), 0.1),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(("family", "reward"), WORLDS)
def test_expected_gradients_agree_with_samples(name, family, reward):
    make, size = MAKES[name]
    world, rollout = make(tiny(family, reward, 6), np.random.default_rng(1), size)
    exact = judge.expected(world, rollout)
    drawn = judge.sample(world, rollout, 12_000, np.random.default_rng(0))
    directions = np.random.default_rng(2).normal(size=(5, len(world.params)))

    for method, weights in drawn.weights().items():
        if method in exact:
            along = judge.group_gradients(world, drawn, weights) @ directions.T
            error = along.std(0, ddof=1) / math.sqrt(len(along))
            assert np.all(np.abs(along.mean(0) - directions @ exact[method]) < 4.5 * error), method
    k3, length = judge.facts(world, rollout)
    delta = drawn.train - drawn.rollout
    each = np.exp(delta) - 1 - delta
    assert each.mean() == pytest.approx(k3, abs=4.5 * each.std() / math.sqrt(len(each) / length))
    assert drawn.length.mean() == pytest.approx(length, abs=4.5 * drawn.length.std() / math.sqrt(4000))


def test_the_alignment_of_drawn_batches_is_the_one_that_is_computed():
    world, rollout = mismatch.per_context(
        replace(tiny("network", "dense", 6), group=8), np.random.default_rng(1), 0.03
    )
    found = judge.judge(world, rollout, 8192, np.random.default_rng(0))

    drawn = judge.sample(world, rollout, 64 * 600, np.random.default_rng(5))
    true = worlds.gradient(world)
    for name, weights in drawn.weights().items():
        batches = judge.group_gradients(world, drawn, weights).reshape(600, 8, -1).mean(1)
        aligned = (batches @ true).mean() / np.linalg.norm(true) / math.sqrt(np.square(batches).sum(1).mean())
        errors = 4 * found[name].error / math.sqrt(found[name].square + found[name].noise / 8)
        assert aligned == pytest.approx(found[name].alignment(8), abs=0.03 + errors), name


def test_a_dump_holds_what_was_drawn(tmp_path):
    world, rollout = HOSTS(replace(tiny("network", "found", 9), group=8), np.random.default_rng(1), 0.05)
    drawn = judge.sample(world, rollout, 256, np.random.default_rng(0))
    judge.write(tmp_path / "dump.parquet", rollout, drawn, world.group)

    found = analyze([str(tmp_path / "dump.parquet")], presets=(), device="cpu", threads=1)

    assert (found.dump.sequences, found.dump.tokens, found.dump.groups) == (256, len(drawn.token), 32)
    assert found.whole["k1"].value == pytest.approx((drawn.rollout - drawn.train).mean(), abs=1e-6)


def test_magnitudes_are_those_at_which_k3_is_as_asked():
    world = tiny("network", "found", 9)
    for make, size in ((mismatch.per_token, 0.1), (partial(mismatch.stale, steps=2), 0.01)):
        found = mismatch.scaled(make, world, np.random.default_rng(1), size, k3=0.005, power=2.0)
        assert judge.facts(*found)[0] == pytest.approx(0.005, rel=0.3)


def test_every_candidate_is_among_the_methods_judged():
    assert {one.name for one in CANDIDATES} <= set(judge.METHODS)
    assert set(judge.SEQUENCE) < set(judge.METHODS)
    assert set(judge.SEQUENCE).isdisjoint(one.name for one in CANDIDATES)


def test_the_splits_share_no_seed_and_no_world():
    development, final = (regimes.regimes(split) for split in ("development", "final"))
    seeds = [one.seed for one in (*development, *final)]

    assert len({*seeds}) == len(seeds)
    assert {one.place for one in development}.isdisjoint(one.place for one in final)
    assert {one.kind.kind for one in final} <= {one.kind.kind for one in development}


def test_the_page_is_made_of_the_results_that_are_kept():
    kept = page.results()

    assert page.DOCS.read_text(encoding="utf-8") == page.text(kept), "run `page.write()`"
    for split in ("development", "final"):
        names = [row["name"] for row in kept.get(split, [])]
        assert names in ([], [one.name for one in regimes.regimes(split)])


def test_a_choice_is_scored_by_the_best_in_hindsight():
    row = {
        "alignment": {str(b): dict.fromkeys(judge.METHODS, 0.4) | {"none": 0.2} for b in judge.BATCHES},
        "best": {str(b): ["token_tis_2.0", 0.5] for b in judge.BATCHES},
        "chosen": {"recommended": ["none", "token_tis_2.0"]},
        "decision": ["no correction needed", "token TIS at 2.0"],
        "healthy": [False, True],
        "worse": [False, True],
        "lacking": {"token_ids": "token_tis_2.0"},
    }

    np.testing.assert_allclose(page.scores(row, "recommended"), [[0.4] * 3, [0.8] * 3])
    np.testing.assert_allclose(page.scores(row, page.HINDSIGHT), 0.8)
    assert page.stable([row]) == "0% of 1"
    assert page.opposite([row], "token_ids") == "100% of 1"
    assert page.opposite([row], "advantages") == "–"
    below, above = (
        [page.scores(one, "recommended")[0, 0] for one in some] for some in page.by_floor([row]).values()
    )
    assert (below, above) == ([0.8], [0.4])
    assert page.by_floor([row | {"healthy": [True, True]}])["above"] == []
    assert page.outdone([row]) == "1 of 2; 0.50"
    assert page.outdone([row | {"decision": [page.BUG, page.BUG]}]) == "0 of 0"
