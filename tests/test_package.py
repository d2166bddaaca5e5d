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
    assert (tmp_path / "r.html").stat().st_size > 1_000_000


def test_the_source_tree_draws_the_same_report(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(make_summary().to_json(), encoding="utf-8")

    run = draw(tmp_path, PYTHONPATH=str(ROOT))
    assert str(ROOT) in run.stdout
    assert (tmp_path / "r.html").stat().st_size > 1_000_000


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
