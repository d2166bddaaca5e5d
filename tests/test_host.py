"""Exponentials on the host are the same whichever library makes them."""

import math

import numpy as np
import pytest
import torch

from offpol_diag.engine import host
from tests.devices import DEVICES, present

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
    monkeypatch.setattr(host, "wide", lambda name: wide)
    expected = [plain(getattr(math, name), x) for x in X]

    found = getattr(host, name)(torch.tensor(X, dtype=torch.float64))

    assert found.tolist() == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("name", ["exp", "expm1"])
def test_a_slope_goes_through_and_what_is_not_here_is_torchs(name, monkeypatch):
    monkeypatch.setattr(host, "wide", lambda name: True)
    x = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    getattr(host, name)(x).sum().backward()
    monkeypatch.setattr(host, "here", lambda x: False)
    monkeypatch.setattr(torch.Tensor, "numpy", None)

    assert x.grad.item() == pytest.approx(math.exp(0.3))
    assert getattr(host, name)(torch.zeros(2, dtype=torch.float64)).shape == (2,)


def test_numpy_says_whether_a_kernel_is_wide(monkeypatch):
    told = {"exp": {"dd": {"current": "AVX512_SKX"}}, "expm1": {"dd": {"current": "baseline(SSE)"}}}
    monkeypatch.setattr(
        np.lib.introspect, "opt_func_info", lambda func_name, signature: {func_name: told[func_name[1:-1]]}
    )
    assert [host.wide.__wrapped__(name) for name in ("exp", "expm1")] == [True, False]
    monkeypatch.delattr(np.lib, "introspect")
    assert not host.wide.__wrapped__("exp")


def test_a_tensor_of_the_host_is_sent_only_to_another_place():
    x = torch.arange(3)

    assert host.sent(x, torch.device("cpu")) is x


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_is_the_same_there(device):
    x = torch.tensor([1.5, -math.inf, 3.0], dtype=torch.float64)
    with present(device):
        there = host.sent(x, torch.device(device))

    assert str(there.device) == device
    assert there.tolist() == x.tolist()
    assert host.sent(torch.empty(0), torch.device("cpu")).shape == (0,)
