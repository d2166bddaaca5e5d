"""What books make of many presets at once is what they would make of each by itself."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offpol_diag import catalogue, segments
from offpol_diag.crosswalk import BOOKS, counts, views
from offpol_diag.crosswalk.areal_sums import E_U, WEIGHT, masked_ratio
from offpol_diag.crosswalk.counts import chunks, failing
from offpol_diag.crosswalk.ends import named, outermost
from offpol_diag.crosswalk.keys import KEPT
from offpol_diag.crosswalk.ledger import Column, Ledger
from offpol_diag.crosswalk.limits import Thresholds
from offpol_diag.crosswalk.powers import LOG, RATIO
from offpol_diag.crosswalk.spread import Sample, Samples, Spread
from offpol_diag.crosswalk.view import View
from offpol_diag.crosswalk.views import once, sums
from offpol_diag.metrics.scene import Scene
from offpol_diag.near import Near
from offpol_diag.presets import Preset, Reject, Veto, Weight
from tests import oracles
from tests.test_alike import plain
from tests.test_near import opened

ALL = catalogue.load().resolve("all")
VERL = tuple(preset for preset in ALL if BOOKS.get(preset.logs) and BOOKS[preset.logs].shelf == "verl")


@pytest.fixture(scope="module", params=[0.0, 0.05], ids=["calm", "outliers"])
def dump(request, tmp_path_factory):
    rows = oracles.make_rows(0.03, seed=8, many=20, outliers=request.param)
    return opened(rows, tmp_path_factory.mktemp("together"))


def scened(dump):
    study, found, batch = dump
    return Scene.of(batch, 0, 4, found.settled, Near.of(study.presets))


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------- presets side by side


def banded(name, **changes):
    return replace(Preset(name, "", "old", logs="areal"), **changes)


PRESETS = (
    banded("plain"),
    banded("tight", reject=(Reject("ratio", upper=1.01, lower=0.99),)),
    banded("tighter", reject=(Reject("ratio", upper=1.001, lower=0.999),)),
    banded("of cells", reject=(Reject("ratio", "segment", upper=1.001, lower=0.999),)),
    banded("masked", weight=Weight("token", "mask", upper=1.02, lower=0.98)),
    banded("sequence", weight=Weight("mean", upper=1.001)),
    banded("current", loss="gspo"),
)


@pytest.mark.parametrize("at_once", [1, 1 << 8, 1 << 30])
@pytest.mark.parametrize("measures", [(LOG, RATIO, E_U), (WEIGHT,), (LOG, WEIGHT)])
def test_presets_together_have_the_sums_and_ends_that_each_has_alone(dump, monkeypatch, at_once, measures):
    monkeypatch.setattr(counts, "AT_ONCE", at_once)
    scene, other = scened(dump), scened(dump)
    each = [View.at(scene, preset) for preset in PRESETS]
    found = [x.all for x in sums(each, measures, KEPT)]

    for at, preset in enumerate(PRESETS):
        view = View.at(other, preset)
        for of, measure in enumerate(measures):
            want = view.total(measure, KEPT), *view.ends(measure, KEPT)
            assert all(torch.equal(x[at, of], one) for x, one in zip(found, want, strict=True))


def test_any_few_presets_have_the_sums_that_each_has_alone(dump):
    """Also where nothing is lost under any of them, though they might lose different tokens."""
    scene = scened(dump)
    for few in (*combinations(PRESETS, 2), *combinations(PRESETS, 3)):
        found = sums([View.at(scene, preset) for preset in few], (LOG, RATIO), KEPT).total.all
        for at, preset in enumerate(few):
            view = View.at(scene, preset)
            assert torch.equal(found[at], torch.stack([view.total(of, KEPT) for of in (LOG, RATIO)]))


UNLIKE = {"areal_sequence_clamp", "areal_cap_sequence_mask"}
"""Two that mask by different weights, neither of which masks a token of these dumps."""


@pytest.mark.parametrize("shelf", sorted({book.shelf for book in BOOKS.values()}))
def test_any_few_presets_of_a_trainer_have_the_columns_that_each_has_alone(dump, shelf):
    own = [preset for preset in ALL if preset.logs in BOOKS and BOOKS[preset.logs].shelf == shelf]
    book, scene, draw = BOOKS[own[0].logs], scened(dump), random.Random(shelf)
    alone = {one: book.columns(scened(dump), (one,)) for one in own}
    drawn = [tuple(draw.sample(own, min(many, len(own)))) for many in (1, 2, 2, 3, 5, len(own))]
    for few in (*drawn, *combinations([one for one in own if one.name in UNLIKE], 2)):
        want = {name: x for one in few for name, x in alone[one].items()}
        for found in (book.columns(scened(dump), few), book.columns(scene, few)):
            assert {*found} == {*want}
            assert [name for name, x in want.items() if not close(found[name], x)] == []


def test_what_views_have_got_is_not_made_again(dump):
    each = [View.at(scened(dump), preset) for preset in PRESETS[:3]]
    asked = []

    def make(new):
        asked.append([view.preset.name for view in new])
        return [view.preset.name.upper() for view in new]

    assert once(each[:2], "key", make) == ["PLAIN", "TIGHT"]
    assert once(each, "key", make) == ["PLAIN", "TIGHT", "TIGHTER"]
    assert once(each, "key", make) == ["PLAIN", "TIGHT", "TIGHTER"]
    assert asked == [["plain", "tight"], ["tighter"]]


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_tokens_that_do_not_pass_are_counted_by_sequence(monkeypatch, at_once):
    monkeypatch.setattr(counts, "AT_ONCE", at_once)
    few, many = torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 2, 5])
    flags = [
        (torch.tensor([True, False, False]), few),
        (None, few),
        (torch.tensor([False, False, True, False, True]), many),
        (torch.tensor([False, True, False]), few),
    ]
    found = failing(flags, row(0, 0, 0))

    assert found.tolist() == [[0, 0, 2], [0, 0, 0], [2, 0, 1], [1, 0, 1]]


# ---------------------------------------------------------------- spreads


def test_samples_side_by_side_have_the_columns_and_ends_that_each_has_alone(dump):
    n = row(2, 0, 3)
    each = (
        Sample(1.0, True, row(0.9, 1.0, 1.2)),
        Sample(0.0, False, row(0.1, 7.0, -0.2)),
    )
    limits = [Thresholds(0.95, 1.1), Thresholds(-0.05, 0.05), Thresholds(0.0, 9.0)]
    asked = [
        (Spread(f"{at}{low}", one, 1.0 - at, at == 0), at) for low, one in enumerate(limits) for at in (0, 1)
    ]
    together = Samples(each, n)
    columns, ranges = together.columns(asked), together.ranges(asked)

    for spread, at in asked:
        alone = Samples((each[at],), n)
        for name, x in alone.columns([(spread, 0)]).items():
            assert torch.equal(columns[name], x), name
        for name, pair in alone.ranges([(spread, 0)]).items():
            assert all(torch.equal(one, two) for one, two in zip(ranges[name], pair, strict=True)), name
    assert len(columns) == len(asked) * 14


def test_sums_of_rows_about_their_center_are_those_of_python():
    x, n, low, high = [0.9, 1.0, 1.2, 3.0], [2.0, 0.0, 3.0, 1.0], 0.95, 1.1
    spread = Spread("k", Thresholds(low, high), 1.0)
    samples = Samples((Sample(1.0, True, row(*x)),), row(*n))
    found = {name: float(column.sum()) for name, column in samples.columns([(spread, 0)]).items()}
    ends = outermost(samples.ranges([(spread, 0)]))

    within = [min(max(v, low), high) for v in x]
    means = [v * k / (k + 1e-8) for v, k in zip(x, n, strict=True)]
    want = {
        "x": math.fsum(v * k for v, k in zip(x, n, strict=True)),
        "c": math.fsum(v * k for v, k in zip(within, n, strict=True)),
        "cc": math.fsum(v * v * k for v, k in zip(within, n, strict=True)),
        "c1": math.fsum((v - 1) * k for v, k in zip(within, n, strict=True)),
        "cd": math.fsum((v - 1) ** 2 * k for v, k in zip(within, n, strict=True)),
        "m": math.fsum(means),
        "m1": math.fsum(v - 1 for v in means),
        "m2": math.fsum((v - 1) ** 2 for v in means),
    }
    assert {name: found[f"k/{name}"] for name in want} == pytest.approx(want, rel=1e-12)
    assert [*map(float, ends["k/x"])] == [0.9, 3.0]
    assert [*map(float, ends["k/m"])] == pytest.approx([0.0, 3.0], rel=1e-7)
    assert float(ends["k/dev"][1]) == pytest.approx(2.0, rel=1e-7)


def test_names_of_rows_are_given_to_each():
    found = named({"a": torch.stack((row(1), row(2))), "b": torch.stack((row(3), row(4)))})

    assert [{name: x.tolist() for name, x in one.items()} for one in found] == [
        {"a": [1], "b": [3]},
        {"a": [2], "b": [4]},
    ]


# ---------------------------------------------------------------- books


def close(one, two):
    return torch.allclose(one, two, rtol=1e-12, atol=1e-14, equal_nan=True)


def test_generations_of_verl_together_have_the_columns_that_each_preset_has_alone(dump):
    tight = [
        replace(preset, name=f"{preset.name} tight", reject=rules, veto=preset.veto and Veto(0.99, 1.01))
        for preset in VERL
        if (rules := tuple(replace(rule, upper=rule.upper and 1.0 + 1e-4) for rule in preset.reject))
    ]
    presets = (*VERL, *tight)
    book, scene = BOOKS[VERL[0].logs], scened(dump)
    columns, ranges = book.columns(scene, presets), outermost(book.ranges(scene, presets))

    want, ends = {}, {}
    for preset in presets:
        mine, other = BOOKS[preset.logs], scened(dump)
        want |= mine.columns(other, (preset,))
        ends |= outermost(mine.ranges(other, (preset,)))
        other.forget()
    assert columns.keys() == want.keys()
    assert [name for name in want if not close(columns[name], want[name])] == []
    assert ranges.keys() == ends.keys()
    for name, pair in ends.items():
        assert [*map(float, ranges[name])] == pytest.approx([*map(float, pair)], rel=1e-12, abs=1e-14)


def test_a_column_of_many_is_made_once_for_all_presets_of_a_numerator(dump):
    asked = []

    def of_many(each):
        asked.append([view.preset.name for view in each])
        return [view.n * float(view.preset.note) for view in each]

    book = Ledger(
        "x",
        (
            Column("own", lambda view: view.n, own=True, by=lambda view: view.preset.note, of_many=of_many),
            Column("odd", lambda view: view.n, own=True, when=lambda preset: preset.note == "1"),
            Column("shared", lambda view: view.n),
            Column("lacking", lambda view: view.n, needs=("entropy",)),
        ),
        (),
        (),
    )
    presets = tuple(
        Preset(name, "", policy, note=note)
        for name, policy, note in (
            ("a", "old", "1"),
            ("b", "old", "2"),
            ("c", "old", "1"),
            ("d", "current", "2"),
        )
    )
    scene = scened(dump)
    found = book.columns(scene, presets)

    n = scene.counts["tokens"]
    assert asked == [["a", "b"], ["d"]]
    assert torch.equal(found["a!own"], n)
    assert torch.equal(found["b!own"], 2 * n)
    assert found["c!own"] is found["a!own"]
    assert {name for name in found if "own" not in name} == {
        "a!odd",
        "c!odd",
        "x/old/shared",
        "x/current/shared",
    }


class _Reductions(TorchDispatchMode):
    """Counts sums over sequences."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("logs", ["areal", "verl-2026-01"])
