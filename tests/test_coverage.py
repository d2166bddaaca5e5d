"""The measure of coverage itself: its truths, its counting, and a small version of it that can fail."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from covering import alarms, page, run
from covering.cells import cell, has_truth, numbers
from covering.truth import Known, truths
from covering.worlds import HONEST, SHIFTED, batch

from offpol_diag.batch import Batch
from offpol_diag.engine import gap
from offpol_diag.engine.bootstrap import resampled
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.formula import Reader
from offpol_diag.number import Number

LIGHT, HEAVY, *_ = HONEST
WORLDS = {"light": LIGHT, "heavy": HEAVY, "shifted": SHIFTED[0]}
ROWS = {row.name: row for row in gap.ROWS}


def reader(given: Batch) -> Reader:
    """Make a reader of the numbers of rollout → old."""
    context = BatchContext.of(given, 0, 256)
    columns = context.counts | gap.columns(context, gap.DRIFTS[0])
    sums = resampled(np.stack((*columns.values(),)), context.draws, given.key)
    return Reader(dict(zip(columns, sums, strict=True)), len(np.unique(given.key)))


def drawn(world, groups, i):
    return batch(world, groups, np.random.default_rng((11, groups, i)))


@cache
def readers(at):
    """Make the readers of dumps of a world that all tests share."""
    return [reader(drawn(WORLDS[at], 32, i)) for i in range(120)]


@pytest.mark.parametrize(
    ("world", "name"), [("light", "f_2"), ("heavy", "k3"), ("heavy", "f_2"), ("shifted", "k1")]
)
def test_intervals_of_clustered_data_hold_the_truth_about_95_times_in_100(world, name):
    true = truths(WORLDS[world], 20_000)[name].value
    ends = [read.number(ROWS[name]).interval for read in readers(world)]
    assert 0.90 <= np.mean([low <= true <= high for low, high in ends]) <= 0.985


@pytest.mark.parametrize("world", [*HONEST[:3], *SHIFTED], ids=lambda world: world.name)
def test_the_closed_forms_are_what_a_large_dump_shows(world):
    """Each number within 5 of its own standard errors, here counted from the half width of an interval."""
    true, seen = truths(world, 20_000), numbers(batch(world, 1000, np.random.default_rng(5)))
    checked = 0
    for name, known in true.items():
        low, high = seen[name].interval or (-math.inf, math.inf)
        if has_truth(known) and seen[name].note is None:
            half = max(high - seen[name].value, seen[name].value - low)
            assert abs(seen[name].value - known.value) < 2.5 * half + 3 * known.error, name
            checked += 1
    assert checked >= 15


def test_a_cell_counts_what_was_covered_missed_unreliable_and_without_an_interval():
    known = Known(1.0, 0.05)
    given = [(0.9, 1.1), (0.5, 0.9), (0.4, 0.8), (1.1, 1.3)]
    found = [Number(value=1.0, interval=ends) for ends in given]
    found += [
        Number(value=1.0),
        Number(value=1.0, interval=(0, 9), note="unreliable: k̂ = 0.90 is above 0.70"),
    ]
    counted = cell(found, known)

    assert (counted.dumps, counted.unreliable, counted.none, counted.judged) == (6, 1, 1, 4)
    assert (counted.covered, counted.below, counted.above) == (1, 2, 1)
    assert counted.coverage == 0.25
    assert counted.width == pytest.approx(0.3)
    assert counted.error == pytest.approx(2 * 0.05 / 0.3)


@pytest.mark.parametrize("groups", [20, 128])
def test_the_identities_leave_honest_clustered_dumps_alone(groups):
    assert alarms.rate(LIGHT, groups, 20) == 0


@pytest.mark.parametrize("fault", alarms.FAULTS, ids=lambda fault: fault.name)
def test_the_identities_see_a_fault_among_128_prompts(fault):
    assert alarms.rate(LIGHT, 128, 5, fault) == 5


def test_a_fault_of_one_position_is_named_as_one():
    given = alarms.faulty(drawn(LIGHT, 128, 0), alarms.FAULTS[3])

    assert alarms.causes(given) == ["boundary"]


def test_the_page_is_current_with_the_results_that_are_kept():
    text = (Path(__file__).parents[1] / "docs" / "coverage.md").read_text(encoding="utf-8")

    assert text == page.page(run.kept(), json.loads(run.ALARMS.read_text(encoding="utf-8")))
