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
from offpol_diag.report import answered
from offpol_diag.sweep import METRICS, bounds_of, pick, round_thresholds, shortest, sweep
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
    "two_rules": Preset("", "", reject=(Reject("prob_diff", upper=0.1, lower=-0.2), MEAN)),
    "batch": Preset("", "", reject=(Reject("k2", "batch", upper=0.002),)),
    "normalised": Preset("", "", weight=Weight(upper=2.0, normalize=True)),
}
CASES = [  # preset, bound, threshold, rule that it has there; 0: the weight
    ("icepop", "weight.lower", 0.9, 0, {"lower": 0.9}),
    ("icepop", None, 1.05, 0, {"lower": 1 / 1.05, "upper": 1.05}),
    ("geo_rs", "reject[0].upper", 1.01, 1, {"upper": 1.01}),
    ("two_rules", "reject[1]", 1.01, 2, {"lower": 1 / 1.01, "upper": 1.01}),
    ("batch", None, 1e-4, 1, {"upper": 1e-4}),
    ("normalised", None, 1.5, 0, {"upper": 1.5, "normalize": False}),
]


def preset(name):
    return replace(OWN.get(name) or CATALOGUE[name], name=name)


def result(name, values=(1.5, 2.0), path=None, which=None, keep=None, batch_tokens=1 << 18, **how):
    at, dump = values and ",".join(map(repr, values)), opened(path or DUMP, batch_tokens=batch_tokens)
    return sweep(dump, preset(name), which, at, keep, **({"threads": 1} | how))


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


@pytest.mark.parametrize(("name", "which", "value", "rule", "ends"), CASES)
def test_a_threshold_is_the_preset_that_differs_in_this_bound(name, which, value, rule, ends, dump):
    one = preset(name)
    rules = [one.weight, *one.reject]
    rules[rule] = replace(rules[rule], **ends)
    alone = replace(one, name="alone", weight=rules[0], reject=tuple(rules[1:]))
    truth = analyze([dump], presets=[alone], threads=1).preset("alone")
    far = {"batch": 0.5}.get(name, 1e-5 if which and "lower" in which else 1e3)
    found = swept(name, tuple(sorted((value, far))), dump, which).points
    here, there = sorted((one for one in found), key=lambda one: one.threshold != value)

    assert {*here.numbers} == {*METRICS}
    for metric in {*METRICS} - {"kept_at_lag_0"}:
        parts, wanted = here.numbers[metric].parts()[:3], truth[metric].parts()[:3]
        assert parts == wanted or parts == pytest.approx(wanted, rel=1e-9), metric
    assert here.numbers["ess_tokens"] != there.numbers["ess_tokens"]


def test_the_result_has_the_preset_as_it_stands_and_no_threshold_beside_it(dump):
    found, alone = (
        result("geo_rs", (1.001, 1.01), dump),
        analyze([dump], presets=[preset("geo_rs")], threads=1),
    )
    whole, own = found.preset("geo_rs"), found.sweep.points[0]
    lengths = [f"preset/geo_rs@length/{place.key}" for place in alone.at("length")]
    assert [one for one in found.subjects if one.startswith("preset/")] == ["preset/geo_rs", *lengths]
    assert whole | {"kept_at_lag_0": None} == alone.preset("geo_rs") | {"kept_at_lag_0": None}
    assert (own.own, own.numbers) == (True, {name: whole[name] for name in METRICS})
    assert ([*found.presets], found.whole) == (["geo_rs"], alone.whole)


def test_what_is_kept_of_lag_0_is_counted():
    (point,) = swept("geo_rs", (1.0005,)).points
    rows = pq.read_table(DUMP).to_pylist()
    lags = (row["policy_lag"] for row in rows)
    fresh = [one for one, lag in zip(oracles.sequences(rows), lags, strict=True) if one.n and lag == 0]
    kept = [one for one in fresh if abs(math.fsum(one.delta("old")) / one.n) <= math.log(1.0005)]
    share = sum(one.n for one in kept if min(one.delta("old")) > math.log(1e-4)) / sum(one.n for one in fresh)
    number = point.numbers["kept_at_lag_0"]
    assert number.interval[0] < share < number.interval[1]
    assert number.value == pytest.approx(share, rel=1e-12)


def test_a_looser_bound_keeps_more_and_all_or_nothing_has_a_width(dump):
    for name in ("geo_rs", "areal_decoupled", "k3"):
        for bound in bounds_of(preset(name)).values():
            kept = [x.numbers["tokens_weighted"].value for x in swept(name, None, dump, str(bound)).points]
            down = bound.side == "lower" and bound.place != "weight"
            assert kept == sorted(kept, reverse=down), (name, str(bound))
    none, every = (one.numbers["tokens_weighted"] for one in swept("geo_rs", (1.000001, 100.0), dump).points)
    assert none.value == none.interval[0] == 0 < none.interval[1] < 0.2
    assert 0.8 < every.interval[0] < 1 == every.interval[1] == every.value


def test_every_bound_has_rising_round_thresholds_and_its_own(dump):
    for bound in (bound for one in CATALOGUE.values() for bound in bounds_of(one).values()):
        found = round_thresholds(bound)
        assert all(a < b for a, b in pairwise(found)), (bound.preset.name, str(bound))
        assert (bound.own in found, len(found) > 5) == (True, True), (bound.preset.name, str(bound))
    about = {"geo_rs": "reject[0]", "token_is": "weight.upper", "token_is_rs_veto": "reject[0].upper"}
    assert {name: str(pick(preset(name), None)) for name in about} == about


