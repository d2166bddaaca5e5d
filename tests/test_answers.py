"""The answer of every command, and laws over all answers: what is said stands in every form."""

from __future__ import annotations

import html as markup
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from drawn import html, markdown, terminal
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.number import Number
from offpol_diag.numerals import formatted, minus
from offpol_diag.presets.catalogue import FAMILIES
from offpol_diag.report import LIMIT, answered
from offpol_diag.report import markdown as draw_markdown
from offpol_diag.report.analyze import PRESETS as COLUMNS
from offpol_diag.report.analyze import pairs
from offpol_diag.report.analyze import presets as of_presets
from offpol_diag.report.answer import Answer, shown
from offpol_diag.report.parts import parts, shade
from offpol_diag.report.words import checks
from offpol_diag.report.words import columns as in_short
from offpol_diag.result import Diagnosis, loads
from offpol_diag.table import Table
from tests.factory import (
    dump_facts,
    gates,
    make_comparison,
    make_summary,
    metrics,
    number,
    preset,
    recommendation,
    unknown,
    with_numbers,
)
from tests.frozen.cases import DUMPS

SAMPLES = Path(__file__).parents[1] / "sample_data"
A, B = (str(SAMPLES / f"{name}.parquet") for name in ("stale", "quantized"))
COMMANDS = {
    "analyze": ("analyze", A, "--presets", "token_is,seq_mis"),
    "doctor": ("doctor", A),
    "presets": ("compare", A, "--presets", "token_is,seq_mis,geo_rs"),
    "runs": ("compare", A, B),
    "sweep": ("sweep", A, "--preset", "geo_rs"),
    "gate": ("gate", A, "--max", "k3=0.002", "--min", "ess_tokens=0.1", "--max", "step:k3=0.01"),
}
FROZEN = {  # the dumps of tests/frozen
    name: ("analyze", str(dump.folder / f"{name}.parquet"), "--presets", "token_is,seq_mis,pure_is")
    for name, dump in DUMPS.items()
}
VERDICTS = {
    "analyze": r"ELEVATED off-policy mismatch: K3 KL is 0\.012 nats per token \[",
    "doctor": r"ELEVATED off-policy mismatch: K3 KL is 0\.012 nats per token \[",
    "presets": r"ESS of tokens: token_is [\d.]+% \[",
    "runs": r"Better in B: K3 KL is 0\.012 .* in A and 0\.00053 .* in B",
    "sweep": r"geo_rs at 1\.001 keeps 22% of the tokens \[",
    "gate": r"Failed: k3 is [\d.]+ \[.*\], must be ≤ 0\.002 \(1 failed, 1 could not say, 1 open\)",
}
MADE = {
    "of the factory": {"gates": []},
    "comparison of the factory": {"comparison": make_comparison()},
    "gate of the factory": {"gates": gates()},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a result of each command, and of the factory."""
    folder, found = tmp_path_factory.mktemp("answers"), {}
    for name, command in (COMMANDS | FROZEN).items():
        more = ["-q", "--json", str(folder / "r.json")]
        ran = CliRunner().invoke(app, [*command, *more, *(["--no-html"] if "analyze" in command else [])])
        assert ran.exit_code == (name == "gate"), ran.output
        assert ran.stdout.count("\n") == 1
        found[name] = loads((folder / "r.json").read_text(), "r.json")
    return found | {name: make_summary(**changes) for name, changes in MADE.items()}


ALL = (*COMMANDS, *FROZEN, *MADE)


def flat(text):
    """Return a text without markup, escapes and the breaks of lines, of which only the words count."""
    return re.sub(r"[\s\\`|✓✗]", "", markup.unescape(text))


@pytest.fixture(scope="module")
def forms(results):
    """Return a function that draws a result in every form, each once."""

    @cache
    def drawn(name):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "3000")  # where nothing is broken or left out
            text = terminal(results[name], verbose=True)
        page = html(results[name])
        shown = re.sub(r"<(script|style).*?</\1>|<[^>]*>", "", page, flags=re.DOTALL)
        return {"terminal": text, "markdown": markdown(results[name]), "page": shown}

    return drawn


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", ["terminal", "markdown", "page"])
def test_every_form_says_the_verdict_the_cautions_the_facts_and_what_always_stands(
    results, forms, name, form
):
    found = answered(results[name])
    tables = [one for one in found.tables if one.shown == "always"]
    if form == "page":  # which has a table of all presets
        tables = [one for one in tables if one.id != "corrections"]
    cells = [shown(cell) for one in tables for row in (one.header, *one.rows) for cell in row]
    needed = [found.sentence, found.more, *found.cautions]
    for one in found.facts:
        card = form == "page" and one.label == "Bug?" and one.title  # whose checks say what its sentence does
        needed += [one.title, "" if card else one.sentence]
        needed += [line.text for line in one.lines if form != "page" or one.title]
    needed += [text for one in cells for text in (one.text, one.interval)]
    needed += [text for one in found.tiles for text in (one.label, one.value, one.interval)]
    text = flat(forms(name)[form])
    assert [one for one in needed if flat(minus(one)) not in text] == []


@pytest.mark.parametrize("name", ALL)
def test_tables_are_sound_and_every_number_has_its_interval(results, forms, name):
    found = answered(results[name])
    below = [table for part in parts(results[name], found) for table in part.tables]
    assert len({one.id for one in below}) == len(below)
    tables = [*found.tables, *below]
    assert [one.id for one in tables for row in one.rows if len(row) != len(one.header)] == []
    for form, left_out in (("terminal", ("page", "folded")), ("markdown", ("page",))):
        drawn = [table for table in found.tables if table.shown not in left_out]
        numbers = [cell for one in drawn for row in one.rows for cell in row if isinstance(cell, Number)]
        needed = {flat(" ".join(map(minus, formatted(one)))) for one in numbers if one.interval}
        text = flat(forms(name)[form])
        assert [one for one in needed if one not in text] == []
        assert not {"nan", "None", "null", "inf"} & set(forms(name)[form].split())


@pytest.mark.parametrize("name", FROZEN)
def test_every_tile_is_the_number_of_its_name_in_the_json_and_stands_on_the_page(results, forms, name):
    numbers, tiles = json.loads(results[name].to_json())["numbers"], answered(results[name]).tiles
    assert len(tiles) == {"shift": 6, "two_policies": 7, "forty": 7}.get(name, 8)  # no k̂, rejection or reward
    for one in tiles:
        subject, _, number = one.key.rpartition(".")
        kept = numbers["dump"].get(one.key) or numbers[f"preset/{subject}"][number]
        assert kept[0] == one.number.value, one.key
        assert flat(f"{one.label}{one.band}{one.value}") in flat(forms(name)["page"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_verdict_which_is_the_heading_of_the_page(results, name):
    page = html(results[name])
    heading = re.sub(r"<[^>]*>", "", re.search(r"<h1.*?</h1>", page, re.DOTALL)[0])
    assert re.search(VERDICTS[name], markup.unescape(heading)), heading
    assert flat(answered(results[name]).headline).lower() == flat(heading).lower()
    assert terminal(results[name], quiet=True) == f"{answered(results[name]).headline}\n"
    assert html(loads(results[name].to_json(), "x")) == page  # drawn again from the result, byte for byte


def test_a_summary_with_the_bare_minimum_still_makes_a_report():
    bare = {"metrics": {}, "presets": {}, "by": {}, "worst": [], "gates": [], "recommendation": None}
    verdicts = ("healthy", "honest_mismatch", "bug", "cannot_tell")
    for given in (None, *(Diagnosis(verdict=verdict, headline="A headline.") for verdict in verdicts)):
        summary = make_summary(**bare, diagnosis=given)
        said = "a headline" if given and given.verdict == "bug" else "no pair of policies"
        assert all(said in draw(summary) for draw in (html, markdown, terminal))


# ---------------------------------------------------------------- of an analysis


def facts(**changes):
    return {one.label: one for one in answered(make_summary(gates=[], **changes)).facts}


def advised(**changes):
    return facts(recommendation=recommendation().model_copy(update=changes))


def texts(fact):
    return [line.text for line in fact.lines]


def table(name, **changes):
    """Return a table of an analysis, of its answer or further down its page."""
    summary = make_summary(**{"gates": []} | changes)
    found = answered(summary)
    every = [*found.tables, *(one for part in parts(summary, found) for one in part.tables)]
    return next(one for one in every if one.id == name)


OPEN_K1 = "K1 is negative, and no known fault explains it"


@pytest.mark.parametrize(
    ("k1", "mark", "said"),
    [
        (number(0.01, 0.001, "nats"), "ok", "K1 is not negative"),
        (number(-0.01, 0.02, "nats"), "ok", "K1 is not clearly negative"),
        (Number(value=-0.01, unit="nats"), "ok", "K1 is not clearly negative"),  # without an interval
        (number(-0.01, 0.001, "nats"), "un", OPEN_K1),
    ],
)
def test_k1_is_negative_by_its_interval_and_then_it_is_said_what_else_makes_it_so(k1, mark, said):
    lines = checks(make_summary(metrics=metrics() | {"k1": k1}))
    (check,) = (one for one in lines if one.text.startswith("K1"))
    assert (check.mark, check.text, "Rounding" in check.detail) == (mark, said, mark == "un")


def test_the_configuration_that_was_asked_for_comes_first_then_the_dumps_own():
    own = dump_facts(provenance={"trainer": "slime"})
    names = dict(facts(dump=own)["What to do"].code)
    assert next(iter(names)) == "slime"
    asked = recommendation().model_copy(update={"config": names["trl"]})
    first = [name for name, _ in facts(dump=own, recommendation=asked)["What to do"].code]
    assert first[:2] == ["trl", "slime"]


@pytest.mark.parametrize("name", [family[0] for family in FAMILIES.values()])
def test_the_remedy_names_its_preset_by_a_command_that_runs(name):
    lines = texts(advised(method=name, title="a method")["What to do"])
    (line,) = [one for one in lines if one.startswith("As a preset: ")]
    program, *arguments = shlex.split(line.removeprefix("As a preset: ").strip("`"))
    ran = CliRunner().invoke(app, arguments)
    assert (program, ran.exit_code) == ("offpol-diag", 0), ran.output


def test_what_a_decision_rests_on_and_what_is_not_known_come_with_it():
    found = advised(title="token TIS at 2.0")
    assert found["What to do"].title == "Use token TIS at 2.0"
    assert found["How sure"].sentence == "Vehtari et al. 2024, Pareto smoothed importance sampling"
    assert "Not known: how far the gradient" in texts(found["How sure"])[0]


def test_the_weights_stand_beside_the_raw_ones_and_the_configuration_where_a_trainer_was_named():
    found = advised(title="token TIS at 2.0")["What to do"].table
    assert found.header == ("on this dump", "uncorrected", "token TIS at 2.0")
    own = make_summary().preset("token_is")["ess_tokens"]
    assert found.rows[0][1:] == (metrics()["ess_tokens"], own)
    for config in ("rollout_is: token\n", None):
        given = recommendation().model_copy(update={"config": config})
        found = make_summary(gates=[], recommendation=given)
        assert ("ready to paste" in terminal(found)) is ("ready to paste" in markdown(found)) is bool(config)


def test_a_pair_of_policies_that_is_lacking_has_no_column():
    lacking = {"drift2.k1": unknown("missing column x"), "drift2.k3": unknown("missing column x")}
    gap = {"k3": Number(value=0.1), "total.k3": Number(log10=400.0)} | lacking
    found = pairs(make_summary(metrics=metrics() | gap))
    assert found.header == ("number", "rollout → old", "rollout → current")


# ---------------------------------------------------------------- presets


def test_presets_that_need_a_column_are_named_with_it():
    some = {name: preset("P", "m", 0.5).but(needs=["old_log_probs"]) for name in ("p", "q")}
    found = of_presets(make_summary(presets=some | {"r": preset("R", "m", 0.5)}))
    assert [row[0] for row in found.rows] == ["r"]
    assert found.notes[1] == "The dump lacks old_log_probs, which p and q would need."


def test_every_preset_has_a_row_the_recommended_method_and_those_beside_it_first():
    some = {name: preset("x", f"weight {name}", 0.1) for name in "abcdef"}
    given = recommendation().model_copy(update={"method": "d", "alternatives": ["f"]})
    rows = table("presets", presets=some, recommendation=given).rows
    assert [row[0] for row in rows] == ["d (recommended)", "f", "a", "b", "c", "e"]
    assert rows[0][1] == "weight d"


def test_the_table_of_presets_has_the_rule_and_what_is_kept_dropped_and_left():
    numbers = {name: number(place / 10) for place, name in enumerate(COLUMNS)}
    summary = make_summary(presets={"a": preset("x", "weight r", 0.9)}, recommendation=None)
    summary = with_numbers(summary, "preset/a", numbers)
    assert of_presets(summary).rows == [("a", "weight r", *numbers.values())]


@pytest.mark.parametrize(("delta", "look"), [(0.05, ""), (0.2, "1"), (0.8, "2"), (3.0, "3"), (8.0, "4")])
def test_a_token_is_coloured_by_direction_and_size(delta, look):
    """Orange (n) where the trainer finds it less likely, blue (p) where more."""
    assert shade(-delta) == (f"n{look}" if look else "")
    assert shade(delta) == (f"p{look}" if look else "")


# ---------------------------------------------------------------- data


def test_a_dump_without_groups_says_what_that_means_and_provenance_is_told_as_json():
    columns = {"rollout_log_probs": "rollout_log_probs", "old_log_probs": "old_log_probs"}
    for more, said in (({"group_id": "uid"}, 0), ({}, 1)):
        summary = make_summary(gates=[], dump=dump_facts(columns=columns | more))
        (part,) = (one for one in parts(summary, answered(summary)) if one.id == "dump")
        assert " ".join(part.text).count("Without a group_id each sequence is a group of its own") == said
    rows = dict(table("dump", dump=dump_facts(provenance={"model": "q3", "regime": {"lags": [2]}})).rows)
    assert (rows["provenance: model"], rows["provenance: regime"]) == ("q3", '{"lags": [2]}')


def test_columns_of_other_names_and_ignored_ones_are_named_in_short_and_every_one_on_the_page():
    read = {"rollout_log_probs": "vllm", "old_log_probs": "old_log_probs", "step": "global_step"}
    names = [f"feature_{i}" for i in range(300)]
    summary = make_summary(gates=[], dump=dump_facts(columns=read, others=["host"], ignored=names))
    short = "Columns: rollout_log_probs = vllm, step = global_step, no mask, ignored: feature_0, feature_1, "
    short += "feature_2, feature_3, feature_4 and 295 more."
    assert short in " ".join(terminal(summary).split())
    assert short in markdown(summary)
    for form in (html(summary), summary.to_json()):
        assert [name for name in ("vllm", "global_step", "host", names[-1]) if name not in form] == []
    assert in_short(dump_facts(columns={"response_mask": "response_mask"}, ignored=[])) == ""


# ---------------------------------------------------------------- comparisons


def test_a_bug_in_either_run_comes_before_their_comparison(results):
    data = json.loads(results["runs"].to_json())
    data["against"][0]["run"]["diagnosis"] |= {"verdict": "bug", "headline": "The columns are shifted."}
    found = answered(loads(json.dumps(data), "r.json"))
    assert (found.headline, found.tone) == ("Bug in B: The columns are shifted", "bad")


# ---------------------------------------------------------------- pull requests


def test_markdown_holds_the_answer_and_folds_of_the_rest():
    text = markdown(make_summary(gates=[]))
    top, _, folds = text.partition("<details>")
    assert "| K3 KL | 0.0020 [0.0019, 0.0022]" in top
    assert len(top.splitlines()) < 60
    assert "What it rests on" in folds
    assert "| khat_sequences | 1.2\\* [1.0, 1.4] (1) |" in folds  # with its caution
    assert "(1) k̂ exceeds 0.67" in folds
    assert "✗ failed" in markdown(make_summary(gates=gates())).partition("<details>")[0]


def test_markdown_escapes_what_would_break_a_table_or_open_a_tag():
    evil = recommendation().model_copy(update={"sentence": "a|b <b>bold</b> *x* `y`\nz [l](http://x)"})
    text = markdown(make_summary(gates=[], recommendation=evil))
    assert r"a\|b &lt;b>bold&lt;/b> \*x\* \`y\` z [l]\(http://x)" in text


def test_markdown_stays_within_what_github_accepts_and_says_what_it_left_out():
    notes = [f"note {i}: {'word ' * 20}" for i in range(1000)]
    assert "980 more: the report has all" in markdown(make_summary(dump=dump_facts(notes=notes), gates=[]))
    wide = Table("t", "Many", ("a",), [(f"row {i}",) for i in range(LIMIT // 6)], shown="more")
    text = draw_markdown(Answer("a dump", "", "A verdict", "good", tables=(wide,)))
    assert "A verdict" in text
    assert "The rest is left out: a comment holds no more." in text
    assert "<details>" not in text


@pytest.mark.parametrize("name", ALL)
def test_every_answer_says_what_limits_its_numbers(results, name):
    facts = dump_facts(notes=["a note on the data"], skipped=2)
    said = " ".join(answered(results[name].model_copy(update={"dump": facts})).cautions)
    assert "a note on the data" in said
    assert "2 rows skipped as bad" in said


def test_copies_and_what_cannot_be_told_are_not_shown_as_good():
    typical = metrics() | {"k3": number(1e-4, 1e-5, "nats")}
    diagnosed = make_summary().diagnosis.model_copy(update={"verdict": "cannot_tell", "causes": []})
    copies = recommendation().model_copy(update={"rule": "identical"})
    assert answered(make_summary(metrics=typical)).tone == "good"
    assert answered(make_summary(metrics=typical, diagnosis=diagnosed)).tone == "warn"
    assert answered(make_summary(metrics=typical, recommendation=copies)).tone == "warn"


def test_a_doctor_says_too_that_there_is_too_little_data():
    for sequences, word in ((3, "TOO LITTLE DATA for a verdict"), (5120, "ELEVATED off-policy mismatch")):
        given = make_summary(recommendation=None, dump=dump_facts(sequences=sequences), gates=[])
        assert answered(given).word == word


def test_what_limits_the_numbers_of_the_other_run_is_said_too(results):
    given = results["runs"]
    run = given.against[0].run.model_copy(update={"dump": dump_facts(notes=["a note on B"])})
    against = given.against[0].model_copy(update={"run": run})
    assert "B: a note on B" in answered(given.model_copy(update={"against": [against]})).cautions
