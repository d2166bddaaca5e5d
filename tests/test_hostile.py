"""Hostile and odd input on the command line: what is printed, what is refused, what is left behind."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from factory import make_summary, put
from typer.testing import CliRunner, Result

from offpol_diag import shell
from offpol_diag.cli import app
from offpol_diag.errors import OffpolError
from offpol_diag.gate import judged, required
from offpol_diag.number import Number
from offpol_diag.printable import CONTROLS, printable, printable_json, printable_lines
from offpol_diag.report import FORMS, render
from offpol_diag.report.answer import Answer, Fact, Line, Tile
from offpol_diag.report.terminal import terminal as drawn_in_terminal
from offpol_diag.report.tokens import _response
from offpol_diag.result import (
    DumpFacts,
    Lengths,
    Place,
    Sweep,
    SweptPoint,
    WorstSequence,
    loads,
)
from offpol_diag.table import Table
from tests.drawn import terminal
from tests.factory import Location

SCRIPT = (sys.executable, "-m", "offpol_diag")
EVIL = "x\x1b[31m\x9b2J\x07\u202e\n::error::pwned\r\n  ::stop-commands::t\u2028##[error]y\udcff"
DIGITS = "9" * 5000
READ = ("analyze", "-q", "--no-html")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [*(x for x in os.environ if x.startswith("OFFPOL_DIAG_")), "COLUMNS", "GITHUB_ACTIONS"]:
        monkeypatch.delenv(name, raising=False)
    Path("now.json").write_text(make_summary().to_json())
    return tmp_path


def run(*args: str, **env: str) -> Result:
    return CliRunner().invoke(app, list(args), env=env)


def in_process(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, with the program's own handling of errors."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"argv": ["offpol-diag", *args], "stdout": out, "stderr": err}.items():
            patch.setattr(sys, name, value)
        with pytest.raises(SystemExit) as stop:
            app(prog_name="offpol-diag")
    code, texts = stop.value.code, []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return subprocess.CompletedProcess(args, int(code or 0), *texts)


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def harmless(text: str) -> None:
    """Check that a text holds nothing that drives a terminal or is a command to a CI system."""
    assert not [char for char in text if char != "\n" and unicodedata.category(char) in CONTROLS]
    assert not re.search(r"^\s*::|##\[", text, re.MULTILINE)


def refused(ran: Result | subprocess.CompletedProcess[str]) -> str:
    """Check a refusal: one error, a blank line, a hint, code 2; return the error."""
    code = ran.exit_code if isinstance(ran, Result) else ran.returncode
    assert code == 2, (ran.stdout, ran.stderr)
    error, hint = ran.stderr.split("\n\n")
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert len(hint.splitlines()) == 1
    assert len(ran.stderr) < 10_000
    harmless(ran.stderr)
    return error


# ---------------------------------------------------------------- what is printed


def test_text_and_json_of_any_text_may_be_printed() -> None:
    assert printable("é ∏r ✓ 中文") == "é ∏r ✓ 中文"
    assert printable("a\tb\x1b[1m\nc\udcff") == r"a\tb\x1b[1m\nc\udcff"
    assert printable_lines("a\n ::error::b\nc::d") == "a\n \\x3a:error::b\nc::d"
    harmless(printable(EVIL))
    harmless(printable_lines(EVIL))
    value = {EVIL.replace("\udcff", ""): "\x7f\u200d\U000e0001"}
    text = printable_json(json.dumps(value, indent=1, ensure_ascii=False))
    harmless(text)
    assert json.loads(text) == value
    assert json.loads(printable_json(json.dumps("a\udcff", ensure_ascii=False))) == r"a\udcff"


def test_errors_and_remarks_have_no_line_that_a_name_began(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shell.complain(OffpolError(EVIL, EVIL, (EVIL, "second")))
    shell.note(shell.line(EVIL))
    with pytest.raises(SystemExit), shell.exit_codes():
        raise ValueError(EVIL)
    said = capsys.readouterr()
    harmless(said.err)
    harmless(said.out)
    with pytest.raises(SystemExit):
        shell.complain(OffpolError(f"begin {DIGITS} end", "hint"))
    cut = capsys.readouterr().err
    assert (cut.startswith("error: begin 9"), "9 end\n" in cut, len(cut) < 2000) == (True, True, True)


def test_every_part_of_an_answer_is_drawn_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    table = Table("t", EVIL, (EVIL, "b"), ((EVIL, EVIL), ("::error::first cell", "")), (EVIL,))
    facts = (Fact(EVIL, EVIL), Fact("Candidates", "", EVIL, (Line(EVIL, "no", EVIL),)))
    tiles = (Tile(EVIL, EVIL, EVIL, None, EVIL, EVIL, EVIL, short=True),)
    more = {"facts": facts, "tiles": tiles, "over": EVIL, "heavy": EVIL, "tables": (table,)}
    given = Answer(EVIL, EVIL, EVIL, "bad", EVIL, "word " * 18 + " ::error::wrapped", (EVIL,), **more)
    given = replace(given, code=((EVIL, EVIL),), next=((EVIL, EVIL),), remarks=(EVIL,))
    for verbose in (False, True):
        harmless(drawn_in_terminal(given, verbose))
    harmless(drawn_in_terminal(given, quiet=True))


def hostile() -> Any:
    """Make a result in which every text that someone wrote is hostile."""
    evil = EVIL.replace("\udcff", "")
    summary = make_summary()
    places = [
        Place(key=key, tokens=9, sequences=9, numbers={"k3": Number(value=0.1 * (i + 1))})
        for i, key in enumerate((evil, "::error::key", "b"))
    ]
    put(summary, evil, Location(title=evil, places=places))
    summary.dump.files[:] = [evil]
    summary.dump.columns["step"] = evil
    summary.dump.others, summary.dump.ignored = [evil, "::error::other"], [evil, "::error::ignored"]
    summary.dump.notes.append(evil)
    summary.dump.provenance[evil] = evil
    for preset in summary.presets.values():
        preset.summary = preset.method = evil
    summary.presets[evil] = next(iter(summary.presets.values()))
    asked = required(max=["k3=1e-9", f"{evil.replace(':', '')}=1"])
    return summary.model_copy(update={"gates": list(judged(summary, asked))})


@pytest.mark.parametrize("form", [*FORMS, "terminal", "verbose", "quiet"])
def test_every_form_of_a_result_is_harmless(form: str) -> None:
    how = {"terminal": {}, "verbose": {"verbose": True}, "quiet": {"quiet": True}}
    text = terminal(hostile(), **how[form]) if form in how else render(hostile(), form)
    text.encode()
    if form == "report":
        assert not set("\x1b\x9b\x07") & set(text)
    else:
        harmless(text)


NAMES = {
    "a file": ("report", "{}.json"),
    "a dump": ("analyze", "{}.parquet", "--no-html"),
    "a preset": ("presets", "{}"),
    "a preset file": ("presets", "--preset-file", "{}"),
    "a trainer": ("presets", "token_is", "--for", "{}"),
    "a setting": ("presets", "token_is@{}=1"),
    "a command": ("{}",),
    "an option": ("gate", "now.json", "--{}"),
    "a bound": ("gate", "now.json", "--max", "{}"),
    "a tolerance": ("gate", "now.json", "--baseline", "now.json", "--tolerance", "{}"),
    "a place": ("report", "now.json", "-o", "no/{}"),
    "threads": (*READ, "--threads", "{}"),
}
SETTINGS = "offpol-diag.toml"
KEYS = {
    "settings": (SETTINGS, '"{}" = 1', ("analyze",)),
    "a setting's value": (SETTINGS, 'device = "{}"', READ),
    "a preset file": ("p.toml", '["{}"]\nweight = 1', ("presets", "--preset-file", "p.toml")),
    "a preset's key": ("p.toml", '[a]\n"{}" = 1', ("presets", "--preset-file", "p.toml")),
    "a gate file": ("g.toml", '["{}"]\nx = 1', ("gate", "now.json", "--gates", "g.toml")),
    "a result": ("r.json", '{{"{}": 1}}', ("report", "r.json")),
}


@pytest.mark.parametrize("args", NAMES.values(), ids=NAMES.keys())
def test_a_name_in_an_error_is_harmless(args: tuple[str, ...]) -> None:
    refused(in_process(*(arg.format(EVIL) for arg in args)))


@pytest.mark.parametrize(("name", "text", "args"), KEYS.values(), ids=KEYS.keys())
def test_a_key_in_an_error_is_harmless(name: str, text: str, args: tuple[str, ...]) -> None:
    evil = json.dumps(EVIL.replace("\udcff", "").replace("\u202e", ""))[1:-1]
    Path(name).write_text(text.format(evil))
    refused(run(*args))


def test_a_preset_of_ones_own_is_shown_harmless() -> None:
    evil = json.dumps(EVIL.replace("\udcff", ""))
    Path("p.toml").write_text(f"[mine]\nsummary = {evil}\nnote = {evil}\nweight = {{ upper = 2 }}\n")
    for args in (["mine"], ["mine", "--json", "-"], []):
        ran = run("presets", *args, "--preset-file", "p.toml")
        assert ran.exit_code == 0, ran.output
        harmless(ran.stdout)


# ---------------------------------------------------------------- numbers, names and files without bounds

UNBOUNDED = {
    "a seed": (*READ, "--seed", str(2**63)),
    "a long seed": (*READ, "--seed", DIGITS),
    "threads": (*READ, "--threads", DIGITS),
    "more threads than any machine has": (*READ, "--threads", "10000"),
    "a nested threshold": ("presets", f"token_is@weight.upper={'[' * 5000}"),
    "a bound": ("gate", "now.json", "--max", f"k3={DIGITS}"),
    "a swept threshold": ("sweep", "-q", "--preset", "token_is", "--at", DIGITS),
    "the name of a dump": ("analyze", "-q", "n" * 300 + ".parquet", "--no-html"),
    "the name of a report": ("report", "now.json", "-o", "n" * 300 + ".html"),
    "the name of rows": (*READ, "--sequences", "n" * 300),
    "the name of a gate file": ("gate", "now.json", "--gates", "n" * 300),
}
NUL = "a\\u0000b"
NULS = {
    "a dump": (SETTINGS, f'dump = "{NUL}"', READ),
    "a preset file": (SETTINGS, f'preset_file = "{NUL}"', ("analyze",)),
    "columns": (SETTINGS, f'columns = "rollout={NUL}"', READ),
    "a column to group by": (SETTINGS, f'group_by = "{NUL}"', READ),
}
WHOLE = [("report", "{}"), ("gate", "now.json", "--baseline", "{}"), ("presets", "--preset-file", "{}")]
"""What reads a file as a whole."""
DEEP = {"arrays": f"{{}} = {'[' * 5000}{']' * 5000}", "tables": f"{{}} = {'{{a = ' * 2000}1{'}}' * 2000}"}
TOML = {
    "settings": (SETTINGS, "presets", READ),
    "presets": ("p.toml", "[x]\nweight", ("presets", "--preset-file", "p.toml")),
    "gates": ("g.toml", "[max]\nname", ("gate", "now.json", "--gates", "g.toml")),
}


@pytest.mark.parametrize("args", UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_unbounded_inputs_are_refused(args: tuple[str, ...]) -> None:
    refused(in_process(*args))
    assert files() == ["now.json"]


@pytest.mark.parametrize(("name", "text", "args"), NULS.values(), ids=NULS.keys())
def test_a_nul_in_a_name_is_refused(name: str, text: str, args: tuple[str, ...]) -> None:
    Path(name).write_text(text)
    refused(in_process(*args))
    assert files() == sorted([name, "now.json"])


@pytest.mark.parametrize("stem", ["m" * 246, "中" * 80])
def test_a_long_name_has_a_report_whose_name_fits_and_one_that_is_not_utf8_is_written(stem: str) -> None:
    for name in (stem, os.fsdecode(b"a\xff")):
        Path(f"{name}.json").write_bytes(Path("now.json").read_bytes())
        ran = run("report", f"{name}.json", "-o", f"{name}.html")
        assert ran.exit_code == 0, ran.stderr
        harmless(ran.stdout)
    assert run("report", f"{stem}.json").exit_code == 0
    assert len(files()) == 6
    assert not [name for name in files() if name.endswith(".tmp")]


@pytest.mark.parametrize("args", WHOLE, ids=str)
@pytest.mark.timeout(20)
def test_devices_and_files_that_are_too_large_are_not_read(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo("pipe")
    for place in ("/dev/zero", "pipe", "."):
        refused(run(*(arg.format(place) for arg in args)))
    for most in ("presets.catalogue.MOST_TOML", "files.MOST_TOML", "result.MOST_RESULT"):
        monkeypatch.setattr(f"offpol_diag.{most}", 4096)
    Path("large").write_bytes(b"x" * 5000)
    assert "MiB" in refused(run(*(arg.format("large") for arg in args)))
    assert "larger" in refused(CliRunner().invoke(app, ["report", "-"], input=b"x" * 5000))


@pytest.mark.parametrize("deep", DEEP.values(), ids=DEEP.keys())
@pytest.mark.parametrize(("name", "key", "args"), TOML.values(), ids=TOML.keys())
def test_deep_nesting_is_no_toml(deep: str, name: str, key: str, args: tuple[str, ...]) -> None:
    Path(name).write_text(deep.format(key))
    assert "nest" in refused(run(*args))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": 3, "dump": ' * 900 + "1" + "}" * 900])
def test_deep_nesting_is_no_result(text: str) -> None:
    Path("d.json").write_text(text)
    refused(run("report", "d.json"))


# ---------------------------------------------------------------- all or nothing

ALL = (
    "--presets",
    "token_is",
    "--json",
    "r.json",
    "-o",
    "r.html",
    "--md",
    "r.md",
    "--sequences",
    "rows.parquet",
)


@pytest.mark.parametrize("fails", ["report.page.page", "report.markdown", "report.terminal.terminal", ""])
def test_all_reports_of_a_run_appear_or_none(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OverflowError("a chart")

    if fails:
        module, _, name = fails.rpartition(".")
        import_module("offpol_diag.report.terminal")
        found = import_module(f"offpol_diag.{module}")
        monkeypatch.setattr(found, name, fail)
    ran = run("analyze", *ALL)
    made = ["rows.parquet"] if fails else ["r.html", "r.json", "r.md", "rows.parquet"]  # rows are whole
    assert (ran.exit_code, files()) == (2 if fails else 0, sorted(["now.json", *made])), ran.output


def test_of_two_files_none_appears_where_one_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("old.json").write_text("old")
    write = Path.write_bytes

    def torn(path: Path, data: bytes) -> int:
        if "second" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(OSError, match="No space left"):
        shell.write({Path("old.json"): "new", Path("second.md"): "new"})
    assert files() == ["now.json", "old.json"]
    assert Path("old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("args", "full"),
    [
        (("report", "now.json", "-o", "x.html", "--md", "/dev/full"), ""),
        (("report", "now.json", "-o", "x.html", "--md", "-"), "> /dev/full"),
        (("presets", "token_is", "--for", "verl", "--json", "x.json"), "> /dev/full"),
    ],
)
def test_no_file_appears_where_a_device_or_stdout_is_full(args: tuple[str, ...], full: str) -> None:
    line = f"{shlex.join([*SCRIPT, *args])} {full}"
    ran = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, files()) == (2, ["now.json"]), ran.stderr
    assert "No space left on device" in ran.stderr
    assert ran.stderr.count("\n") == 3, ran.stderr


def test_files_appear_where_nobody_reads_stdout_to_its_end() -> None:
    line = f"set -o pipefail; {shlex.join([*SCRIPT, 'report', 'now.json', '-o', 'x.html'])} | true"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr, files()) == (141, "", ["now.json", "x.html"])


# ---------------------------------------------------------------- results that no analysis wrote


def test_places_and_tokens_with_odd_names_and_numbers_are_drawn() -> None:
    summary = make_summary()
    places = [
        Place(key=key, tokens=9, sequences=9, numbers={"k3": Number(value=(i + 1) * 1e307)})
        for i, key in enumerate(("nan", "inf", "-inf", "1e999", "1_000", "٣", ""))
    ]
    put(summary, "host", Location(title="host", places=places))
    Path("odd.json").write_text(summary.to_json())
    ran = run("gate", "odd.json", "--max", "k3=1", "--html", "odd.html", "--md", "odd.md")
    assert ran.exit_code == 0, ran.output
    logs = {name: [1e308] for name in ("log_ratios", "rollout_log_probs", "train_log_probs")}
    worst = WorstSequence("a", None, 1, 0.0, 0.0, 0.0, positions=[0], token_ids=[0], **logs)
    (token,) = _response(worst, {}).tokens
    assert "π_rollout 1.01e+304" in token.remark


def test_parts_of_a_result_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        Lengths(longest=Number(), curve=[], median=10**400)
    sweep = partial(Sweep, preset="token_is", which="", statistic="", unit="token")
    assert sweep(points=[SweptPoint(threshold=1.0, bounds={}, numbers={})]).points
    with pytest.raises(ValueError, match="at least 1 item"):
        sweep(points=[])


def test_json_holds_any_provenance_of_a_writer() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = {"a": [deep]}
    facts = make_summary().dump.model_dump() | {
        "files": ["a\udcff"],
        "provenance": {"k\ud800": ["\udfff"], "deep": deep},
    }
    summary = make_summary()
    summary.dump = DumpFacts(**facts)
    again = loads(summary.to_json(), "again")
    assert again.dump == summary.dump
    assert again.dump.files == [r"a\udcff"]
    assert "…" in again.to_json()
    for form in FORMS:
        render(again, form).encode()
