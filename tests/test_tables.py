"""Every table of the page as a polars frame and as CSV, with the numbers that the page draws."""

from __future__ import annotations

import csv
import json
import math
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import oracles
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factory import make_summary, number, place
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.api import Report
from offpol_diag.check import Checked, Finding, MetricCheck, Point
from offpol_diag.check import loads as load_check
from offpol_diag.cli import app
from offpol_diag.errors import UsageError
from offpol_diag.frames import Data, csv_files, frame, named
from offpol_diag.number import Number
from offpol_diag.report import page as html
from offpol_diag.report.tables import FEWER, tables
from offpol_diag.result import load
from tests.factory import Location

SAMPLES = [Path("sample_data", f"{name}.parquet") for name in ("healthy", "stale", "collapse", "quantized")]
NAMES = ["token_is", "seq_mis", "geo_rs"]
ONE = ("--device", "cpu", "--threads", "1")


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def done(*words):
    ran = run(*words)
    assert ran.exit_code == 0, ran.output
    return ran


def refused(*words):
    """Run a command that fails by one clear error, and return its text."""
    ran = run(*words)
    assert ran.exit_code == 2, ran.output
    assert ran.stderr.startswith("error: ")
    assert "\nhint: " in ran.stderr
    assert "Traceback" not in ran.output
    return ran.stderr


def read(file):
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write a small dump with three policies, steps, prompts and a column of hosts."""
    rows = [
        {**row, "step": i % 3, "group_id": f"g{i // 4}", "host": f"host{i % 2}", "rewards": float(i % 2)}
        for i, row in enumerate(oracles.make_rows(0.1, seed=3))
    ]
    return oracles.write(rows, tmp_path_factory.mktemp("tables") / "dump.parquet")


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Write curves of trl for the healthy sample, one of them wrong and once not finite."""
    file = tmp_path_factory.mktemp("curves") / "curves.jsonl"
    values = (0.25, 0.5, float("nan"), 0.125)
    name = "sampling/sampling_logp_difference/mean"
    file.write_text("".join(json.dumps({"_step": i + 1, name: x}) + "\n" for i, x in enumerate(values)))
    return file


# ---------------------------------------------------------------- the tables of the page


def drawn(result, monkeypatch):
    """Return the tables that a page lays out while it is rendered."""
    seen, lay_out = [], html.laid_out
    monkeypatch.setattr(html, "laid_out", lambda table: (seen.append(table), lay_out(table))[1])
    html.page(result)
    return list({one.id: one for one in seen}.values())


def floats(cells):
    """Return the numbers of a row of a page's table, at full precision."""
    numbers = [one for one in cells if isinstance(one, Number)]
    found = [one.value for one in numbers] + [end for one in numbers for end in one.interval or ()]
    return [one for one in (*found, *(cell for cell in cells if isinstance(cell, int))) if one is not None]


OTHERWISE = ("all", "alerts", "run")
"""Tables with other rows as data: in `presets`, a row per number, and without sums that `counts` has."""


def holds_what_the_page_draws(summary, monkeypatch):
    """Assert that each table drawn is a frame with the same rows, in order, and their numbers."""
    data, shown = tables(summary), drawn(summary, monkeypatch)
    assert {one.id for one in shown} > {"counts", "columns"}
    for one in shown:
        name = next(iter(named([Data(one.id, (), ())])))
        if one.id in (*OTHERWISE, *FEWER):
            continue
        found = frame(data[name])
        assert len(found) == len(one.rows), name
        for ours, theirs in zip(found.iter_rows(), one.rows, strict=True):
            known = {cell for cell in ours if isinstance(cell, int | float)}
            text = {cell for cell in ours if isinstance(cell, str)}  # a column of words and numbers
            assert all(x in known or repr(x) in text for x in floats(theirs)), (name, theirs)
    return data


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_each_table_of_the_page_is_a_frame_with_its_numbers(sample, monkeypatch):
    report = offpol_diag.analyze(sample, presets=NAMES, device="cpu", threads=1, seed=1)
    data = holds_what_the_page_draws(report.summary, monkeypatch)
    assert report.tables == tuple(data)
    assert {"by_step", "by_length", "worst_sequences", "worst_tokens", "presets", "by_step_data"} <= {*data}
    steps = report.to_polars("by_step")
    for row, found in zip(steps.to_dicts(), report.summary.at("step"), strict=True):
        assert row["step"] == int(found.key)
        for name, one in found.numbers.items():
            assert row[name] == one.value
            assert one.interval is None or (row[f"{name}_low"], row[f"{name}_high"]) == one.interval
    presets = report.to_polars("presets").filter(pl.col("mark").is_null())
    assert set(presets["preset"]) == {*NAMES}
    for row in presets.to_dicts():
        for name, one in report.preset(row["preset"]).items():
            assert row[name] == one.value


