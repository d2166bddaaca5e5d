"""How numbers are written: whatever stands in a file, there is a text, and it says the number."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from offpol_diag.analysis import readout
from offpol_diag.numerals import say, written
from offpol_diag.summary import Number

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def told(text: str) -> float:
    """The number that a text says."""
    return float(text.removesuffix("%").replace(",", "")) / (100 if text.endswith("%") else 1)


@given(FINITE, FINITE, FINITE, st.sampled_from(["", "fraction", "nats"]))
@example(0.0, 0.0, 5e-324, "")
@example(5e-324, 5e-324, 5e-324, "nats")
@example(0.0, -1.7e308, 1.7e308, "fraction")
@example(1.7e308, 1.7e308, 1.7e308, "fraction")
@example(0.5, 1.0, -1.0, "fraction")
def test_any_value_with_any_interval_has_a_text(value, low, high, unit):
    assert all(
        isinstance(text, str) for text in written(Number(value=value, interval=(low, high), unit=unit))
    )


@given(FINITE.filter(lambda x: x == 0 or 1e-290 < abs(x) < 1e300), st.sampled_from(["", "fraction"]))
def test_a_value_by_itself_is_said_to_four_digits(value, unit):
    assert told(written(Number(value=value, unit=unit)).value) == pytest.approx(value, rel=6e-4, abs=1e-290)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e3))
def test_a_value_is_said_to_a_digit_more_than_its_interval(value, half):
    text, interval = written(Number(value=value, interval=(value - half, value + half)))

    assert abs(told(text) - value) <= 0.1 * half + 1e-9 * abs(value)
    assert interval


@pytest.mark.parametrize(
    ("hits", "tries", "share"),
    [(1.0, 4.0, 0.25), (0.0, 4.0, 0.0), (0.0, 0.0, None), (-math.inf, 1.0, None), (5.0, 4.0, None)],
)
def test_a_share_of_bounded_terms_is_a_share_or_not_known(hits, tries, share):
    sums = {"bounded": torch.tensor([hits]), "tries": torch.tensor([tries])}
    out: Any = SimpleNamespace(reader=SimpleNamespace(column=lambda name, prefix: sums[name]))

    assert readout._bounded(Number(value=1.0), out, "").clamped == share


def test_nothing_is_set_beside_the_power_of_a_value_that_rounds_to_0():
    assert say(Number(value=-1e-5, interval=(-2e-3, 2e-3))) == "0 [-2, 2]e-3"
    assert say(Number(value=1e-12, interval=(-2e-8, 2e-8), unit="fraction")) == "0% [-2, 2]e-6%"
    assert say(Number(value=0.001, interval=(-0.2, 0.2))) == "0.00 [-0.2, 0.2]"
