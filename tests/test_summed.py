"""What is summed of many presets in one operation is what each has alone."""

import math
from dataclasses import dataclass

import pytest
import torch

from offpol_diag.engine import rows as summed
from offpol_diag.engine import segments
from offpol_diag.engine.rows import MOST, Rows, Summed, Table, left
from offpol_diag.presets import Preset
from tests.devices import DEVICES

LENGTHS = (3, 0, 1, 4)
TOKENS = sum(LENGTHS)
PRESET = Preset("p", "")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class Lot:
    """Some presets' inputs on the same tokens, or on others."""

    cu_seqlens: torch.Tensor

    @property
    def ratios(self):
        return self

    @property
    def batch(self):
        return self

    def once(self, key, make):
        return make()


@dataclass
class Done:
    """One preset applied."""

    ratios: Lot
    inputs: object


def lot(device, lengths=LENGTHS):
    return Lot(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).to(device))


def kept(x, weights, keep):
    w = 1.0 if weights is None else weights
    return {"plain": left(x, keep), "weighed": left(x * w, keep)}


PLAIN = Summed(lambda done, preset: None, lambda done, preset: done.inputs, kept)
LARGEST = Summed(lambda done, preset: None, lambda done, preset: done.inputs, kept, MOST)


def some(device):
    """Presets that share inputs, lack them, lie on other tokens, or have their sums already."""
    here, there = lot(device), lot(device, (2, 2, 2, 2))
    torch.manual_seed(0)
    x, y, w = (torch.randn(TOKENS, dtype=torch.float64).to(device) for _ in range(3))
    x[1] = math.inf
    some, few = (torch.randn(TOKENS).to(device) > 0 for _ in range(2))
    some[1] = False
    every = {name: tensor(1, 2, 3, 4).to(device) for name in ("plain", "weighed")}
    on_here = (
        (x, None, some),
        (x, w, some),
        (y, None, None),
        (x, None, few),
        every,
        (x, None, some),
        (y, w, few),
    )
    return [*(Done(here, one) for one in on_here), Done(there, (y, None, some)), Done(there, every)]


def close(one, two):
    torch.testing.assert_close(one.cpu(), two.cpu(), rtol=1e-15, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [PLAIN, LARGEST], ids=["sums", "largest"])
@pytest.mark.parametrize("at_once", [1, 2 * TOKENS, 1 << 17])
def test_each_of_many_presets_has_what_it_has_alone(device, make, at_once, monkeypatch):
    monkeypatch.setattr(summed, "AT_ONCE", at_once)
    monkeypatch.setattr(summed, "OF_GPU", at_once)
    asked = [(one, PRESET) for one in some(device)]
    found = make.of_many(asked).columns

    assert found.keys() == {"plain", "weighed"}
    for at, one in enumerate(asked):
        for name, alone in make(*one).items():
            close(found[name].of_preset(at), alone)


def test_what_a_token_that_is_left_out_has_is_not_seen():
    lost = Done(lot("cpu"), (tensor(math.inf, math.nan, 1, 2, 3, 4, 5, 6), None, torch.arange(TOKENS) > 1))

    assert PLAIN.of_many([(lost, PRESET)]).columns["plain"].all.tolist() == [[1, 0, 2, 18]]


def test_presets_with_the_same_inputs_share_a_row():
    asked = [(one, PRESET) for one in some("cpu")]

    assert len(PLAIN.of_many(asked[:1] + asked[5:6] + asked[:2]).rows.values) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_more_presets_take_no_more_operations(device, monkeypatch):
    reduced = []
    plain = segments.of_rows
    monkeypatch.setattr(segments, "of_rows", lambda *given: reduced.append(len(given[1])) or plain(*given))
    here = lot(device)
    many = [(Done(here, (torch.randn(TOKENS).to(device), None, None)), PRESET) for _ in range(50)]
    PLAIN.of_many(many)

    assert reduced == ([50, 50] if device == "cpu" else [100])


def test_tables_are_joined_preset_by_preset():
    one, two = ({"a": tensor(1, 2), "b": tensor(3, 4)}, {"a": tensor(5, 6), "b": tensor(7, 8)})
    table = Table.of([one, two, one])

    assert len(table.rows.values) == 2
    assert Table.of([{"a": one["a"]}]).columns["a"].all.tolist() == [[1, 2]]
    added = table.joined(Table.of([two, one, one]), torch.add).columns
    assert added["a"].all.tolist() == [[6, 8], [6, 8], [2, 4]]
    assert added["b"].all.tolist() == [[10, 12], [10, 12], [6, 8]]
    woven = Table.woven(
        {(2, 0): Table.of([one, two]), (1,): Table(("a", "b"), Rows(tensor(9, 9, 9, 9).view(1, 2, 2), (0,)))}
    )
    assert woven.columns["a"].all.tolist() == [[5, 6], [9, 9], [1, 2]]
    assert woven.of_presets([1, 1]).columns["b"].all.tolist() == [[9, 9], [9, 9]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_term_that_nothing_tells_apart_has_a_row_for_each(device):
    """Where what presets differ in is no part of it."""
    at, x = lot(device), torch.arange(TOKENS, dtype=torch.float64).to(device)
    own = [torch.full((TOKENS,), size, dtype=torch.float64).to(device) for size in (2.0, 3.0)]
    apart = Summed(
        lambda done, preset: None, lambda done, preset: done.inputs, lambda x, w: {"x": x, "w": x * w}
    )
    asked = [(Done(at, (x, w)), PRESET) for w in own]

    table = apart.of_many(asked)
    for name, rows in table.columns.items():
        want = [apart(done, preset)[name].tolist() for done, preset in asked]
        assert rows.all.tolist() == want
