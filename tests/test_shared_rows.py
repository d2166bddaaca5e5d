"""Sums of columns that were equal so far share a row; each name has the numbers that it has by itself."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch

from offpol_diag.engine import resample
from offpol_diag.engine.accumulators import Sums, _pairs

RANDOM = np.random.default_rng(11)
S, B = 24, 6
NAMES = tuple("abcdefgh")
PARTS = {  # which of the rows of a part each name has
    "all alike": [0] * 8,
    "two halves": [0, 0, 0, 0, 1, 1, 1, 1],
    "other halves": [0, 1, 0, 1, 0, 1, 0, 1],
    "each its own": [7, 6, 5, 4, 3, 2, 1, 0],
    "as the halves, in another order": [1, 1, 1, 1, 0, 0, 0, 0],
}
ORDERS = [
    ["two halves", "two halves"],
    ["two halves", "as the halves, in another order"],
    ["all alike", "two halves", "other halves"],
    ["each its own", "all alike", "other halves"],
    ["other halves", "each its own"],
]


def part(name: str) -> tuple[Sums, Sums]:
    """One part of a dump, with shared rows and without."""
    which = torch.tensor(PARTS[name])
    rows = torch.from_numpy(RANDOM.standard_normal((int(which.max()) + 1, S)) * 1e3)
    key = torch.from_numpy(RANDOM.integers(0, 9, S) * 977)
    draws = resample.draws(key, 0, B)
    return Sums.of_stacked(NAMES, rows, draws, which=which), Sums.of_stacked(NAMES, rows[which], draws)


def same(one: Sums, two: Sums) -> bool:
    """Whether all numbers are, to the bit, in the same order."""
    mine, theirs = one.read(), two.read()
    return [*mine] == [*theirs] and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("names", ORDERS, ids=", ".join)
def test_shared_rows_part_where_a_part_of_the_dump_tells_the_names_apart(names: list[str]) -> None:
    shared, plain = zip(*map(part, names), strict=True)
    one, two = reduce(Sums.merge, shared), reduce(Sums.merge, plain)

    assert same(one, two)
    assert torch.equal(one.whole.rest, two.rest)
    assert len(one.point) == len({*zip(*(PARTS[name] for name in names), strict=True)})


def test_sums_with_shared_rows_merge_with_sums_without() -> None:
    (one, plain), (_, two) = part("two halves"), part("other halves")

    assert same(one.merge(two), plain.merge(two))
    assert same(two.merge(one), two.merge(plain))


def test_sums_with_shared_rows_and_other_names_are_widened() -> None:
    one, plain = part("two halves")
    draws = torch.ones(S, B, dtype=torch.float64)
    more = Sums.of({"a": torch.ones(S, dtype=torch.float64), "z": torch.zeros(S, dtype=torch.float64)}, draws)

    assert same(one.merge(more), plain.merge(more))
    assert same(more.merge(one), more.merge(plain))


def rounded_apart(key: torch.Tensor) -> torch.Tensor:
    """A column whose groups add up to 0, and which as a whole does not, for how its numbers are rounded."""
    begins = np.flatnonzero(np.diff(key.numpy(), prepend=-1))
    for at in range(1, len(key) - 1):
        x = torch.zeros(len(key), dtype=torch.float64)
        x[0], x[at], x[at + 1] = 1e16, 1.0, -1e16
        if not np.add.reduceat(x.numpy(), begins).any() and float(x[None].sum(dim=1)) != 0:
            return x
    raise AssertionError("sums are taken in one order")


def test_columns_that_are_equal_in_every_group_share_a_row_only_where_their_sums_are_equal_too() -> None:
    key = torch.tensor([5] * 40 + [7] * 40)
    zeros = torch.zeros(len(key), dtype=torch.float64)
    columns = {"none": zeros, "odd": rounded_apart(key), "again": zeros.clone()}
    columns |= {f"more {at}": zeros for at in range(8)}
    found = Sums.of(columns, resample.draws(key, 0, B), key)
    read = found.read()

    assert found.which is not None
    assert len(found.point) == 2
    assert read["none"] is read["again"]
    for name, x in columns.items():
        assert float(read[name][0]) == float(x[None].sum(dim=1))
        assert not read[name][1:].any()


def test_names_that_share_a_row_are_read_into_one_tensor() -> None:
    found = part("two halves")[0].read()

    assert found["a"] is found["d"]
    assert found["a"] is not found["e"]


def test_a_whole_has_a_row_for_each_name() -> None:
    one, plain = part("other halves")

    assert one.whole.which is None
    assert torch.equal(one.whole.drawn, plain.drawn)
    assert plain.whole is plain


@pytest.mark.parametrize("many", [0, 1, 200])
def test_pairs_are_told_apart_by_both_numbers(many: int) -> None:
    one, two = (RANDOM.integers(-3, 3, many) for _ in range(2))
    first, which = _pairs(torch.from_numpy(one), two)
    pairs = list(zip(one.tolist(), two.tolist(), strict=True))

    assert [pairs[at] for at in first[which].tolist()] == pairs
    assert len(first) == len({*pairs})
