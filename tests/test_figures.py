"""The charts: valid for plotly, with the result's own numbers, and harmless whatever names a dump has."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from factory import make_summary

import offpol_diag
from offpol_diag.errors import UsageError
from offpol_diag.metrics import BANDS
from offpol_diag.number import Number
from offpol_diag.report.plot import (
    BLUE,
    COLOURS,
    LABELS,
    Panel,
    chart,
    curve,
    escaped,
    k3_panel,
    level,
    logit,
    look,
    upright,
)
from offpol_diag.result import curve as by_step

SAMPLES = Path(__file__).parents[1] / "sample_data"
FEW = {"presets": "token_is,seq_mis,geo_rs", "device": "cpu"}
EVIL = '<a href="javascript:alert(1)">a</a><b>%{x}</b> $x^2$ &amp; \x1b"'
TEN = {"by_step", "by_lag", "drifts", "histogram", "noise", "density", "tail", "position", "length"}
TEN |= {"thresholds"}


def sample(name):
    return SAMPLES / f"{name}.parquet"


RESULTS = {
    **{
        name: lambda name=name: offpol_diag.analyze(sample(name), **FEW)
        for name in ("collapse", "healthy", "quantized", "stale")
    },
    "runs": lambda: offpol_diag.compare(sample("stale"), sample("quantized"), device="cpu"),
}
CHARTS = {
    "collapse": TEN,
    "runs": ("runs_by_step",),
}
made: dict[str, offpol_diag.Result] = {}


def result(name):
    if name not in made:
        made[name] = RESULTS[name]()
    return made[name]


def drawn(name, figure):
    """Return the traces of a figure as JSON gives them, without bands."""
    found = json.loads(result(name).figure(figure).to_json())
    return [one for one in found["data"] if "fill" not in one], found["layout"]


# ---------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("name", RESULTS)
def test_plotly_takes_every_figure_and_its_title_is_a_finding(name):
    report = result(name)
    assert len(report.figures) == len(set(report.figures))
    assert set(CHARTS.get(name, ())) <= set(report.figures) <= {*TEN, "where", *CHARTS.get(name, ())}
    for one in report.figures:
        found = report.figure(one)  # plotly checks every name and value
        json.loads(found.to_json(), parse_constant=pytest.fail)
        assert len(found.layout.title.text) > 20
        assert found.layout.template.layout.font.color == "#15181e"


@pytest.mark.parametrize("name", ["collapse", "stale", "healthy"])
def test_curves_by_step_are_the_numbers_of_the_result_with_their_intervals(name):
    traces, layout = drawn(name, "by_step")
    summary = result(name)
    assert [layout[f"yaxis{end}"]["title"]["text"].split()[0] for end in ("", 2, 3)] == ["K3", "ESS", "mean"]
    for trace, metric in zip(traces, ("k3", "ess_tokens", "reward"), strict=True):
        points = by_step(summary, metric)
        assert trace["y"] == [one.value for one in points]
        assert [*map(str, trace["x"])] == [one.step for one in points]
    bands = json.loads(result(name).figure("by_step").to_json())["data"]
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
    early, late, turns = traces["position"]
    assert (early["name"], late["name"]) == ("steps 0–3", "steps 4–8")
    assert late["y"] == [one.value for one in charts.positions[-1].k3][: len(late["y"])]
    assert turns["y"] == [one.numbers["k3"].value for one in summary.at("turn")]
    lags = zip(traces["by_lag"][0]["x"], charts.steps.series["policy_lag"], strict=True)
    assert all(abs(x - lag.value) <= 0.15 for x, lag in lags)
    assert traces["by_lag"][0]["y"] == [one.value for one in charts.steps.series["k3"]]


def test_no_chart_of_thresholds_is_drawn_beside_a_bug():
    summary = result("healthy")
    bug = summary.diagnosis.model_copy(update={"verdict": "bug"})
    changed = summary.model_copy(update={"diagnosis": bug})
    assert set(result("healthy").figures) - set(changed.figures) == {"thresholds"}


# ---------------------------------------------------------------- how it is drawn


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
    assert named["severe"]["label"]["textposition"] == "top left"
    assert named["typical"]["label"]["textposition"] == "top right"


def test_panels_lie_side_by_side_on_axes_of_their_own():
    line = curve(([0, 1], numbers(1, 2), "", BLUE))
    found = chart(
        "a", "A title", Panel("x", "y", line), Panel("x", "y", line, shapes=[level(1.0), upright(1.0)])
    )
    assert (found.panels, found.layout["grid"]["columns"]) == (2, 2)
    assert [(one["xaxis"], one["yaxis"]) for one in found.data] == [("x", "y")] * 2 + [("x2", "y2")] * 2
    assert [(one["xref"], one["yref"]) for one in found.layout["shapes"]] == [
        ("x2 domain", "y2"),
        ("x2", "y2 domain"),
    ]


def luminance(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("name", ["light", "dark"])
def test_lines_and_texts_stand_out_on_the_light_and_on_the_dark_page(name):
    found = look(name)["layout"]
    ground = luminance(found["paper_bgcolor"])

    def contrast(colour):
        low, high = sorted((luminance(colour), ground))
        return (high + 0.05) / (low + 0.05)

    assert min(map(contrast, COLOURS)) >= 3
    assert min(contrast(one) for one in (found["font"]["color"], found["xaxis"]["tickfont"]["color"])) >= 4.5


# ---------------------------------------------------------------- hostile names, odd numbers


def texts(value, key=""):
    """Yield every text of a figure but for templates and fonts."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name not in ("template", "family"):
                yield from texts(one, name)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts(one, key)
    elif isinstance(value, str):
        yield value.replace("%{text}<extra>", "").replace("</extra>", "") if key == "hovertemplate" else value


