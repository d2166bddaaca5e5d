"""A threshold is a preset that differs in one bound; `--keep` keeps exactly what is asked."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import SAMPLE as DUMP
from offpol_diag.cli import app
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.report.sweep import shown, telling
from offpol_diag.result import loads
from offpol_diag.sweep import METRICS, bounds_of, pick, round_numbers, shortest, sweep
from tests import oracles
from tests.factory import DumpFile
from tests.reading import analyze, opened

CATALOGUE = load()
MEAN = Reject(over="mean", lower=0.999, upper=1.001)
OWN = {
    "geo": Preset("", "", reject=(MEAN,)),
    "sum": Preset("", "", reject=(Reject(over="sum", lower=0.5, upper=2.0),)),
    "k3": Preset("", "", reject=(Reject("k3", "mean", upper=0.01),)),
    "band": Preset("", "", reject=(Reject(lower=0.8, upper=5.0),)),
    "icepop": Preset("", "", weight=Weight(action="mask", lower=0.5, upper=2.0)),
    "dropped_overflow": Preset("", "", weight=Weight(upper=2.0, safety=None, overflow="zero")),
    "two_rules": Preset("", "", reject=(Reject("prob_diff", upper=0.1, lower=-0.2), MEAN)),
    "batch": Preset("", "", reject=(Reject("k2", "batch", upper=0.002),)),
    "against": Preset("", "", reject=(Reject(upper=1.01, advantage="against"),)),
    "normalised": Preset("", "", weight=Weight(upper=2.0, normalize=True)),
}
AT = (1.5, 2.0)


def window(one, upper):
    return replace(one, reject=(replace(one.reject[0], lower=1 / upper, upper=upper),))


CASES = {  # preset, bound, threshold → the preset that it is
    ("token_is", None, 1.5): lambda one: replace(one, weight=replace(one.weight, upper=1.5)),
    ("icepop", "weight.lower", 0.9): lambda one: replace(one, weight=replace(one.weight, lower=0.9)),
    ("icepop", None, 1.05): lambda one: replace(one, weight=replace(one.weight, lower=1 / 1.05, upper=1.05)),
    ("seq_mis", None, 1.5): lambda one: window(one, 1.5),
    ("geo_rs", "reject[0].upper", 1.01): lambda one: replace(
        one, reject=(replace(one.reject[0], upper=1.01),)
    ),
    ("two_rules", "reject[1]", 1.01): lambda one: replace(
        one, reject=(one.reject[0], replace(MEAN, lower=1 / 1.01, upper=1.01))
    ),
    ("batch", None, 1e-4): lambda one: replace(one, reject=(replace(one.reject[0], upper=1e-4),)),
    ("normalised", None, 1.5): lambda one: replace(one, weight=Weight(upper=1.5)),
}


def preset(name):
    return replace(OWN.get(name) or CATALOGUE[name], name=name)


def result(name, values=AT, path=None, which=None, keep=None, **how):
    read = {key: how.pop(key) for key in ("batch_tokens",) if key in how}
    at = None if values is None else ",".join(map(repr, values))
    return sweep(opened(path or DUMP, **read), preset(name), which, at, keep, **({"threads": 1} | how))


def swept(*given, **how):
    return result(*given, **how).sweep


def write(path, deltas):
    rollout, old = ([[-101.0 + side * x for x in row] for row in deltas] for side in (0, 1))
    with DumpFile(path) as dump:
        dump.write(rollout_log_probs=rollout, old_log_probs=old, group_id=list(range(len(deltas))))
    return str(path)


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write a part of the sample, in row groups."""
    path = tmp_path_factory.mktemp("sweep") / "part.parquet"
    pq.write_table(pq.read_table(DUMP).slice(0, 48), path, row_group_size=16)
    return str(path)


# ---------------------------------------------------------------- thresholds


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:2])))
def test_a_threshold_is_the_preset_that_differs_in_this_bound(case, dump):
    name, which, value = case
    alone = replace(CASES[case](preset(name)), name="alone")
    truth = analyze([dump], presets=[alone], threads=1).preset("alone")
    far = {"batch": 0.5}.get(name, 1e-5 if which and "lower" in which else 1e3)
    points = {
        one.threshold: one.numbers for one in swept(name, tuple(sorted((value, far))), dump, which).points
    }

    assert {*points[value]} == {*METRICS}
    for metric in {*METRICS} - {"kept_at_lag_0"}:
        one, other = points[value][metric], truth[metric]
        assert one.value == other.value or one.value == pytest.approx(other.value, rel=1e-9), metric
        assert one.interval == other.interval or one.interval == pytest.approx(other.interval, rel=1e-9), (
            metric
        )
    assert points[value]["ess_tokens"] != points[far]["ess_tokens"]


