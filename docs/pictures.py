"""Photograph the reports of the sample dumps for the README and the guides: `python docs/pictures.py`.

Needs Debian's chromium and the test extra (playwright). The pictures are written to docs/pictures.
"""

from __future__ import annotations

import base64
import gzip
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "sample_data"
DUMPS = ("collapse", "stale", "quantized", "healthy")
WIDTH, HEIGHT = 1240, 1480
EXPLORED = {"by-step": ("old → current",), "histogram": ("total", "within a factor of 2"), "density": ()}
"""Charts of the collapse sample that are drawn large → the buttons that are then pressed."""
LARGE = {"width": 1100, "height": 740}


def draw(dump: str, folder: Path) -> Path:
    """Write the report of a sample dump."""
    page = folder / f"{dump}.html"
    command = [sys.executable, "-m", "offpol_diag", "analyze", str(SAMPLES / f"{dump}.parquet"), "--quiet"]
    subprocess.run([*command, "--html", str(page)], check=True)
    return page


def photograph(browser: Browser, page: Path, picture: Path) -> None:
    """Write the first screen of a page, light, as PNG."""
    view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    view.goto(page.as_uri())
    view.wait_for_timeout(1500)
    view.screenshot(path=picture)
    view.close()


def explored(browser: Browser, page: Path) -> None:
    """Write charts of a page, drawn large, as PNG."""
    view = browser.new_page(viewport=LARGE, color_scheme="light")
    view.goto(page.as_uri())
    for name, presses in EXPLORED.items():
        view.locator(f'.ex[data-chart="{name}"]').first.click()
        while not view.evaluate("performance.getEntriesByName('explored').length"):
            view.wait_for_timeout(100)  # the page's policy forbids the eval of other ways to wait
        for text in presses:
            view.locator(".xp button", has_text=text).first.click()
        view.mouse.move(LARGE["width"] / 2, LARGE["height"] * 0.62)
        view.wait_for_timeout(600)
        view.screenshot(path=HERE / "pictures" / f"explore-{name}.png")
        view.keyboard.press("Escape")
        view.evaluate("performance.clearMarks()")
    view.close()


def in_python(browser: Browser, page: Path, folder: Path) -> None:
    """Write the figure that a notebook's cell shows, as PNG."""
    from offpol_diag.api import Report
    from offpol_diag.result import loads

    held = re.search('id="offpol-diag-data">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert held is not None
    report = Report(loads(gzip.decompress(base64.b64decode(held[1])).decode(), "page"))
    figure = folder / "figure.html"
    report.figure("by_step", drift="total").write_html(figure, include_plotlyjs=True)
    view = browser.new_page(viewport={"width": 900, "height": 930}, color_scheme="light")
    view.goto(figure.as_uri())
    view.wait_for_timeout(3000)
    view.locator(".plot-container").screenshot(path=HERE / "pictures" / "figure.png")
    view.close()


def main() -> None:
    """Draw and photograph every sample."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for dump in DUMPS:
            photograph(browser, draw(dump, Path(folder)), HERE / "pictures" / f"{dump}.png")
        explored(browser, Path(folder, "collapse.html"))
        in_python(browser, Path(folder, "collapse.html"), Path(folder))
        browser.close()


if __name__ == "__main__":
    main()
