"""Each built-in row's weighted policy loss is its trainer's, token by token: clip, dual clip, GSPO, CISPO."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.engine.losses import BOUNDS, LOSSES
from tests import trainer_dumps
from tests.trainers.ours import BUILT_IN, ours, policy_loss, read
from tests.trainers.padded import padded
from tests.trainers.policies import WITHIN, cispo, gspo, loss_of, ppo
from tests.trainers.table import TABLE


def weighted(name, batch):
    """Factor times policy loss of each token, [T]."""
    preset = BUILT_IN[name]
    loss, multiplied = policy_loss(preset, batch)
    assert multiplied == (name not in WITHIN) or preset.weight is None
    return (ours(name, batch)[0] if name not in WITHIN else 1.0) * loss.numpy()


def factor(name, verdict):
    """What multiplies the loss, [B, L]."""
    return verdict.counted.astype(float) if name in WITHIN else verdict.factor


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Rows without a token far off: there float64 knows the digits of every loss."""
    where, found = tmp_path_factory.mktemp("losses"), []
    for seed in range(4):
        rng = np.random.default_rng((20261013, seed))
        rows = trainer_dumps.masked_rows(rng, 120, scalar=seed % 2 == 0, wild=False)
        found.append((rows, read(rows, where / f"{seed}.parquet")))
    return found


def test_a_rows_weighted_loss_is_its_trainers(dumps):
    for rows, batch in dumps:
        p = padded(rows)
        for name, (trainer, settings) in TABLE.items():
            loss, options = loss_of(name)
            want = (factor(name, trainer(p, **settings)) * loss(p, **options))[p.mask]
            np.testing.assert_allclose(weighted(name, batch), want, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("name", "loss", "options"),
    [
        ("gspo", gspo, {"low": 3e-4, "high": 4e-4, "bound": 10.0}),
        ("cispo", cispo, {}),
        ("recompute", ppo, {"dual": 3.0, "bound": 20.0}),  # verl's
    ],
)
def test_losses_that_correct_nothing(name, loss, options, dumps):
    for rows, batch in dumps:
        p = padded(rows)
        assert weighted(name, batch) == pytest.approx(loss(p, **options)[p.mask], rel=1e-9, abs=1e-12)


def test_what_is_reported_is_the_trainers_own_mean_over_its_own_denominator(tmp_path):
    rows = trainer_dumps.masked_rows(np.random.default_rng(20261014), 150, scalar=False, wild=False)
    p = padded(rows)

    found = analyze(
        [trainer_dumps.write(rows, tmp_path / "dump.parquet")],
        presets=[BUILT_IN[name] for name in TABLE],
        device="cpu",
    )

    for name, (trainer, settings) in TABLE.items():
        verdict, (loss, options) = trainer(p, **settings), loss_of(name)
        want = (factor(name, verdict) * loss(p, **options))[p.mask].sum() / verdict.counted.sum()
        got = found.presets[name].metrics["pg_loss_own"].value
        assert got == pytest.approx(want, rel=1e-9, abs=1e-12), name


# ---------------------------------------------------------------- by hand


@pytest.fixture
def loss(tmp_path):
    """(name of a row, a row of a dump, changes of its clip) → the policy loss of each token, unweighted."""

    def of(name, row, **clip):
        preset = BUILT_IN[name]
        preset = replace(preset, clip=replace(preset.clip, **clip)) if clip else preset
        return policy_loss(preset, read([row], tmp_path / "dump.parquet"))[0].tolist()

    return of


def moved(*ratios, advantage):
    """π_old is the rollout; π_θ/π_old is as given, and the first of the two has probability 1/8."""
    old = [log(1 / 8)] * len(ratios)
    return {
        "rollout_log_probs": old,
        "old_log_probs": old,
        "current_log_probs": [x + log(r) for x, r in zip(old, ratios, strict=True)],
        "response_mask": [1] * len(ratios),
        "advantages": advantage,
    }


