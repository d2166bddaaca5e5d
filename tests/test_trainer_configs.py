"""A printed configuration means the preset: read back, it makes the trainer do what the row says."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from offpol_diag.trainers import config_for, sayable
from tests import trainer_dumps
from tests.trainers import areal
from tests.trainers.configs import READERS, understood
from tests.trainers.ours import BUILT_IN, ours, read
from tests.trainers.padded import padded

BATCHWIDE = "areal_m2po"
"""Of equal values its trainer drops some and ours all, so what it does is compared where none are equal."""
PAIRS = [
    (name, trainer)
    for name, one in BUILT_IN.items()
    if name != BATCHWIDE
    for trainer in sayable(one, READERS)
]


def tame(row):
    """Within every trainer's safety bound: what it does beyond is a remark, and no setting."""
    gaps = [
        [p - q for p, q in zip(row[policy], row["rollout_log_probs"], strict=True)]
        for policy in ("old_log_probs", "current_log_probs")
    ]
    return all(abs(x) < 9 for gap in gaps for x in gap) and all(abs(sum(gap)) < 19 for gap in gaps)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """(as a trainer holds it, as ours reads it); one advantage per row, as most trainers have it."""
    rng = np.random.default_rng(20261121)
    rows = trainer_dumps.masked_rows(rng, 150, scalar=True, wild=False)
    rows += trainer_dumps.rows_on_bounds() + trainer_dumps.rows_beside_bounds()
    rows += trainer_dumps.rows_beside_probabilities()
    rows = [row for row in rows if tame(row)]
    return padded(rows), read(rows, tmp_path_factory.mktemp("configs") / "dump.parquet")


@pytest.fixture(scope="module")
def answers(dumps):
    """Row → its factors."""
    return cache(lambda name: ours(name, dumps[1])[0])


@pytest.mark.parametrize(("name", "trainer"), PAIRS)
def test_a_printed_config_makes_its_trainer_do_what_the_row_says(name, trainer, dumps, answers):
    p, _ = dumps
    printed = config_for(BUILT_IN[name], trainer)

    function, settings = understood(trainer, [(one.file, one.text) for one in printed.snippets])

    want = function(p, **settings).factor[p.mask]
    off = np.flatnonzero(~np.isclose(answers(name), want, rtol=1e-9, atol=1e-30))
    assert off.size == 0, (settings, answers(name)[off[:5]], want[off[:5]])


def test_m2pos_threshold_is_printed_on_squares():
    printed = config_for(BUILT_IN[BATCHWIDE], "areal")

    read_back = understood("areal", [(one.file, one.text) for one in printed.snippets])

    assert read_back == (areal.m2po, {"m2_threshold": 0.04})
