"""Presets on the pipeline against the correction of tokens one by one, in three ways: numpy, torch, compiled.

Losses are held against a trainer's (`test_losses.py`), trainers' code and golden numbers elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from offpol_diag.analysis.first_pass import of_batch
from offpol_diag.engine import preset_sums
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.pipeline.plan import numbers as numbers_of
from offpol_diag.presets import Clip, Loss, Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from tests import factory
from tests.whole import effect

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # ratios that overflow

PRESETS = tuple(load().values())
SAMPLES = Path(__file__).parents[1] / "sample_data"
OTHERS = (  # weight, rules, veto: what no preset that ships combines
    (Weight("segment", upper=2.0), (Reject(over="segment", lower=0.5),), Veto(lower=1e-3)),
    (
        Weight("sum", upper=2.0, safety=5.0, safety_at="token"),
        (Reject(lower=0.5, upper=2.0), Reject("k3", "mean", upper=0.01)),
        None,
    ),
    (
        Weight("mean", "mask", 1.01, 0.99),
        (
            Reject(over="max", upper=3.0, advantage="against"),
            Reject(over="segment", statistic="k1", upper=0.01),
            Reject(over="min", lower=0.1),
        ),
        Veto(upper=50.0),
    ),
    (
        Weight("mean", "none"),
        (Reject(over="sum", upper=3.0, advantage="against_or_zero"), Reject(upper=1.1, advantage="away")),
        Veto(upper=50.0),
    ),
    (
        Weight("segment", "none", normalize=True),
        (Reject("binary_kl_max", "max", upper=0.3, advantage="negative"),),
        None,
    ),
    (
        Weight("sum", safety=None, overflow="zero", normalize=True, action="none"),
        (Reject(over="max", upper=3.0, safety=1.0),),
        Veto(upper=50.0),
    ),
    (
        Weight("segment", lower=0.2, safety=0.5, safety_at="token", normalize=True),
        (Reject(over="sum", upper=3.0, advantage="away"),),
        None,
    ),
    (Weight(upper=4.0, lower=1.01, safety=0.005), (Reject(over="min", lower=0.5),), None),
)
EVERY = (
    *PRESETS,
    *(
        Preset(f"{at}_{loss}_{policy}", "", policy, weight, rules, veto, loss)
        for at, (weight, rules, veto) in enumerate(OTHERS)
        for loss in ("ppo_clip", "reinforce", "gspo")
        for policy in ("old", "current")
    ),
)


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
    offsets = batch.cu_seqlens
    rows = np.concatenate(([0, 0, 1, 2, 2, 10], offsets[1:]))  # empty ones, and of one token
    size, more = len(rows) - 1, len(rows) - len(offsets)
    turns = np.unique(np.concatenate((rows, draw.integers(0, many, many // 20))))
    place = np.arange(many) - np.repeat(rows[:-1], np.diff(rows))
    return replace(
        batch,
        rollout=rollout,
        old=old,
        current=current,
        advantages=advantages,
        cu_seqlens=rows,
        cu_runs=turns,
        position=place,
        key=np.arange(size),
        masked=np.zeros(size, dtype=np.int64),
        scalars={name: [x[0]] * more + list(x) for name, x in batch.scalars.items()},
    )


@pytest.fixture(scope="module", params=["stale", "collapse", "wild", "two_policies"])
def case(request):
    """Return a batch of some 9,000 tokens, the presets that it has the columns for, and its fits."""
    name = {"wild": "collapse", "two_policies": "stale"}.get(request.param, request.param)
    batch = factory.read(str(SAMPLES / f"{name}.parquet")).rows(0, 96)
    presets = EVERY
    if request.param == "wild":
        batch = wild(batch)
    if request.param == "two_policies":
        batch = replace(batch, current=None)
        presets = tuple(one for one in EVERY if one.policy == "old")
    return batch, presets, of_batch(batch, presets).fits


def columns_of(case, compiled=False, device="cpu", **how):
    """Return name → numbers of every preset, [P, S]: all that the columns of results are made of."""
    batch, presets, fits = case
    done = PresetSums.of(BatchContext.of(batch, 0, 1, fits, compiled, device), presets, over_all=True, **how)
    low, high = done.spans
    found = {"kept": done.kept, "sequences": done.sequences, "hits": done.number("hits"), **done.sums}
    found |= {"low weight": low, "high weight": high, "over all": done.over_all, **done.acted}
    found |= {name: done.total("gap", at) for at, name in enumerate(("k3", "delta"))}
    found |= {"n": done.total("kept"), "loss": done.total("loss"), "factor": done.loss_weights}
    found |= {"clip": done.total("clip"), "dual": done.total("dual_clip"), "kl": done.total("kl")}
    return {name: one.all for name, one in found.items()}


COUNTS = {"kept", "sequences", "hits", "weighted", "high", "low", "units", "bounded", "tries"}
COUNTS |= {"n", "clip", "dual"}
"""Sums of ones: these are equal exactly."""


def apart(name, found, wanted):
    """Return the largest relative difference; of sums that cancel, of their terms."""
    x, y = found[name], wanted[name]
    scale = np.sqrt(wanted["about_one"] * 1e4) if name == "deviation" else np.abs(y)
    scale = np.maximum(scale, wanted["n"]) if name == "loss" else scale
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(all="ignore"):
        return float(np.where(same, 0.0, np.abs(x - y) / np.maximum(scale, 1e-300)).max(initial=0))


def assert_alike(found, wanted):
    for name in wanted:
        assert apart(name, found, wanted) <= (0 if name in COUNTS else 5e-12), name


def assert_corrected(batch, presets, fits, found):
    """Hold what is kept, and the weights, against those of tokens one by one."""
    context = BatchContext.of(batch, 0, 1, fits)
    for at, preset in enumerate(presets):
        done = effect(context, preset)
        assert np.array_equal(found["sequences"][at], done.kept_rows * 1.0), preset
        assert np.array_equal(found["kept"][at], done.n_kept), preset
        assert np.array_equal(found["hits"][at], done.veto_hits(done.preset.veto)), preset
        w = done.weight
        want = {"w": done.row_sum(np.where(done.kept, w, 0.0)), "over all": done.row_sum(w)}
        if done.preset.weight:
            want |= {"high": done.n_above, "low": done.n_below}
        for name, x in want.items():
            assert np.allclose(found[name][at], x, rtol=3e-12, atol=0), (name, preset)


def test_every_preset_keeps_and_weighs_the_tokens_that_its_rules_and_weights_say(case):
    batch, presets, fits = case
    assert_corrected(batch, presets, fits, columns_of(case))


def test_tensors_have_the_sums_of_arrays(case):
    assert_alike(columns_of(case, device="cpu:0"), columns_of(case))


def test_parts_of_a_batch_have_its_sums(case, monkeypatch):
    wanted = columns_of(case)
    monkeypatch.setitem(preset_sums.BLOCK, "plain", 500)
    assert_alike(columns_of(case), wanted)


def test_presets_alone_have_the_sums_that_they_have_among_others(case):
    batch, presets, fits = case
    wanted = columns_of(case)
    some = range(0, len(presets), 9)
    for at in some:
        alone = columns_of((batch, (presets[at],), fits))
        assert_alike(alone, {name: x[at : at + 1] for name, x in wanted.items()})


# ---------------------------------------------------------------- any preset

safeties = {
    "safety": st.sampled_from([None, 0.02, 20.0]),
    "safety_at": st.sampled_from(["aggregate", "token"]),
}
weights = st.builds(
    Weight,
    over=st.sampled_from(["token", "segment", "mean", "sum"]),
    action=st.sampled_from(["truncate", "mask", "none"]),
    upper=st.sampled_from([0.9, 1.001, 1.2]),
    lower=st.sampled_from([None, 0.89]),
    normalize=st.booleans(),
    overflow=st.sampled_from(["limit", "zero"]),
    **safeties,
)
signs = st.sampled_from(["any", "negative", "positive", "against", "against_or_zero", "away"])
rules = st.builds(
    lambda bounds, **of: Reject("k1", lower=bounds[0], upper=bounds[1], **of),
    bounds=st.sampled_from([(None, 1e-3), (-1e-3, None), (-1e-3, 1e-3)]),
    over=st.sampled_from(["token", "segment", "sum", "mean", "max", "min"]),
    advantage=signs,
    **safeties,
)
any_preset = st.builds(
    lambda rules, loss, **of: Preset("", "", reject=tuple(rules), loss=loss, clip=Clip(), **of),
    policy=st.sampled_from(["old", "current"]),
    weight=st.one_of(st.none(), weights),
    rules=st.lists(rules, max_size=4),
    veto=st.sampled_from([None, Veto(lower=0.9, upper=1.5)]),
    loss=st.sampled_from(get_args(Loss)),
)


@settings(max_examples=40, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(any_preset, min_size=1, max_size=6), st.sampled_from([1e-3, 0.02, 0.3]), st.integers(0, 99))
def test_any_preset_keeps_and_weighs_what_it_says(found, sigma, seed):
    batch = factory.read(str(SAMPLES / "stale.parquet")).rows(8 * (seed % 32), 8 * (seed % 32) + 16)
    draw = np.random.default_rng(seed)
    noise = [draw.standard_normal(batch.tokens) * sigma for _ in range(2)]
    signs = draw.integers(-1, 2, batch.tokens).astype(np.float64)
    batch = replace(batch, old=batch.rollout + noise[0], current=batch.rollout + noise[1], advantages=signs)
    presets = tuple(replace(preset, name=f"p{at}") for at, preset in enumerate(found))
    columns = columns_of((batch, presets, preset_sums.BatchFits()))
    assert_corrected(batch, presets, preset_sums.BatchFits(), columns)


# ---------------------------------------------------------------- a preset as numbers


def numbers(name, **changes):
    lines = numbers_of(replace(load()[name], **changes))
    return {one.part: (one.of, one.lower, one.upper) for one in lines}


def test_a_preset_is_the_numbers_that_the_formulas_get():
    found = numbers("slime_mis")
    assert found["weight is held to"] == ("r of a token", math.exp(-20), 2.0)
    assert found["rule 1 keeps"] == ("log r of a token", math.log(0.5), math.log(2.0))
    assert found["veto keeps"] == ("log r of every token", math.log(1e-4), math.inf)
    assert found["loss is clipped to"] == ("π_θ/π_anchor", 1 - 0.2, 1 + 0.2)
    assert "weight is 0 outside" not in found
    ice = numbers("token_icepop")
    assert ice["weight is 0 outside"] == ("log r of a token", math.log(0.5), math.log(5.0))
    assert ice["weight is held to"] == ("r of a token", math.exp(-20), math.exp(20))  # the safety bound
    assert numbers("recompute", loss="reinforce") == {}
    assert numbers("gspo")["loss is clipped to"] == ("π_θ/π_anchor", 1 - 0.0003, 1 + 0.0004)


def test_a_bound_out_of_reach_is_none():
    far = numbers("recompute", reject=(Reject(lower=1e-9, upper=2.0, safety=5.0),))["rule 1 keeps"]
    assert far[1:] == (-math.inf, math.log(2.0))
    never = numbers("recompute", reject=(Reject(upper=0.5, safety=0.1),))["rule 1 keeps"]
    assert never[2] == -math.inf, "whatever is clipped to e^±0.1 is above 0.5"
