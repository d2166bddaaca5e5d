"""Bug or honest mismatch: dumps whose fault is known, and the truth table of the identities."""

import pytest
from faults import dump

from offpol_diag.analyze import analyze
from offpol_diag.diagnose import FEWEST_GROUPS, diagnose, standard_errors
from offpol_diag.summary import Number


def diagnosis(path):
    return diagnose(analyze([path]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("noise", "verdict"), [(0.02, "healthy"), (0.15, "honest_mismatch")])
def test_noise_of_any_size_is_no_bug(tmp_path, noise, verdict, seed):
    found = diagnosis(dump(tmp_path / "d.parquet", noise=noise, seed=seed))

    assert found.verdict == verdict
    assert found.causes == []
    assert "k1 < 0" in " ".join(found.ruled_out)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raw", "rollout_raw_logprobs"),
        ("nucleus", "truncated_sampling"),
        ("shift", "off_by_one"),
        ("first", "boundary"),
    ],
)
def test_a_known_fault_is_called_a_bug_and_named(tmp_path, fault, cause, seed):
    found = diagnosis(dump(tmp_path / "d.parquet", fault=fault, noise=0.02, seed=seed))

    assert found.verdict == "bug"
    assert cause in [one.id for one in found.causes]
    first = found.causes[0]
    assert first.statistic
    assert first.fix


def test_the_golden_dumps_hold_positive_values_and_are_called_a_bug():
    found = diagnosis("tests/golden/stale.parquet")

    assert found.verdict == "bug"
    assert found.causes[0].id == "sentinel"


@pytest.mark.parametrize("name", ["healthy", "quantized"])
def test_a_real_run_without_a_bug_is_not_called_one(name):
    assert diagnosis(f"sample_data/{name}.parquet").verdict in ("healthy", "honest_mismatch")


@pytest.mark.parametrize("name", ["stale", "collapse"])
def test_a_stale_policy_is_an_honest_mismatch(name):
    assert diagnosis(f"sample_data/{name}.parquet").verdict == "honest_mismatch"


def test_few_groups_cannot_tell(tmp_path):
    summary = analyze([dump(tmp_path / "d.parquet", noise=0.15)])
    facts = summary.dump.model_copy(update={"groups": FEWEST_GROUPS - 1})

    assert diagnose(summary.model_copy(update={"dump": facts})).verdict == "cannot_tell"


def test_a_column_that_is_missing_is_named_as_undecidable(tmp_path):
    assert "missing column entropy" in " ".join(diagnosis(dump(tmp_path / "d.parquet")).undecidable)


@pytest.mark.parametrize(
    ("value", "interval", "errors"),
    [(1.0, (0.9, 1.1), 0.0), (1.2, (1.1, 1.296), 4.0), (0.8, (0.702, 0.898), -4.0), (1.2, None, 0.0)],
)
def test_distance_from_one_is_counted_in_standard_errors(value, interval, errors):
    assert standard_errors(Number(value=value, interval=interval), 1.0) == pytest.approx(errors, abs=1e-9)
