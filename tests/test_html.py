import html
import html.parser
import re
from dataclasses import replace

import pytest
from drawn import read_back, unpacked
from factory import by, dump_facts, make_summary, metrics, number

from offpol_diag.number import Number
from offpol_diag.report.page import _environment, _unbroken, packed
from offpol_diag.report.page import page as render_html
from offpol_diag.result import BySteps, Charts, loads
from offpol_diag.table import Table

VOID = {"meta", "link", "br", "wbr", "hr", "img", "input", "path", "circle", "polyline"}
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
    cell = Number(value=1.0, note=f"a note {sign} here")
    drawn = render_table(Table("t", "c", ("name", "value", "text"), ((f"x{sign}y", cell, f"p{sign}q"),)))
    parsed = Outline(drawn)

    for text in (f"x{sign}y", f"p{sign}q", f"a note {sign} here"):
        assert text in parsed.text
    assert drawn.count("<wbr>") == 2 * (sign == "a_b/c")


def render_table(table):
    return str(_environment().get_template("block.html.j2").module.Table([table]))


def test_tiles_of_a_dump_without_an_old_policy_have_their_curves_too():
    series = {"k3": [Number(value=0.001), Number(value=0.01)]}
    steps = BySteps(first=[0, 1], last=[0, 1], series=series)
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
    low = {"k1": number(-0.25, 0.125), "chi2_token": number(-0.25, 0.125)}
    page = render_html(make_summary(metrics=metrics() | low))
    assert "−0.25 [−0.38, −0.12] nats." in re.sub("<[^>]*>", "", page)
    assert "−0.25" in tiles_of(page)["chi2_token"]
    assert "−" not in re.search(r'"k1": ?\[[^]]*', read_back(page))[0]
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
    series = {"chi2_token": [Number(9806.3, (4100.0, 15500.0)), Number(15882.0, (8100.0, 23700.0))]}
    steps = BySteps(first=[0, 1], last=[0, 1], series=series)
    page = render_html(make_summary(charts=Charts(steps=steps)))
    assert "9,800 to 16,000" in tiles_of(page)["chi2_token"]


def test_of_many_configurations_one_is_open_and_the_others_stand_beside_it():
    page = render_html(make_summary())
    assert page.count('<details name="configuration"') > 4
    assert page.count('<details name="configuration" open>') == 1


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
    assert ("chip" in ess, "*</div>" in ess) == ((False, True) if note else (True, False))
    assert "k̂" not in ess
    assert Outline(page).text.count(said) == bool(note)
