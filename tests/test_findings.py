"""The findings that titles and colours of the page state."""

from __future__ import annotations

from pathlib import Path

import pytest

import offpol_diag
from offpol_diag.report.sections.charts import pictures
from offpol_diag.report.sections.tokens import shade

SAMPLES = Path(__file__).parents[1] / "sample_data"


@pytest.mark.parametrize(("delta", "look"), [(0.05, ""), (0.2, "1"), (0.8, "2"), (3.0, "3"), (8.0, "4")])
def test_a_token_is_coloured_by_direction_and_size(delta: float, look: str) -> None:
    """Orange (n) where the trainer finds it less likely, blue (p) where more."""
    assert shade(-delta) == (f"n{look}" if look else "")
    assert shade(delta) == (f"p{look}" if look else "")


def test_a_collapse_is_dated_by_the_worst_band_that_k3_enters() -> None:
    report = offpol_diag.analyze([str(SAMPLES / "collapse.parquet")], presets="token_is", device="cpu")
    titles = [picture.title for picture in pictures(report.summary)]

    assert "K3 passes 0.1 at step 4; from step 3 to 8 the mean reward falls from 0.69 to 0" in titles
