"""Reductions over ragged runs against lists, for many presets at once; exponentials; normalised sums."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offpol_diag.engine import normal, segments
from offpol_diag.engine.rows import Columns, Rows, joined
from offpol_diag.presets import catalogue
from tests.devices import DEVICES, present

RUNS = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=7), max_size=8)


def packed(runs: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([v for run in runs for v in run], dtype=torch.float64)
    return x, torch.tensor(
        [0, *torch.tensor([len(run) for run in runs]).cumsum(0).tolist()], dtype=torch.int64
    )


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None)  # the first tensor on a GPU takes its time
@given(runs=RUNS, rows=st.integers(1, 3))
def test_every_reduction_is_that_of_the_list(device, runs, rows):
    x, offsets = (one.to(device) for one in packed(runs))

    assert segments.lengths(offsets).tolist() == [len(run) for run in runs]
    assert segments.total(x, offsets).tolist() == pytest.approx([math.fsum(run) for run in runs], abs=1e-8)
    assert segments.largest(x, offsets).tolist() == [max(run, default=-math.inf) for run in runs]
    assert segments.smallest(x, offsets).tolist() == [min(run, default=math.inf) for run in runs]
    means = [math.fsum(run) / len(run) if run else 0.0 for run in runs]
    assert segments.mean(x, offsets).tolist() == pytest.approx(means, abs=1e-8)
    assert segments.count(x > 0, offsets).tolist() == [sum(v > 0 for v in run) for run in runs]
    every = torch.stack([x + row for row in range(rows)])
    for reduce in (segments.total, segments.largest, segments.smallest):
        assert segments.of_rows(reduce, every, offsets).tolist() == [
            reduce(row, offsets).tolist() for row in every
        ]


@given(RUNS, RUNS)
def test_runs_do_not_feel_their_neighbours(left, right):
    x, offsets = packed(left + right)
    y, own = packed(right)
    assert torch.equal(segments.total(x, offsets)[len(left) :], segments.total(y, own))
    assert torch.equal(segments.largest(x, offsets)[len(left) :], segments.largest(y, own))
    spread = segments.spread(torch.arange(len(left + right)), offsets)
    assert spread.tolist() == [i for i, run in enumerate(left + right) for _ in run]


def test_no_runs_and_empty_runs_reduce_to_their_neutral_elements():
    nothing = torch.zeros(0, dtype=torch.float64)
    for many in (0, 1, 3):
        offsets = torch.zeros(many + 1, dtype=torch.int64)
        assert segments.total(nothing, offsets).tolist() == [0.0] * many
        assert segments.mean(nothing, offsets).tolist() == [0.0] * many
        assert segments.largest(nothing, offsets).tolist() == [-math.inf] * many
        assert segments.smallest(nothing, offsets).tolist() == [math.inf] * many


# ---------------------------------------------------------------- host and device

X = [
    0.0,
    -0.0,
    1e-300,
    -1e-9,
    3e-5,
    -0.04,
    0.7,
    -2.5,
    30.0,
    -345.0,
    690.0,
    800.0,
    -800.0,
    math.inf,
    -math.inf,
]


def plain(function, x):
    try:
        return function(x)
    except OverflowError:
        return math.inf


@pytest.mark.parametrize("name", ["exp", "expm1"])
@pytest.mark.parametrize("wide", [True, False])
def test_exponentials_are_those_of_the_standard_library(name, wide, monkeypatch):
    monkeypatch.setattr(segments, "wide", lambda name: wide)
    expected = [plain(getattr(math, name), x) for x in X]

    found = getattr(segments, name)(torch.tensor(X, dtype=torch.float64))

    assert found.tolist() == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("name", ["exp", "expm1"])
def test_a_slope_goes_through_and_what_is_not_here_is_torchs(name, monkeypatch):
    monkeypatch.setattr(segments, "wide", lambda name: True)
    x = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    getattr(segments, name)(x).sum().backward()
    monkeypatch.setattr(segments, "on_host", lambda x: False)
    monkeypatch.setattr(torch.Tensor, "numpy", None)

    assert x.grad.item() == pytest.approx(math.exp(0.3))
    assert getattr(segments, name)(torch.zeros(2, dtype=torch.float64)).shape == (2,)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_sent_to_a_device_are_the_same(device):
    x = torch.tensor([1.5, -math.inf, 3.0], dtype=torch.float64)
    with present(device):
        there = segments.sent(x, torch.device(device))

    assert str(there.device) == device
    assert there.tolist() == x.tolist()
    assert segments.sent(torch.empty(0), torch.device("cpu")).shape == (0,)


# ---------------------------------------------------------------- many presets at once


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_inputs_that_presets_share_are_held_and_computed_once():
    x, y, sizes = row(0, 1), row(2, 3), []

    def times(x, y):
        sizes.append(len(x))
        return x * y

    for at in ((0, 1, 0, 1), (0, 0, 1, 1)):
        one, two = Rows(torch.stack((x, y)), (0, 1, 0, 1)), Rows(torch.stack((x + 1, y + 1)), at)
        assert torch.equal(joined(times, one, two).all, one.all * two.all)
    assert sizes == [2, 4]


@pytest.mark.parametrize("columns", [(0, 2, 5), (4, 1), (3,), (), range(6)])
def test_some_columns_keep_their_names_and_bring_no_other_rows(columns):
    x = row(1, 2)
    one = Columns.of({"a": x, "b": row(3, 4), "c": x})  # a and c share a row
    two = Columns(("d", "e", "f"), (row(5, 6)[None], torch.stack((row(7, 8), row(9, 0)))))
    every = Columns.joined(one, two)
    some = every.only(columns)

    assert every.height == 5
    values = dict(zip(every.names, every.values.tolist(), strict=True))
    assert list(some.names) == [every.names[at] for at in columns]
    assert some.values.tolist() == some.trimmed.values.tolist() == [values[name] for name in some.names]
    assert some.trimmed.height == len({tuple(row) for row in some.values.tolist()})


# ---------------------------------------------------------------- weights divided by their mean

SIZES = {"near one": 1 + 1e-7, "tiny": 1e-7, "large": 1e9, "half": 0.45, "twice": 2.1}
PRESET = next(one for one in catalogue.load().values() if normal.normalised([one]))
NORMALISED = PRESET.name


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sums_of_a_trainer_batch_are_exact_for_any_divisor(size):
    """Two sequences were dropped; the others have one token each."""
    weights = [size * x for x in (1.0, 1.0 + 1e-6, 0.9, 1.2)]
    first, second = math.fsum(weights), math.fsum(w * w for w in weights)
    less = math.fsum((w - 1) * (w + 1) for w in weights)
    total = {"w": first, "v": first, "ww": second, "vv": second, "norm": first, "norm_units": 4.0}
    total |= {"w11": math.fsum((w - 1) ** 2 for w in weights), "kept": 4.0, "residual_left": 4.0}
    total |= {"residual_ww": less, "residual_vv": less}
    found = normal.rescaled({f"{NORMALISED}|{name}": row(x) for name, x in total.items()}, PRESET)
    f = first / 4

    def close(name, *terms):
        scale = math.fsum(map(abs, terms))
        assert float(found[f"{NORMALISED}|{name}"]) == pytest.approx(math.fsum(terms), abs=1e-12 * scale)

    close("w11", *((w / f - 1) ** 2 for w in weights))
    close("residual_ww", *(w * w / f / f - 1 for w in weights))
    close("residual_vv", *(w * w / f / f - 1 for w in weights))
