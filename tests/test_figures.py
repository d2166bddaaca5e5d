"""Figures of plotly: the same numbers as the static charts, whatever the names and numbers are."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from factory import make_summary

import offpol_diag
from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.report.figures import MARKUP, drawn, escaped, palette, parts, pictures, quantity, said
from offpol_diag.report.picture import COLOURS, Heat, Layer, Panel, Picture, Tint, shade, x_axis, y_axis

SAMPLES = Path(__file__).parents[1] / "sample_data"
FEW = {"presets": "token_is,seq_mis,geo_rs", "device": "cpu"}
EVIL = '<a href="javascript:alert(1)">a</a><b>%{x}</b> $x^2$ &amp; \x1b"'


def sample(name):
    return SAMPLES / f"{name}.parquet"


RESULTS = {
    **{name: lambda name=name: offpol_diag.analyze(sample(name), **FEW) for name in ("collapse", "healthy")},
    **{name: lambda name=name: offpol_diag.analyze(sample(name), **FEW) for name in ("quantized", "stale")},
    "presets": lambda: offpol_diag.compare(sample("collapse"), **FEW),
    "runs": lambda: offpol_diag.compare(sample("stale"), sample("quantized"), device="cpu"),
    "sweep": lambda: offpol_diag.sweep(sample("collapse"), "geo_rs", keep=0.5, device="cpu"),
    "gate": lambda: offpol_diag.gate(
        sample("collapse"), max={"k3": 0.015, "step:k3": 0.1}, min={"ess_tokens": 0.5}, device="cpu"
    ),
}
made: dict[str, offpol_diag.Report] = {}


def result(name):
    if name not in made:
        made[name] = RESULTS[name]()
    return made[name]


def known(value):
    return value is not None and math.isfinite(value)


def same(panel, layer, trace):
    """Compare a trace with its layer: places, values, intervals, what bars stand on, hollow points."""
    x, y = x_axis(panel), y_axis(panel)
    native = x.scale in ("linear", "log")
    assert trace["x"] == ([*map(float, layer.x)] if native else [x.at(at) for at in layer.x])
    placed = [
        value if known(value) and x.at(at) is not None else None
        for at, value in zip(layer.x, layer.y, strict=True)
    ]
    assert trace["y"] == (placed if y.scale in ("linear", "log") else [y.at(value) for value in placed])
    assert trace.get("base", []) == [*layer.base]
    if trace["type"] == "scatter" and any(layer.hollow):
        assert [width == 2 for width in trace["marker"]["line"]["width"]] == [*layer.hollow]
    if "error_y" in trace:
        ends = zip(trace["y"], trace["error_y"]["arrayminus"], trace["error_y"]["array"], strict=True)
        for (value, down, up), low, high in zip(ends, layer.low, layer.high, strict=True):
            if known(low) and known(high) and known(value):
                assert (value - down, value + up) == pytest.approx((low, high), rel=1e-12, abs=1e-300)


def compare(picture):
    data, layout = parts(picture)
    for place, panel in enumerate(picture.panels):
        end = "" if place == 0 else place + 1
        traces = [one for one in data if one["xaxis"] == f"x{end}" and "fill" not in one]
        if panel.heat:
            heat, most = traces.pop(0), max(map(max, panel.heat.counts))
            assert heat["z"] == [
                [shade(row[i], most) if row[i] else None for row in panel.heat.counts]
                for i in range(len(panel.heat.counts))
            ]
        for layer, trace in zip(panel.layers, traces, strict=True):
            same(panel, layer, trace)
        if panel.names:
            names = [escaped(name) for name in panel.names]
            assert layout[f"xaxis{end}"]["ticktext"] == names[:: -(-len(names) // 40)]
        assert layout[f"yaxis{end}"]["range"] == [y_axis(panel).low, y_axis(panel).high]


@pytest.mark.parametrize("name", RESULTS)
def test_the_numbers_of_every_figure_are_those_of_its_picture(name):
    charts = pictures(result(name).summary)
    assert charts
    for picture in charts.values():
        compare(picture)


def test_bands_have_the_ends_of_intervals_and_break_where_a_point_is_unreliable_or_unknown():
    low, high = [1, 1, None, 1, 1, 1], [3, 3, 3, 3, 3, 3]
    layer = Layer("", range(6), [2] * 6, "blue", low=low, high=high, hollow=[False] * 5 + [True])
    bands = [one for one in parts(drawing(layer))[0] if one.get("fill")]
    assert [one["x"] for one in bands] == [[0, 1, 1, 0], [3, 4, 4, 3]]
    assert [one["y"] for one in bands] == [[3, 3, 1, 1]] * 2


def drawing(*layers, **facts):
    return Picture("a", "", "Title", "sub", (Panel("x", "y", layers, **facts),))


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("title", "name", "unit"),
    [
        ("K3 KL, nats per token (log)", "K3", "nats"),
        ("training step", "step", ""),
        ("Δ = log π_train − log π_rollout, nats", "Δ", "nats"),
        ("ESS of raw token ratios (hollow: k̂ > 0.7)", "ESS of raw token ratios", ""),
        ("response length, tokens (log)", "response length", "tokens"),
        ("density, 1/nats (log)", "density", "1/nats"),
    ],
)
def test_the_title_of_an_axis_holds_its_name_and_unit(title, name, unit):
    assert quantity(title) == (name, unit)


def test_a_point_says_its_place_and_value_with_names_units_and_interval():
    layer = Layer("", [7, 8], [0.5, 0.011], "blue", low=[None, 0.0032], high=[None, 0.035])
    panel = Panel("training step", "K3 KL, nats per token (log)", (layer,), y_scale="log")
    assert said(panel, layer, 1) == "step 8, K3 0.011 nats [0.0032, 0.035]"
    assert said(panel, layer, 0) == "step 7, K3 0.50 nats"


def test_a_point_says_its_series_that_it_is_unreliable_and_minus_with_a_minus_sign():
    layer = Layer("lag 0", [-3], [-0.25], "blue", hollow=[True])
    panel = Panel("Δ, nats", "mean reward", (layer,))
    assert said(panel, layer, 0) == "lag 0: Δ −3 nats, mean reward −0.25, unreliable: k̂ above 0.7"


# ---------------------------------------------------------------- hostile names, odd numbers


def texts(value, key=""):
    """Yield every text of a figure but for templates, fonts and data that are not drawn."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name not in ("hovertemplate", "template", "family"):
                yield from texts(one, name)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts(one, key)
    elif isinstance(value, str):
        yield value


