"""Hostile texts in what is printed and written, and files that appear whole or not at all."""

import io
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offpol_diag import shell
from offpol_diag.cli import app
from offpol_diag.errors import OffpolError
from offpol_diag.gate import judged, required
from offpol_diag.number import Number
from offpol_diag.printable import printable, printable_json, printable_lines
from offpol_diag.report import FORMS, render
from offpol_diag.report.answer import Answer, Fact, Line, Tile
from offpol_diag.report.terminal import terminal as drawn_in_terminal
from offpol_diag.result import DumpFacts, Place, loads
from offpol_diag.table import Table
from tests.drawn import terminal
from tests.factory import Location, make_summary, put
from tests.test_refusals import DIGITS, EVIL, folder, harmless  # noqa: F401

TEXT = EVIL.replace("\udcff", "")
SCRIPT = (sys.executable, "-m", "offpol_diag")


@pytest.fixture(autouse=True)
def result(folder):  # noqa: F811
    Path("now.json").write_text(make_summary().to_json())


def files():
    return sorted(path.name for path in Path().iterdir())


def run(*args):
    ran = CliRunner().invoke(app, list(args))
    assert ran.exit_code == 0, ran.stderr
    harmless(ran.stdout)


# ---------------------------------------------------------------- what is printed


def test_text_and_json_of_any_text_may_be_printed():
    assert printable("é ∏r ✓ 中文") == "é ∏r ✓ 中文"
    assert printable("a\tb\x1b[1m\nc\udcff") == r"a\tb\x1b[1m\nc\udcff"
    assert printable_lines("a\n ::error::b\nc::d") == "a\n \\x3a:error::b\nc::d"
    harmless(printable(EVIL))
    harmless(printable_lines(EVIL))
    value = {TEXT: "\x7f\u200d\U000e0001"}
    harmless(text := printable_json(json.dumps(value, indent=1, ensure_ascii=False)))
    assert json.loads(text) == value
    assert json.loads(printable_json(json.dumps("a\udcff", ensure_ascii=False))) == r"a\udcff"


def test_errors_and_remarks_have_no_line_that_a_name_began_and_a_long_one_is_cut(capsys):
    for error in (OffpolError(EVIL, EVIL, (EVIL, "second")), ValueError(EVIL)):
        with pytest.raises(SystemExit), shell.exit_codes():
            raise error
    shell.note(shell.line(EVIL))
    harmless(capsys.readouterr().err)
    with pytest.raises(SystemExit):
        shell.complain(OffpolError(f"begin {DIGITS} end", "hint"))
    cut = capsys.readouterr().err
    assert (cut.startswith("error: begin 9"), "9 end\n" in cut, len(cut) < 2000) == (True, True, True)


