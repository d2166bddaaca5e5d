"""The command line from outside: exit codes, streams, defaults, help and completion; no traceback."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

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
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in [name for name in os.environ if name.startswith("OFFPOL_DIAG_")] + ["COLUMNS"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write a small dump of two policies: 24 groups of 4 sequences, an honest mismatch."""
    path = tmp_path_factory.mktemp("dump") / "run.parquet"
    draw = np.random.default_rng(0)
    old = [-draw.exponential(0.5, n) - 0.2 for n in draw.integers(5, 60, 96)]
    rollout = [np.minimum(one + draw.normal(0, 0.03, len(one)), 0) for one in old]
    with DumpFile(path) as writer:
        writer.write(rollout_log_probs=rollout, old_log_probs=old, group_id=np.arange(96) // 4, step=1)
    return str(path)


def run(*args, **env):
    """Run one command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def script(*args, **env):
    """Run one command in a process of its own."""
    return subprocess.run(
        [*SCRIPT, *map(str, args)], capture_output=True, text=True, env={**os.environ, **env}
    )


def result_of(*args, **env):
    """Return the result that a command writes on stdout."""
    ran = run(*args, "--json", "-", **env)
    assert ran.exit_code == 0, ran.output
    return results.loads(ran.stdout, "stdout")


# ---------------------------------------------------------------- streams


@pytest.mark.slow
@pytest.mark.parametrize("command", ["analyze", "compare"])
def test_json_on_stdout_is_a_result_and_nothing_else_and_utf8_whatever_the_locale(dump, command):
    ran = script(command, dump, "--json", "-", "-q", PYTHONIOENCODING="ascii", LC_ALL="C")

    assert (ran.returncode, ran.stderr, "π" in ran.stdout) == (0, "", True)
    found = results.loads(ran.stdout, "stdout")
    assert (found.run.command, bool(found.diagnosis), bool(found.recommendation)) == (command, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("args", [["presets"], ["--help"]])
def test_a_broken_pipe_is_quiet_and_has_its_own_code(args):
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


@pytest.mark.slow
def test_a_terminal_gets_colour_and_progress_and_nothing_else_does(dump):
    command, colour = ("compare", dump, "--presets", "token_is"), re.compile(r"\x1b\[[0-9;]*3[0-7]m")

    assert colour.search(said := on_a_terminal(*command))
    assert re.search(r"rows/s,.{0,40}[-\d]:[-\d]{2}:[-\d]{2}", said), "the rate and the time that is left"
    assert not colour.search(on_a_terminal(*command, "--quiet", NO_COLOR="1"))
    assert "rows/s" not in on_a_terminal(*command, "--quiet") + on_a_terminal("check", dump, "--for", "trl")
    assert "\x1b" not in on_a_terminal("presets", "none", TERM="dumb")
    assert script(*command).stderr == script(*command, FORCE_COLOR="3").stderr == ""


# ---------------------------------------------------------------- refusals, and exit codes


def test_there_is_help_of_the_program_and_of_every_command_and_a_version():
    ran = script()
    assert ("Usage: offpol-diag" in ran.stdout, ran.returncode, ran.stderr) == (True, 2, "")
    for command in (cli.analyze, cli.sweep, cli.gate):
        ran = run(command.__name__, "-h")
        assert ran.exit_code == 0
        assert getattr(api, command.__name__).__doc__.splitlines()[0] in " ".join(ran.output.split())
    assert re.fullmatch(r"offpol-diag \S+\n", run("--version").output)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (UsageError("what", "how"), r"error: what\n\nhint: how\n"),
        (DumpError("what"), r"error: what\n"),
        (MemoryError("40 GiB"), r"error: there is not enough memory \(40 GiB\)\n\nhint: .*\n"),
        (ZeroDivisionError(), r"(?s)Traceback.*error: this is a bug in offpol-diag\n.*"),
    ],
)
def test_exceptions_become_a_message_and_exit_code_2_and_a_bug_is_never_1(raised, said, capsys):
    with pytest.raises(SystemExit) as stopped, exit_codes():
        raise raised
    assert stopped.value.code == 2
    assert re.fullmatch(said, capsys.readouterr().err)


# ---------------------------------------------------------------- dumps, presets, settings


ODD = '{"nan": NaN, "far": Infinity, "f": 0.1, "zero": -0.0, "in": [{"x": -Infinity}]}'


@pytest.mark.slow
def test_reports_of_every_command_are_drawn_again_whatever_the_files_say_of_themselves(dump):
    table = pq.read_table(dump).replace_schema_metadata({"offpol_diag": ODD})
    pq.write_table(table, "a.parquet")
    pq.write_table(table.slice(48), "b.parquet")
    for command in (
        "analyze a.parquet --presets token_is,seq_is",
        "compare a.parquet --presets token_is,seq_is",
        "compare a.parquet b.parquet",
        "sweep a.parquet --preset token_is",
        "gate a.parquet --max k3=1",
        "doctor a.parquet",
    ):
        ran = run(*command.split(), *["--html", "one.html", "--md", "one.md", "--json", "r.json", "--quiet"])
        assert ran.exit_code == 0, ran.output
        assert run("report", "r.json", "--html", "two.html", "--md", "two.md").exit_code == 0
        for end in ("html", "md"):
            assert Path(f"one.{end}").read_bytes() == Path(f"two.{end}").read_bytes(), command


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("runs/step_10.parquet", "step_10"),
        ("runs/*.parquet", "runs"),
        ("s3://bucket/run 1/*.parquet", "run-1"),
        ("-", "stdin"),
    ],
)
def test_the_report_is_named_after_the_dump(source, name):
    assert str(cli.default_html([source])) == f"offpol-diag-{name}.html"


def test_without_presets_there_are_the_usual_ones_and_those_of_the_trainer(dump):
    def made(*more):
        return list(result_of("analyze", dump, "--no-html", *more).presets)

    assert made() == list(result_of("compare", dump).presets) == list(load().default)
    assert made("--for", "trl") == [*load().default, *defaults("trl")]
    assert len(made("--presets", "all")) == len(load())


def test_flags_beat_the_environment_and_that_beats_the_file(dump):
    def found(*args, **env):
        one = result_of("analyze", "--no-html", *args, **env)
        return one.run.seed, next(iter(one.presets))

    toml = f'[tool.offpol-diag]\ndump = {dump!r}\nseed = 1\npresets = ["token_is"]\n'
    Path("pyproject.toml").write_text(toml)
    assert found() == (1, "token_is")
    assert found(OFFPOL_DIAG_SEED="2", OFFPOL_DIAG_PRESETS="geo_rs") == (2, "geo_rs")
    assert found("--seed", 3, OFFPOL_DIAG_SEED="2") == (3, "token_is")
    columns = 'columns = {rollout = "rollout_log_probs"}'
    Path("offpol-diag.toml").write_text(f"seed = 4\ndump = [{dump!r}]\n{columns}\n")
    assert found()[0] == 4  # the file of its own is the only one that is read
    assert result_of("analyze", "--no-html").dump.files == [dump]


# ---------------------------------------------------------------- the catalogue, and completion


@pytest.mark.parametrize("columns", [80, 140])
def test_the_catalogue_lists_every_preset_under_what_it_does(columns):
    lines, rows = run("presets", COLUMNS=str(columns)).stdout.splitlines(), load()
    kinds = ("none", "token", "sequence", "geometric and k3", "bypass", "other")
    heads = [line.split("  ")[0] for line, rule in pairwise(lines) if rule.startswith("──")]
    names = [word for line in lines if (word := line.partition(" ")[0]) in rows.rows]

    assert tuple(heads) == kinds
    assert max(map(len, lines)) <= columns
    assert names == sorted(rows, key=lambda name: kinds.index(rows[name].kind))


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ("ana", "analyze"),
        ("analyze --presets token_is,seq_m", "token_is,seq_mis"),
        ("presets geo_", "geo_rs"),
        ("analyze --for sl", "slime"),
        ("sweep --prese", "--preset-file"),
        ("gate --fail-on b", "bug"),
    ],
)
def test_tab_completes_commands_options_and_what_they_take(words, there):
    line = f"offpol-diag {words}"
    count = str(len(line.split()) - 1)
    ran = script(_OFFPOL_DIAG_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=count)
    assert there in ran.stdout.split()
