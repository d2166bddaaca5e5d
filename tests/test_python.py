"""The Python interface: what `analyze` and its neighbours take, and what a `Report` gives."""

from __future__ import annotations

import json
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
from offpol_diag.errors import UsageError
from offpol_diag.presets.catalogue import load
from offpol_diag.summary import load as read_result
from tests import oracles

HEALTHY = "sample_data/healthy.parquet"
NAMES = ["token_is", "seq_mis"]


@pytest.fixture(scope="module")
def report():
    return offpol_diag.analyze(HEALTHY, presets=NAMES, device="cpu")


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("given", ["token_is, seq_mis", NAMES, load().resolve("token_is,seq_mis")])
def test_presets_may_be_named(given):
    assert list(offpol_diag.analyze([HEALTHY], presets=given, device="cpu").presets) == NAMES


@pytest.mark.parametrize("given", [HEALTHY, Path(HEALTHY), [Path(HEALTHY)]])
def test_a_dump_may_be_one_path(given):
    assert offpol_diag.analyze(given, presets=(), device="cpu").summary.dump.files == [HEALTHY]


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
    lists = [name for name, column in columns.items() if isinstance(column[0], list)]

    def pad(column):
        return torch.tensor([row + [0] * (width - len(row)) for row in column])

    found = {name: pad(column) if name in lists else column for name, column in columns.items()}
    found["rollout_logprobs"] = torch.tensor(np.array(pad_float(columns["rollout_log_probs"], width)))
    found["old_log_probs"] = torch.tensor(np.array(pad_float(columns["old_log_probs"], width)))
    found["current_log_probs"] = torch.tensor(np.array(pad_float(columns["current_log_probs"], width)))
    found["advantages"] = torch.tensor(np.array(pad_float(columns["advantages"], width)))
    del found["rollout_log_probs"]
    return found


def pad_float(column, width):
    return [row + [0.0] * (width - len(row)) for row in column]


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (as_table, "pyarrow.Table"),
        (lambda rows: as_table(rows).to_reader(), "pyarrow.RecordBatchReader"),
        (lambda rows: pl.DataFrame(as_table(rows)), "polars.DataFrame"),
        (lambda rows: pl.LazyFrame(as_table(rows)), "polars.LazyFrame"),
        (lambda rows: pd.DataFrame(as_columns(rows)), "pandas.DataFrame"),
        (as_columns, "dict"),
        (as_padded, "dict"),
    ],
    ids=["pyarrow", "reader", "polars", "lazy", "pandas", "lists", "tensors"],
)
def test_data_in_memory_give_the_numbers_of_the_file(form, name, rows, numbers):
    found = offpol_diag.analyze(form(rows), presets=NAMES, device="cpu")
    assert found.summary.dump.files == [f"<{name}>"]
    assert found.values() == pytest.approx(numbers, rel=1e-12)


def test_nothing_of_it_stays_on_the_disk(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    offpol_diag.doctor(as_table(rows), device="cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "cannot be read from NoneType"),
        (3, "cannot be read from int"),
        ([as_table([{"a": 1}])], "cannot be read from list"),
        ({"rollout_log_probs": [[-1.0]]}, "old_log_probs and current_log_probs are both missing"),
        (
            {"rollout_log_probs": torch.zeros(2, 3), "old_log_probs": torch.zeros(2, 3)},
            "padded; pass response_mask",
        ),
        ({"rollout_log_probs": [[-1.0]], "old_log_probs": 3}, "the dict is no dump"),
    ],
)
def test_other_objects_than_dumps_are_refused(given, said):
    with pytest.raises(UsageError, match=said) as refused:
        offpol_diag.analyze(given, device="cpu")
    assert refused.value.hint


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tokn_is", 'unknown preset "tokn_is"'),
        (["tokn_is"], 'unknown preset "tokn_is"'),
        ([3], "int is no preset"),
        (3, "presets cannot be int"),
    ],
)
def test_other_objects_than_presets_are_refused(given, said):
    with pytest.raises(UsageError, match=said) as refused:
        offpol_diag.analyze([HEALTHY], presets=given, device="cpu")
    assert refused.value.hint


# ---------------------------------------------------------------- the commands