def test_the_result_has_the_preset_as_it_stands_and_no_threshold_beside_it(dump):
    found, alone = (
        result("geo_rs", (1.001, 1.01), dump),
        analyze([dump], presets=[preset("geo_rs")], threads=1),
    )

    assert [*found.presets] == ["geo_rs"]
    whole, own = found.preset("geo_rs"), found.sweep.points[0]
    lengths = [f"preset/geo_rs@length/{place.key}" for place in alone.at("length")]
    assert [one for one in found.subjects if one.startswith("preset/")] == ["preset/geo_rs", *lengths]
    assert whole | {"kept_at_lag_0": None} == alone.preset("geo_rs") | {"kept_at_lag_0": None}
    assert (own.own, own.numbers) == (True, {name: whole[name] for name in METRICS})
    assert found.whole == alone.whole


def test_what_is_kept_of_lag_0_is_counted_and_unknown_where_no_lag_is_recorded(tmp_path):
    table = pq.read_table(DUMP)
    (point,) = swept("geo_rs", (1.0005,)).points
    rows = table.to_pylist()
    lags = (row["policy_lag"] for row in rows)
    fresh = [one for one, lag in zip(oracles.sequences(rows), lags, strict=True) if one.n and lag == 0]
    kept = [one for one in fresh if abs(math.fsum(one.delta("old")) / one.n) <= math.log(1.0005)]
    kept = [one for one in kept if min(one.delta("old")) > math.log(1e-4)]
    assert 0 < len(kept) < len(fresh)
    share = sum(one.n for one in kept) / sum(one.n for one in fresh)
    assert math.isclose(point.numbers["kept_at_lag_0"].value, share, rel_tol=1e-12)
    low, high = point.numbers["kept_at_lag_0"].interval
    assert 0 <= low < share < high <= 1

    pq.write_table(table.drop_columns(["policy_lag", "step"]), tmp_path / "without.parquet")
    (point,) = swept("geo_rs", (1.0005,), tmp_path / "without.parquet").points
    assert {*METRICS} - {*point.numbers} == {"kept_at_lag_0"}


def test_a_looser_bound_keeps_more_and_all_or_nothing_has_a_width(dump):
    for name in ("geo_rs", "areal_decoupled", "k3"):
        for bound in bounds_of(preset(name)).values():
            found = swept(name, None, dump, str(bound)).points
            kept = [point.numbers["tokens_weighted"].value for point in found]
            rejects = bound.place != "weight"
            assert kept == sorted(kept, reverse=bound.side == "lower" and rejects), (name, str(bound))
    none, every = (one.numbers["tokens_weighted"] for one in swept("geo_rs", (1.000001, 100.0), dump).points)
    assert none.value == none.interval[0] == 0 < none.interval[1] < 0.2
    assert 0.8 < every.interval[0] < 1 == every.interval[1] == every.value


def test_a_weight_that_float32_cannot_hold_stays_dropped_at_every_threshold(tmp_path):
    found = swept("dropped_overflow", (1.01, 2.0), write(tmp_path / "d.parquet", [[0.0, 100.0]]))
    names = ("tokens_weighted", "truncated_high")
    assert {point.numbers[name].value for point in found.points for name in names} == {0.5}


def test_every_bound_has_rising_round_thresholds_and_its_own_and_those_that_do_something_are_shown(dump):
    for one in CATALOGUE.values():
        for bound in bounds_of(one).values():
            found = round_numbers(bound)
            assert all(a < b for a, b in pairwise(found)), (one.name, str(bound))
            assert bound.own in found
            assert len(found) > 5, (one.name, str(bound))
    found = swept("geo_rs", None, dump)
    few = shown(found.points, "tokens_weighted")
    assert len(few) <= 14 < len(found.points)
    assert [one for one in few if one.own]
    kept = [one.numbers["tokens_weighted"].value for one in few if not one.own]
    assert all(two - one >= 1 / 14 for one, two in pairwise(kept))


# ---------------------------------------------------------------- what is asked


def test_the_bound_that_a_preset_is_about_is_swept_unless_another_is_named():
    every = {"geo_rs": "reject[0]", "token_is": "weight.upper", "token_is_rs_veto": "reject[0].upper"}
    assert {name: str(pick(preset(name), None)) for name in every} == every
    assert [*bounds_of(preset("geo_rs"))] == ["reject[0]", "reject[0].upper", "reject[0].lower"]


