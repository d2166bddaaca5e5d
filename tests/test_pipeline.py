"""The plain pipeline against the engine: every sum of every preset, per sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offpol_diag.analysis.first_pass import Needs, read_ahead
from offpol_diag.engine import correction, losses, outcome, policyloss, residual, update
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.scene import Scene
from offpol_diag.pipeline import namespaces, plain
from offpol_diag.pipeline import plan as plan_
from offpol_diag.pipeline.block import block_of
from offpol_diag.pipeline.plan import Plan, weight_key
from offpol_diag.pipeline.tables import SumTables
from offpol_diag.presets import Reject
from offpol_diag.presets.catalogue import load
from offpol_diag.torch import Whole
from tests import factory

PRESETS = tuple(load().values())
SAMPLES = Path(__file__).parents[1] / "sample_data"
SUMS = {
    # kind of sum → the engine's, and the names of its numbers in the order of the plan's
    "gap": (residual.gap_sums, ("k3", "delta")),
    "clip": (policyloss.clip_sums, ("clipped",)),
    "dual_clip": (policyloss.clip_sums, ("clipped_lower",)),
    "kl": (policyloss.clip_sums, ("kl",)),
    "loss": (policyloss.weighed_sums, ("loss", "pull")),
    "still": (update.still_sums, ("positive", "negative")),
}
COUNTED = {"kept", "clip", "dual_clip"}
"""Sums of ones: these are equal exactly."""


def sums_of_engine(batch, fits):
    """Return kind of sum → [presets, numbers, S], as the engine has them."""
    done = outcome.Outcomes.of(Scene.of(batch, 0, 1, fits, None), PRESETS)
    found = {
        kind: np.stack(
            [
                np.stack([done.total(make)[name].of_preset(at).numpy() for name in names])
                for at in range(len(PRESETS))
            ]
        )
        for kind, (make, names) in SUMS.items()
    }
    own = [at for at, preset in enumerate(PRESETS) if weight_key(outcome.applied(preset)) is not None]
    weights = done._picked(own).total(outcome.weight_sums, outcome.as_they_are)
    found["weight"] = np.zeros((len(PRESETS), 4, batch.sequences))
    for at, name in enumerate(("first", "second", "excess", "about_one")):
        found["weight"][own, at] = np.stack([weights[name].of_preset(row).numpy() for row in range(len(own))])
    return found


def sums_of_plan(plan, sums):
    """Return kind of sum → [presets, numbers, S], by each preset's line; 0 where it has none."""
    found = {}
    for kind in SumTables._fields:
        lines, own = getattr(plan.of_preset, kind), np.asarray(getattr(sums, kind))
        none = np.zeros((1, *own.shape[1:]))
        found[kind] = np.concatenate((own, none))[np.where(lines < 0, len(own), lines)]
    return found


def read(path):
    batch = factory.read(str(path))
    whole = Whole(batch)
    return batch, read_ahead(whole, whole, Needs.of(PRESETS, False)).fits


