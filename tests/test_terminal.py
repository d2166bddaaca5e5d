"""The terminal renderer: what is drawn at which width, and what never reaches the terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.cells import cell_len
from rich.console import Console

from offpol_diag.blocks import Block, Figure, Section, Series, Table, Text, Verdict
from offpol_diag.report.render.figures import plotly_figure
from offpol_diag.report.render.terminal import PIPE_WIDTH, brief, make_console, render_terminal, sparkline
from offpol_diag.report.sections import sections
from offpol_diag.report.sections.comparison import comparison
from offpol_diag.summary import Location, Number, Place
from tests.factory import make_comparison, make_summary


def draw(*blocks: Block, width: int = 80, stack: bool = True, **console: object) -> str:
    return draw_sections(Section("s", "A section", blocks), width=width, stack=stack, **console)


def draw_sections(*given: Section, width: int = 80, stack: bool = True, **console: object) -> str:
    file = io.StringIO()
    settings = {"highlight": False, "emoji": False, "markup": False, "color_system": None, **console}
    render_terminal(given, Console(file=file, width=width, **settings), stack)
    return file.getvalue()


def wide_table(columns: int, rows: int = 3, **more: object) -> Table:
    header = ("preset", *(f"number_{i}" for i in range(columns)))
    cells = tuple(Number(value=0.5, interval=(0.4, 0.6)) for _ in range(columns))
    return Table("t", "A caption", header, tuple((f"row {i}", *cells) for i in range(rows)), **more)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    summary = make_summary(comparison=make_comparison())
    compared = comparison(summary)
    assert compared is not None
    drawn = draw_sections(*brief(sections(summary)), compared, width=width)

    long = [line for line in drawn.splitlines() if cell_len(line) > width]
    assert long == []


def test_the_diagnosis_comes_first_and_the_verdict_after_it() -> None:
    drawn = draw_sections(*brief(sections(make_summary()))).splitlines()

    assert drawn[2].startswith("• Honest mismatch: the two engines disagree")
    after = drawn.index("Verdict") + 1
    assert drawn[after].startswith("• token_is at upper 2: Use truncated token weights")


def test_a_section_without_a_title_begins_with_its_first_block() -> None:
    assert draw_sections(Section("s", "", (Text("First."),))).splitlines() == ["First."]


def test_a_summary_leaves_out_columns_from_the_right_and_names_them() -> None:
    drawn = draw(wide_table(12), width=80, stack=False)

    assert "number_0" in drawn.splitlines()[4]
    assert "Left out for want of width:" in drawn
    assert "number_11" in drawn.split("Left out")[1]


def test_elsewhere_columns_that_do_not_fit_go_below() -> None:
    drawn = draw(wide_table(12), width=80)

    headers = [line for line in drawn.splitlines() if line.startswith("preset")]
    assert len(headers) > 1
    assert all(f"number_{i} " in f"{' '.join(headers)} " for i in range(12))


def test_columns_of_context_go_first_where_there_is_no_room() -> None:
    narrow = draw(wide_table(6, context=("number_0",)), width=60, stack=False)
    roomy = draw(wide_table(6, context=("number_0",)), width=300, stack=False)

    assert "number_0" in roomy
    assert "number_1" in narrow.splitlines()[4]
    assert "number_0" in narrow.split("Left out for want of width:")[1]


def test_no_caution_is_printed_of_a_column_that_is_left_out() -> None:
    cells = (*(Number(value=0.5, note=f"caution {i}") for i in range(12)),)
    header = ("preset", *(f"number_{i}" for i in range(12)))
    drawn = draw(Table("t", "A caption", header, (("row", *cells),)), width=60, stack=False)

    assert "(1) caution 0" in drawn
    assert "caution 11" not in drawn


def test_many_numbers_lose_their_intervals_before_a_column_is_lost() -> None:
    narrow, wide = draw(wide_table(6), width=90), draw(wide_table(6), width=300)

    assert "[0.4, 0.6]" in wide
    assert "[0.4, 0.6]" not in narrow
    assert "the intervals" in narrow
    assert "number_5" in narrow


def test_few_numbers_keep_their_intervals_where_leaving_them_out_would_not_help() -> None:
    assert "[0.4, 0.6]" in draw(wide_table(2), width=25)
    assert "[0.4, 0.6]" not in draw(wide_table(2), width=40)


def test_a_wide_table_is_left_out_where_it_does_not_fit() -> None:
    table = wide_table(12, wide=True)

    assert "an HTML report has it" in draw(table, width=80)
    assert "number_11" in draw(table, width=400)


def test_a_collapsed_table_is_left_out() -> None:
    assert "number_0" not in draw(wide_table(1, collapsed=True))


def test_a_summary_cuts_long_tables_and_says_so() -> None:
    table = wide_table(1, rows=100)
    (section,) = brief([Section("presets", "Presets", (table,))])

    drawn = draw_sections(section)
    assert "row 31" in drawn
    assert "row 32" not in drawn
    assert "68 more rows; an HTML report has them all." in drawn


def test_a_caution_is_a_numbered_note_below() -> None:
    table = Table("t", "A caption", ("n", "v"), (("khat", Number(value=1.0, note="unreliable")),))
    drawn = draw(table)

    assert "unreliable: 1 (1)" in drawn
    assert "(1) unreliable" in drawn


def test_every_tone_can_be_told_without_colour() -> None:
    leads = {
        tone: draw(Verdict("Label", "words", tone)).splitlines()[2][0]
        for tone in ("good", "warn", "bad", "info")
    }

    assert len(set(leads.values())) == 4


def test_strings_from_a_dump_cannot_drive_the_terminal() -> None:
    evil = "\x1b[31mred\x1b]0;title\x07\x9b2J[bold]x[/bold] :smile:"
    table = Table("t", evil, (evil, "b"), ((evil, evil),), (evil,))
    figure = Figure("f", evil, evil, evil, evil, (Series(evil, (0.0, 1.0), (1.0, 2.0)),))
    drawn = draw(Text(evil), Verdict(evil, evil, "bad", (evil,)), table, figure, width=400)

    assert not set("\x1b\x07\x9b") & set(drawn)
    assert "[bold]x[/bold] :smile:" in drawn


def test_a_sparkline_shows_the_shape() -> None:
    assert sparkline((0.0, 1.0, 2.0, None, 7.0)) == "▁▂▃ █"
    assert sparkline((1.0, 10.0, 100.0), log=True) == sparkline((0.0, 1.0, 2.0))
    assert sparkline((3.0, 3.0)) == "▁▁"


@pytest.mark.parametrize("values", [(), (1.0,), (None, None), (float("nan"), float("inf"), 1.0)])
def test_a_sparkline_of_nothing_is_nothing(values: tuple[float | None, ...]) -> None:
    assert sparkline(values) == ""


HUGE = (-1.7e308, 1.7e308, 0.0, float("inf"), float("-inf"), float("nan"), None, 5e-324)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("marks", [(), ("x",)])
def test_a_chart_of_anything_is_drawn(log: bool, marks: tuple[str, ...]) -> None:
    for y in (HUGE, (1.7e308, 1.7e308), (float("inf"), float("inf")), ()):
        draw(chart(*y, y_log=log, marks=marks))
        json.dumps(plotly_figure(chart(*y, y_log=log, low=y, high=y[::-1])), allow_nan=False)


def chart(*y: float | None, **more: object) -> Figure:
    ends = {end: more.pop(end) for end in ("low", "high") if end in more}
    series = (Series("s", tuple(map(float, range(len(y)))), y, **ends),)
    return Figure("f", "k3 by step", "c", "step", "nats", series, **more)


def test_a_summary_has_no_heading_over_charts_of_a_single_point() -> None:
    single, several = chart(1.0), chart(1.0, 2.0)

    assert brief([Section("where", "Where", (single, chart(), chart(None, 1.0)))]) == ()
    (kept,) = brief([Section("where", "Where", (single, several))])
    assert [block.series for block in kept.blocks] == [several.series]
    (drawn,) = brief([Section("where", "Where", (chart(1.0, marks=("x",)),))])
    assert len(drawn.blocks) == 1


def test_a_chart_of_one_value_says_it_once() -> None:
    assert "k3 by step: 0.5 nats" in draw(chart(0.5, 0.5))
    assert "k3 by step: 0.5 to 2 nats" in draw(chart(0.5, 2.0))


def test_a_pipe_is_120_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())

    assert make_console().width == PIPE_WIDTH == 120


def test_columns_in_the_environment_set_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr("sys.stdout", io.StringIO())

    assert make_console().width == 70


@pytest.mark.parametrize("wide", [False, True])
def test_a_pipe_is_never_wider_than_120_columns_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    table = wide_table(30, wide=wide, context=("number_3",))
    drawn = draw_piped(Section("s", "A section", (Text("word " * 300), table)))

    lines = drawn.splitlines()
    assert max(map(cell_len, lines)) <= 120
    assert all(line == line.rstrip() for line in lines)
    assert drawn.count("[0.4, 0.6]") == 3 * 30
    assert all(f"number_{i} " in f"{drawn} ".replace("\n", " ") for i in range(30))
    assert "eft out" not in drawn


def draw_piped(*given: Section) -> str:
    console = make_console()
    render_terminal(given, console, stack=False)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_groups_and_the_place_with_the_largest_k3_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    summary = make_summary()
    for axis, numeric, keys in (("host", False, "abcde"), ("step", True, "12345")):
        places = [
            Place(key=key, order=i, tokens=9, sequences=9, metrics={"k3": Number(value=0.01 * (i + 1))})
            for i, key in enumerate(keys)
        ]
        summary.by[axis] = Location(axis=axis, title=axis, numeric=numeric, places=places)
    drawn = " ".join(draw_piped(*brief(sections(summary))).split())

    assert "k3 by host: 0.01 to 0.05 k3, nats per token; largest: e (0.05), d (0.04), c (0.03)" in drawn
    assert "k3 by step: 0.01 to 0.05 k3, nats per token; largest: 5 (0.05)" in drawn
