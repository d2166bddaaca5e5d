"""Measure the size of the sample dumps' pages, and how soon Chromium shows them.

python benchmarks/page.py [--rounds N] [--write]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import part

CHROMIUM = Path("/usr/bin/chromium")
SAMPLES = part.HERE.parent / "sample_data"
RUNS: dict[str, tuple[str, ...]] = {
    **{name: ("analyze", f"{name}.parquet") for name in ("collapse", "healthy", "quantized", "stale")},
    "three presets": ("compare", "collapse.parquet", "--presets", "token_is,seq_mis,geo_rs"),
    "two runs": ("compare", "stale.parquet", "quantized.parquet"),
    "thresholds": ("sweep", "collapse.parquet", "--preset", "geo_rs"),
    "gate": ("gate", "collapse.parquet", "--max", "k3=0.015", "--max", "step:k3=0.1"),
}
"""Name of a page → the command that writes it."""
WATCH = """new MutationObserver((_, watch) => {
  if (!document.querySelector('svg.pic')) return
  watch.disconnect()
  requestAnimationFrame(() => requestAnimationFrame(() => window.firstChart = performance.now()))
}).observe(document, {childList: true, subtree: true})"""
SEEN = """(() => {
  const paint = performance.getEntriesByName('first-contentful-paint')[0]
  const ready = performance.getEntriesByType('navigation')[0]
  const ends = {text: paint?.startTime, chart: window.firstChart, script: ready.domContentLoadedEventEnd}
  return Object.values(ends).every(one => one > 0) && ends
})()"""
WIDTHS = (1400, 390)


def measure(given: part.Given) -> part.Result:
    """Measure bytes, median milliseconds from navigation in a fresh context, and height with folds closed."""
    from playwright.sync_api import sync_playwright

    load = os.getloadavg()[0]
    if not CHROMIUM.exists():
        raise part.Failed(f"{CHROMIUM} is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pages = dict(_pages(Path(folder)))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        rows = [{"page": name} | _shown(browser, path, given.rounds) for name, path in pages.items()]
        found = {"rounds": given.rounds, "load": round(load, 1), "browser": browser.version, "rows": rows}
        browser.close()
    return found


def _pages(folder: Path) -> Iterator[tuple[str, Path]]:
    for place, (name, given) in enumerate(RUNS.items()):
        path = folder / f"{place}.html"
        command = [sys.executable, "-m", "offpol_diag", *given, "--html", str(path), "--quiet"]
        subprocess.run(command, cwd=SAMPLES, stdout=subprocess.DEVNULL, check=False)  # a failed gate is 1
        yield name, path


def _shown(browser: Any, path: Path, rounds: int) -> dict[str, Any]:
    """Measure one page; each round is a fresh context, after one that is not counted."""
    taken = [_once(browser, path) for _ in range(rounds + 1)][1:]
    page = browser.new_page()
    page.goto(path.as_uri())
    heights = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        heights.append(page.evaluate("document.documentElement.scrollHeight"))
    page.close()
    found = {name: median(one[name] for one in taken) for name in taken[0]}
    return {"bytes": path.stat().st_size, "ms": found, "heights": heights}


def _once(browser: Any, path: Path) -> dict[str, float]:
    context = browser.new_context(viewport={"width": WIDTHS[0], "height": 900})
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(path.as_uri())
    while not (found := page.evaluate(SEEN)):
        page.evaluate("new Promise(requestAnimationFrame)")
    context.close()
    return dict(found)


if __name__ == "__main__":
    part.main("page", measure, __doc__)
