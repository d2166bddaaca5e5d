"""Numbers of many presets made at once are what each preset has alone, under its own name."""

import math
from dataclasses import dataclass

import pytest
import torch

from offpol_diag.engine import segments
from offpol_diag.engine.outcome import Outcomes
from offpol_diag.engine.rows import Columns, Rows, Summed, joined, masked
from offpol_diag.presets import Preset
from tests.devices import DEVICES

LENGTHS = (3, 0, 1, 4)
TOKENS = sum(LENGTHS)


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


def of(values, at):
    return Rows(torch.tensor(values, dtype=torch.float64), at)


A = of([[1, 2], [3, 4]], (0, 1, 0, 1))
B = of([[5, 6], [7, 8]], (0, 0, 1, 1))


# ---------------------------------------------------------------- rows of presets


def test_the_same_tensor_is_one_row():
    x, y = torch.zeros(2), torch.ones(2)
    found = Rows.of_tensors([x, y, x, torch.zeros(2)])
    assert found.at == (0, 1, 0, 2)
    assert found.all.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]

    one, two = {"a": row(1, 2), "b": row(3, 4)}, {"a": row(5, 6), "b": row(7, 8)}
    several = Rows.of_columns([one, two, one])
    assert several.values.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert several.at == (0, 1, 0)


def test_every_combination_that_occurs_is_made_once():
    sizes = []

    def times(x, y):
        sizes.append(len(x))
        return x * y

    thrice = joined(times, A, of([[1, 1], [2, 2]], (0, 1, 0, 1)))
    found = joined(times, A, B)

    assert sizes == [2, 4]
    assert torch.equal(found.all, A.all * B.all)
    assert thrice.all.tolist() == [[1, 2], [6, 8], [1, 2], [6, 8]]


# ---------------------------------------------------------------- sums over tokens


@dataclass
class Tokens:
    """Some presets' tokens, where their ratios and their batch are looked for."""

    cu_seqlens: torch.Tensor

    @property
    def batch(self):
        return self


@dataclass
class Done:
    """One preset applied."""

    far: Tokens
    inputs: object


def tokens(device, lengths=LENGTHS):
    return Tokens(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).to(device))


def kept(x, weights, keep):
    w = 1.0 if weights is None else weights
    return {"plain": masked(x, keep), "weighed": masked(x * w, keep)}


PLAIN = Summed(lambda done: done.inputs, kept, dict)
LARGEST = Summed(lambda done: done.inputs, kept, dict, segments.largest, torch.maximum)


def some(device):
    """Presets that share inputs, lack them, lie on other tokens, or have their sums already."""
    here, there = tokens(device), tokens(device, (2, 2, 2, 2))
    torch.manual_seed(0)
    x, y, w = (torch.randn(TOKENS, dtype=torch.float64).to(device) for _ in range(3))
    x[1] = math.inf
    most, few = (torch.randn(TOKENS).to(device) > 0 for _ in range(2))
    most[1] = False
    every = {name: row(1, 2, 3, 4).to(device) for name in ("plain", "weighed")}
    on_here = ((x, None, most), (x, w, most), (y, None, None), (x, None, few), every, (x, None, most))
    each = [Done(here, one) for one in (*on_here, (y, w, few))]
    return [*each, Done(there, (y, None, most)), Done(there, every)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [PLAIN, LARGEST], ids=["sums", "largest"])
@pytest.mark.parametrize("at_once", [1, 2 * TOKENS, 1 << 17])
def test_each_of_many_presets_has_the_sums_that_it_has_alone(device, make, at_once, monkeypatch):
    monkeypatch.setattr(segments, "AT_ONCE", at_once)
    monkeypatch.setattr(segments, "OF_GPU", at_once)
    asked = some(device)
    names, found = make.of_many(asked)

    assert names == ("plain", "weighed")
    for at, one in enumerate(asked):
        alone = torch.stack([*make(one).values()])
        mine = found.values[found.at[at]]
        torch.testing.assert_close(mine.cpu(), alone.cpu(), rtol=1e-15, atol=1e-15, equal_nan=True)
    assert len(make.of_many(asked[:1] + asked[5:6] + asked[:2])[1].values) == 2, "equal inputs share a row"


def test_tokens_that_are_left_out_may_be_infinite_or_undefined():
    lost = Done(tokens("cpu"), (row(math.inf, math.nan, 1, 2, 3, 4, 5, 6), None, torch.arange(TOKENS) > 1))

    assert PLAIN.of_many([lost])[1].values[:, 0].tolist() == [[1, 0, 2, 18]]


# ---------------------------------------------------------------- named columns


def _read(columns):
    return dict(zip(columns.names, columns.values.tolist(), strict=True))


class _Scene:
    counts = {"tokens": row(3, 4)}  # noqa: RUF012


def test_a_column_of_many_presets_has_a_row_under_each_ones_name():
    presets = (Preset("x", "", "old"), Preset("y", "", "old"))
    outcomes = Outcomes(_Scene(), presets, ())
    named = outcomes.named({"own": Rows(torch.stack((row(5, 6), row(1, 2))), (1, 0)), "shared": row(8, 9)})

    assert _read(named) == {"x|own": [1, 2], "y|own": [5, 6], "x|shared": [8, 9], "y|shared": [8, 9]}


def test_names_of_one_tensor_share_a_row_and_those_of_equal_ones_do_not():
    x, y = row(1, 2), row(3, 4)
    columns = Columns.of({"a": x, "b": y, "c": x, "d": x.clone()})

    assert columns.names == ("a", "b", "c", "d")
    assert columns.rows.tolist() == [[1, 2], [3, 4], [1, 2]]
    assert columns.which is not None
    assert columns.which.tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize("columns", [(0, 2, 5), (4, 1), (3,), (), range(6)])
def test_some_columns_keep_their_names_and_bring_no_other_rows(columns):
    one = Columns(("a", "b", "c"), (torch.stack((row(1, 2), row(3, 4))),), torch.tensor([1, 0, 1]))
    two = Columns(("d", "e", "f"), (row(5, 6)[None], torch.stack((row(7, 8), row(9, 0)))))
    every = Columns.joined(one, two)
    some = every.only(columns)

    assert _read(some) == {every.names[at]: _read(every)[every.names[at]] for at in columns}
    assert _read(some.trimmed) == _read(some)
    assert some.trimmed.height == len({tuple(row) for row in _read(some).values()})
