"""Files appear whole or not at all, as what they replace; stdout gets all of it, or the exit code says so."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag import shell as process
from offpol_diag.cli import app
from tests.factory import DumpFile, make_summary

SCRIPT = (sys.executable, "-m", "offpol_diag")
FEW = ("--presets", "token_is", "-q")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Make a folder with a dump and a result alone."""
    monkeypatch.chdir(tmp_path)
    Path("dumps").mkdir()
    with DumpFile(Path("dumps/one.parquet")) as writer:
        tokens = [[-1.0, -0.5, -2.0], [-0.25, -3.0]]
        writer.write(rollout_log_probs=tokens, old_log_probs=tokens)
    Path("now.json").write_text(make_summary().to_json())
    return tmp_path


def run(*args):
    return CliRunner().invoke(app, [str(one) for one in args])


def shell(*args, into="", **env):
    return subprocess.run(
        f"{shlex.join([*SCRIPT, *args])} {into}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | env,
    )


# ---------------------------------------------------------------- what is read is not written over


@pytest.mark.parametrize("target", ["dumps/one.parquet", "other.parquet"])
def test_no_target_is_the_file_that_is_read(target):
    os.link("dumps/one.parquet", "other.parquet")
    before = Path("dumps/one.parquet").read_bytes()
    ran = run("analyze", "dumps/one.parquet", "--no-html", "--sequences", target, *FEW)

    assert (ran.exit_code, Path("dumps/one.parquet").read_bytes()) == (2, before)
    assert "is what is read" in ran.stderr


def test_a_preset_file_is_not_written_over():
    Path("own.toml").write_text("")
    ran = run("analyze", "dumps", "--preset-file", "own.toml", "--no-html", "--json", "own.toml")
    assert (ran.exit_code, Path("own.toml").read_text()) == (2, "")


# ---------------------------------------------------------------- a file is replaced as what it was


def test_links_are_followed_and_modes_kept():
    names = ("rows.parquet", "page.html", "r.json")
    for name in names:
        Path(f"real-{name}").touch(mode=0o600)
        Path(name).symlink_to(f"real-{name}")
    Path("new.md").symlink_to("not-yet.md")
    out = "--sequences rows.parquet -o page.html --json r.json --md new.md"
    assert run("analyze", "dumps", *FEW, *out.split()).exit_code == 0

    for name in names:
        real = Path(f"real-{name}")
        assert Path(name).is_symlink()
        assert real.stat().st_size > 0
        assert real.stat().st_mode & 0o777 == 0o600
    assert Path("not-yet.md").read_text().startswith("#")
    process.write({Path("/dev/null"): "new"})
    assert not Path("/dev/null").is_file()


def test_a_dump_follows_links_and_keeps_the_mode():
    Path("real.parquet").touch(mode=0o600)
    Path("out.parquet").symlink_to("real.parquet")
    Path("new.parquet").symlink_to("not-yet.parquet")
    Path("rows.jsonl").write_text('{"rollout_log_probs": [-1.0], "old_log_probs": [-1.5]}\n')
    for name in ("out.parquet", "new.parquet"):
        assert run("convert", "rows.jsonl", "--to", name).exit_code == 0
        assert Path(name).is_symlink()
    assert Path("real.parquet").stat().st_mode & 0o777 == 0o600
    assert len(pq.read_table("not-yet.parquet")) == 1


def test_short_memory_is_no_bug(monkeypatch):
    def short(*args, **more):
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr("offpol_diag.api.analyze", short)
    ran = run("analyze", "dumps", *FEW, "--no-html")
    assert (ran.exit_code, "memory" in ran.stderr, "bug" in ran.stderr) == (2, True, False)


