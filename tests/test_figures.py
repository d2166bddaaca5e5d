"""Figures of plotly: the same numbers as the static charts, whatever the names and numbers are."""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import math
import re
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest
from factory import make_summary
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.check import Checked
from offpol_diag.cli import app
from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.report import check, figures
from offpol_diag.report.explore import drawn
from offpol_diag.report.figures import MARKUP, PAGE, escaped, figure, joined, palette, quantity, said
from offpol_diag.report.page import page as render_html
from offpol_diag.report.picture import COLOURS, Heat, Layer, Panel, Picture, Tint, x_axis, y_axis
from tests.drawn import explored

SAMPLES = Path(__file__).parents[1] / "sample_data"
FEW = {"presets": "token_is,seq_mis,geo_rs", "device": "cpu"}
EVIL = '<a href="javascript:alert(1)">a</a><b>%{x}</b> $x^2$ var(--c1) &amp; \x1b"'


def sample(name):
    return SAMPLES / f"{name}.parquet"


def checked(folder):
    rows = [{"step": step, "rollout_corr/kl": 1.0 + step} for step in range(9)]
    logged = folder / "logged.jsonl"
    logged.write_text("\n".join(map(json.dumps, rows)))
    return offpol_diag.check(sample("collapse"), logged, trainer="verl")


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
    raw = trace["meta"]
    if panel.names:
        assert raw["x"] == [escaped(panel.names[int(at)]) for at in layer.x]
    native = x.scale in ("linear", "log")
    assert [None if native or at is None else raw["x"][i] for i, at in enumerate(trace["x"])] == [
        None if native or x.at(at) is None else at for at in layer.x
    ]
    assert trace["x"] == ([*map(float, layer.x)] if native else [x.at(at) for at in layer.x])
    placed = [
        value if known(value) and x.at(at) is not None else None
        for at, value in zip(layer.x, layer.y, strict=True)
    ]
    assert trace["y"] == (placed if y.scale in ("linear", "log") else [y.at(value) for value in placed])
    for end in ("low", "high"):
        assert raw.get(end, []) == [value if known(value) else None for value in getattr(layer, end)]
    assert trace.get("base", []) == [*layer.base]
    if trace["type"] == "scatter" and any(layer.hollow):
        assert [width == 2 for width in trace["marker"]["line"]["width"]] == [*layer.hollow]
    if "error_y" in trace:
        ends = zip(trace["y"], trace["error_y"]["arrayminus"], trace["error_y"]["array"], strict=True)
        for (value, down, up), low, high in zip(ends, layer.low, layer.high, strict=True):
            if known(low) and known(high) and known(value):
                assert (value - down, value + up) == pytest.approx((low, high), rel=1e-12, abs=1e-300)


def compare(picture):
    found = figure(picture)
    traces = {(one["meta"]["panel"], one["meta"].get("layer")): one for one in found["data"] if "meta" in one}
    assert len(traces) == sum(len(panel.layers) + (panel.heat is not None) for panel in picture.panels)
    for place, panel in enumerate(picture.panels):
        for at, layer in enumerate(panel.layers):
            same(panel, layer, traces[place, at])
        if panel.heat:
            raw = traces[place, None]["meta"]
            assert raw["edges"] == [*panel.heat.edges]
            assert raw["counts"] == [[*row] for row in panel.heat.counts]
        end = "" if place == 0 else place + 1
        assert found["layout"][f"yaxis{end}"]["range"] == [y_axis(panel).low, y_axis(panel).high]
    return found


@pytest.mark.parametrize("name", RESULTS)
def test_the_numbers_of_every_figure_are_those_of_its_picture(name):
    charts = explored(result(name).summary)
    assert charts
    for some in charts.values():
        for picture in some.values():
            compare(picture)


def test_the_numbers_of_a_figure_of_check_are_those_of_its_picture(tmp_path):
    found = checked(tmp_path)
    assert isinstance(found, Checked)
    (picture,) = check.answer(found).charts
    compare(picture)


def test_bands_have_the_ends_of_intervals_and_break_where_a_point_is_unreliable_or_unknown():
    low, high = [1, 1, None, 1, 1, 1], [3, 3, 3, 3, 3, 3]
    layer = Layer("", range(6), [2] * 6, "blue", low=low, high=high, hollow=[False] * 5 + [True])
    bands = [one for one in figure(drawing(layer))["data"] if one.get("fill")]
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
    elif isinstance(value, str) and not value.startswith("var(--"):
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
    found = [*texts(figure(hostile())), *texts(json.loads(joined(hostile(), palette()).to_json()))]
    assert sum("href" in text for text in found) > 20
    for text in found:
        bare = own.sub("", text)
        assert not any(sign in bare for sign in ("<", ">", "%{", "$", "var(", "\x1b")), text


def test_what_is_escaped_can_be_read_again():
    text = escaped("a<b>%{x}$ &amp; var(--c1) 5% 100%")
    for sign, code in [*MARKUP.items()][::-1]:
        text = text.replace(code, sign)
    assert text == "a<b>%{x}$ &amp; var(--c1) 5% 100%"


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
    json.dumps(figure(picture), allow_nan=False)  # a page's JSON knows no NaN
    joined(picture, palette()).to_json()  # and plotly checks every name and value


