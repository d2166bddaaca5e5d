"""Reductions over ragged runs against lists; rows of many presets; normalised sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offpol_diag.engine import normal, segments
from offpol_diag.engine.rows import Columns, Rows, joined
from offpol_diag.presets import catalogue

RUNS = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=7), max_size=8)


def packed(runs: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    x = np.array([v for run in runs for v in run], dtype=np.float64)
    return x, np.cumsum([0, *(len(run) for run in runs)])


@given(runs=RUNS, rows=st.integers(1, 3))
def test_every_reduction_is_that_of_the_list(runs, rows):
    x, offsets = packed(runs)

    assert segments.lengths(offsets).tolist() == [len(run) for run in runs]
    assert segments.total(x, offsets).tolist() == pytest.approx([math.fsum(run) for run in runs], abs=1e-8)
    assert segments.largest(x, offsets).tolist() == [max(run, default=-math.inf) for run in runs]
    assert segments.smallest(x, offsets).tolist() == [min(run, default=math.inf) for run in runs]
    means = [math.fsum(run) / len(run) if run else 0.0 for run in runs]
    assert segments.mean(x, offsets).tolist() == pytest.approx(means, abs=1e-8)
    assert segments.count(x > 0, offsets).tolist() == [sum(v > 0 for v in run) for run in runs]
    every = np.stack([x + row for row in range(rows)])
    for reduce in (segments.total, segments.largest, segments.smallest):
        assert reduce(every, offsets).tolist() == [reduce(row, offsets).tolist() for row in every]


@given(RUNS, RUNS)
def test_runs_do_not_feel_their_neighbours(left, right):
    x, offsets = packed(left + right)
    y, own = packed(right)
    assert np.array_equal(segments.total(x, offsets)[len(left) :], segments.total(y, own))
    assert np.array_equal(segments.largest(x, offsets)[len(left) :], segments.largest(y, own))
    spread = segments.spread(np.arange(len(left + right)), offsets)
    assert spread.tolist() == [i for i, run in enumerate(left + right) for _ in run]


def test_no_runs_and_empty_runs_reduce_to_their_neutral_elements():
    nothing = np.zeros(0, dtype=np.float64)
    for many in (0, 1, 3):
        offsets = np.zeros(many + 1, dtype=np.int64)
        assert segments.total(nothing, offsets).tolist() == [0.0] * many
        assert segments.mean(nothing, offsets).tolist() == [0.0] * many
        assert segments.largest(nothing, offsets).tolist() == [-math.inf] * many
        assert segments.smallest(nothing, offsets).tolist() == [math.inf] * many


# ---------------------------------------------------------------- many presets at once


def row(*values):
    return np.array(values, dtype=np.float64)


def test_inputs_that_presets_share_are_held_and_computed_once():
    x, y, sizes = row(0, 1), row(2, 3), []

    def times(x, y):
        sizes.append(len(x))
        return x * y

    for at in ((0, 1, 0, 1), (0, 0, 1, 1)):
        one, two = Rows(np.stack((x, y)), (0, 1, 0, 1)), Rows(np.stack((x + 1, y + 1)), at)
        assert np.array_equal(joined(times, one, two).all, one.all * two.all)
    assert sizes == [2, 4]


@pytest.mark.parametrize("columns", [(0, 2, 5), (4, 1), (3,), (), range(6)])
def test_some_columns_keep_their_names_and_bring_no_other_rows(columns):
    x = row(1, 2)
    one = Columns.of({"a": x, "b": row(3, 4), "c": x})  # a and c share a row
    two = Columns(("d", "e", "f"), (row(5, 6)[None], np.stack((row(7, 8), row(9, 0)))))
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
        assert float(found[f"{NORMALISED}|{name}"][0]) == pytest.approx(math.fsum(terms), abs=1e-12 * scale)

    close("w11", *((w / f - 1) ** 2 for w in weights))
    close("residual_ww", *(w * w / f / f - 1 for w in weights))
    close("residual_vv", *(w * w / f / f - 1 for w in weights))