def hostile():
    lines = (
        Layer(EVIL, [0, 1], [1, 2], "blue", low=[0.5, 1], high=[2, 3]),
        Layer(f"{EVIL}2", [0, 1], [2, 2], "teal", "points"),
    )
    facts = {"names": (EVIL, f"{EVIL}2"), "tints": (Tint(1, 3, "bad", EVIL),), "levels": ((1.5, EVIL),)}
    named = Panel(EVIL, EVIL, lines, uprights=((0.5, EVIL),), **facts)
    heat = Heat([0.1, 0.5, 0.9], [[1, 2], [0, 4]], (0.5, 0.9, 0.1, 0.5), EVIL)
    dense = Panel(f"{EVIL} (logit)", EVIL, x_scale="logit", y_scale="logit", heat=heat)
    return Picture(EVIL, EVIL, EVIL, EVIL, (named, dense))


def test_hostile_names_are_escaped_in_every_text_of_a_figure():
    own = re.compile(r'</?b>|<br>|<span style="font-size:12px">|</span>')
    found = [*texts(json.loads(drawn(hostile()).to_json()))]
    assert sum("href" in text for text in found) > 10
    for text in found:
        bare = own.sub("", text)
        assert not any(sign in bare for sign in ("<", ">", "%{", "$", "\x1b")), text


def test_what_is_escaped_can_be_read_again():
    text = escaped("a<b>%{x}$ &amp; 5% 100%")
    for sign, code in [*MARKUP.items()][::-1]:
        text = text.replace(code, sign)
    assert text == "a<b>%{x}$ &amp; 5% 100%"


ODD = {
    "nothing": (),
    "no point": (Layer("a", [], [], "blue"),),
    "one point": (Layer("", [3], [0.2], "blue", low=[0.1], high=[0.3]),),
    "NaN throughout": (
        Layer("", [0, 1, 2], [math.nan] * 3, "blue", low=[math.nan] * 3, high=[math.nan] * 3),
    ),
    "nothing known": (Layer("", [0, 1], [None, None], "blue", "points", low=[None, None], high=[1, 2]),),
    "infinite": (Layer("", [0, 1, 2], [math.inf, 1, -math.inf], "blue", low=[0, 0, 0], high=[math.inf] * 3),),
    "huge": (Layer("", [0, 1, 2], [1e308, 1, -1e308], "blue"), Layer("b", [1e305], [1], "teal", "bars")),
    "tiny": (Layer("", [1e-305, 1, 2], [1e-310, 1e-320, 1], "blue"),),
    "zero and negative": (Layer("", [-1, 0, 1], [-1, 0, 1], "blue", low=[-2, -1, 0], high=[0, 1, 2]),),
    "10,000 steps": (Layer("", range(10_000), [1 + i % 7 for i in range(10_000)], "blue"),),
}


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("name", ODD)
def test_odd_series_give_figures_that_plotly_takes(name, scale):
    picture = drawing(*ODD[name], x_scale=scale, y_scale=scale, tints=(Tint(0.1, None, "bad", "bad"),))
    drawn(picture).to_json()  # plotly checks every name and value