def test_values_off_the_scale_have_no_place_and_leave_the_others_in_theirs():
    layer = Layer("", [0.5, 1.0, 0.2], [1e301, 2, 3], "blue")
    (trace,) = figure(drawing(layer, x_scale="logit", y_scale="log"))["data"]
    assert trace["x"] == [0.0, None, pytest.approx(math.log10(0.25))]
    assert trace["y"] == [None, None, 3]


# ---------------------------------------------------------------- looks


def test_a_figure_has_the_colours_of_its_theme_and_a_page_their_names():
    css = Path("templates/report.css").read_text()
    for theme, start in (("light", ":root {"), ("dark", ":root[data-theme=dark] {")):
        body = css.split(start, 1)[1]
        for i, _ in enumerate(COLOURS):
            assert palette(theme)[f"c{i}"] == re.search(rf"--c{i}:([^;]+);", body)[1]
    layer = Layer("", [0, 1], [1, 2], "teal", dashed=True)
    assert figure(drawing(layer), PAGE)["data"][0]["line"]["color"] == "var(--c4)"
    assert joined(drawing(layer), palette("dark")).data[0].line.color == "#3cc0ae"
    assert joined(drawing(layer), palette()).data[0].line.dash == "2px,4px"


def test_a_figure_can_be_drawn_on_a_log_and_a_linear_axis_where_values_allow_it():
    log = figure(drawing(Layer("", [0, 1], [0.1, 9], "blue"), y_scale="log"))["layout"]["meta"]["panels"][0][
        "y"
    ]
    assert [*log["scales"]] == ["log", "linear"]
    assert log["scales"]["linear"]["axis"]["range"][1] > 9
    rising = figure(drawing(Layer("", [0, 1], [0.1, 9], "blue")))["layout"]["meta"]["panels"][0]["y"]
    assert [*rising["scales"]] == ["linear", "log"]
    signed = figure(drawing(Layer("", [0, 1], [-0.1, 9], "blue")))["layout"]["meta"]["panels"][0]["y"]
    assert signed["scales"] == {}


def test_layers_of_one_name_are_one_in_the_legend_and_a_fit_goes_with_its_points():
    layers = (
        Layer("tokens", [1, 2], [1, 2], "teal", "points"),
        Layer("", [1, 2], [1, 2], "teal", dashed=True, named=False),
        Layer("sequences", [1, 2], [1, 2], "purple", "points"),
    )
    traces = figure(drawing(*layers))["data"]
    assert [one["legendgroup"] for one in traces] == ["tokens", "tokens", "sequences"]
    assert [one["showlegend"] for one in traces] == [True, False, True]


def test_panels_of_one_axis_move_together():
    panels = [Panel("step", name, (Layer("", [0, 1], [1, 2], "blue"),)) for name in "ab"]
    picture = Picture("a", "", "", "", panels)
    assert figure(picture)["layout"]["xaxis2"]["matches"] == "x"
    other = replace(panels[1], layers=(Layer("", [0, 9], [1, 2], "blue"),))
    assert "matches" not in figure(replace(picture, panels=[panels[0], other]))["layout"]["xaxis2"]


# ---------------------------------------------------------------- in Python


def test_a_report_has_its_charts_by_name_with_the_finding_as_title():
    report = result("collapse")
    assert {"by_step", "histogram", "density", "tail", "by_lag"} <= set(report.figures)
    assert len(report.figures) == len([*report.figures]) > 10
    found = report.figures["by_step"]
    assert type(found).__name__ == "Figure"
    assert "K3 passes 0.1 at step 4" in found.layout.title.text
    assert report.figures.get("no such") is None
    assert repr(report.figures).startswith("Figures(by_step, ")


def test_a_figure_can_be_of_each_pair_of_policies_that_has_the_numbers():
    report = result("collapse")
    series = report.summary.charts.steps.series
    for drift, prefix in (("rollout_old", ""), ("old_current", "drift2."), ("total", "total.")):
        found = report.figure("by_step", drift=drift)
        (line,) = (one for one in found.data if one.name == "K3" and not one.fill)
        assert [*line.y] == series[f"{prefix}k3"].values
    assert "rollout → current" in report.figure("tail", drift="total").layout.title.text
    assert report.figure("by_lag", drift="old_current").data
    assert report.figure("histogram", drift="total").layout.xaxis.title.text.startswith("Δ = log π_current")


@pytest.mark.parametrize(
    ("name", "facts", "message", "hint"),
    [
        ("by_stp", {}, 'unknown figure "by_stp"', "did you mean by_step?"),
        ("zzz", {}, 'unknown figure "zzz"', "there are by_step,"),
        ("by_step", {"drift": "totl"}, 'unknown drift "totl"', "did you mean total?"),
        ("noise", {"drift": "total"}, 'cannot be drawn of the drift "total"', "leave out"),
        ("by_step", {"theme": "blue"}, 'unknown theme "blue"', "light or dark"),
    ],
)
def test_an_unknown_figure_or_drift_is_named_with_what_there_is(name, facts, message, hint):
    with pytest.raises(UsageError) as refused:
        result("collapse").figure(name, **facts)
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_a_result_without_charts_has_no_figures():
    empty = offpol_diag.Report(make_summary(by={}, histograms={}, charts={}, gates=[]))
    assert [*empty.figures] == []
    assert 'id="plotly"' not in empty.to_html()


