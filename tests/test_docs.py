"""Check the documentation against the code."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from offpol_diag.cli import app
from offpol_diag.presets import catalogue

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = runpy.run_path(str(ROOT / "docs" / "make.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), "run `python docs/make.py`"


def test_the_readme_names_commands_and_the_page_on_them_settings_and_exit_codes():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    names = [f"offpol-diag {command}" for command in get_command(app).commands]
    words = names + [f"\n| {code} |" for code in (0, 1, 2, 130, 141, 143)]
    assert [word for word in names if word not in README] == []
    assert [word for word in words if word not in page] == []
    keys = {option.name for one in get_command(app).commands.values() for option in one.params} | {"dump"}
    (listed,) = re.findall(r"The keys are (.+?);", page, re.DOTALL)
    assert set(re.findall("`([a-z_]+)`", listed)) <= keys


def test_ci_runs_the_readmes_test_command_to_the_letter():
    (command,) = re.findall(r"^python3 -m venv .+ scripts/check$", README, re.MULTILINE)

    *before, slow = (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().splitlines()
    assert command in before
    assert " .venv/bin/pytest -m slow " in slow


def test_every_slow_module_is_there():
    named = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").split()

    assert len(named) == len(set(named))
    assert all((ROOT / "tests" / f"{name}.py").exists() for name in named)


def test_the_set_up_command_is_the_first_thing_to_run():
    first = re.findall(r"```(?:sh|bash)\n(.+?)\n```", README, re.DOTALL)[0]

    assert first == (
        "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt '.[cli]' "
        "&& .venv/bin/offpol-diag analyze sample_data/collapse.parquet"
    )


def test_nobody_is_told_to_install_what_no_registry_has():
    files = [*(ROOT / "offpol_diag").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    told = re.compile(r"pip install [\"']?offpol-diag")
    found = [path.name for path in files if told.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_every_relative_link_leads_somewhere():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for page in [*pages, *(ROOT / "docs").rglob("*.md")]:
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        assert [(page.name, link) for link in links if not (page.parent / link).exists()] == []


@pytest.mark.slow
def test_docs_build_into_a_site(tmp_path):
    """Strictly: every page is in the navigation, and every link to a heading finds it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "causes" / "index.html").exists()


def test_the_changelog_knows_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    assert re.search(rf"^## .*{re.escape(version)}", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_dependency_is_pinned_in_the_known_good_set():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cli"], *extras["test"], *extras["slow"]]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}

    names = {re.split(r"[<>=~!\[ ]", need)[0].lower() for need in wanted}
    assert names - pinned == {"offpol-diag"}  # an extra of its own


def test_every_module_is_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = {
        path.stem for path in (ROOT / "offpol_diag").iterdir() if not path.name.startswith((".", "__"))
    }
    modules -= {"py", "data", "templates"}

    assert sorted(name for name in modules if f"`{name}`" not in text) == []


def test_the_preset_file_in_the_docs_is_read(tmp_path):
    page = (ROOT / "docs" / "preset-files.md").read_text()
    (tmp_path / "mine.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])

    assert catalogue.load(tmp_path / "mine.toml")["mine"].veto.lower == 1e-4
