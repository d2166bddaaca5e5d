"""Dumps at the edge of what floats and counts allow: every number is there, or says why not."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.engine.accumulators import SAMPLE
from offpol_diag.presets import catalogue
from offpol_diag.summary import loads
from tests.kinds import EACH

DUMPS = {
    "one token": {"rollout_log_probs": [[-1.0]], "old_log_probs": [[-1.2]]},
    "two policies": {
        "rollout_log_probs": [[-1.0, -2.0], [-0.5]],
        "current_log_probs": [[-1.1, -2.0], [-0.6]],
    },
    "nothing differs": {"rollout_log_probs": [[-1.0]] * 9, "old_log_probs": [[-1.0]] * 9},
    "a sentinel of the engine": {
        "rollout_log_probs": [[-9999.0, -1.0]] * 9,
        "old_log_probs": [[-0.1, -1.0]] * 9,
    },
    "a sentinel of the trainer": {
        "rollout_log_probs": [[-0.1, -1.0]] * 9,
        "old_log_probs": [[-9999.0, -1.0]] * 9,
    },
    "products beyond float64": {"rollout_log_probs": [[-9.0] * 200] * 9, "old_log_probs": [[-0.1] * 200] * 9},
    "logarithms beyond float64": {
        "rollout_log_probs": [[-1.7e308] * 3] * 9,
        "old_log_probs": [[-0.1] * 3] * 9,
    },
    "certain tokens": {"rollout_log_probs": [[0.0] * 5] * 9, "old_log_probs": [[0.0] * 5] * 9},
    "rows masked whole": {
        "rollout_log_probs": [[-1.0, -2.0]] * 9,
        "old_log_probs": [[-1.1, -2.0]] * 9,
        "current_log_probs": [[-1.2, -2.0]] * 9,
        "advantages": [1.0] * 9,
        "response_mask": [[0, 0]] * 4 + [[1, 1]] * 5,
    },
    "empty rows": {"rollout_log_probs": [[], [-1.0]], "old_log_probs": [[], [-1.1]]},
    "advantages of zero": {
        "rollout_log_probs": [[-1.0]] * 9,
        "old_log_probs": [[-1.1]] * 9,
        "advantages": [0.0] * 9,
    },
}


@pytest.mark.parametrize("name", DUMPS)
def test_every_number_is_finite_or_says_why_it_is_not(tmp_path, name):
    """Of a third of the kinds of presets in each dump, in turn."""
    presets = EACH[[*DUMPS].index(name) % 3 :: 3]
    pq.write_table(pa.table(DUMPS[name]), tmp_path / "dump.parquet")
    summary = analyze([str(tmp_path / "dump.parquet")], presets=presets, sequences=tmp_path / "s.parquet")

    numbers = dict(summary.metrics)
    for preset, result in summary.presets.items():
        numbers |= {f"{preset}.{metric}": number for metric, number in result.metrics.items()}
    for metric, number in numbers.items():
        assert (number.value is None) == (number.unknown is not None), metric
        assert number.value is None or math.isfinite(number.value), metric
    assert loads(summary.to_json(), "result") == summary
    assert pq.read_table(tmp_path / "s.parquet").num_rows == len(DUMPS[name]["rollout_log_probs"])


def test_a_two_policy_dump_knows_the_total_and_says_what_the_rest_needs(tmp_path):
    presets = catalogue.load().resolve("token_is,pure_is")
    pq.write_table(pa.table(DUMPS["two policies"]), tmp_path / "dump.parquet")
    summary = analyze([str(tmp_path / "dump.parquet")], presets=presets)

    assert summary.metrics["k3"].unknown == "missing column old_log_probs"
    assert summary.metrics["drift2.k3"].unknown == "missing column old_log_probs"
    assert summary.metrics["total.k3"].value == pytest.approx((2 * (math.exp(-0.1) - 0.9)) / 3, rel=1e-12)
    assert summary.presets["token_is"].needs == ["old_log_probs"]
    assert summary.presets["token_is"].metrics == {}
    assert summary.presets["pure_is"].needs == []


def test_the_share_of_weights_that_the_safety_bound_touches_is_told(tmp_path):
    presets = catalogue.load().resolve("seq_is,token_is,geo_rs")
    pq.write_table(pa.table(DUMPS["products beyond float64"]), tmp_path / "dump.parquet")
    result = analyze([str(tmp_path / "dump.parquet")], presets=presets).presets

    assert result["seq_is"].metrics["ess_tokens"].clamped == 1.0
    assert result["token_is"].metrics["ess_tokens"].clamped == 0.0
    assert result["geo_rs"].metrics["ess_tokens"].clamped == 0.0


@pytest.mark.parametrize(("groups", "exact"), [(SAMPLE, True), (SAMPLE + 1000, False)])
def test_groups_are_counted_exactly_up_to_the_sample_and_estimated_beyond(tmp_path, groups, exact):
    values = [[-1.0]] * groups
    table = {"rollout_log_probs": values, "old_log_probs": values, "group_id": list(range(groups))}
    pq.write_table(pa.table(table), tmp_path / "dump.parquet")
    facts = analyze([str(tmp_path / "dump.parquet")]).dump

    assert facts.groups_exact is exact
    assert facts.groups == pytest.approx(groups, rel=0.0 if exact else 0.1)


@pytest.mark.parametrize("lowest", [-400.0, -1e155, -1e300])
def test_k3_is_not_negative_where_its_ratio_is_clamped(tmp_path, lowest):
    dump = {"rollout_log_probs": [[lowest, -1.0]] * 9, "old_log_probs": [[-1.0, -1.0]] * 9}
    pq.write_table(pa.table(dump), tmp_path / "dump.parquet")
    k3 = analyze([str(tmp_path / "dump.parquet")], presets=(), workers=1).metrics["k3"]

    assert k3.value == pytest.approx(math.expm1(345) / 2, rel=1e-12)
    assert k3.clamped == 0.5
