"""What opens the page of a comparison, a sweep or a gate: the answer, its number, tiles and charts."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.report.render.html import render_html
from offpol_diag.report.sections.opening import opening
from offpol_diag.summary import Summary, loads

SAMPLES = Path(__file__).parents[1] / "sample_data"
A, B = (str(SAMPLES / f"{name}.parquet") for name in ("stale", "quantized"))
COMMANDS = {
    "presets": ("compare", A, "--presets", "token_is,seq_mis,geo_rs"),
    "runs": ("compare", A, B),
    "sweep": ("sweep", A, "--preset", "seq_mis"),
    "gate": ("gate", A, "--max", "k3=0.002", "--min", "ess_tokens=0.1", "--max", "step:k3=0.01"),
}


@pytest.fixture(scope="module", params=COMMANDS)
def case(request, tmp_path_factory) -> tuple[str, Summary, str]:
    """The name of a command, its result, and the page that it wrote."""
    folder = tmp_path_factory.mktemp("opening")
    made = ["-q", "--json", str(folder / "r.json"), "--html", str(folder / "r.html")]
    CliRunner().invoke(app, [*COMMANDS[request.param], *made])
    result = loads((folder / "r.json").read_text(), "r.json")
    return request.param, result, (folder / "r.html").read_text()


def test_the_page_opens_with_the_answer_its_tiles_and_its_charts(case):
    name, result, page = case
    found = opening(result)
    assert found is not None
    heading = re.sub(r"<[^>]*>", "", re.search(r"<h1.*?</h1>", page, re.DOTALL)[0])
    assert re.search(
        {
            "presets": r"token_is keeps the largest ESS of tokens: [\d.]+% \[",
            "runs": r"Better in B: K3 KL falls from 0\.012 to 0\.00053 nats per token",
            "sweep": r"seq_mis at 2 keeps \d+% of the sequences \[",
            "gate": r"Failed: \d of 3 bounds fail",
        }[name],
        heading,
    ), heading
    first = page[: page.index("</section>")]
    assert first.count('class="tile"') == len(found.facts) >= 3
    assert all(one.title for one in found.pictures)
    assert any(one.telling for one in found.pictures)


def test_the_page_is_drawn_again_from_the_result_byte_for_byte(case):
    _, result, page = case
    assert render_html(result) == page


def test_an_analysis_has_no_other_opening():
    from factory import make_summary

    assert opening(make_summary(gates=[])) is None


def test_a_bug_in_either_run_comes_before_the_comparison(case):
    name, result, _ = case
    if name != "runs":
        pytest.skip("of runs")
    data = json.loads(result.to_json())
    data["against"]["b"]["diagnosis"] |= {"verdict": "bug", "headline": "The columns are shifted."}
    found = opening(loads(json.dumps(data), "r.json"))
    assert (found.sev, found.h1, found.tone) == ("Bug in one run:", "B: The columns are shifted.", "bad")