def test_a_report_of_any_kind_has_the_tables_of_its_page(dump, monkeypatch):
    how = {"device": "cpu", "threads": 1}
    two = offpol_diag.compare(dump, SAMPLES[1], **how)
    data = holds_what_the_page_draws(two.summary, monkeypatch)
    contrasts = {one.name: one for one in two.summary.against.contrasts}
    for row in two.to_polars("differ").to_dicts():
        assert row["p_corrected"] == contrasts[row["metric"]].p_adjusted
        assert row["difference"] == contrasts[row["metric"]].difference.value
    assert "by_step" not in data  # which the page of two runs does not show
    side = offpol_diag.compare(dump, presets=NAMES, **how)
    assert {"comparison", "differences"} <= {*holds_what_the_page_draws(side.summary, monkeypatch)}
    swept = offpol_diag.sweep(dump, "token_is", at=[1.5, 2.0, 1e4 / 3], **how)
    holds_what_the_page_draws(swept.summary, monkeypatch)
    assert swept.to_polars("sweep")["threshold"].to_list() == [1.5, 2.0, 1e4 / 3]
    assert swept.to_polars("sweep")["tokens_weighted"].to_list() == [1.0] * 3
    judged = offpol_diag.gate(dump, max={"k3": 1 / 3}, min={"ess_tokens": 0.1}, **how)
    holds_what_the_page_draws(judged.summary, monkeypatch)
    row = judged.to_polars("gates").row(0, named=True)
    one = judged.gates[0]
    assert (row["limit"], row["value"], row["passed"]) == (1 / 3, one.value, one.passed)


def test_numbers_that_the_page_rounds_in_words_are_whole_in_the_frame():
    report = offpol_diag.analyze(SAMPLES[1], presets=NAMES, device="cpu", threads=1)
    given, summary = report.recommendation, report.summary
    ranking = report.to_polars("ranking")
    assert ranking["score"].to_list() == [one.score for one in given.ranking]
    assert ranking["tie"].dtype == pl.Boolean
    worst = report.to_polars("worst_tokens").row(0, named=True)
    before = [worst[f"log_ratio_before_{i}"] for i in (3, 2, 1)]
    assert [one for one in before if one is not None] == summary.worst.tokens[0].before
    bands = report.to_polars("bands").filter(pl.col("band").is_not_null())
    assert bands["high"].to_list() == [one.high for one in summary.charts.bands]
    logged = report.to_polars("as_logged").filter(preset="token_is")
    assert dict(logged.select("name", "value").iter_rows()) == report.presets["token_is"].as_logged
    responses = report.to_polars("worst_responses").filter(pl.col("typical").not_())
    first = summary.worst.sequences[0]
    alerts = report.to_polars("alerts")
    assert alerts["value"].to_list() == [
        value for one in given.fired if one.level == "alert" for value in one.saw.values()
    ]
    tokens = responses.filter(sequence_id=first.sequence_id)
    assert tokens["log_ratio"].to_list() == first.log_ratios
    run = dict(report.to_polars("run").iter_rows())
    assert run["seconds, total"] == repr(summary.run.seconds["total"])


