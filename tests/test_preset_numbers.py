"""Weights that are divided by their mean over a trainer batch, whose sums are divided when they are read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offpol_diag.core import preset_numbers
from offpol_diag.presets import Preset, Weight

SIZES = {"near one": 1 + 1e-7, "tiny": 1e-7, "large": 1e9, "half": 0.45, "twice": 2.1}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sums_of_a_trainer_batch_are_exact_for_any_divisor(size):
    """Two sequences were dropped; the others have one token each, so that v is w."""
    weights = [size * x for x in (1.0, 1.0 + 1e-6, 0.9, 1.2)]
    first, second = math.fsum(weights), math.fsum(w * w for w in weights)
    total = {"w": first, "v": first, "ww": second, "vv": second, "norm": first, "norm_units": 4.0}
    total |= {"w1": math.fsum(w - 1 for w in weights), "w11": math.fsum((w - 1) ** 2 for w in weights)}
    total |= {"v11": math.fsum((w - 1) * (w + 1) for w in weights), "kept": 4.0, "left": 4.0, "loss": 3.0}
    preset, f = Preset("normed", "", weight=Weight(normalize=True), loss="reinforce"), first / 4
    sums = {f"normed|{name}": np.array([x]) for name, x in total.items()}
    found = {name: float(x[0]) for name, x in preset_numbers.divided(sums, preset).items()}

    wanted = {
        "w": [w / f for w in weights],
        "w1": [w / f - 1 for w in weights],
        "w11": [(w / f - 1) ** 2 for w in weights],
        "v11": [w * w / f / f - 1 for w in weights],
        "loss": [3.0 / f],
    }
    for name, terms in wanted.items():
        room = 1e-12 * math.fsum(map(abs, terms))
        assert found[f"normed|{name}"] == pytest.approx(math.fsum(terms), abs=room), name
    assert found["normed|kept"] == 4
    assert "normed|norm" not in found


def test_metrics_have_names_of_their_own():
    names = [row.name for row in (*preset_numbers.ROWS, *preset_numbers.LOSSES, preset_numbers.AT_LAG_0)]
    assert len(names) == len(set(names))
    able = Preset("any", "", weight=Weight(upper=2.0))
    assert preset_numbers.idle(able) < set(names)
