"""Check each preset's source: trainer, commit, date, file and lines; or the paper that defines it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from offpol_diag.presets.catalogue import load
from offpol_diag.trainers import TRAINERS, table

MAKE = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "make.py"))
CITED, linked = MAKE["CITED"], MAKE["linked"]
PAPERS = ("arXiv", "JMLR", "report", "pull request")


def test_a_source_names_commit_date_file_and_lines_or_a_paper() -> None:
    vague = [name for name, one in load().items() if not _precise(one.source)]

    assert vague == []


def _precise(source: str) -> bool:
    lines = [found[5] for found in CITED.finditer(source) if found[5]]
    pairs = [part.partition("-") for line in lines for part in line.split(",")]
    ordered = all(int(first) <= int(last or first) for first, _, last in pairs)
    return ordered and bool(lines or any(word in source for word in PAPERS))


def test_a_commit_has_one_date_everywhere() -> None:
    dates = defaultdict(set)
    for found in CITED.finditer("\n".join(one.source for one in load().values())):
        dates[found[2][:8]].add(found[3])
    for read in (form["read"] for trainer in TRAINERS for form in table(trainer)["form"]):
        dates[read.split()[1][:8]].add(read.split()[0])

    assert {commit: date for commit, date in dates.items() if len(date) > 1} == {}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_form_of_a_trainers_keys_says_when_it_was_read(trainer: str) -> None:
    for form in table(trainer)["form"]:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d ([0-9a-f]{8,9}|v[\d.]+|commit unknown)", form["read"])


def test_freshness_lists_every_table_the_one_read_longest_ago_first() -> None:
    script = Path(__file__).parents[1] / "scripts" / "freshness"
    lines = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout.splitlines()

    assert lines == sorted(lines)
    assert len(lines) == len(TRAINERS)


def test_the_table_that_shows_how_a_trainer_is_added_is_the_trainers_own() -> None:
    root = Path(__file__).parents[1]
    (shown,) = re.findall(r"```toml\n(.*?)```", (root / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)

    assert shown == (root / "offpol_diag" / "trainers" / "colossalai.toml").read_text("utf-8")


def test_a_citation_links_to_its_lines() -> None:
    link = linked("verl b178a3cd (2026-01-29) verl/trainer/config/algorithm.py:182-193 and more")

    address = "https://github.com/verl-project/verl/blob/b178a3cd/verl/trainer/config/algorithm.py#L182-L193"
    assert link == f"[verl algorithm.py:182-193]({address})"
