"""Each built-in row does to every token what its trainer does, restated independently on padded arrays."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from offpol_diag.analyze import analyze
from tests import trainer_dumps
from tests.trainers import areal, slime
from tests.trainers.ours import BUILT_IN, ours, read
from tests.trainers.padded import padded
from tests.trainers.table import TABLE

FAMILIES = (
    "trl_",
    "swift_",
    "openrlhf_",
    "molt_",
    "nemo_rl_",
    "slime_",
    "miles_",
    "areal_",
    "prime_rl_",
    "skyrl_",
    "roll_",
    "open_instruct_",
)
ALONE = {"tis", "vanilla_is", "areal_decoupled", "torchforge", "deepseek_v32_mask"}
ALONE |= {"sapo", "gmpo", "verl_dro", "verl_gpg", "verl_dppo_tv", "verl_dppo_kl"}


def theirs(name, p):
    """The same of the trainer."""
    trainer, settings = TABLE[name]
    verdict = trainer(p, **settings)
    return verdict.factor[p.mask], verdict.counted[p.mask]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Name → (as a trainer holds it, as ours reads it)."""
    where = tmp_path_factory.mktemp("trainers")
    found = {
        "on_bounds": trainer_dumps.rows_on_bounds(),
        "beside_bounds": trainer_dumps.rows_beside_bounds(),
        "beside_probabilities": trainer_dumps.rows_beside_probabilities(),
    }
    for seed in range(6):
        rng = np.random.default_rng((20260822, seed))
        found[f"random_{seed}"] = trainer_dumps.masked_rows(rng, 120, scalar=seed % 2 == 0)
    return {key: (padded(rows), read(rows, where / f"{key}.parquet")) for key, rows in found.items()}


@pytest.fixture(scope="module")
def answers(dumps):
    """(Row, dump) → (ours, theirs). Of equal values M2PO's trainer drops some, ours all: none are given."""
    return {
        (name, key): (ours(name, batch), theirs(name, p))
        for key, (p, batch) in dumps.items()
        for name in TABLE
        if name != "areal_m2po" or key.startswith("random")
    }


def differences(got, want):
    """Where two arrays of factors differ: index → (ours, theirs)."""
    off = np.flatnonzero(~np.isclose(got, want, rtol=1e-9, atol=1e-30))
    return {int(i): (float(got[i]), float(want[i])) for i in off[:5]}


# ---------------------------------------------------------------- every row


def test_every_row_of_these_trainers_is_restated():
    rows = {name for name in BUILT_IN if name.startswith(FAMILIES) or name in ALONE}

    assert rows == set(TABLE)


def test_a_row_multiplies_each_tokens_loss_by_what_its_trainer_does(answers):
    for name, dump in answers:
        (got, _), (want, _) = answers[name, dump]
        assert differences(got, want) == {}, (name, dump)


def test_a_row_divides_the_loss_by_the_tokens_that_its_trainer_counts(answers):
    for name, dump in answers:
        (_, got), (_, want) = answers[name, dump]
        assert got.tolist() == want.tolist(), (name, dump)


# ---------------------------------------------------------------- rows that look at the whole trainer batch


def by_step(rows):
    """Rows dealt to three steps: (rows with a step, step → their places)."""
    stepped = [{**row, "step": i % 3} for i, row in enumerate(rows)]
    return stepped, {step: list(range(step, len(rows), 3)) for step in range(3)}


def written(names, rows, folder):
    """What `--sequences` has for these rows."""
    out, presets = folder / "sequences.parquet", [BUILT_IN[name] for name in names]
    analyze(
        [trainer_dumps.write(rows, folder / "dump.parquet")], presets=presets, device="cpu", sequences=out
    )
    return pq.read_table(out).to_pydict()


@pytest.mark.parametrize("seed", range(3))
def test_m2po_and_slimes_batch_mean_look_at_the_rows_of_one_step(seed, tmp_path):
    rng = np.random.default_rng((20260918, seed))
    rows, steps = by_step(trainer_dumps.masked_rows(rng, 90, scalar=False))

    found = written(["areal_m2po", "slime_mis"], rows, tmp_path)

    for places in steps.values():
        p = padded([rows[i] for i in places])
        alive = areal.m2po(p).counted.sum(axis=1)
        weight = slime.mis(p, tis_batch_normalize=True).factor.sum(axis=1)  # of rejected tokens too
        rejected = slime.mis(p, use_rs=True, rs_veto_threshold=1e-4).factor == 0
        assert [found["areal_m2po.kept_tokens"][i] for i in places] == alive.tolist()
        assert [found["slime_mis.weight_sum"][i] for i in places] == pytest.approx(weight.tolist(), rel=1e-9)
        assert [found["slime_mis.kept_tokens"][i] for i in places] == (p.mask & ~rejected).sum(
            axis=1
        ).tolist()


def test_without_steps_the_dump_is_one_batch(tmp_path):
    rows = trainer_dumps.masked_rows(np.random.default_rng(20260919), 60, scalar=False)

    found = written(["areal_m2po"], rows, tmp_path)

    assert found["areal_m2po.kept_tokens"] == areal.m2po(padded(rows)).counted.sum(axis=1).tolist()