def test_the_points_of_a_chart_have_their_places_as_numbers():
    report = offpol_diag.analyze(SAMPLES[0], presets="token_is", device="cpu", threads=1)
    found = report.to_polars("token_thresholds_data")
    kept = found.filter(series="kept by a mask [1/b, b]")
    charts = report.summary.charts
    assert kept["x"].to_list() == charts.token_thresholds.b
    assert kept["value"].to_list() == charts.token_thresholds.kept
    cells = report.to_polars("density_cells")
    assert cells["count"].sum() == sum(map(sum, charts.density.counts))


def test_an_unknown_table_is_an_error_that_names_those_that_are_near():
    report = Report(make_summary())
    with pytest.raises(UsageError, match='no table "by_stp"') as error:
        report.to_polars("by_stp")
    assert "by_step" in error.value.hint
    with pytest.raises(UsageError) as error:
        report.to_polars("§")
    assert "there are " in error.value.hint
    assert {"value", "low", "high", "preset"} <= {*report.to_polars().columns}


# ---------------------------------------------------------------- check


def test_the_curves_of_check_are_frames(curves, monkeypatch):
    found = offpol_diag.check(SAMPLES[0], curves, trainer="trl")
    assert found.tables == ("check", "curves")
    table = found.to_polars("curves")
    assert table.schema["logged"] == table.schema["expected"] == pl.Float64
    for row in table.to_dicts():
        (one,) = (one for one in found.metrics if one.name == row["metric"])
        at = one.at(row["step"])
        assert (row["logged"], row["expected"]) == (at.logged, at.expected)
        assert row["differs"] == (row["step"] in one.different)
    assert len(table) == sum(len(one.points) for one in found.metrics)
    assert table["logged"].null_count() == 1  # NaN in the file
    (row,) = found.to_polars("check").to_dicts()
    assert row["expected"] == found.metrics[0].at(found.metrics[0].worst).expected
    assert {one.id for one in drawn(found, monkeypatch)} >= {"check"}
    with pytest.raises(UsageError, match="no table") as error:
        found.to_polars("curve")
    assert "curves" in error.value.hint


def test_curves_that_are_nowhere_finite_are_floats_still():
    points = [Point(step=1, logged=None, expected=0.5)]
    one = MetricCheck(name="a", curve="a", verdict="different", points=points, different=[1], worst=1)
    cause = Finding(variant=None, text="x", fix="y", metrics=["a"])
    found = Checked(trainer="trl", preset="p", chosen=False, steps=[1], metrics=[one], findings=[cause])
    assert found.to_polars().schema["logged"] == pl.Float64


# ---------------------------------------------------------------- CSV


def equal_to_its_frames(folder, data):
    """Assert that a folder holds each table, number for number."""
    files = {one.name for one in folder.iterdir()}
    assert files == {f"{name}.csv" for name in data}
    for name, one in data.items():
        header, *rows = read(folder / f"{name}.csv")
        found = frame(one)
        assert header == found.columns
        assert len(rows) == len(found)
        for texts, cells in zip(rows, found.iter_rows(), strict=True):
            for text, cell in zip(texts, cells, strict=True):
                if isinstance(cell, bool):
                    assert text == str(cell).lower()
                elif isinstance(cell, int | float):
                    assert float(text) == cell
                else:
                    assert text == (cell or "")


@pytest.mark.parametrize(
    "command",
    [
        "analyze DUMP --presets token_is,seq_mis --no-html --group-by host",
        "doctor DUMP",
        "compare DUMP --presets token_is,seq_mis",
        f"compare DUMP {SAMPLES[0]}",
        "sweep DUMP --preset token_is",
        "gate DUMP --max k3=9 --min ess_tokens=0.01",
    ],
)
def test_each_command_writes_each_table_as_csv(command, dump, tmp_path):
    words = command.replace("DUMP", str(dump)).split()
    ran = done(*words, *ONE, "--json", tmp_path / "r.json", "--csv", tmp_path / "deep" / "tables")
    data = tables(load(tmp_path / "r.json"))
    equal_to_its_frames(tmp_path / "deep" / "tables", data)
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("csv"))
    assert f"({len(data)} files: " in line
    assert all(f"{name}.csv" in line for name in data)
    again = tmp_path / "again"
    done("report", tmp_path / "r.json", "-o", tmp_path / "r.html", "--csv", again)
    equal_to_its_frames(again, data)


