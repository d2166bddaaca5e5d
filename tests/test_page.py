"""The page in a real browser: Debian's chromium, driven by playwright, on the collapse sample."""

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from typer.testing import CliRunner

from offpol_diag.cli import app

pytestmark = pytest.mark.browser

SAMPLES = Path(__file__).parents[1] / "sample_data"
OPENED = "document.querySelectorAll('details').forEach(one => one.open = true)"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    drawn = CliRunner().invoke(app, ["analyze", str(SAMPLES / "collapse.parquet"), "-o", str(path), "-q"])
    assert drawn.exit_code == 0, drawn.output
    return path.as_uri()


@pytest.fixture
def visit(open_page, address):
    """Open a page, by default that of the collapse sample."""
    return lambda where=address, **options: open_page(where, **options)


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def until(page, condition):
    """Poll a condition from outside: the page's policy forbids the eval that playwright's waiting needs."""
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def test_the_page_is_short_asks_for_nothing_says_nothing_and_every_text_of_it_stands_out(visit, address):
    """Texts that are folded, too; and it never scrolls sideways."""
    page = visit()
    assert page.evaluate("document.documentElement.scrollHeight") <= 5050
    assert Path(address.removeprefix("file://")).stat().st_size <= 2_500_000
    page.evaluate(OPENED)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) == []
    for width in (1100, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.said == []
    assert page.asked == [address]


DRAWN = "[...document.querySelectorAll('.plot')].map(one => one.querySelectorAll('.main-svg').length > 0)"


def scrolled(page):
    """Scroll to every chart; return when all are drawn."""
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = false)")
    for one in page.locator(".plot").all():
        one.scroll_into_view_if_needed()
    until(page, f"{DRAWN}.every(Boolean)")


def test_charts_are_drawn_when_they_come_into_view_and_say_their_numbers(visit, address):
    page = visit()
    assert not any(page.evaluate(DRAWN)[2:])
    scrolled(page)
    assert len(page.evaluate(DRAWN)) == 11
    assert page.said == []
    assert page.asked == [address]
    point = page.locator("#f-by_step .scatterlayer .point").nth(2)
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    until(page, "document.querySelector('#f-by_step .hoverlayer text')")
    assert page.locator("#f-by_step .hoverlayer text").first.text_content().startswith("2: 0.014 [")


def test_the_first_screen_holds_verdict_scale_eight_numbers_and_the_top_of_both_cards(visit):
    page = visit(viewport={"width": 1400, "height": 1000})
    order = [
        "h1",
        ".meter",
        ".tiles",
        ".two.v",
        ".card.big",
        "#charts",
        "#presets",
        "#where",
        "#tokens",
        "#dump",
    ]
    tops = [page.locator(one).first.bounding_box()["y"] for one in order]
    assert tops == sorted(tops)
    assert tops[order.index(".two.v")] < 800
    assert page.locator(".tile").count() == 8


@pytest.mark.parametrize(("width", "panels"), [(1400, 3), (1000, 3), (999, 1), (390, 1)])
def test_panels_lie_side_by_side_from_1000_pixels_on_and_labels_never_overlap(visit, width, panels):
    page = visit(viewport={"width": width, "height": 900})
    scrolled(page)
    tops = page.evaluate("""[...document.querySelectorAll('#f-by_step .infolayer text')]
      .filter(one => one.textContent === 'training step')
      .map(one => Math.round(one.getBoundingClientRect().top / 50))""")
    assert (len(tops), max(map(tops.count, tops))) == (3, panels)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
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


SEEN = ("h1", ".meter", "ul.ck li", ".tile .spark", "#f-by_step h3", "#table-presets tr", ".tabs pre")


def test_the_page_reads_with_javascript_off(visit):
    page = visit(java_script_enabled=False)
    for seen in SEEN:
        assert page.locator(seen).first.is_visible(), seen
    assert not page.locator(".cp").first.is_visible()
    page.locator(".tabs > details").nth(1).locator("> summary").click()
    assert page.locator(".tabs > details[open]").count() == 1
    assert page.locator(".tabs > details").nth(1).locator("pre").first.is_visible()


def test_the_colours_follow_the_system_and_print_is_light(visit):
    page = visit(color_scheme="dark")
    scrolled(page)
    dark = background(page)
    look = "getComputedStyle(document.querySelector('.plot .main-svg')).background"
    before = page.evaluate(look)
    page.emulate_media(media="print", color_scheme="dark")
    assert background(page) == "rgb(255, 255, 255)"
    page.emulate_media(media="screen", color_scheme="light")
    assert background(page) == "rgb(246, 247, 249)" != dark
    until(page, f"{look} !== '{before}'")
    assert page.said == []


def test_contents_that_do_not_fit_fade_where_they_go_on(visit):
    page = visit(viewport={"width": 390, "height": 800})
    look = "document.querySelector('.top nav').className"
    until(page, f"{look} === 'more'")
    page.evaluate("document.querySelector('.top nav').scrollLeft = 1e4")
    until(page, f"{look} === 'less'")
    page.set_viewport_size({"width": 1400, "height": 800})
    until(page, f"{look} === ''")


