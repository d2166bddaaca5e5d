"""Sums of a preset whose weights are divided by their mean, however far from 1 that is."""

import math

import pytest
import torch

from offpol_diag.engine import normal
from offpol_diag.presets import catalogue

SIZES = {"near one": 1 + 1e-7, "tiny": 1e-7, "large": 1e9, "half": 0.45, "twice": 2.1}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_a_trainer_batch_leaves_is_exact_whatever_its_weights_are_divided_by(size):
    """Two sequences were dropped; the others have one token each."""
    weights = [size * x for x in (1.0, 1.0 + 1e-6, 0.9, 1.2)]
    f = math.fsum(weights) / 4
    found = normal.rescaled(sums(weights), preset())

    def close(name, *terms):
        scale = math.fsum(map(abs, terms))
        assert float(found[f"{preset().name}|{name}"]) == pytest.approx(math.fsum(terms), abs=1e-12 * scale)

    close("w11", *((w / f - 1) ** 2 for w in weights))
    close("residual_ww", *(w * w / f / f - 1 for w in weights))
    close("residual_vv", *(w * w / f / f - 1 for w in weights))


def preset():
    return next(one for one in catalogue.load().values() if normal.normalised([one]))


def sums(weights):
    total = {
        "w": math.fsum(weights),
        "v": math.fsum(weights),
        "ww": math.fsum(w * w for w in weights),
        "vv": math.fsum(w * w for w in weights),
        "w11": math.fsum((w - 1) ** 2 for w in weights),
        "kept": 4.0,
        "residual_left": 4.0,
        "residual_ww": math.fsum((w - 1) * (w + 1) for w in weights),
        "residual_vv": math.fsum((w - 1) * (w + 1) for w in weights),
        "norm": math.fsum(weights),
        "norm_units": 4.0,
    }
    return {f"{preset().name}|{name}": torch.tensor([x], dtype=torch.float64) for name, x in total.items()}
