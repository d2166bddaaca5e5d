"""The command line from outside: exit codes, streams, files; no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from offpol_diag import api, cli
from offpol_diag import result as results
from offpol_diag.cli import app
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.presets.catalogue import load
from offpol_diag.shell import exit_codes
from offpol_diag.trainers import defaults
from tests.factory import DumpFile

SCRIPT = (sys.executable, "-m", "offpol_diag")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Run every test in a folder of its own, with none of our variables set."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("OFFPOL_DIAG_")] + ["COLUMNS"]:
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write a small dump of two policies: 24 groups of 4 sequences, an honest mismatch."""
    path = tmp_path_factory.mktemp("dump") / "run.parquet"
    draw = np.random.default_rng(0)
    lengths = draw.integers(5, 60, 96)
    old = [-draw.exponential(0.5, n) - 0.2 for n in lengths]
    rollout = [np.minimum(one + draw.normal(0, 0.03, len(one)), 0) for one in old]
    with DumpFile(path) as writer:
        writer.write(rollout_log_probs=rollout, old_log_probs=old, group_id=np.arange(96) // 4, step=1)
    return str(path)


@pytest.fixture(scope="module")
def result(dump, tmp_path_factory):
    """Return the result of `analyze` on the dump."""
    made = tmp_path_factory.mktemp("result") / "run.json"
    ran = run("analyze", dump, "--presets", "token_is,seq_mis,pure_is", "--no-html", "-v", "--json", made)
    assert ran.exit_code == 0, ran.output
    assert "The three policy pairs" in ran.stdout
    assert not re.search("HTML|^report  ", ran.stdout, re.MULTILINE)  # none is written
    return str(made)


def run(*args, **env):
    """Run one command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def script(*args, **env):
    """Run one command in a process of its own."""
    return subprocess.run(
        [*SCRIPT, *map(str, args)], capture_output=True, text=True, env={**os.environ, **env}
    )


def files():
    return sorted(path.name for path in Path().iterdir())


# ---------------------------------------------------------------- the literal commands


@pytest.mark.slow
def test_analyze_works_in_an_empty_folder_and_prints_where_the_report_is():
    ran = script("analyze")

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("report  offpol-diag-sample.html\n")
    assert files() == ["offpol-diag-sample.html"]


def test_every_command_has_help_and_the_program_its_version():
    for command in (cli.analyze, cli.sweep, cli.gate):
        ran = run(command.__name__, "-h")
        assert ran.exit_code == 0
        assert getattr(api, command.__name__).__doc__.splitlines()[0] in " ".join(ran.output.split())
    assert re.fullmatch(r"offpol-diag \S+\n", run("--version").output)


# ---------------------------------------------------------------- streams


@pytest.mark.slow
@pytest.mark.parametrize("command", ["analyze", "compare"])
def test_json_on_stdout_is_a_result_and_nothing_else_and_utf8_whatever_the_locale(dump, command):
    locale = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    ran = script(command, dump, "--presets", "token_is", "--json", "-", "-q", **locale)

    assert "π" in ran.stdout
    assert ran.returncode == 0
    summary = results.loads(ran.stdout, "stdout")
    assert summary.run.command == command
    assert next(iter(summary.presets)) == "token_is"
    assert summary.diagnosis is not None
    assert summary.recommendation is not None
    assert ran.stderr == ""


@pytest.mark.slow
def test_a_broken_pipe_is_quiet_and_has_its_own_code():
    for args in (["presets"], ["presets", "--json", "-"], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        ran = subprocess.run([*SCRIPT, *args], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert (ran.returncode, ran.stderr) == (141, "")


def on_a_terminal(*args, **env):
    """Return what a terminal would be sent, stdout and stderr together."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **env}
    running = subprocess.Popen([*SCRIPT, *args], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    sent = b""
    try:
        while chunk := os.read(ours, 65536):
            sent += chunk
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert running.wait() == 0
    return sent.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")


@pytest.mark.slow
def test_a_terminal_gets_colour_and_no_color_and_dumb_terminals_do_not(result):
    report = ("report", result)

    assert COLOUR.search(on_a_terminal(*report))
    assert not COLOUR.search(on_a_terminal(*report, NO_COLOR="1"))
    assert "\x1b" not in on_a_terminal(*report, TERM="dumb")


@pytest.mark.slow
def test_progress_is_for_terminals_and_can_be_silenced(dump):
    command = ("compare", dump, "--presets", "token_is")

    assert "rows/s" in on_a_terminal(*command)
    assert "rows/s" not in on_a_terminal(*command, "--quiet")
    assert script(*command).stderr == script(*command, FORCE_COLOR="3").stderr == ""


# ---------------------------------------------------------------- refusals


def assert_refused(ran, *words):
    """Check a refusal: exit code 2, `error:` on stderr, nothing on stdout, no traceback, no file."""
    code = ran.exit_code if isinstance(ran, Result) else ran.returncode
    assert code == 2, ran.stdout
    assert re.match(r"error: .+\n(\nhint: .+\n)?\Z", ran.stderr), ran.stderr
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
    assert [word for word in words if word not in ran.stderr] == []
    assert [name for name in files() if name not in GIVEN] == []


GIVEN = ("mine.toml", "pyproject.toml", "offpol-diag.toml", "folder")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--nope"], ["--nope", "hint: see `offpol-diag --help`"]),
        (["analyse"], ["'analyse'", "Did you mean 'analyze'?"]),
        (["gate"], ["DUMP", "hint: see `offpol-diag gate --help`"]),
        (["analyze", "--prests", "token_is"], ["--prests", "hint: "]),
        (["analyze", "--seed"], ["--seed", "hint: see `offpol-diag --help`"]),
    ],
)
def test_errors_of_typer_have_the_form_of_all_errors(args, words):
    assert_refused(script(*args), *words)


