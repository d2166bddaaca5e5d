"""Numbers of many presets are read at once, and are to the bit what each would be by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offpol_diag.engine import formula as interval
from offpol_diag.engine import method, policyloss, residual, update
from offpol_diag.engine.formula import SHARE, Formula, Reader, mean
from offpol_diag.engine.segments import Array

NAMES = ("a", "b", "c", "d")
PREFIXES = tuple(f"{name}|" for name in NAMES)
ROWS = (*method.ROWS, *method.SIGN_ROWS, *residual.ROWS, *policyloss.ROWS, *update.ROWS)
GROUPS, B = 40, 64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinite and undefined replicates


class Made(dict[str, Array]):
    """Columns made on request: the same for the same name, none of them simple."""

    def __missing__(self, name: str) -> Array:
        x = np.random.default_rng(hash_of(name)).random(1 + B) + 0.5
        if name.startswith("b|"):
            x[3] = math.nan  # few replicates are undefined
        if name.startswith("c|"):
            x[1:40] = math.inf  # too many are
        if name.startswith("d|"):
            x[0] = math.nan  # the number itself is
        if name == "tokens":
            x += 1000  # groups of about one size
        self[name] = x
        return x

    def get(self, name: str, default: object = None) -> Array:  # type: ignore[override]
        return self[name]


def hash_of(name: str) -> int:
    return sum(at * ord(letter) for at, letter in enumerate(name, 1))


@pytest.fixture
def reader() -> Reader:
    return Reader(Made(), GROUPS)


def test_numbers_of_many_presets_are_those_of_each_by_itself(reader: Reader) -> None:
    for row in ROWS:
        assert reader.numbers(row, PREFIXES) == [reader.number(row, prefix) for prefix in PREFIXES]
    a, b, c, d = reader.numbers(ROWS[0], PREFIXES)
    assert a.interval
    assert b.interval
    assert (c.interval, c.unknown) == (None, None)
    assert (d.value, d.interval) == (None, None)
    assert d.unknown


def test_prefixes_that_share_all_sums_of_a_metric_share_its_number() -> None:
    made = Made()
    for name in ("w", "kept"):
        made[f"b|{name}"] = made[f"a|{name}"]
    made["c|w"], made["c|kept"] = made["a|w"], made["a|kept"].copy()
    made["d|w"], made["d|kept"] = made["a|w"], made["a|kept"] + 1.0
    a, b, c, d = Reader(made, GROUPS).numbers(ROWS[0], PREFIXES)

    assert a is b
    assert a is not c
    assert a == c
    assert a != d


def test_numbers_of_the_dumps_own_columns_are_every_presets(reader: Reader) -> None:
    row = Formula("x", "", "", "", mean("sequences"))
    one = reader.number(row)
    assert reader.numbers(row, PREFIXES) == [one] * 4


def test_events_that_none_of_many_presets_saw_have_the_interval_of_none() -> None:
    nothing, all_of = np.zeros(1 + B), np.full(1 + B, 30.0)
    sums = {"sequences": all_of, "a|x": nothing, "b|x": all_of, "c|x": nothing + 3}
    row = Formula("x", "fraction", "", "", mean("x", "sequences"), counts=True)
    a, b, c = Reader(sums, GROUPS).numbers(row, PREFIXES[:3])
    missed = 1 - 0.025 ** (1 / 30)
    assert a.interval == pytest.approx((0.0, missed))
    assert b.interval == pytest.approx((1 - missed, 1.0))
    assert c.interval == pytest.approx((0.1, 0.1))


def test_each_row_of_intervals_has_as_many_replicates_as_are_finite_there() -> None:
    values = np.random.default_rng(1).random((3, 1 + B))
    values[1, 1:5] = (math.inf, -math.inf, math.nan, math.inf)
    values[2, 1:20] = math.nan
    found = interval.intervals(values, 30.0, GROUPS, [SHARE] * 3)
    shorter = np.concatenate((values[1, :1], values[1, 5:]))
    wanted = [
        interval.interval(values[0], 30.0, GROUPS, SHARE),
        interval.interval(shorter, 30.0, GROUPS, SHARE),
    ]
    assert found == [*wanted, None]
    for few in ((30.0, 4), (2.9, GROUPS)):
        assert interval.intervals(values, *few, [SHARE] * 3) == [None] * 3
