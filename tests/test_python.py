"""What `offpol_diag.analyze` takes from a program, and what it says of anything else."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import offpol_diag
from offpol_diag.errors import UsageError
from offpol_diag.presets.catalogue import load

HEALTHY = "sample_data/healthy.parquet"
NAMES = ["token_is", "seq_mis"]
COLUMN = {"rollout_log_probs": [[-1.0]]}


@pytest.mark.parametrize("given", ["token_is, seq_mis", NAMES, load().resolve("token_is,seq_mis")])
def test_presets_may_be_named(given):
    assert list(offpol_diag.analyze([HEALTHY], presets=given, device="cpu").presets) == NAMES


@pytest.mark.parametrize("given", [HEALTHY, Path(HEALTHY), [Path(HEALTHY)]])
def test_a_dump_may_be_one_path(given):
    assert offpol_diag.analyze(given, device="cpu").dump.files == [HEALTHY]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tokn_is", 'unknown preset "tokn_is"'),
        (["tokn_is"], 'unknown preset "tokn_is"'),
        ([3], "int is no preset"),
        (3, "presets cannot be int"),
    ],
)
def test_what_is_no_preset_is_said_to_be_none(given, said):
    with pytest.raises(UsageError, match=said) as refused:
        offpol_diag.analyze([HEALTHY], presets=given, device="cpu")
    assert refused.value.hint


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x]], ids=["itself", "in a list"])
@pytest.mark.parametrize(
    ("given", "name"),
    [
        (pl.DataFrame(COLUMN), "polars.DataFrame"),
        (pl.LazyFrame(COLUMN), "polars.LazyFrame"),
        (pa.table(COLUMN), "pyarrow.Table"),
        (COLUMN, "dict"),
        (None, "NoneType"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_table_in_memory_is_no_path(given, name, wrap):
    with pytest.raises(UsageError, match=f"given by its path, not as {name}") as refused:
        offpol_diag.analyze(wrap(given), device="cpu")
    assert "Parquet" in refused.value.hint
