"""A trainer's column that presets share is what each of them would have made alone."""

from dataclasses import replace

import pytest
import torch

from offpol_diag import catalogue
from offpol_diag.crosswalk import BOOKS
from offpol_diag.crosswalk.areal_masks import batch_wide
from offpol_diag.crosswalk.ends import outermost
from offpol_diag.crosswalk.ledger import OPTIONAL, Ledger
from offpol_diag.crosswalk.limits import Thresholds
from offpol_diag.crosswalk.spread import Sample, Samples, Spread
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.stack import Stack
from offpol_diag.near import Near
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from tests import oracles
from tests.test_near import opened

ALL = catalogue.load().resolve("all")
BY_BOOK = {logs: [preset for preset in ALL if preset.logs == logs] for logs in BOOKS}


@pytest.fixture(scope="module", params=[0.0, 0.05], ids=["calm", "outliers"])
def dump(request, tmp_path_factory):
    rows = oracles.make_rows(0.03, seed=5, many=24, outliers=request.param)
    return opened(rows, tmp_path_factory.mktemp("columns"))


def tightened(of):
    """A rule or a weight with its bounds much nearer to 1, or to 0 where they are no ratios.

    A cut of the trainer batch stays: it was settled before.
    """
    if of.over == "batch":
        return of
    ratio = getattr(of, "statistic", "ratio") in ("ratio", "mult_prob_error")
    upper, lower = (None if x is None else (x**0.02 if ratio else x * 0.02) for x in (of.upper, of.lower))
    return replace(of, upper=upper, lower=lower)


def variants(preset):
    """The preset, and others that differ from it in one thing."""
    yield preset
    if preset.weight:
        yield replace(preset, weight=tightened(preset.weight))
        yield replace(preset, weight=replace(preset.weight, normalize=not preset.weight.normalize))
    if preset.reject:
        yield replace(preset, reject=tuple(map(tightened, preset.reject)))
    if preset.veto:
        yield replace(preset, veto=Veto(lower=0.97, upper=1.1))
    yield replace(preset, clip=Clip(0.01, 0.02, None))
    if not all(one.apply for one in BY_BOOK[preset.logs]):
        yield replace(preset, apply=not preset.apply)


def varied(logs):
    found = [one for preset in BY_BOOK[logs] for one in variants(preset)]
    return [replace(one, name=f"{at}") for at, one in enumerate(found)]


def made(dump, presets, among):
    """What a book makes of presets, in a scene that knows what those `among` them did."""
    study, found, batch = dump
    scene = Scene.of(batch, 0, 4, found.settled, Near.of(study.presets))
    told = Stack.of(scene, among).deeds if among else ()
    scene.deeds = {preset.name: deed for preset, deed in zip(among, told, strict=True)}
    book = BOOKS[presets[0].logs]
    columns, ranges = book.columns(scene, tuple(presets)), book.ranges(scene, tuple(presets))
    scene.forget()
    return columns, outermost(ranges)


