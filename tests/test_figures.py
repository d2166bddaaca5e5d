"""The charts: valid for plotly, with the result's own numbers, and harmless whatever names a dump has."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import offpol_diag
from offpol_diag.errors import UsageError
from offpol_diag.metrics import BANDS
from offpol_diag.number import Number
from offpol_diag.report import answered
from offpol_diag.report.charts import BLUE, COLOURS, LABELS, Panel, chart, curve, escaped, k3_panel, look
from offpol_diag.result import curve as by_step

SAMPLES = Path(__file__).parents[1] / "sample_data"
EVIL = '<a href="javascript:alert(1)">a</a><b>%{x}</b> $x^2$ &amp; \x1b"'
TEN = {"by_step", "by_lag", "drifts", "histogram", "noise", "density", "tail", "position", "length"}
TEN |= {"thresholds"}
CHARTS = {name: TEN - {"by_lag"} for name in ("healthy", "quantized", "stale")}
CHARTS |= {"collapse": TEN, "runs": {"runs_by_step"}}


@cache
def result(name):
    if name == "runs":
        return offpol_diag.compare(SAMPLES / "stale.parquet", SAMPLES / "quantized.parquet", device="cpu")
    if name == "presets":
        return offpol_diag.compare(SAMPLES / "healthy.parquet", presets="token_is,seq_mis", device="cpu")
    return offpol_diag.analyze(SAMPLES / f"{name}.parquet", presets="token_is,seq_mis,geo_rs", device="cpu")


def names(result):
    return {chart.name for chart in answered(result).charts}


@pytest.mark.parametrize("name", CHARTS)
def test_plotly_takes_every_figure_and_its_title_is_a_finding(name):
    assert names(result(name)) == CHARTS[name]
    for one in CHARTS[name]:
        found = result(name).figure(one)  # plotly checks every name and value
        json.loads(found.to_json(), parse_constant=pytest.fail)
        assert len(found.layout.title.text) > 20
        assert found.layout.template.layout.font.color == "#15181e"


def drawn(name):
    """Return the traces of a figure of the collapse sample as JSON gives them, and its layout."""
    found = json.loads(result("collapse").figure(name).to_json())
    return found["data"], found["layout"]


def assert_drawn(trace, numbers):
    """The values are the numbers', and the error bars end where their intervals do."""
    assert trace["y"] == [one.value for one in numbers]
    bars = zip(trace["error_y"]["arrayminus"], trace["error_y"]["array"], strict=True)
    for one, (down, up) in zip(numbers, bars, strict=True):
        if one.interval and one.interval[0] <= one.value <= one.interval[1]:
            assert (one.value - down, one.value + up) == pytest.approx(one.interval, rel=1e-12)


def test_curves_by_step_are_the_numbers_of_the_result_with_their_intervals():
    traces, layout = drawn("by_step")
    assert [layout[f"yaxis{end}"]["title"]["text"].split()[0] for end in ("", 2, 3)] == ["K3", "ESS", "mean"]
    for trace, metric in zip(traces, ("k3", "ess_tokens", "reward"), strict=True):
        points = by_step(result("collapse"), metric)
        assert_drawn(trace, [*points.values()])
        assert trace["x"] == [*points]
    assert traces[0]["text"][2] == "2: 0.014 [0.0061, 0.030]"


def test_the_other_charts_hold_the_numbers_of_the_result():
    summary, charts = result("collapse"), result("collapse").charts
    traces = {name: drawn(name)[0] for name in TEN}

    assert_drawn(traces["drifts"][0], [summary.whole[f"{prefix}k1"] for prefix in ("", "drift2.", "total.")])
    assert traces["histogram"][0]["y"] == [many for *_, many, _ in charts.log_ratios]
    (_, _, median, p90, p99, _, synced), counts = zip(*charts.noise, strict=True), charts.density[1]
    assert [tuple(one["y"]) for one in traces["noise"]] == [p99, p90, median, synced]
    cells = [0 if z is None else round(10**z) for row in traces["density"][0]["z"] for z in row]
    assert cells == [row[i] for i in range(len(counts)) for row in counts]
    tails = [charts.tails[over] for over in ("tokens", "sequences")]
    fits = [line for one in tails for line in [*zip(*one.points, strict=True)][1:]]
    assert [tuple(one["y"]) for one in traces["tail"]] == fits
    assert_drawn(traces["length"][0], [one.ess_sequences for one in summary.lengths.curve])
    _, ess, truncated, kept = zip(*charts.token_thresholds, strict=True)
    assert [tuple(one["y"]) for one in traces["thresholds"]] == [ess, kept, truncated]
    for trace, axis in zip(traces["position"], ("position", "turn"), strict=True):
        assert_drawn(trace, [one.numbers["k3"] for one in summary.at(axis)][: len(trace["y"])])
    lags = zip(traces["by_lag"][0]["x"], charts.steps.series["policy_lag"], strict=True)
    assert all(abs(x - lag.value) <= 0.15 for x, lag in lags)
    assert_drawn(traces["by_lag"][0], charts.steps.series["k3"])


