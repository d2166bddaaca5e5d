"""Which tokens are near: looked at in blocks and by bounds, and by asking every rule about every token."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from offpol_diag import catalogue, correction
from offpol_diag.batch import Batch
from offpol_diag.metrics import doubts, nearness
from offpol_diag.metrics.scene import Scene
from offpol_diag.near import RADII, Near
from offpol_diag.presets import Reject, Weight
from offpol_diag.ratios import Ratios
from offpol_diag.scope import Settled, Smooth
from tests import oracles
from tests.test_near import ALL, opened
from tests.test_series import near_batch

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


def both(batch, near, settled=None):
    """What the look at blocks finds, and what every rule says of every token."""
    ratios = Ratios(batch, "rollout", settled or Settled())
    watched = nearness._watched(ratios, near)
    return nearness.close(ratios, near), nearness._every(ratios, near.radius, watched)


@pytest.mark.parametrize("sigma", [1e-4, 0.03, 0.1, 0.5])
@pytest.mark.parametrize("block", [7, 1 << 14])
def test_the_look_at_blocks_finds_what_every_rule_says_of_every_token(tmp_path, monkeypatch, sigma, block):
    monkeypatch.setattr(nearness, "BLOCK", block)
    study, found, batch = opened(oracles.make_rows(sigma, seed=3, many=60, outliers=0.03), tmp_path)
    scene = Scene.of(batch, 0, 2, found.settled, study.near)

    mine = nearness.close(scene.ratios("rollout"), study.near)

    watched = nearness._watched(scene.ratios("rollout"), study.near)
    assert torch.equal(mine, nearness._every(scene.ratios("rollout"), study.near.radius, watched))
    assert len(watched) == len(study.near.rules) + len(study.near.tails) > 5
    far, close = scene.apart
    assert torch.equal(close.index, torch.nonzero(mine).flatten())
    assert torch.equal(far.index, torch.nonzero(~mine).flatten())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_log_ratios_that_are_no_numbers_are_far(bad):
    for columns in ({"old": [bad, -1.0]}, {"old": [-1.0, -1.0], "current": [bad, -1.0]}):
        found, every = both(packed([-1.0, -1.0], **columns), Near(0.09))
        assert found.tolist() == every.tolist() == [False, True]
    found, every = both(packed([bad, -1.0], [bad, -1.0]), Near(0.09))
    assert found.tolist() == every.tolist() == [False, True]


def test_a_token_is_far_where_only_the_drift_between_the_trainers_policies_is():
    found, every = both(packed([-1.0] * 2, [-1.08, -1.0], [-0.92, -1.0]), Near(0.09))
    assert found.tolist() == every.tolist() == [False, True]


# ---------------------------------------------------------------- bounds on binary KL


def grid():
    """Log-probs from nearly certain to unlikely, some above 0 by rounding, and Δ to both sides."""
    q = np.concatenate((-np.geomspace(1e-18, 9, 400), np.geomspace(1e-18, 1e-2, 60), [0.0, -0.0, 1e-8]))
    d = np.concatenate((np.geomspace(1e-9, 0.5, 80), -np.geomspace(1e-9, 0.5, 80), [0.0]))
    return tuple(x.ravel() for x in np.meshgrid(q, d))


@pytest.mark.parametrize("upper", [0.06, 0.1, 0.101, 0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("radius", RADII)
def test_a_token_that_fails_a_rule_on_binary_kl_is_in_doubt(upper, strict, radius):
    q, d = grid()
    q, d = q[np.abs(d) <= radius], d[np.abs(d) <= radius]
    batch = packed(q, q + d)
    ratios = Ratios(batch, "old")
    rule = replace(COINS, upper=upper, strict=strict)
    may = doubts.of_rule(ratios, rule, radius)
    if may is None:
        return
    failed = ~correction.passes(ratios, rule).values.numpy()
    assert not (failed & ~may(ratios.delta.numpy(), q)).any()


def test_some_tokens_fail_binary_kl_and_few_others_are_in_doubt():
    q, d = grid()
    q, d = q[np.abs(d) <= 0.09], d[np.abs(d) <= 0.09]
    ratios = Ratios(packed(q, q + d), "old")
    may = doubts.of_rule(ratios, COINS, 0.09)(ratios.delta.numpy(), q)
    failed = ~correction.passes(ratios, COINS).values.numpy()
    assert 0 < failed.sum() < may.sum() < 0.5 * len(q)
    ordinary = (q < -0.3) | ((q > -0.01) & (q <= 0))
    assert ordinary.sum() > len(q) / 2
    assert not may[ordinary].any()


@pytest.mark.parametrize(
    "rule",
    [
        replace(COINS, upper=0.05),  # |Δ| alone may reach it
        replace(COINS, upper=None),
        replace(COINS, lower=1e-6),
        replace(COINS, safety=0.01),
        replace(COINS, upper=0.0),
        replace(COINS, upper=-1.0),
    ],
    ids=str,
)
def test_where_no_bound_is_known_every_token_is_asked_about(rule):
    near = Near(0.09, rules=(("old", rule),))
    q, d = grid()
    found, every = both(packed(q, q + d), near)
    assert torch.equal(found, every)
    if rule.upper is not None:
        assert doubts.of_rule(Ratios(packed(q, q + d), "old"), rule, 0.09) is None


@pytest.mark.parametrize("sign", ["any", "positive", "negative", "against", "against_or_zero", "away"])
def test_rules_that_ask_for_the_advantage_get_that_of_the_tokens_in_doubt(sign):
    q, d = grid()
    keep = np.abs(d) <= 0.09
    q, d = q[keep], d[keep]
    a = np.resize([1.0, -1.0, 0.0], len(q))
    turns = np.full(len(q) // 3, 3).tolist() + ([len(q) % 3] if len(q) % 3 else [])
    batch = packed(q, q + d, advantages=a, runs=turns)
    for rule in (COINS, Reject("ratio", "segment", 0.97, 1.03), Reject("prob_diff", "segment", -0.01, 0.01)):
        near = Near(0.09, rules=(("old", replace(rule, advantage=sign)),))
        found, every = both(batch, near)
        assert torch.equal(found, every)
        assert bool(found.any())
        assert not bool(found.all())


# ---------------------------------------------------------------- cuts and tails


@pytest.mark.parametrize("statistic", ["k1", "k2", "k3", "prob_diff", "mult_prob_error", "binary_kl", "tv"])
@pytest.mark.parametrize(
    "cuts", [(math.inf, math.inf), (1e-3, math.inf), (1e-3, 1e-4), (0.0, 1.0), (5.0, 5.0)]
)
def test_cuts_of_trainer_batches_act_as_on_all_tokens(statistic, cuts):
    d = np.linspace(-0.12, 0.12, 4001)
    q = np.full(len(d), -0.7)
    rule = Reject(statistic, "batch", None, 0.02)
    batch = packed(q, q + d, lengths=[2000, 2001], step=[1, 2])
    settled = Settled(cuts={("old", rule): dict(zip(("1", "2"), cuts, strict=True))})
    found, every = both(batch, Near(0.09, rules=(("old", rule),)), settled)
    assert torch.equal(found, every)


@pytest.mark.parametrize(
    "above", [(0.05, None), (0.01, 0.06), (-0.02, 0.05), (0.0, 0.0), (0.2, 1.0), (None, None)]
)
@pytest.mark.parametrize("safety", [None, 0.03])
def test_tails_of_trainer_batches_act_as_on_all_tokens(above, safety):
    d = np.linspace(-0.12, 0.12, 4001)
    q = np.full(len(d), -0.7)
    weight = Weight(over="token", action="psis", upper=None, safety=safety)
    ends = torch.tensor([0.2, 0.3], dtype=torch.float64)
    tails = {str(i): None if x is None else Smooth(x, ends, ends) for i, x in enumerate(above)}
    batch = packed(q, q + d, lengths=[2000, 2001], step=[0, 1])
    settled = Settled(tails={("old", weight): tails})
    found, every = both(batch, Near(0.09, tails=(("old", weight),)), settled)
    assert torch.equal(found, every)


def test_tokens_of_turns_within_the_bounds_are_not_asked_about():
    """Nor are any where no cut and no tail is within reach."""
    batch = packed([-1.0] * 12, [-1.01] * 6 + [-1.5] * 3 + [-1.0] * 3, lengths=[4, 8], runs=[4, 2, 3, 3])
    ratios = Ratios(batch, "old", Settled(cuts={("old", CUT): {"": 0.1}}))
    assert doubts.of_rule(ratios, Reject("ratio", "segment", 0.8, 1.2), 0.09).tolist() == [6, 7, 8]
    assert doubts.of_rule(ratios, CUT, 0.09).tolist() == []
    assert doubts.of_rule(ratios, CUT, 0.5)(np.array([0.0, -0.44, 0.45, -0.45]), np.zeros(4)).tolist() == [
        False,
        False,
        True,
        True,
    ]


CUT = Reject("k2", "batch", None, 0.02)


# ---------------------------------------------------------------- some of a batch's tokens


def test_some_tokens_are_copied_only_when_they_are_asked_for():
    batch = packed([-1.0, -2.0, -3.0, -4.0], [-1.5, -2.5, -3.5, -4.5], lengths=[1, 0, 3])
    some = batch.some(torch.tensor([0, 2, 3]))
    assert (some.tokens, some.lengths.tolist(), some.sequences) == (3, [1, 0, 2], 3)
    assert not {"rollout", "old", "position"} & vars(some).keys()
    assert (some.rollout.tolist(), some.current) == ([-1.0, -3.0, -4.0], None)
    last = some.rows(2, 3)
    assert (last.tokens, last.old.tolist(), last.position.tolist()) == (2, [-3.5, -4.5], [2, 3])
    assert (last.key.tolist(), last.cu_seqlens.tolist(), last.cu_runs.tolist()) == ([2], [0, 2], [0, 2])
    other = replace(some, rollout=torch.zeros(3))
    assert (other.rollout.tolist(), other.old.tolist()) == ([0.0] * 3, some.old.tolist())
    assert some.to(torch.device("cpu")).old.tolist() == some.old.tolist()


def test_what_ships_is_watched_by_bounds():
    """So that no rule that ships is asked about every token."""
    near = Near.of(catalogue.load().resolve("all"))
    for _, rule in near.rules:
        assert rule.over != "token" or (rule.statistic, rule.lower, rule.safety) == ("binary_kl", None, None)
    assert len(ALL) > 100


def test_where_tokens_stand_is_told_of_the_batch_that_they_are_of():
    batch = near_batch(lengths=(5, 4, 6))
    whole = Ratios(batch, "old")
    some = batch.some(None, torch.tensor([0, 4, 5]))

    assert "index" not in vars(some)
    assert Ratios(some, "old", whole=whole).index.tolist() == [1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert Ratios(some.rows(1, 3), "old", whole=Ratios(batch.rows(1, 3), "old")).index is None
    assert whole.index is None
