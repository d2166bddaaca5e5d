"""The page in a real browser: Debian's chromium, driven by playwright."""

import os
import time
from pathlib import Path

import pytest
from factory import crowded, make_summary

from offpol_diag.report.render.html import render_html

pytestmark = pytest.mark.browser

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
FIGURES = render_html(make_summary()).count('class="plot"')
DRAWN = "document.querySelectorAll('.plot .main-svg:first-child').length"
SCROLL = """async () => {
  for (let y = 0; y < document.body.scrollHeight; y += 300) {
    scrollTo(0, y)
    await new Promise(done => setTimeout(done, 30))
  }
}"""


WATCH_PRINT = """addEventListener('beforeprint', () => window.seen = {
  background: getComputedStyle(document.body).backgroundColor,
  closed: document.querySelectorAll('details.table:not([open])').length,
})"""


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM.exists():
        if "CI" in os.environ:
            pytest.fail(f"{CHROMIUM} is missing: apt-get install chromium")
        pytest.skip(f"THE PAGE IS NOT TESTED: {CHROMIUM} is missing")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(make_summary()), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "crowd.html"
    path.write_text(render_html(crowded()), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def visit(browser, address):
    """Open the page in a fresh context with the given options; what it says and asks for is kept on it."""
    contexts = []

    def visit(where=address, **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}))
        page = contexts[-1].new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(where)
        return page

    yield visit
    for context in contexts:
        context.close()


def background(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def until(page, condition: str) -> None:
    """Ask from outside: the page's own policy forbids the eval that playwright's waiting needs."""
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def drawn_all(page) -> None:
    until(page, f"{DRAWN} === {FIGURES}")


def test_every_chart_is_drawn_after_scrolling_without_an_error_or_a_request(visit, address):
    page = visit()
    page.evaluate(SCROLL)
    drawn_all(page)
    assert page.said == []
    assert page.asked == [address]


def test_charts_below_the_fold_wait_until_they_are_near(visit):
    page = visit()
    until(page, "window.Plotly !== undefined")
    assert page.evaluate(DRAWN) < FIGURES


def test_the_page_reads_with_javascript_off(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("#verdict .label").first.is_visible()
    assert page.locator("#table-presets tbody tr").count() > 5
    assert page.locator("#table-presets tbody tr").first.is_visible()
    assert page.locator("#figure-where-step-k3 figcaption").is_visible()
    assert page.locator("#figure-where-step-k3 td").first.is_visible()
    assert not page.locator(".plot").first.is_visible()
    assert not page.locator("button.theme").is_visible()


def test_the_theme_follows_the_system_and_the_toggle_is_remembered(visit):
    page = visit(color_scheme="dark")
    dark = background(page)
    assert dark != background(visit(color_scheme="light"))
    page.locator("button.theme").click()
    light = background(page)
    assert light != dark
    page.reload()
    assert background(page) == light


def test_charts_take_the_colours_of_the_theme(visit):
    page = visit(color_scheme="light")
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.wait_for_selector(".plot .js-line", timeout=60_000)
    colour = "getComputedStyle(document.querySelector('.plot .scatter:last-child .js-line')).stroke"
    light = page.evaluate(colour)
    page.locator("button.theme").click()
    until(page, f"{colour} !== '{light}'")


@pytest.mark.parametrize("width", [380, 1280])
def test_the_body_never_scrolls_sideways(visit, width):
    page = visit(viewport={"width": width, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.evaluate(SCROLL)
    drawn_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_print_draws_every_chart_and_opens_every_table(visit):
    page = visit(color_scheme="dark")
    until(page, "window.Plotly !== undefined")
    assert page.evaluate(DRAWN) < FIGURES
    dark = background(page)
    page.evaluate(WATCH_PRINT)
    assert page.pdf().startswith(b"%PDF")
    drawn_all(page)
    assert page.evaluate("seen.background") == "rgb(255, 255, 255)"
    assert page.evaluate("seen.closed") == 0
    assert background(page) == dark
    assert page.said == []


def test_a_click_on_a_column_sorts_by_value_and_a_second_turns_it_round(visit):
    page = visit()
    column = "[...document.querySelectorAll('#table-presets tbody tr')].map(row => row.cells[0].innerText)"
    ess = page.locator("#table-presets thead th", has_text="ess_sequences")
    ess.locator("button").click()
    assert ess.get_attribute("aria-sort") == "ascending"
    up = page.evaluate(column)
    assert up[:2] == ["uncorrected, rollout → old", "seq_is"]
    ess.locator("button").click()
    assert page.evaluate(column)[-1] == "uncorrected, rollout → old"


UNPACKED = "document.querySelectorAll('script.packed').length === 0"


def test_packed_tables_are_filled_in_without_being_opened_and_can_be_sorted(visit, crowd):
    page = visit(crowd)
    until(page, UNPACKED)
    column = "[...document.querySelectorAll('#table-all tbody tr')].map(row => row.cells[0].textContent)"
    assert len(page.evaluate(column)) == 220
    assert page.evaluate(column)[0] == "trainer_of_0_sequence_mask"
    page.locator("#table-all summary").click()
    head = page.locator("#table-all thead th", has_text="preset")
    head.locator("button").click()
    head.locator("button").click()
    assert page.evaluate(column)[0] == "trainer_of_219_sequence_mask"
    assert page.said == []
    assert page.asked == [crowd]


def test_a_crowded_page_reads_with_javascript_off(visit, crowd):
    page = visit(crowd, java_script_enabled=False)
    assert page.locator("#table-presets tbody tr").count() == 1 + 26
    page.locator("#table-same-1 summary").click()
    assert page.locator("#table-same-1 tbody tr").first.is_visible()
    page.locator("#table-all summary").click()
    assert page.locator("#table-all noscript").is_visible()


def test_a_crowded_page_prints_families_and_leaves_what_is_looked_up(visit, crowd):
    page = visit(crowd)
    until(page, UNPACKED)
    page.evaluate(
        "addEventListener('beforeprint', () => window.seen ="
        " [...document.querySelectorAll('details.table[open]')].map(one => one.id))"
    )
    page.pdf()
    seen = page.evaluate("seen")
    assert "table-same-1" in seen
    assert "table-all" not in seen


@pytest.mark.parametrize("width", [380, 1280])
def test_a_crowded_page_never_scrolls_sideways(visit, crowd, width):
    page = visit(crowd, viewport={"width": width, "height": 800})
    until(page, UNPACKED)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_skip_link_is_the_first_stop_of_the_keyboard(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
