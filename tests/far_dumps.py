"""Helpers of tests of remote dumps: small dumps, refusals, and results without time and place."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.errors import DumpError
from offpol_diag.readers import open_dump


def table(rows=4, length=3, seed=0, **columns):
    rng = np.random.default_rng(seed)
    lists = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(-rng.exponential(size=rows * length)), length).cast(
            pa.list_(pa.float64())
        )
        for name in ("rollout_log_probs", "old_log_probs")
    }
    return pa.table(lists | columns)


def write(path, *args, row_group_size=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pages = {"use_dictionary": False, "data_page_size": 1 << 14, "write_batch_size": 64}
    pq.write_table(table(*args, **options), path, row_group_size=row_group_size, **pages)
    return path


def refusal(*sources):
    with pytest.raises(DumpError) as caught:
        list(open_dump(sources).batches())
    return caught.value


def numbers(summary):
    """Return a result without the fields that depend on place and time."""
    found = json.loads(summary.to_json())
    found["dump"].pop("files")
    for name in ("seconds", "peak_rss_bytes"):
        found["run"].pop(name)
    return found
