"""benchmarks/doctor/judge.py: how answers to dumps of sampled.py are judged, and the kept figures."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.doctor import columns, judge, sync
from benchmarks.doctor.sampled import ALSO, FAULTS
from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.pages import pages

KEPT = sync.results(judge.RESULTS)
ROWS = [row for some in KEPT.values() for row in some]
HONEST = [row for row in ROWS if not row["cause"]]


def test_every_cause_is_known():
    assert {cause for cause, _ in (*FAULTS.values(), *columns.FAULTS.values())} <= set(pages())
    assert {one for some in ALSO.values() for one in some} <= set(CAUSES)
    assert set(ALSO) <= set(FAULTS)
    assert set(columns.ALSO) <= set(columns.FAULTS)


def test_six_architectures_are_kept_and_others_are_held_back():
    assert len({row["architecture"] for row in ROWS}) >= 6
    assert {row["architecture"] for row in KEPT["final"]} == set(judge.SPLITS["final"])
    assert not {*judge.SPLITS["final"]} & {*judge.SPLITS["development"]}


def test_no_honest_dump_is_called_a_bug():
    assert len(HONEST) >= 200
    bugs = [(row["architecture"], row["case"]) for row in HONEST if row["verdict"] == "bug"]
    assert bugs == [("gpt-oss", "honest: peaked int4")]  # held back; its first answer, mended since


@pytest.mark.parametrize(("split", "most"), [("development", 0.005), ("final", 0.07), ("columns", 0.0)])
def test_hardly_an_answer_misleads(split, most):
    faulty = [row for row in KEPT[split] if row["cause"]]
    wrong = [(row["architecture"], row["case"]) for row in faulty if row["said"] == "misleading"]
    assert len(wrong) <= most * len(faulty), wrong


@pytest.mark.parametrize(("split", "named"), [("development", 0.7), ("final", 0.7), ("columns", 0.5)])
def test_most_faults_are_named_or_a_candidate(split, named):
    """What columns that decide show of decoding, experts and images is a candidate, never named."""
    said = [row["said"] for row in KEPT[split] if row["cause"]]
    assert np.mean([one == "right" for one in said]) > named
    assert np.mean([one in ("right", "candidate") for one in said]) > 0.85


def test_the_page_is_made_of_the_results_that_are_kept():
    assert judge.DOCS.read_text(encoding="utf-8") == judge.text()


def test_with_a_column_that_decides_the_right_candidate_comes_first():
    rows = [row for row in KEPT["columns"] if row["said"] == "candidate"]
    first = [row["candidates"][0] in (row["cause"], *columns.ALSO.get(row["case"], ())) for row in rows]
    assert len(rows) >= 40
    assert np.mean(first) > 0.9
