"""A preset at many thresholds equals the preset applied at each; `--keep` keeps exactly what is asked."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.cli.settings import sample
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.sweep import SweepOptions, pick, sweep, swept_bounds
from offpol_diag.sweep.lengths import Model, Scale, spreads
from offpol_diag.sweep.thresholds import informative, parse, round_numbers
from offpol_diag.sweep.window import check, shortest
from tests import oracles

CATALOGUE = load()
GEO = Preset("geo", "", reject=(Reject(over="mean", lower=0.999, upper=1.001),))
MEAN, TWO = GEO.reject[0], Weight(upper=2.0)
OWN = {
    "icepop": Preset("", "", weight=Weight(action="mask", lower=0.5, upper=2.0, strict=True)),
    "lower_cap": Preset("", "", weight=Weight(lower=0.5, upper=2.0)),
    "dropped_overflow": Preset("", "", weight=Weight(upper=2.0, safety=None, overflow="zero")),
    "turn_mask": Preset("", "", reject=(Reject(over="segment", lower=0.9, upper=1.1),), weight=TWO),
    "k1_band": Preset("", "", reject=(Reject("k1", "mean", lower=-0.01, upper=0.02),)),
    "strict": Preset(
        "", "", reject=(Reject(upper=1.1, lower=0.8, strict=True),), weight=Weight("sum", upper=2)
    ),
    "diff": Preset("", "", reject=(Reject("prob_diff", upper=0.1, lower=-0.2), MEAN)),
    "left": Preset("", "", reject=(Reject(upper=1.2), replace(MEAN, among="left")), weight=TWO),
    "signed": Preset("", "", reject=(Reject(upper=1.1, lower=0.9, advantage="against"),)),
    "high_veto": Preset("", "", veto=Veto(lower=1e-3, upper=50.0), weight=TWO),
    "turn_weight": Preset("", "", weight=Weight(over="segment", upper=1.05), reject=(Reject(upper=1.5),)),
    "twice": Preset("", "", weight=Weight(lower=0.5, upper=2.0), reject=(Reject(lower=0.5, upper=2.0),)),
    "batch": Preset("", "", reject=(Reject("k2", "batch", upper=0.002),)),
}
CASES = [
    ("token_is", None, (1.0001, 1.01, 1.5, 2.0, 30.0)),
    ("icepop", None, (1.001, 1.05, 2.0, 9.0)),
    ("icepop", "weight.lower", (0.01, 0.5, 0.9, 0.999)),
    ("lower_cap", "weight", (1.01, 1.5, 3.0)),
    ("lower_cap", "weight.lower", (0.01, 0.5, 0.99)),
    ("dropped_overflow", None, (1.01, 2.0)),
    ("seq_is", None, (1.01, 2.0, 10.0)),
    ("geo_rs", None, (1.0005, 1.001, 1.01, 1.1)),
    ("geo_rs", "reject.upper", (1.0, 1.0005, 1.01)),
    ("geo_rs", "reject[0].lower", (0.9, 0.99, 0.999)),
    ("geo_rs", "veto.lower", (1e-4, 0.01, 0.3, 0.9)),
    ("high_veto", "veto.upper", (1.1, 2.0, 50.0)),
    ("seq_mis", None, (1.5, 2.0, 10.0)),
    ("decoupled_k3_rs_token_tis", None, (1e-4, 0.01, 0.5)),
    ("areal_decoupled", None, (1.01, 1.5, 5.0)),
    ("verl_2025_11_token_is_rs_veto", "reject[0].lower", (0.1, 0.8, 0.99)),
    ("verl_2025_11_token_is_rs_veto", "weight.upper", (1.01, 2.0)),
    ("turn_mask", None, (1.01, 1.1, 1.5)),
    ("turn_weight", "weight.upper", (1.001, 1.05)),
    ("k1_band", "reject.upper", (-0.005, 0.0, 0.02)),
    ("strict", "reject.upper", (1.0, 1.1, 2.0)),
    ("diff", "reject[0].upper", (0.0, 0.1, 0.5)),
    ("diff", "reject[1]", (1.001, 1.01)),
    ("left", "reject[0].upper", (1.01, 1.2)),
    ("signed", None, (1.01, 1.1, 1.5)),
    ("twice", "reject[0]", (1.1, 2.0)),
    ("batch", None, (1e-4, 0.002, 0.1)),
]
EQUAL = {  # number of a sweep → that of the analysis, and whether it is the rest to 1
    **{name: (name, False) for name in ("ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence")},
    "tokens_kept": ("tokens_rejected", True),
    "sequences_kept": ("sequences_dropped", True),
    "kappa": ("loss_scale_kept", False),
}
SIDES = {"upper": ("high",), "lower": ("low",), "window": ("high", "low")}


def preset(name):
    return replace(OWN.get(name) or CATALOGUE[name], name=name, logs=None)


def swept(one, values=None, path=None, which=None, workers=1, **more):
    options = {key: more.pop(key) for key in ("keep", "trainer", "chosen") if key in more}
    asked = SweepOptions(one, pick(one, which), values, **options)
    return sweep([str(path or sample())], asked, workers=workers, **more).sweep


def same(one, other):
    """Return whether numbers, intervals of two, or None are equal."""
    return one is other is None or one == pytest.approx(other, rel=1e-9, abs=1e-12)


def write(path, deltas):
    rollout, old = ([[-1.0 + side * x for x in row] for row in deltas] for side in (0, 1))
    with DumpWriter(path) as dump:
        dump.write(rollout_log_probs=rollout, old_log_probs=old, group_id=list(range(len(deltas))))
    return str(path)


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write a part of the sample, in row groups."""
    path = tmp_path_factory.mktemp("sweep") / "part.parquet"
    pq.write_table(pq.read_table(sample()).slice(0, 48), path, row_group_size=16)
    return str(path)


