"""Rows of many presets, and sums of weights that are divided by their mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offpol_diag.engine import normal
from offpol_diag.engine.rows import Columns, Rows, joined
from offpol_diag.presets import catalogue

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
