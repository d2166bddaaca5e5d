"""A threshold is a preset that differs in one bound; `--keep` keeps exactly what is asked."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pyarrow.parquet as pq
import pytest

from offpol_diag.cli import SAMPLE as DUMP
from offpol_diag.core.observe import analyze, opened
from offpol_diag.errors import UsageError
from offpol_diag.number import Number
from offpol_diag.presets import Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.result import SweptPoint
from offpol_diag.sweep import (
    METRICS,
    SweepOptions,
    check_share,
    informative,
    parse,
    pick,
    round_numbers,
    shortest,
    sweep,
    swept_bounds,
)
from tests import oracles
from tests.factory import DumpFile

CATALOGUE = load()
GEO = Preset("geo", "", reject=(Reject(over="mean", lower=0.999, upper=1.001),))
MEAN, TWO = GEO.reject[0], Weight(upper=2.0)
OWN = {
    "icepop": Preset("", "", weight=Weight(action="mask", lower=0.5, upper=2.0)),
    "dropped_overflow": Preset("", "", weight=Weight(upper=2.0, safety=None, overflow="zero")),
    "high_veto": Preset("", "", veto=Veto(lower=1e-3, upper=50.0), weight=TWO),
    "two_rules": Preset("", "", reject=(Reject("prob_diff", upper=0.1, lower=-0.2), MEAN)),
    "batch": Preset("", "", reject=(Reject("k2", "batch", upper=0.002),)),
    "normalised": Preset("", "", weight=Weight(upper=2.0, normalize=True)),
}


def window(one, upper):
    return replace(one, reject=(replace(one.reject[0], lower=1 / upper, upper=upper),))


CASES = {  # preset, bound, threshold → the preset that it is
    ("token_is", None, 1.5): lambda one: replace(one, weight=replace(one.weight, upper=1.5)),
    ("icepop", "weight.lower", 0.9): lambda one: replace(one, weight=replace(one.weight, lower=0.9)),
    ("icepop", None, 1.05): lambda one: replace(one, weight=replace(one.weight, lower=1 / 1.05, upper=1.05)),
    ("seq_mis", None, 1.5): lambda one: window(one, 1.5),
    ("geo_rs", None, 1.01): lambda one: window(one, 1.01),
    ("geo_rs", "reject.upper", 1.01): lambda one: replace(one, reject=(replace(one.reject[0], upper=1.01),)),
    ("geo_rs", "veto.lower", 0.9): lambda one: replace(one, veto=replace(one.veto, lower=0.9)),
    ("high_veto", "veto.upper", 1.1): lambda one: replace(one, veto=Veto(lower=1e-3, upper=1.1)),
    ("two_rules", "reject[1]", 1.01): lambda one: replace(
        one, reject=(one.reject[0], replace(MEAN, lower=1 / 1.01, upper=1.01))
    ),
    ("batch", None, 1e-4): lambda one: replace(one, reject=(replace(one.reject[0], upper=1e-4),)),
    ("normalised", None, 1.5): lambda one: replace(one, weight=Weight(upper=1.5)),
}


def preset(name):
    return replace(OWN.get(name) or CATALOGUE[name], name=name)


def swept(one, values=None, path=None, which=None, threads=1, **more):
    options = {key: more.pop(key) for key in ("keep", "trainer", "chosen") if key in more}
    read = {key: more.pop(key) for key in ("batch_tokens", "columns") if key in more}
    asked = SweepOptions(one, pick(one, which), values, **options)
    return sweep(opened(path or DUMP, **read), asked, threads=threads, **more).sweep


def same(one, other):
    """Return whether numbers, intervals of two, or None are equal."""
    return one is other is None or one == pytest.approx(other, rel=1e-9, abs=1e-12)


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


@pytest.fixture(scope="module")
def alone(dump):
    """Analyse with the preset of each case, written out."""
    every = [replace(make(preset(name)), name=f"{name}-{at}") for (name, _, at), make in CASES.items()]
    return [analyze([dump], presets=[one], threads=1).preset(one.name) for one in every]


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case[:2])) for case in CASES])
def test_a_threshold_is_the_preset_that_differs_in_this_bound(case, dump, alone):
    name, which, value = [*CASES][case]
    far = {"batch": 0.5}.get(name, 1e-5 if which and "lower" in which else 1e3)
    found = swept(preset(name), tuple(sorted((value, far))), dump, which).points
    (point,) = (one for one in found if one.threshold == value)
    (other,) = (one for one in found if one.threshold == far)

    truth = alone[case]
    assert {*point.numbers} == {*METRICS}
    for metric in point.numbers.keys() - {"kept_at_lag_0"}:
        assert same(point.numbers[metric].value, truth[metric].value), metric
        assert same(point.numbers[metric].interval, truth[metric].interval), metric
    assert point.numbers["ess_tokens"] != other.numbers["ess_tokens"]


def test_the_result_has_the_preset_as_it_stands_and_no_threshold_beside_it(dump):
    one = CATALOGUE["geo_rs"]
    found = sweep(opened(dump), SweepOptions(one, pick(one, None), (1.001, 1.01)), threads=1)
    alone = analyze([dump], presets=[one], threads=1)

    assert [*found.presets] == ["geo_rs"]
    whole, kept = found.preset("geo_rs"), found.sweep.points[0].numbers
    lengths = [f"preset/geo_rs@length/{place.key}" for place in alone.at("length")]
    assert [one for one in found.numbers if one.startswith("preset/")] == ["preset/geo_rs", *lengths]
    assert whole | {"kept_at_lag_0": None} == alone.preset("geo_rs") | {"kept_at_lag_0": None}
    assert kept == {name: whole[name] for name in METRICS}
    assert (found.run.command, found.whole) == ("sweep", alone.whole)


def test_what_is_kept_of_lag_0_is_counted_and_unknown_where_nothing_is_of_that_lag(tmp_path):
    table = pq.read_table(DUMP)
    (point,) = swept(preset("geo_rs"), (1.0005,)).points
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

    at = table.column_names.index("policy_lag")
    late, without = tmp_path / "late.parquet", tmp_path / "without.parquet"
    pq.write_table(table.set_column(at, "policy_lag", [[3] * len(table)]), late)
    pq.write_table(table.drop_columns(["policy_lag", "step"]), without)
    for path in (late, without):
        (point,) = swept(preset("geo_rs"), (1.0005,), path).points
        assert {*METRICS} - {*point.numbers} == {"kept_at_lag_0"}


def test_a_share_of_all_or_nothing_has_a_width(dump):
    found = swept(preset("geo_rs"), (1.000001, 1.001, 1.01, 100.0), dump).points
    none, *some, every = (one.numbers["tokens_weighted"] for one in found)
    assert (none.value, every.value) == (0, 1)
    assert none.interval[0] == 0 < none.interval[1] < 0.2
    assert 0.8 < every.interval[0] < 1 == every.interval[1]
    assert all(0 < one.interval[0] < one.interval[1] < 1 for one in some)


def test_what_each_threshold_drops_by_length_is_that_of_analyze(dump):
    found, other = swept(preset("geo_rs"), (1.001, 1.01), dump).points
    alone = analyze([dump], presets=[preset("geo_rs")], threads=1)
    places = alone.at("length", "preset/geo_rs")
    assert found.dropped == {place.key: place.numbers["sequences_dropped"] for place in places}
    assert {*found.dropped} == {*other.dropped}
    assert all(other.dropped[key].value <= one.value for key, one in found.dropped.items())


def test_what_no_rule_of_the_preset_can_drop_is_exact(dump):
    (point,) = swept(preset("token_is"), (2.0,), dump).points
    assert point.numbers["tokens_weighted"].interval == (1.0, 1.0)
    assert point.dropped == {}


def test_batches_and_threads_change_nothing(dump):
    first = swept(preset("seq_mis"), (1.1, 2.0), dump, keep=0.6)
    for threads, tokens in ((2, 1500), (1, 3_000)):
        found = swept(preset("seq_mis"), (1.1, 2.0), dump, keep=0.6, threads=threads, batch_tokens=tokens)
        one, other = ((x.window.point.bounds, x.window.kept, x.window.ties) for x in (found, first))
        assert one == other
        for mine, theirs in zip(found.points, first.points, strict=True):
            assert all(same(mine.numbers[name].value, theirs.numbers[name].value) for name in mine.numbers)


# ---------------------------------------------------------------- what is swept


def test_the_bound_that_a_preset_is_about_is_swept_unless_another_is_named():
    picked = {
        "geo_rs": "reject[0]",
        "token_is": "weight.upper",
        "token_is_rs_veto": "reject[0].upper",
    }
    assert {name: str(pick(preset(name), None)) for name in picked} == picked
    every = ["reject[0]", "reject[0].upper", "reject[0].lower", "veto.lower"]
    assert [str(one) for one in swept_bounds(preset("geo_rs"))] == every
    assert pick(preset("two_rules"), "reject.upper").index == 0


@pytest.mark.parametrize(
    ("one", "which", "said"),
    [
        *((preset(name), None, "nothing to sweep") for name in ("recompute", "vanilla_is")),
        (preset("geo_rs"), "rejct.upper", "no bound .*did you mean reject"),
    ],
)
def test_what_cannot_be_swept_is_refused(one, which, said):
    with pytest.raises(UsageError) as caught:
        pick(one, which)
    assert re.search(said, f"{caught.value.message} {caught.value.hint}")


@pytest.mark.parametrize(
    ("name", "which", "text", "said"),
    [
        *(("geo_rs", None, text, "must rise") for text in ("1.1,1.01", "1.1,1.1")),
        *(("geo_rs", None, text, "no threshold") for text in ("nan", "1.1,inf")),
        *(("geo_rs", None, text, "is no number") for text in ("tight", "")),
        *(("geo_rs", None, text, "must be above 1") for text in ("0.5,2", "1.0,2")),
        ("geo_rs", None, ",".join(str(1 + k / 1000) for k in range(1, 400)), "200 are the most"),
        ("geo_rs", "reject.upper", "0.9", "--at"),  # below the lower bound, which does not move
        ("geo_rs", "veto.lower", "0", "--at"),
        ("decoupled_k3_rs", None, "-1", "--at"),
        ("token_is", None, "-0.5", "--at"),
    ],
)
def test_thresholds_that_a_preset_could_not_have_are_refused(name, which, text, said):
    with pytest.raises(UsageError, match=said):
        parse(text, preset(name), pick(preset(name), which))


def test_every_preset_with_a_bound_has_round_thresholds_and_its_own_and_shows_those_that_do_something():
    for one in CATALOGUE.values():
        for bound in swept_bounds(one):
            found = round_numbers(one, bound)
            assert all(a < b for a, b in pairwise(found)), (one.name, str(bound))
            assert bound.threshold(one) in found
            assert len(found) > 5, (one.name, str(bound))
    rejected = [1.0] * 10 + [1 - k / 9 for k in range(10)] + [0.0] * 20
    others = dict.fromkeys(("truncated_high", "truncated_low", "sequences_dropped"), Number(value=0.0))
    points = [
        SweptPoint(
            threshold=at, bounds={}, own=at == 2, numbers=others | {"tokens_rejected": Number(value=x)}
        )
        for at, x in enumerate(rejected)
    ]
    shown = informative(points, pick(GEO, None), GEO)
    assert [one.threshold for one in shown] == [2, *range(10, 20)]  # the preset's own, wherever it is


def test_a_looser_bound_keeps_more(dump):
    for one in (preset("geo_rs"), preset("areal_decoupled")):
        for bound in (bound for bound in swept_bounds(one) if bound.part != "weight"):
            found = swept(one, None, dump, str(bound)).points
            kept = [point.numbers["tokens_weighted"].value for point in found]
            assert kept == sorted(kept, reverse=bound.side == "lower"), (one.name, str(bound))


def test_a_weight_that_float32_cannot_hold_stays_dropped_at_every_threshold(tmp_path):
    found = swept(preset("dropped_overflow"), (1.01, 2.0), write(tmp_path / "d.parquet", [[0.0, 100.0]]))
    names = ("tokens_weighted", "truncated_high")
    assert {point.numbers[name].value for point in found.points for name in names} == {0.5}


@pytest.mark.parametrize(
    ("name", "which", "bounds", "said"),
    [
        ("seq_mis", None, {"lower": 0.4, "upper": 2.5}, "seq_mis@2..0.4..2.5"),
        ("seq_mis", "weight.upper", {"upper": 3.0}, "seq_mis@3..0.5..2"),
        ("token_is", None, {"upper": 1.5}, "token_is@1.5"),
        ("token_is@3", None, {"upper": 1.5}, "token_is@1.5"),
        ("seq_mis@veto.lower=0.1", None, {"upper": 2.5}, "seq_mis@veto.lower=0.1:reject[0].upper=2.5"),
    ],
)
def test_thresholds_are_named_by_position_where_the_preset_has_them(name, which, bounds, said):
    one = CATALOGUE[name]
    bound = pick(one, which)

    assert bound.named(one, bounds) == said
    (again,) = CATALOGUE.resolve(said)
    assert [getattr(bound.rule(again), side) for side in bounds] == [*bounds.values()]


# ---------------------------------------------------------------- the window that keeps a share

SUM = Preset("sum", "", reject=(Reject(over="sum", lower=0.5, upper=2.0),))
K3 = Preset("k3", "", reject=(Reject("k3", "mean", upper=0.01),))
BAND = Preset("band", "", reject=(Reject(lower=0.8, upper=5.0),))
VETO = Preset("veto", "", veto=Veto(lower=1e-4))
STATISTIC = {  # of the log-ratios of one sequence
    "geo": lambda d: [math.fsum(d) / len(d)],
    "sum": lambda d: [math.fsum(d)],
    "k3": lambda d: [math.fsum(math.expm1(x) - x for x in d) / len(d)],
    "band": lambda d: d,
    "veto": lambda d: [min(d)],
}


def solved(one, keep, path=None, which=None, **more):
    return swept(one, (1.5, 2.0), path, which, keep=keep, chosen=which is not None, **more)


@cache
def rows():
    return [row for row in oracles.sequences(pq.read_table(DUMP).to_pylist()) if row.n]


@cache
def statistics(name):
    """Compute the statistic of every unit of the sample, in a loop; ratios as logarithms."""
    return [x for row in rows() for x in STATISTIC[name](row.delta("old"))]


def ends(one, bounds):
    """Return the bounds of the window, on the statistic's scale: logarithms of ratios."""
    place = "veto" if one.veto else "reject[0]"
    low, high = (bounds.get(f"{place}.{side}", end) for side, end in (("lower", 0.0), ("upper", math.inf)))
    return (low or -math.inf, high) if one is K3 else (math.log(low) if low else -math.inf, math.log(high))


