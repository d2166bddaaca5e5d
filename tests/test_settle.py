"""Check that the first pass reads only the columns it needs, and only the values that can matter."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.analysis import first_pass
from offpol_diag.analysis.first_pass import Needs, read_ahead, split
from offpol_diag.analyze import analyze
from offpol_diag.engine import loglattice
from offpol_diag.errors import DumpError
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.readers import open_dump
from offpol_diag.run.threads import Threads
from tests import oracle_scope

M2PO = Preset("m2", "", reject=(Reject("k2", "batch", upper=0.02),))
PSIS = Preset("p", "", weight=Weight(over="token", action="psis", safety=None))
TURNS = Preset("t", "", weight=Weight(over="segment", action="psis", safety=None))
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


def expected(batch) -> dict[str, Any]:
    """Return the results that a first pass over some columns must have."""
    names = ("rollout", "old", "cu_seqlens", "masked", "lengths")
    return {name: getattr(batch, name).tolist() for name in names} | {"step": batch.scalars["step"]}


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize("masked", [True, False])
def test_a_narrow_reading_gives_the_same_values_lengths_and_steps(tmp_path, masked):
    rows = made([1, 1, 2, 3, 3, 3, 1] * 4)
    rows = rows if masked else [{k: v for k, v in row.items() if k != "response_mask"} for row in rows]
    dump = open_dump([saved(rows, tmp_path)], batch_tokens=31)

    narrow = list(dump.only({"old_log_probs", "step"}).batches())

    assert [expected(one) for one in narrow] == [expected(one) for one in dump.batches()]
    for batch in narrow:
        assert batch.current is None
        assert batch.rewards is None
        assert len(batch.position) == batch.tokens
        assert len(batch.key) == batch.sequences
        assert batch.cu_runs.tolist() == batch.cu_seqlens.tolist()


@pytest.mark.parametrize(
    ("presets", "policies"),
    [
        ((M2PO, PSIS), {"old"}),
        ((Preset("c", "", policy="current", reject=(Reject("k2", "batch", upper=0.02),)),), {"current"}),
        (
            (Preset("o", "", policy="current", reject=(Reject("k2", "batch", upper=0.02, policy="old"),)),),
            {"old"},
        ),
    ],
)
def test_a_narrow_reading_has_the_columns_that_it_needs(tmp_path, presets, policies):
    dump = open_dump([saved(made([1] * 20), tmp_path)])
    read = next(iter(Needs.of(presets, False).narrow(dump).batches()))
    assert {policy for policy in ("old", "current") if read.has(policy)} == policies
    assert "step" in read.scalars


def test_methods_that_need_prompts_turns_or_every_row_read_all_columns(tmp_path):
    path = saved(made([1] * 20), tmp_path)
    dump, skipping = open_dump([path]), open_dump([path], on_bad_row="skip")

    assert Needs.of((M2PO,), False).narrow(dump) is not dump
    assert Needs.of((M2PO,), True).narrow(dump) is dump
    assert Needs.of((TURNS,), False).narrow(dump) is dump
    assert Needs.of((M2PO,), False).narrow(skipping) is skipping


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


# ---------------------------------------------------------------- cuts


VALUES = {
    "spread": lambda draw: draw.exponential(0.02, 500),
    "below": lambda draw: draw.random(500) * 0.019,
    "above": lambda draw: 1.0 + draw.random(500),
    "few": lambda draw: np.repeat([0.0, 0.02, 0.25, 0.3], 25),
    "none": lambda draw: np.empty(0),
}


@pytest.mark.parametrize("upper", [0.02, 0.25, 1e-4, 0.7, 3.0])
@pytest.mark.parametrize("values", VALUES)
def test_a_cut_found_by_bins_is_that_of_dropping_value_by_value(values, upper):
    x = VALUES[values](np.random.default_rng(3))
    rule, bins = Reject("k2", "batch", upper=upper), loglattice.binned(x)
    at = first_pass.bin_of(bins, rule)

    found = first_pass.falls_at(bins, at, x[loglattice.index(x) == at], rule)
    assert found == oracle_scope.cut(x.tolist(), upper)


# ---------------------------------------------------------------- trainer batches


@pytest.mark.parametrize("steps", [[1] * 12, [1, 1, 2, 2, 1, 3, 1, 1, 2, 2, 2, 3], list(range(12)), None])
@pytest.mark.parametrize("empty", [True, False])
def test_values_are_told_apart_by_step(tmp_path, steps, empty):
    rows = made(steps or [0] * 12)
    for row in rows:
        n = len(row["rollout_log_probs"])
        row["response_mask"] = row["response_mask"] if empty else [1] * n
    rows = rows if empty else [row for row in rows if row["rollout_log_probs"]]
    rows = rows if steps else [{k: v for k, v in row.items() if k != "step"} for row in rows]
    (batch,) = open_dump([saved(rows, tmp_path)]).batches()
    of_tokens = np.arange(batch.tokens, dtype=np.float64)
    of_rows = np.arange(batch.sequences, dtype=np.float64)

    tokens: dict[str, list[float]] = {}
    filled: dict[str, list[float]] = {}
    first = 0
    for at, row in enumerate(rows):
        label, n = str(row.get("step", "")), sum(row["response_mask"])
        tokens.setdefault(label, []).extend(range(first, first + n))
        filled.setdefault(label, []).extend([at] * (n > 0))
        first += n

    assert {at: x.tolist() for at, x in split(batch, of_tokens, True)} == tokens
    assert {at: x.tolist() for at, x in split(batch, of_rows, False)} == filled


def test_every_field_of_a_batch_is_told_by_a_narrow_reading_or_is_absent(tmp_path):
    """A field that is added to `Batch` has to be thought of in `pack._bare`."""
    dump = open_dump([saved(made([1] * 20), tmp_path)])
    (batch,) = dump.only({"old_log_probs"}).batches()
    present = {f.name for f in fields(batch) if getattr(batch, f.name) is not None}

    assert present == {
        "rollout", "old", "cu_seqlens", "cu_runs", "position", "key", "masked", "scalars",
    }  # fmt: skip