def test_without_arguments_there_is_help():
    ran = script()

    assert "Usage: offpol-diag" in ran.stdout
    assert (ran.returncode, ran.stderr) == (2, "")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UsageError("what", "how"), 2, "error: what\n\nhint: how\n"),
        (DumpError("what"), 2, "error: what\n"),
        (typer.Abort(), 130, "interrupted\n"),
        (typer.Exit(3), 3, ""),
    ],
)
def test_exceptions_become_a_message_and_an_exit_code(raised, code, said, capsys):
    with pytest.raises(SystemExit) as stopped, exit_codes():
        raise raised

    assert stopped.value.code == code
    assert capsys.readouterr().err == said


def test_a_bug_shows_its_traceback_and_is_never_1(capsys):
    with pytest.raises(SystemExit) as stopped, exit_codes():
        raise ZeroDivisionError

    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith("Traceback")
    assert "error: this is a bug" in said


ENDLESS = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
from pathlib import Path
from offpol_diag.__main__ import main
def stay(*args):
    print("here", flush=True)
    time.sleep(60)
{}
main()
"""
"""The command line, but at one place it says so and stays there."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "number", "code"),
    [
        (
            "from offpol_diag.core.sequences import SequenceWriter; SequenceWriter.finish = stay",
            signal.SIGTERM,
            143,
        ),
    ],
)
def test_a_signal_leaves_nothing_behind(place, number, code, dump):
    presets = "--presets", "token_is_norm"
    command = [sys.executable, "-c", ENDLESS.format(place), "analyze", dump, *presets, "--sequences", "rows"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "here\n"
        assert all(f".{running.pid}.tmp" in name for name in files())
        assert files() != []
        running.send_signal(number)
        running.send_signal(number)
        _, said = running.communicate()

    assert (running.returncode, said) == (code, "")
    assert files() == []


# ---------------------------------------------------------------- one dump, and what it lacks


def test_several_dumps_are_said_to_be_one(dump, tmp_path):
    command, again = ("analyze", "--no-html"), shutil.copy(dump, tmp_path / "again.parquet")

    done = run(*command, dump, again, "--presets", "token_is")
    assert (done.exit_code, done.stderr) == (0, "2 DUMPs given: they are read as one dump\n")
    assert run(*command, dump, again, "--presets", "token_is", "-q").stderr == ""


# ---------------------------------------------------------------- files


ODD = '{"nan": NaN, "far": 1e999, "f": 0.1, "zero": -0.0, "in": [{"x": -Infinity}]}'


@pytest.mark.slow
def test_reports_of_every_command_are_drawn_again_whatever_the_files_say_of_themselves(dump):
    table = pq.read_table(dump).replace_schema_metadata({"offpol_diag": ODD})
    pq.write_table(table, "a.parquet")
    pq.write_table(table.slice(48), "b.parquet")
    quick = ("--presets", "token_is,seq_is", "--quiet")
    for command in (
        ("analyze", "a.parquet", *quick),
        ("compare", "a.parquet", *quick),
        ("compare", "a.parquet", "b.parquet"),
        ("sweep", "a.parquet", "--preset", "token_is"),
        ("gate", "a.parquet", "--max", "k3=1"),
        ("doctor", "a.parquet"),
    ):
        ran = run(*command, "--html", "one.html", "--md", "one.md", "--json", "r.json", "--quiet")
        assert ran.exit_code == 0, ran.output
        assert run("report", "r.json", "--html", "two.html", "--md", "two.md").exit_code == 0
        for end in ("html", "md"):
            assert Path(f"one.{end}").read_bytes() == Path(f"two.{end}").read_bytes(), command


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("runs/step_10.parquet", "offpol-diag-step_10.html"),
        ("runs/", "offpol-diag-runs.html"),
        ("runs/*.parquet", "offpol-diag-runs.html"),
        ("s3://bucket/run 1/*.parquet", "offpol-diag-run-1.html"),
        ("train_*.parquet", "offpol-diag-train.html"),
        ("dumps/step=3", "offpol-diag-step=3.html"),
        ("-", "offpol-diag-stdin.html"),
    ],
)
def test_the_report_is_named_after_the_dump(source, name):
    assert str(cli.default_html([source])) == name


