"""The documentation against the code."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path

import jsonschema
import pytest

from offpol_diag.cli import COMMANDS, defaults
from offpol_diag.cli.exits import BROKEN_PIPE, COULD_NOT_SAY, FAILED, INTERRUPTED
from tests.factory import make_summary

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = runpy.run_path(str(ROOT / "docs" / "make.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name](), "run `python docs/make.py`"


def test_a_result_is_valid_under_the_published_schema() -> None:
    schema = json.loads((ROOT / "docs" / "result.schema.json").read_text(encoding="utf-8"))

    jsonschema.validate(json.loads(make_summary().to_json()), schema)


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"offpol-diag {command}" in README


@pytest.mark.parametrize("code", [0, FAILED, COULD_NOT_SAY, INTERRUPTED, BROKEN_PIPE])
def test_every_exit_code_is_in_the_readme(code: int) -> None:
    assert re.search(rf"^\| {code} \|", README, re.MULTILINE)


@pytest.mark.parametrize("key", defaults.KEYS)
def test_every_setting_is_in_the_readme(key: str) -> None:
    assert f"`{key}`" in README


def test_ci_runs_the_readmes_test_command_to_the_letter() -> None:
    (command,) = re.findall(r"^python3 -m venv .+ scripts/check$", README, re.MULTILINE)

    *_, first, slow = (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().splitlines()
    assert first == command
    assert " .venv/bin/pytest -m slow " in slow


def test_every_slow_module_is_there() -> None:
    named = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").split()

    assert len(named) == len(set(named))
    assert all((ROOT / "tests" / f"{name}.py").exists() for name in named)


def test_the_set_up_command_is_the_first_thing_to_run() -> None:
    first = re.findall(r"```(?:sh|bash)\n(.+?)\n```", README, re.DOTALL)[0]

    assert first == (
        "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt '.[cli]' "
        "&& .venv/bin/offpol-diag analyze"
    )


WRITTEN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@pytest.mark.parametrize(
    "page", [*WRITTEN, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))

    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_changelog_knows_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    assert re.search(rf"^## .*{re.escape(version)}", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_dependency_is_pinned_in_the_known_good_set() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cli"], *extras["test"]]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}

    names = {re.split(r"[<>=~!\[ ]", need)[0].lower() for need in wanted}
    assert names - pinned == {"offpol-diag"}  # an extra of its own


def test_every_module_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = {
        path.stem for path in (ROOT / "offpol_diag").iterdir() if not path.name.startswith((".", "__"))
    }
    modules -= {"py", "data", "templates"}

    assert sorted(name for name in modules if f"`{name}`" not in text) == []


def test_every_word_of_the_preset_grammar_stands_in_its_page():
    from dataclasses import fields
    from typing import get_args

    from offpol_diag import presets

    page = (ROOT / "docs" / "preset-files.md").read_text()
    keys = {
        field.name
        for kind in (presets.Weight, presets.Reject, presets.Veto, presets.Preset)
        for field in fields(kind)
    }
    words = {
        word
        for kind in (
            presets.Policy,
            presets.Over,
            presets.Action,
            presets.Statistic,
            presets.Sign,
            presets.Loss,
        )
        for word in get_args(kind)
    }

    assert {word for word in (keys - {"name"}) | words if f"`{word}`" not in page} == set()


def test_the_preset_file_in_the_docs_is_read(tmp_path):
    import re

    from offpol_diag.presets import catalogue

    page = (ROOT / "docs" / "preset-files.md").read_text()
    (tmp_path / "mine.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])

    assert catalogue.load(tmp_path / "mine.toml")["mine"].veto.lower == 1e-4
