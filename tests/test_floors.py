"""What K3 is expected to be, and up to where the metadata of a dump excuse it, by published rows."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import offpol_diag
from offpol_diag.diagnosis.recorded import FLOORS, PLAIN, QUANTISED, ceiling, expected, recorded

BF16 = {"rollout_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("provenance", "regime"),
    [
        (BF16, "dense model, BF16"),
        (BF16 | {"model": "Mixtral-8x7B"}, "mixture of experts, BF16"),
        (BF16 | {"model": "Qwen3-30B-A3B", "trainer": "verl"}, "Qwen3-30B-A3B (MoE), healthy run"),
        (BF16 | {"trainer": "prime-rl"}, "dense model, vLLM and prime-rl, BF16"),
        ({"rollout_dtype": "bfloat16", "quantization": "fp8"}, "dense model, FP8 rollout"),
        ({"quantization": "awq"}, "dense model, weights of 4 bits (W4A16)"),
        ({"quantization": "int8"}, None),
        ({"trainer": "verl"}, None),
    ],
)
def test_the_row_that_says_most_of_a_dump_is_taken(provenance, regime):
    found = expected(provenance)
    assert [one.regime for one in found] == [regime] * bool(regime)


def test_every_row_has_a_source_a_range_and_a_known_number_format():
    assert len(FLOORS) >= 9
    assert all(one.source and one.regime and 0 <= one.low < one.high for one in FLOORS)
    assert {one.precision for one in FLOORS} <= {*QUANTISED, *PLAIN}
    assert all(word == word.lower() for one in FLOORS for word in one.says)


@pytest.mark.parametrize(
    ("provenance", "most"),
    [
        (BF16, 0.01),
        (BF16 | {"trainer": "prime-rl"}, 0.01),
        (BF16 | {"model": "Mixtral-8x7B"}, 0.3),
        ({"quantization": "fp8"}, 0.15),
        ({"quantization": "awq"}, 0.3),
        ({"quantization": "nvfp4"}, 0.3),
        ({}, 0.3),
    ],
)
def test_ten_times_what_is_published_of_a_format_is_excused_and_of_none_more_than_0_3(provenance, most):
    assert ceiling(recorded(provenance)) == pytest.approx(most)


def test_it_is_said_beside_a_bug_and_marked_on_the_scale(tmp_path):
    q = -np.random.default_rng(0).exponential(1, (40, 30))
    table = pa.table({"rollout_log_probs": list(q), "old_log_probs": list(2 * q)})
    pq.write_table(table.replace_schema_metadata({"offpol_diag": json.dumps(BF16)}), tmp_path / "d.parquet")
    found = offpol_diag.doctor(str(tmp_path / "d.parquet"))
    assert "K3 of 1.0e-5 to 0.0010 (dense model, BF16)." in found.to_markdown()
    assert "expected: dense model, BF16" in found.to_html()