@pytest.mark.parametrize(
    ("one", "keep"),
    [
        *((GEO, keep) for keep in (0.05, 0.999, 1.0)),
        *((BAND, keep) for keep in (0.05, 0.999)),
        *((one, 0.5) for one in (SUM, K3, VETO)),
    ],
    ids=lambda given: str(getattr(given, "name", given)),
)
def test_the_bounds_keep_exactly_the_share_promised(one, keep):
    window, values = solved(one, keep).window, statistics(one.name)
    low, high = ends(one, window.point.bounds)
    assert window.of == len(values)
    assert window.kept - window.ties == math.ceil(keep * len(values) - 1e-9)
    assert sum(low <= x <= high for x in values) == window.kept
    lost = window.point.numbers["tokens_rejected" if one is BAND else "sequences_dropped"].value
    assert math.isclose(1 - lost, window.kept / len(values), rel_tol=1e-12)


def test_both_sides_lose_the_same_around_the_data_and_one_side_asked_for_is_solved_alone():
    window, values = solved(GEO, 0.9).window, statistics("geo")
    low, high = ends(GEO, window.point.bounds)

    assert abs(sum(x < low for x in values) - sum(x > high for x in values)) <= 1
    assert low < oracles.mean(values) < high
    one = solved(GEO, 0.9, which="reject.upper").window
    assert list(one.point.bounds) == ["reject[0].upper"]
    _, high = ends(GEO, one.point.bounds)
    assert sum(x <= high for x in values) == one.kept == math.ceil(0.9 * 512)


