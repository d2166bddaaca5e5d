"""`doctor --explain`, the pages about causes and the public threads."""

from __future__ import annotations

import re

import faults
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.diagnosis.candidates import CANDIDATES
from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.pages import TRAINERS, cases, pages


def explain(*words):
    return CliRunner().invoke(app, ["doctor", "--explain", *words])


def test_every_cause_has_a_page_and_no_page_is_of_something_else():
    assert set(CAUSES) == set(pages())
    assert {one.id for one in CANDIDATES} <= set(CAUSES)


@pytest.mark.parametrize("name", list(pages()))
def test_a_page_is_complete_and_its_look_alikes_exist(name):
    page = pages()[name]

    assert page.title
    assert page.looks.endswith(".")
    assert page.fix.endswith((".", "`."))
    assert set(page.confirm) == set(TRAINERS)
    assert page.alike
    assert [one for one in page.alike if one not in pages() or one == name] == []


def test_every_thread_is_of_a_page_and_names_its_threads_in_full():
    every = cases()
    threads = [thread for one in every for thread in one.threads]

    assert len(every) >= 50
    assert [one.id for one in every if one.id not in pages()] == []
    assert [thread for thread in threads if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread)] == []
    assert len(threads) == len(set(threads))
    assert [one for one in every if not one.symptom] == []


@pytest.mark.parametrize("name", list(pages()))
def test_a_page_is_printed_whole_at_any_width_without_a_dump(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for width in ("80", "140"):
        monkeypatch.setenv("COLUMNS", width)
        ran = explain(name)
        assert ran.exit_code == 0
        lines, page = ran.stdout.splitlines(), pages()[name]
        assert lines[0].startswith(f"{name}: ")
        assert max(map(len, lines)) <= int(width)
        said = "".join(ran.stdout.split())
        texts = (page.title, page.looks, page.fix, *page.confirm.values(), *page.alike.values())
        assert [text for text in texts if "".join(text.replace("`", "").split()) not in said] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [(), ("list",), ("-q",)])
def test_without_a_cause_all_are_listed(words):
    ran = explain(*words)

    assert ran.exit_code == 0
    if "-q" in words:
        assert ran.stdout == f"{len(pages())} causes of a mismatch\n"
    else:
        rows = [line.split()[0] for line in ran.stdout.splitlines() if line.split()[:1]]
        assert [name for name in pages() if name not in rows] == []


REFUSED = [
    (("sync_stoped",), "there is no cause 'sync_stoped'", "did you mean sync_stopped"),
    (("lora",), "there is no cause 'lora'", "it stands in the pages of sync_stopped, weights_differ"),
    (("zzz",), "there is no cause 'zzz'", "`offpol-diag doctor --explain list` lists all"),
    (
        ("stale", "dump.parquet"),
        "--explain reads no dump and has no result, and DUMP is given",
        "writes text",
    ),
    (("stale", "--json", "a.json"), "and --json is given", "with --md Markdown"),
    (("stale", "-o", "a.html"), "and -o is given", "with --md Markdown"),
]


@pytest.mark.parametrize(("words", "error", "hint"), REFUSED, ids=lambda one: str(one)[:20])
def test_what_cannot_be_explained_is_refused(words, error, hint):
    ran = explain(*words)

    assert ran.exit_code == 2
    first, last = ran.stderr.strip().split("\n\n")
    assert first.startswith("error: ")
    assert error in first
    assert last.startswith("hint: ")
    assert hint in last


def test_a_page_as_markdown(tmp_path):
    ran = explain("off-by-one", "--md", str(tmp_path / "a.md"))
    drawn = (tmp_path / "a.md").read_text(encoding="utf-8")

    assert ran.exit_code == 0
    assert explain("off_by_one", "--md", "-").stdout == drawn
    assert drawn.startswith("# off_by_one\n")
    assert "- **Look-alikes**\n  - row_permutation: " in drawn


@pytest.mark.parametrize("command", ["doctor", "analyze"])
def test_an_answer_that_names_a_cause_ends_with_the_command_that_explains_it(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    dump = faults.dump(str(tmp_path / "shift.parquet"), "shift")
    call = [command, dump, *(["--presets", "token_is", "--no-html"] if command == "analyze" else [])]
    lines = CliRunner().invoke(app, call).stdout.splitlines()

    assert lines[-1] == "explain offpol-diag doctor --explain off_by_one"
    assert explain(lines[-1].split()[-1]).exit_code == 0
