"""Check that the first pass reads only the columns it needs, and only the rows that count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.analysis.first_pass import Needs, read_ahead
from offpol_diag.analyze import analyze
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import DumpError
from offpol_diag.presets import Preset, Reject
from offpol_diag.run.threads import Threads

M2PO = Preset("m2", "", reject=(Reject("k2", "batch", upper=0.02),))
HERE = Threads(1)


def made(steps: list[int], seed: int = 0) -> list[dict[str, Any]]:
    """Make rows with every column; some tokens, some rows, and all tokens of some rows are masked."""
    draw = np.random.default_rng(seed)
    rows = []
    for at, step in enumerate(steps):
        n = int(draw.integers(0, 9))
        rollout = -draw.exponential(1.0, n)
        rows.append(
            {
                "rollout_log_probs": rollout.tolist(),
                "old_log_probs": np.minimum(rollout + 0.4 * draw.standard_t(3, n), 0.0).tolist(),
                "current_log_probs": rollout.tolist(),
                "response_mask": (draw.random(n) < (0.0 if at % 5 == 0 else 0.8)).astype(int).tolist(),
                "rewards": float(draw.normal()),
                "step": step,
                "group_id": at // 4,
            }
        )
    return rows


def saved(rows: list[dict[str, Any]], folder) -> str:
    path = folder / "dump.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return str(path)


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("presets", "policies"),
    [
        ((M2PO,), {"old"}),
        ((Preset("c", "", policy="current", reject=(Reject("k2", "batch", upper=0.02),)),), {"current"}),
    ],
)
def test_a_narrow_reading_has_the_columns_that_it_needs(tmp_path, presets, policies):
    dump = open_dump([saved(made([1] * 20), tmp_path)])
    read = next(iter(Needs.of(presets, False).narrow(dump).batches()))
    assert {policy for policy in ("old", "current") if read.policy(policy) is not None} == policies
    assert "step" in read.scalars


@pytest.mark.parametrize(("column", "row"), [("current_log_probs", 3), ("old_log_probs", 9)])
def test_the_first_bad_row_is_told_whichever_columns_are_read_first(tmp_path, column, row):
    rows = [row | {"response_mask": [1] * len(row["rollout_log_probs"])} for row in made([1] * 30)]
    rows = [{key: x for key, x in row.items() if key != "rewards"} for row in rows]  # those need every column
    for name, at in (("current_log_probs", 3), ("old_log_probs", 9)):
        if at >= row:
            rows[at] |= {key: [-1.0, -1.0] for key in rows[at] if key.endswith("_log_probs")}
            rows[at] |= {"response_mask": [1, 1], name: [-1.0, math.nan]}

    asked = Needs.of((M2PO,), False)
    dump = open_dump([saved(rows, tmp_path)])
    assert asked.narrow(dump) is not dump
    with pytest.raises(DumpError, match=f"row {row}, column '{column}'"):
        analyze([saved(rows, tmp_path)], presets=[M2PO], device="cpu")


def test_rows_that_are_left_out_settle_nothing(tmp_path):
    rows = [row for row in made([1] * 40) if sum(row["response_mask"])]
    odd = rows[2] | {"current_log_probs": [math.nan] * len(rows[2]["rollout_log_probs"])}
    odd["old_log_probs"] = [-50.0] * len(rows[2]["rollout_log_probs"])
    odd["response_mask"] = [1] * len(rows[2]["rollout_log_probs"])
    with_odd, without = tmp_path / "with", tmp_path / "without"
    for folder, some in ((with_odd, [*rows[:2], odd, *rows[2:]]), (without, rows)):
        folder.mkdir()
        saved(some, folder)

    asked = Needs.of((M2PO,), False)
    found = [
        read_ahead(HERE, open_dump([str(one / "dump.parquet")], on_bad_row="skip"), asked).fits.cuts
        for one in (with_odd, without)
    ]

    assert found[0] == found[1]
