"""The evaluator of presets: one text on arrays and on tensors, for one preset or many.

What presets do is held against the textbook (`test_oracle.py`), and numbers of trainers' own code
(`test_logged.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from offpol_diag.core import gap, preset_numbers
from offpol_diag.core.gap import DRIFTS, Tokens
from offpol_diag.core.segments import to_host
from offpol_diag.core.study import Study
from offpol_diag.core.whole_steps import WholeSteps
from offpol_diag.presets.catalogue import load
from tests import factory
from tests.kinds import MADE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # ratios that overflow

EVERY = (
    *load().values(),
    *(
        replace(one, name=f"{one.name}_{loss}_{policy}", loss=loss, policy=policy)
        for one in MADE
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
    offsets = batch.cu_seqlens
    rows = np.concatenate(([0, 0, 1, 2, 2, 10], offsets[1:]))  # empty ones, and of one token
    size, more = len(rows) - 1, len(rows) - len(offsets)
    return replace(
        batch,
        rollout=rollout,
        old=old,
        current=np.where(draw.random(many) < 0.3, old, moved),
        advantages=draw.normal(size=many) * draw.choice([0, 1, 1e3], many),
        cu_seqlens=rows,
        cu_runs=np.unique(np.concatenate((rows, draw.integers(0, many, many // 20)))),
        position=np.arange(many) - np.repeat(rows[:-1], np.diff(rows)),
        key=np.arange(size),
        masked=np.zeros(size, dtype=np.int64),
        scalars={name: [x[0]] * more + list(x) for name, x in batch.scalars.items()},
    )


@pytest.fixture(scope="module", params=["stale", "collapse", "wild", "two policies"])
def case(request):
    """Return a batch of some 9,000 tokens, the presets that it has the columns for, and its cuts."""
    name = {"wild": "collapse", "two policies": "stale"}.get(request.param, request.param)
    batch, presets = factory.read(f"sample_data/{name}.parquet").rows(0, 96), EVERY
    if request.param == "wild":
        batch = wild(batch)
    if request.param == "two policies":
        batch = replace(batch, current=None)
        presets = tuple(one for one in EVERY if one.policy == "old")
    return batch, presets, WholeSteps.of_batch(Study(presets, frozenset()), batch).cut


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


def assert_alike(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert apart(name, found, wanted) <= (0 if name in COUNTS else 1e-12), name


def test_tensors_have_the_sums_of_arrays(case):
    """The text that runs on CUDA, on tensors of the CPU."""
    assert_alike(columns_of(case, "cpu:0"), columns_of(case))
    on_numpy, on_torch = tokens_of(case), tokens_of(case, "cpu:0")
    for drift in DRIFTS:
        if {drift.numerator, drift.denominator} <= on_numpy.log_probs.keys():
            wanted = gap.columns(on_numpy.terms(drift))
            for name, x in to_host(gap.columns(on_torch.terms(drift))).items():
                np.testing.assert_allclose(x, wanted[name], rtol=1e-12, err_msg=name)


def test_presets_alone_have_the_sums_that_they_have_among_others(case):
    batch, presets, cut = case
    wanted = columns_of(case)
    for at in range(0, len(presets), 9):
        alone = columns_of((batch, (presets[at],), cut))
        assert_alike(alone, {name: x[at : at + 1] for name, x in wanted.items()})


def test_nothing_makes_the_host_wait_within_a_batch(case):
    """Tensors of the device `meta` have no values: whoever asks for one is refused."""
    batch, presets, _ = case
    tokens = Tokens.of(batch, lambda rule, x: batch.rollout, "meta")
    found = preset_numbers.columns(tokens, presets) | gap.columns(tokens.terms(DRIFTS[0]))
    assert {x.shape for x in found.values()} == {(batch.sequences,)}
