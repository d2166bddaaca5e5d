"""Each preset's source names trainer, commit, date, file and lines, or the paper that defines it."""

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

from offpol_diag.diagnosis.causes.values import CopiedMean
from offpol_diag.presets.catalogue import load
from offpol_diag.trainers import TRAINERS, table

ROOT = Path(__file__).parents[1]
MAKE = runpy.run_path(str(ROOT / "docs" / "make.py"))
PAPERS = ("arXiv", "JMLR", "report", "pull request")


def test_a_source_names_file_and_lines_or_a_paper_and_a_commit_has_one_date_everywhere():
    dates = dict[str, str]()
    for name, one in load().items():
        cited = [*MAKE["CITED"].finditer(one.source)]
        lines = [part.partition("-") for found in cited if found[5] for part in found[5].split(",")]
        assert lines or any(word in one.source for word in PAPERS), name
        assert all(int(first) <= int(last or first) for first, _, last in lines), name
        assert all(dates.setdefault(found[2][:8], found[3]) == found[3] for found in cited), name
    for read in (form["read"] for trainer in TRAINERS for form in table(trainer)["form"]):
        assert re.fullmatch(r"20\d\d-\d\d-\d\d ([0-9a-f]{8,9}|v[\d.]+|commit unknown)", read)
        date, commit = read.split()[:2]
        assert dates.setdefault(commit[:8], date) == date or commit == "commit"


def test_freshness_lists_every_table_the_one_read_longest_ago_first():
    command = [sys.executable, str(ROOT / "scripts" / "freshness")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (lines, len(lines)) == (sorted(lines), len(TRAINERS))


def test_the_table_that_shows_how_a_trainer_is_added_is_the_trainers_own():
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    assert shown == (ROOT / "offpol_diag" / "trainers" / "colossalai.toml").read_text("utf-8")


def test_the_class_that_shows_how_a_cause_is_added_is_one_of_them():
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    assert shown == [inspect.getsource(CopiedMean)]


def test_a_citation_links_to_its_lines():
    link = MAKE["linked"]("verl b178a3cd (2026-01-29) verl/trainer/config/algorithm.py:182-193 and more")
    address = "https://github.com/verl-project/verl/blob/b178a3cd/verl/trainer/config/algorithm.py#L182-L193"
    assert link == f"[verl algorithm.py:182-193]({address})"
