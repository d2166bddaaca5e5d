"""Mark the modules that slow.txt names: `scripts/check` leaves them out, and CI runs them after it."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").split()
"""Modules whose tests take more than a few seconds together, the slowest first."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import slow modules where they are left out: some need the libraries of the `slow` extra."""
    return True if config.option.markexpr == "not slow" and collection_path.stem in SLOW else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of a slow module; run the slowest first, so that no worker has one left at the end."""
    order = {name: at for at, name in enumerate(SLOW)}
    for item in items:
        if item.path.stem in order:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: order.get(item.path.stem, -1))
