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
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag import files, shell
from offpol_diag.cli import app
from tests.factory import DumpFile, make_summary

SCRIPT = (sys.executable, "-m", "offpol_diag")
FEW = ("--presets", "token_is", "-q")
LOGS = [[-1.0, -0.5, -2.0], [-0.25, -3.0]] * 9
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
    """Write what the lines read: a dump, rows, curves, a result."""
    place = tmp_path_factory.mktemp("given")
    with DumpFile(place / "a.parquet") as writer:
        writer.write(rollout_log_probs=LOGS, old_log_probs=[[x - 0.01 for x in row] for row in LOGS], step=1)
    (place / "rows.jsonl").write_text('{"rollout_log_probs": [-1.0], "old_log_probs": [-1.5]}\n' * 99)
    (place / "curves.jsonl").write_text('{"_step": 1, "sampling/sampling_logp_difference/mean": 0.1}')
    (place / "r.json").write_text(make_summary().to_json())
    return place


@pytest.fixture(autouse=True)
def there(given, tmp_path, monkeypatch):
    """Go to a copy of it; return the names in it."""
    monkeypatch.chdir(shutil.copytree(given, tmp_path / "there"))
    return names()


def names():
    return {path.name for path in Path().iterdir()}


def run(*args):
    return CliRunner().invoke(app, [str(one) for one in args])


def ran(line, limit=None, **env):
    words, env = [*SCRIPT, *shlex.split(line), "-q"], os.environ | env | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, capture_output=True, text=True, env=env, preexec_fn=limit)


# ---------------------------------------------------------------- what is read, and what is replaced


@pytest.mark.parametrize("target", ["a.parquet", "linked.parquet", "own.toml"])
def test_no_target_is_a_file_that_is_read(target):
    os.link("a.parquet", "linked.parquet")
    Path("own.toml").write_text("")
    before = Path(target).read_bytes()
    done = run("analyze", "a.parquet", "--preset-file", "own.toml", "--no-html", "--sequences", target, *FEW)
    assert (done.exit_code, Path(target).read_bytes()) == (2, before)
    assert f"{target}: is what is read" in done.stderr


def test_links_are_followed_and_modes_kept():
    made = ("rows.parquet", "page.html", "r2.json", "dump.parquet")
    for name in made:
        Path(f"real-{name}").touch(mode=0o600)
        Path(name).symlink_to(f"real-{name}")
    Path("new.md").symlink_to("not-yet.md")
    out = "--sequences rows.parquet -o page.html --json r2.json --md new.md"
    assert run("analyze", "a.parquet", *FEW, *out.split()).exit_code == 0
    assert run("convert", "rows.jsonl", "--to", "dump.parquet").exit_code == 0

    for name in made:
        real = Path(f"real-{name}")
        assert (Path(name).is_symlink(), real.stat().st_mode & 0o777) == (True, 0o600)
        assert real.stat().st_size > 0
    assert Path("not-yet.md").read_text().startswith("#")
    shell.write({Path("/dev/null"): "new"})
    assert not Path("/dev/null").is_file()


# ---------------------------------------------------------------- stdout and stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NO /dev/full HERE: a full disk was not tried")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("into", ["> out.json", "> /dev/full"])
def test_a_result_that_does_not_fit_on_the_disk_is_an_error(unbuffered, into):
    limit = "" if "full" in into else "ulimit -f 1; "
    line = f"trap '' XFSZ; {limit}{shlex.join([*SCRIPT, 'presets'])} {into}"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("into", ["2>&-", "2>/dev/full", "> /dev/null 2>&-"])
def test_1_means_that_a_gate_failed_and_nothing_else(into):
    for what, bound, code in (("MISSING", "k3=1", 2), ("r.json", "k3=1e-9", 1)):
        line = f"{shlex.join([*SCRIPT, 'gate', what, '--max', bound])} {into}"
        assert subprocess.run(line, shell=True, capture_output=True, timeout=60).returncode == code


# ---------------------------------------------------------------- every command


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
def test_runs_at_once_that_write_one_file_leave_that_of_one_of_them():
    with ThreadPoolExecutor() as pool:
        assert [one.returncode for one in pool.map(ran, [LINES["analyze"]] * 3)] == [0, 0, 0]
    assert json.loads(Path("out.json").read_text())["format"] == 3
    assert len(pq.read_table("out.parquet")) == 18
    assert not [name for name in names() if name.endswith(".tmp")]


def test_a_signal_leaves_no_temporary_dump_and_no_file(there):
    """A conversion that is under way is terminated."""
    Path("long.jsonl").write_text(Path("rows.jsonl").read_text() * 2000)
    Path("temporary").mkdir()
    command, environment = [*SCRIPT, "analyze", "long.jsonl", "-q"], os.environ | {"TMPDIR": "temporary"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not list(Path("temporary").iterdir()):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 143
    assert list(Path("temporary").iterdir()) == []
    assert names() == there | {"long.jsonl", "temporary"}


def test_a_forked_child_leaves_the_temporary_folder_of_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with files.TemporaryFolder() as folder:
        if (child := os.fork()) == 0:
            folder.__exit__()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert folder.path.is_dir()
    assert not folder.path.exists()
