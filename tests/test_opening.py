"""Check the opening of a comparison's, a sweep's or a gate's page: answer, number, tiles and charts."""

import json
import re
from pathlib import Path

import pytest
from factory import make_summary
from offpol_diag.report.render.html import render_html
from offpol_diag.report.sections.opening import opening
from offpol_diag.report.sections.tokens import shade
from typer.testing import CliRunner

from offpol_diag.cli import app
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
            "sweep": r"seq_mis at 2 keeps \d+% of the tokens \[",
            "gate": r"Failed: k3 is [\d.]+ \[.*\], must be ≤ 0\.002\. Of the others 1 is open, 1 could not",
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


def presets_of(folder, names, dump=A, *more):
    """Compare presets; return the result and what the terminal says."""
    made = ["--json", str(folder / "p.json"), *more]
    ran = CliRunner().invoke(app, ["compare", dump, "--presets", names, *made], env={"COLUMNS": "160"})
    assert ran.exit_code == 0, ran.output
    return loads((folder / "p.json").read_text(), "p.json"), " ".join(ran.stdout.split())


def test_a_comparison_counts_tokens_of_weight_0_among_those_without_a_weight(tmp_path):
    result, said = presets_of(tmp_path, "token_is,decoupled_token_icepop")
    found = opening(result)
    tiles = {one.label: one.below for one in found.facts}
    assert tiles["token_is"].startswith("100% with a weight")
    assert tiles["decoupled_token_icepop"].startswith("99.3% with a weight")
    assert found.lede.endswith(
        "decoupled_token_icepop gives the fewest tokens a weight: 99.3% [99.1%, 99.5%]."
    )
    assert "tokens_weighted share higher 100% 99.3% token_is" in said
    assert "decoupled_token_icepop drops 298 tokens (0.66%) that token_is keeps." in said
    (dropped,) = (one for one in result.comparison.drops if one.tokens.count)
    weighted = result.presets["decoupled_token_icepop"].metrics["tokens_weighted"]
    assert weighted.value == pytest.approx(1 - dropped.tokens.count / result.dump.tokens, rel=1e-12)
    page = re.sub(r"<script.*?</script>", "", render_html(result), flags=re.DOTALL)
    assert not re.search("kept tokens|kept share|tokens kept", page, re.IGNORECASE)


def test_a_toss_up_of_presets_is_one_by_the_paired_interval(tmp_path):
    same, said = presets_of(tmp_path, "token_is,decoupled_token_icepop", str(SAMPLES / "healthy.parquet"))
    assert opening(same).h1 == "token_is and decoupled_token_icepop have the same ESS of tokens"
    assert "It is 99.99% [99.99%, 99.99%]: a toss-up, so the simpler one." in said
    data = json.loads(same.to_json())
    for word, head in (
        ("undecided", "cannot be told apart by ESS"),
        ("unknown", "is not known of all these"),
    ):
        data["comparison"]["better"]["ess_tokens"] = word
        found = opening(loads(json.dumps(data), "p.json"))
        assert head in found.h1
        assert ("toss-up" in found.lede) is (word == "undecided")


def test_an_analysis_has_no_other_opening():
    assert opening(make_summary(gates=[])) is None


@pytest.mark.parametrize(("delta", "look"), [(0.05, ""), (0.2, "1"), (0.8, "2"), (3.0, "3"), (8.0, "4")])
def test_a_token_is_coloured_by_direction_and_size(delta, look):
    """Orange (n) where the trainer finds it less likely, blue (p) where more."""
    assert shade(-delta) == (f"n{look}" if look else "")
    assert shade(delta) == (f"p{look}" if look else "")
