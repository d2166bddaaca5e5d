"""Each built-in row does to every token what its trainer does, restated independently on padded arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offpol_diag import catalogue, segments
from offpol_diag.metrics.outcome import norm, norm_factor, outcome, token_mask
from offpol_diag.metrics.scene import Scene
from offpol_diag.readers import open_dump
from tests import trainer_dumps
from tests.trainers.padded import padded
from tests.trainers.table import TABLE

FAMILIES = (
    "trl_",
    "swift_",
    "openrlhf_",
    "nemo_rl_",
    "slime_",
    "areal_",
    "prime_rl_",
    "skyrl_",
    "roll_",
    "open_instruct_",
)
ALONE = {"tis", "vanilla_is", "areal_decoupled", "torchforge", "deepseek_v32_mask"}
BUILT_IN = catalogue.load()
NAMES = [name for name in TABLE if name != "areal_m2po"]


def ours(name, batch):
    """(what the loss of each token is multiplied by, whether it is in the denominator): [T] each."""
    preset = BUILT_IN[name]
    done = outcome(Scene.of(batch, 0, 2), preset)
    mask = token_mask(done)
    weights = torch.ones_like(mask)
    if done.weighed is not None:
        weights = done.weighed.final.values
        if done.weighed.final.per == "sequence":
            weights = segments.spread(weights, batch.cu_seqlens)
    for units in [norm(done, preset)]:
        if units:
            weights = weights / norm_factor(units["norm"].sum(), units["norm_units"].sum())
    counted = mask if preset.denominator == "kept" else torch.ones_like(mask)
    return (weights * mask).numpy(), counted.numpy().astype(bool)


def theirs(name, rows):
    """The same of the trainer."""
    trainer, settings = TABLE[name]
    p = padded(rows)
    verdict = trainer(p, **settings)
    return verdict.factor[p.mask], verdict.counted[p.mask]


def read(rows, path):
    (batch,) = open_dump([trainer_dumps.write(rows, path)]).batches()
    return batch


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Name → (rows, batch)."""
    where = tmp_path_factory.mktemp("trainers")
    found = {"on_bounds": trainer_dumps.rows_on_bounds()}
    for seed in range(6):
        rng = np.random.default_rng((20260822, seed))
        found[f"random_{seed}"] = trainer_dumps.masked_rows(rng, 120, scalar=seed % 2 == 0)
    return {key: (rows, read(rows, where / f"{key}.parquet")) for key, rows in found.items()}


def differences(got, want):
    """Where two arrays of factors differ: index → (ours, theirs)."""
    off = np.flatnonzero(~np.isclose(got, want, rtol=1e-9, atol=1e-30))
    return {int(i): (float(got[i]), float(want[i])) for i in off[:5]}


# ---------------------------------------------------------------- every row


def test_every_row_of_these_trainers_is_restated():
    rows = {name for name in BUILT_IN if name.startswith(FAMILIES) or name in ALONE}

    assert rows == set(TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_multiplies_each_tokens_loss_by_what_its_trainer_does(name, dumps):
    for key, (rows, batch) in dumps.items():
        assert differences(ours(name, batch)[0], theirs(name, rows)[0]) == {}, key


@pytest.mark.parametrize("name", NAMES)
def test_a_row_divides_the_loss_by_as_many_tokens_as_its_trainer_does(name, dumps):
    for key, (rows, batch) in dumps.items():
        assert ours(name, batch)[1].sum() == theirs(name, rows)[1].sum(), key