def wild(batch, seed=1):
    """Return a batch of Δ to hundreds of nats, values on bounds, A of 0, many turns, and very short rows."""
    draw, many = np.random.default_rng(seed), batch.tokens
    rollout = -draw.exponential(1, many) * draw.choice([1e-9, 0.1, 1, 30, 700], many)
    delta = draw.normal(size=many) * draw.choice([0, 1e-6, 0.1, 3, 30, 300], many)
    on_bounds = draw.choice(np.log([2, 0.5, 5, 10, 0.1, 8, 0.125]), many)
    delta = np.where(draw.random(many) < 0.2, on_bounds, delta)
    old = np.minimum(rollout + delta, 0)
    moved = np.minimum(old + draw.normal(size=many) * draw.choice([0.01, 1, 300], many), 0)
    current = np.where(draw.random(many) < 0.3, old, moved)
    advantages = draw.normal(size=many) * draw.choice([0, 1, 1e3], many)
    offsets = batch.cu_seqlens.numpy()
    rows = np.concatenate(([0, 0, 1, 2, 2, 10], offsets[1:]))  # empty ones, and of one token
    size, more = len(rows) - 1, len(rows) - len(offsets)
    turns = np.unique(np.concatenate((rows, draw.integers(0, many, many // 20))))
    place = np.arange(many) - np.repeat(rows[:-1], np.diff(rows))
    return replace(
        batch,
        **{
            name: torch.as_tensor(x) for name, x in (("rollout", rollout), ("old", old), ("current", current))
        },
        advantages=torch.as_tensor(advantages),
        rewards=torch.as_tensor(draw.choice([-1.0, 0.0, 1.0], size)),
        cu_seqlens=torch.as_tensor(rows),
        cu_runs=torch.as_tensor(turns),
        position=torch.as_tensor(place),
        key=torch.arange(size),
        masked=torch.zeros(size, dtype=torch.int64),
        scalars={name: [x[0]] * more + list(x) for name, x in batch.scalars.items()},
    )


@pytest.fixture(scope="module", params=["stale", "collapse", "wild"])
def case(request):
    """Return a batch of some 9,000 tokens, its fits, its plan, and the engine's sums."""
    batch, fits = read(SAMPLES / f"{'collapse' if request.param == 'wild' else request.param}.parquet")
    batch = batch.rows(0, 96)
    if request.param == "wild":
        batch = wild(batch)
        fits = read_ahead(Whole(batch), Whole(batch), Needs.of(PRESETS, False)).fits
    return batch, fits, Plan.of(PRESETS, batch.rewards is not None), sums_of_engine(batch, fits)


def apart(kind, found, wanted):
    """Return the largest relative difference; Σ(w − 1), which cancels, against √(n Σ(w − 1)²)."""
    scale = np.abs(wanted)
    if kind == "weight":
        scale[:, 2] = np.sqrt(wanted[:, 3] * 1e4) + 1e-300
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    with np.errstate(all="ignore"):
        return float(np.where(same, 0.0, np.abs(found - wanted) / np.maximum(scale, 1e-300)).max(initial=0))


@pytest.mark.parametrize("way", ["numpy", "torch"])
def test_every_sum_of_every_preset_is_the_engines(case, way):
    batch, fits, plan, wanted = case
    block = block_of(batch, fits, plan)
    with np.errstate(all="ignore"):
        if way == "numpy":
            sums = plain.sums(plan, block)
        else:
            sums = namespaces.on_torch().sums(plan, namespaces.block_on_torch(block))
    found = sums_of_plan(plan, sums)

    smooth = np.array([preset.loss == "sapo" for preset in PRESETS])  # torch's gate is 0 where ours is 1e-322
    for kind, theirs in wanted.items():
        some = ~smooth if kind == "still" else slice(None)
        room = 0 if kind in COUNTED else 3e-12
        assert apart(kind, found[kind][some], theirs[some]) <= room, kind


def test_every_mask_of_every_preset_is_the_engines(case):
    batch, fits, plan, _ = case
    with np.errstate(all="ignore"):
        block = block_of(batch, fits, plan)
        rows = plain.rows_of_block(plan, block)
        masks = plain.mask_rows(plan.rules, plan.sizes.masks, rows)
    for preset, line in zip(PRESETS, plan.of_preset.kept, strict=True):
        kept = correction.keep(Ratios(batch, preset.policy, fits), outcome.applied(preset)).tokens
        mask = masks[plan.sums.kept.mask[line]]
        assert mask.all() if kept is None else np.array_equal(mask, kept.numpy()), preset.name


# ---------------------------------------------------------------- a preset as numbers


def numbers(name, **changes):
    lines = plan_.numbers(replace(load()[name], **changes))
    return {one.part: (one.of, one.lower, one.upper) for one in lines}


def test_a_preset_is_the_numbers_that_the_formulas_get():
    found = numbers("slime_mis")
    assert found["weight is held to"] == ("r of a token", math.exp(-20), 2.0)
    assert found["rule 1 keeps"] == ("log r of a token", math.log(0.5), math.log(2.0))
    assert found["veto keeps"] == ("log r of every token", math.log(1e-4), math.inf)
    assert found["loss is clipped to"] == ("π_θ/π_anchor", 1 - 0.2, 1 + 0.2)
    assert "weight is 0 outside" not in found
    ice = numbers("decoupled_token_icepop")
    assert ice["weight is 0 outside"] == ("log r of a token", math.log(0.5), math.log(5.0))
    assert ice["weight is held to"] == ("r of a token", math.exp(-20), math.exp(20))  # the safety bound
    assert numbers("recompute", loss="reinforce") == {}
    assert numbers("gmpo")["loss is clipped to"] == ("log π_θ/π_anchor", -0.4, 0.4)


def test_a_strict_bound_is_the_number_next_to_it_and_one_out_of_reach_is_none():
    rule = Reject(lower=0.5, upper=2.0, strict=True)
    part = numbers("recompute", reject=(rule,))["rule 1 keeps"]
    assert part[1:] == (np.nextafter(math.log(0.5), 9), np.nextafter(math.log(2), -9))
    far = numbers("recompute", reject=(replace(rule, lower=1e-9, safety=5.0),))["rule 1 keeps"]
    assert far[1] == -math.inf


def test_what_the_plan_knows_of_a_loss_is_what_the_engine_knows():
    for name, row in losses.LOSSES.items():
        assert plan_.LOSSES[name] == (row.weighted, row.ratio, row.pooled), name
    for preset in PRESETS:
        assert plan_.weighted(preset) is losses.weighted(preset)
