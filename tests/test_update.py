"""Check the kept and the removed update against the gradients of the losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.pipeline.plan import LOSSES
from offpol_diag.presets import Weight, catalogue
from tests.softmax import BAND, CASES, RAW, TOKEN, gradient, numbers, preset, tokens, world


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Make a world with an advantage per token, and one with an advantage per sequence."""
    folder = tmp_path_factory.mktemp("worlds")
    return [world(folder, seed=1), world(folder, seed=2, per_sequence=True)]


def test_the_update_that_is_left_is_the_gradients_mass(worlds):
    x = worlds[1]  # with one advantage per sequence GSPO's pooled gradient has the mass of its slopes
    for case, got in zip(CASES, numbers(x, *CASES), strict=True):
        mass = gradient(x, case, "pg_loss_kept").abs().sum() * x.mask.sum() / x.advantages[x.mask].abs().sum()
        assert got["update_kept"] == pytest.approx(mass.item(), rel=1e-9), case.name


def test_the_removed_update_is_given_by_sign_of_the_advantage(worlds):
    x, case = worlds[0], preset("one", "ppo_clip", weight=TOKEN, reject=(BAND,))
    pulled, a = gradient(x, case, "pg_loss")[x.mask], x.advantages[x.mask]
    (got,) = numbers(x, case)
    for name, some in (("", a != 0), ("_positive", a > 0), ("_negative", a < 0)):
        share = a[some & (pulled == 0)].abs().sum() / a[some].abs().sum()
        assert got[f"update_removed{name}"] == pytest.approx(share.item(), rel=1e-9)
    assert 0 < got["update_removed_positive"] != got["update_removed_negative"] > 0


def test_a_weight_of_zero_removes_and_a_small_one_does_not(tmp_path):
    rows = [[(-1.0, -1.0, -1.0, 1.0), (-1.0, -9.0, -9.0, 3.0)], [(-1.0, -1.0, -1.0, -4.0)]]
    mask = preset("mask", "ppo_clip", weight=Weight("token", "mask", lower=0.5, upper=2.0))
    whole = preset("whole", "ppo_clip", weight=Weight("sum", "mask", lower=0.5, upper=2.0))
    got = tokens(tmp_path, rows, mask=mask, whole=whole, raw=preset("raw", "ppo_clip", weight=RAW))

    assert got["mask"]["update_removed"] == pytest.approx(3 / 8)
    assert got["mask"]["update_kept"] == pytest.approx(5 / 8)
    assert got["whole"]["update_removed_positive"] == 1
    assert got["whole"]["update_removed_negative"] == 0
    assert got["raw"]["update_removed"] == 0
    assert got["raw"]["update_kept"] == pytest.approx((5 + 3 * math.exp(-8)) / 8)


@pytest.mark.parametrize("loss", [name for name, one in LOSSES.items() if one.weighted != "never"])
def test_without_the_current_policy_no_clip_acts(tmp_path, worlds, loss):
    x, path = worlds[0], tmp_path / "first.parquet"
    with DumpWriter(path, dtype="float64") as writer:
        writer.write(
            rollout_log_probs=x.rollout,
            old_log_probs=x.old,
            advantages=x.advantages,
            response_mask=x.mask.to(torch.int64),
        )
    case = preset("one", loss, weight=TOKEN)
    got = analyze([path], presets=[case]).preset("one")
    a, w = x.advantages.abs(), torch.exp(x.old - x.rollout).clamp(max=1.4)

    assert got["update_kept"].value == pytest.approx(
        ((a * w)[x.mask].sum() / a[x.mask].sum()).item(), rel=1e-9
    )
    assert got["update_removed"].value == 0
    assert "without current_log_probs no clip acts" in got["update_removed"].formula
    assert got["pg_loss_own"].unknown == "missing column current_log_probs"


def test_normalised_weights_scale_the_update_that_they_multiply(worlds):
    weight = Weight("token", upper=1.4)
    for policy, scaled in (("old", True), ("current", False)):
        one = preset("one", "ppo_clip", policy=policy, weight=weight)
        two = replace(one, name="two", weight=replace(weight, normalize=True))
        plain, normal = numbers(worlds[0], one, two)
        factor = plain["weight_mean"] if scaled else 1.0
        assert normal["update_kept"] == pytest.approx(plain["update_kept"] / factor, rel=1e-12)
        assert normal["update_removed"] == plain["update_removed"]


def test_the_update_has_intervals(worlds):
    metrics = analyze([worlds[0].path], presets=[CASES[2]]).preset(CASES[2].name)
    for name in ("update_kept", "update_removed", "update_removed_positive", "pg_loss_own", "loss_scale"):
        low, high = metrics[name].interval
        assert low < metrics[name].value < high


def test_without_advantages_the_update_is_unknown(tmp_path):
    path = tmp_path / "bare.parquet"
    with DumpWriter(path) as writer:
        writer.write(rollout_log_probs=[[-1.0]], old_log_probs=[[-1.1]])
    metrics = analyze([path], presets=[CASES[0]]).preset("ppo")

    assert metrics["update_removed"].unknown == "missing column advantages"


def test_on_policy_every_built_in_row_leaves_the_whole_update(tmp_path):
    x = world(tmp_path, seed=8, drift=0.0, step=0.0)
    rows = [row for row in catalogue.load().resolve("all") if row.loss != "gmpo"]  # it averages A first
    for row, got in zip(rows, numbers(x, *rows), strict=True):
        assert got["update_kept"] == pytest.approx(1, rel=1e-12), row.name
        assert got["update_removed"] == 0, row.name
        assert got["loss_scale"] == pytest.approx(1, rel=1e-12), row.name
