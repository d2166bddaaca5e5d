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
    assert page.evaluate("document.documentElement.scrollHeight") <= 6000
    assert Path(address.removeprefix("file://")).stat().st_size <= 3_000_000
    page.evaluate(OPENED)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) == []
    for width in (1100, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.said == []
    assert page.asked == [address]


@pytest.mark.parametrize(("more", "most"), [(["--no-explore"], 800_000), ([], 3_000_000)])
def test_the_page_of_the_stale_sample_is_small_without_plotly_and_bounded_with_it(tmp_path, more, most):
    path = tmp_path / "stale.html"
    drawn = CliRunner().invoke(app, ["analyze", str(SAMPLES / "stale.parquet"), "-o", str(path), "-q", *more])
    assert drawn.exit_code == 0, drawn.output
    assert path.stat().st_size <= most


def test_an_address_of_a_preset_opens_its_card(visit, address):
    page = visit(f"{address}#p-geo_rs")
    until(page, "document.querySelector('#p-geo_rs .pc dl')?.offsetParent")


def test_charts_stand_before_the_script_that_shows_the_nearest_point_and_tables_can_be_sorted(visit):
    page = visit()
    page.keyboard.press("Tab")  # first of all to the skip link
    assert page.evaluate("document.activeElement.className") == "skip"
    order = """[...document.querySelectorAll('svg.pic, script:not([type])')].map(one => one.localName)"""
    early, *pictures, late, opener = page.evaluate(order)
    assert (early, late, opener) == ("script", "script", "script")
    assert set(pictures) == {"svg"}
    point = page.locator("#f-by-step svg.pic circle").nth(2)
    point.scroll_into_view_if_needed()
    point.hover()
    tip = page.locator(".tip")
    assert tip.is_visible()
    assert tip.inner_text().startswith("2: 0.014 [")
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    page.evaluate("document.querySelectorAll('#numbers details').forEach(one => one.open = true)")
    head = page.locator("#table-policies thead th").first
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"


SEEN = ("h1", ".meter", "ul.ck li", ".tile .spark", "#f-by-step svg.pic", ".ps tbody tr", ".pane pre")


def test_the_page_reads_with_javascript_off(visit):
    page = visit(java_script_enabled=False)
    for seen in SEEN:
        assert page.locator(seen).first.is_visible(), seen
    for hidden in ("button.theme", ".ctl", ".cp"):
        assert not page.locator(hidden).first.is_visible(), hidden
    page.goto(f"{page.url}#p-geo_rs")
    assert page.locator("#p-geo_rs .pc").inner_text() == "offpol-diag presets geo_rs --for verl"
    page.locator(".bar summary").click()
    page.locator("label[for=cfg-2]").click()
    assert page.locator(".pane").nth(1).is_visible()


def test_the_theme_follows_the_system_print_is_light_and_the_toggle_is_remembered_and_recolours(visit):
    page = visit(color_scheme="dark")
    dark = background(page)
    page.evaluate(
        "addEventListener('beforeprint', () => window.seen = getComputedStyle(document.body).backgroundColor)"
    )
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("seen") == "rgb(246, 247, 249)"
    assert background(page) == dark  # the theme comes back
    page.emulate_media(color_scheme="light")
    assert background(page) != dark
    page.emulate_media(color_scheme="dark")
    look = "getComputedStyle(document.querySelector('svg.pic text')).fill"
    before = page.evaluate(look)
    page.locator("button.theme").click()
    light = background(page)
    assert light != dark
    assert page.evaluate(look) != before
    page.reload()
    assert background(page) == light
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


FIRST = "[...document.querySelectorAll('.ps tbody')].filter(one => one.offsetParent).map(one => one.id)"


def test_presets_are_searched_filtered_and_sorted_and_configurations_copied(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    families = page.evaluate(f"{FIRST}.length")
    page.locator(".seg button", has_text="All").click()
    assert page.evaluate(f"{FIRST}.length") > 2 * families
    page.locator(".ps thead button", has_text="ESS, tokens").click()
    up = page.evaluate(FIRST)
    page.locator(".ps thead button", has_text="ESS, tokens").click()
    assert page.evaluate(FIRST)[2:4] != up[2:4]
    assert page.evaluate(FIRST)[:2] == ["", ""]
    page.locator(".ctl input").fill("geo_rs")
    assert page.evaluate(f"{FIRST}.every(one => document.getElementById(one).textContent.includes('geo_rs'))")
    page.locator(".ctl input").fill("")
    page.locator(".by-trainer").select_option("trl")
    shown = page.evaluate(f"{FIRST}.filter(one => one).map(one => document.getElementById(one).dataset.t)")
    assert shown
    assert all("trl" in one.split() for one in shown)
    page.locator(".ps tbody[id]:not(.hide) th a").first.click()
    assert page.locator(".ps tbody.on .pc").is_visible()
    assert "what it is" in page.locator(".ps tbody.on .pc dl").inner_text()
    assert " --for " in page.locator(".ps tbody.on .pc > code").inner_text()
    page.locator(".by-trainer").select_option("")
    page.locator(".ctl input").fill("token_tis")  # an alias, which only the card names
    until(page, f"{FIRST}.includes('p-token_is')")
    assert page.said == []

    page.locator("#cfg-1").focus()
    page.keyboard.press("ArrowRight")
    shown = page.locator(".pane:visible")
    assert shown.count() == 1
    shown.locator(".cp").click()
    until(page, "[...document.querySelectorAll('.cp')].some(one => one.textContent === 'Copied')")


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
  document.querySelectorAll('.ps tbody').forEach(one => one.offsetParent || one.remove())
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
    # axe also looks at the texts of pictures
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
