"""Check that every number in a file has a text, and that the text gives the number."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offpol_diag.number import Number
from offpol_diag.numerals import format_number, format_value, formatted, minus

FINITE = st.floats(allow_nan=False, allow_infinity=False)
UNITS = st.sampled_from(["", "nats", "fraction"])


def parsed(text: str) -> float:
    """Parse the number of a text, or the bound that stands for it."""
    return float(text.lstrip("<>").removesuffix("%").replace(",", "")) / (100 if text.endswith("%") else 1)


@given(FINITE, FINITE, FINITE, UNITS)
@example(0.0, 0.0, 5e-324, "")
@example(1.7e308, 1.7e308, 1.7e308, "fraction")
def test_any_value_with_any_interval_has_a_text(value, low, high, unit):
    found = formatted(Number(value=value, interval=(low, high), unit=unit))
    assert all(isinstance(text, str) for text in found)


@given(FINITE.filter(lambda x: x == 0 or 1e-290 < abs(x) < 1e300), UNITS)
def test_a_measured_value_is_said_to_two_digits_and_a_bound_to_four(value, unit):
    near = {"abs": 1e-290}
    measured = parsed(formatted(Number(value=value, unit=unit)).value)
    assert measured == pytest.approx(value, rel=0.051, **near)
    assert parsed(format_value(value, unit)) == pytest.approx(value, rel=6e-4, **near)


@given(st.floats(1e-9, 1e3), st.floats(-17, 0), UNITS)
@example(0.1234567890123456, -17, "")
@example(0.25, -15.5, "fraction")
@example(0.99999, -4.0, "fraction")
def test_no_value_and_no_end_has_more_than_six_digits_however_narrow_the_interval(value, width, unit):
    ends = (value * (1 - 10**width), value * (1 + 10**width))
    text, interval = formatted(Number(value=value, interval=ends, unit=unit))

    digits = (re.sub("e.*|[^0-9]", "", one).lstrip("0") for one in (text, *interval.split(", ")))
    assert max(map(len, digits)) <= 6
    assert bool(interval) is not math.isclose(*ends, rel_tol=1e-13)
    near = 1.1e-4 if text.startswith((">", "<")) else 5.1e-5  # just below 100%, or just above
    rounding = 0.06 * value * (not interval)
    assert abs(parsed(text) - value) <= max(0.51 * value * 10**width, 6e-6 * value, near, rounding)


@given(st.floats(0.98, 1.02), st.floats(0, 0.2), st.floats(0, 0.2))
def test_no_share_beside_1_is_rounded_to_it(value, below, above):
    ends = (value - below, value + above)
    shown = formatted(Number(value=value, interval=ends, unit="share"))
    said = [shown.value, *shown.interval.strip("[]").split(", ")] if shown.interval else [shown.value]
    for number, text in zip((value, *ends), said, strict=False):
        assert (parsed(text) == 1.0) is (number * 100 == 100), text
    assert (parsed(format_value(value, "share")) == 1.0) is (abs(value - 1) < 1e-14)


@pytest.mark.parametrize(
    ("value", "interval", "unit", "text"),
    [
        (0.2554, (0.19, 0.3434), "nats", "0.26 [0.19, 0.34]"),
        (0.16, (0.0086, 0.8), "fraction", "16% [0.86%, 80%]"),
        (15163.0, (4828.0, 47622.0), "", "15,000 [4,800, 48,000]"),
        (15163.2, None, "", "15,160"),
        (1.0012, None, "", "1.001"),
        (0.000721, None, "nats", "0.00072"),
        (2.03e-5, (1.9e-5, 2.2e-5), "nats", "2.0e-5 [1.9e-5, 2.2e-5]"),
        (-0.0, None, "", "0"),
        (0.0123456789, (0.0123456788, 0.012345679), "", "0.0123457 [0.0123457, 0.0123457]"),
        (0.0123456789, (0.0123456789, math.nextafter(0.0123456789, 1)), "", "0.012"),
        (0.3, (0.29995, 0.30005), "", "0.30000 [0.29995, 0.30005]"),
        (1234567.89, (1234000.0, 1235000.0), "", "1.2346e6 [1.2340e6, 1.2350e6]"),
        # rounding up to a power of ten adds no digit, and beside 0 stands no power
        (9.97, (8.0, 12.0), "", "10 [8.0, 12]"),
        (0.0996, None, "", "0.10"),
        (-1e-5, (-2e-3, 2e-3), "", "0 [-0.0020, 0.0020]"),
        (1e-12, (-2e-8, 2e-8), "fraction", "0% [-2.0e-6%, 2.0e-6%]"),
        # a share is 100% where it is 1, and nowhere else
        (0.9966, (0.98, 0.9999), "fraction", "99.7% [98%, 99.99%]"),
        (0.99993, (0.95, 0.99999), "fraction", "99.99% [95%, >99.99%]"),
        (0.999996, (0.999994, 1.0), "fraction", ">99.99% [>99.99%, 100%]"),
        (1.0, (1.0, 1.0), "fraction", "100%"),
        (1.00001, None, "fraction", "<100.01%"),
        (0.0, (0.0, 0.007), "fraction", "0% [0%, 0.70%]"),
    ],
)
def test_digits(value, interval, unit, text):
    assert format_number(Number(value=value, interval=interval, unit=unit)) == text


def test_a_number_without_a_value_is_its_power_of_ten_or_the_reason_and_an_unreliable_one_is_marked():
    assert format_number(Number(log10=45.2)) == "10^45.2"
    assert (
        format_number(Number(unknown="missing column entropy")) == "cannot be known: missing column entropy"
    )
    given = Number(value=0.16, interval=(0.0086, 0.8), unit="fraction", note="unreliable: k̂ = 0.97")
    assert format_number(given) == "16% [0.86%, 80%], unreliable"
    assert formatted(given) == ("16%*", "[0.86%, 80%]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("K1 is -0.011 [-0.013, -.01]; −1", "K1 is −0.011 [−0.013, −.01]; −1"),
        ("from -7 → -1 (-3)", "from −7 → −1 (−3)"),
        ("prompt-17 on 2025-11-07: 1.2e-5", "prompt-17 on 2025-11-07: 1.2e-5"),
        ("`--min k1 -0.1`, k1=-0.1, --at -1", "`--min k1 -0.1`, k1=-0.1, --at −1"),
    ],
)
def test_a_hyphen_before_a_number_is_read_as_a_minus_sign_and_no_other(text, said):
    assert minus(text) == said
