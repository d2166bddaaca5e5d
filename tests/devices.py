"""Devices that tests run on: the CPU, and the first GPU where there is one, else a pretended one.

Tests of numbers take the device as a parameter, so those on a GPU are the same tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests import pretended

REAL = torch.cuda.is_available()
_GPU = pytest.mark.skipif(not REAL, reason="NO GPU HERE: what runs on CUDA was not tested")
_PRETENDED = pytest.mark.skipif(REAL, reason="a real GPU is here")
_LIBRARY = None if REAL else pretended.install()


def gpu(*values: Any, name: str | None = None) -> Any:
    """Return a pytest parameter that is skipped without a GPU."""
    return pytest.param(*values, marks=_GPU, id=name)


def like_gpu(*values: Any, name: str = "pretended") -> Any:
    """Return a pytest parameter that runs on the emulated GPU, and is skipped if there is a real one."""
    return pytest.param(*values, marks=_PRETENDED, id=name)


@contextmanager
def present(device: str) -> Iterator[None]:
    """Make torch report the device within the block, also an emulated one."""
    if device == "cpu" or REAL:
        yield
        return
    with pretended.gpus():
        yield


DEVICES = ("cpu", gpu("cuda:0"), like_gpu("cuda:0"))
