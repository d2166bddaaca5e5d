"""Weights that do not arrive, by the digests that a dump records of both sides' weights."""

from __future__ import annotations

import numpy as np
import pytest

from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze

STEPS, ROWS, TOKENS = 8, 8, 40
CASES = {
    "equal": (None, lambda step: f"w{step}", 0),
    "one that stays": ("sync_stopped", lambda step: f"w{min(step, 3)}", 0),
    "others": ("weights_differ", lambda step: f"w{step}" if step < 4 else f"v{step}", 0),
    "older ones, as the lag says": (None, lambda step: f"w{max(step - 1, 0)}", 1),
    "older ones, and no lag is recorded": (None, lambda step: f"w{max(step - 1, 0)}", None),
    "of another dtype in every row": (None, lambda step: f"b{step}", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_digests_name_weights_that_are_not_the_trainers_at_policy_lag_0(tmp_path, case):
    cause, engine, lag = CASES[case]
    chance = np.random.default_rng(3)
    with DumpWriter(tmp_path / "dump.parquet") as dump:
        for step in range(STEPS):
            log = -chance.exponential(1.0, (ROWS, TOKENS)) - 0.05
            columns = {} if lag is None else {"policy_lag": [lag] * ROWS}
            dump.write(
                rollout_log_probs=log,
                response_mask=np.ones(log.shape, np.int8),
                old_log_probs=log + chance.normal(0.0, 0.01, log.shape) * -np.expm1(log),
                step=[step] * ROWS,
                group_id=[f"{step}-{row // 2}" for row in range(ROWS)],
                weight_digest_rollout=[engine(step)] * ROWS,
                weight_digest_train=[f"w{step}"] * ROWS,
                **columns,
            )
    found = analyze([str(tmp_path / "dump.parquet")], presets=(), threads=1).diagnosis
    assert found is not None
    named = [one for one in found.causes if one.kind == "bug"]
    assert [one.id for one in named] == ([] if cause is None else [cause])
    if named:
        assert named[0].exact
        assert named[0].sequences == ROWS * 4
        assert "32 of 64 rows of policy lag 0" in named[0].statistic