def test_check_writes_its_curves_as_csv_and_so_does_its_report(curves, tmp_path):
    to = ("--json", tmp_path / "c.json", "--csv", tmp_path / "tables")
    done("check", SAMPLES[0], "--logged", curves, "--trainer", "trl", *to)
    found = load_check((tmp_path / "c.json").read_text(), "c.json")
    equal_to_its_frames(tmp_path / "tables", found.data())
    done("report", tmp_path / "c.json", "-o", tmp_path / "c.html", "--csv", tmp_path / "again")
    equal_to_its_frames(tmp_path / "again", found.data())


def test_stdout_holds_a_result_alone_beside_csv(tmp_path):
    (tmp_path / "r.json").write_text(make_summary().to_json())
    ran = done("gate", tmp_path / "r.json", "--max", "k3=9", "--json", "-", "--csv", tmp_path / "tables")
    json.loads(ran.stdout)
    assert "csv     " in ran.stderr


def test_csv_replaces_what_an_earlier_run_wrote_and_nothing_else(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "by_step.csv").write_text("old")
    (folder / "mine.csv").write_text("mine")
    (tmp_path / "r.json").write_text(make_summary().to_json())
    done("report", tmp_path / "r.json", "-o", tmp_path / "r.html", "--csv", folder)
    assert (folder / "mine.csv").read_text() == "mine"
    assert read(folder / "by_step.csv")[0][0] == "step"
    assert not list(folder.glob(".*"))


# ---------------------------------------------------------------- folders that cannot be written


@pytest.fixture
def result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text(make_summary().to_json())
    return "r.json"


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("r.json", "is a file"),
        ("r.json/tables", "lies in a file"),
        ("-", "stdout is no folder"),
        ("s3://bucket/tables", "a URL is named"),
        ("looped", "cannot be written"),
        ("n" * 300, "no file has such a name"),
        ("/dev/null", "is a file"),
    ],
)
def test_a_folder_that_cannot_be_one_is_refused_before_any_work(folder, says, result):
    Path("looped").symlink_to("looped")
    before = sorted(Path().iterdir())
    assert says in refused("report", result, "-o", "r.html", "--csv", folder)
    assert sorted(Path().iterdir()) == before
    assert says in refused("analyze", "absent.parquet", "--csv", folder)  # before the dump is looked for


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_refused(result):
    Path("closed").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    assert "cannot be written" in refused("report", result, "-o", "r.html", "--csv", "closed/tables")


def test_where_one_table_cannot_be_written_nothing_is(result):
    Path("tables/by_step.csv").mkdir(parents=True)
    assert "by_step.csv" in refused("report", result, "-o", "r.html", "--csv", "tables")
    assert [one.name for one in Path("tables").iterdir()] == ["by_step.csv"]
    assert not Path("r.html").exists()


def test_a_folder_that_was_made_in_vain_is_removed(result, monkeypatch):
    from offpol_diag.cli import output

    def fail(*_):
        raise UsageError("no room", "make some")

    monkeypatch.setattr(output, "write_all", fail)
    assert "no room" in refused("report", result, "-o", "r.html", "--csv", "a/b")
    assert not Path("a").exists()


def test_what_is_read_and_other_results_are_not_replaced_by_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "sampling/sampling_logp_difference/mean"
    Path("curves.csv").write_text(f"step,{names}\n1,0.25\n2,0.5\n")
    words = ("--logged", "curves.csv", "--trainer", "trl", "--csv", ".")
    sample = Path(__file__).parents[1] / SAMPLES[0]
    before = Path("curves.csv").read_bytes()
    assert "is what is read" in refused("check", sample, *words)
    assert Path("curves.csv").read_bytes() == before
    Path("r.json").write_text(make_summary().to_json())
    said = refused("report", "r.json", "-o", "r.html", "--md", "by_step.csv", "--csv", ".")
    assert "another result goes there" in said
    assert not Path("by_step.csv").exists()


