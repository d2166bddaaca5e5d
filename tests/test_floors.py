"""What K3 is expected to be, by what the metadata of a dump says: published rows, and those of the user."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.diagnosis.floors import FLOORS, expected, read
from offpol_diag.errors import UsageError

BF16 = {"rollout_dtype": "bfloat16"}
OWN = """
[[floor]]
precision = "bf16"
low = 1e-4
high = 2e-4
regime = "our model"
source = "run 7"
"""


@pytest.mark.parametrize(
    ("provenance", "regime"),
    [
        (BF16, "dense model, BF16"),
        (BF16 | {"model": "Mixtral-8x7B"}, "mixture of experts, BF16"),
        (BF16 | {"model": "Qwen3-30B-A3B", "trainer": "verl"}, "Qwen3-30B-A3B (MoE), healthy run"),
        (BF16 | {"trainer": "prime-rl"}, "dense model, vLLM and prime-rl, BF16"),
        ({"rollout_dtype": "bfloat16", "quantization": "fp8"}, "dense model, FP8 rollout"),
        ({"quantization": "awq"}, None),
        ({"trainer": "verl"}, None),
    ],
)
def test_the_row_that_says_most_of_a_dump_is_taken(provenance, regime):
    found = expected(provenance)
    assert [one.regime for one in found] == [regime] * bool(regime)


def test_a_row_of_the_user_is_taken_before_a_published_one_that_says_as_much():
    own = read(OWN, "own.toml")
    assert expected(BF16, own)[0].regime == "our model"
    assert expected(BF16 | {"trainer": "prime-rl"}, own)[0].regime != "our model"


def test_every_published_row_has_a_source_and_a_range():
    assert len(FLOORS) >= 5
    assert all(one.source and one.regime and one.low < one.high for one in FLOORS)


BAD = {
    "it holds x, and": "x = 1",
    "floor 1: there is no key hihg": OWN + "hihg = 1",
    "floor 1: it lacks source": OWN.replace('source = "run 7"', ""),
    "floor 1: low = 'a' is no float": OWN.replace("1e-4", "'a'"),
    "floor 1: precision is 'bf17'": OWN.replace("bf16", "bf17"),
    "floor 1: 0.1 to 0.0002 is no range": OWN.replace("1e-4", "0.1"),
    "own.toml: ": "[[floor",
}


@pytest.mark.parametrize("says", BAD)
def test_a_file_with_a_slip_is_refused(says):
    with pytest.raises(UsageError) as error:
        read(BAD[says], "own.toml")
    assert says in error.value.message
    assert error.value.hint


@pytest.fixture
def dump(tmp_path):
    q = -np.random.default_rng(0).exponential(1, (40, 30))
    table = pa.table({"rollout_log_probs": list(q), "old_log_probs": list(2 * q)})
    pq.write_table(table.replace_schema_metadata({"offpol_diag": json.dumps(BF16)}), tmp_path / "d.parquet")
    (tmp_path / "own.toml").write_text(OWN)
    return tmp_path


def test_it_is_said_beside_a_bug_and_marked_on_the_scale(dump):
    plain = CliRunner().invoke(app, ["doctor", str(dump / "d.parquet")])
    assert "K3 of 1.0e-5 to 0.0010 (dense model, BF16)." in plain.output
    found = offpol_diag.doctor(str(dump / "d.parquet"), floors=str(dump / "own.toml"))
    assert found.summary.charts.expected[0].source == "run 7"
    assert "expected: our model" in found.to_html()


@pytest.mark.parametrize("text", ["x = 1", None])
def test_a_bad_file_ends_with_2_and_a_hint(dump, text):
    path = dump / "bad.toml"
    if text:
        path.write_text(text)
    ran = CliRunner().invoke(app, ["doctor", str(dump / "d.parquet"), "--floors", str(path)])
    assert ran.exit_code == 2
    assert ran.output.startswith("error: ")
    assert "hint: " in ran.output
