"""The Python interface: what `analyze` and its neighbours take, and what a `Result` gives."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.presets.catalogue import load
from offpol_diag.report.page import page as drawn
from offpol_diag.result import load as read_result
from tests import oracles

HEALTHY = "sample_data/healthy.parquet"
NAMES = ["token_is", "seq_mis"]


@pytest.fixture(scope="module")
def report():
    return offpol_diag.analyze(HEALTHY, presets=NAMES, device="cpu")


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("presets", ["token_is, seq_mis", NAMES, load().resolve("token_is,seq_mis")])
@pytest.mark.parametrize("what", [HEALTHY, [Path(HEALTHY)]])
def test_presets_and_a_dump_may_be_named_in_several_ways(what, presets):
    found = offpol_diag.analyze(what, presets=presets, device="cpu")
    assert (list(found.presets)[:2], found.dump.files) == (NAMES, [HEALTHY])


@pytest.fixture(scope="module")
def rows():
    return [{**row, "rewards": 0.5} for row in oracles.make_rows(0.1, seed=3)]


@pytest.fixture(scope="module")
def numbers(rows, tmp_path_factory):
    """Return the numbers of the rows, read from a file."""
    path = oracles.write(rows, tmp_path_factory.mktemp("python") / "dump.parquet")
    return offpol_diag.analyze(path, presets=NAMES, device="cpu").values()


def as_table(rows):
    return pa.Table.from_pylist(rows)


def as_columns(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def as_padded(rows):
    """Return padded tensors under names of a trainer; the padding is not under the mask."""
    columns, width = as_columns(rows), max(len(row["token_ids"]) for row in rows)

    def padded(column):
        if not isinstance(column[0], list):
            return column
        return torch.tensor(np.array([[*row, *[0] * (width - len(row))] for row in column]))

    columns["rollout_logprobs"] = columns.pop("rollout_log_probs")
    return {name: padded(column) for name, column in columns.items()}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (as_table, "pyarrow.Table"),
        (lambda rows: as_table(rows).to_reader(), "pyarrow.RecordBatchReader"),
        (lambda rows: pl.DataFrame(as_table(rows)), "polars.DataFrame"),
        (lambda rows: pd.DataFrame(as_columns(rows)), "pandas.DataFrame"),
        (as_columns, "dict"),
        (as_padded, "dict"),
    ],
    ids=["pyarrow", "reader", "polars", "pandas", "lists", "tensors"],
)
def test_data_in_memory_give_the_numbers_of_the_file(form, name, rows, numbers):
    found = offpol_diag.analyze(form(rows), presets=NAMES, device="cpu")
    assert found.dump.files == [f"<{name}>"]
    assert found.values() == pytest.approx(numbers, rel=1e-12)


def test_nothing_of_it_stays_on_the_disk(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    offpol_diag.doctor(as_table(rows), device="cpu")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the commands


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("analyze {} --presets token_is --no-html --for verl", {"presets": "token_is", "trainer": "verl"}),
        ("compare {} --presets token_is,seq_mis", {"presets": "token_is,seq_mis"}),
        ("sweep {} --preset token_is --at 1.5,2,3", {"preset": "token_is", "at": [1.5, 2, 3]}),
        ("gate {} --max k3=0.1 --group-by step", {"max": {"k3": 0.1}, "group_by": ["step"]}),
    ],
)
def test_a_function_gives_what_its_command_writes_but_for_time_and_memory(line, call, tmp_path):
    file = tmp_path / "result.json"
    words = [*line.format(HEALTHY).split(), "--json", str(file), "--device", "cpu", "--quiet"]
    assert CliRunner().invoke(app, words).exit_code == 0
    found = getattr(offpol_diag, words[0])(HEALTHY, **call, device="cpu")
    same = {"seconds": found.run.seconds, "peak_rss_bytes": found.run.peak_rss_bytes}
    written = read_result(file)
    assert written.model_copy(update={"run": written.run.model_copy(update=same)}) == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "cannot be read from NoneType"),
        ({"rollout_log_probs": [[-1.0]]}, "pass rollout_log_probs, and old_log_probs or current_log_probs"),
        (
            {"rollout_log_probs": torch.zeros(2, 3), "old_log_probs": torch.zeros(2, 3)},
            "padded, .*: pass a response_mask",
        ),
        ({"rollout_log_probs": [[-1.0]], "old_log_probs": 3}, "a dump cannot be read from dict"),
        (pd.DataFrame({"a": [1, "x"]}), "cannot be read from pandas.DataFrame"),
        (
            {"rollout_log_probs": torch.zeros(2, 3, device="meta"), "old_log_probs": torch.zeros(2, 3)},
            "Cannot copy out of meta tensor",
        ),
        (pd.DataFrame({"a": [1]}), "^<pandas.DataFrame>: no column holds rollout_log_probs"),
    ],
)
def test_data_in_memory_that_are_no_dump_are_refused_in_one_line(given, said):
    with pytest.raises(OffpolError, match=said) as refused:
        offpol_diag.doctor(given, device="cpu")
    assert refused.value.hint
    assert "\n" not in refused.value.message


# ---------------------------------------------------------------- what a result gives


def test_names_that_a_result_does_not_have_are_refused_with_those_that_are_near(report):
    for ask in (report.figure, report.number, lambda name: report.number("k3", preset=name)):
        with pytest.raises(UsageError, match=r'the result has no .* "xyz"') as refused:
            ask("xyz")
        assert refused.value.hint.startswith("there are ")
    with pytest.raises(UsageError) as refused:
        report.number("ess_tokens", "token_si")
    assert "token_is" in refused.value.hint


def test_rows_of_sequences_are_written_to_the_file_that_is_named(tmp_path):
    file = str(tmp_path / "rows.parquet")
    found, rows = (
        offpol_diag.analyze(HEALTHY, presets=NAMES, sequences=file, device="cpu"),
        pl.read_parquet(file),
    )
    assert (len(rows), rows["token_is.kept_tokens"].sum()) == (found.dump.rows, found.dump.tokens)


def test_a_result_is_short_in_a_shell_shown_in_a_notebook_and_written_as_by_the_commands(report, tmp_path):
    assert re.fullmatch(r"Result\([^\n]{20,190}\)", repr(report))
    assert report._repr_html_().startswith("<pre>")
    assert "K3 KL" in report._repr_html_()

    page, result = tmp_path / "report.html", tmp_path / "report.json"
    assert report.to_html(page) == page.read_text() == drawn(report)
    report.to_json(result)
    assert read_result(result) == report
    assert report.to_markdown().startswith("#")


def test_the_table_holds_every_number_and_the_values_are_its_known_ones(report):
    table, number = report.numbers(), report.number("ess_tokens", preset="token_is")
    assert len(table) == len(report.whole) + sum(len(report.preset(name)) for name in report.presets)
    (row,) = table.filter(name="token_is.ess_tokens").to_dicts()
    assert (row["preset"], row["metric"], row["unit"]) == ("token_is", "ess_tokens", "fraction")
    assert (row["value"], (row["low"], row["high"])) == (number.value, number.interval)
    known = table.filter(pl.col("value").is_not_null()).select("name", "value")
    assert dict(known.iter_rows()) == report.values()


def test_the_guide_runs(tmp_path, monkeypatch):
    """Every block of docs/python.md, in one session."""
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/python.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    code = "\n".join(blocks).replace("sample_data/", f"{Path('sample_data').resolve()}/")
    monkeypatch.chdir(tmp_path)
    known = {}
    exec(compile(code, "docs/python.md", "exec"), known)
    assert known["report"].diagnosis.verdict != "bug"
    assert known["loss_factor"].shape == (64, 256)
    assert Path("report.html").stat().st_size > 100_000
