"""Which tokens are near: looked at in blocks and by bounds, and by asking every rule about every token."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from offpol_diag.batch import Batch
from offpol_diag.engine import correction, ratios
from offpol_diag.engine import scene as nearness
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.scene import Nearness, Scene
from offpol_diag.engine.scope import BatchFits, Smooth
from offpol_diag.presets import Reject, Weight
from tests import oracles
from tests.test_near import opened

COINS = Reject("binary_kl", "token", None, 0.2)


def packed(rollout, old, current=None, advantages=None, lengths=None, runs=None, **scalars):
    """A batch of these log-probs, one sequence of one turn unless the lengths say what else."""
    tensors = [
        None if x is None else torch.tensor(x, dtype=torch.float64) for x in (old, current, advantages)
    ]
    n = len(rollout)
    starts = torch.tensor([0, *np.cumsum(lengths if lengths is not None else [n]).tolist()])
    return Batch(
        torch.tensor(rollout, dtype=torch.float64),
        starts,
        starts if runs is None else torch.tensor([0, *np.cumsum(runs).tolist()]),
        torch.arange(n),
        torch.arange(len(starts) - 1),
        torch.zeros(len(starts) - 1, dtype=torch.int64),
        *tensors,
        scalars={name: list(column) for name, column in scalars.items()},
    )


def near_tokens(batch, near, fits=None):
    return nearness.close(Ratios(batch, "rollout", fits or BatchFits()), near).tolist()


@pytest.mark.parametrize("sigma", [1e-4, 0.03, 0.5])
def test_blocks_find_what_the_whole_batch_does(tmp_path, monkeypatch, sigma):
    study, found, batch = opened(oracles.make_rows(sigma, seed=3, many=60, outliers=0.03), tmp_path)
    scene = Scene.of(batch, 0, 2, found.fits, study.near)
    whole = nearness.close(scene.ratios("rollout"), study.near)
    monkeypatch.setattr(ratios, "BLOCK", 7)

    assert torch.equal(nearness.close(scene.ratios("rollout"), study.near), whole)
    assert len(study.near.rules) + len(study.near.tails) > 5
    far, close = scene.far_and_near
    assert torch.equal(close.index, torch.nonzero(whole).flatten())
    assert torch.equal(far.index, torch.nonzero(~whole).flatten())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_log_ratios_that_are_no_numbers_are_far(bad):
    for columns in ({"old": [bad, -1.0]}, {"old": [-1.0, -1.0], "current": [bad, -1.0]}):
        assert near_tokens(packed([-1.0, -1.0], **columns), Nearness(0.09)) == [False, True]
    assert near_tokens(packed([bad, -1.0], [bad, -1.0]), Nearness(0.09)) == [False, True]


def test_a_token_is_far_where_only_the_drift_between_the_trainers_policies_is():
    assert near_tokens(packed([-1.0] * 2, [-1.08, -1.0], [-0.92, -1.0]), Nearness(0.09)) == [False, True]


@pytest.mark.parametrize("sign", ["any", "positive", "negative", "against", "against_or_zero", "away"])
def test_a_token_that_a_watched_rule_drops_is_far(sign):
    d = np.linspace(-0.09, 0.09, 301)
    q = np.tile([-0.05, -0.1, -2.0], 101)[:301]
    d = np.repeat(d[::3], 3)[:301]
    batch = packed(q, q + d, advantages=np.resize([1.0, -1.0, 0.0], 301), runs=[3] * 100 + [1])
    for rule in (COINS, Reject("ratio", "segment", 0.97, 1.03), Reject("prob_diff", "segment", -0.01, 0.01)):
        rule = replace(rule, advantage=sign)
        passes = correction.passes(Ratios(batch, "old"), rule).values
        within = torch.from_numpy(np.abs(q + d - q) <= 0.09)
        found = near_tokens(batch, Nearness(0.09, rules=(("old", rule),)))
        assert found == (passes & within).tolist()
        assert any(found)
        assert not all(found)


def test_cuts_and_tails_are_those_of_each_trainer_batch():
    d = np.linspace(-0.12, 0.12, 400)
    q = np.full(len(d), -0.7)
    batch = packed(q, q + d, lengths=[200, 200], step=[1, 2])
    delta = (batch.old - batch.rollout).numpy()
    rule, weight = Reject("k2", "batch", None, 0.02), Weight(over="token", action="psis", upper=None)
    ends = torch.tensor([0.2, 0.3], dtype=torch.float64)
    fits = BatchFits(
        cuts={("old", rule): {"1": 1e-3, "2": math.inf}},
        tails={("old", weight): {"1": None, "2": Smooth(0.05, ends, ends)}},
    )
    near = Nearness(0.09, rules=(("old", rule),), tails=(("old", weight),))
    first = np.arange(400) < 200
    expected = (np.abs(delta) <= 0.09) & np.where(first, delta**2 / 2 < 1e-3, delta <= 0.05)

    assert near_tokens(batch, near, fits) == expected.tolist()


# ---------------------------------------------------------------- some of a batch's tokens
