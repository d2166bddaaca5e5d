"""Devices that tests run on: the CPU, and the first GPU where there is one, else an emulated one.

Tests of numbers take the device as a parameter, so those on a GPU are the same tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests import pretended

REAL = torch.cuda.is_available()
_GPU = pytest.mark.skipif(not REAL, reason="NO GPU HERE: what runs on CUDA was not tested")
_PRETENDED = pytest.mark.skipif(REAL, reason="a real GPU is here")


def gpu(*values: Any, name: str | None = None) -> Any:
    """Return a pytest parameter that is skipped without a GPU."""
    return pytest.param(*values, marks=_GPU, id=name)


def like_gpu(*values: Any, name: str = "pretended") -> Any:
    """Return a pytest parameter that runs on the emulated GPU, and is skipped if there is a real one."""
    return pytest.param(*values, marks=_PRETENDED, id=name)


@contextmanager
def present(device: str) -> Iterator[None]:
    """Make torch report a device of a kind within the block, also an emulated one."""
    if device == "cpu" or REAL:
        yield
        return
    with pretended.gpus():
        yield


def numbers(model: Any) -> Any:
    """Return a Result without what no two runs share."""
    found = model.model_dump(mode="json")
    del found["run"]
    return found


def same(one: Any, two: Any) -> bool:
    """Tell whether values are equal to 1e-9, through dicts and lists."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-12)
    return one == two