@pytest.mark.parametrize(
    ("name", "which", "at", "keep", "said"),
    [
        ("recompute", None, None, None, "recompute has no bound that can be swept; name a preset"),
        ("vanilla_is", None, None, None, "has no bound that can be swept"),
        ("geo_rs", "rejct[0].upper", None, None, r"no bound .*did you mean reject\[0\]\.upper"),
        *(
            ("geo_rs", None, at, None, "numbers that rise")
            for at in ("1.1,1.01", "1.1,1.1", "nan", "1.1,inf")
        ),
        *(("geo_rs", None, at, None, "numbers that rise") for at in ("tight", "")),
        *(("geo_rs", None, at, None, "must be above 1") for at in ("0.5,2", "1.0,2")),
        ("geo_rs", "reject[0].upper", "0.9", None, "--at 0.9"),  # below the lower bound, which does not move
        ("decoupled_k3_rs", None, "-1", None, "--at -1"),
        *(("geo", None, None, keep, "above 0 and at most 1") for keep in (0.0, -0.1, 1.5, math.nan)),
        *((name, None, None, 0.9, "not decided by each token alone") for name in ("against", "batch")),
    ],
)
def test_what_cannot_be_swept_or_kept_is_refused(name, which, at, keep, said, dump):
    with pytest.raises(UsageError) as caught:
        sweep(opened(dump), preset(name), which, at, keep)
    assert re.search(said, f"{caught.value.message}; {caught.value.hint}")


# ---------------------------------------------------------------- the bounds that keep a share

STATISTIC = {  # of the log-ratios of one sequence
    "geo": lambda d: [math.fsum(d) / len(d)],
    "sum": lambda d: [math.fsum(d)],
    "k3": lambda d: [math.fsum(math.expm1(x) - x for x in d) / len(d)],
    "band": lambda d: d,
}


@cache
def statistics(name):
    """Compute the statistic of every unit of the sample, in a loop; ratios as logarithms."""
    rows = oracles.sequences(pq.read_table(DUMP).to_pylist())
    return [x for row in rows if row.n for x in STATISTIC[name](row.delta("old"))]


def ends(name, bounds):
    """Return the bounds on the statistic's scale: logarithms of ratios."""
    low, high = bounds.get("reject[0].lower"), bounds.get("reject[0].upper", math.inf)
    return (-math.inf, high) if name == "k3" else (math.log(low) if low else -math.inf, math.log(high))


@pytest.mark.parametrize(
    ("name", "keep"),
    [("geo", 0.05), ("geo", 0.999), ("geo", 1.0), ("band", 0.999), ("sum", 0.5), ("k3", 0.5)],
)
def test_the_bounds_keep_exactly_the_share_promised_and_lose_as_many_below_as_above(name, keep):
    window, values = swept(name, keep=keep).window, statistics(name)
    low, high = ends(name, window.point.bounds)
    assert window.of == len(values)
    assert sum(low <= x <= high for x in values) == window.kept == math.ceil(keep * len(values) - 1e-9)
    assert name == "k3" or abs(sum(x < low for x in values) - sum(x > high for x in values)) <= 1
    lost = window.point.numbers["tokens_rejected" if name == "band" else "sequences_dropped"].value
    assert math.isclose(1 - lost, window.kept / len(values), rel_tol=1e-12)


def test_one_side_asked_for_is_solved_alone_and_the_bounds_have_a_name_that_says_them(dump):
    window = swept("geo_rs", keep=0.9, which="reject[0].upper").window
    assert list(window.point.bounds) == ["reject[0].upper"]
    assert (
        sum(x <= math.log(window.point.bounds["reject[0].upper"]) for x in statistics("geo")) == window.kept
    )
    (again,) = CATALOGUE.resolve(swept("seq_mis", keep=0.6, path=dump).window.preset)
    solved = swept("seq_mis", keep=0.6, path=dump).window.point.bounds
    assert solved == {"reject[0].lower": again.reject[0].lower, "reject[0].upper": again.reject[0].upper}


def test_the_share_is_that_of_the_bound_alone_and_what_the_preset_then_keeps_stands_beside_it():
    veto = replace(preset("geo"), veto=Veto(lower=0.5))
    window = sweep(opened(DUMP), veto, at="1.5,2", keep=0.9, threads=1).sweep.window
    assert window.kept == math.ceil(0.9 * 512)
    assert window.point.numbers["sequences_dropped"].value > 0.1


def test_equal_values_are_kept_together(tmp_path):
    """Three values only: no bound keeps half of a hundred equal ones."""
    path = write(tmp_path / "ties.parquet", [[0.0]] * 100 + [[0.25]] * 20 + [[-0.25]] * 20)
    window = swept("geo", path=path, keep=0.5).window
    low, high = ends("geo", window.point.bounds)
    assert (window.kept, window.of) == (100, 140)
    assert -0.25 < low < 0 < high < 0.25


