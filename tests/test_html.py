"""The page as a file: well formed, without addresses, whatever names and numbers a dump has."""

import html.parser
import re
from dataclasses import replace

import pytest
from drawn import read_back
from factory import by, dump_facts, make_summary, metrics, number

from offpol_diag.number import Number
from offpol_diag.report import answered
from offpol_diag.report.page import page as render_html
from offpol_diag.report.page import unbroken
from offpol_diag.result import BySteps, Charts, loads

VOID = {"meta", "link", "wbr"}
EVIL = "runs/</script><script>alert(1)</script><b>bold</b>.parquet"
HEAVY = "unreliable: k̂ = 0.75 is above 0.70"


@pytest.fixture(scope="module")
def page():
    return render_html(make_summary())


class Outline(html.parser.HTMLParser):
    """Parser of tags in the order they open, and of texts outside scripts; fails on a misnested tag."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open and self.open[-1] not in ("script", "style") else ""


def test_the_page_is_well_formed_with_one_h1_a_language_unique_ids_and_links_that_lead_to_them(page):
    tags = Outline(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    targets = {attributes["aria-labelledby"] for _, attributes in tags if "aria-labelledby" in attributes}
    links = {attributes["href"][1:] for tag, attributes in tags if tag == "a"}
    assert len(ids) == len(set(ids))
    assert targets | links <= set(ids)
    assert (sum(tag == "h1" for tag, _ in tags), tags[0]) == (1, ("html", {"lang": "en"}))


def test_equal_summaries_give_equal_pages_from_which_the_numbers_can_be_read_back(page):
    assert render_html(make_summary()) == page
    assert loads(read_back(page), "page") == make_summary()


def test_no_interval_is_broken_over_two_lines_and_what_stands_in_backticks_is_code():
    found = unbroken("k3 is 1.2 [1.1, >1.3]: in `group_id`")
    assert found == 'k3 is 1.2 <span class="nw">[1.1, &gt;1.3]</span>: in <code>group_id</code>'


def test_the_page_names_no_address_outside_itself_and_says_all_without_any_script(page):
    assert re.findall(r"(?:src|href)=\"(?!#|data:,)[^\"]*", page) == []
    assert "default-src 'none'" in page
    assert "unsafe-inline" not in re.search(r"script-src ([^;]*);", page)[1]
    seen = ("Use token TIS at 2.0", "0.0020", "[0.0019, 0.0022]", "K3 KL", "prompt-17/sample-1", "Not known")
    assert [words for words in seen if words not in Outline(page).text] == []


def test_names_with_markup_in_them_come_out_escaped():
    dump = dump_facts(files=[EVIL], provenance={"model": EVIL}, notes=[EVIL], sequences=1, tokens=2)
    summary = make_summary(dump=dump, by={EVIL: replace(by()["engine"], title=EVIL)})
    page = render_html(summary)
    assert "<b>bold" not in page
    assert "<script>alert" not in page
    assert EVIL in Outline(page).text
    assert loads(read_back(page), "page") == summary


def test_numbers_on_the_page_have_minus_signs_and_the_data_have_none():
    page = render_html(make_summary(metrics=metrics() | {"k1": number(-0.25, 0.125)}))
    seen = re.sub(r"<(script|style|code|pre).*?</\1>|<[^>]*>", "", page, flags=re.DOTALL)
    assert "−0.25 [−0.38, −0.12] nats." in seen
    assert re.findall(r"[\s\[(]-\.?\d", seen) == []
    assert "−" not in re.search(r'"k1": ?\[[^]]*', read_back(page))[0]


def tile(key, **given):
    """Return a tile, and what the page draws of it."""
    summary = make_summary(**given)
    drawn = next(one for one in render_html(summary).split('<div class="tile">') if f">{key}</code>" in one)
    return next(one for one in answered(summary).tiles if one.key == key), drawn


@pytest.mark.parametrize(
    ("value", "half", "said"),
    [(-0.25, 0.125, "mean of r² below 1"), (-0.125, 0.25, "0 by its interval"), (0.25, 0.125, "")],
)
def test_a_chi2_below_0_has_no_band_and_says_what_it_is(value, half, said):
    found, drawn = tile("chi2_token", metrics=metrics() | {"chi2_token": number(value, half)})
    assert (found.remark, "chip" in drawn) == (said, not said)
    assert said in drawn


def test_a_tile_has_a_curve_whose_ends_have_the_digits_that_their_intervals_support():
    series = {"chi2_token": [Number(9806.3, (4100.0, 11500.0)), Number(15882.0, (12100.0, 23700.0))]}
    charts = Charts(steps=BySteps(first=[0, 1], last=[0, 1], series=series))
    _, drawn = tile("chi2_token", charts=charts)
    assert '<svg class="spark"' in drawn
    assert "9,800 → 16,000" in drawn


@pytest.mark.parametrize(("note", "bands"), [(None, ["good", "good"]), (HEAVY, ["", "bad"])])
def test_what_a_heavy_tail_decides_has_a_star_and_no_band(note, bands):
    named = {name: replace(metrics()[name], note=note) for name in ("ess_tokens", "chi2_token", "mean_ratio")}
    named["khat_tokens"] = number(0.75, 0.1, note=note and "above 0.70: means of these weights")
    tiles = [tile(key, metrics=metrics() | named)[1] for key in ("ess_tokens", "khat_tokens")]
    assert [re.findall(r"chip (\w+)|$", drawn)[0] for drawn in tiles] == bands
    assert ("*</div>" in tiles[0]) == bool(note)