def test_gspo_clips_the_geometric_mean_and_gives_it_to_every_token(loss):
    row = moved(4.0, 0.5, advantage=2.0)  # √2 = 1.414, above 1.0004

    assert loss("gspo", row) == pytest.approx([-2 * 1.0004] * 2)
    assert loss("gspo", moved(4.0, 0.5, advantage=-2.0)) == pytest.approx([2 * 2**0.5] * 2)


def test_cispo_weighs_log_probs_with_the_clipped_ratio(loss):
    now = log(1 / 8) + log(6.0), log(1 / 8) + log(0.5)

    assert loss("cispo", moved(6.0, 0.5, advantage=2.0)) == pytest.approx(
        [-2 * 5 * now[0], -2 * 0.5 * now[1]]
    )


def test_a_surrogate_is_minus_the_advantage(loss):
    assert loss("prime_rl_dppo", moved(1.1, 0.9, advantage=2.0)) == pytest.approx([-2.0, -2.0])


def test_verl_bounds_a_bad_tokens_loss_at_three_advantages_and_trl_does_not(loss):
    row = moved(5.0, advantage=-2.0)

    assert loss("token_is", row) == pytest.approx([6.0])
    assert loss("trl_token_truncate", row) == pytest.approx([10.0])


def test_only_some_trainers_bound_the_losss_own_log_ratio(tmp_path):
    """u = 25 and −25 with A = −1: e^20 or e^25, and from below no less than e^−20 where u is bounded."""
    rows = [trainer_dumps.exact_row([1.0], current=[1.0 + u], advantage=-1.0) for u in (25.0, -25.0)]
    p, batch = padded(rows), read(rows, tmp_path / "dump.parquet")
    losses = {name: loss_of(name) for name in TABLE}
    losses["gspo"] = gspo, {"low": 3e-4, "high": 4e-4, "bound": 10.0}
    losses["recompute"] = ppo, {"dual": 3.0, "bound": 20.0}

    for name, (loss, options) in losses.items():
        want = loss(p, **options)[p.mask]
        assert policy_loss(BUILT_IN[name], batch)[0] == pytest.approx(want, rel=1e-12), name


def test_a_preset_has_the_bound_that_its_trainers_loss_has():
    """`losses.BOUNDS` says it of each trainer; a row is its first trainer's, or that whose names it logs."""
    for preset in BUILT_IN.values():
        trainer = (preset.trainers or ("",))[0]
        if trainer not in BOUNDS or not LOSSES[preset.loss].ratio or preset.name in OF_THEIR_OWN:
            continue
        token, sequence, _ = BOUNDS[trainer]
        assert preset.clip.safety == (sequence if LOSSES[preset.loss].pooled else token), preset.name


OF_THEIR_OWN = ("gmpo", "skyrl_importance_sampling")
"""Losses that do without the bound of their trainer's others."""


def test_open_instruct_clips_higher(loss):
    assert loss("open_instruct_rho_clamp", moved(2.0, advantage=1.0)) == pytest.approx([-1.272])
    assert loss("slime_tis", moved(2.0, advantage=1.0)) == pytest.approx([-1.2])


def test_a_clip_without_one_side_leaves_it(loss):
    row = moved(2.0, 0.25, advantage=1.0)

    assert loss("slime_tis", row, high=None) == pytest.approx([-2.0, -0.25])
    assert loss("slime_tis", moved(0.25, advantage=-1.0), low=None) == pytest.approx([0.25])
    assert loss("slime_tis", moved(0.25, advantage=-1.0)) == pytest.approx([0.8])


def test_openrlhfs_gspo_anchors_at_the_rollout(loss):
    row = {**moved(1.0, 1.0, advantage=1.0), "rollout_log_probs": [log(1 / 8) - 0.1, log(1 / 8) + 0.04]}

    assert loss("openrlhf_gspo", row) == pytest.approx([-exp(0.03)] * 2)
