"""A preset at many thresholds in one reading equals the preset applied at each of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise

import pyarrow.parquet as pq
import pytest

from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.cli.defaults import sample
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.sweep import SweepOptions, pick, sweep, swept_bounds
from offpol_diag.sweep.thresholds import informative, parse, round_numbers
from tests import oracles
from tests.devices import present

CATALOGUE = load()
DUMP = [str(sample())]
GEO = Reject(over="mean", lower=0.999, upper=1.001)
OWN = {
    one.name: one
    for one in (
        Preset("icepop", "", weight=Weight(action="mask", lower=0.5, upper=2.0, strict=True)),
        Preset("lower_cap", "", weight=Weight(lower=0.5, upper=2.0)),
        Preset("dropped_overflow", "", weight=Weight(upper=2.0, safety=None, overflow="zero")),
        Preset(
            "turn_mask", "", reject=(Reject(over="segment", lower=0.9, upper=1.1),), weight=Weight(upper=3.0)
        ),
        Preset("k1_band", "", reject=(Reject("k1", "mean", lower=-0.01, upper=0.02),)),
        Preset(
            "strict",
            "",
            reject=(Reject(upper=1.1, lower=0.8, strict=True),),
            weight=Weight(over="sum", upper=2.0),
        ),
        Preset("diff", "", reject=(Reject("prob_diff", upper=0.1, lower=-0.2), GEO)),
        Preset("left", "", reject=(Reject(upper=1.2), replace(GEO, among="left")), weight=Weight(upper=2.0)),
        Preset("signed", "", reject=(Reject(upper=1.1, lower=0.9, advantage="against"),)),
        Preset("high_veto", "", veto=Veto(lower=1e-3, upper=50.0), weight=Weight(upper=2.0)),
        Preset("turn_weight", "", weight=Weight(over="segment", upper=1.05), reject=(Reject(upper=1.5),)),
        Preset("twice", "", weight=Weight(lower=0.5, upper=2.0), reject=(Reject(lower=0.5, upper=2.0),)),
        Preset("batch", "", reject=(Reject("k2", "batch", upper=0.002),)),
    )
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
BOTH = ("ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence")


def preset(name: str) -> Preset:
    return OWN.get(name) or CATALOGUE[name]


def close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> str:
    """An eighth of the sample, in row groups."""
    path = tmp_path_factory.mktemp("sweep") / "eighth.parquet"
    pq.write_table(pq.read_table(sample()).slice(0, 64), path, row_group_size=32)
    return str(path)


@pytest.fixture(scope="module")
def brute(dump):
    """Brute force: the whole analysis, with a preset for each threshold of each case."""
    every = [
        replace(bound.moved(preset(name), bound.bounds(value)), name=f"{case}_{at}", logs=None)
        for case, (name, which, values) in enumerate(CASES)
        for bound in [pick(preset(name), which)]
        for at, value in enumerate(values)
    ]
    return analyze([dump], presets=every, workers=1).presets


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: "-".join(map(str, CASES[case][:2])))
def test_every_threshold_equals_the_preset_applied_at_it(case, dump, brute) -> None:
    name, which, values = CASES[case]
    one = replace(preset(name), logs=None)
    bound = pick(one, which)
    found = sweep([dump], SweepOptions(one, bound, values), workers=1, batch_tokens=3_000).sweep

    assert [point.threshold for point in found.points] == list(values)
    for at, point in enumerate(found.points):
        assert_equal(point, brute[f"{case}_{at}"].metrics)
        if bound.part == "weight":
            truth = brute[f"{case}_{at}"].metrics
            sides = {"upper": ("high",), "lower": ("low",), "window": ("high", "low")}[bound.side]
            acted = math.fsum(truth[f"truncated_{side}"].value for side in sides)
            assert close(point.metrics["acted"].value, acted)
    seen = {(point.metrics["kappa"].value, point.metrics["tokens_kept"].value) for point in found.points}
    assert len(seen) > 1, "thresholds that do nothing show nothing"


def assert_equal(point, truth) -> None:
    numbers = point.metrics
    for metric in BOTH:
        assert close(numbers[metric].value, truth[metric].value), metric
        ends = zip(numbers[metric].interval or (), truth[metric].interval or (), strict=True)
        assert all(close(*pair) for pair in ends), metric
    assert close(numbers["tokens_kept"].value, 1 - truth["tokens_rejected"].value)
    assert close(numbers["sequences_kept"].value, 1 - truth["sequences_dropped"].value)
    assert close(numbers["kappa"].value, truth["loss_scale_kept"].value)
    shares = [truth[f"kept_length_q{quarter}"].value for quarter in (1, 2, 3, 4)]
    assert all(map(close, (q["tokens_kept"].value for q in point.quartiles), shares))


def test_a_geometric_window_counts_what_a_loop_over_the_rows_counts() -> None:
    rows = oracles.sequences(pq.read_table(sample()).to_pylist())
    values = (1.0005, 1.001, 1.004, 1.03)
    one = replace(preset("geo_rs"), veto=None)
    found = sweep(DUMP, SweepOptions(one, pick(one, None), values), workers=1).sweep
    means = [math.fsum(row.delta("old")) / row.n for row in rows if row.n]
    lengths = [row.n for row in rows if row.n]

    for point, b in zip(found.points, values, strict=True):
        inside = [abs(mean) <= math.log(b) for mean in means]
        kept = math.fsum(n for n, flag in zip(lengths, inside, strict=True) if flag) / math.fsum(lengths)
        assert math.isclose(point.metrics["sequences_kept"].value, sum(inside) / len(inside), rel_tol=1e-12)
        assert math.isclose(point.metrics["tokens_kept"].value, kept, rel_tol=1e-12)


def test_a_truncated_weight_sums_what_a_loop_over_the_tokens_sums() -> None:
    rows = oracles.sequences(pq.read_table(sample()).to_pylist())
    ratios = [math.exp(d) for row in rows for d in row.delta("old")]
    values = (1.001, 1.2, 2.0)
    found = sweep(
        DUMP, SweepOptions(preset("token_is"), pick(preset("token_is"), None), values), workers=1
    ).sweep

    for point, b in zip(found.points, values, strict=True):
        weights = [min(r, b) for r in ratios]
        first, second = math.fsum(weights), math.fsum(w * w for w in weights)
        assert math.isclose(point.metrics["kappa"].value, first / len(weights), rel_tol=1e-12)
        ess = first * first / (len(weights) * second)
        assert math.isclose(point.metrics["ess_tokens"].value, ess, rel_tol=1e-12)
        assert math.isclose(
            point.metrics["acted"].value, sum(r > b for r in ratios) / len(ratios), rel_tol=1e-12
        )


def test_batches_workers_and_device_change_nothing(dump) -> None:
    one = preset("seq_mis")
    options = SweepOptions(one, pick(one, None), (1.1, 2.0), keep=0.6)
    found = []
    for workers, tokens, device in (
        (1, 1 << 18, "cpu"),
        (1, 700, "cpu"),
        (2, 3_000, "cpu"),
        (1, 3_000, "cuda:0"),
    ):
        with present(device):
            found.append(sweep([dump], options, workers=workers, batch_tokens=tokens, device=device).sweep)
    first, *others = found
    for other in others:
        assert other.window.point.bounds == first.window.point.bounds
        assert (other.window.kept, other.window.ties) == (first.window.kept, first.window.ties)
        for mine, theirs in zip(other.points, first.points, strict=True):
            for name in mine.metrics:
                assert close(mine.metrics[name].value, theirs.metrics[name].value)


# ---------------------------------------------------------------- what is swept


def test_the_bound_that_a_preset_is_about_is_swept_unless_another_is_named() -> None:
    assert str(pick(preset("geo_rs"), None)) == "reject[0]"
    assert str(pick(preset("token_is"), None)) == "weight.upper"
    assert str(pick(preset("verl_2025_11_token_is_rs_veto"), None)) == "reject[0].upper"
    assert [str(one) for one in swept_bounds(preset("geo_rs"))] == [
        "reject[0]",
        "reject[0].upper",
        "reject[0].lower",
        "veto.lower",
    ]
    assert pick(preset("diff"), "reject.upper").index == 0


@pytest.mark.parametrize(
    ("one", "which", "said"),
    [
        *((preset(name), None, "nothing to sweep") for name in ("recompute", "vanilla_is", "disabled")),
        (preset("psis_token"), None, "it has no bound"),
        (replace(preset("geo_rs"), apply=False), None, "nothing is applied"),
        (preset("geo_rs"), "rejct.upper", "no bound .*did you mean reject"),
    ],
)
def test_what_cannot_be_swept_is_refused(one, which, said) -> None:
    with pytest.raises(UsageError) as caught:
        pick(one, which)
    assert re.search(said, f"{caught.value.message} {caught.value.hint}")


@pytest.mark.parametrize(
    ("name", "which", "text", "said"),
    [
        ("geo_rs", None, "1.1,1.01", "must rise"),
        ("geo_rs", None, "1.1,1.1", "must rise"),
        ("geo_rs", None, "nan", "no threshold"),
        ("geo_rs", None, "1.1,inf", "no threshold"),
        ("geo_rs", None, "tight", "is no number"),
        ("geo_rs", None, "", "is no number"),
        ("geo_rs", None, "0.5,2", "must be above 1"),
        ("geo_rs", None, "1.0,2", "must be above 1"),
        ("geo_rs", None, ",".join(str(1 + k / 1000) for k in range(1, 400)), "200 are the most"),
        ("geo_rs", "reject.upper", "0.9", "--at"),  # below the lower bound, which does not move
        ("geo_rs", "veto.lower", "0", "--at"),
        ("decoupled_k3_rs", None, "-1", "--at"),
        ("token_is", None, "-0.5", "--at"),
    ],
)
def test_thresholds_that_a_preset_could_not_have_are_refused(name, which, text, said) -> None:
    with pytest.raises(UsageError, match=said):
        parse(text, preset(name), pick(preset(name), which))


def test_every_preset_with_a_bound_has_round_thresholds_and_its_own() -> None:
    for one in CATALOGUE.values():
        for bound in swept_bounds(one):
            found = round_numbers(one, bound)
            assert all(a < b for a, b in pairwise(found)), (one.name, str(bound))
            assert bound.threshold(one) in found
            assert len(found) > 5, (one.name, str(bound))


def test_the_table_starts_and_ends_where_the_data_do() -> None:
    effects = [0.0] * 10 + [k / 9 for k in range(10)] + [1.0] * 20
    shown = informative([1.0 + k for k in range(40)], effects, own=3.0)

    assert shown == [2, *range(10, 20)]  # the preset's own, wherever it is


def test_a_looser_bound_keeps_more(dump) -> None:
    for name in ("geo_rs", "areal_decoupled"):
        one = preset(name)
        for bound in swept_bounds(one):
            if bound.part == "weight":
                continue
            found = sweep([dump], SweepOptions(one, bound), workers=1).sweep.points
            kept = [point.metrics["tokens_kept"].value for point in found]
            assert kept == sorted(kept, reverse=bound.side == "lower"), (name, str(bound))


def test_a_weight_that_float32_cannot_hold_stays_dropped_at_every_threshold(tmp_path) -> None:
    path = tmp_path / "overflow.parquet"
    with DumpWriter(path) as dump:
        dump.write(rollout_log_probs=[[-1.0, -101.0]], old_log_probs=[[-1.0, -1.0]])
    one = preset("dropped_overflow")
    found = sweep([str(path)], SweepOptions(one, pick(one, None), (1.01, 2.0)), workers=1).sweep

    assert [point.metrics["kappa"].value for point in found.points] == [0.5, 0.5]
    assert [point.metrics["acted"].value for point in found.points] == [0.5, 0.5]
