"""Sums of weights that are divided by their mean over a trainer batch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offpol_diag.core.preset_numbers import divided, normalised
from offpol_diag.presets import catalogue

SIZES = {"near one": 1 + 1e-7, "tiny": 1e-7, "large": 1e9, "half": 0.45, "twice": 2.1}
PRESET = next(filter(normalised, catalogue.load().values()))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sums_of_a_trainer_batch_are_exact_for_any_divisor(size):
    """Sequences of one token each."""
    weights = [size * x for x in (1.0, 1.0 + 1e-6, 0.9, 1.2)]
    first, second = math.fsum(weights), math.fsum(w * w for w in weights)
    total = {"w": first, "v": first, "ww": second, "vv": second, "norm": first, "norm_units": 4.0}
    total |= {"w1": math.fsum(w - 1 for w in weights), "w11": math.fsum((w - 1) ** 2 for w in weights)}
    total |= {"v11": math.fsum((w - 1) * (w + 1) for w in weights), "kept": 4.0, "left": 4.0}
    found = divided({f"{PRESET.name}|{name}": np.array([x]) for name, x in total.items()}, PRESET)
    f = first / 4

    def close(name, *terms):
        scale = math.fsum(map(abs, terms))
        assert float(found[f"{PRESET.name}|{name}"][0]) == pytest.approx(math.fsum(terms), abs=1e-12 * scale)

    close("w11", *((w / f - 1) ** 2 for w in weights))
    close("v11", *(w * w / f / f - 1 for w in weights))
    assert float(found[f"{PRESET.name}|w1"][0]) == pytest.approx(0, abs=1e-8)