# ---------------------------------------------------------------- stdout and stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NO /dev/full HERE: a full disk was not tried")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_result_that_does_not_fit_on_the_disk_is_an_error(unbuffered, folder):
    limited = f"ulimit -f 8; {shlex.join([*SCRIPT, 'presets', '--json', '-'])} > r.json"
    for line in (limited, limited.replace("r.json", "/dev/full").replace("ulimit -f 8; ", "")):
        ran = subprocess.run(
            ["bash", "-c", f"trap '' XFSZ; {line}"],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
        assert ran.returncode == 2
        assert ran.stderr.startswith("error: ")
        assert "Traceback" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("into", ["2>&-", "2>/dev/full", ">&- 2>&-"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_1_means_that_a_gate_failed_and_nothing_else(into, unbuffered):
    def code(*args, into=into):
        return shell("gate", *args, into=into, PYTHONUNBUFFERED=unbuffered).returncode

    assert code("MISSING", "--max", "k3=1") == 2
    assert code("now.json", "--max", "k3=1e-9", into=into.replace(">&- 2", "2")) == 1


# ---------------------------------------------------------------- every command

WRITES = "-o out.html --json out.json --md out.md"
LINES = {
    "analyze": f"analyze a.parquet --presets token_is {WRITES} --sequences out.parquet",
    "compare": f"compare a.parquet --presets token_is,seq_is {WRITES}",
    "sweep": f"sweep a.parquet --preset token_is {WRITES}",
    "gate": f"gate a.parquet --max k3=1 {WRITES} --junit out.xml",
    "doctor": f"doctor a.parquet {WRITES}",
    "check": f"check a.parquet --logged curves.jsonl --for trl --presets token_is {WRITES}",
    "convert": "convert rows.jsonl --to out.parquet",
    "report": "report r.json -o out.html --md out.md",
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Write what the lines read."""
    place = tmp_path_factory.mktemp("given")
    logs = [[-1.0, -0.5, -2.0], [-0.25, -3.0]] * 9
    with DumpFile(place / "a.parquet") as writer:
        writer.write(rollout_log_probs=logs, old_log_probs=[[x - 0.01 for x in row] for row in logs], step=1)
    (place / "rows.jsonl").write_text('{"rollout_log_probs": [-1.0], "old_log_probs": [-1.5]}\n' * 99)
    (place / "curves.jsonl").write_text('{"_step": 1, "sampling/sampling_logp_difference/mean": 0.1}')
    first = shlex.split("analyze a.parquet -q --no-html --presets token_is --json r.json")
    subprocess.run([*SCRIPT, *first], cwd=place, check=True)
    return place


@pytest.fixture
def there(given, tmp_path, monkeypatch):
    """Go to a copy of it; return the names in it."""
    monkeypatch.chdir(shutil.copytree(given, tmp_path / "there"))
    return names()


def names():
    return {path.name for path in Path().iterdir()}


def ran(line, limit=None, **env):
    words, env = [*SCRIPT, *shlex.split(line), "-q"], os.environ | env | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, capture_output=True, text=True, env=env, preexec_fn=limit)


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_on_a_full_disk_a_command_leaves_no_file(line, there):
    found = ran(line, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400)))

    assert (found.returncode, names()) == (2, there), found.stderr
    assert re.search("cannot be (read or )?(written|converted)|not written", found.stderr)
    assert "Traceback" not in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_command_works_with_few_files_without_a_home_and_with_bad_streams(line, there):
    def limit():
        os.close(0)
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))

    found = ran(line, limit, HOME="/proc", TMPDIR="/proc")
    wanted = {word for word in line.split() if word.startswith("out.")}

    assert found.returncode == 0
    assert wanted <= names() <= wanted | there


@pytest.mark.slow
def test_runs_at_once_that_write_one_file_leave_that_of_one_of_them(there):
    with ThreadPoolExecutor() as pool:
        assert [one.returncode for one in pool.map(ran, [LINES["analyze"]] * 3)] == [0, 0, 0]
    assert json.loads(Path("out.json").read_text())["format"] == 3
    assert len(pq.read_table("out.parquet")) == 18
    assert not [name for name in names() if name.endswith(".tmp")]
