"""Bug or honest mismatch: dumps whose fault is known, and the truth table of the identities."""

import pytest
from factory import make_summary
from faults import dump
from scipy import stats

from offpol_diag.analyze import analyze
from offpol_diag.diagnose import FEWEST_GROUPS, SURE, diagnose, standard_errors, sure
from offpol_diag.summary import Location, Number, Place


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
    facts = summary.dump.model_copy(update={"groups": FEWEST_GROUPS - 1, "tokens": 2048})

    found = diagnose(summary.model_copy(update={"dump": facts}))
    assert found.verdict == "cannot_tell"
    assert found.headline == "19 groups, 300 sequences and 2,048 tokens are too few to tell."


def test_only_what_a_test_would_have_read_is_called_undecidable(tmp_path):
    assert diagnosis(dump(tmp_path / "d.parquet", noise=0.02)).undecidable == []


def test_identical_columns_are_not_called_healthy(tmp_path):
    found = diagnosis(dump(tmp_path / "d.parquet", noise=0.0))

    assert found.verdict == "cannot_tell"
    assert "same numbers" in found.headline


@pytest.mark.parametrize(
    ("value", "interval", "errors"),
    [(1.0, (0.9, 1.1), 0.0), (1.2, (1.102, 1.9), 4.0), (0.8, (0.3, 0.898), -4.0), (1.2, None, 0.0)],
)
def test_distance_from_one_is_counted_in_standard_errors(value, interval, errors):
    assert standard_errors(Number(value=value, interval=interval), 1.0) == pytest.approx(
        errors, rel=1e-4, abs=1e-9
    )


@pytest.mark.parametrize("groups", [8, 20, 128, 100_000])
@pytest.mark.parametrize("looks", [1, 8])
def test_few_groups_and_many_looks_need_more_standard_errors(groups, looks):
    """Beyond it a t of that many groups is as rare as a normal number beyond 4, over all looks together."""
    half_width_of_one = stats.t.ppf(0.975, groups - 1) / 1.96
    expected = stats.t.isf(stats.norm.sf(SURE) / looks, groups - 1) / half_width_of_one

    assert sure(groups, looks) == pytest.approx(expected, rel=0.03)


def of_positions(*numbers, note=None):
    """A result whose positions have these E[r], and whose E[r] over all is 1."""
    places = [
        Place(
            key=str(i),
            order=i,
            tokens=9000,
            sequences=300,
            metrics={"mean_ratio": one, "k3": Number(value=0.01)},
        )
        for i, one in enumerate(numbers)
    ]
    axis = Location(axis="position", title="position", numeric=True, places=places)
    whole = {"mean_ratio": Number(value=1.0, interval=(0.99, 1.01), note=note), "k3": Number(value=0.01)}
    return make_summary(by={"position": axis}, metrics=whole)


def apart(value, errors):
    half = 1.96 * abs(value - 1) / errors
    return Number(value=value, interval=(value - half, value + half))


@pytest.mark.parametrize(
    ("value", "errors", "found"),
    [(1.02, 6, True), (0.98, 6, True), (1.02, 4.1, False), (1.0015, 9, False), (1.02, 0.5, False)],
)
def test_the_identity_is_held_against_every_position(value, errors, found):
    """4.1 standard errors are too few where 8 positions are looked at; 0.15% is what kernels round."""
    seen = diagnose(of_positions(*[apart(1.001, 0.5)] * 7, apart(value, errors)))

    assert [cause.id for cause in seen.causes] == (["boundary"] if found else [])
    assert not found or "position 7: E[r]" in seen.causes[0].statistic


def test_positions_are_not_held_against_it_where_the_tail_is_too_heavy():
    heavy = of_positions(apart(1.2, 9), note="unreliable: k̂ = 0.90 is above 0.70")

    assert diagnose(heavy).causes == []