def test_a_figure_is_written_to_a_file(tmp_path):
    path = tmp_path / "a.html"
    result("collapse").figure("drifts").write_html(path, include_plotlyjs="cdn")
    assert "61% of the gap" in path.read_text()


# ---------------------------------------------------------------- the page


def carried(page, name):
    return gzip.decompress(b64decode(re.search(rf'id="{name}">([^<]*)<', page)[1])).decode()


def test_the_page_carries_the_packages_plotly_once_with_its_hash_and_the_figures():
    summary = result("collapse").summary
    page = render_html(summary)
    source = figures.library().read_text(encoding="utf-8")
    assert page.count('id="plotly"') == 1
    assert carried(page, "plotly") == source
    policy = re.search(r"script-src ([^;]*);", html.unescape(page))[1]
    hashed = b64decode(re.findall(r"'sha256-([^']*)'", policy)[-1])
    assert hashed == hashlib.sha256(source.encode()).digest()
    assert not {"blob:", "'unsafe-eval'", "'unsafe-inline'"} & set(policy.split())
    assert "connect-src" not in page
    charts = explored(summary)
    known = json.loads(carried(page, "figures"))["charts"]
    assert known == json.loads(json.dumps(json.loads(gzip.decompress(b64decode(drawn(charts))))["charts"]))
    names = set(re.findall(r'<button class="btn ex"[^>]* data-chart="([^"]*)"', page))
    assert names == set(charts)
    assert page.count('class="btn ex"') == page.count('<div class="panels"')


def test_a_page_without_explore_is_the_same_but_for_it():
    summary = result("healthy").summary
    bare, whole = render_html(summary, explore=False), render_html(summary)
    assert not {'class="btn ex"', 'id="plotly"', 'id="figures"', "DecompressionStream"} & set(bare.split(">"))
    assert 'id="plotly"' not in bare
    assert 'class="btn ex"' not in bare
    assert len(whole) - len(bare) > 1_900_000
    assert offpol_diag.Report(summary).to_html(explore=False) == bare
    assert bare.count("<svg") == whole.count("<svg")


COMMANDS = {
    "analyze": ["analyze", sample("healthy"), "--presets", "token_is"],
    "doctor": ["doctor", sample("healthy")],
    "compare": ["compare", sample("healthy"), "--presets", "token_is,seq_mis"],
    "sweep": ["sweep", sample("healthy"), "--preset", "geo_rs"],
    "gate": ["gate", sample("healthy"), "--max", "step:k3=0.1"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_leave_plotly_out_with_no_explore(name, tmp_path):
    page = tmp_path / "a.html"
    command = [*map(str, COMMANDS[name]), "--html", str(page), "-q"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert 'id="plotly"' in page.read_text()
    assert CliRunner().invoke(app, [*command, "--no-explore"]).exit_code == 0
    assert 'id="plotly"' not in page.read_text()


def test_report_and_check_leave_plotly_out_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result("healthy").to_json("a.json")
    rows = [{"step": step, "rollout_corr/kl": 1.0} for step in range(9)]
    Path("logged.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for command in (
        ["report", "a.json"],
        ["check", str(sample("healthy")), "--logged", "logged.jsonl"],
    ):
        for more in ([], ["--no-explore"]):
            CliRunner().invoke(app, [*command, "--out", "a.html", "-q", *more])
            assert ('id="plotly"' in Path("a.html").read_text()) == (not more), command
            Path("a.html").unlink()


def test_without_the_package_a_page_is_refused_before_any_work_and_made_without_explore(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    page = tmp_path / "a.html"
    command = ["analyze", str(sample("healthy")), "--presets", "token_is", "--html", str(page), "-q"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "plotly" in refused.output
    assert "--no-explore" in refused.output
    assert not page.exists()
    assert CliRunner().invoke(app, [*command, "--no-explore"]).exit_code == 0
    with pytest.raises(OffpolError, match="plotly"):
        figures.library()


def test_no_command_imports_plotly_or_polars(tmp_path):
    """Plotly's objects take 0.3 s to import: a page needs dicts alone. Polars is for tables."""
    commands = [[*map(str, COMMANDS[name]), "-q"] for name in ("doctor", "gate")]
    commands.append([*map(str, COMMANDS["analyze"]), "-q", "-o", str(tmp_path / "a.html")])
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom offpol_diag.cli import app\n"
        f"for command in {commands!r}:\n"
        "    found = CliRunner().invoke(app, command)\n    assert found.exit_code == 0, found.output\n"
        "assert not {'plotly', 'narwhals', 'polars'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert 'id="plotly"' in (tmp_path / "a.html").read_text()
