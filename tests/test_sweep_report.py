"""Check the output, files, refusals and warnings of `offpol-diag sweep`."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from offpol_diag.blocks import Figure, Series
from offpol_diag.report.render.dots import dots
from offpol_diag.report.sections.opening import opening
from offpol_diag.report.sections.sweep import QUARTERS
from rich.cells import cell_len
from typer.testing import CliRunner

from offpol_diag import DumpWriter
from offpol_diag.cli import app
from offpol_diag.presets import Preset, Reject
from offpol_diag.summary import loads
from offpol_diag.sweep import SweepOptions, pick, sweep
from offpol_diag.sweep.evaluate import of_logits

GEO = Preset("geo", "", reject=(Reject(over="mean", lower=1 / 1.001, upper=1.001),))
RUNNER = CliRunner()


def run(*arguments, width=80):
    return RUNNER.invoke(app, ["sweep", *arguments], env={"COLUMNS": str(width), "NO_COLOR": "1"})


def write(path, deltas, **more):
    with DumpWriter(path) as dump:
        dump.write(
            rollout_log_probs=[np.full(len(row), -1.2345678901) for row in deltas],
            old_log_probs=[-1.2345678901 + np.asarray(row) for row in deltas],
            **more,
        )
    return str(path)


def swept(path, one=GEO, values=(1.001, 1.01, 1.5), **more):
    return sweep([path], SweepOptions(one, pick(one, None), values, **more), workers=1).sweep


@pytest.mark.parametrize("width", [80, 120])
def test_the_window_stands_first_and_is_named_by_a_command_that_runs(width):
    ran = run("--preset", "geo_rs", "-v", "--keep", "0.95", "--for", "verl", width=width)
    lines = ran.stdout.splitlines()
    (line,) = re.findall(r"offpol-diag (presets geo_rs --set '[^']+')", " ".join(ran.stdout.split()))

    assert RUNNER.invoke(app, shlex.split(line)).exit_code == 0
    assert "reject[0].lower=" in line
    config = lines.index("The config for verl:")
    assert [line for line in lines[:config] if cell_len(line) > width] == []
    window = next(at for at, line in enumerate(lines) if line.startswith("• Window: "))
    table = next(at for at, line in enumerate(lines) if line.startswith("threshold "))
    assert window < table
    assert sum(line.strip().startswith("1.001 ← │") for line in lines) == 2
    assert "rollout_rs: geometric" in "\n".join(lines[config:])


def test_the_result_is_its_json_and_a_section_of_the_page(tmp_path):
    page = tmp_path / "page.html"
    ran = run("--preset", "seq_mis", "--at", "1.5,2", "-v", "-o", str(page), "--json", "-")
    summary = loads(ran.stdout, "result")  # and nothing else

    assert '<section id="sweep"' in page.read_text()
    assert (summary.run.command, summary.sweep.which) == ("sweep", "reject[0]")
    assert [point.threshold for point in summary.sweep.points] == [1.5, 2.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "no_such"), "unknown preset"),
        (("--preset", "all"), "presets\n\nhint: name one"),
        (("--preset", "geo_rs,seq_mis"), "presets\n\nhint: name one"),
        (("--preset", "geo_rs", "--keep", "nan"), "above 0 and at most 1"),
        (("--preset", "geo_rs", "--at", "1.1,1.01"), "must rise"),
        (("--preset", "geo_rs", "--which", "clip.high"), "no bound"),
        (("--preset", "geo_rs", "--for", "verl"), "--keep solves for"),
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


def test_a_threshold_that_drops_long_responses_is_marked(tmp_path):
    """A window on the product ratio: the spread of ΣΔ grows with length."""
    random = np.random.default_rng(0)
    deltas = [*noise(random, 100, 10, 0.05), *noise(random, 100, 1000, 0.05)]
    product = Preset("product", "", reject=(Reject(over="sum", lower=0.5, upper=2.0),))
    found = swept(write(tmp_path / "long.parquet", deltas), product, (1.5, 2.0, 1000.0))

    assert [("length" in point.marks) for point in found.points] == [True, True, False]
    assert any(remark.startswith("Length trap (L): at 2 (the preset") for remark in found.remarks)
    alike = [row for length in (90, 100, 110) for row in noise(random, 80, length, 0.01)]
    same = swept(write(tmp_path / "same.parquet", alike)).points
    assert not any("length" in point.marks for point in same)


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
    found = swept(path, wide, (1.001, 1.01, 1.5))
    assert [("length" in point.marks) for point in found.points] == [True, True, False]
    assert found.remarks == []
    assert swept(path, wide, (1.001, 1.01)).remarks == []
    (remark,) = swept(path, GEO, (1.001, 1.01, 1.5)).remarks
    assert remark.startswith(
        "Length trap (L): at 1.001 (the preset as it stands), 100% is kept of the shortest"
    )


def test_the_chart_by_length_speaks_of_the_bound_that_the_warning_speaks_of(tmp_path):
    path, wide = (
        long_and_short(tmp_path),
        Preset("wide", "", reject=(Reject(over="mean", lower=1 / 1.5, upper=1.5),)),
    )

    def chart(one, values):
        found = opening(sweep([path], SweepOptions(one, pick(one, None), values), workers=1))
        return found.cautions, found.pictures[-1].title

    said, title = chart(wide, (1.001, 1.01, 1.5))
    assert (said, title) == ((), "Short and long responses are kept alike at the preset's own 1.5")
    (said,), title = chart(GEO, (1.001, 1.01, 1.5))
    kept, dropped = re.search(r", (\S+) is kept .* and (\S+) of the longest", said).groups()
    assert (
        title == f"The preset's own 1.001 keeps {kept} of the shortest quarter and {dropped} of the longest"
    )
    assert chart(GEO, (1.01, 1.5)) == ((), "What is kept of short and long responses at each threshold")


def test_a_window_beside_the_data_is_marked(tmp_path):
    """k1 = 0.005: a window of ±0.1% around 1 holds nothing, and one as wide around the data nearly all."""
    random = np.random.default_rng(0)
    found = swept(write(tmp_path / "beside.parquet", noise(random, 200, 400, 0.005, -0.005)))
    first = found.points[0]

    assert first.metrics["sequences_kept"].value == 0
    assert "centre" in first.marks
    assert "centre" not in found.points[-1].marks
    assert any("lies around 1, keeps 0%" in remark and "100%" in remark for remark in found.remarks)
    tight = swept(write(tmp_path / "tight.parquet", noise(random, 200, 100, 0.5))).points[0]
    assert tight.metrics["sequences_kept"].value < 0.5
    assert "centre" not in tight.marks


def test_a_threshold_that_drops_what_is_fresh_lies_under_the_noise(tmp_path):
    random = np.random.default_rng(0)
    deltas = [*noise(random, 100, 4, 0.02), *noise(random, 100, 4, 0.2)]
    path = write(tmp_path / "lag.parquet", deltas, policy_lag=[0] * 100 + [3] * 100)
    found = swept(path, values=(1.001, 1.05, 2.0))

    assert [("floor" in point.marks) for point in found.points] == [True, False, False]
    assert found.points[0].metrics["fresh_kept"].value < 0.68
    assert any("policy lag 0" in remark for remark in found.remarks)
    without = swept(write(tmp_path / "no_lag.parquet", noise(random, 100, 4, 0.2))).points
    assert not any("fresh_kept" in point.metrics or "floor" in point.marks for point in without)


@pytest.mark.parametrize(("bits", "name"), [(7, "bfloat16"), (10, "float16"), (23, "float32")])
def test_the_format_of_what_is_stored_is_seen_and_its_rounding_known(tmp_path, bits, name):
    """Values rounded to so many bits of fraction; what is lost has the spread that is claimed."""
    random = np.random.default_rng(0)
    exact = np.exp(random.normal(0, 1, (2, 4000)))
    power = np.floor(np.log2(exact)) - bits
    kept = np.round(exact / 2.0**power) * 2.0**power
    path = tmp_path / "stored.parquet"
    with DumpWriter(path) as dump:
        dump.write(
            rollout_log_probs=list(-kept[0].reshape(40, 100)), old_log_probs=list(-kept[1].reshape(40, 100))
        )
    found = swept(str(path), Preset("token", "", reject=(Reject(upper=2.0),)), (1.0 + 1e-9, 1.0001, 1.5))

    stored = found.floor[0]
    assert stored.source == f"log-probs stored as {name}"
    lost = float(np.std((kept[1] - kept[0]) - (exact[1] - exact[0])))
    assert math.isclose(stored.per_token.value, lost, rel_tol=0.05)
    marked = [("floor" in point.marks) for point in found.points]
    assert marked == [stored.per_token.value > math.log(point.threshold) for point in found.points]


def test_the_floor_of_a_mean_falls_with_the_root_of_the_length(tmp_path):
    random = np.random.default_rng(0)
    found = swept(write(tmp_path / "mean.parquet", noise(random, 50, 100, 0.1)))

    for one in found.floor:
        assert math.isclose(one.statistic.value, one.per_token.value / 10)
    assert math.isclose(of_logits(7), 0.0625 / math.sqrt(12) * math.sqrt(2))  # steps of 1/16 near 10


def figure(*rows, unit="fraction"):
    series = tuple(Series(name, name.upper(), row) for name, row in zip("abc", rows, strict=False))
    return Figure("t", ("1", "22"), series, unit)


def test_each_point_has_a_row_and_each_series_its_mark():
    first, second, axis, legend = dots(figure((0.0, 1.0), (0.5, None)), 27)
    assert first == f" 1 │A{' ' * 9}B{' ' * 11}│"
    assert second == f"22 │{' ' * 21}A│"
    assert (axis.split(), legend) == (["0%", "100%"], "A a, B b, * several")

    same, *_ = dots(figure((0.5, 0.5), (0.5, 0.5)), 40)
    assert "*" in same
    assert "A" not in same
    first, second, axis, _ = dots(figure((-2.0, 6.0), unit=""), 60)  # no shares: they span the field
    assert first.index("A") < second.index("A")
    assert axis.split() == ["-2", "6"]
    assert dots(figure((None, None)), 40)[0].count("A") == 0


PAGE = Path(__file__).parents[1] / "docs" / "sweep.md"
SHOWN = re.findall(r"```text\n\$ offpol-diag sweep ([^\n]*)\n(.*?)\n```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("arguments", "shown"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_the_page_shows_what_the_command_prints(arguments, shown):
    ran = run(*arguments.split(), width=100)

    assert ran.stdout.strip("\n") == shown
    assert ["--keep" in arguments for arguments, _ in SHOWN] == [False, True]


def test_quiet_says_what_the_preset_keeps_and_how_that_changes():
    at = ("sample_data/stale.parquet", "--preset", "token_is", "-q", "--at")
    (one,), (two,) = (run(*at, values, width=200).stdout.splitlines() for values in ("2", "2,5"))
    assert re.fullmatch(r"token_is at 2 keeps an ESS of 99\.2% over tokens \[.+%\]", one)
    assert two == f"{one}: over the thresholds b of weight.upper it goes from 99.2% at 2 to 98.4% at 5."


def test_a_sweep_of_one_threshold_goes_nowhere_and_is_drawn_by_length_alone(tmp_path):
    path = write(tmp_path / "d.parquet", [np.full(2 + i, 0.002 * (i % 7 - 3)) for i in range(40)])
    one, two = (
        opening(sweep([path], SweepOptions(GEO, pick(GEO, None), at), workers=1))
        for at in ((1.01,), (1.01, 1.5))
    )
    assert [("→" in fact.below) for fact in (*one.facts[:1], *two.facts[:1])] == [False, True]
    assert [" it goes from " in found.lede for found in (one, two)] == [False, True]
    assert [[chart.id for chart in found.pictures] for found in (one, two)] == [
        ["sweep-length"],
        ["sweep", "sweep-length"],
    ]
    (panel,) = one.pictures[0].panels
    assert ([*panel.names], len(panel.layers)) == ([*QUARTERS], 1)
