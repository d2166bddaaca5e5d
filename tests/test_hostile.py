"""Hostile texts in what is printed and written."""

import json
import os
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offpol_diag import shell
from offpol_diag.cli import app
from offpol_diag.gate import judged, required
from offpol_diag.number import Number
from offpol_diag.printable import printable, printable_json, printable_lines
from offpol_diag.report import FORMS, render
from offpol_diag.result import DumpFacts, Place, loads
from tests.drawn import terminal
from tests.factory import Location, make_summary, put
from tests.test_refusals import EVIL, folder, harmless  # noqa: F401

TEXT = EVIL.replace("\udcff", "")


@pytest.fixture(autouse=True)
def result(folder):  # noqa: F811
    Path("now.json").write_text(make_summary().to_json())


# ---------------------------------------------------------------- what is printed


def test_text_and_json_of_any_text_may_be_printed():
    assert printable("é ∏r ✓ 中文 a\tb\x1b[1m\nc\udcff") == r"é ∏r ✓ 中文 a\tb\x1b[1m\nc\udcff"
    assert printable_lines("a\n ::error::b\nc::d") == "a\n \\x3a:error::b\nc::d"
    harmless(text := printable_json(json.dumps({TEXT: "\x7f\u200d"}, indent=1, ensure_ascii=False)))
    assert json.loads(text) == {TEXT: "\x7f\u200d"}


def test_a_bug_has_no_line_that_a_name_began(capsys):
    with pytest.raises(SystemExit), shell.exit_codes():
        raise ValueError(EVIL)
    harmless(capsys.readouterr().err)


def hostile():
    """Make a result in which every text that someone wrote is hostile, and some numbers nearly overflow."""
    summary, deep = make_summary(), {"a": 1}
    for _ in range(300):
        deep = {"a": [deep]}
    keys = (TEXT, "::error::key", "b", "nan", "inf", "1e999", "1_000", "٣", "")
    numbers = [{"k3": Number(value=(i + 1) * 1e307)} for i in range(len(keys))]
    places = [Place(key, 9, 9, one) for key, one in zip(keys, numbers, strict=True)]
    put(summary, TEXT, Location(title=TEXT, places=places))
    odd = {"files": [TEXT, "a\udcff"], "others": [TEXT, "::error::other"], "ignored": ["::error::ignored"]}
    odd |= {"provenance": {TEXT: TEXT, "k\ud800": ["\udfff"], "deep": deep}, "notes": [TEXT]}
    summary.dump = DumpFacts(**make_summary().dump.model_dump() | odd)
    summary.dump.columns["step"] = TEXT
    for preset in summary.presets.values():
        preset.summary = preset.method = TEXT
    summary.presets[TEXT] = next(iter(summary.presets.values()))
    asked = required(max=["k3=1e-9", f"{TEXT.replace(':', '')}=1"])
    return summary.model_copy(update={"gates": list(judged(summary, asked))})


@pytest.mark.parametrize("form", [*FORMS, "terminal", "verbose", "quiet"])
def test_every_form_of_a_result_is_harmless_and_it_is_read_again(form):
    how = {"terminal": {}, "verbose": {"verbose": True}, "quiet": {"quiet": True}}
    again = loads(hostile().to_json(), "again")
    assert (again.dump.files[1], "…" in again.to_json()) == (r"a\udcff", True)
    for made in (hostile(), again):
        text = terminal(made, **how[form]) if form in how else render(made, form)
        text.encode()
        assert not set("\x1b\x9b\x07") & set(text)
        if form != "report":
            harmless(text)


@pytest.mark.parametrize("line", ["mine", ""])
def test_a_preset_of_ones_own_is_shown_harmless(line):
    text = json.dumps(TEXT)
    Path("p.toml").write_text(f"[mine]\nsummary = {text}\nnote = {text}\nweight = {{ upper = 2 }}\n")
    ran = CliRunner().invoke(app, ["presets", "--preset-file", "p.toml", *line.split()])
    assert ran.exit_code == 0, ran.stderr
    harmless(ran.stdout)


@pytest.mark.parametrize("stem", ["m" * 246, "中" * 80, os.fsdecode(b"a\xff")])
def test_a_report_of_a_result_of_any_name_is_written(stem):
    Path("now.json").rename(f"{stem}.json")
    for to in ([], ["-o", f"{stem}.html"]):
        ran = CliRunner().invoke(app, ["report", f"{stem}.json", *to])
        assert ran.exit_code == 0, ran.stderr
        harmless(ran.stdout)


# ---------------------------------------------------------------- all or nothing

ALL = "analyze --presets token_is --json r.json -o r.html --md r.md --sequences rows.parquet"


@pytest.mark.parametrize("fails", ["report.page.page", "report.markdown", "report.terminal.terminal", ""])
def test_all_reports_of_a_run_appear_or_none(fails, monkeypatch):
    def fail(*_, **__):
        raise OverflowError("a chart")

    if fails:
        module, _, name = fails.rpartition(".")
        monkeypatch.setattr(import_module(f"offpol_diag.{module}"), name, fail)
    ran = CliRunner().invoke(app, ALL.split())
    made = {"now.json", "rows.parquet", *([] if fails else ["r.html", "r.json", "r.md"])}  # rows are whole
    assert (ran.exit_code, {path.name for path in Path().iterdir()}) == (2 if fails else 0, made), ran.output
