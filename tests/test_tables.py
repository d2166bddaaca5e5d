"""Sums by code, neighbours drawn alike, tails and the largest few: short ways to the same numbers."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from offpol_diag.engine import accumulators as sums
from offpol_diag.engine import resample, segments, tables, where, worst
from offpol_diag.engine.accumulators import TAIL, Sums, Tail
from tests.devices import DEVICES

RANDOM = np.random.default_rng(7)
CODES = {
    "in long runs": np.repeat([0, 3, 1, 5], [40, 25, 1, 30]),
    "in long runs that come back": np.repeat([2, 3, 2, 0, 2], 20),
    "of every token its own": RANDOM.integers(0, 6, 97),
    "none": np.zeros(0, np.int64),
    "one": np.array([4]),
}


SHARES = {"one sequence": [1.0], "many": [0.2, 0.0, 0.5, 0.3], "empty at the ends": [0.0, 0.6, 0.4, 0.0]}


def offsets_of(shares, tokens):
    return [round(tokens * at) for at in np.concatenate(([0.0], np.cumsum(SHARES[shares]))).tolist()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_sums_by_sequence_and_code_are_those_of_a_plain_loop(name, shares, device, dtype):
    codes, ends = CODES[name], offsets_of(shares, len(CODES[name]))
    x, y = RANDOM.standard_normal((2, len(codes)))
    at, one, two = (torch.from_numpy(values).to(device) for values in (codes, x, y))
    offsets = torch.tensor(ends, device=device)
    counts, sums = tables.by_sequence(at.to(dtype), 7, offsets, {"x": one, "y": two})
    few = tables.few_by_sequence(at.to(dtype), 7, offsets, one > 0.5)

    for sequence, (begin, end) in enumerate(itertools.pairwise(ends)):
        some, part = codes[begin:end], slice(begin, end)
        assert counts[sequence].tolist() == [int((some == code).sum()) for code in range(7)]
        assert few[sequence].tolist() == [int((x[part][some == code] > 0.5).sum()) for code in range(7)]
        for found, column in ((sums["x"], x), (sums["y"], y)):
            expected = [math.fsum(column[part][some == code].tolist()) for code in range(7)]
            assert found[sequence].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_sums_by_sequence_of_a_gpu_are_those_of_a_cpu(monkeypatch):
    at, offsets = torch.from_numpy(CODES["of every token its own"]), torch.tensor([0, 40, 40, 97])
    columns = {"x": torch.from_numpy(RANDOM.standard_normal(97))}
    counts, sums = tables.by_sequence(at, 7, offsets, columns)
    few = tables.few_by_sequence(at, 7, offsets, columns["x"] > 0)
    monkeypatch.setattr(tables, "here", lambda x: False)

    assert torch.equal(tables.by_sequence(at, 7, offsets, columns)[0], counts)
    assert torch.allclose(tables.by_sequence(at, 7, offsets, columns)[1]["x"], sums["x"], rtol=1e-12)
    assert torch.equal(tables.few_by_sequence(at, 7, offsets, columns["x"] > 0), few)


def test_63_codes_fit_the_narrow_numbers_of_the_lanes():
    at = torch.arange(63).repeat(3)
    counts, sums = tables.by_sequence(at, 63, torch.tensor([0, 189]), {"x": at.to(torch.float64)})

    assert counts.tolist() == [[3.0] * 63]
    assert sums["x"].tolist() == [[3.0 * i for i in range(63)]]


POSITIONS = {
    "of a table": [0, 1, 2, 3, 6, 7, 14, 15, *range(16, 300)],
    "beyond it": [0, 1, 2, 2**17 - 2, 2**17 - 1, 2**40],
    "none": [],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_the_octave_of_a_position_is_the_length_of_its_bits(name, monkeypatch):
    position = torch.tensor(POSITIONS[name], dtype=torch.int64)
    batch = SimpleNamespace(position=position)
    expected = [min((at + 1).bit_length() - 1, 17) for at in POSITIONS[name]]

    assert where._position(batch).tolist() == expected
    monkeypatch.setattr(where, "here", lambda x: False)
    assert where._position(batch).tolist() == expected


def test_the_sign_of_an_advantage_has_three_places():
    x = torch.tensor([-2.0, -0.0, 0.0, 1e-300, 5.0], dtype=torch.float64)
    assert where._sign(SimpleNamespace(advantages=x)).tolist() == [0, 1, 1, 2, 2]


def test_runs_begin_where_a_code_changes_and_end_at_the_end():
    assert tables.runs(torch.tensor([4, 4, 1, 1, 1, 4])).tolist() == [0, 2, 5, 6]
    assert tables.runs(torch.tensor([9])).tolist() == [0, 1]
    assert tables.runs(torch.zeros(0, dtype=torch.int64)).tolist() == [0]


@pytest.mark.parametrize("groups", [1, 3, 30])
def test_neighbours_of_one_group_are_added_before_they_are_drawn(groups):
    key = torch.from_numpy(np.sort(RANDOM.integers(0, groups, 60)) * 977)
    columns = {name: torch.from_numpy(RANDOM.standard_normal(60)) for name in "ab"}
    draws = resample.draws(key, 0, 16)
    one, two = Sums.of(columns, draws).read(), Sums.of(columns, draws, key).read()

    for name in "ab":
        assert one[name].tolist() == pytest.approx(two[name].tolist(), rel=1e-12, abs=1e-12)


ROWS = {
    "distinct": RANDOM.standard_normal((40, 8)),
    "mostly equal": RANDOM.standard_normal((5, 8))[RANDOM.integers(0, 5, 40)],
    "mostly zero": np.where(np.arange(40)[:, None] % 9, 0.0, RANDOM.standard_normal((40, 8))),
    "zeros of both signs": np.where(np.arange(40)[:, None] % 2, 0.0, -0.0) * np.ones(8),
    "of one product with the vector that marks": np.where(
        np.arange(40)[:, None] % 2, [np.sqrt(3.0), *[0.0] * 7], [0.0, np.sqrt(2.0), *[0.0] * 6]
    ),
    "nearly equal": np.nextafter(1.0, np.arange(40)[:, None] % 4 // 3 * 9.0) * np.ones(8),
    "one": RANDOM.standard_normal((1, 8)),
    "none": np.empty((0, 8)),
}


def distinct(rows, draws):
    """Every row drawn."""
    drawn, which = sums._of_distinct(rows, draws)
    return drawn if which is None else drawn[which]


@pytest.mark.parametrize("name", ROWS)
def test_equal_rows_are_drawn_like_any(name):
    rows, draws = ROWS[name], torch.from_numpy(RANDOM.poisson(1.0, (8, 16)).astype(np.float64))
    expected = [
        [math.fsum(a * b for a, b in zip(row, draw, strict=True)) for draw in draws.T.tolist()]
        for row in rows
    ]
    found = distinct(rows, draws)

    assert found.shape == (len(rows), 16)
    assert found.numpy() == pytest.approx(np.array(expected).reshape(-1, 16), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_rows_that_are_no_numbers_stay_apart_from_those_that_are(odd):
    rows = np.zeros((20, 4))
    rows[3, 1], rows[7, 1], rows[7, 2] = odd, odd, 5.0
    draws = torch.ones(4, 2, dtype=torch.float64)
    draws[2] = 0.0
    found = distinct(rows, draws)

    assert [at for at in range(20) if float(found[at, 0]) != 0.0] == [3, 7]


def test_a_row_that_is_no_number_does_not_keep_the_others_from_being_shared(monkeypatch):
    rows, seen, plain = np.zeros((40, 4)), [], torch.Tensor.__matmul__
    rows[5], rows[9] = math.nan, math.inf
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: seen.append(len(a)) or plain(a, b))
    distinct(rows, torch.ones(4, 2, dtype=torch.float64))

    assert seen[0] <= 9


def test_what_many_presets_share_is_multiplied_once(monkeypatch):
    rows, seen, plain = np.repeat(RANDOM.standard_normal((3, 8)), 30, axis=0), [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: seen.append(len(a)) or plain(a, b))
    distinct(rows, torch.ones(8, 4, dtype=torch.float64))

    assert 3 <= seen[0] <= 9  # the product that marks a row may be rounded by where the row stands


def test_a_group_that_comes_back_later_is_drawn_as_often_as_before():
    key = torch.tensor([5, 5, 5, 9, 9, 9, 5, 5, 5])
    draws = resample.draws(key, 0, 64)

    assert torch.equal(draws, torch.cat([resample.draws(key[i : i + 1], 0, 64) for i in range(9)]))


def test_a_number_at_a_step_of_poisson_has_reached_it():
    steps = resample._poisson_steps()
    found = resample._poisson(torch.tensor([step + by for step in steps for by in (-1, 0)]))

    assert found.tolist() == [float(n) for at in range(len(steps)) for n in (at, at + 1)]


def test_tokens_above_a_bound_are_counted_without_those_at_it():
    offsets = torch.tensor([0, 3, 3, 5])
    x = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.5], dtype=torch.float64)

    assert segments.count_above(x, 2.0, offsets).tolist() == [1.0, 0.0, 1.0]


ORDERS = {
    "shuffled": lambda x: x,
    "rising": np.sort,
    "falling": lambda x: -np.sort(-x),
    "every eighth large": lambda x: np.concatenate(np.array_split(np.sort(x), 8)).reshape(8, -1).T.ravel(),
    "all equal": np.zeros_like,
    "mostly equal": lambda x: np.maximum(x, 0.5),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [TAIL - 1, TAIL, TAIL + 1, 4 * TAIL])
@pytest.mark.parametrize("order", ORDERS)
def test_a_tail_holds_the_largest_in_whatever_order_they_come(order, n, device):
    n = n if n % 8 == 0 or order != "every eighth large" else 4 * TAIL
    x = torch.from_numpy(ORDERS[order](np.random.default_rng(n).standard_normal(n)).copy())
    tail = Tail.of(x.to(device))

    assert torch.equal(tail.top.cpu(), torch.sort(x, descending=True).values[:TAIL])
    assert len(tail.kept) <= 2 * TAIL
    assert tail.n == n


def test_a_merged_tail_stays_small_and_exact():
    parts = [torch.from_numpy(np.random.default_rng(i).standard_normal(2 * TAIL) + i % 3) for i in range(6)]
    merged = Tail.of(parts[0])
    for part in parts[1:]:
        merged = merged.merge(Tail.of(part))

    assert torch.equal(merged.top, torch.sort(torch.cat(parts), descending=True).values[:TAIL])
    assert len(merged.kept) <= 2 * TAIL


@pytest.mark.parametrize("n", [0, 1, 3, 19, 20, 21, 5000])
@pytest.mark.parametrize("values", ["distinct", "few", "equal", "zero"])
def test_the_largest_few_are_those_of_a_full_sort(n, values):
    x = {
        "distinct": RANDOM.standard_normal(n),
        "few": RANDOM.integers(-2, 3, n).astype(np.float64),
        "equal": np.ones(n),
        "zero": np.zeros(n),
    }[values]
    scores = torch.from_numpy(x)
    found = worst._largest(scores, 20)
    order = [i for i in np.argsort(-x, kind="stable").tolist() if x[i] > 0]
    last = x[order[19]] if len(order) >= 20 else 0.0

    assert found.tolist() == [i for i in order if x[i] >= last][: 20 + worst.TIES]


def test_rows_whose_large_number_hides_the_rest_in_their_mark_are_told_apart():
    rows = np.zeros((40, 4))
    rows[:, 0], rows[1::8, 1] = 1e20, [1.0, 2.0, 3.0, 4.0, 5.0]
    draws = torch.tensor([[0.0], [1.0], [1.0], [1.0]], dtype=torch.float64)

    assert distinct(rows, draws).flatten().tolist() == rows[:, 1].tolist()