def test_a_gpu_reduces_tokens_as_often_for_many_presets_as_for_few(dump, monkeypatch, logs):
    for module in (segments, counts, views):
        if hasattr(module, "here"):
            monkeypatch.setattr(module, "here", lambda x: False)
    seen = []
    for many in (2, 9):
        scene = scened(dump)
        presets = tuple(
            Preset(f"{at}", "", "old", reject=(Reject("ratio", upper=2.0 + at),), logs=logs)
            for at in range(many)
        )
        for preset in presets:
            assert View.at(scene, preset).pieces.kept_tokens is not None
        with _Reductions() as counted:
            BOOKS[logs].columns(scene, presets)
            BOOKS[logs].ranges(scene, presets)
        seen.append(counted.seen["aten::segment_reduce"])

    assert seen[0] == seen[1] > 0


# ---------------------------------------------------------------- corners


def test_a_row_without_a_token_is_rejected_in_2025_where_the_band_leaves_1_out():
    three = torch.zeros(3, dtype=torch.int64)
    batch = replace(
        plain([0.5, 0.7, 0.6], [0, 2, 3]), cu_seqlens=torch.tensor([0, 2, 2, 3]), key=three, masked=three
    )
    rule = Reject("ratio", "mean", upper=3.0, lower=1.5)
    for logs, want in (("verl-2025-11", [0, 1, 0]), ("verl-2026-01", [0, 0, 0])):
        found = BOOKS[logs].columns(
            Scene.of(batch, 0, 4), (Preset("p", "", "old", reject=(rule,), logs=logs),)
        )
        assert found["p!lost"].tolist() == [0, 0, 0]
        assert found["p!lost_rows"].tolist() == want


