"""Mark the modules that slow.txt names: `scripts/check` leaves them out, and CI runs them after it.

And what tests of the page share: Debian's chromium, driven by playwright.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--no-first-run"]
FLAGS += [f"--disable-{one}" for one in ("gpu", "quic", "background-networking", "component-update", "sync")]

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a browser; skip the test where there is none, except in CI."""
    if not CHROMIUM.exists():
        if "CI" in os.environ:
            pytest.fail(f"{CHROMIUM} is missing: apt-get install chromium")
        pytest.skip(f"THE PAGE IS NOT TESTED: {CHROMIUM} is missing")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a fresh context; what the page says and asks for is kept on it."""
    contexts = []

    def open_page(address: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options}))
        page = contexts[-1].new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
