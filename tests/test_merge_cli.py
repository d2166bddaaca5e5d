"""`analyze --tally` and `merge` from outside: files, streams, exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from offpol_diag.cli import app
from offpol_diag.cli.defaults import sample
from offpol_diag.summary import load, loads
from tests.test_laws import numbers

PRESETS = ("--presets", "token_is,areal_m2po")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("OFFPOL_DIAG_")] + ["COLUMNS"]:
        monkeypatch.delenv(name, raising=False)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two steps of the sample, a file each."""
    folder, table = tmp_path_factory.mktemp("dumps"), pq.read_table(sample())
    made = []
    for step in (3, 4):
        made.append(folder / f"step-{step}.parquet")
        pq.write_table(table.filter(np.asarray(table["step"]) == step), made[-1])
    return made


@pytest.fixture(scope="module")
def pieces(dumps: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pieces")
    made = [folder / "3.tally.json", folder / "4.tally.json.gz"]
    for dump, tally in zip(dumps, made, strict=True):
        ran = run("analyze", dump, *PRESETS, "--no-html", "--tally", tally)
        assert ran.exit_code == 0, ran.output
        assert ran.stdout.endswith(f"tally   {tally}\n")
    return made


def test_merged_pieces_are_reported_as_one_run_over_both(dumps: list[Path], pieces: list[Path]) -> None:
    one = run("analyze", *dumps, *PRESETS, "--json", "whole.json", "-o", "whole.html")
    two = run("merge", *pieces, "--json", "merged.json", "-o", "merged.html")

    assert (one.exit_code, two.exit_code) == (0, 0), two.output
    whole, merged = load(Path("whole.json")), load(Path("merged.json"))
    first, second = dict(numbers(whole)), dict(numbers(merged))
    assert [x for x in first.values() if x is not None] == pytest.approx(
        [x for x in second.values() if x is not None], rel=1e-9, abs=1e-11
    )
    assert list(first) == list(second)
    assert merged.recommendation == whole.recommendation
    assert merged.diagnosis is not None
    assert merged.run.command == "merge"
    assert "<html" in Path("merged.html").read_text()
    assert two.stdout.endswith("report  merged.html\njson    merged.json\n")


def test_the_recommendation_is_made_for_the_trainer_that_is_named(
    dumps: list[Path], pieces: list[Path]
) -> None:
    how = ("--for", "trl", "--json", "-", "-q")
    merged = loads(run("merge", *pieces, *how).stdout, "merged")
    whole = loads(run("analyze", *dumps, *PRESETS, *how).stdout, "whole")

    assert merged.recommendation is not None
    assert merged.recommendation == whole.recommendation
    assert run("merge", *pieces, "--for", "nobody").exit_code == 2


def test_merge_writes_a_page_unless_told_otherwise_and_what_is_asked_for(pieces: list[Path]) -> None:
    ran = run("merge", *pieces, "--no-html", "--json", "-")
    assert loads(ran.stdout, "stdout").dump.rows == 128
    assert files() == []

    assert run("merge", *pieces).exit_code == 0
    assert files() == ["offpol-diag-merged.html"]

    assert run("merge", *pieces, "--no-html", "--md", "report.md").exit_code == 0
    assert "token_is" in Path("report.md").read_text()


def test_what_is_left_out_is_said_on_stdout_in_the_page_and_in_json(dumps: list[Path]) -> None:
    table = pq.read_table(dumps[0])
    for part in (0, 1):
        pq.write_table(table.slice(part * 32, 32), f"{part}.parquet")
        ran = run("analyze", f"{part}.parquet", *PRESETS, "--no-html", "--tally", f"{part}.tally.json")
        assert ran.exit_code == 0

    ran = run("merge", "0.tally.json", "1.tally.json", "--json", "merged.json")

    assert ran.exit_code == 0
    assert "left out: areal_m2po" in " ".join(ran.stdout.split())
    assert "left out: areal_m2po" in Path("offpol-diag-merged.html").read_text()
    found = load(Path("merged.json"))
    assert list(found.presets) == ["token_is"]
    assert "rows of step 3 lie in more than one piece (0.tally.json, 1.tally.json)" in found.dump.notes[0]


def refused(*args: object) -> str:
    """What stderr says of a command that must fail cleanly, and leave no file."""
    before = files()
    ran = run(*args)
    assert ran.exit_code == 2, ran.output
    assert ran.stderr.startswith("error: ")
    assert "\n\nhint: " in ran.stderr
    assert "Traceback" not in ran.output
    assert ran.stdout == ""
    assert files() == before
    return ran.stderr


def test_a_file_that_is_no_tally_is_an_error_with_a_hint_and_nothing_is_written(
    dumps: list[Path], pieces: list[Path]
) -> None:
    Path("bad.json").write_bytes(b"[" * 1_000_000)
    run("merge", *pieces, "--no-html", "--json", "result.json")

    said = refused("merge", pieces[0], "bad.json", "--json", "out.json", "--tally", "out.tally.json")

    assert "bad.json: this is not a tally of offpol-diag" in said
    assert "not a tally" in refused("merge", dumps[0])
    assert "not a tally" in refused("merge", "result.json")


def test_a_tally_is_written_to_a_file_of_its_own(dumps: list[Path], pieces: list[Path]) -> None:
    before = pieces[0].read_bytes()

    assert "a tally needs a file" in refused("analyze", dumps[0], "--tally", "-")
    assert "a tally needs a file" in refused("merge", pieces[0], "--tally", "/dev/null")
    assert "is what is read" in refused("merge", *pieces, "--tally", pieces[0])
    assert "is what is read" in refused("merge", *pieces, "--json", pieces[0])
    assert "is what is read" in refused("analyze", dumps[0], "--tally", dumps[0])
    assert "one file" in refused("analyze", dumps[0], "--tally", "x.json", "--json", "x.json")
    assert "its directory does not exist" in refused("analyze", "no.parquet", "--tally", "no/x.json")
    assert Path("/dev/null").is_char_device()
    assert pieces[0].read_bytes() == before


@pytest.mark.parametrize("command", ["analyze", "merge"])
def test_help_says_what_a_torn_step_means(command: str) -> None:
    said = " ".join(run(command, "--help").output.split())

    assert "M2PO" in said
    assert "each step lies whole in one piece" in said or "every step to lie whole in one piece" in said