def test_weights_with_one_upper_bound_are_told_apart_by_all_else(dump):
    """What the loss gets is masked below too, which its upper bound does not tell."""
    presets = tuple(
        Preset(f"{low}", "", "old", weight=Weight("token", "mask", upper=3.0, lower=low), logs="verl-2026-03")
        for low in (0.2, 0.999)
    )
    book = BOOKS["verl-2026-03"]
    found = book.columns(scened(dump), presets)

    for preset in presets:
        alone = book.columns(scened(dump), (preset,))
        assert all(close(found[name], x) for name, x in alone.items())
    sums = {float(x.sum()) for name, x in found.items() if name.startswith("mask") and name.endswith("/x")}
    assert len(sums) == 2


def test_what_is_only_logged_drops_no_token(dump):
    _, found, batch = dump
    used = banded("used", reject=(Reject("ratio", upper=1.06, lower=0.94),))
    scene = Scene.of(batch, 0, 4, found.settled, Near.of((used,)))
    used, logged = View.at(scene, used), View.at(scene, replace(used, name="logged", apply=False))

    assert len(logged.parts) == len(used.parts) == 2
    assert torch.equal(logged.total(LOG, KEPT), logged.total(LOG))
    assert not torch.equal(used.total(LOG, KEPT), used.total(LOG))


def test_a_sequence_that_lost_a_token_has_a_ratio_of_0_among_its_ends(dump):
    scene = scened(dump)
    views = [View.at(scene, preset) for preset in PRESETS[:3]]
    lost = [view.n > view.pieces.kept_tokens for view in views]

    for view, gone, (low, high) in zip(views, lost, masked_ratio(views), strict=True):
        plain_low, plain_high = view.ends(E_U, KEPT)
        stays = view.pieces.sequences & ~gone
        assert torch.equal(low[stays], plain_low[stays])
        assert torch.equal(high[stays], plain_high[stays])
        assert low[gone].tolist() == [0.0] * int(gone.sum())
    assert any(gone.any() for gone in lost)


def test_rows_of_several_numbers_a_token_are_chunked_by_all_of_them(monkeypatch):
    monkeypatch.setattr(counts, "AT_ONCE", 60)
    offsets = torch.tensor([0, 4, 10])

    assert [*chunks(5, offsets)] == [slice(0, 6)]
    assert [*chunks(5, offsets, 2)] == [slice(0, 3), slice(3, 6)]
    assert [*chunks(2, offsets, 100)] == [slice(0, 1), slice(1, 2)]
