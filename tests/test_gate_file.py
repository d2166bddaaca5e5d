"""A file of bounds: levels, overrides by step and preset, and every slip told with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.errors import GateFileError
from offpol_diag.gate.bounds import Name, Span, Steps, Tolerance
from offpol_diag.gate.file import Requirements, read
from offpol_diag.summary import loads
from tests.factory import make_summary

WHOLE = """
[defaults]
level = "warn"
judge = "point"

[[bound]]
name = "step:k3"
max = 0.002
min = -1
level = "error"
steps = "10.."
note = "FP8 on H100 runs at 0.0015"

[[bound.override]]
steps = "..19"
max = 0.02
level = "warn"

[[bound.override]]
steps = 15
max = 0.5
judge = "interval"

[[bound]]
name = "ess_tokens"
presets = ["token_is", "seq_mis", "geo_rs"]
min = 0.9

[[bound.override]]
presets = ["seq_mis"]
min = 0.4
max = 0.99

[[bound.override]]
presets = ["seq_mis", "geo_rs"]
level = "error"

[baseline]
result = "base.json"
tolerance = "5% + 0.1"
only = ["k3", "median:k3"]
presets = ["token_is"]
level = "error"

[baseline.tolerances]
k3 = 0.001
"seq_mis.ess_tokens" = "20%"
"""


def gates(tmp_path: Path, text: str) -> Requirements:
    path = tmp_path / "gates.toml"
    path.write_text(text, encoding="utf-8")
    return read(path)


def slips(tmp_path: Path, text: str) -> str:
    with pytest.raises(GateFileError) as caught:
        gates(tmp_path, text)
    return caught.value.message.replace(f"{tmp_path}/", "")


def test_a_file_is_spread_out_into_bounds(tmp_path: Path) -> None:
    found = gates(tmp_path, WHOLE)

    assert [
        (one.name, one.kind, one.limit, str(one.steps), one.level, one.judge) for one in found.bounds
    ] == [
        ("k3", "max", 0.002, "10.., except ..19, 15", "error", "point"),
        ("k3", "min", -1, "10.., except ..19, 15", "error", "point"),
        ("k3", "max", 0.02, "10..19, except 15", "warn", "point"),
        ("k3", "min", -1, "10..19, except 15", "warn", "point"),
        ("k3", "max", 0.5, "15", "error", "interval"),
        ("k3", "min", -1, "15", "error", "interval"),
        ("token_is.ess_tokens", "min", 0.9, "", "warn", "point"),
        ("seq_mis.ess_tokens", "max", 0.99, "", "error", "point"),
        ("seq_mis.ess_tokens", "min", 0.4, "", "error", "point"),
        ("geo_rs.ess_tokens", "min", 0.9, "", "error", "point"),
    ]
    assert {one.source for one in found.bounds} == {"gates.toml: [[bound]] 1", "gates.toml: [[bound]] 2"}
    assert found.bounds[0].note == "FP8 on H100 runs at 0.0015"
    parts = [one for one in found.bounds if one.name == "k3" and one.kind == "max"]
    for step, limit in {10: 0.02, 15: 0.5, 19: 0.02, 20: 0.002, 999: 0.002}.items():
        assert [one.limit for one in parts if step in one.steps] == [limit]  # of overrides the last decides
    assert not any(9 in one.steps for one in parts)


def test_a_file_says_what_is_asked_of_the_baseline(tmp_path: Path) -> None:
    found = gates(tmp_path, WHOLE)

    assert found.result == tmp_path / "base.json"
    assert found.baseline is not None
    assert found.baseline.only == (Name("k3"), Name("k3", "median"))
    assert found.baseline.default == Tolerance(0.05, 0.1)
    assert found.baseline.tolerances == {
        Name("k3"): Tolerance(amount=0.001),
        Name("seq_mis.ess_tokens"): Tolerance(0.2),
    }
    assert (found.baseline.presets, found.baseline.level, found.baseline.judge) == (
        ("token_is",),
        "error",
        "point",
    )


def test_what_a_file_leaves_out_has_a_default(tmp_path: Path) -> None:
    (bound,) = gates(tmp_path, '[[bound]]\nname = "k3"\nmax = 1\n').bounds

    assert (bound.level, bound.judge, bound.over, bound.steps) == ("error", "interval", "", Steps())
    empty = gates(tmp_path, "[baseline]\n")
    assert (empty.bounds, empty.result) == ((), None)
    assert empty.baseline is not None
    assert empty.baseline.default == Tolerance(0.1)


def test_an_override_outside_the_steps_of_its_bound_makes_no_part(tmp_path: Path) -> None:
    text = (
        '[[bound]]\nname = "step:k3"\nmax = 1\nsteps = "10.."\n[[bound.override]]\nsteps = "..5"\nmax = 2\n'
    )

    assert [one.steps.within for one in gates(tmp_path, text).bounds] == [Span(10)]
    levels = "\ufeff" + BOUND + "level = 'warn'\n" + BOUND + STEP  # two levels, and a byte order mark
    assert len(gates(tmp_path, levels).bounds) == 3


# ---------------------------------------------------------------- mistakes


BOUND = '[[bound]]\nname = "k3"\nmax = 1\n'
STEP = '[[bound]]\nname = "step:k3"\nmax = 1\n'
SLIPS = [
    (
        "[[bounds]]\nname = 'k3'\n",
        "bounds: no such key; the keys are defaults, diagnosis, bound, baseline; did you mean bound?",
    ),
    ("level = 'warn'\n" + BOUND, "level: no such key"),
    (BOUND + "maxx = 1\n", "[[bound]] 1 (k3), maxx: no such key; the keys are name, max"),
    ("[[bound]]\nmax = 1\n", "[[bound]] 1, name: it is missing"),
    ("[[bound]]\nname = 'k3'\n", "[[bound]] 1 (k3): it has no limit: give max, min or both"),
    ("[[bound]]\nname = 3\nmax = 1\n", "[[bound]] 1, name: it must be a string"),
    ("[[bound]]\nname = ''\nmax = 1\n", 'name: "" names no number'),
    ("[[bound]]\nname = 'k3'\nmax = '0.002'\n", "[[bound]] 1 (k3), max: it must be a number"),
    ("[[bound]]\nname = 'k3'\nmax = nan\n", "max: it must be finite"),
    ("[[bound]]\nname = 'k3'\nmax = 1\nmin = 2\n", "[[bound]] 1 (k3), min: it is above max"),
    (BOUND + "level = 'warning'\n", "level: 'warning' is not error or warn; did you mean warn?"),
    (BOUND + "judge = 'value'\n", "judge: 'value' is not interval or point"),
    (BOUND + "steps = '1..'\n", "steps: k3 is a number of the whole dump; write step:k3 or median:k3"),
    (STEP + "steps = '5..1'\n", 'steps: "5..1" ends before it begins'),
    (STEP + "steps = 1.5\n", "steps: it must be a step (7) or a span of steps"),
    (BOUND + "presets = 'seq_mis'\n", "presets: it must be a list"),
    (BOUND + "presets = ['']\n", "presets: it is empty"),
    ("[[bound]]\nname = 'a.k3'\nmax = 1\npresets = ['b']\n", "presets: the name has a preset already: a.k3"),
    (
        BOUND + "[[bound.override]]\nmax = 2\n",
        "[[bound]] 1 (k3), override 1: it must say for which steps or presets",
    ),
    (
        BOUND + "[[bound.override]]\nsteps = 3\nmax = 2\n",
        "override 1, steps: only bounds on step:NAME differ by step",
    ),
    (STEP + "[[bound.override]]\nsteps = 3\n", "override 1: it overrides nothing"),
    (
        STEP + "[[bound.override]]\nstep = 3\nmax = 2\n",
        "[[bound]] 1 (step:k3), override 1, step: no such key",
    ),
    (
        BOUND + "[[bound.override]]\npresets = ['x']\nmax = 2\n",
        "override 1, presets: x is not among the presets",
    ),
    (BOUND + BOUND, "[[bound]] 2 (k3), max: [[bound]] 1 has one already"),
    ("bound = 3\n", "bound: it must be a list of tables: write [[bound]]"),
    ("[bound]\nname = 'k3'\n", "bound: it must be a list of tables: write [[bound]]"),
    ("baseline = 'base.json'\n", "baseline: it must be a table"),
    ("[baseline]\nresults = 'a'\n", "[baseline] results: no such key"),
    ("[baseline]\ntolerance = '5 percent'\n", '[baseline] tolerance: "5 percent" is no tolerance'),
    ("[baseline]\ntolerance = true\n", "it must be an amount"),
    ("[baseline]\nonly = ['step:k3']\n", '[baseline] only: "step:k3": two runs have different steps'),
    ("[baseline.tolerances]\nk3 = 'x'\n", '[baseline] tolerances.k3: "x" is no tolerance'),
    ("[baseline.tolerances]\n'avg:k3' = 1\n", '[baseline] tolerances: "avg:k3": "avg" is no quantifier'),
    ("[defaults]\nlevle = 'warn'\n", "did you mean level?"),
    ("", "holds no bound"),
    ("# nothing\n[defaults]\nlevel = 'warn'\n", "holds no bound"),
    ("[[bound]\n", "not TOML"),
    ("x = " + "[" * 5000, "not TOML"),
]


@pytest.mark.parametrize(("text", "said"), SLIPS)
def test_a_slip_is_told_with_its_file_table_and_key(tmp_path: Path, text: str, said: str) -> None:
    message = slips(tmp_path, text)

    assert message.startswith("gates.toml: ")
    assert said in message
    assert "\n" not in message


def test_every_slip_is_told_at_once_a_line_each(tmp_path: Path) -> None:
    text = BOUND + "maxx = 1\nlevel = 'x'\n[[bound]]\nname = 'tv'\nmin = 'a'\n[baseline]\nresults = 'a'\n"

    first, *lines = slips(tmp_path, text).splitlines()

    assert first == "gates.toml: 4 mistakes"
    assert [line.split(":")[1].strip() for line in lines] == [
        "[[bound]] 1 (k3), level",
        "[[bound]] 1 (k3), maxx",
        "[[bound]] 2 (tv), min",
        "[baseline] results",
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [(None, "no such file"), (b"\xff\xfe", "not UTF-8 (byte 0)"), ("folder", "cannot be read")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, data: Any, said: str) -> None:
    path = tmp_path / "gates.toml"
    if data == "folder":
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)

    with pytest.raises(GateFileError) as caught:
        read(path)

    assert caught.value.message.startswith(f"{path}: {said}")
    assert caught.value.hint


# ---------------------------------------------------------------- on the command line


RUN = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "now.json").write_text(make_summary().to_json())
    (tmp_path / "ci").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        (BOUND, [], 0),
        ("[[bound]]\nname = 'k3'\nmax = 1e-9\n", [], 1),
        ("[[bound]]\nname = 'k3'\nmax = 1e-9\nlevel = 'warn'\n" + BOUND, [], 0),
        ("[[bound]]\nname = 'k33'\nmax = 1\n", [], 2),
        ("[[bound]]\nname = 'k33'\nmax = 1\nlevel = 'warn'\n", [], 2),  # nothing was judged
        ("[[bound]]\nname = 'k3'\nmax = 0.002\n", [], 0),  # 2.03e-3 ± 1.5e-4
        ("[[bound]]\nname = 'k3'\nmax = 0.002\n", ["--point"], 1),
        ("[[bound]]\nname = 'k3'\nmax = 0.002\njudge = 'point'\n", [], 1),
        (BOUND, ["--max", "k3=1e-9"], 1),  # options and file together
        ("[baseline]\nresult = 'base.json'\n", [], 0),
        ("[baseline]\nresult = 'gone.json'\n", [], 2),
        ("[baseline]\n", [], 2),
        ("[baseline]\n", ["--baseline", "now.json"], 0),
        ("[baseline]\nresult = 'gone.json'\n", ["--baseline", "now.json"], 0),  # the option goes before
    ],
)
def test_a_file_is_judged_with_the_options(folder: Path, text: str, options: list[str], code: int) -> None:
    (folder / "ci" / "gates.toml").write_text(text)
    (folder / "ci" / "base.json").write_text(make_summary().to_json())

    ran = RUN.invoke(app, ["gate", "now.json", "--gates", "ci/gates.toml", *options])

    assert ran.exit_code == code, ran.output


def test_slips_are_shown_line_by_line_and_no_file_is_written_over(folder: Path) -> None:
    (folder / "gates.toml").write_text(BOUND + "maxx = 1\nlevel = 'x'\n")
    ran = RUN.invoke(app, ["gate", "now.json", "--gates", "gates.toml", "--json", "out.json"])
    assert ran.exit_code == 2
    assert ran.stderr.startswith("error: gates.toml: 2 mistakes\n  gates.toml: [[bound]] 1 (k3), level:")
    assert "\nhint: " in ran.stderr
    assert not Path("out.json").exists()

    (folder / "gates.toml").write_text(BOUND)
    ran = RUN.invoke(app, ["gate", "now.json", "--gates", "gates.toml", "--md", "gates.toml"])
    assert (ran.exit_code, (folder / "gates.toml").read_text()) == (2, BOUND)


def test_a_preset_that_does_not_exist_is_refused_with_its_place(folder: Path) -> None:
    (folder / "gates.toml").write_text("[[bound]]\nname = 'ess_tokens'\nmin = 0\npresets = ['token_iss']\n")

    ran = RUN.invoke(app, ["gate", "missing.parquet", "--gates", "gates.toml"])

    assert ran.exit_code == 2
    assert 'error: gates.toml: [[bound]] 1: unknown preset "token_iss"' in ran.stderr
    assert "did you mean token_is" in ran.stderr


def test_the_result_says_who_asked_and_what_the_file_says(folder: Path) -> None:
    (folder / "gates.toml").write_text(BOUND + "note = 'as agreed'\nlevel = 'warn'\n")

    ran = RUN.invoke(app, ["gate", "now.json", "--gates", "gates.toml", "--min", "k3=0", "--json", "-"])

    option, file = loads(ran.stdout, "stdout").gates
    assert (option.source, option.level) == ("--min", "error")
    assert (file.source, file.note, file.level) == ("gates.toml: [[bound]] 1", "as agreed", "warn")