def test_hostile_names_are_escaped_in_every_text_of_a_figure():
    lines = curve(([EVIL, f"{EVIL}2"], numbers(1, 2), EVIL, BLUE), where=[EVIL, EVIL])
    panel = Panel(EVIL, EVIL, lines, LABELS, {}, [level(1.0, EVIL), upright(0.5, EVIL)])
    found = [*texts(json.loads(chart("a", EVIL, panel).figure().to_json()))]
    assert sum("href" in text for text in found) > 10
    for text in found:
        bare = text.replace("<b>", "").replace("</b>", "").replace("<br>", "")
        assert not any(sign in bare for sign in ("<", ">", "%{", "$")), text
    assert escaped("5% of a_b") == "5% of a_b"


ODD = {
    "no point": ([], []),
    "one point": ([3], numbers(0.2)),
    "nothing known": ([0, 1], numbers(None, None)),
    "huge": (
        [0, 1, 2],
        [Number(value=1e308), Number(value=1.0, interval=(0.0, 1e308)), Number(value=-1e308)],
    ),
    "tiny": ([0, 1], [Number(value=1e-310), Number(value=5e-324)]),
    "zero and negative": ([-1, 0, 1], [Number(value=y, interval=(y - 1, y + 1)) for y in (-1.0, 0.0, 1.0)]),
    "10,000 steps": (range(10_000), [Number(value=1 + i % 7) for i in range(10_000)]),
}


@pytest.mark.parametrize("mode", [{}, {"mode": "markers"}])
@pytest.mark.parametrize("name", ODD)
def test_odd_series_give_figures_that_plotly_takes(name, mode):
    x, y = ODD[name]
    found = chart(
        "a",
        "title",
        k3_panel("x", [(x, y, "", BLUE)], **mode),
        Panel("x", "y", curve((x, y, "", BLUE), **mode)),
    )
    json.loads(found.figure().to_json(), parse_constant=pytest.fail)
    known = [y for trace in found.data for y in trace["y"] if y is not None]
    assert all(math.isfinite(y) and abs(y) < 1e308 for y in known)


@pytest.mark.parametrize(("p", "place"), [(0.5, 0.0), (0.0, -7.0), (1.0, 7.0), (0.9, 0.9542425)])
def test_a_probability_has_its_place_by_its_odds(p, place):
    assert logit(p) == pytest.approx(place, abs=1e-6)


# ---------------------------------------------------------------- in Python


@pytest.mark.parametrize(
    ("name", "hint"), [("by_stp", "did you mean by_step"), ("zzz", "there are by_step,")]
)
def test_an_unknown_figure_is_named_with_what_there_is(name, hint):
    with pytest.raises(UsageError) as refused:
        result("collapse").figure(name)
    assert f'the result has no figure "{name}"' in refused.value.message
    assert hint in refused.value.hint


def test_a_result_without_charts_has_no_figures():
    empty = make_summary(by={}, charts={}, gates=[])
    assert empty.figures == {}
    with pytest.raises(UsageError, match='no figure "by_step"') as refused:
        empty.figure("by_step")
    assert "there are none" in refused.value.hint


def test_no_command_imports_plotly_or_polars(tmp_path):
    """Plotly's objects take 0.3 s to import, and polars is for frames."""
    healthy = str(sample("healthy"))
    commands = [
        ["gate", healthy, "--max", "step:k3=0.1", "-q"],
        ["analyze", healthy, "--presets", "token_is", "-q", "-o", str(tmp_path / "a.html")],
    ]
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom offpol_diag.cli import app\n"
        f"for command in {commands!r}:\n"
        "    found = CliRunner().invoke(app, command)\n    assert found.exit_code == 0, found.output\n"
        "assert not {'plotly', 'narwhals', 'polars'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