@pytest.mark.parametrize("command", ["analyze", "compare"])
def test_without_presets_there_are_the_usual_ones_and_those_of_the_trainer(command, dump):
    def made(*more):
        ran = run(command, dump, "--json", "-", *more)
        return list(results.loads(ran.stdout, "stdout").presets)

    analyze = command == "analyze"
    assert made(*["--no-html"] * analyze) == list(load().default)
    assert len(made("--presets", "all", *["--no-html"] * analyze)) == len(load())
    if analyze:
        assert made("--no-html", "--for", "trl") == [*load().default, *defaults("trl")]


# ---------------------------------------------------------------- defaults


def summary_of(*args, **env):
    ran = run("analyze", *args, "--json", "-", "--no-html", **env)
    assert ran.exit_code == 0, ran.output
    return results.loads(ran.stdout, "stdout")


def test_flags_beat_the_environment_and_that_beats_the_file(dump):
    Path("pyproject.toml").write_text('[tool.offpol-diag]\nseed = 1\npresets = ["token_is"]\n')

    assert summary_of(dump).run.seed == 1
    assert summary_of(dump, OFFPOL_DIAG_SEED="2").run.seed == 2
    assert summary_of(dump, "--seed", 3, OFFPOL_DIAG_SEED="2").run.seed == 3
    assert next(iter(summary_of(dump).presets)) == "token_is"
    assert next(iter(summary_of(dump, OFFPOL_DIAG_PRESETS="geo_rs").presets)) == "geo_rs"
    Path("offpol-diag.toml").write_text('seed = 4\ncolumns = {rollout = "rollout_log_probs"}\n')
    assert summary_of(dump).run.seed == 4  # the file of its own is the only one that is read


@pytest.mark.parametrize(
    ("file", "text"),
    [("pyproject.toml", "[tool.offpol-diag]\ndump = {!r}\n"), ("offpol-diag.toml", "dump = [{!r}]\n")],
)
def test_without_a_dump_the_one_a_file_names_is_read(dump, file, text):
    Path(file).write_text(text.format(dump))
    ran = run("analyze", "--presets", "token_is", "--json", "-", "--no-html")

    assert results.loads(ran.stdout, "stdout").dump.files == [dump]


# ---------------------------------------------------------------- the catalogue


@pytest.mark.parametrize("columns", [80, 140])
def test_the_catalogue_lists_every_preset_under_what_it_does(columns):
    said = run("presets", COLUMNS=str(columns)).stdout.splitlines()
    rows = json.loads(run("presets", "--json", "-").stdout)["presets"]
    kinds = ("none", "token", "sequence", "geometric and k3", "bypass", "other")
    heads = [line.split("  ")[0] for line, rule in pairwise(said) if rule.startswith("──")]
    names = [word for line in said if (word := line.partition(" ")[0]) in rows]

    assert tuple(heads) == kinds
    assert max(map(len, said)) <= columns
    assert [*rows] == [*load()]
    assert names == sorted(rows, key=lambda name: kinds.index(rows[name]["kind"]))
    assert rows["seq_mis"]["weight"]["upper"] == 2.0


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ("ana", "analyze"),
        ("analyze --presets token_is,seq_m", "token_is,seq_mis"),
        ("presets geo_", "geo_rs"),
        ("presets token_is --for ve", "verl"),
        ("sweep --prese", "--preset-file"),
        ("gate --fail-on b", "bug"),
        ("doctor --engine l", "local"),
    ],
)
def test_tab_completes_commands_options_and_what_they_take(words, there):
    line = f"offpol-diag {words}"
    count = str(len(line.split()) - 1)
    ran = script(_OFFPOL_DIAG_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=count)
    assert there in ran.stdout.split()


@pytest.mark.parametrize(
    "command",
    ["analyze --no-html --presets disabled", "compare --presets disabled", "gate --max k3=9"],
)
def test_every_command_stops_at_a_bad_row_unless_it_may_be_skipped_and_draws_by_its_seed(command):
    values = [[-1.0 - i / 9, -2.0] for i in range(12)]
    bad = [[-1.0, -2.0 - i / 9] for i in range(11)] + [[-1.0]]
    pq.write_table(pa.table({"rollout_log_probs": values, "old_log_probs": bad}), "dump.parquet")
    line = ["dump.parquet", "--json", "r.json", "--quiet"]
    assert run(*command.split(), *line).exit_code == 2
    assert not Path("r.json").exists()
    drawn = []
    for seed in ("1", "2"):
        assert run(*command.split(), *line, "--on-bad-row", "skip", "--seed", seed).exit_code == 0
        found = results.load(Path("r.json"))
        assert (found.dump.skipped.count, found.run.seed) == (1, int(seed))
        drawn.append(found.whole["k3"].interval)
    assert drawn[0] != drawn[1]
