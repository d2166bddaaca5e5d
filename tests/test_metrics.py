"""The table of numbers: names, directions, bands and published levels."""

from itertools import pairwise

import pytest

from offpol_diag.metrics import BANDS, METRICS, band
from offpol_diag.number import Number


def test_names_and_titles_are_unique():
    assert len({one.title for one in METRICS.values()}) == len(METRICS)


@pytest.mark.parametrize("name", BANDS)
def test_bands_follow_each_other_towards_the_worse(name):
    rows, down = BANDS[name], METRICS[name].worse.sign == "lower"
    assert (rows[0].high if down else rows[0].low) is None
    assert (rows[-1].low if down else rows[-1].high) is None
    for one, following in pairwise(rows):
        end = one.low if down else one.high
        assert end == (following.high if down else following.low)
        assert band(name, Number(value=max(end * (1.01 if down else 0.9999), 0.0))) == one


@pytest.mark.parametrize(
    ("value", "log10", "name"), [(None, 400.0, "high"), (None, None, None), (1.5, None, "elevated")]
)
def test_a_value_beyond_float64_has_the_worst_band(value, log10, name):
    found = band("chi2_token", Number(value=value, log10=log10))
    assert (found and found.name) == name
