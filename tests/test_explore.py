"""Charts drawn large, in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import csv
import io
import json
import time
from dataclasses import replace

import pytest
from factory import by, make_summary
from test_figures import EVIL, known, result
from test_page import faults, until
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.report.page import page as render_html
from offpol_diag.result import BySteps, Charts
from offpol_diag.result import Series as Series_
from tests.drawn import explored

pytestmark = pytest.mark.browser

DRAWN = "performance.getEntriesByName('explored').length > 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("explore")


@pytest.fixture(scope="module")
def address(folder):
    """Write a page once for each result."""

    def address(name):
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(render_html(result(name).summary), encoding="utf-8")
        return path.as_uri()

    return address


@pytest.fixture
def visit(open_page):
    return open_page


def explore(page, name):
    """Open a chart by the keyboard, and wait until it is drawn."""
    page.evaluate("performance.clearMarks()")
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.locator(f'.ex[data-chart="{name}"]').first.focus()
    page.keyboard.press("Enter")
    until(page, DRAWN)


def shown(page, what="data"):
    return json.loads(page.evaluate(f"JSON.stringify(document.querySelector('.large').{what})"))


def press(page, text):
    page.locator(".xp button", has_text=text).first.click()


# ---------------------------------------------------------------- the dialog


def test_plotly_is_unpacked_and_run_at_the_first_explore_which_says_that_it_loads(visit, address):
    page = visit(address("collapse"))
    assert page.evaluate("[typeof Plotly, document.querySelector('dialog').open]") == ["undefined", False]
    said = "document.querySelector('.ex').click(), document.querySelector('.xp .said').textContent"
    assert page.evaluate(said).startswith("Loading plotly")
    assert page.evaluate("document.querySelector('dialog').open")
    until(page, DRAWN)
    assert page.evaluate("typeof Plotly") == "object"
    assert page.locator(".xp .main-svg").count() > 0
    page.keyboard.press("Escape")
    explore(page, "histogram")
    assert page.said == []  # no error, and nothing that the policy forbids
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("name", ["collapse", "presets", "runs", "sweep", "gate"])
def test_every_chart_of_every_page_opens_with_its_finding_and_of_each_pair_of_policies(visit, address, name):
    page = visit(address(name))
    for chart, some in explored(result(name).summary).items():
        explore(page, chart)
        first = next(iter(some.values()))
        assert page.locator(".xp h2").inner_text().split() == first.title.split()
        labels = page.locator(".xp [aria-label='Pair of policies'] button")
        assert labels.count() == (len(some) if len(some) > 1 else 0)
        for place, picture in enumerate(some.values() if len(some) > 1 else ()):
            labels.nth(place).click()
            assert page.locator(".xp h2").inner_text().split() == picture.title.split()
            panel = picture.panels[0]
            traces = [one for one in shown(page) if "meta" in one and one["meta"]["panel"] == 0]
            assert [one["y"] for one in traces] == [
                [y if known(y) else None for y in layer.y] for layer in panel.layers
            ]
        page.keyboard.press("Escape")
    assert page.said == []


def test_escape_closes_and_focus_goes_back_to_the_button_as_it_does_from_close(visit, address):
    page = visit(address("healthy"))
    for shut in (lambda: page.keyboard.press("Escape"), lambda: page.locator(".xp .shut").click()):
        explore(page, "by-step")
        assert page.evaluate("document.activeElement.className").startswith("large")
        shut()
        assert not page.evaluate("document.querySelector('dialog').open")
        assert page.evaluate("document.activeElement.dataset.chart") == "by-step"
        assert page.locator(".xp .main-svg").count() == 0


def test_arrow_keys_go_from_point_to_point_and_from_layer_to_layer_and_say_each(visit, address):
    page = visit(address("collapse"))
    explore(page, "by-step")
    said = page.locator(".xp [role=status]")
    page.keyboard.press("ArrowRight")
    assert said.inner_text() == "step 0, K3 0.00072 nats [0.00027, 0.0019]"
    page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("step 1, K3 0.0084 nats [")
    page.keyboard.press("ArrowDown")
    assert said.inner_text().startswith("step 1, ESS of raw token ratios 88% [")
    page.keyboard.press("End")
    assert said.inner_text().startswith("step 8, ESS")
    until(page, "document.querySelectorAll('.xp .hoverlayer text').length > 0")
    page.keyboard.press("Escape")
    explore(page, "density")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("π_rollout ")
    until(page, "document.querySelectorAll('.xp .hoverlayer text').length > 0")


def test_a_drag_zooms_all_panels_of_one_axis_and_reset_gives_the_whole_back(visit, address):
    page = visit(address("collapse"))
    explore(page, "by-step")
    whole = shown(page, "layout.xaxis.range")
    box = page.locator(".xp .large .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    until(page, f"document.querySelector('.large').layout.xaxis.range[0] > {whole[0] + 0.5}")
    near = shown(page, "layout.xaxis.range")
    assert near[1] < whole[1]
    assert shown(page, "layout.xaxis3.range") == near
    press(page, "Reset zoom")
    assert shown(page, "layout.xaxis.range") == whole
    press(page, "Pan")
    assert shown(page, "layout.dragmode") == "pan"


def test_axes_become_linear_and_log_and_layers_hide(visit, address):
    page = visit(address("collapse"))
    explore(page, "histogram")
    types = "[...document.querySelectorAll('.large')].map(one => one.layout.yaxis.type)"
    assert page.evaluate(types) == ["log"]
    assert "(log)" in shown(page, "layout.annotations")[0]["text"]
    press(page, "↑ Linear")
    assert page.evaluate(types) == ["linear"]
    assert "(log)" not in shown(page, "layout.annotations")[0]["text"]
    assert shown(page, "layout.yaxis.range")[1] > 50_000
    chip = page.locator(".xp .layers button", has_text="within a factor of 2")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    hidden = [one["name"] for one in shown(page) if one["visible"] is False]
    assert hidden == ["within a factor of 2"]
    chip.click()
    assert all(one["visible"] for one in shown(page))
    page.keyboard.press("Escape")
    explore(page, "tail")
    press(page, "→ Linear")
    assert shown(page, "layout.xaxis.type") == "linear"


def test_the_theme_recolours_the_open_chart(visit, address):
    page = visit(address("healthy"), color_scheme="light")
    explore(page, "by-step")
    assert shown(page)[1]["line"]["color"] == "#2361b8"
    page.emulate_media(color_scheme="dark")
    until(page, "document.querySelector('.large').data[1].line.color === '#6ba8f5'")
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    until(page, "document.querySelector('.large').data[1].line.color === '#2361b8'")


def downloaded(page, form):
    with page.expect_download() as waited:
        page.locator(".xp .save button", has_text=form).click()
    return waited.value


def test_a_chart_is_downloaded_as_svg_png_and_csv_with_the_numbers_of_the_picture(visit, address):
    page = visit(address("collapse"))
    explore(page, "by-step")
    svg = downloaded(page, "SVG")
    assert svg.suggested_filename == "by-step.svg"
    text = svg.path().read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert "K3 passes 0.1 at step 4" in text
    png = downloaded(page, "PNG").path().read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(png[16:20]) > 1800  # twice as many pixels as on the screen
    rows = [*csv.DictReader(io.StringIO(downloaded(page, "CSV").path().read_text(encoding="utf-8")))]
    picture = next(iter(explored(result("collapse").summary)["by-step"].values()))
    assert len(rows) == sum(known(y) for panel in picture.panels for layer in panel.layers for y in layer.y)
    (layer,) = picture.panels[0].layers
    for row, x, y, low, high in zip(rows, layer.x, layer.y, layer.low, layer.high, strict=False):
        assert [float(row[key]) for key in ("x", "y", "low", "high")] == [x, y, low, high]
    page.keyboard.press("Escape")
    explore(page, "density")
    rows = [*csv.DictReader(io.StringIO(downloaded(page, "CSV").path().read_text(encoding="utf-8")))]
    heat = next(iter(explored(result("collapse").summary)["density"].values())).panels[0].heat
    assert sum(int(row["tokens"]) for row in rows) == sum(map(sum, heat.counts))
    page.keyboard.press("Escape")
    explore(page, "token-thresholds")  # b, not log of b − 1
    rows = [*csv.DictReader(io.StringIO(downloaded(page, "CSV").path().read_text(encoding="utf-8")))]
    assert [float(row["x"]) for row in rows if row["series"] == "truncated by TIS"] == pytest.approx(
        result("collapse").summary.charts.token_thresholds.b
    )
    assert page.said == []


# ---------------------------------------------------------------- widths, axe, no scripts


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_dialog_fits_the_window_and_axe_finds_nothing_with_it_open_or_closed(
    visit, address, width, scheme
):
    size = {"width": width, "height": 844}
    page = visit(address("healthy"), bypass_csp=True, viewport=size, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('.ps tbody').forEach(one => one.offsetParent || one.remove())")
    if width == 390:
        assert faults(page) == []
    for name in ("by-step", "density", "drifts"):
        explore(page, name)
        box = page.locator(".xp").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["height"] <= 844
        wide = "[document.querySelector('.xp .large'), document.querySelector('.xp')]"
        assert page.evaluate(f"{wide}.every(one => one.scrollWidth <= one.clientWidth)")
        assert page.evaluate("document.querySelector('.xp .large').clientHeight") > 250
        assert faults(page) == []
        page.keyboard.press("Escape")


def test_without_scripts_nothing_says_explore_and_with_them_the_page_is_as_high_as_without_explore(
    visit, address, folder
):
    page = visit(address("collapse"), java_script_enabled=False)
    assert page.locator(".ex").count() > 10
    assert not page.locator(".ex").first.is_visible()
    bare = folder / "bare.html"
    bare.write_text(render_html(result("collapse").summary, explore=False), encoding="utf-8")
    for width in (1400, 390):
        heights = []
        for where in (address("collapse"), bare.as_uri()):
            page = visit(where, viewport={"width": width, "height": 900})
            heights.append(page.evaluate("document.documentElement.scrollHeight"))
        assert heights[0] == heights[1]


# ---------------------------------------------------------------- bad input


def test_hostile_names_come_out_as_they_are_and_make_no_link_and_no_element(visit, tmp_path):
    engine = by()["engine"]
    places = [one._replace(key=f"{EVIL}{i}".replace("\x1b", "")) for i, one in enumerate(engine.places)]
    hostile = replace(engine, title=EVIL.replace("\x1b", ""), places=places)
    path = tmp_path / "a.html"
    path.write_text(render_html(make_summary(by={"engine": hostile})), encoding="utf-8")
    page = visit(path.as_uri())
    explore(page, "by-engine")
    page.keyboard.press("ArrowRight")
    assert EVIL.replace("\x1b", "") in page.locator(".xp .said").inner_text()
    assert page.locator(".xp svg a, .xp .large b, .xp .large img, .MathJax").count() == 0
    texts = page.evaluate(
        "[...document.querySelectorAll('.xp svg text')].map(one => one.textContent).join(' ')"
    )
    assert "<b>%{x}</b> $x^2$ var(--c1) &amp;" in texts
    text = downloaded(page, "SVG").path().read_text(encoding="utf-8")
    assert "<a" not in text.replace("<animate", "")
    row = next(csv.DictReader(io.StringIO(downloaded(page, "CSV").path().read_text(encoding="utf-8"))))
    assert row["x"].startswith('<a href="javascript:alert(1)">a</a><b>%{x}</b> $x^2$ var(--c1) &amp;')
    assert page.said == []


def steps(many, values):
    series = {"k3": Series_(values=values, low=values, high=values), "reward": Series_(values=values)}
    ones = [1] * many
    at = [*range(many)]
    return Charts(steps=BySteps(first=at, last=at, tokens=ones, sequences=ones, series=series))


@pytest.mark.parametrize(
    ("many", "values"),
    [
        (10_000, [1e-3 * (1 + i % 7) for i in range(10_000)]),
        (3, [1e-3, None, None]),
        (3, [1e300, 1e-300, 0.0]),
    ],
)
def test_ten_thousand_steps_one_point_and_huge_values_are_drawn(visit, tmp_path, many, values):
    path = tmp_path / "a.html"
    path.write_text(render_html(make_summary(charts=steps(many, values))), encoding="utf-8")
    page = visit(path.as_uri())
    began = time.monotonic()
    explore(page, "by-step")
    assert time.monotonic() - began < 30
    assert page.locator(".xp .scatterlayer .trace").count() > 0
    page.keyboard.press("ArrowRight")
    first = next(
        step for step, y in enumerate(values) if y is not None and y < 1e300
    )  # the others have no place
    assert page.locator(".xp .said").inner_text().startswith(f"step {first}, K3 ")
    press(page, "↑ Linear")
    assert page.said == []


def test_a_browser_that_cannot_unpack_says_so(visit, address):
    page = visit(address("healthy"))
    page.evaluate("delete globalThis.DecompressionStream")
    page.evaluate("document.querySelector('.ex').click()")
    until(page, "document.querySelector('.said').textContent.startsWith('The chart cannot be drawn here')")
    page.keyboard.press("Escape")
    assert not page.evaluate("document.querySelector('dialog').open")


def test_the_page_of_a_command_opens_its_charts(visit, tmp_path):
    rows = [{"step": step, "rollout_corr/kl": 1.0 + step} for step in range(9)]
    logged = tmp_path / "logged.jsonl"
    logged.write_text("\n".join(map(json.dumps, rows)))
    page = tmp_path / "a.html"
    command = ["check", "sample_data/collapse.parquet", "--logged", str(logged), "--trainer", "verl", "-q"]
    CliRunner().invoke(app, [*command, "--html", str(page)])
    page = visit(page.as_uri())
    explore(page, page.locator(".ex").first.get_attribute("data-chart"))
    assert {one["name"] for one in shown(page)} >= {"logged", "the dump says"}
    assert page.said == []
