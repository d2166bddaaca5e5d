"""Photograph the reports of the sample dumps for the README and the guides: `python docs/pictures.py`.

Needs Debian's chromium and the test extra (playwright). The pictures are written to docs/pictures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "sample_data"
DUMPS = ("collapse", "stale")
WIDTH, HEIGHT = 1240, 1480


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


def main() -> None:
    """Draw and photograph them."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for dump in DUMPS:
            photograph(browser, draw(dump, Path(folder)), HERE / "pictures" / f"{dump}.png")
        browser.close()


if __name__ == "__main__":
    main()
