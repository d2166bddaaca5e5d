"""Check the output, files, refusals and warnings of `offpol-diag sweep`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.core.observe import opened
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.report import answered
from offpol_diag.report.sweep import telling
from offpol_diag.result import loads
from offpol_diag.sweep import SweepOptions, pick, sweep
from tests.factory import DumpFile

GEO = Preset("geo", "", reject=(Reject(over="mean", lower=1 / 1.001, upper=1.001),))
RUNNER = CliRunner()


def run(*arguments, width=80):
    return RUNNER.invoke(app, ["sweep", *arguments], env={"COLUMNS": str(width), "NO_COLOR": "1"})


def write(path, deltas, **more):
    with DumpFile(path) as dump:
        dump.write(
            rollout_log_probs=[np.full(len(row), -1.2345678901) for row in deltas],
            old_log_probs=[-1.2345678901 + np.asarray(row) for row in deltas],
            **more,
        )
    return str(path)


def swept(path, one=GEO, values=(1.001, 1.01, 1.5), **more):
    return sweep(opened(path), SweepOptions(one, pick(one, None), values, **more), threads=1).sweep


@pytest.mark.parametrize("width", [80, 120])
def test_the_window_stands_first_and_is_named_by_a_command_that_runs(width):
    ran = run("--preset", "geo_rs", "-v", "--keep", "0.95", "--for", "verl", width=width)
    lines = ran.stdout.splitlines()
    (line,) = re.findall(r"offpol-diag (presets geo_rs@\S+)", " ".join(ran.stdout.split()))

    assert RUNNER.invoke(app, shlex.split(line)).exit_code == 0
    assert re.fullmatch(r"presets geo_rs@0\.9\d*\.\.1\.0\d*", line)
    config = lines.index("For verl:")
    assert [line for line in lines[:config] if cell_len(line) > width] == []
    window = next(at for at, line in enumerate(lines) if line.endswith("of the sequences"))
    table = next(at for at, line in enumerate(lines) if line.startswith("threshold "))
    assert window < table
    assert "rollout_rs: geometric" in "\n".join(lines[config:])


def test_the_result_is_its_json_and_a_section_of_the_page(tmp_path):
    page = tmp_path / "page.html"
    ran = run("--preset", "seq_mis", "--at", "1.5,2", "-v", "-o", str(page), "--json", "-")
    summary = loads(ran.stdout, "result")  # and nothing else

    assert 'id="table-sweep"' in page.read_text()
    assert (summary.run.command, summary.sweep.which) == ("sweep", "reject[0]")
    assert [point.threshold for point in summary.sweep.points] == [1.5, 2.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "no_such"), "unknown preset"),
        (("--preset", "all"), "presets\n\nhint: name one"),
        (("--preset", "geo_rs,seq_mis"), "presets\n\nhint: name one"),
        (("--preset", "geo_rs", "--keep", "0.9", "--for", "nobody"), "unknown trainer"),
        (("--preset", "geo_rs", "--keep", "0.9", "--for", "trl"), "cannot say"),
        (("--preset", "geo_rs", "-o", "/no/such/place.html"), "does not exist"),
    ],
)
def test_meaningless_arguments_are_refused_with_a_hint(arguments, said):
    ran = run(*arguments)

    assert ran.exit_code == 2
    assert said in ran.stderr
    assert "hint: " in ran.stderr
    assert ran.stdout == ""


def test_a_dump_without_the_column_is_refused_and_a_preset_of_ones_own_is_swept(tmp_path):
    ran = run(write(tmp_path / "two.parquet", [[0.1]]), "--preset", "pure_is")
    assert (ran.exit_code, "no current_log_probs" in ran.stderr) == (2, True)

    own = tmp_path / "own.toml"
    own.write_text('[mine]\nreject = { statistic = "tv", over = "max", upper = 0.2 }\n')
    ran = run("--preset", "mine", "--preset-file", str(own), "-v", "--keep", "0.8")
    assert (ran.exit_code, "≤" in ran.stdout) == (0, True)


def noise(random, many, length, spread, shift=0.0):
    return [random.normal(shift, spread, length) for _ in range(many)]


def test_a_preset_that_drops_long_responses_is_warned_of(tmp_path):
    """A window on the product ratio: the spread of ΣΔ grows with length."""
    random = np.random.default_rng(0)
    deltas = [*noise(random, 100, 10, 0.05), *noise(random, 100, 1000, 0.05)]
    product = Preset("product", "", reject=(Reject(over="sum", lower=0.5, upper=2.0),))
    found = swept(write(tmp_path / "long.parquet", deltas), product, (1.5, 2.0, 1000.0))

    (remark,) = found.remarks
    assert remark.startswith(
        "Length trap: 2, the preset as it stands, keeps 100% of the responses of 8–15 tokens and "
    )
    alike = [row for length in (90, 100, 110) for row in noise(random, 80, length, 0.01)]
    assert swept(write(tmp_path / "same.parquet", alike)).remarks == []


def long_and_short(tmp_path):
    """Write a dump in which the spread of the mean log-ratio is 0.01 for long responses, 0 for short ones."""
    random = np.random.default_rng(0)
    short = [np.full(10, 1e-4 * random.choice((-1.0, 1.0))) for _ in range(100)]
    long = [np.full(1000, random.choice((1e-4, 0.02))) for _ in range(100)]
    return write(tmp_path / "two.parquet", [*short, *long])


def test_only_the_presets_own_bound_is_warned_of(tmp_path):
    """At 1.001 and 1.01 the long ones are dropped; the preset that stands at 1.5 treats both alike."""
    path, wide = (
        long_and_short(tmp_path),
        Preset("wide", "", reject=(Reject(over="mean", lower=1 / 1.5, upper=1.5),)),
    )
    assert swept(path, wide, (1.001, 1.01, 1.5)).remarks == []
    assert swept(path, wide, (1.001, 1.01)).remarks == []
    (remark,) = swept(path, GEO, (1.001, 1.01, 1.5)).remarks
    assert remark.startswith("Length trap: 1.001, the preset as it stands, keeps 100% of the responses of 8")
    upper = Preset("upper", "", reject=(Reject(over="mean", upper=1.5),))
    remark, *_ = swept(path, upper, (1.001, 1.01, 1.5), keep=0.7).remarks
    assert remark.startswith("Length trap: what was solved for keeps 100% of the responses of 8–15 tokens")


def test_a_preset_that_drops_what_is_fresh_is_warned_of(tmp_path):
    random = np.random.default_rng(0)
    deltas = [*noise(random, 100, 4, 0.02), *noise(random, 100, 4, 0.2)]
    path = write(tmp_path / "lag.parquet", deltas, policy_lag=[0] * 100 + [3] * 100)
    found = swept(path, values=(1.001, 1.05, 2.0))

    assert found.points[0].numbers["kept_at_lag_0"].value < 0.68
    (remark,) = found.remarks
    assert remark.startswith("Noise: 1.001, the preset as it stands, drops ")
    assert swept(path, values=(1.05, 2.0)).remarks == []


def test_a_column_says_what_none_before_it_says(tmp_path):
    random = np.random.default_rng(0)
    path = write(tmp_path / "d.parquet", noise(random, 60, 8, 0.2))
    token = Preset("token", "", weight=Weight(upper=2.0))
    mask = Preset("mask", "", weight=Weight(action="mask", lower=0.5, upper=2.0))

    rejected = telling(swept(path, values=(1.01, 1.05)))
    assert rejected[0] == "tokens_weighted"
    assert not {"ess_tokens", "weight_mean", "truncated_high"} & {*rejected}  # the share kept; nothing
    assert telling(swept(path, token, (1.1, 1.5))) == ["truncated_high", "ess_tokens", "weight_mean"]
    assert "tokens_weighted" in telling(swept(path, mask, (1.1, 1.5)))
    assert telling(swept(path, values=(1000.0,))) == ["tokens_weighted"]  # all is kept


PAGE = Path(__file__).parents[1] / "docs" / "sweep.md"
SHOWN = re.findall(r"```text\n\$ offpol-diag sweep ([^\n]*)\n(.*?)\n```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("arguments", "shown"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_the_page_shows_what_the_command_prints(arguments, shown):
    ran = run(*arguments.split(), width=100)

    assert ran.stdout.strip("\n") == shown
    assert ["--keep" in arguments for arguments, _ in SHOWN] == [False, True]


def test_quiet_says_what_the_preset_keeps():
    at = ("sample_data/stale.parquet", "--preset", "token_is", "-q", "--at")
    for values in ("2", "2,5"):
        (one,) = run(*at, values, width=200).stdout.splitlines()
        assert re.fullmatch(r"token_is at 2 keeps an ESS of tokens of 99\.2% \[.+%\]", one)


def test_a_sweep_of_one_threshold_goes_nowhere_and_has_no_chart(tmp_path):
    path = write(tmp_path / "d.parquet", [np.full(2 + i, 0.002 * (i % 7 - 3)) for i in range(40)])
    one, two = (
        answered(sweep(opened(path), SweepOptions(GEO, pick(GEO, None), at), threads=1))
        for at in ((1.003,), (1.003, 1.5))
    )
    assert [("→" in tile.below) for tile in (*one.tiles[:1], *two.tiles[:1])] == [False, True]
    assert [" it goes from " in found.more for found in (one, two)] == [False, True]
    assert [[chart.name for chart in found.charts] for found in (one, two)] == [[], ["sweep"]]