@pytest.mark.parametrize("width", [1400, 390])
def test_no_card_of_the_verdict_is_half_empty(visit, made, width):
    """How much of a card's height is below its last line."""
    page = visit(made("healthy"), viewport={"width": width, "height": 900})
    empty = page.evaluate("""[...document.querySelectorAll('.two.v > .card')].map(card =>
      1 - (card.lastElementChild.getBoundingClientRect().bottom - card.getBoundingClientRect().top)
      / card.offsetHeight)""")
    assert len(empty) == 2
    assert max(empty) < 0.3


def test_tables_are_sorted_and_configurations_copied(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    page.keyboard.press("Tab")  # first of all to the skip link
    assert page.evaluate("document.activeElement.className") == "skip"
    names = "[...document.querySelectorAll('#table-presets tbody th')].map(one => one.textContent)"
    given = page.evaluate(names)
    page.locator("#table-presets thead button", has_text="ESS, tokens").click()
    up = page.evaluate(names)
    page.locator("#table-presets thead button", has_text="ESS, tokens").click()
    down = page.evaluate(names)
    assert sorted(given) == sorted(up) == sorted(down)
    assert up[0] != down[0]
    page.locator(".tabs > details[open] > .code .cp").click()
    until(page, "[...document.querySelectorAll('.cp')].some(one => one.textContent === 'Copied')")
    assert page.said == []


PAGES = {
    "collapse": ("analyze", "collapse.parquet", "--presets", "token_is,seq_mis"),
    "healthy": ("analyze", "healthy.parquet", "--presets", "token_is,seq_mis"),
    "bug": ("doctor", "shifted.parquet"),
    "two policies": ("analyze", "two.parquet", "--presets", "token_is,seq_mis"),
    "presets": ("compare", "collapse.parquet", "--presets", "token_is,seq_mis,geo_rs"),
    "runs": ("compare", "stale.parquet", "quantized.parquet"),
    "sweep": ("sweep", "collapse.parquet", "--preset", "geo_rs"),
    "gate": ("gate", "collapse.parquet", "--max", "k3=0.015", "--max", "step:k3=0.1"),
}
FOLDED = """() => {
  document.querySelectorAll('details:not([open]) > :not(summary)').forEach(one => one.remove())
}"""
LAID_OUT = ("scrollable-region-focusable", "target-size", "nested-interactive", "link-name", "button-name")
"""Rules of axe that may hold at one width and fail at another."""


def faults(page, **options):
    """Return what axe finds serious; the script is injected once a page."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    found = page.evaluate("options => axe.run(document, options)", {"resultTypes": ["violations"], **options})
    return [
        (one["id"], one["nodes"][0]["html"][:100])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Write the samples, one whose rollout column is shifted by a token, and one without the old policy."""
    folder = tmp_path_factory.mktemp("dumps")
    for sample in SAMPLES.glob("*.parquet"):
        (folder / sample.name).symlink_to(sample)
    table = pq.read_table(SAMPLES / "healthy.parquet")
    place = table.schema.get_field_index("rollout_log_probs")
    shifted = [row[1:] + row[-1:] for row in table["rollout_log_probs"].to_pylist()]
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(shifted, field.type)), folder / "shifted.parquet")
    two = pq.read_table(SAMPLES / "stale.parquet").drop_columns(["current_log_probs"])
    pq.write_table(two, folder / "two.parquet")
    return folder


@pytest.fixture(scope="module")
def made(dumps):
    """Write a page once."""

    def made(name):
        path = dumps / f"{name}.html"
        if not path.exists():
            command, *rest = PAGES[name]
            rest = [str(dumps / one) if one.endswith(".parquet") else one for one in rest]
            CliRunner().invoke(app, [command, *rest, "--html", str(path), "-q"])
        return path.as_uri()

    return made


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault_on_any_page(browser, made, name):
    """Of what is open: every rule at 1400 in light, contrast in dark, at 390 what depends on the width."""
    page = browser.new_page(bypass_csp=True, viewport={"width": 1400, "height": 900})
    page.emulate_media(color_scheme="light")
    page.goto(made(name))
    page.evaluate(FOLDED)
    found = faults(page)
    page.emulate_media(color_scheme="dark")
    # axe also looks at the texts of charts
    found += faults(page, runOnly=["color-contrast"]) if name == "collapse" else page.evaluate(CONTRAST)
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    found += faults(page, runOnly=[*LAID_OUT])
    if name == "collapse":  # and what is folded, but for contrast, which takes axe a quarter of a minute
        page.set_viewport_size({"width": 1400, "height": 900})
        page.reload()
        page.evaluate(OPENED)
        found += faults(page, rules={"color-contrast": {"enabled": False}})
    page.close()
    assert found == []


CONTRAST = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number)
  const linear = c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4
  const light = ([r, g, b]) => [r, g, b].map(linear)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0)
  const ground = one => { for (; one; one = one.parentElement) {
    const found = parse(getComputedStyle(one).backgroundColor)
    if (found.length < 4 || found[3] === 1) return found }
    return [255, 255, 255] }
  const low = []
  const texts = 'h1, h1 span, p, small, .chip, .un, th, td, summary, code, label, .ci'
  for (const one of document.querySelectorAll(texts)) {
    if (!one.offsetParent || !one.textContent.trim() || one.closest('svg')) continue
    const [a, b] = [light(parse(getComputedStyle(one).color)), light(ground(one))]
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05)
    if (ratio < 4.5) low.push([one.className, one.textContent.slice(0, 30), ratio])
  }
  return low
}"""