# ---------------------------------------------------------------- hostile names

HOSTILE = (
    "a/b",
    "../../escape",
    "..",
    "c\x1b[31m\nd\r",
    "e" * 300,
    "é" * 200,
    "Host",
    "host",
    "tokens",
    "k3",
    'q"u,o\tte',
    "zero\u202ewidth",
    "nul",
    "😀",
)


def test_a_column_of_any_name_is_a_table_and_a_file(tmp_path):
    rows = oracles.make_rows(0.1, seed=3)
    texts = ['say "x", y', "two\nlines\r", "=1+1", "\x00"]
    rows = [{**row, **dict.fromkeys(HOSTILE, texts[i % 4])} for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    report = offpol_diag.analyze(
        tmp_path / "d.parquet", presets=(), group_by=HOSTILE, device="cpu", threads=1
    )
    folder = tmp_path / "tables"
    (tmp_path / "r.json").write_text(report.to_json())
    done("report", tmp_path / "r.json", "-o", tmp_path / "r.html", "--csv", folder)
    files = list(folder.iterdir())
    assert len(files) == len(report.tables)
    assert {one.name for one in tmp_path.iterdir()} == {"d.parquet", "r.json", "r.html", "tables"}
    assert len({one.name.lower() for one in files}) == len(files)
    assert all(one.name.isascii() and one.name.isprintable() and len(one.name) < 120 for one in files)
    axes = [name for name, one in tables(report.summary).items() if one.id.startswith("by-")]
    for axis in HOSTILE:
        (name,) = (one for one in axes if tables(report.summary)[one].id == f"by-{axis}")
        found = report.to_polars(name)
        assert found.columns[0] == ("place" if axis in ("tokens", "k3") else axis)
        assert found.schema["k3"] == pl.Float64
        keys = [one.key for one in report.summary.at(axis)]
        assert found[:, 0].to_list() == keys
    (host,) = (one for one in files if one.name == "by_Host.csv")
    assert sorted(row[0] for row in read(host)[1:]) == sorted(one.key for one in report.summary.at("Host"))


def test_names_that_differ_only_in_what_a_file_name_cannot_hold_are_apart():
    data = named(
        Data(f"by-{axis}", ("a",), [(1,)]) for axis in ("a/b", "a b", "a_b", "A_b", "x" * 300, "x" * 301)
    )
    files = csv_files(data)
    assert len(data) == len(files) == len({one.lower() for one in files}) == 6
    assert list(data)[:3] == ["by_a_b", "by_a_b_2", "by_a_b_3"]


# ---------------------------------------------------------------- frames


def test_a_column_has_the_type_of_what_it_holds():
    rows = [
        (1, True, 0.5, "a", Number(value=1.0, unit="nats"), None, 2**70, "x", 1),
        (2, None, 1, None, Number(unknown="missing column rewards"), None, 1, 0.1, None),
    ]
    found = frame(Data("x", "abcdefghi", rows))
    kinds = (
        pl.Int64,
        pl.Boolean,
        pl.Float64,
        pl.String,
        pl.Float64,
        pl.Null,
        pl.Float64,
        pl.String,
        pl.Int64,
    )
    assert tuple(found.schema[name] for name in "abcdefghi") == kinds
    assert found["e_note"].to_list() == [None, "missing column rewards"]
    assert found["unit"].to_list() == ["nats", None]
    assert found["h"].to_list() == ["x", "0.1"]
    assert "e_low" not in found.columns


def test_an_interval_a_caution_and_a_value_that_overflows_stand_beside_a_number():
    cells = [number(0.5, 0.1), Number(log10=400.0, note="unreliable: k̂ is 0.9")]
    found = frame(Data("x", ("v",), [(cell,) for cell in cells])).to_dicts()
    assert (found[0]["v_low"], found[0]["v_high"]) == cells[0].interval
    assert (found[1]["v"], found[1]["v_log10"], found[1]["v_low"]) == (None, 400.0, None)
    assert found[1]["v_note"].startswith("unreliable")


def test_columns_of_one_name_and_text_that_is_no_unicode_are_kept():
    found = frame(Data("x", ("a", "a", "a_low", "\udc80"), [(number(1.0, 0.5), 2, 3, "\udcff")]))
    assert found.columns == ["a", "a_low", "a_high", "a_2", "a_low_2", "\\udc80"]
    assert found.row(0)[3:] == (2, 3, "\\udcff")


def test_an_empty_table_is_a_frame_without_rows_and_a_header_in_csv():
    data = {"x": Data("x", ("a", "b"), (), ("b",))}
    assert frame(data["x"]).schema == {"a": pl.Null, "b": pl.Float64}
    assert csv_files(data) == {"x.csv": "a,b\n"}


def test_a_number_of_any_size_is_read_back_from_csv_bit_for_bit():
    values = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -1e-310, 123456789012345680.0, -0.0]
    (text,) = csv_files({"x": Data("x", ("a",), [(one,) for one in values])}).values()
    back = [float(line) for line in text.splitlines()[1:]]
    assert back == values
    assert math.copysign(1, back[-1]) == -1


