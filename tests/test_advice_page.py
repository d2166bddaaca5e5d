"""docs/advice.md: written from what is kept, and from nothing else."""

from __future__ import annotations

import re

from benchmarks.advice import page
from benchmarks.advice.regimes import regimes


def test_the_page_is_made_of_the_results_that_are_kept() -> None:
    assert page.DOCS.read_text(encoding="utf-8") == page.text(page.results()), "run `page.write()`"


def test_every_regime_was_measured() -> None:
    kept = page.results()["regimes"]

    assert [row["name"] for row in kept] == [one.name for one in regimes()]


def test_the_page_changes_when_a_result_does() -> None:
    kept = page.results()
    for row in kept["regimes"]:
        row["reached"] = {batch: dict.fromkeys(found, 0.5) for batch, found in row["reached"].items()}

    text = page.text(kept)

    assert re.search(r"\| recommend \| 0\.500 / 0\.500", text)
    assert text != page.DOCS.read_text(encoding="utf-8")
