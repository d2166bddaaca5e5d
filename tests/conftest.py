"""Mark the modules that slow.txt names: `scripts/check` leaves them out, and CI runs them after it."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").split())
"""Modules whose tests take more than a few seconds together, or that measure a time."""

ALONE = frozenset({"test_pool", "test_ray"})
"""Slow modules that start many processes: nothing may run beside them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of a slow module."""
    assert ALONE <= SLOW
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)
