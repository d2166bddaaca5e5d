"""The evaluator of presets: one text on arrays and on tensors, in any blocks; a preset as numbers.

What presets do is held against the textbook (`test_oracle.py`), trainers' losses (`test_losses.py`), and
trainers' code and golden numbers (`test_conformance.py`, `test_logged.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from offpol_diag.core import gap, preset_numbers
from offpol_diag.core.evaluate import Evaluator
from offpol_diag.core.gap import DRIFTS, Tokens
from offpol_diag.core.observe import Ahead
from offpol_diag.core.segments import Segments, to_host
from offpol_diag.core.steps import rule, steps
from offpol_diag.core.study import Study
from offpol_diag.presets import Over, Preset, Reject, Statistic, Veto, Weight
from offpol_diag.presets.catalogue import load
from tests import factory

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
    """Return a batch of some 9,000 tokens, the presets that it has the columns for, and its cuts."""
    name = {"wild": "collapse", "two_policies": "stale"}.get(request.param, request.param)
    batch = factory.read(str(SAMPLES / f"{name}.parquet")).rows(0, 96)
    presets = EVERY
    if request.param == "wild":
        batch = wild(batch)
    if request.param == "two_policies":
        batch = replace(batch, current=None)
        presets = tuple(one for one in EVERY if one.policy == "old")
    return batch, presets, Ahead.of_batch(Study(presets, frozenset()), batch).cut


def tokens_of(case, device="cpu"):
    batch, _, cut = case
    return Tokens.of(batch, partial(cut, batch), device)


def columns_of(case, device="cpu"):
    """Return name → numbers of every preset, [P, S]; in each, one of Σ(w² − 1)."""
    presets, found = case[1], to_host(preset_numbers.columns(tokens_of(case, device), case[1]))
    names = [name.partition("|")[2] for name in found if name.startswith(f"{presets[0].name}|")]
    names = dict.fromkeys(name for name in names if not name.startswith("norm"))
    return {name: np.stack([found[f"{one.name}|{name}"] for one in presets]) for name in names}


COUNTS = {"left", "kept", "touched", "hits", "vetoed", "weighted", "high", "low", "units", "bounded", "tries"}
COUNTS |= {"clipped", "dual_clipped", "own"}
"""Sums of ones: these are equal exactly."""


def apart(name, found, wanted):
    """Return the largest relative difference; of sums that cancel, of their terms."""
    x, y, scale = found[name], wanted[name], 0.0
    if name in ("loss", "loss_mean", "kl"):
        scale = wanted["kept"]
    elif name in ("w1", "w11", "v11"):
        scale = np.maximum(np.sqrt(wanted["w11"] * 1e4), wanted["w"] * 1e-4)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(all="ignore"):
        within = np.maximum(np.maximum(np.abs(y), scale), 1e-300)
        return float(np.where(same, 0.0, np.abs(x - y) / within).max(initial=0))


def assert_alike(found, wanted, within=1e-12):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert apart(name, found, wanted) <= (0 if name in COUNTS else within), name


def test_tensors_have_the_sums_of_arrays(case):
    """The text that runs on CUDA, on tensors of the CPU."""
    assert_alike(columns_of(case, "cpu:0"), columns_of(case))


def test_gaps_of_tensors_are_those_of_arrays(case):
    on_numpy, on_torch = tokens_of(case), tokens_of(case, "cpu:0")
    for drift in DRIFTS:
        if {drift.numerator, drift.denominator} <= on_numpy.log_probs.keys():
            wanted = gap.columns(on_numpy.terms(drift))
            for name, x in to_host(gap.columns(on_torch.terms(drift))).items():
                np.testing.assert_allclose(x, wanted[name], rtol=1e-12, err_msg=name)


def test_parts_of_a_batch_have_its_sums(case):
    batch, presets, cut = case
    whole = tokens_of(case)
    at = [0, 1, 7, 40, batch.sequences]
    cuts = {rule: cut(batch, rule, None) for one in presets for rule in steps(one).tokens
            if rule.reject.over == "batch"}  # fmt: skip
    parts = []
    for begin, end in pairwise(at):
        tokens = slice(*batch.cu_seqlens[[begin, end]])
        own = lambda _, rule, x, tokens=tokens: cuts[rule][tokens]  # noqa: E731
        parts.append(columns_of((batch.rows(begin, end), presets, own)))
    joined = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    assert_alike(joined, columns_of(case), 5e-12)
    for drift in DRIFTS[:1]:
        each = [gap.columns(Tokens.of(batch.rows(*ends)).terms(drift)) for ends in pairwise(at)]
        for name, x in gap.columns(whole.terms(drift)).items():
            np.testing.assert_allclose(np.concatenate([one[name] for one in each]), x, rtol=1e-12)


def test_presets_alone_have_the_sums_that_they_have_among_others(case):
    batch, presets, cut = case
    wanted = columns_of(case)
    for at in range(0, len(presets), 9):
        alone = columns_of((batch, (presets[at],), cut))
        assert_alike(alone, {name: x[at : at + 1] for name, x in wanted.items()})


def test_what_presets_share_is_computed_once(case):
    tokens = tokens_of(case)
    found = preset_numbers.columns(tokens, case[1])
    known = len(tokens.known)
    again = [replace(preset, name=f"{preset.name}_again", note="") for preset in case[1]]
    for name, x in preset_numbers.columns(tokens, again).items():
        assert x is found[name.replace("_again|", "|")]
    assert len(tokens.known) == known


@pytest.mark.parametrize("over", get_args(Over))
@pytest.mark.parametrize("name", get_args(Statistic))
def test_statistics_of_tensors_are_those_of_arrays(name, over):
    """Of sentinels of −1e30, of turns, and of a sequence without a token."""
    draw = np.random.default_rng(3)
    offsets, turns = np.array([0, 40, 40, 75, 200]), np.array([0, 12, 40, 41, 75, 120, 200])
    rollout, old = -np.square(draw.random((2, 200))) * 20
    rollout[3] = old[44] = rollout[90] = old[90] = -1e30
    on_torch = Evaluator(
        {"rollout": torch.from_numpy(rollout), "old": torch.from_numpy(old)},
        Segments(torch.from_numpy(offsets), 200),
        Segments(torch.from_numpy(turns), 200),
    )
    on_numpy = Evaluator({"rollout": rollout, "old": old}, Segments(offsets, 200), Segments(turns, 200))
    for bound in (None, 3.0):
        wanted, found = (one.aggregate(name, "old", over, bound) for one in (on_numpy, on_torch))
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("delta", [1e-7, -3.1, 19.0, 21.0, -344.0, 1351.0])
def test_a_safety_bounds_the_ratio_of_a_probability_difference(delta):
    p, q = min(delta, 0.0), min(-delta, 0.0)
    runs = Segments(np.array([0, 1]), 1)
    found = Evaluator({"rollout": np.array([q]), "old": np.array([p])}, runs, runs)
    exact = math.exp(q) * math.expm1(min(max(delta, -20.0), 20.0))
    assert found.statistic("prob_diff", "old", 20.0)[0] == pytest.approx(exact, rel=1e-14, abs=1e-322)


def test_nothing_makes_the_host_wait_within_a_batch(case):
    """Tensors of the device `meta` have no values: whoever asks for one is refused."""
    batch, presets, _ = case
    tokens = Tokens.of(batch, lambda rule, x: batch.rollout, "meta")
    found = preset_numbers.columns(tokens, presets) | gap.columns(tokens.terms(DRIFTS[0]))
    assert {x.shape for x in found.values()} == {(batch.sequences,)}


# ---------------------------------------------------------------- a preset as numbers


def test_a_preset_is_the_numbers_that_the_formulas_get():
    made = steps(load()["slime_mis"])
    assert (made.weight.lower, made.weight.upper) == (math.exp(-20), 2.0)
    assert (made.tokens[0].lower, made.tokens[0].upper) == (math.log(0.5), math.log(2.0))
    assert (made.sequences.veto.lower, made.sequences.veto.upper) == (math.log(1e-4), math.inf)
    assert (made.loss.low, made.loss.high) == (1 - 0.2, 1 + 0.2)
    ice = steps(load()["token_icepop"]).weight
    assert (ice.zero_below, ice.zero_above) == (math.log(0.5), math.log(5.0))
    assert (ice.lower, ice.upper) == (math.exp(-20), math.exp(20))  # the safety bound


def test_a_bound_out_of_reach_is_none():
    far = rule("old", Reject(lower=1e-9, upper=2.0, safety=5.0))
    assert (far.lower, far.upper) == (-math.inf, math.log(2.0))
    never = rule("old", Reject(upper=0.5, safety=0.1))
    assert never.upper == -math.inf, "whatever is clipped to e^±0.1 is above 0.5"
