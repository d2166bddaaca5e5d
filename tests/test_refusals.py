"""One table of refusals by command: what is wrong, where it was given, and what to do; code 2, no file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from tests.factory import make_summary

SAMPLE = Path(__file__).parents[1] / "sample_data" / "healthy.parquet"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with a dump, results of this and other versions, and files that are cut off."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLE, "sampled.parquet")
    text = make_summary().to_json()
    texts = {
        "r.json": text,
        "line.json": json.dumps(json.loads(text), separators=(",", ":")),
        "newer.json": text.replace('"format": 3', '"format": 4', 1),
        "older.json": text.replace('"format": 3', '"format": 2', 1),
        "cut.json": text[:500],
        "check.json": '{\n "format": "offpol-diag check 2",\n "logged": []\n}\n',
        **dict.fromkeys(("empty.json", "empty.jsonl", "empty.parquet"), ""),
        "other.json": '{"a": 1}',
        "list.json": "[]",
        "text.parquet": "not Parquet at all",
    }
    for name, words in texts.items():
        Path(name).write_text(words, encoding="utf-8")
    Path("bytes.json").write_bytes(b"\xff")
    Path("cut.parquet").write_bytes(SAMPLE.read_bytes()[:3000])
    table = pq.read_table(SAMPLE)
    pq.write_table(table.drop_columns(["current_log_probs"]), "two.parquet")
    return tmp_path


def refused(ran):
    """Check a refusal: one error and one hint on stderr, nothing else; return both."""
    assert ran.exit_code == 2, ran.output
    assert ran.stdout == ""
    found = re.fullmatch(r"error: (.+)\n\nhint: (.+)\n", ran.stderr)
    assert found, ran.stderr
    return found.groups()


def run(line, **env):
    return CliRunner().invoke(app, line.split(), env=env)


NO_DUMP, DRAWN = "not a form of dump that is known", "`offpol-diag report {}` draws a result"
NEWER = "a newer version wrote it: update offpol-diag"
GIVE = "give the file that `offpol-diag analyze --json` wrote"
ANALYZE = "analyze sampled.parquet "
SAID = [
    # what is read
    *(
        (f"{command} r.json", f"r.json: {NO_DUMP}", DRAWN.format("r.json"))
        for command in ("doctor", "analyze --no-html", "convert --to x.parquet")
    ),
    ("gate newer.json --max k3=1", "newer.json: result format 4, this version reads format 3", NEWER),
    ("report newer.json", "newer.json: result format 4, this version reads format 3", NEWER),
    ("gate older.json --max k3=1", "older.json: result format 2, this version", "analyze the dump again"),
    *((f"gate {one} --max k3=1", f"{one}: ", GIVE) for one in ("empty.json", "list.json", "bytes.json")),
    ("report empty.json", "empty.json: this is not a result of offpol-diag (Invalid JSON: EOF", GIVE),
    ("report cut.json", "cut.json: this is not a result of offpol-diag (Invalid JSON: EOF", GIVE),
    ("report other.json", "other.json: this is not a result of offpol-diag", GIVE),
    ("report nowhere.json", "nowhere.json: cannot be read as a result (No such file", GIVE),
    ("doctor empty.jsonl", "empty.jsonl: no sequence that counts is in it", "check that its writer"),
    ("doctor cut.parquet", "cut.parquet: cannot be read as Parquet (Parquet magic", "check that it may"),
    *((f"{command} text.parquet", "text.parquet: ", "") for command in ("analyze", "gate --max k3=1")),
    ("doctor missing.parquet", "missing.parquet: no such file or directory", "check the path; relative"),
    ("doctor sample.parquet", "sample.parquet: no such file", "did you mean sampled.parquet?"),
    ("doctor sampled.parq", "sampled.parq: no such file", "did you mean sampled.parquet?"),
    # names
    ("presets nope", 'unknown preset "nope"', 'did you mean "none"?'),
    ("presets token_is --for foo", 'unknown trainer "foo"; there are verl,', "name one of these"),
    ("check sampled.parquet --for foo", 'unknown trainer "foo"', "name one of these"),
    ("gate missing.parquet --max token_iss.k3=1", "", 'did you mean "token_is"'),
    (
        "compare two.parquet --presets pure_is",
        "the dump has no current_log_probs, which pure_is cannot do without",
        "name the column with --columns",
    ),
    (ANALYZE + "--columns rollout=nope", "", ""),
    # what is written
    (ANALYZE + "-o .", ".: is a directory", "name a file in it"),
    *((f"{ANALYZE}{one} no/r", "no/r: its directory does not exist", "make it first: mkdir -p no")
      for one in ("-o", "--json", "--md", "--sequences")),
    (ANALYZE + "--sequences rows -o ./rows", "two results cannot both go to one file", "give each"),
    (ANALYZE + "--json r --md r", "two results cannot both go to one file", "give each"),
    (ANALYZE + "--json - --md -", "two results cannot both go to stdout", "give each"),
    (ANALYZE + "--json --quiet", "--quiet stands where a file is to be named", "name a file, or -"),
    ("report r.json -o r.json", "r.json: is what is read", "write to another file"),
    ("convert sampled.parquet", "convert needs files and a target", "offpol-diag convert DUMP"),
    # words of typer
    ("gate", "missing argument 'DUMP'", "see `offpol-diag gate --help`"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "error", "hint"), SAID, ids=[line for line, *_ in SAID])
def test_what_is_said(line, error, hint, folder):
    before = sorted(folder.iterdir())
    first, last = refused(run(line))
    assert first.startswith(error)
    assert last.startswith(hint)
    assert sorted(folder.iterdir()) == before


# ---------------------------------------------------------------- values

WRONG = [
    ("analyze", "--seed x", "invalid value for '--seed': "),
    ("analyze", "--seed -1", "invalid value for '--seed': "),
    ("analyze", "--threads 0", "invalid value for '--threads': "),
    ("analyze", "--engine rey", "invalid value for '--engine': "),
    ("analyze", "--on-bad-row skipp", "invalid value for '--on-bad-row': "),
    ("analyze", "--device tpu", ""),
    ("analyze", "--columns rollout", 'columns: "rollout" names no column'),
    ("analyze", "--columns rollout=", 'columns: "rollout=" names no column'),
    ("analyze", "--presets tokn_is", 'unknown preset "tokn_is"'),
    ("analyze", "--presets ,", "no preset is named"),
    ("analyze", "--for verll", 'unknown trainer "verll"'),
    ("analyze", "--preset-file none.toml", "none.toml"),
    ("analyze", "--group-by nosuch", ""),
    ("compare", "--against all", "all names"),
    ("compare", "--against tokn_is", 'unknown preset "tokn_is"'),
    ("sweep --preset token_is", "--which weight.uper", 'token_is has no bound "weight.uper"'),
    ("sweep --preset token_is", "--keep x", "invalid value for '--keep': "),
    ("sweep --preset token_is", "--keep 2", ""),
    ("sweep --preset token_is", "--at 2,1", ""),
    ("gate", "--max k3", "--max: "),
    ("gate", "--gates none.toml", "none.toml"),
    ("gate", "--baseline none.json", "none.json"),
    ("check --for trl", "--logged none.jsonl", "none.jsonl"),
    ("check", "--for verll", 'unknown trainer "verll"'),
]


@pytest.mark.parametrize(("command", "option", "said"), WRONG)
def test_a_wrong_value_is_refused(command, option, said):
    assert refused(run(f"{command} sampled.parquet {option} -q"))[0].startswith(said)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("presets = ['seq_miss']", 'unknown preset "seq_miss"'),
        ("columns = 'rollout'", "columns: "),
        ("seed = 'x'", "invalid value for '--seed': "),
        ("for = 'verll'", "unknown trainer"),
        ("presests = 'tis'", "{}: there is no setting 'presests'"),
        ("presets = [", "{}: cannot be read as TOML"),
    ],
)
@pytest.mark.parametrize("file", ["offpol-diag.toml", "pyproject.toml"])
def test_a_bad_value_in_a_file_is_refused(file, text, words):
    Path(file).write_text("[tool.offpol-diag]\n" * (file == "pyproject.toml") + text)
    assert refused(run("analyze sampled.parquet"))[0].startswith(words.format(file))


PIPED = {"r.json": 0, "line.json": 0, "sampled.parquet": 2, "cut.json": 2, "newer.json": 2}


@pytest.mark.parametrize(("name", "code"), PIPED.items())
def test_the_gate_takes_a_result_from_a_pipe(name, code):
    ran = CliRunner().invoke(app, ["gate", "-", "--max", "k3=100", "-q"], input=Path(name).read_bytes())

    assert ran.exit_code == code, ran.stderr
    assert code == 0 or ran.stderr.startswith("error: stdin: ")


def test_a_directory_with_a_result_beside_its_dumps_is_read(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("sampled.parquet", "r.json", "empty.jsonl"):
        shutil.copy(name, tmp_path / "run" / name)

    assert CliRunner().invoke(app, ["doctor", "run", "-q"]).exit_code == 0


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_rows_without_a_step_are_no_end_of_the_steps(missing):
    table = pq.read_table("sampled.parquet")
    steps = [missing if i % 5 == 0 else float(step) for i, step in enumerate(table["step"].to_pylist())]
    place = table.schema.get_field_index("step")
    pq.write_table(table.set_column(place, "step", pa.array(steps)), "some.parquet")
    shown = CliRunner().invoke(app, ["doctor", "some.parquet"]).stdout

    assert ", steps 0 to 7 and rows without a step, " in " ".join(shown.split())
    assert "  steps 0 to 7\n" in shown
    assert "∅" not in shown


@pytest.mark.parametrize("kind", [str, Path])
def test_the_gate_in_python_takes_the_file_of_a_result(kind):
    k3 = make_summary().number("k3").value

    assert offpol_diag.gate(kind("r.json"), max={"k3": 2 * k3}).passed
    assert not offpol_diag.gate(kind("r.json"), max={"k3": k3 / 2}).passed
