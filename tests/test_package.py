"""What is installed is whole: the wheel works away from the repository, and so does an editable layout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.factory import make_summary

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline, from the tree as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_everything_that_is_read_at_run_time(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"offpol_diag/templates/{path.name}" for path in (ROOT / "templates").iterdir()}
    needed = shipped | {
        "offpol_diag/presets/presets.toml",
        "offpol_diag/data/sample.parquet",
        "offpol_diag/py.typed",
    }

    assert shipped
    assert needed - inside == set()


def test_the_wheel_holds_the_licence_and_nothing_that_is_not_ours_to_install(wheel: Path) -> None:
    inside = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in inside}

    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert {top for top in tops if not top.endswith(".dist-info")} == {"offpol_diag"}
    assert [name for name in inside if name.endswith(".pyc")] == []


def test_an_installed_wheel_draws_a_report_and_knows_its_version(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        target,
        wheel,
    ]
    subprocess.run(install, check=True)
    (tmp_path / "r.json").write_text(make_summary().to_json(), encoding="utf-8")

    run = draw(tmp_path, PYTHONPATH=str(target))
    assert str(target) in run.stdout
    assert (tmp_path / "r.html").stat().st_size > 100_000


def test_the_source_tree_draws_the_same_report(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(make_summary().to_json(), encoding="utf-8")

    run = draw(tmp_path, PYTHONPATH=str(ROOT))
    assert str(ROOT) in run.stdout
    assert (tmp_path / "r.html").stat().st_size > 100_000


def draw(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Draw `r.html` from `r.json` with whatever offpol_diag is found, and say where that is."""
    code = (
        "import sys, offpol_diag; print(offpol_diag.__file__, offpol_diag.__version__); "
        "sys.argv[1:] = ['report', 'r.json', '-o', 'r.html', '-q']; "
        "from offpol_diag.__main__ import main; main()"
    )
    environment = {**os.environ, "COLUMNS": "100", **env}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )


def installed(wheel: Path, folder: Path, extra: str) -> tuple[Path, int]:
    """Install the wheel into a fresh environment; return its programs and its size in MB."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    what = ["install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}{extra}"]
    run = subprocess.run([folder / "bin" / "pip", *what], check=False, capture_output=True, text=True)
    if "No matching distribution" in run.stderr or "connection" in run.stderr.lower():
        pytest.skip(f"no package index: {run.stderr.splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return folder / "bin", size // 10**6


LIGHT = """
import sys
from offpol_diag import DumpWriter, recover
with DumpWriter("d.parquet") as dump:
    dump.write(rollout_log_probs=[[-1.0, -2.0]], old_log_probs=[[-1.1, -2.0]])
try:
    from offpol_diag import analyze
except ImportError as error:
    print(error)
"""


@pytest.mark.timeout(600)
def test_the_light_install_writes_dumps_and_says_what_the_command_line_needs(
    wheel: Path, tmp_path: Path
) -> None:
    programs, size = installed(wheel, tmp_path / "light", "")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    wrote = run(programs / "python", "-c", LIGHT)
    assert (wrote.returncode, wrote.stderr) == (0, "")
    assert "pip install 'offpol-diag[cli]'" in wrote.stdout
    assert (tmp_path / "d.parquet").exists()
    refused = run(programs / "offpol-diag", "analyze", "d.parquet")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: what the command line needs is not installed: typer, ")
    assert "\n\nhint: pip install 'offpol-diag[cli]'" in refused.stderr
    assert "Traceback" not in refused.stderr
    listed = run(programs / "pip", "list", "--format=freeze").stdout.splitlines()
    packages = {line.partition("==")[0].lower() for line in listed}
    assert (
        packages - {"pip", "setuptools", "wheel"}
        == {"offpol-diag", "offpol_diag", "numpy", "pyarrow"} & packages
    )
    assert size < 400


@pytest.mark.timeout(900)
def test_the_whole_install_analyses_its_sample(wheel: Path, tmp_path: Path) -> None:
    programs, size = installed(wheel, tmp_path / "whole", "[cli]")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [programs / "offpol-diag", "analyze"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "offpol-diag" in run.stdout
    assert size > 400