@pytest.fixture(scope="module")
def brute(dump):
    """Do the whole analysis, with a preset for each threshold of each case."""
    every = [
        replace(bound.moved(preset(name), bound.bounds(value)), name=f"{case}_{at}")
        for case, (name, which, values) in enumerate(CASES)
        for bound in [pick(preset(name), which)]
        for at, value in enumerate(values)
    ]
    return analyze([dump], presets=every, workers=1).presets


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: "-".join(map(str, CASES[case][:2])))
def test_every_threshold_equals_the_preset_applied_at_it(case, dump, brute):
    name, which, values = CASES[case]
    bound = pick(preset(name), which)
    found = swept(preset(name), values, dump, which)

    assert [point.threshold for point in found.points] == list(values)
    for at, point in enumerate(found.points):
        truth = brute[f"{case}_{at}"].metrics
        for metric, (other, rest) in EQUAL.items():
            value = truth[other].value
            assert same(point.metrics[metric].value, 1 - value if rest else value), metric
            ends = truth[other].interval
            rest_of = (1 - ends[1], 1 - ends[0]) if ends and rest else ends
            assert same(point.metrics[metric].interval, rest_of), metric
        shares = [truth[f"kept_length_q{quarter}"].value for quarter in (1, 2, 3, 4)]
        assert all(map(same, (q["tokens_kept"].value for q in point.quartiles), shares))
        if bound.part == "weight":
            acted = math.fsum(truth[f"truncated_{side}"].value for side in SIDES[bound.side])
            assert same(point.metrics["acted"].value, acted)
    seen = {(point.metrics["kappa"].value, point.metrics["tokens_kept"].value) for point in found.points}
    assert len(seen) > 1, "thresholds that do nothing show nothing"


def test_a_share_of_all_or_nothing_has_the_width_that_analyze_gives_it(dump):
    """κ of a preset without weights is the share kept: it lies between 0 and 1."""
    found = swept(preset("geo_rs"), (1.000001, 1.001, 1.01, 100.0), dump).points
    none, *some, every = ([one.metrics[name] for name in ("tokens_kept", "kappa")] for one in found)
    assert [one.value for one in (*none, *every)] == [0, 0, 1, 1]
    assert all(one.interval[0] == 0 < one.interval[1] < 0.2 for one in none)
    assert all(0.8 < one.interval[0] < 1 == one.interval[1] for one in every)
    for share, mean in (none, *some, every):
        assert mean.interval == pytest.approx(share.interval, rel=1e-9)
        assert 0 <= mean.interval[0] < mean.interval[1] <= 1


def test_what_no_rule_of_the_preset_can_drop_is_exact(dump):
    (point,) = swept(preset("token_is"), (2.0,), dump).points
    assert point.metrics["tokens_kept"].interval == (1.0, 1.0)
    assert point.metrics["kappa"].interval[0] > 0