def test_of_many_thresholds_those_that_do_something_are_shown(dump):
    found = result("geo_rs", None, dump)
    rows = answered(found).tables[0].rows
    assert len(rows) <= 14 < len(found.sweep.points)
    assert sum(row[0].endswith("←") for row in rows) == 1
    kept = [row[1].value for row in rows if not row[0].endswith("←")]
    assert all(two - one >= 1 / 14 for one, two in pairwise(kept))


@pytest.mark.parametrize(
    ("name", "which", "at", "keep", "said"),
    [
        ("recompute", None, None, None, "recompute has no bound that can be swept; name a preset"),
        ("pure_is", None, None, None, "no current_log_probs, which pure_is cannot do without"),
        ("geo_rs", "rejct[0].upper", None, None, r"no bound .*did you mean reject\[0\]\.upper"),
        *(("geo_rs", None, at, None, "numbers that rise") for at in ("1.1,1.1", "1.1,inf", "")),
        ("geo_rs", None, "1.0,2", None, "must be above 1"),
        ("geo_rs", "reject[0].upper", "0.9", None, "--at 0.9"),  # below the lower bound, which does not move
        *(("geo", None, None, keep, "above 0 and at most 1") for keep in (0.0, 1.5, math.nan)),
        ("batch", None, None, 0.9, "not decided by each token alone"),
    ],
)
def test_what_cannot_be_swept_or_kept_is_refused(name, which, at, keep, said, tmp_path):
    two = opened(write(tmp_path / "two.parquet", [[0.1]]))
    with pytest.raises(UsageError) as caught:
        sweep(two, preset(name), which, at, keep)
    assert re.search(said, f"{caught.value.message}; {caught.value.hint}")


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


def ends(name, window):
    """Return the bounds on the statistic's scale: logarithms of ratios."""
    low, high = (window.point.bounds.get(f"reject[0].{side}") for side in ("lower", "upper"))
    return (-math.inf, high) if name == "k3" else (math.log(low) if low else -math.inf, math.log(high))


@pytest.mark.parametrize(
    ("name", "keep"),
    [("geo", 0.05), ("geo", 0.999), ("geo", 1.0), ("band", 0.999), ("sum", 0.5), ("k3", 0.5)],
)
def test_the_bounds_keep_exactly_the_share_promised_and_lose_as_many_below_as_above(name, keep):
    window, values = swept(name, keep=keep, batch_tokens=3000, threads=2).window, statistics(name)
    low, high = ends(name, window)
    assert window.of == len(values)
    assert sum(low <= x <= high for x in values) == window.kept == math.ceil(keep * len(values) - 1e-9)
    assert name == "k3" or abs(sum(x < low for x in values) - sum(x > high for x in values)) <= 1
    lost = window.point.numbers["tokens_rejected" if name == "band" else "sequences_dropped"].value
    assert math.isclose(1 - lost, window.kept / len(values), rel_tol=1e-12)


def test_one_side_asked_for_is_solved_alone_and_the_bounds_have_a_name_that_says_them(dump):
    window = swept("geo_rs", keep=0.9, which="reject[0].upper").window
    assert list(window.point.bounds) == ["reject[0].upper"]
    assert sum(x <= ends("geo", window)[1] for x in statistics("geo")) == window.kept
    window = swept("seq_mis", keep=0.6, path=dump).window
    (again,) = CATALOGUE.resolve(window.preset)
    rule = again.reject[0]
    assert window.point.bounds == {"reject[0].lower": rule.lower, "reject[0].upper": rule.upper}


def test_the_share_is_that_of_the_bound_alone_and_equal_values_are_kept_together(tmp_path):
    """A veto drops more; of three values only no bound keeps half of a hundred equal ones."""
    veto = replace(preset("geo"), veto=Veto(lower=0.5))
    window = sweep(opened(DUMP), veto, at="1.5,2", keep=0.9, threads=1).sweep.window
    assert window.kept == math.ceil(0.9 * 512)
    assert window.point.numbers["sequences_dropped"].value > 0.1
    path = write(tmp_path / "ties.parquet", [[0.0]] * 100 + [[0.25]] * 20 + [[-0.25]] * 20)
    window = swept("geo", path=path, keep=0.5).window
    assert (window.kept, window.of) == (100, 140)


def test_a_bound_is_the_shortest_number_that_does_it_and_one_beyond_all_floats_is_refused(tmp_path):
    assert shortest(math.log(1.0091), math.log(1.0118), True) == 1.01
    assert shortest(0.0118, 0.0091, False) == 0.01
    at = math.log(1.5)
    assert shortest(at, math.nextafter(at, 2), True) == math.exp(at)
    path = write(tmp_path / "huge.parquet", [[-800.0], [0.1], [0.2]])
    assert swept("geo", path=path, keep=0.3).window.kept == 1
    with pytest.raises(UsageError, match="800 nats"):
        swept("geo", path=path, keep=1.0)


PAGE = Path(__file__).parents[1] / "docs" / "sweep.md"
SHOWN = re.findall(r"```text\n\$ offpol-diag sweep ([^\n]*)\n(.*?)\n```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("arguments", "shown"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_the_page_shows_what_is_printed_and_a_preset_of_solved_bounds_that_runs(arguments, shown):
    ran = CliRunner().invoke(app, ["sweep", *arguments.split()], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert ran.stdout.strip("\n") == shown
    command = re.search(r"^preset  offpol-diag (.*)$", shown, re.MULTILINE)
    assert bool(command) is ("--keep" in arguments)
    if command:
        assert CliRunner().invoke(app, [*shlex.split(command[1]), "--for", "verl"]).exit_code == 0
