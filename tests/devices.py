"""Devices that tests run on: the CPU, and the first GPU where there is one.

Tests of numbers take the device as a parameter, so those on a GPU are the same tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU HERE: what runs on CUDA was not tested"
)


def gpu(*values: Any) -> Any:
    """A parameter that needs a GPU."""
    return pytest.param(*values, marks=_GPU)


DEVICES = ("cpu", gpu("cuda:0"))