def test_ties_are_kept_and_said(tmp_path):
    """Three values only: no bound keeps half of a hundred equal ones."""
    path = write(tmp_path / "ties.parquet", [[0.0]] * 100 + [[0.25]] * 20 + [[-0.25]] * 20)
    found = solved(GEO, 0.5, path)

    assert (found.window.kept, found.window.of, found.window.ties) == (100, 140, 30)
    assert any("30 sequences more than asked" in remark for remark in found.remarks)
    low, high = ends(GEO, found.window.point.bounds)
    assert -0.25 < low < 0 < high < 0.25
    equal = solved(GEO, 0.95, write(tmp_path / "equal.parquet", [[0.0, 0.0]] * 40)).window
    assert (equal.kept, equal.of, equal.point.numbers["sequences_dropped"].value) == (40, 40, 0)


@pytest.mark.parametrize(
    ("keep", "rule", "said"),
    [
        *((keep, MEAN, "above 0 and at most 1") for keep in (0.0, -0.1, 1.5, math.nan, math.inf)),
        (0.9, Reject(upper=1.01, advantage="against"), "--keep"),
        (0.9, Reject("k2", "batch", upper=0.1), "--keep"),
    ],
)
def test_no_share_and_what_one_bound_alone_does_not_decide_is_refused(keep, rule, said):
    one = Preset("one", "", reject=(rule,))
    with pytest.raises(UsageError, match=said):
        check_share(keep, one, pick(one, None))


