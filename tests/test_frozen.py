"""Results are what they were when they were frozen (`tests/frozen/`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.frozen import compare
from tests.frozen.results import CASES, Case

RTOL = 1e-10
"""Room for the instruction sets of other machines; on one machine 1e-12 holds."""


QUICK = ("turns", "far", "gate")


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=() if one.name in QUICK else pytest.mark.slow) for one in CASES],
    ids=lambda case: case.name,
)
def test_every_number_is_what_it_was(case: Case) -> None:
    report = compare.compare(compare.stored(compare.frozen(case)), compare.recomputed(case), RTOL)

    assert report.compared > 1000
    assert report.same, (
        f"{report}\nIf that is meant: python tests/frozen/compare.py --case {case.name} --update"
    )


def test_every_stored_result_has_its_case() -> None:
    assert {path.stem for path in compare.DATA.iterdir()} == {case.name for case in CASES}


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("numbers.dump.k3", 0),
        ("numbers.preset/token_is.ess_tokens", 2),
        ("presets.token_is.as_logged.rollout_corr/kl", 0),
        ("numbers.dump@step/6.k3", 0),
        ("sequences.token_is.weight_sum", 17),
        ("histograms.log_ratio.counts", 40),
    ],
)
def test_a_planted_difference_of_1e_9_is_named(path: str, index: int) -> None:
    old = compare.stored(compare.DATA / "stale.parquet")
    new = dict(old)
    new[path] = old[path].copy()
    new[path][index] += 1e-9 * old[path][index] if old[path].dtype == np.float64 else 1
    report = compare.compare(old, new, RTOL)

    place = f"{path}[{index}]" if old[path].size > 1 else path
    assert [one.path for one in report.differing] == [place]
    assert (report.missing, report.new) == ([], [])
    assert f"{place}: {old[path][index].item()!r} → {new[path][index].item()!r}" in str(report)


def test_a_number_that_is_gone_or_new_is_named() -> None:
    old = {"a": np.array([1.0, 2.0]), "b": np.array([3])}
    report = compare.compare(old, {"a": np.array([1.0]), "c": np.array([np.nan])})

    assert [one.path for one in report.missing] == ["b", "a[1]"]
    assert [one.path for one in report.new] == ["c"]
    assert report.compared == 1


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ([0.5], [0.5 + 1e-13], True),
        ([0.5], [0.5 + 1e-11], False),
        ([1e300], [1e300 * (1 + 1e-13)], True),
        ([1e-17, 1.0], [2e-17, 1.0], True),  # rounding of terms of size 1
        ([1e-17, 1e-3], [2e-16, 1e-3], False),
        ([1e-9, 1e300], [2e-9, 1e300], False),  # one huge number hides no other
        ([np.nan], [np.nan], True),
        ([np.nan], [0.0], False),
    ],
)
def test_numbers_may_differ_by_rounding_only(old: list[float], new: list[float], same: bool) -> None:
    assert compare.compare({"x": np.array(old)}, {"x": np.array(new)}).same is same


@pytest.mark.parametrize(
    ("path", "old", "new", "same"),
    [
        ("numbers.preset/x.chi2_token", 1e-9, 1e-9 + 2e-16, True),  # the mean of w², less 1
        ("numbers.preset/x.chi2_token", 1e-9, 1e-9 + 2e-13, False),
        ("numbers.dump.k3", 1e-9, 1e-9 + 2e-16, False),
        ("presets.x.as_logged.rollout_corr/rollout_is_std", 2e-6, 2.0001e-6, True),
        ("presets.x.as_logged.rollout_corr/rollout_is_std", 2e-3, 2.0001e-3, False),
    ],
)
def test_differences_of_larger_terms_may_differ_by_their_rounding(
    path: str, old: float, new: float, same: bool
) -> None:
    assert compare.compare({path: np.array([old])}, {path: np.array([new])}).same is same


def test_counts_are_equal_whatever_the_tolerance() -> None:
    assert not compare.compare({"n": np.array([1_000_000])}, {"n": np.array([1_000_001])}, rtol=0.1).same


def test_two_files_of_results_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value, seconds in (("a", 0.5, 1.0), ("b", 0.5, 2.0), ("c", 0.5 + 1e-9, 1.0)):
        metrics = {"k3": {"value": value, "interval": [0.4, 0.6]}}
        result = {"metrics": metrics, "run": {"seconds": seconds}}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")

    assert compare.main([a, b]) == 0
    assert compare.main([a, c]) == 1
    assert "metrics.k3.value: 0.5 → 0.500000001" in capsys.readouterr().out
