"""Check the opening of a comparison's, a sweep's or a gate's page: answer, number, tiles and charts."""

import json
import re
from pathlib import Path

import pytest
from factory import make_summary
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.report.render.html import render_html
from offpol_diag.report.sections.opening import opening
from offpol_diag.report.sections.tokens import shade
from offpol_diag.summary import loads

SAMPLES = Path(__file__).parents[1] / "sample_data"
A, B = (str(SAMPLES / f"{name}.parquet") for name in ("stale", "quantized"))
COMMANDS = {
    "presets": ("compare", A, "--presets", "token_is,seq_mis,geo_rs"),
    "runs": ("compare", A, B),
    "sweep": ("sweep", A, "--preset", "seq_mis"),
    "gate": ("gate", A, "--max", "k3=0.002", "--min", "ess_tokens=0.1", "--max", "step:k3=0.01"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_opens_with_the_answer_its_tiles_and_its_charts(name, tmp_path):
    made = ["-q", "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    CliRunner().invoke(app, [*COMMANDS[name], *made])
    page = (tmp_path / "r.html").read_text()
    result = loads((tmp_path / "r.json").read_text(), "r.json")
    found = opening(result)
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
    assert render_html(result) == page  # drawn again from the result, byte for byte
    first = page[: page.index("</section>")]
    assert first.count('class="tile"') == len(found.facts) >= 3
    assert all(one.title for one in found.pictures)
    assert any(one.telling for one in found.pictures)

    if name == "runs":  # a bug in either comes before the comparison
        data = json.loads(result.to_json())
        data["against"]["b"]["diagnosis"] |= {"verdict": "bug", "headline": "The columns are shifted."}
        found = opening(loads(json.dumps(data), "r.json"))
        assert (found.sev, found.h1, found.tone) == ("Bug in one run:", "B: The columns are shifted.", "bad")


def test_an_analysis_has_no_other_opening():
    assert opening(make_summary(gates=[])) is None


@pytest.mark.parametrize(("delta", "look"), [(0.05, ""), (0.2, "1"), (0.8, "2"), (3.0, "3"), (8.0, "4")])
def test_a_token_is_coloured_by_direction_and_size(delta, look):
    """Orange (n) where the trainer finds it less likely, blue (p) where more."""
    assert shade(-delta) == (f"n{look}" if look else "")
    assert shade(delta) == (f"p{look}" if look else "")
