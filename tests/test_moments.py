"""Power sums and places of runs, against plain Python."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from offpol_diag.metrics import moments, places
from offpol_diag.metrics.moments import Tokens
from offpol_diag.metrics.products import SMALL, Products
from tests.test_series import near_batch

DEGREES = {
    (("", "", ""), ""): 1,
    (("", "", ""), "old"): 13,
    (("log", "", ""), ""): 1,
    (("probability", "", ""), "old"): 10,
    (("", "", "old"), "old"): 7,
    (("log", "", ""), "current"): 5,
    (("", "", "current"), "current"): 1,
    (("probability", "", "current"), "current"): 6,
    (("entropy", "A-", ""), "drift"): 4,
    (("", "1+", ""), "drift"): 2,
    (("log old", "A+", ""), "drift"): 11,
    (("", "1-", ""), ""): 1,
    (("", "", ""), "old ratio"): 1,
    (("", "", "current"), "current ratio"): 2,
    (("log old", "A-", ""), "drift ratio"): 1,
}
PRODUCTS, POWERS = -math.inf, math.inf
"""What a call costs where all sums are made by matrix products, and where none are."""
WANTED = [(direction, name) for direction in ("old", "current", "drift") for name in places.PLACES]


def column(batch, token, name):
    a = float(batch.advantages[token])
    return {
        "": 1.0,
        "log": float(batch.rollout[token]),
        "log old": float(batch.old[token]),
        "probability": math.exp(float(batch.rollout[token])),
        "entropy": float(batch.entropy[token]),
        "A+": max(a, 0.0),
        "A-": max(-a, 0.0),
        "1+": float(a > 0),
        "1-": float(a < 0),
    }[name]


def gap(batch, token, direction):
    if direction.endswith(" ratio"):
        return math.expm1(gap(batch, token, direction.removesuffix(" ratio")))
    below, above = {
        "old": ("rollout", "old"),
        "current": ("rollout", "current"),
        "drift": ("old", "current"),
    }[direction]
    return float(getattr(batch, above)[token]) - float(getattr(batch, below)[token])


def terms(batch, token, family, power):
    (name, side, sign), direction = family
    d = gap(batch, token, direction) if direction else 1.0
    part = column(batch, token, name) * column(batch, token, side)
    return part * (math.copysign(1, d) if sign else 1) * d**power


def runs(batch):
    ends = batch.cu_seqlens.tolist()
    return [range(a, b) for a, b in pairwise(ends) if b > a]


def expected(batch, degrees):
    for family, degree in degrees.items():
        for power in range(1, degree + 1):
            yield [[terms(batch, token, family, power) for token in run] for run in runs(batch)]


def place(values, name):
    return {
        "low": min(values),
        "high": max(values),
        "near": min(map(abs, values)),
        "far": max(map(abs, values)),
        "below": max((d for d in values if d <= 0), default=-math.inf),
        "above": min((d for d in values if d >= 0), default=math.inf),
    }[name]


def check(tokens, batch, degrees=DEGREES):
    found, ends = tokens.reduced(degrees, WANTED)
    for row, each in zip(found, expected(batch, degrees), strict=True):
        for x, values in zip(row.tolist(), each, strict=True):
            assert abs(x - math.fsum(values)) <= 1e-13 * math.fsum(map(abs, values))
    for (direction, name), x in ends.items():
        assert x.tolist() == [place([gap(batch, at, direction) for at in run], name) for run in runs(batch)]


@pytest.mark.parametrize("call", [PRODUCTS, 50.0, POWERS])
@pytest.mark.parametrize("block", [50, 1000, 1 << 15])
@pytest.mark.parametrize("piece", [1, 7, 1 << 12])
def test_sums_of_powers_are_those_of_plain_python(monkeypatch, call, block, piece):
    """By matrix products and one by one, in blocks and pieces of any length."""
    monkeypatch.setattr(moments, "CALL", call)
    monkeypatch.setattr(moments, "BLOCK", block)
    monkeypatch.setattr(moments, "PIECE", piece)
    batch = near_batch(rows=False, lengths=(0, 1, 70, 3, 0, 9, 200, 0))
    check(Tokens.of(batch), batch)


@pytest.mark.parametrize("degree", range(1, 18))
@pytest.mark.parametrize("first", ["", "log"])
def test_as_many_powers_are_summed_as_are_asked_for(monkeypatch, degree, first):
    monkeypatch.setattr(moments, "CALL", PRODUCTS)
    batch = near_batch(rows=False, lengths=(40, 3))
    more = {((name, "", ""), "old"): n for name, n in ((first, degree), ("probability", 17 - degree)) if n}
    check(Tokens.of(batch), batch, more)
    check(Tokens.of(batch), batch, {((first, "", "old"), "old"): degree})


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("block", [50, 1 << 15])
@pytest.mark.parametrize("call", [PRODUCTS, POWERS])
def test_tokens_that_are_left_out_count_as_if_they_had_been_cut_out(monkeypatch, share, block, call):
    """Whatever they hold, and wherever they stand; whole sequences may be left out."""
    monkeypatch.setattr(moments, "CALL", call)
    monkeypatch.setattr(moments, "BLOCK", block)
    batch = near_batch(rows=False, lengths=(3, 0, 1, 70, 3, 9, 200, 2))
    make = torch.Generator().manual_seed(1)
    out = torch.rand(batch.tokens, generator=make) < share
    if share:
        out[[0, 1, 2, 3, 75, 76, 77, 285, 286, 287]] = (
            True  # three sequences wholly, and the first of another one
        )
    for name in ("rollout", "old", "current", "advantages", "entropy"):
        anything = torch.tensor([math.nan, math.inf, -math.inf, 7.0], dtype=torch.float64)
        getattr(batch, name)[out] = anything.repeat(99)[: int(out.sum())]
    index, without = (torch.nonzero(at).flatten() for at in (~out, out))
    some = batch.some(index, without)
    tokens = Tokens.of(some)
    assert not {"rollout", "old"} & vars(some).keys()
    check(tokens, batch.some(index))
    assert np.array_equal(tokens.reduced(DEGREES, ())[0], tokens.reduced(DEGREES, WANTED)[0])


def test_where_many_tokens_are_left_out_the_others_are_copied():
    batch = near_batch(rows=False, lengths=(3, 0, 1, 70))
    out = torch.arange(batch.tokens) % 3 == 0
    index, without = (torch.nonzero(at).flatten() for at in (~out, out))
    check(Tokens.of(batch.some(index, without)), batch.some(index))


def test_the_advantage_of_a_run_is_that_of_the_tokens_that_count():
    batch = near_batch(lengths=(5, 4, 6))
    batch.advantages[[0, 4, 5]] = torch.tensor([9.0, math.nan, 8.0], dtype=torch.float64)
    without = torch.tensor([0, 4, 5])
    index = torch.tensor([at for at in range(15) if at not in (0, 4, 5)])
    found = Tokens.of(batch.some(index, without)).advantages()
    assert found.tolist() == [float(batch.advantages[at]) for at in (1, 6, 9)]
    assert Tokens.of(batch).advantages() is None


@pytest.mark.parametrize("different", range(-1, 12))
@pytest.mark.parametrize("out", [(), (0,), (0, 1), (2, 3), (4, 5), (3, 4, 5), (5, 6), (7, 9), (10, 11)])
def test_one_token_that_counts_and_has_another_advantage_is_found_wherever_it_stands(different, out):
    """Not one that does not count, whatever it has; nor where the advantage changes with the sequence."""
    batch = near_batch(rows=False, lengths=(4, 0, 1, 6, 1))
    batch.advantages[:] = torch.tensor([1.0, 3.0, -2.0, 0.0], dtype=torch.float64).repeat_interleave(
        torch.tensor([4, 1, 6, 1])
    )
    if different >= 0:
        batch.advantages[different] = math.nan if different % 2 else 7.0
    index = torch.tensor([at for at in range(12) if at not in out])
    some = batch.some(index, torch.tensor(out, dtype=torch.int64)) if out else batch
    each = [batch.advantages[[at for at in run if at not in out]].tolist() for run in runs(batch)]
    each = [values for values in each if values]
    found = Tokens.of(some).advantages()
    if all(value == values[0] for values in each for value in values[1:]):
        assert np.array_equal(found, [values[0] for values in each], equal_nan=True)
    else:
        assert found is None


@pytest.mark.parametrize(
    ("degrees", "length", "way"),
    [
        ({"": 1}, 4000, "powers"),
        ({"": 13}, 100, "powers"),
        ({"": 13}, 4000, "sums"),
        ({"": 13, "log": 10, "probability": 10}, 300, "sums"),
        ({"": 13, "log": 10, "probability": 10}, 60, "powers"),
    ],
)
def test_matrix_products_are_made_where_they_take_less_time(monkeypatch, degrees, length, way):
    """Of many powers, over long runs."""
    batch = near_batch(rows=False, lengths=(length, length))
    tokens = Tokens.of(batch)
    for name, where in (("powers", moments.Block), ("sums", Products)):
        if name != way:
            monkeypatch.setattr(where, name, None)
    tokens.reduced({((name, "", ""), "old"): degree for name, degree in degrees.items()}, ())


def test_powers_of_numbers_next_to_0_and_at_it():
    d = np.array([0.0, -0.0, 1e-300, -1e-300, 0.5, -0.25, 0.5, 0.25, -0.5, -0.25, -0.0, 0.5, 0.0, -0.5])
    firsts = np.array([0, 1, 2, 4, 6, 8, 10, 12])
    found = places.found(d, firsts, [*places.PLACES])
    ends = [*firsts.tolist()[1:], len(d)]
    for name, x in found.items():
        want = [place(d[a:b].tolist(), name) for a, b in zip(firsts, ends, strict=True)]
        assert x.tolist() == want, name


@pytest.mark.parametrize(
    "degrees", [{"": 1}, {"": 4}, {"": 5}, {"": 6}, {"": 13, "log": 2}, {"log": 17, "": 10}]
)
def test_every_power_has_its_place_in_a_product(degrees):
    found = Products(tuple(((part, "", ""), degree) for part, degree in degrees.items()))
    assert len({*found.places.tolist()}) == len(found.places) == sum(degrees.values())
    assert found.most * found.width * len(found.rows) <= SMALL
