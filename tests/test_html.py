import html
import html.parser
import re
from dataclasses import replace
from itertools import combinations

import pytest
from drawn import read_back, unpacked
from factory import by, dump_facts, make_summary, metrics, number

from offpol_diag.number import Number
from offpol_diag.report.embedded import packed
from offpol_diag.report.layout import laid_out
from offpol_diag.report.page import _environment, _unbroken
from offpol_diag.report.page import page as render_html
from offpol_diag.report.picture import Axis, Layer, Panel, Tint, y_axis
from offpol_diag.report.svg import panel_svg
from offpol_diag.result import BySteps, Charts, loads
from offpol_diag.result import Series as Series_
from offpol_diag.table import Table

VOID = {"meta", "link", "br", "wbr", "hr", "img", "input", "path", "circle"}
EVIL = "runs/</script><script>alert(1)</script><b>bold</b>.parquet"


@pytest.fixture(scope="module")
def page():
    return render_html(make_summary())


class Outline(html.parser.HTMLParser):
    """Parser of tags in the order they open, ids and texts outside scripts; fails on a misnested tag."""

    def __init__(self, page):
        super().__init__()
        self.open = []
        self.tags = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def test_the_page_is_well_formed_with_one_h1_a_language_unique_ids_and_links_that_lead_to_them(page):
    tags = Outline(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    targets = {attributes["aria-labelledby"] for _, attributes in tags if "aria-labelledby" in attributes}
    links = {attributes["href"][1:] for tag, attributes in tags if tag == "a"}

    assert len(ids) == len(set(ids))
    assert targets | links <= set(ids)
    assert sum(tag == "h1" for tag, _ in tags) == 1
    assert tags[0] == ("html", {"lang": "en"})


def test_equal_summaries_give_equal_pages_from_which_the_numbers_can_be_read_back(page):
    assert render_html(make_summary()) == page
    assert loads(read_back(page), "page") == make_summary()


@pytest.mark.parametrize("text", ["", "a", "ab", "abc", "abcd", "é</script><!-- <b>" * 500])
def test_what_is_packed_comes_out_again_and_cannot_close_a_script(text):
    assert unpacked(packed(text)) == text
    assert not set("<\"'") & set(packed(text))


def test_no_number_interval_or_option_is_broken_over_two_lines():
    said = "k3 is 1.2e-3 [1.1, 1.3]e-3: add --columns old=pi or --as-one where r < 0.5 or 1/b ≤ r."
    whole = re.findall(r'<span class="nw">(.*?)</span>', str(_unbroken(said)))
    assert whole == ["1.2e-3", "[1.1, 1.3]e-3", "--columns", "old=pi", "--as-one", "r &lt; 0.5", "1/b ≤ r."]
    assert re.sub(r"</?span[^>]*>", "", str(_unbroken(said))).replace("&lt;", "<") == said
    assert _unbroken("in `sequence_id`") == "in <code>sequence_id</code>"


def test_the_page_names_no_address_outside_itself_and_says_all_without_any_script(page):
    head, outline = html.unescape(page), Outline(page)
    assert re.findall(r"(?:src|href)=\"(?!#|data:,)[^\"]*", head) == []
    assert "default-src 'none'" in head
    assert "unsafe-inline" not in re.search(r"script-src ([^;]*);", head)[1]
    assert "mean of e^Δ − 1 − Δ · over tokens · unit: nats" in {one.get("title") for _, one in outline.tags}
    seen = ("Use token TIS at 2.0", "0.0020", "[0.0019, 0.0022]", "K3 KL", "prompt-17/sample-1", "Not known")
    assert [words for words in seen if words not in outline.text] == []


def test_names_with_markup_in_them_come_out_escaped():
    summary = make_summary(
        dump=dump_facts(files=[EVIL], provenance={"model": EVIL}, notes=[EVIL], sequences=1, tokens=2),
        by={EVIL: replace(by()["engine"], title=EVIL)},
    )
    page = render_html(summary)
    assert "<b>bold" not in page
    assert "<script>alert" not in page
    assert EVIL in Outline(page).text
    assert "1 sequence · 2 tokens<" in page
    assert loads(read_back(page), "page") == summary


@pytest.mark.parametrize("sign", ["&", "<", ">", '"', "'", "&amp;", "a_b/c"])
def test_every_part_of_a_cell_comes_out_as_it_went_in(sign):
    cell = Number(value=1.0, formula=f"mean {sign} of w", note=f"a note {sign} here")
    drawn = render_table(Table("t", "c", ("name", "value", "text"), ((f"x{sign}y", cell, f"p{sign}q"),)))
    parsed = Outline(drawn)

    titles = [attributes["title"] for tag, attributes in parsed.tags if tag == "td" and "title" in attributes]
    assert titles == [f"mean {sign} of w"]
    for text in (f"x{sign}y", f"p{sign}q", f"a note {sign} here"):
        assert text in parsed.text
    assert drawn.count("<wbr>") == 2 * (sign == "a_b/c")


def markup(*cells):
    """Draw a row of one label and these cells; return its cells' markup."""
    row = ("label", *cells)
    body = laid_out(Table("t", "c", tuple(str(i) for i in range(len(row))), (row,))).body
    found = re.fullmatch(r'<tr><th scope="row"(?: class="text")?>label</th>(.*)</tr>\n', str(body))
    assert found is not None
    return found[1]


def test_a_cell_is_marked_by_its_kind_where_most_are_of_another_and_a_caution_before_its_interval():
    one, doubted, text = number(0.5, 0.01), number(0.5, 0.01, note="a caution"), "t" * 40
    alone = '<td class="number">0.50 <i>[0.49, 0.51]</i></td>'
    crowd = "<td>0.50 <i>[0.49, 0.51]</i></td>"

    assert markup(one, text, None) == f'{alone}<td>{text}</td><td class="none">–</td>'
    assert markup(*[one] * 5, text, None) == f'{crowd * 5}<td class="text">{text}</td><td>–</td>'
    assert markup(text + "t") == markup(*[one] * 5, text + "t")[5 * len(crowd) :]
    assert markup(text + "t") == f'<td class="text prose">{text}t</td>'
    assert markup(doubted) == alone.replace("</td>", '<span class="caution">a caution</span></td>')
    assert markup(doubted, doubted) == 2 * alone.replace("0.50", "0.50<sup>1</sup>")


def meanings(*given):
    """Return the tooltips of a column of these numbers: that of the head, then those of the cells."""
    table = Table("t", "c", ("name", "value"), tuple((str(i), one) for i, one in enumerate(given)))
    drawn = Outline(render_table(table)).tags
    cells = [attributes.get("title") for tag, attributes in drawn if tag in ("th", "td")]
    return [cells[1], *cells[3::2]]


def test_what_most_cells_of_a_column_mean_stands_in_its_head_and_only_others_say_their_own():
    one, other = Number(value=1.0, formula="mean of w"), Number(value=2.0, formula="max of w")
    assert meanings(one, one, other) == ["mean of w", None, None, "max of w"]
    assert meanings(one, other) == [None, "mean of w", "max of w"]
    never, once = (Number(value=1.0, formula="mean of w", clamped=share) for share in (0.0, 0.25))
    assert meanings(never, never, once) == ["mean of w", None, None, "safety bound acted on 25% of terms"]


def render_table(table):
    return str(_environment().get_template("block.html.j2").module.Table([laid_out(table)]))


def test_a_curve_is_a_band_under_a_line_that_breaks_where_unknown_and_hollow_points_have_no_band():
    ends = {"low": (0.5, 1.5, None, 3.0), "high": (1.5, 2.5, None, 5.0)}
    layer = Layer("", range(4), (1.0, 2.0, None, 4.0), "blue", **ends)
    svg, points = panel_svg(Panel("x", "y", (layer,)), "a chart")
    (band,) = re.findall(r'<path class="r c1" d="(.*?)"', svg)
    (line,) = re.findall(r'<path class="l c1" d="(.*?)"', svg)
    assert (band.count("L"), line.count("L")) == (3, 1)
    assert svg.index("r c1") < svg.index("l c1")
    assert [text for _, _, text in points] == ["0: 1.0 [0.50, 1.5]", "1: 2.0 [1.5, 2.5]", "3: 4.0 [3.0, 5.0]"]
    ends = {"low": (0.0, 1.0, 2.0), "high": (2.0, 3.0, 4.0), "hollow": (False, False, True)}
    svg, points = panel_svg(Panel("x", "y", (Layer("", range(3), (1.0, 2.0, 3.0), "teal", **ends),)), "a")
    (band,) = re.findall(r'<path class="r c4" d="(.*?)"', svg)
    assert (band.count("L"), svg.count('class="h c4"'), svg.count('class="d c4"')) == (3, 1, 2)
    assert ["unreliable" in text for _, _, text in points] == [False, False, True]


def test_an_interval_that_reaches_towards_zero_does_not_stretch_a_log_axis():
    layer = Layer("", (0.0, 1.0), (1.0, 20.0), "blue", low=(1e-9, 10.0), high=(2.0, 30.0))
    axis = y_axis(Panel("x", "y", (layer,), y_scale="log"))
    assert -1 < axis.low < 0
    assert 1.3 < axis.high < 2


@pytest.mark.parametrize(
    ("scale", "value", "place"),
    [("linear", 3.0, 3.0), ("log", 100.0, 2.0), ("log", 0.0, None), ("logit", 0.5, 0.0), ("logit", 1.0, None),
     ("excess", 1.01, -2.0), ("excess", 1.0, None), ("linear", float("inf"), None)],
)  # fmt: skip
def test_a_value_has_its_place_on_the_scale_or_none(scale, value, place):
    assert Axis(scale, 0, 1, ()).at(value) == (None if place is None else pytest.approx(place))


def texts(svg, look):
    found = re.findall(rf'<text class="{look}[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', svg)
    return [(float(x), float(y), text) for x, y, text in found]


def test_names_of_lines_stand_apart():
    layers = tuple(Layer(f"line {i}", (0.0, 1.0, 2.0), (1.0, 1.0 + i / 1e3, 1.0), "blue") for i in range(3))
    svg, _ = panel_svg(Panel("x", "y", layers, uprights=((1.0, "here"),)), "a")
    places = texts(svg, "nb halo")
    assert len(places) == 3
    for (x, y, _), (across, up, _) in combinations(places, 2):
        assert abs(y - up) >= 15 or abs(x - across) >= 45


def test_points_carry_intervals_and_names_stand_on_the_axis_in_order_turned_where_they_do_not_fit():
    layer = Layer("", (0.0, 1.0), (1.0, 2.0), "blue", "points", (0.5, None), (2.5, None))
    svg, _ = panel_svg(Panel("x", "y", (layer,), names=("b", "a")), "a chart")
    assert (svg.count('<path class="e c1"'), svg.count('<circle class="d c1"')) == (1, 2)
    assert svg.index(">b</text>") < svg.index(">a</text>")
    keys = tuple(f"environment {i} of many" for i in range(9))
    layer = Layer("", tuple(map(float, range(9))), (1.0,) * 9, "blue", "points")
    svg, _ = panel_svg(Panel("", "y", (layer,), names=keys), "a")
    assert svg.count("rotate(") == 9


def test_a_tint_ends_at_the_axis():
    layer = Layer("", (0.0, 1.0), (1.0, 1.1), "blue")
    tints = (Tint(None, 1.05, "good", "fine"), Tint(1.05, None, "bad", "bad"))
    y = y_axis(panel := Panel("x", "y", (layer,), tints=tints))
    assert (y.held(None, True), y.held(None, False)) == (y.low, y.high)
    svg, _ = panel_svg(panel, "a")
    assert svg.count('<path class="z') == 2
    assert {text for _, _, text in texts(svg, "n halo")} == {"fine", "bad"}


def test_tiles_of_a_dump_without_an_old_policy_have_their_curves_too():
    series = {"k3": Series_(values=[0.001, 0.01], low=[], high=[])}
    steps = BySteps(first=[0, 1], last=[0, 1], tokens=[5, 5], sequences=[1, 1], series=series)
    total = {f"total.{name}": value for name, value in metrics().items() if "." not in name}
    page = render_html(make_summary(metrics=total, charts=Charts(steps=steps)))
    assert page.count('<svg class="spark"') == 1


def tiles_of(page):
    return {
        re.search(r"<code>(.*?)</code>", one)[1]: one
        for one in page.split('<div class="tile">')[1:]
        if "<code>" in one
    }


def test_numbers_on_the_page_have_minus_signs_and_the_data_have_none():
    low = {"k1": number(-0.25, 0.125), "chi2_sequence": number(-0.25, 0.125)}
    page = render_html(make_summary(metrics=metrics() | low))
    assert "−0.25 [−0.38, −0.12] nats." in re.sub("<[^>]*>", "", page)
    assert "−0.25" in tiles_of(page)["chi2_sequence"]
    assert "−" not in re.search(r'"k1": ?\{[^}]*', read_back(page))[0]
    seen = re.sub(r"<(script|style|code|pre).*?</\1>|<[^>]*>", "", page, flags=re.DOTALL)
    assert re.findall(r"[\s\[(]-\.?\d", seen) == []


@pytest.mark.parametrize(
    ("value", "half", "said"),
    [(-0.25, 0.125, "mean of r² below 1"), (-0.125, 0.25, "0 by its interval"), (0.25, 0.125, "")],
)
def test_a_chi2_below_0_has_no_band_and_says_what_it_is(value, half, said):
    page = render_html(make_summary(metrics=metrics() | {"chi2_token": number(value, half)}))
    tile = tiles_of(page)["chi2_token"]
    assert said in tile
    assert ("chip" in tile) is not bool(said)


def test_the_ends_of_a_curve_have_the_digits_that_their_intervals_support():
    series = {"chi2_token": Series_(values=[9806.3, 15882.0], low=[4100.0, 8100.0], high=[15500.0, 23700.0])}
    steps = BySteps(first=[0, 1], last=[0, 1], tokens=[5, 5], sequences=[1, 1], series=series)
    page = render_html(make_summary(charts=Charts(steps=steps)))
    assert "9,800 to 16,000" in tiles_of(page)["chi2_token"]


def test_of_many_configurations_one_is_shown_and_the_others_stand_behind_one_choice():
    page = render_html(make_summary())
    bar = re.search('<div class="bar">(.*?)</div>', page, re.DOTALL)[1]
    assert bar.index("cfg-1") < bar.index("<details>") < bar.index("cfg-2")
    assert bar.count("<details>") == bar.count("</details>") == 1


HEAVY = "unreliable: k̂ = 0.75 is above 0.70"


@pytest.mark.parametrize("note", [None, HEAVY])
def test_the_page_tells_a_heavy_tail_in_one_sentence_and_its_tiles_have_no_band(note):
    named = ("ess_tokens", "chi2_token", "mean_ratio")
    noted = {name: replace(metrics()[name], note=note) for name in named}
    khat = {"khat_tokens": number(0.75, 0.1, note=note and "above 0.70: means of these weights"), **noted}
    page = render_html(make_summary(metrics=metrics() | khat, recommendation=None))
    tiles = page[page.index('class="tiles"') : page.index("Heavy tail") if note else None]
    (ess,) = (one for one in tiles.split('<div class="tile">') if ">ess_tokens</code>" in one)
    said = "Heavy tail (k̂ 0.75): ESS, χ² and E[r] cannot be estimated, and K3 may be too low."
    assert ("chip" in ess, "unreliable" in ess) == ((False, True) if note else (True, False))
    assert "k̂" not in ess
    assert Outline(page).text.count(said) == bool(note)