def test_batches_and_workers_change_nothing(dump):
    first = swept(preset("seq_mis"), (1.1, 2.0), dump, keep=0.6)
    for workers, tokens in ((2, 1500), (1, 3_000)):
        found = swept(preset("seq_mis"), (1.1, 2.0), dump, keep=0.6, workers=workers, batch_tokens=tokens)
        one, other = ((x.window.point.bounds, x.window.kept, x.window.ties) for x in (found, first))
        assert one == other
        for mine, theirs in zip(found.points, first.points, strict=True):
            assert all(same(mine.metrics[name].value, theirs.metrics[name].value) for name in mine.metrics)


# ---------------------------------------------------------------- what is swept


def test_the_bound_that_a_preset_is_about_is_swept_unless_another_is_named():
    picked = {
        "geo_rs": "reject[0]",
        "token_is": "weight.upper",
        "verl_2025_11_token_is_rs_veto": "reject[0].upper",
    }
    assert {name: str(pick(preset(name), None)) for name in picked} == picked
    every = ["reject[0]", "reject[0].upper", "reject[0].lower", "veto.lower"]
    assert [str(one) for one in swept_bounds(preset("geo_rs"))] == every
    assert pick(preset("diff"), "reject.upper").index == 0


@pytest.mark.parametrize(
    ("one", "which", "said"),
    [
        *((preset(name), None, "nothing to sweep") for name in ("recompute", "vanilla_is")),
        (preset("psis_token"), None, "it has no bound"),
        (replace(preset("geo_rs"), apply=False), None, "nothing is applied"),
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
    effects = [0.0] * 10 + [k / 9 for k in range(10)] + [1.0] * 20
    shown = informative([1.0 + k for k in range(40)], effects, own=3.0)
    assert shown == [2, *range(10, 20)]  # the preset's own, wherever it is


def test_a_looser_bound_keeps_more(dump):
    for one in (preset("geo_rs"), preset("areal_decoupled")):
        for bound in (bound for bound in swept_bounds(one) if bound.part != "weight"):
            found = swept(one, None, dump, str(bound)).points
            kept = [point.metrics["tokens_kept"].value for point in found]
            assert kept == sorted(kept, reverse=bound.side == "lower"), (one.name, str(bound))


def test_a_weight_that_float32_cannot_hold_stays_dropped_at_every_threshold(tmp_path):
    found = swept(preset("dropped_overflow"), (1.01, 2.0), write(tmp_path / "d.parquet", [[0.0, 100.0]]))
    assert {point.metrics[name].value for point in found.points for name in ("kappa", "acted")} == {0.5}


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
    return [row for row in oracles.sequences(pq.read_table(sample()).to_pylist()) if row.n]


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
    unit = "tokens_kept" if one is BAND else "sequences_kept"
    assert math.isclose(window.point.metrics[unit].value, window.kept / len(values), rel_tol=1e-12)


def test_both_sides_lose_the_same_around_the_data_and_one_side_asked_for_is_solved_alone():
    window, values = solved(GEO, 0.9).window, statistics("geo")
    low, high = ends(GEO, window.point.bounds)

    assert abs(sum(x < low for x in values) - sum(x > high for x in values)) <= 1
    assert low < oracles.mean(values) < high
    assert math.isclose(window.centre.value, oracles.mean(values), rel_tol=1e-9)
    assert window.centre_k1.value < 0
    one = solved(GEO, 0.9, which="reject.upper").window
    assert list(one.point.bounds) == ["reject[0].upper"]
    _, high = ends(GEO, one.point.bounds)
    assert sum(x <= high for x in values) == one.kept == math.ceil(0.9 * 512)


def test_ties_are_kept_and_said_and_few_sequences_make_no_forecast(tmp_path):
    """Three values only: no bound keeps half of a hundred equal ones."""
    path = write(tmp_path / "ties.parquet", [[0.0]] * 100 + [[0.25]] * 20 + [[-0.25]] * 20)
    found = solved(GEO, 0.5, path)

    assert (found.window.kept, found.window.of, found.window.ties) == (100, 140, 30)
    assert any("30 more than asked" in remark for remark in found.remarks)
    low, high = ends(GEO, found.window.point.bounds)
    assert -0.25 < low < 0 < high < 0.25
    equal = solved(GEO, 0.95, write(tmp_path / "equal.parquet", [[0.0, 0.0]] * 40)).window
    assert (equal.kept, equal.of, equal.point.metrics["sequences_kept"].value) == (40, 40, 1)
    few = solved(GEO, 0.9, write(tmp_path / "few.parquet", [[0.1 * k, 0.0] for k in range(-5, 6)]))
    assert few.window.predicted == []


@pytest.mark.parametrize(
    ("keep", "rule", "said"),
    [
        *((keep, MEAN, "above 0 and at most 1") for keep in (0.0, -0.1, 1.5, math.nan, math.inf)),
        (0.9, Reject(over="mean", upper=1.01, among="left"), "--keep"),
        (0.9, Reject(upper=1.01, advantage="against"), "--keep"),
        (0.9, Reject("k2", "batch", upper=0.1), "--keep"),
    ],
)
def test_no_share_and_what_one_bound_alone_does_not_decide_is_refused(keep, rule, said):
    one = Preset("one", "", reject=(rule,))
    with pytest.raises(UsageError, match=said):
        check(keep, one, pick(one, None))


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
    assert window.point.metrics["sequences_kept"].value < 0.9


# ---------------------------------------------------------------- what it would keep of other lengths


def drawn(falling, staying, many=12_000, heavy=False, seed=0):
    """Draw log r per token of sequences of 32 to 4096 tokens: (values, lengths, keys)."""
    random = np.random.default_rng(seed)
    lengths = np.round(2 ** random.uniform(5, 12, many))
    shape = random.standard_t(4, many) / math.sqrt(2) if heavy else random.standard_normal(many)
    values = -0.002 + shape * np.sqrt(falling**2 / lengths + staying**2)
    return values, lengths.astype(np.int64), np.arange(many) // 4


def fitted(values, lengths, keys):
    scale = Scale(float(np.median(values)), float(values.std()) * 2)
    return Model.of(spreads(values, lengths, keys, scale), scale, product=False)


def assert_forecast(model, length, window, held):
    """Check that the share of held-out values in the window is predicted, within uncertainty and chance."""
    seen = float(((held >= window[0]) & (held <= window[1])).mean())
    (one,) = model.forecast([length], window)
    assert abs(one.kept - seen) < 3 * math.hypot(one.error, math.sqrt(seen * (1 - seen) / len(held)))
    return one


def test_both_parts_of_the_spread_are_found_and_the_error_of_a_forecast_is_its_spread_over_draws():
    model = fitted(*drawn(0.1, 0.003))
    assert math.isclose(math.sqrt(model.whole.falling), 0.1, rel_tol=0.05)
    assert math.isclose(math.sqrt(model.whole.staying), 0.003, rel_tol=0.1)
    models = [fitted(*drawn(0.1, 0.003, many=1500, seed=seed)) for seed in range(16)]
    found = [model.forecast([3000.0], (-0.006, 0.002))[0] for model in models]
    spread = np.std([one.kept for one in found], ddof=1)
    assert 0.5 * spread < np.median([one.error for one in found]) < 3 * spread


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("quarter", [0, 3])
def test_a_quartile_of_length_that_was_held_out_is_predicted(heavy, quarter):
    values, lengths, keys = drawn(0.1, 0.003, heavy=heavy)
    borders = np.quantile(lengths, (0, 0.25, 0.5, 0.75, 1))
    held = (lengths >= borders[quarter]) & (lengths <= borders[quarter + 1])
    mean = float(np.median(lengths[held]))
    near = held & (lengths > mean / 1.1) & (lengths < mean * 1.1)
    model = fitted(values[~held], lengths[~held], keys[~held])

    one = assert_forecast(model, mean, (-0.012, 0.008), values[near])
    assert (one.observed, one.error < 0.05) == (None, True)


def test_the_longest_quartile_of_the_sample_is_predicted_from_the_others():
    """Real sequences, a fit that never saw a long one."""
    values = np.array(statistics("geo"))
    lengths, keys = (np.array([getattr(row, name) for row in rows()]) for name in ("n", "group"))
    short = lengths < np.quantile(lengths, 0.75)
    window = np.quantile(values, (0.025, 0.975)).tolist()
    model = fitted(values[short], lengths[short], keys[short])
    assert_forecast(model, float(lengths[~short].mean()), tuple(window), values[~short])


def test_predictions_agree_with_what_is_seen_and_on_the_product_fall_with_length():
    kept = [one.kept.value for one in solved(SUM, 0.9).window.predicted]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0.9 > kept[-1]

    seen = [one for one in solved(GEO, 0.9).window.predicted if one.observed is not None]
    assert len(seen) >= 2
    for one in seen:
        low, high = one.kept.interval
        assert low - 0.1 <= one.observed.value <= high + 0.1
