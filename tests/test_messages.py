"""What is said where a file is not what a command reads, and where a name or a setting is wrong."""

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
from offpol_diag.errors import OffpolError
from tests.factory import make_summary

SAMPLE = Path(__file__).parents[1] / "sample_data" / "healthy.parquet"
CHECK = '{\n "format": "offpol-diag check 2",\n "logged": []\n}\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with a dump, results of this and other versions, and files that are cut off."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLE, "sampled.parquet")
    text = make_summary().to_json()
    texts = {
        "r.json": text,
        "line.json": json.dumps(json.loads(text), separators=(",", ":")),
        "newer.json": text.replace('"format": 2', '"format": 3', 1),
        "older.json": text.replace('"format": 2', '"format": 1', 1),
        "cut.json": text[:500],
        "check.json": CHECK,
        **dict.fromkeys(("empty.json", "empty.jsonl", "empty.parquet"), ""),
        "other.json": '{"a": 1}',
    }
    for name, words in texts.items():
        Path(name).write_text(words, encoding="utf-8")
    Path("cut.parquet").write_bytes(SAMPLE.read_bytes()[:3000])


A_RESULT = "this is a result of offpol-diag, and no dump"
TO_READ = "`offpol-diag report {0}` draws it again, `offpol-diag gate {0}` judges it\n"
NEWER = "a newer version wrote it: update offpol-diag"
GIVE = "give the file that `offpol-diag analyze --json` wrote"
SAID = [
    *(
        (f"{command} {name}", f"{name}: {A_RESULT}", TO_READ.format(name))
        for command in ("doctor", "analyze --no-html", "convert --to x.parquet")
        for name in ("r.json", "line.json", "cut.json")
    ),
    ("doctor check.json", f"check.json: {A_RESULT}", "`offpol-diag report check.json` draws it again\n"),
    ("compare sampled.parquet r.json", f"r.json: {A_RESULT}", TO_READ.format("r.json")),
    ("gate newer.json --max k3=1", "newer.json: result format 3, this version reads format 2", NEWER),
    ("report newer.json", "newer.json: result format 3, this version reads format 2", NEWER),
    ("gate older.json --max k3=1", "older.json: result format 1, this version", "analyze the dump again"),
    ("gate empty.json --max k3=1", "empty.json: the file is empty", GIVE),
    ("report cut.json", "cut.json: this result is cut off: its JSON has no end", GIVE),
    ("report other.json", "other.json: this is not a result of offpol-diag", GIVE),
    ("doctor empty.json", "empty.json: the file is empty (0 bytes)", "its writer did not finish; dump again"),
    ("doctor empty.jsonl", "empty.jsonl: the file is empty (0 bytes)", "its writer did not finish"),
    ("doctor empty.parquet", "empty.parquet: the file is empty (0 bytes)", "its writer did not finish"),
    (
        "doctor cut.parquet",
        "cut.parquet: cannot be read as Parquet (Parquet magic bytes",
        "check that it may",
    ),
    ("doctor missing.parquet", "missing.parquet: no such file or directory", "check the path; relative"),
    ("doctor sample.parquet", "sample.parquet: no such file", "did you mean sampled.parquet?"),
    ("doctor sampled.parq", "sampled.parq: no such file", "did you mean sampled.parquet?"),
    ("presets nope", 'unknown preset "nope"', 'did you mean "none"?'),
    ("presets token_is --for foo", 'unknown trainer "foo"; there are verl,', "name one of these"),
    ("check sampled.parquet --for foo", 'unknown trainer "foo"', "name one of these"),
]


@pytest.mark.parametrize(("line", "error", "hint"), SAID, ids=[line for line, *_ in SAID])
def test_what_is_said(line, error, hint):
    ran = CliRunner().invoke(app, line.split())

    assert ran.exit_code == 2
    first, last = re.split(r"\n\n(?=hint: )", ran.stderr)
    assert f"error: {error}" in first
    assert last.startswith(f"hint: {hint}")


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


@pytest.mark.parametrize("kind", [str, Path, lambda name: [name]], ids=["text", "path", "list"])
def test_the_gate_in_python_takes_the_file_of_a_result(kind):
    k3 = make_summary().number("k3").value

    assert offpol_diag.gate(kind("r.json"), max={"k3": 2 * k3}).passed
    assert not offpol_diag.gate(kind("r.json"), max={"k3": k3 / 2}).passed
    with pytest.raises(OffpolError, match="a result is judged alone"):
        offpol_diag.gate(["r.json", "sampled.parquet"], max={"k3": 1})


PIPED = {"r.json": 0, "line.json": 0, "sampled.parquet": 2, "cut.json": 2, "newer.json": 2}


@pytest.mark.parametrize(("name", "code"), PIPED.items())
def test_the_gate_takes_a_result_from_a_pipe(name, code):
    ran = CliRunner().invoke(app, ["gate", "-", "--max", "k3=100", "-q"], input=Path(name).read_bytes())

    assert ran.exit_code == code, ran.stderr
    assert code == 0 or ran.stderr.startswith("error: stdin: ")