def test_values_off_the_scale_have_no_place_and_leave_the_others_in_theirs():
    layer = Layer("", [0.5, 1.0, 0.2], [1e301, 2, 3], "blue")
    ((trace,), _) = parts(drawing(layer, x_scale="logit", y_scale="log"))
    assert trace["x"] == [0.0, None, pytest.approx(math.log10(0.25))]
    assert trace["y"] == [None, None, 3]


# ---------------------------------------------------------------- looks


def test_a_figure_has_the_colours_of_the_page_in_light():
    css = Path("templates/report.css").read_text().split(":root {", 1)[1]
    for i, _ in enumerate(COLOURS):
        assert palette()[f"c{i}"] == re.search(rf"--c{i}:([^;]+);", css)[1]
    line = drawn(drawing(Layer("", [0, 1], [1, 2], "teal", dashed=True))).data[0].line
    assert (line.color, line.dash) == (palette()["c4"], "2px,4px")


def test_layers_of_one_name_are_one_in_the_legend_and_a_fit_goes_with_its_points():
    layers = (
        Layer("tokens", [1, 2], [1, 2], "teal", "points"),
        Layer("", [1, 2], [1, 2], "teal", dashed=True, named=False),
        Layer("sequences", [1, 2], [1, 2], "purple", "points"),
    )
    traces, _ = parts(drawing(*layers))
    assert [one["legendgroup"] for one in traces] == ["tokens", "tokens", "sequences"]
    assert [one["showlegend"] for one in traces] == [True, False, True]


def test_panels_of_one_axis_move_together():
    panels = [Panel("step", name, (Layer("", [0, 1], [1, 2], "blue"),)) for name in "ab"]
    picture = Picture("a", "", "", "", panels)
    assert parts(picture)[1]["xaxis2"]["matches"] == "x"
    other = replace(panels[1], layers=(Layer("", [0, 9], [1, 2], "blue"),))
    assert "matches" not in parts(replace(picture, panels=[panels[0], other]))[1]["xaxis2"]


# ---------------------------------------------------------------- in Python


def test_a_report_has_its_charts_by_name_with_the_finding_as_title():
    report = result("collapse")
    assert {"by_step", "histogram", "density", "tail", "by_lag"} <= set(report.figures)
    assert len(report.figures) == len(set(report.figures)) > 10
    found = report.figure("by_step")
    assert type(found).__name__ == "Figure"
    assert "K3 passes 0.1 at step 4" in found.layout.title.text


@pytest.mark.parametrize(
    ("name", "hint"), [("by_stp", "did you mean by_step"), ("zzz", "there are by_step,")]
)
def test_an_unknown_figure_is_named_with_what_there_is(name, hint):
    with pytest.raises(UsageError) as refused:
        result("collapse").figure(name)
    assert f'unknown figure "{name}"' in refused.value.message
    assert hint in refused.value.hint


def test_a_result_without_charts_has_no_figures():
    empty = offpol_diag.Report(make_summary(by={}, histograms={}, charts={}, gates=[]))
    assert empty.figures == ()
    with pytest.raises(UsageError, match='unknown figure "by_step"') as refused:
        empty.figure("by_step")
    assert "no charts" in refused.value.hint


def test_a_figure_is_written_to_a_file(tmp_path):
    path = tmp_path / "a.html"
    result("collapse").figure("drifts").write_html(path, include_plotlyjs="cdn")
    assert "61% of the gap" in path.read_text()


def test_without_the_package_a_figure_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(OffpolError, match="plotly") as refused:
        result("healthy").figure("by_step")
    assert "[cli]" in refused.value.hint


def test_no_command_imports_plotly_or_polars(tmp_path):
    """Plotly's objects take 0.3 s to import, and polars is for frames."""
    healthy = str(sample("healthy"))
    commands = [
        ["doctor", healthy, "-q"],
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