def test_the_commands_are_those_of_the_shell(cli_json):
    """Each function's result is that of its command, but for time and memory."""
    pairs = {
        ("analyze", HEALTHY, "--presets", "token_is", "--no-html", "--for", "verl"): offpol_diag.analyze(
            HEALTHY, presets="token_is", trainer="verl", device="cpu"
        ),
        ("doctor", HEALTHY): offpol_diag.doctor(HEALTHY, device="cpu"),
        ("compare", HEALTHY, "--presets", "seq_mis", "--against", "token_is"): offpol_diag.compare(
            HEALTHY, presets="seq_mis", against="token_is", device="cpu"
        ),
        ("compare", HEALTHY, "sample_data/collapse.parquet"): offpol_diag.compare(
            HEALTHY, "sample_data/collapse.parquet", device="cpu"
        ),
        ("sweep", "--preset", "token_is", HEALTHY, "--at", "1.5,2,3"): offpol_diag.sweep(
            HEALTHY, "token_is", at=[1.5, 2, 3], device="cpu"
        ),
        ("gate", HEALTHY, "--max", "k3=0.1", "--min", "token_is.ess_tokens=0.5"): offpol_diag.gate(
            HEALTHY, max={"k3": 0.1}, min={"token_is.ess_tokens": 0.5}, device="cpu"
        ),
    }
    for command, found in pairs.items():
        want, ours = cli_json(*command), json.loads(found.to_json())
        assert timeless(ours) == timeless(want), command


def timeless(result):
    """Return the result without the time and memory of its runs."""
    if isinstance(result, dict):
        return {key: timeless(x) for key, x in result.items() if key not in ("seconds", "peak_rss_bytes")}
    return [timeless(one) for one in result] if isinstance(result, list) else result


@pytest.fixture
def cli_json(tmp_path):
    """Run a command in this process and return its JSON."""

    def run(*command):
        file = tmp_path / "result.json"
        done = CliRunner().invoke(app, [*command, "--json", str(file), "--device", "cpu", "--quiet"])
        assert done.exit_code == 0, done.output
        return json.loads(file.read_text())

    return run


def test_a_report_can_be_gated(report):
    assert offpol_diag.gate(report, max={"k3": 0.1}).passed
    assert not offpol_diag.gate(report, max={"k3": 1e-9}).passed


def test_arguments_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError, match="two runs are compared"):
        offpol_diag.compare(HEALTHY, HEALTHY, against="token_is")
    with pytest.raises(UsageError, match="`keep` solves for"):
        offpol_diag.sweep(HEALTHY, "token_is", trainer="verl")


# ---------------------------------------------------------------- what a report gives


def test_a_report_is_short_in_a_shell_and_shown_in_a_notebook(report):
    assert repr(report).startswith("Report(")
    assert len(repr(report)) < 200
    assert "\n" not in repr(report)
    assert report._repr_html_().startswith("<pre>")
    assert "K3 KL" in report._repr_html_()


def test_a_report_writes_what_the_commands_write(report, tmp_path):
    from offpol_diag.report.render.html import render_html

    page, result = tmp_path / "report.html", tmp_path / "report.json"
    assert report.to_html(page) == page.read_text() == render_html(report.summary)
    report.to_json(result)
    assert read_result(result) == report.summary
    assert report.to_markdown().startswith("#")


def test_the_table_holds_every_number(report):
    table = report.to_polars()
    assert len(table) == len(report.metrics) + sum(len(one.metrics) for one in report.presets.values())
    (k3,) = table.filter(name="k3").to_dicts()
    number = report.metrics["k3"]
    assert (k3["preset"], k3["value"], (k3["low"], k3["high"])) == (None, number.value, number.interval)
    (ess,) = table.filter(name="token_is.ess_tokens").to_dicts()
    assert (ess["preset"], ess["metric"]) == ("token_is", "ess_tokens")
    known = table.filter(pl.col("value").is_not_null())
    assert dict(known.select("name", "value").iter_rows()) == report.values()


class Logger:
    def log(self, numbers, step):
        self.got = numbers, step


def test_numbers_go_to_anything_that_logs(report):
    logger = Logger()
    report.log_to(logger, step=3, prefix="mismatch/")
    numbers, step = logger.got
    assert step == 3
    assert numbers["mismatch/k3"] == report.metrics["k3"].value
    assert numbers["mismatch/token_is.ess_tokens"] == report.presets["token_is"].metrics["ess_tokens"].value
    with pytest.raises(UsageError, match="int has no log"):
        report.log_to(3)


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