def test_ten_thousand_steps_are_a_frame_in_no_time():
    steps = [place(str(step), step, 1e-3 + 1e-9 * step) for step in range(10_000)]
    by = {"step": Location(title="training step", numeric=True, places=steps)}
    report = Report(make_summary(by=by))
    start = time.perf_counter()
    table = report.to_polars("by_step")
    assert time.perf_counter() - start < 10
    assert table["step"].to_list() == list(range(10_000))
    assert table["k3"].to_list() == [one.numbers["k3"].value for one in steps]
    assert len(csv_files(tables(report.summary))["by_step.csv"].splitlines()) == 10_001


# ---------------------------------------------------------------- rows of sequences


def test_rows_of_sequences_are_lazy_of_the_file_or_of_the_dump_read_again(dump, tmp_path):
    how = {"presets": NAMES, "device": "cpu", "threads": 1}
    file = tmp_path / "[rows].parquet"
    written = offpol_diag.analyze(dump, sequences=file, **how).sequences()
    report = offpol_diag.analyze(dump, **how)
    again = report.sequences()
    assert isinstance(written, pl.LazyFrame)
    assert isinstance(again, pl.LazyFrame)
    assert again.collect().equals(written.collect())
    assert report.sequences() is again
    kept = again.select(pl.col("token_is.kept_tokens").sum()).collect().item()
    assert kept == report.summary.dump.tokens


def test_reports_without_rows_of_sequences_say_so(dump, tmp_path):
    table = pq.read_table(dump)
    how = {"device": "cpu", "threads": 1}
    file = tmp_path / "rows.parquet"
    for report in (
        offpol_diag.doctor(dump, **how),
        offpol_diag.analyze(table, presets="token_is", **how),
        Report(make_summary()),
    ):
        with pytest.raises(UsageError, match="no rows of sequences") as error:
            report.sequences()
        assert "sequences=" in error.value.hint
    report = offpol_diag.analyze(table, presets="token_is", sequences=file, **how)
    assert len(report.sequences().collect()) == report.summary.dump.rows
    other = offpol_diag.analyze(table, presets="token_is", sequences=file, **how)
    file.unlink()
    with pytest.raises(UsageError, match="not there any more"):
        other.sequences()


# ---------------------------------------------------------------- what is imported


def test_a_report_imports_polars_for_frames_alone():
    code = "import sys\nfrom offpol_diag.api import Report\nfrom factory import make_summary\n"
    code += (
        "report = Report(make_summary())\nreport.tables\nreport.to_html()\nprint('polars' in sys.modules)\n"
    )
    code += "report.to_polars('by_step')\nprint('polars' in sys.modules)\n"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert ran.stdout.split() == ["False", "True"]