def close(one, two):
    """Up to how sums of far and of near tokens are rounded: a clip that is not used can part them."""
    return torch.allclose(one, two, rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("logs", BOOKS)
def test_every_preset_has_the_columns_it_would_have_made_alone(dump, logs):
    presets = varied(logs)
    columns, ranges = made(dump, presets, presets)
    alone = [made(dump, [preset], []) for preset in presets]

    want = {name: x for found, _ in alone for name, x in found.items()}
    assert columns.keys() == want.keys()
    assert [name for name in want if not close(columns[name], want[name])] == []
    all_ranges = {name: ends for _, found in alone for name, ends in found.items()}
    assert ranges.keys() == all_ranges.keys()
    for name, ends in all_ranges.items():
        assert [*map(float, ranges[name])] == pytest.approx([*map(float, ends)], rel=1e-12, abs=1e-14)


def test_what_is_only_logged_is_told_apart_by_its_bounds(dump):
    """A preset that is not applied did nothing, whatever it would have done."""
    weight = Weight("token", upper=1.0001, safety=None)
    presets = [
        Preset(str(upper), "", "old", weight=replace(weight, upper=upper), apply=False, logs="trl")
        for upper in (1.0001, 1.01)
    ]
    columns, _ = made(dump, presets, presets)

    assert not torch.equal(columns["1.0001!ratio"], columns["1.01!ratio"])


def test_tokens_that_m2po_drops_are_no_valid_ones_of_which_a_weight_is_changed(dump):
    """Whatever else drops them too."""
    m2po = next(rules for one in BY_BOOK["areal"] if (rules := batch_wide(one)))
    tight, weight = Reject("ratio", upper=1.0001, lower=0.9999), Weight("token", upper=1.2)
    presets = [
        Preset(str(len(rules)), "", "old", weight=weight, reject=(*rules, tight), logs="areal")
        for rules in (m2po, ())
    ]
    columns, _ = made(dump, presets, presets)

    lost = columns["0!valid"] - columns["1!valid"]
    _, _, batch = dump
    assert lost.any() or (batch.old - batch.rollout).abs().max() < 0.5
    assert torch.equal(lost, columns["0!changed"] - columns["1!changed"])


def test_presets_that_differ_in_what_acts_on_nothing_share_their_columns(dump):
    """Of the same shape, their bounds beyond every value."""
    base = next(preset for preset in BY_BOOK["areal"] if preset.weight and preset.weight.action == "truncate")
    far = [
        replace(
            base, name=str(at), reject=(), weight=replace(base.weight, upper=10.0 ** (20 + at), lower=None)
        )
        for at in range(5)
    ]
    columns, _ = made(dump, far, far)

    assert len({id(x) for name, x in columns.items()}) * len(far) == len(columns)


def test_what_a_column_needs_is_what_a_batch_may_lack():
    asked = [
        one for book in BOOKS.values() if isinstance(book, Ledger) for one in (*book.sums, *book.extremes)
    ]
    assert {name for one in asked for name in one.needs} <= set(OPTIONAL)


# ---------------------------------------------------------------- limits that act on nothing

INF = float("inf")


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Thresholds(0.5, 2.0), Thresholds(-INF, INF)),
        (Thresholds(0.9, 1.1), Thresholds(-INF, INF)),
        (Thresholds(0.91, 1.09), Thresholds(0.91, 1.09)),
        (Thresholds(0.5, 1.0), Thresholds(-INF, 1.0)),
        (Thresholds(1.0, 2.0), Thresholds(1.0, INF)),
    ],
)
def test_limits_beyond_every_value_are_none(limits, left):
    assert limits.acting(Thresholds(0.9, 1.1)) == left
    assert limits.acting(Thresholds(float("nan"), float("nan"))) == limits


def row(values):
    return torch.tensor(values, dtype=torch.float64)


def columns_of(x, n, limits, empty):
    samples = Samples((Sample(1.0, empty, row(x)),), row(n))
    found = samples.columns([(Spread("k", limits, 1.0, empty), 0)])
    return {name.removeprefix("k/"): values.tolist() for name, values in found.items()}


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize(
    "limits", [(0.95, 1.05), (0.0, 9.0), (0.95, 9.0), (0.0, 1.05), (1.0, 1.0), (0.85, 9.0), (0.0, 5.0)]
)
def test_rows_beyond_limits_are_counted_whether_others_are_or_not(limits, empty):
    x, n = [0.9, 1.0, 1.1, 1.0, 7.0], [2.0, 3.0, 1.0, 0.0, 0.0]
    found = columns_of(x, n, Thresholds(*limits), empty)
    rows = [(v, k) for v, k in zip(x, n, strict=True)]

    def flags(values, sign):
        edge = limits[0 if sign < 0 else 1]
        return [
            float(sign * v > sign * edge and (empty or k > 0)) for v, (_, k) in zip(values, rows, strict=True)
        ]

    means = [v * k / (k + 1e-8) for v, k in rows]
    assert found["high_rows"] == flags(x, 1)
    assert found["low_rows"] == flags(x, -1)
    assert found["high"] == [flag * k for flag, k in zip(flags(x, 1), n, strict=True)]
    assert found["m_high"] == flags(means, 1)
    assert found["m_low"] == flags(means, -1)
    assert found["c"] == pytest.approx([min(max(v, limits[0]), limits[1]) * k for v, k in rows], rel=1e-15)


def test_spreads_of_one_sample_whose_limits_act_alike_share_their_columns():
    one, two = (Spread(key, Thresholds(0.0, high), 1.0) for key, high in (("a", 5.0), ("b", 6.0)))
    x, n = row([0.9, 1.1]), row([2.0, 3.0])
    found = Samples((Sample(1.0, True, x),), n).columns([(one, 0), (two, 0)])

    names = [key.removeprefix("a/") for key in found if key.startswith("a/")]
    assert len(names) * 2 == len(found)
    assert all(found[f"a/{name}"] is found[f"b/{name}"] for name in names)
