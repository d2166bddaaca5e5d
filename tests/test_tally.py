"""Tallies by themselves: arrays of four kinds, by place, merged in any order."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offpol_diag.engine import bootstrap, selection, tally
from offpol_diag.engine.tails import TAIL, Tail
from offpol_diag.engine.tally import Arrays, ByKey, Names, Tally, largest_of

RANDOM = np.random.default_rng(11)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def equal(one: Any, two: Any) -> bool:
    """Return whether tallies, or parts of them, agree to 1e-12 of the largest entry."""
    if isinstance(one, np.ndarray):
        if one.dtype == object:
            return one.tolist() == two.tolist()
        top = float(np.nan_to_num(np.abs(one), posinf=0.0).max()) if one.size else 0.0
        return one.shape == two.shape and np.allclose(one, two, rtol=1e-12, atol=1e-12 * top)
    if isinstance(one, pa.Table):
        return one.equals(two)
    if isinstance(one, dict):
        return set(one) == set(two) and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, Arrays | ByKey | Tally | Names):
        return all(equal(getattr(one, name), getattr(two, name)) for name in vars(one))
    return bool(one == two)


def arrays(*shape: int) -> Arrays:
    def x(*more: int) -> np.ndarray:
        return RANDOM.standard_normal((*shape, *more))

    return Arrays(
        sums={"a": x(3, 4), "b": x()},
        maxima={"m": x(2)},
        log_sums={"l": 800 * x(2)},
        largest={"t": largest_of(x(RANDOM.integers(1, 9)), 5)},
        names={"a": Names(("x", "y", "z", "x2"), np.array([0, 1, 2, 0]))},
    )


def places(*keys: object, bound: Any = "none") -> ByKey:
    found = arrays(len(keys))
    if bound == "steps":
        found.maxima["shift"] = np.zeros(len(keys))
    if keys and isinstance(keys[0], str):
        return ByKey.of(keys, found, bound)
    order = np.array(sorted(keys), np.int64)
    return ByKey(order, found, bound).bounded


TRIPLES: dict[str, Any] = {
    "whole": (arrays(), arrays(), arrays()),
    "an array that others lack": (arrays(), Arrays(), Arrays(sums={"c": np.ones(2)})),
    "labels": (places("a", "b"), places("b", "ü|/"), places()),
    "keys": (places(3, -4, 9), places(9), places(1, 2, 3)),
    "many labels": tuple(
        places(*map(str, range(*ends)), bound="others") for ends in ((3000,), (2000, 5000), (10,))
    ),
    "many keys": tuple(
        places(*(7919 * at % 10007 for at in range(*ends)), bound="sample")
        for ends in ((4000,), (3000, 6000), (9,))
    ),
    "steps": tuple(
        places(*steps, bound="steps") for steps in (range(40), (), (3, 7, *range(30, 90), 1000, -1))
    ),
}


@pytest.mark.parametrize("name", TRIPLES)
def test_merging_is_associative_and_commutative_and_changes_neither_side(name):
    a, b, c = TRIPLES[name]
    before = copy.deepcopy((a, b, c))
    if len(getattr(c, "keys", "1")) == 0:  # of no type: as the others'
        c = ByKey(a.keys[:0], a.arrays.map(lambda _, x: x[:0]), a.bound)
        before = *before[:2], c

    whole = a.merge(b).merge(c)
    for one, two, three in permutations((a, b, c)):
        assert equal(one.merge(two).merge(three), whole)
        assert equal(one.merge(two.merge(three)), whole)
    assert all(equal(x, y) for x, y in zip((a, b, c), before, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        Names(("x", "y", "z", "w"), np.array([0, 1, 2, 0])),
        Names(("x", "y", "z", "x2"), np.array([0, 1, 2, 1])),
    ],
)
def test_sums_of_other_columns_do_not_merge(other):
    with pytest.raises(ValueError, match="different columns"):
        arrays().merge(Arrays(sums={"a": np.ones((3, 4))}, names={"a": other}))


def test_places_beyond_the_bound_are_added_up_as_others():
    keys = [str(at) for at in range(tally.MOST_KEYS + 100)]
    found = places(*keys, bound="others").bounded

    kept = tally.retained(keys)
    assert len(found) == tally.MOST_KEYS + 1
    assert {*found.keys.tolist()} == kept | {tally.OTHER_KEYS}
    every = places(*keys)
    of_others = [one for key, one in every.items() if key not in kept]
    assert len(of_others) == 100
    assert tally.estimated_others(found.keys.tolist()) == pytest.approx(100, abs=150)


def test_a_sample_of_groups_is_of_the_smallest_keys_with_all_that_was_counted_of_them():
    keys = np.sort(bootstrap.mix(np.arange(tally.SAMPLE + 100)))
    first, second = (
        ByKey(part, Arrays(sums={"counts": np.ones((len(part), 1))}), "sample")
        for part in (keys[:3000], keys[2900:])
    )
    sampled = [selection.SampledGroups.read(one) for one in (first, second, first.merge(second))]
    merged = sampled[-1]

    assert [one.full for one in sampled] == [False, False, True]
    assert merged.keys.tolist() == keys[: tally.SAMPLE].tolist()
    assert merged.many == pytest.approx(len(keys), rel=0.05)


ORDERS = {
    "shuffled": lambda x: x,
    "rising": np.sort,
    "falling": lambda x: -np.sort(-x),
    "all equal": np.zeros_like,
    "mostly equal": lambda x: np.maximum(x, 0.5),
}


@pytest.mark.parametrize("n", [0, 1, TAIL - 1, TAIL, TAIL + 1, 4 * TAIL])
@pytest.mark.parametrize("order", ORDERS)
def test_a_tail_holds_the_largest_in_whatever_order_they_come(order, n):
    x = ORDERS[order](np.random.default_rng(n).standard_normal(n)).copy()
    tail = Tail.of(x)

    assert np.array_equal(tail.kept, np.sort(x)[::-1][:TAIL])
    assert tail.n == n
    kept = Tail.read(largest_of(x, TAIL), n)
    assert np.array_equal(kept.kept, tail.kept)
