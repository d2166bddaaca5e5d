"""Weights that do not arrive, by the digests that a dump records of both sides' weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.faults import diagnosed, seeded

STEPS, ROWS, TOKENS = 8, 8, 40
NAME = "weights_not_synced"
CASES = {
    "equal": (None, lambda step: f"w{step}", 0),
    "one that stays": (NAME, lambda step: f"w{min(step, 3)}", 0),
    "others at every other step": (NAME, lambda step: f"v{step}" if step % 2 else f"w{step}", 0),
    "older ones, as the lag says": (None, lambda step: f"w{max(step - 1, 0)}", 1),
    "older ones, and no lag is recorded": (None, lambda step: f"w{max(step - 1, 0)}", None),
    "older ones at lag 0": (None, lambda step: f"w{max(step - 1, 0)}", 0),
    "of every other step": (NAME, lambda step: f"w{step - step % 2}", 0),
    "of another dtype in every row": (None, lambda step: f"b{step}", 0),
    "of another dtype from a step on": (None, lambda step: f"w{step}" if step < 4 else f"b{step}", 0),
    "of another dtype up to a step": (None, lambda step: f"b{step}" if step < 4 else f"w{step}", 0),
}


def named(tmp_path, steps, engine, lag):
    """Return the bugs of a dump whose engine has a digest at each step."""
    step = np.repeat(np.arange(steps), ROWS)
    log = -seeded(3).exponential(1.0, (len(step), TOKENS)) - 0.05
    given = {
        "rollout_log_probs": list(log),
        "old_log_probs": list(log + seeded(4).normal(0.0, 0.01, log.shape) * -np.expm1(log)),
        "step": step,
        "group_id": np.arange(len(step)) // 2,
        "weight_digest_rollout": [engine(one) for one in step.tolist()],
        "weight_digest_train": [f"w{one}" for one in step],
    }
    found = diagnosed(tmp_path, given if lag is None else given | {"policy_lag": [lag] * len(step)})
    return [one for one in found.causes if one.kind == "bug"]


@pytest.mark.parametrize("case", CASES)
def test_digests_name_weights_that_are_not_the_trainers_at_policy_lag_0(tmp_path, case):
    cause, engine, lag = CASES[case]
    found = named(tmp_path, STEPS, engine, lag)
    assert [one.id for one in found] == ([] if cause is None else [cause])
    if found:
        assert found[0].exact
        assert found[0].sequences == ROWS * 4
        assert "32 of 64 rows of policy lag 0" in found[0].statistic


def test_one_missed_sync_is_no_end_of_them(tmp_path):
    (found,) = named(tmp_path, STEPS, lambda step: f"w{step - (step == 3)}", 0)
    assert (found.id, found.sequences) == (NAME, ROWS)
    assert "in 12% of the responses" in found.statement


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_dump_of_a_few_steps_may_begin_with_a_constant_lag(tmp_path, steps):
    """One or two behind, or several optimiser steps of one batch."""
    assert named(tmp_path, steps, lambda step: "w0", 0) == []