def test_a_bound_is_the_shortest_number_that_does_it_and_one_beyond_all_floats_is_refused(tmp_path):
    assert shortest(math.log(1.0091), math.log(1.0118), True, 0.01) == 1.01
    assert shortest(0.0091, 0.0118, False, 0.0) == 0.01
    at = math.log(1.5)
    assert shortest(at, math.nextafter(at, 2), True, at) == math.exp(at)
    path = write(tmp_path / "huge.parquet", [[-800.0], [0.1], [0.2]])
    assert solved(GEO, 0.3, path).window.kept == 1
    with pytest.raises(UsageError, match="800 nats"):
        solved(GEO, 1.0, path)


def test_a_window_is_printed_in_a_trainers_syntax_and_may_be_asked_of_a_preset_with_other_rules(dump):
    """The share is that of the window alone; what the preset then keeps stands beside it."""
    window = solved(CATALOGUE["geo_rs"], 0.95, dump, trainer="verl").window
    assert f"rollout_rs_threshold: {window.point.bounds['reject[0].upper']}" in window.config
    assert f"rollout_rs_threshold_lower: {window.point.bounds['reject[0].lower']}" in window.config
    window = solved(replace(GEO, veto=Veto(lower=0.5)), 0.9).window
    assert window.kept == math.ceil(0.9 * 512)
    assert window.point.numbers["sequences_dropped"].value > 0.1