def test_no_chart_of_thresholds_is_drawn_beside_a_bug():
    summary = result("healthy")
    bug = summary.diagnosis.model_copy(update={"verdict": "bug"})
    changed = summary.model_copy(update={"diagnosis": bug})
    assert names(summary) - names(changed) == {"thresholds"}


def test_a_log_axis_holds_all_values_and_no_interval_that_reaches_towards_0_stretches_it():
    wide = [Number(1.0, (1e-9, 2.0)), Number(20.0, (10.0, 30.0))]
    low, high = (10**end for end in k3_panel("step", [curve([0, 1], wide, "", BLUE)], {}).y["range"])
    assert 0.1 < low < 1 < 30 < high < 50


def test_bands_of_k3_are_named_on_the_side_away_from_the_line():
    line = curve([0, 1], [Number(0.0005), Number(0.5)], "", BLUE)
    named = {one["label"]["text"]: one for one in k3_panel("step", [line], {}).shapes}
    assert [*named] == [one.name for one in BANDS["k3"]]
    assert (named["typical"]["y1"], named["severe"]["y0"]) == (0.001, 0.1)
    sides = [named[one]["label"]["textposition"] for one in ("severe", "typical")]
    assert sides == ["top left", "top right"]


def test_panels_have_axes_and_shapes_of_their_own():
    panel = k3_panel("x", [curve([0, 1], [Number(1.0), Number(2.0)], "", BLUE)], {})
    found = chart("a", "A title", panel, panel)
    assert [one["yaxis"] for one in found.data] == ["y", "y2"]
    ends = [(one["xref"], one["yref"]) for one in found.layout["shapes"]]
    assert {*ends} == {("x domain", "y"), ("x2 domain", "y2")}


@pytest.mark.parametrize("name", ["light", "dark"])
def test_lines_and_texts_stand_out_on_the_light_and_on_the_dark_page(name):
    found = look(name)["layout"]

    def luminance(colour):
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(colour):
        low, high = sorted(map(luminance, (colour, found["paper_bgcolor"])))
        return (high + 0.05) / (low + 0.05)

    assert min(map(contrast, COLOURS)) >= 3
    assert min(contrast(one) for one in (found["font"]["color"], found["xaxis"]["tickfont"]["color"])) >= 4.5


def test_hostile_names_are_escaped_in_every_text_of_a_figure():
    lines = curve([EVIL, f"{EVIL}2"], [Number(1.0), Number(2.0)], EVIL, BLUE)
    found = json.loads(chart("a", EVIL, Panel(EVIL, EVIL, [lines], LABELS)).figure().to_json())
    del found["layout"]["template"]
    text = json.dumps(found)
    assert text.count("href") > 8
    assert [sign for sign in ("<a", "<b>%", "%{x}", "$x") if sign in text] == []
    assert escaped("5% of a_b") == "5% of a_b"


ODD = {
    "no point": [],
    "nothing known": [Number(), Number()],
    "huge": [Number(1e308), Number(1.0, (0.0, 1e308)), Number(-1e308, (-1e308, 1e308))],
    "tiny": [Number(1e-310), Number(5e-324)],
    "zero and negative": [Number(y, (y - 1, y + 1)) for y in (-1.0, 0.0, 1.0)],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_series_give_figures_that_plotly_takes(name):
    line = curve(range(len(ODD[name])), ODD[name], "", BLUE)
    found = chart("a", "title", k3_panel("x", [line], {}), Panel("x", "y", [line]))
    json.loads(found.figure().to_json(), parse_constant=pytest.fail)
    assert all(math.isfinite(y) for trace in found.data for y in trace["error_y"]["array"])


def test_an_unknown_figure_is_named_with_what_there_is():
    for found, hint in ((result("collapse"), "did you mean by_step"), (result("presets"), "there are none")):
        with pytest.raises(UsageError, match='the result has no figure "by_stp"') as refused:
            found.figure("by_stp")
        assert hint in refused.value.hint


def test_no_command_imports_plotly_or_polars(tmp_path):
    """Plotly's objects take 0.3 s to import, and polars is for frames."""
    dump, page = str(SAMPLES / "healthy.parquet"), str(tmp_path / "a.html")
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom offpol_diag.cli import app\n"
        f"for command in (['gate', {dump!r}, '--max', 'k3=1'], ['analyze', {dump!r}, '-o', {page!r}]):\n"
        "    found = CliRunner().invoke(app, command)\n    assert found.exit_code == 0, found.output\n"
        "assert not {'plotly', 'narwhals', 'polars'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
