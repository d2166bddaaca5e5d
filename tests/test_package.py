"""Check the installed package: the wheel works away from the repository, and so does an editable layout."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from contextlib import suppress
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from offpol_diag.errors import install
from offpol_diag.trainers import TRAINERS
from tests.factory import make_summary

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel offline, from the tree as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_all_that_is_read_at_run_time_its_licence_and_nothing_else(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"offpol_diag/templates/{path.name}" for path in (ROOT / "templates").iterdir()}
    needed = {f"offpol_diag/trainers/{trainer}.toml" for trainer in TRAINERS} | shipped
    needed |= {
        "offpol_diag/presets/presets.toml",
        "offpol_diag/data/sample.parquet",
        "offpol_diag/data/floors.toml",
        "offpol_diag/data/causes.toml",
        "offpol_diag/py.typed",
    }

    assert shipped
    assert needed - inside == set()
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    tops = {name.partition("/")[0] for name in inside}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"offpol_diag"}


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """Install the wheel without its dependencies."""
    target = tmp_path_factory.mktemp("site")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    return target


def declared(one, extras, found):
    """Find what a distribution needs, directly or not, as its metadata says."""
    for need in map(Requirement, one.requires or ()):
        asked = ({"extra": extra} for extra in extras or ("",))
        if need.name not in found and (not need.marker or any(map(need.marker.evaluate, asked))):
            found[need.name] = distribution(need.name)
            declared(found[need.name], frozenset(need.extras), found)


def environment(site, folder, extra):
    """Return the requirements of the wheel with one extra, and an environment that imports nothing else."""
    needs = {}
    (ours,) = Distribution.discover(name="offpol-diag", path=[str(site)])
    declared(ours, frozenset({extra}), needs)
    folder.mkdir()
    for one in needs.values():
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            with suppress(FileExistsError):
                (folder / top).symlink_to(Path(str(one.locate_file(top))))
    path = os.pathsep.join(map(str, (site, folder)))
    return needs, {**os.environ, "PYTHONPATH": path}


def alone(folder, env, *command):
    """Run Python without the packages of this environment."""
    line = [sys.executable, "-S", *command]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False)


LIGHT = """
from offpol_diag import DumpWriter
with DumpWriter("d") as dump:
    dump.write(rollout_log_probs=[[-1.0, -2.0]], old_log_probs=[[-1.1, -2.0]])
from offpol_diag import analyze
"""


def test_the_light_install_writes_dumps_and_says_what_the_command_line_needs(site, tmp_path):
    needs, env = environment(site, tmp_path / "light", "")

    wrote = alone(tmp_path, env, "-c", LIGHT)
    assert (wrote.returncode, install("cli") in wrote.stderr.splitlines()[-1]) == (1, True)
    assert (tmp_path / "d" / "rank00000-0.parquet").exists()
    refused = alone(tmp_path, env, "-m", "offpol_diag", "analyze", "d.parquet")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: what the command line needs is not installed: typer, ")
    assert f"\n\nhint: {install('cli')}" in refused.stderr
    said = alone(tmp_path, env, "-m", "offpol_diag", "--version")
    assert (said.returncode, said.stdout, said.stderr) == (0, f"offpol-diag {version('offpol-diag')}\n", "")
    assert set(needs) == {"numpy", "pyarrow"}
    assert sum(file.size or 0 for one in needs.values() for file in one.files or ()) < 400e6


def test_the_whole_install_analyses_its_sample_and_draws_the_page(site, tmp_path):
    needs, env = environment(site, tmp_path / "whole", "cli")

    ran = alone(tmp_path, env, "-m", "offpol_diag", "analyze")
    assert ran.returncode == 0, ran.stderr
    assert "offpol-diag" in ran.stdout
    assert "pytest" not in needs
    assert (site / "bin" / "offpol-diag").exists()
    assert (tmp_path / "offpol-diag-sample.html").stat().st_size > 90_000


# ---------------------------------------------------------------- what is imported

SAMPLE = Path(__file__).parents[1] / "sample_data" / "stale.parquet"
HEAVY = frozenset({"torch", "polars", "plotly", "pyarrow", "numpy", "jinja2", "scipy", "ray"})


def imported(*command):
    """Return the top-level modules that a Python command imports."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True
    )
    names = (
        line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")
    )
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        *(
            (f"-m offpol_diag {words}", set())
            for words in ("--help", "analyze --help", "gate --help", "--version")
        ),
        ("-c 'import offpol_diag'", set()),
        ("-c 'from offpol_diag import DumpWriter'", {"pyarrow", "numpy"}),
        ("-m offpol_diag report r.json --md r.md", {"jinja2"}),
        ("-m offpol_diag gate r.json --baseline r.json --junit g.xml", set()),
        ("-m offpol_diag presets seq_mis", {"numpy", "jinja2"}),
    ],
)
def test_what_a_command_does_not_need_is_not_imported(command, heavy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text(make_summary().to_json(), encoding="utf-8")
    names = imported(*shlex.split(command))
    assert "offpol_diag" in names
    assert names & HEAVY <= heavy


def test_the_package_exports_what_it_declares_and_leaves_the_settings_of_a_program_alone():
    code = """
import gc, os
before = gc.get_threshold(), dict(os.environ)
import offpol_diag.sweep
from offpol_diag import *
import offpol_diag.sweep, offpol_diag.__main__, offpol_diag.cli
assert callable(sweep) and callable(offpol_diag.sweep), sweep
assert offpol_diag.__all__ == sorted(offpol_diag.__all__)
assert (DumpWriter.__module__, Result.__module__) == ("offpol_diag.dump.writer", "offpol_diag.result")
assert __version__ and not hasattr(offpol_diag, "nothing")
assert ((gc.get_threshold(), dict(os.environ)), gc.get_freeze_count()) == (before, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
