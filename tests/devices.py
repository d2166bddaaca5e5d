"""Devices that tests run on: the CPU, and the first GPU where there is one.

Tests of numbers take the device as a parameter, so those on a GPU are the same tests.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

REAL = torch.cuda.is_available()
_GPU = pytest.mark.skipif(not REAL, reason="NO GPU HERE: what runs on CUDA was not tested")


def gpu(*values: Any, name: str | None = None) -> Any:
    """Return a pytest parameter that is skipped without a GPU."""
    return pytest.param(*values, marks=_GPU, id=name)


def numbers(model: Any) -> Any:
    """Return a Result without what no two runs share."""
    return model.model_dump(mode="json", exclude={"run"})


def same(one: Any, two: Any) -> bool:
    """Tell whether values are equal to 1e-9, through dicts and lists."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-12)
    return one == two
