"""Up to where the metadata of a dump excuse K3, by published rows."""

from __future__ import annotations

import pytest

from offpol_diag.diagnosis.metadata import FLOORS, PLAIN, QUANTISED, Metadata

BF16 = {"rollout_dtype": "bfloat16"}


def test_every_row_has_a_source_a_range_and_a_known_number_format():
    assert len(FLOORS) >= 9
    assert all(one.source and one.regime and 0 <= one.low < one.high for one in FLOORS)
    assert {one.precision for one in FLOORS} <= {*QUANTISED, *PLAIN}
    assert all(word == word.lower() for one in FLOORS for word in one.says)


@pytest.mark.parametrize(
    ("provenance", "most"),
    [
        (BF16, 0.01),
        (BF16 | {"trainer": "prime-rl"}, 0.01),
        (BF16 | {"model": "Mixtral-8x7B"}, 0.3),
        ({"quantization": "fp8"}, 0.15),
        ({"quantization": "awq"}, 0.3),
        ({"quantization": "nvfp4"}, 0.3),
        ({}, 0.3),
    ],
)
def test_ten_times_what_is_published_of_a_format_is_excused_and_of_none_more_than_0_3(provenance, most):
    assert Metadata.of(provenance).ceiling == pytest.approx(most)
