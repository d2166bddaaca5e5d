"""The page in a real browser: Debian's chromium, driven by playwright, mostly on the collapse sample."""

import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from typer.testing import CliRunner

from offpol_diag.cli import app

pytestmark = pytest.mark.browser

SAMPLES = Path(__file__).parents[1] / "sample_data"
FEW = ("--presets", "token_is,seq_mis")
PAGES = {
    "collapse": ("analyze", "collapse.parquet"),
    "healthy": ("analyze", "healthy.parquet", *FEW),
    "bug": ("doctor", "shift.parquet"),
    "two policies": ("analyze", "two.parquet", *FEW),
    "undecided": ("doctor", "undecided.parquet"),
    "presets": ("compare", "collapse.parquet", "--presets", "token_is,seq_mis,geo_rs"),
    "runs": ("compare", "stale.parquet", "quantized.parquet"),
    "sweep": ("sweep", "collapse.parquet", "--preset", "geo_rs"),
    "gate": ("gate", "collapse.parquet", "--max", "k3=0.015", "--max", "step:k3=0.1"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Write the page of a name once: of the samples, of one shifted by a token, of two that lack columns."""
    folder = tmp_path_factory.mktemp("dumps")
    for dump in (*SAMPLES.glob("*.parquet"), SAMPLES.parent / "tests/frozen/dumps/shift.parquet"):
        (folder / dump.name).symlink_to(dump)
    stale = pq.read_table(SAMPLES / "stale.parquet")
    pq.write_table(stale.drop_columns(["current_log_probs"]), folder / "two.parquet")
    pq.write_table(stale.drop_columns(["policy_lag"]), folder / "undecided.parquet")

    def made(name):
        path = folder / f"{name}.html"
        if not path.exists():
            command, *rest = PAGES[name]
            rest = [str(folder / one) if one.endswith(".parquet") else one for one in rest]
            CliRunner().invoke(app, [command, *rest, "--html", str(path), "-q"])
        return path.as_uri()

    return made


@pytest.fixture
def visit(open_page, made):
    """Open a page, by default that of the collapse sample."""
    return lambda name="collapse", **options: open_page(made(name), **options)


def until(page, condition):
    """Poll a condition from outside: the page's policy forbids the eval that playwright's waiting needs."""
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


DRAWN = "[...document.querySelectorAll('.plot')].map(one => one.querySelectorAll('.main-svg').length > 0)"


def scrolled(page):
    """Scroll to every chart; return when all are drawn."""
    for one in page.locator(".plot").all():
        one.scroll_into_view_if_needed()
    until(page, f"{DRAWN}.every(Boolean)")


def test_the_page_is_short_asks_for_nothing_says_nothing_and_never_scrolls_sideways(visit, made):
    page = visit()
    assert page.evaluate("document.documentElement.scrollHeight") <= 5000
    assert len(page.evaluate("document.body.textContent.split('Made by')[0]").split()) <= 8000
    assert Path(made("collapse").removeprefix("file://")).stat().st_size <= 2_500_000
    scrolled(page)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    for width in (1400, 1100, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (page.said, page.asked) == ([], [made("collapse")])


def test_charts_are_drawn_when_they_come_into_view(visit):
    page = visit()
    assert not any(page.evaluate(DRAWN)[2:])
    scrolled(page)
    assert len(page.evaluate(DRAWN)) == 10


def test_the_first_screen_holds_verdict_scale_eight_numbers_and_the_top_of_both_cards(visit):
    page = visit(viewport={"width": 1400, "height": 1000})
    order = ["h1", ".meter", ".tiles", ".two", ".card.big"]
    order += [f"#{part}" for part in ("charts", "presets", "where", "worst", "dump")]
    tops = [page.locator(one).first.bounding_box()["y"] for one in order]
    assert tops == sorted(tops)
    assert tops[order.index(".two")] < 800
    assert page.locator(".tile").count() == 8
    assert page.locator("#presets figure table").evaluate("one => one.scrollWidth") <= 1192


@pytest.mark.parametrize(("width", "panels"), [(1400, 3), (1000, 3), (999, 1), (390, 1)])
def test_panels_lie_side_by_side_from_1000_pixels_on_and_labels_never_overlap(visit, width, panels):
    page = visit(viewport={"width": width, "height": 900})
    scrolled(page)
    tops = page.evaluate("""[...document.querySelectorAll('#f-by_step .infolayer text')]
      .filter(one => one.textContent === 'training step')
      .map(one => Math.round(one.getBoundingClientRect().top / 50))""")
    assert (len(tops), max(map(tops.count, tops))) == (3, panels)
    assert page.evaluate(OVERLAP) == []


OVERLAP = """[...document.querySelectorAll('.plot')].flatMap(plot => {
  const texts = [...plot.querySelectorAll('text')].filter(one => one.textContent.trim())
  const boxes = texts.map(one => [one, one.getBoundingClientRect()]).filter(([, box]) => box.width)
  const place = plot.getBoundingClientRect()
  const out = boxes.filter(([, box]) => box.left < place.left - 1 || box.right > place.right + 1)
  const over = boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3).map(([other]) => [one, other]))
  return [...out.map(([one]) => [one]), ...over]
    .map(some => `${plot.parentElement.id}: ${some.map(one => one.textContent).join(' | ')}`)
})"""


def test_the_page_reads_with_javascript_off(visit):
    page = visit(java_script_enabled=False)
    for seen in ("h1", ".meter", "li.ok", ".spark", "#f-by_step h3", "#table-presets tr", ".tabs pre"):
        assert page.locator(seen).first.is_visible(), seen
    assert not page.locator(".cp").first.is_visible()
    page.locator(".tabs > details").nth(1).locator("> summary").click()
    assert page.locator(".tabs > details[open]").count() == 1
    assert page.locator(".tabs > details").nth(1).locator("pre").first.is_visible()


def test_the_colours_follow_the_system_and_print_is_light(visit):
    page = visit(color_scheme="dark")
    scrolled(page)
    body = "getComputedStyle(document.body).backgroundColor"
    plot = "getComputedStyle(document.querySelector('.plot .main-svg')).background"
    dark = page.evaluate(plot)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(body) == "rgb(255, 255, 255)"
    page.emulate_media(media="screen", color_scheme="light")
    assert page.evaluate(body) == "rgb(246, 247, 249)"
    until(page, f"{plot} !== '{dark}'")


def test_a_configuration_is_copied(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    button = page.locator(".tabs > details[open] .cp")
    observer = "new MutationObserver(() => labels.push(one.textContent))"  # it reads Copied for a moment only
    button.evaluate(f"one => {{ window.labels = []; {observer}.observe(one, {{childList: true}}) }}")
    button.click()
    until(page, "labels.includes('Copied')")
    assert "rollout_is_threshold: 2.0" in page.evaluate("navigator.clipboard.readText()")


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault_on_any_page(browser, made, name):
    """Of what is open: every rule at 1400 in light, contrast in dark, at 390 what depends on the width."""
    page = browser.new_page(bypass_csp=True, viewport={"width": 1400, "height": 900})
    page.goto(made(name))
    closed = "document.querySelectorAll('details:not([open]) > :not(summary)')"
    page.evaluate(f"{closed}.forEach(one => one.remove())")
    page.evaluate(Axe().axe_script)
    of_width = [
        "scrollable-region-focusable",
        "target-size",
        "nested-interactive",
        "link-name",
        "button-name",
    ]
    rules = {("light", 1400): {}, ("dark", 1400): {"runOnly": ["color-contrast"]}}
    for (scheme, width), rule in (rules | {("light", 390): {"runOnly": of_width}}).items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        options = {"resultTypes": ["violations"], **rule}
        found = page.evaluate("options => axe.run(document, options)", options)["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], one["nodes"][0]["html"][:100]) for one in serious] == []
    page.close()