def test_batches_and_threads_change_nothing(dump):
    first = swept("seq_mis", path=dump, keep=0.6)
    for threads, tokens in ((2, 1500), (1, 3_000)):
        found = swept("seq_mis", path=dump, keep=0.6, threads=threads, batch_tokens=tokens)
        assert (found.window.point.bounds, found.window.kept) == (
            first.window.point.bounds,
            first.window.kept,
        )
        for mine, theirs in zip(found.points, first.points, strict=True):
            values = [{name: x.value for name, x in one.numbers.items()} for one in (mine, theirs)]
            assert values[0] == pytest.approx(values[1], rel=1e-9, abs=1e-12)


def test_a_bound_is_the_shortest_number_that_does_it_and_one_beyond_all_floats_is_refused(tmp_path):
    assert shortest(math.log(1.0091), math.log(1.0118), True, 0.01) == 1.01
    assert shortest(0.0091, 0.0118, False, 0.0) == 0.01
    at = math.log(1.5)
    assert shortest(at, math.nextafter(at, 2), True, at) == math.exp(at)
    path = write(tmp_path / "huge.parquet", [[-800.0], [0.1], [0.2]])
    assert swept("geo", path=path, keep=0.3).window.kept == 1
    with pytest.raises(UsageError, match="800 nats"):
        swept("geo", path=path, keep=1.0)


# ---------------------------------------------------------------- what is printed


def run(*arguments, width=100):
    return CliRunner().invoke(app, ["sweep", *arguments], env={"COLUMNS": str(width), "NO_COLOR": "1"})


PAGE = Path(__file__).parents[1] / "docs" / "sweep.md"
SHOWN = re.findall(r"```text\n\$ offpol-diag sweep ([^\n]*)\n(.*?)\n```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("arguments", "shown"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_the_page_shows_what_the_command_prints(arguments, shown):
    ran = run(*arguments.split())
    assert ran.stdout.strip("\n") == shown
    assert ["--keep" in arguments for arguments, _ in SHOWN] == [False, True]


def test_solved_bounds_are_named_by_a_command_that_runs():
    ran = run("--preset", "geo_rs", "--keep", "0.95")
    line = ran.stdout.splitlines()[-1].removeprefix("preset  offpol-diag ")
    assert CliRunner().invoke(app, [*shlex.split(line), "--for", "verl"]).exit_code == 0


def test_the_result_is_its_json_and_a_section_of_the_page(tmp_path):
    page = tmp_path / "page.html"
    ran = run("--preset", "seq_mis", "--at", "1.5,2", "-v", "-o", str(page), "--json", "-")
    summary = loads(ran.stdout, "result")  # and nothing else
    assert 'id="table-sweep"' in page.read_text()
    assert (summary.run.command, summary.sweep.which) == ("sweep", "reject[0]")
    assert [point.threshold for point in summary.sweep.points] == [1.5, 2.0]


def test_a_dump_without_the_column_is_refused_and_a_preset_of_ones_own_is_swept(tmp_path):
    two = write(tmp_path / "two.parquet", [[0.1]])
    ran = run(two, "--preset", "pure_is")
    assert (ran.exit_code, ran.stdout, "no current_log_probs" in ran.stderr) == (2, "", True)
    own = tmp_path / "own.toml"
    own.write_text('[mine]\nreject = { statistic = "tv", over = "max", upper = 0.2 }\n')
    ran = run("--preset", "mine", "--preset-file", str(own), "--keep", "0.8")
    assert (ran.exit_code, "≤" in ran.stdout) == (0, True)


def test_a_column_says_what_none_before_it_says(dump):
    assert telling(swept("geo_rs", (1.001, 1.01), dump))[0] == "tokens_weighted"
    assert not {"ess_tokens", "weight_mean", "truncated_high"} & {
        *telling(swept("geo_rs", (1.001, 1.01), dump))
    }
    truncated = telling(swept("token_is", (1.1, 1.5), dump))
    assert truncated == ["truncated_high", "ess_tokens", "weight_mean"]
    assert {"tokens_weighted", "ess_tokens"} <= {*telling(swept("icepop", (1.1, 1.5), dump))}


@pytest.mark.parametrize("values", ["2", "2,5"])
def test_quiet_says_what_the_preset_keeps(values):
    (one,) = run(
        "sample_data/stale.parquet", "--preset", "token_is", "-q", "--at", values
    ).stdout.splitlines()
    assert re.fullmatch(r"token_is at 2 keeps an ESS of tokens of 99\.2% \[.+%\]", one)
