"""Each row does to every token what its trainer does, restated independently on padded arrays."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from offpol_diag.core.observe import analyze
from tests import trainer_dumps
from tests.trainers import areal, slime
from tests.trainers.ours import BUILT_IN, ours, read
from tests.trainers.padded import padded
from tests.trainers.policies import cispo, gspo, loss_of, ppo
from tests.trainers.table import TABLE, bare


def drawn(seed, many, **more):
    return trainer_dumps.masked_rows(np.random.default_rng((20260822, seed)), many, **more)


DUMPS = {
    "on_bounds": trainer_dumps.rows_on_bounds(),
    "beside_bounds": trainer_dumps.rows_beside_bounds(),
    "beside_probabilities": trainer_dumps.rows_beside_probabilities(),
    **{f"random_{seed}": drawn(seed, 120, scalar=seed % 2 == 0) for seed in range(4)},
}


def test_every_row_of_another_trainer_than_verl_is_restated():
    of_others = {name for name, one in BUILT_IN.items() if one.source and not one.source.startswith("verl")}
    assert of_others - set(TABLE) == {"recompute", "ppo_is", "opsm", "gspo", "cispo"}


@pytest.mark.parametrize("dump", DUMPS)
def test_a_row_weighs_and_counts_each_token_as_its_trainer_does(dump, tmp_path):
    p, batch = padded(DUMPS[dump]), read(DUMPS[dump], tmp_path / "dump.parquet")
    for name, (trainer, settings) in TABLE.items():
        if name == "m2po" and not dump.startswith("random"):
            continue  # of equal values its trainer drops some, ours all
        factor, counted = ours(name, batch)
        want = trainer(p, **settings)
        np.testing.assert_allclose(factor, want.factor[p.mask], rtol=1e-9, atol=1e-30, err_msg=name)
        np.testing.assert_array_equal(counted, want.counted[p.mask], err_msg=name)


LOSS_ALONE = {
    "gspo": (gspo, {"low": 3e-4, "high": 4e-4, "bound": 10.0}),
    "cispo": (cispo, {}),
    "recompute": (ppo, {"dual": 3.0, "bound": 20.0}),  # verl's
}
LOSS_DUMPS = {
    "scalar": drawn(5, 120, scalar=True, wild=False),
    "of tokens": drawn(6, 120, scalar=False, wild=False),
    **{
        # e^20 or e^25 with A = −1, and from below no less than e^−20 where u is bounded
        f"u = {u}": [trainer_dumps.exact_row([5e-4], current=[5e-4 + u], advantage=-1.0)]
        for u in (25.0, -25.0)
    },
}


@pytest.mark.parametrize("dump", LOSS_DUMPS)
def test_a_rows_loss_is_its_trainers_mean_over_its_own_denominator(dump, tmp_path):
    """Without wild tokens: there float64 knows the digits of every loss."""
    p, file = padded(LOSS_DUMPS[dump]), trainer_dumps.write(LOSS_DUMPS[dump], tmp_path / "dump.parquet")
    rows = {name: (*TABLE[name], *loss_of(name)) for name in TABLE}
    rows |= {name: (bare, {}, *how) for name, how in LOSS_ALONE.items()}
    found = analyze([file], presets=[BUILT_IN[name] for name in rows], device="cpu")
    for name, (trainer, settings, loss, options) in rows.items():
        verdict = trainer(p, **settings)
        got, count = found.preset(name)["pg_loss_own"].value, verdict.counted.sum()
        want = (verdict.factor * loss(p, **options))[p.mask].sum() / count if count else None
        assert got == pytest.approx(want, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("steps", [3, 1])
def test_m2po_and_slimes_batch_mean_look_at_the_rows_of_one_step(steps, tmp_path):
    """Without steps the dump is one batch."""
    rows, out = drawn(7, 90, scalar=False), tmp_path / "sequences.parquet"
    stepped = [{**row, "step": i % steps} for i, row in enumerate(rows)] if steps > 1 else rows
    file = trainer_dumps.write(stepped, tmp_path / "dump.parquet")
    presets = [BUILT_IN[name] for name in ("m2po", "slime_mis")]
    analyze([file], presets=presets, device="cpu", sequences=out)
    found = {name: np.array(values) for name, values in pq.read_table(out).to_pydict().items()}

    for step in range(steps):
        p = padded(rows[step::steps])
        weight = slime.mis(p, tis_batch_normalize=True).factor  # of rejected tokens too
        kept = slime.mis(p, use_rs=True, rs_veto_threshold=1e-4).factor != 0
        for name, want in {
            "m2po.kept_tokens": areal.m2po(p).counted,
            "slime_mis.weight_sum": weight,
            "slime_mis.kept_tokens": p.mask & kept,
        }.items():
            np.testing.assert_allclose(found[name][step::steps], want.sum(axis=1), rtol=1e-9, err_msg=name)