def test_every_part_of_an_answer_is_drawn_harmless(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    table = Table("t", EVIL, (EVIL, "b"), ((EVIL, EVIL), ("::error::first cell", "")), (EVIL,))
    facts = (Fact(EVIL, EVIL), Fact("Candidates", "", EVIL, (Line(EVIL, "no", EVIL),)))
    tiles = (Tile(EVIL, EVIL, EVIL, None, EVIL, EVIL, EVIL, short=True),)
    more = {"facts": facts, "tiles": tiles, "over": EVIL, "heavy": EVIL, "tables": (table,)}
    given = Answer(EVIL, EVIL, EVIL, "bad", EVIL, "word " * 18 + " ::error::wrapped", (EVIL,), **more)
    given = replace(given, code=((EVIL, EVIL),), next=((EVIL, EVIL),), remarks=(EVIL,))
    for how in ({}, {"verbose": True}, {"quiet": True}):
        harmless(drawn_in_terminal(given, **how))


def hostile():
    """Make a result in which every text that someone wrote is hostile."""
    summary = make_summary()
    places = [
        Place(key=key, tokens=9, sequences=9, numbers={"k3": Number(value=0.1 * (i + 1))})
        for i, key in enumerate((TEXT, "::error::key", "b"))
    ]
    put(summary, TEXT, Location(title=TEXT, places=places))
    dump = summary.dump
    dump.files[:], dump.others, dump.ignored = [TEXT], [TEXT, "::error::other"], [TEXT, "::error::ignored"]
    dump.columns["step"] = dump.provenance[TEXT] = TEXT
    dump.notes.append(TEXT)
    for preset in summary.presets.values():
        preset.summary = preset.method = TEXT
    summary.presets[TEXT] = next(iter(summary.presets.values()))
    asked = required(max=["k3=1e-9", f"{TEXT.replace(':', '')}=1"])
    return summary.model_copy(update={"gates": list(judged(summary, asked))})


@pytest.mark.parametrize("form", [*FORMS, "terminal", "verbose", "quiet"])
def test_every_form_of_a_result_is_harmless(form):
    how = {"terminal": {}, "verbose": {"verbose": True}, "quiet": {"quiet": True}}
    text = terminal(hostile(), **how[form]) if form in how else render(hostile(), form)
    text.encode()
    assert not set("\x1b\x9b\x07") & set(text)
    if form != "report":
        harmless(text)


def test_a_preset_of_ones_own_is_shown_harmless():
    evil = json.dumps(TEXT)
    Path("p.toml").write_text(f"[mine]\nsummary = {evil}\nnote = {evil}\nweight = {{ upper = 2 }}\n")
    for args in (["mine"], ["mine", "--json", "-"], []):
        run("presets", *args, "--preset-file", "p.toml")


@pytest.mark.parametrize("stem", ["m" * 246, "中" * 80, os.fsdecode(b"a\xff")])
def test_a_report_has_a_name_that_fits_and_one_that_is_not_utf8_is_written(stem):
    Path("now.json").rename(f"{stem}.json")
    run("report", f"{stem}.json", "-o", f"{stem}.html")
    run("report", f"{stem}.json")
    assert {name.rpartition(".")[2] for name in files()} == {"json", "html"}


# ---------------------------------------------------------------- all or nothing

ALL = "--presets token_is --json r.json -o r.html --md r.md --sequences rows.parquet"


@pytest.mark.parametrize("fails", ["report.page.page", "report.markdown", "report.terminal.terminal", ""])
def test_all_reports_of_a_run_appear_or_none(fails, monkeypatch):
    def fail(*_, **__):
        raise OverflowError("a chart")

    if fails:
        module, _, name = fails.rpartition(".")
        monkeypatch.setattr(import_module(f"offpol_diag.{module}"), name, fail)
    ran = CliRunner().invoke(app, ["analyze", *ALL.split()])
    made = ["rows.parquet"] if fails else ["r.html", "r.json", "r.md", "rows.parquet"]  # rows are whole
    assert (ran.exit_code, files()) == (2 if fails else 0, sorted(["now.json", *made])), ran.output


@pytest.mark.parametrize(
    ("args", "to", "code", "made"),
    [
        ("report now.json -o x.html --md /dev/full", "", 2, []),
        ("report now.json -o x.html --md -", "> /dev/full", 2, []),
        ("presets token_is --for verl --json x.json", "> /dev/full", 2, []),
        ("report now.json -o x.html", "| true", 141, ["x.html"]),  # nobody reads stdout to its end
    ],
)
def test_no_file_appears_where_a_device_or_stdout_is_full(args, to, code, made):
    line = f"set -o pipefail; {shlex.join([*SCRIPT, *args.split()])} {to}"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, files()) == (code, ["now.json", *made]), ran.stderr
    assert (ran.stderr.count("\n"), "No space left on device" in ran.stderr) == (
        (0, False) if made else (3, True)
    )


# ---------------------------------------------------------------- results that no analysis wrote


def test_places_with_odd_names_and_numbers_are_drawn():
    summary = make_summary()
    places = [
        Place(key=key, tokens=9, sequences=9, numbers={"k3": Number(value=(i + 1) * 1e307)})
        for i, key in enumerate(("nan", "inf", "-inf", "1e999", "1_000", "٣", ""))
    ]
    put(summary, "host", Location(title="host", places=places))
    Path("odd.json").write_text(summary.to_json())
    run("gate", "odd.json", "--max", "k3=1", "--html", "odd.html", "--md", "odd.md")


def test_json_holds_any_provenance_of_a_writer():
    deep = 1
    for _ in range(300):
        deep = {"a": [deep]}
    summary = make_summary()
    odd = {"files": ["a\udcff"], "provenance": {"k\ud800": ["\udfff"], "deep": deep}}
    summary.dump = DumpFacts(**summary.dump.model_dump() | odd)
    again = loads(summary.to_json(), "again")
    assert (again.dump, again.dump.files) == (summary.dump, [r"a\udcff"])
    assert "…" in again.to_json()
    for form in FORMS:
        render(again, form).encode()
