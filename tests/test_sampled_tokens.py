"""What sampled tokens tell of a logged number: its token, model and sampler; and look-alikes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from faults import Policy, bugs, colder, diagnosed, old, rollout, seeded
from faults import responses as sampled

from offpol_diag.diagnosis.causes.ids import SpecialToken
from offpol_diag.diagnosis.causes.values import Sentinel
from offpol_diag.diagnosis.rows import Rows

OLD = Policy()


@cache
def honest(size=0.0, temperature=1.0):
    """Return a dump whose trainer is right: the same weights, or others."""
    return sampled(lambda t: colder(temperature, OLD.moved(size)), colder(temperature, OLD))


def noisy(size):
    """Compute the trainer's log-probs with noise of its logits, anew for each sequence."""
    return old(lambda i, p, q, ids: p - size * np.expm1(p) * seeded(i).normal(size=len(p)))(honest())


def certain(share):
    """Return a dump in which the engine logs 0.0 where it is certain, and the trainer doubts a few of these.

    At a `share` of all tokens, whatever they are, 0.0 stands for a missing value.
    """

    def change(i, q, p, ids):
        chance = seeded(i)
        zero = chance.random(len(q)) < 0.1
        doubt = -chance.exponential(0.4, len(q)) * (chance.random(len(q)) < 0.12) - 1e-4
        p[:] = np.where(zero, doubt, p)
        return np.where(zero | (chance.random(len(q)) < share), 0.0, q)

    given = honest(0.3)
    return rollout(change)(given | {"old_log_probs": [x.copy() for x in given["old_log_probs"]]})


@pytest.mark.parametrize(("share", "causes"), [(0.0, []), (0.05, ["sentinel"])])
def test_zeros_of_a_peaked_policy_are_no_sentinels(tmp_path, share, causes):
    """A missing value stands at tokens of all kinds; another model is seldom far off where one is certain."""
    assert bugs(diagnosed(tmp_path, certain(share))) == causes


@pytest.mark.parametrize(("lowest", "causes"), [(-1.45, []), (-6.0, ["wrong_mask"])])
def test_a_token_that_truncated_sampling_left_alone_is_no_sentinel(lowest, causes):
    """Its log-prob is exactly 0.0; the trainer's is no further below it than below all others."""
    chance, many = seeded(0), 40 * 64
    q, alone = -chance.uniform(0.1, 3.0, many), np.arange(many) % 16 < 3
    q[alone] = 0.0
    p = q - np.where(alone, -chance.uniform(lowest, -0.5, many), chance.uniform(0.1, 1.5, many))
    rows = Rows(q, p, np.arange(0, many + 1, 64), np.tile(np.arange(64), 40), chance.integers(0, 99, many))
    found = Sentinel().look(rows)
    assert [one.cause.id for one in (found,) if one] == causes


@pytest.mark.parametrize(("around", "named"), [(0.04, True), (0.47, False)])
def test_an_id_is_scored_differently_where_the_tokens_before_it_agree(around, named):
    """Where weights differ, some id differs most."""
    chance, many = seeded(0), 40 * 64
    ids = chance.integers(0, 31, many)
    q = np.where(ids == 5, -1.0, -3.0)
    p = q - np.where(ids == 5, 3.0, around * chance.choice([-1, 1], many))
    rows = Rows(q, p, np.arange(0, many + 1, 64), np.tile(np.arange(64), 40), ids)
    assert (SpecialToken().look(rows) is not None) is named


@pytest.mark.parametrize("shift", [0, 1])
def test_a_shift_behind_a_tools_answer_only_is_found(tmp_path, shift):
    """The mask has a hole of five tokens; what comes after it is shifted against the other column."""
    given = honest()
    masks = [(np.arange(len(q)) < 15) | (np.arange(len(q)) >= 20) for q in given["rollout_log_probs"]]
    moved = old(lambda i, p, q, ids: np.append(p[:20], np.roll(p[20:], shift)))(given)
    found = diagnosed(tmp_path, moved | {"response_mask": [x.astype(np.int8) for x in masks]})
    assert bugs(found) == ["off_by_one"] * shift


BF16 = {"rollout_dtype": "bfloat16"}


def by_step(given, first=0, lag=0):
    """Give each of four steps a part of the prompts, at a recorded lag."""
    step = [first + group % 4 for group in given["group_id"]]
    return given | {"step": step, "policy_lag": [lag] * len(step)}


OTHERS = {
    "from step 0 on": (True, lambda: by_step(honest(1.0)), BF16),
    "nothing recorded": (False, lambda: by_step(honest(1.0)), None),
    "fp8 recorded": (False, lambda: by_step(honest(1.0)), {"rollout_dtype": "fp8"}),
    "step 0 not in the dump": (False, lambda: by_step(honest(1.0), 1), BF16),
    "at a lag": (False, lambda: by_step(honest(1.0), lag=1), BF16),
    "small": (False, lambda: by_step(honest(0.1)), BF16),
    "not at step 0": (False, lambda: by_step(late()), BF16),
    "noise of single tokens, and experts": (
        False,
        lambda: by_step(noisy(0.6)),
        BF16 | {"model": "Mixtral-8x7B"},
    ),
}


def late():
    """Return another model whose first step is that of the same weights."""
    right = honest()
    other = honest(1.0)
    names = ("rollout_log_probs", "old_log_probs", "token_ids")
    first = [group % 4 == 0 for group in right["group_id"]]
    return right | {name: [(right if at else other)[name][i] for i, at in enumerate(first)] for name in names}


@pytest.mark.parametrize("name", OTHERS)
def test_two_models_are_told_where_no_weights_and_no_format_explain_it(tmp_path, name):
    told, make, recorded = OTHERS[name]
    found = diagnosed(tmp_path, make(), recorded=recorded)
    assert ("model_differs" in [one.id for one in found.causes]) is told
    if told:
        assert "offpol-diag rescore" in found.causes[0].fix


STEEP = [1.4, 0.7, 0.4, *[0.25] * 5]
"""|Δ|/(1 − π) of the first tokens after another prompt."""


@pytest.mark.parametrize(("begin", "told"), [(STEEP, True), ([1.4] * 3 + [0.9] * 5, False)])
def test_a_first_token_that_is_far_off_is_another_prompt_where_it_fades_at_once(tmp_path, begin, told):
    """Weights that were updated during a response are off alike for a while."""

    def change(i, p, q, ids):
        size = np.append(begin, np.full(len(p), 0.01))[: len(p)]
        return p + size * np.expm1(p) * seeded(i).choice([-1, 1], len(p), p=[0.3, 0.7])

    found = diagnosed(tmp_path, old(change)(honest()))
    assert ("wrong_context" in [one.id for one in found.causes]) is told
