"""The charts: valid for plotly, with the result's own numbers, and harmless whatever names a dump has."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from factory import make_summary

import offpol_diag
from offpol_diag.errors import UsageError
from offpol_diag.metrics import BANDS
from offpol_diag.number import Number
from offpol_diag.report import plot
from offpol_diag.report.plot import BLUE, LABELS, Panel, chart, curve, k3_panel, upright
from offpol_diag.result import curve as by_step

SAMPLES = Path(__file__).parents[1] / "sample_data"
FEW = {"presets": "token_is,seq_mis,geo_rs", "device": "cpu"}
EVIL = '<a href="javascript:alert(1)">a</a><b>%{x}</b> $x^2$ &amp; \x1b"'
TEN = {"by_step", "by_lag", "drifts", "histogram", "noise", "density", "tail", "position", "length"}
TEN |= {"thresholds"}


@cache
def result(name):
    if name == "runs":
        return offpol_diag.compare(SAMPLES / "stale.parquet", SAMPLES / "quantized.parquet", device="cpu")
    return offpol_diag.analyze(SAMPLES / f"{name}.parquet", **FEW)


def drawn(name, figure):
    """Return the traces of a figure as JSON gives them, without bands."""
    found = json.loads(result(name).figure(figure).to_json())
    return [one for one in found["data"] if "fill" not in one], found["layout"]


CHARTS = {name: TEN - {"by_lag"} for name in ("healthy", "quantized", "stale")}
CHARTS |= {"collapse": TEN, "runs": {"runs_by_step"}}


@pytest.mark.parametrize("name", CHARTS)
def test_plotly_takes_every_figure_and_its_title_is_a_finding(name):
    assert {*result(name).figures} == CHARTS[name]
    for one in result(name).figures:
        found = result(name).figure(one)  # plotly checks every name and value
        json.loads(found.to_json(), parse_constant=pytest.fail)
        assert len(found.layout.title.text) > 20
        assert found.layout.template.layout.font.color == "#15181e"


def test_curves_by_step_are_the_numbers_of_the_result_with_their_intervals():
    traces, layout = drawn("collapse", "by_step")
    summary = result("collapse")
    assert [layout[f"yaxis{end}"]["title"]["text"].split()[0] for end in ("", 2, 3)] == ["K3", "ESS", "mean"]
    for trace, metric in zip(traces, ("k3", "ess_tokens", "reward"), strict=True):
        points = by_step(summary, metric)
        assert trace["y"] == [one.value for one in points]
        assert [*map(str, trace["x"])] == [one.step for one in points]
    bands = json.loads(summary.figure("by_step").to_json())["data"]
    low, high = ([one.interval[end] for one in by_step(summary, "reward") if one.interval] for end in (0, 1))
    (band,) = [one for one in bands if "fill" in one and one["yaxis"] == "y3"]
    assert band["y"] == [*high, *low[::-1], None]


def test_the_other_charts_hold_the_numbers_of_the_result():
    summary, charts = result("collapse"), result("collapse").charts
    traces = {name: drawn("collapse", name)[0] for name in TEN}

    whole = [summary.whole[f"{prefix}k1"] for prefix in ("", "drift2.", "total.")]
    assert [one["y"] for one in traces["drifts"] if one["type"] == "bar"] == [[one.value] for one in whole]
    ends = [one["error_y"] for one in traces["drifts"] if "error_y" in one]
    for one, end in zip(whole, ends, strict=True):
        assert one.value - end["arrayminus"][0] == pytest.approx(one.interval[0], rel=1e-12)
        assert one.value + end["array"][0] == pytest.approx(one.interval[1], rel=1e-12)
    assert traces["histogram"][0]["y"] == [many for *_, many, _ in charts.log_ratios]
    (_, _, median, p90, p99, *_), counts = zip(*charts.noise, strict=True), charts.density[1]
    assert [tuple(one["y"]) for one in traces["noise"][:3]] == [p99, p90, median]
    cells = [0 if z is None else round(10**z) for row in traces["density"][0]["z"] for z in row]
    assert cells == [row[i] for i in range(len(counts)) for row in counts]
    tails = [charts.tails[over] for over in ("tokens", "sequences")]
    fits = [line for one in tails for line in [*zip(*one.points, strict=True)][1:]]
    assert [tuple(one["y"]) for one in traces["tail"]] == fits
    assert traces["length"][0]["y"] == [one.ess_sequences.value for one in summary.lengths.curve]
    _, ess, truncated, kept = zip(*charts.token_thresholds, strict=True)
    assert [tuple(one["y"]) for one in traces["thresholds"]] == [ess, kept, truncated]
    for trace, axis in zip(traces["position"], ("position", "turn"), strict=True):
        assert trace["y"] == [one.numbers["k3"].value for one in summary.at(axis)][: len(trace["y"])]
    lags = zip(traces["by_lag"][0]["x"], charts.steps.series["policy_lag"], strict=True)
    assert all(abs(x - lag.value) <= 0.15 for x, lag in lags)
    assert traces["by_lag"][0]["y"] == [one.value for one in charts.steps.series["k3"]]


def test_no_chart_of_thresholds_is_drawn_beside_a_bug():
    summary = result("healthy")
    bug = summary.diagnosis.model_copy(update={"verdict": "bug"})
    changed = summary.model_copy(update={"diagnosis": bug})
    assert set(result("healthy").figures) - set(changed.figures) == {"thresholds"}


def numbers(*values, **more):
    return [Number(value=y, interval=None if y is None else (y / 2, y * 2), **more) for y in values]


def test_a_band_breaks_where_a_point_is_unknown():
    band, line = curve((range(5), numbers(1, 2, None, 4, 5), "", BLUE))
    assert band["x"] == [0, 1, 1, 0, None, 3, 4, 4, 3, None]
    assert band["y"] == [2, 4, 1, 0.5, None, 8, 10, 2.5, 2, None]
    assert line["text"][0] == "0: 1.0 [0.50, 2.0]"


def test_a_log_axis_holds_all_values_and_no_interval_that_reaches_towards_0_stretches_it():
    wide = [Number(value=1.0, interval=(1e-9, 2.0)), Number(value=20.0, interval=(10.0, 30.0))]
    panel = k3_panel("step", [([0, 1], wide, "", BLUE)])
    low, high = (10**end for end in panel.y["range"])
    assert 0.1 < low < 1 < 30 < high < 50
    assert min(y for y in panel.traces[0]["y"] if y is not None) >= low


def test_the_bands_of_k3_are_named_within_the_axis_and_away_from_the_line():
    panel = k3_panel("step", [([0, 1], [Number(value=0.0005), Number(value=0.5)], "", BLUE)])
    named = {one["label"]["text"]: one for one in panel.shapes}
    assert [*named] == [one.name for one in BANDS["k3"]]
    assert (named["typical"]["y1"], named["severe"]["y0"]) == (0.001, 0.1)
    sides = [named[one]["label"]["textposition"] for one in ("severe", "typical")]
    assert sides == ["top left", "top right"]


def test_panels_have_axes_and_shapes_of_their_own():
    panel = Panel("x", "y", curve(([0, 1], numbers(1, 2), "", BLUE)), shapes=[upright(1.0)])
    found = chart("a", "A title", panel, panel)
    assert [one["yaxis"] for one in found.data] == ["y", "y", "y2", "y2"]
    assert [(one["xref"], one["yref"]) for one in found.layout["shapes"]][1:] == [("x2", "y2 domain")]


@pytest.mark.parametrize("name", ["light", "dark"])
def test_lines_and_texts_stand_out_on_the_light_and_on_the_dark_page(name):
    found = plot.look(name)["layout"]

    def luminance(colour):
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(colour):
        low, high = sorted(map(luminance, (colour, found["paper_bgcolor"])))
        return (high + 0.05) / (low + 0.05)

    assert min(map(contrast, plot.COLOURS)) >= 3
    assert min(contrast(one) for one in (found["font"]["color"], found["xaxis"]["tickfont"]["color"])) >= 4.5


def test_hostile_names_are_escaped_in_every_text_of_a_figure():
    lines = curve(([EVIL, f"{EVIL}2"], numbers(1, 2), EVIL, BLUE), where=[EVIL, EVIL])
    panel = Panel(EVIL, EVIL, lines, LABELS, {}, [upright(0.5, EVIL)])
    drawn = json.loads(chart("a", EVIL, panel).figure().to_json())
    del drawn["layout"]["template"]
    text = json.dumps(drawn)
    assert text.count("href") > 10
    assert [sign for sign in ("<a", "<b>%", "%{x}", "$x") if sign in text] == []
    assert plot.escaped("5% of a_b") == "5% of a_b"


ODD = {
    "no point": ([], []),
    "one point": ([3], numbers(0.2)),
    "nothing known": ([0, 1], numbers(None, None)),
    "huge": ([0, 1, 2], [Number(1e308), Number(1.0, (0.0, 1e308)), Number(-1e308)]),
    "tiny": ([0, 1], [Number(value=1e-310), Number(value=5e-324)]),
    "zero and negative": ([-1, 0, 1], [Number(value=y, interval=(y - 1, y + 1)) for y in (-1.0, 0.0, 1.0)]),
    "10,000 steps": (range(10_000), [Number(value=1 + i % 7) for i in range(10_000)]),
}


@pytest.mark.parametrize("mode", [{}, {"mode": "markers"}])
@pytest.mark.parametrize("name", ODD)
def test_odd_series_give_figures_that_plotly_takes(name, mode):
    x, y = ODD[name]
    points = (x, y, "", BLUE)
    found = chart("a", "title", k3_panel("x", [points], **mode), Panel("x", "y", curve(points, **mode)))
    json.loads(found.figure().to_json(), parse_constant=pytest.fail)
    known = [y for trace in found.data for y in trace["y"] if y is not None]
    assert all(math.isfinite(y) and abs(y) < 1e308 for y in known)


def test_an_unknown_figure_is_named_with_what_there_is():
    for found, hint in (
        (result("collapse"), "did you mean by_step"),
        (make_summary(charts={}).model_copy(update={"axes": {}}), "there are none"),
    ):
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
