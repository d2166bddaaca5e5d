"""benchmarks/doctor/sync.py: what is written of a run, how answers are judged, and the kept figures."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.doctor import sync
from benchmarks.doctor.runs import Held

CASES = {case.name: case for case in sync.CASES}


class Run:
    """A run whose responses say which weights sampled and scored them."""

    def __init__(self):
        self.asked = []

    def responses(self, how, trainer, batch, rows, hard):
        self.asked.append((how, trainer))
        shape = (rows, 6)
        log = np.full(shape, -1.0 - how.version)
        return {
            "q": log,
            "p": np.full(shape, -1.0 - trainer),
            "mask": np.ones(shape),
            "tokens": np.ones(shape, int),
            "rewards": np.arange(rows, dtype=float),
        }


def written(tmp_path, name):
    sync.write(CASES[name], Run(), tmp_path / "dump.parquet")
    return pq.read_table(tmp_path / "dump.parquet").to_pydict()


def test_a_dump_holds_the_weights_and_the_lag_of_its_case(tmp_path):
    found = written(tmp_path, "two behind at every step")
    assert set(found["policy_lag"]) == {2}
    held = [-1.0 - row[0] for row in found["rollout_log_probs"]]
    assert held == [step - 2 for step in found["step"]]
    assert len(found["step"]) == sync.ROWS * 11


def test_hosts_share_the_prompts_of_a_step(tmp_path):
    found = written(tmp_path, "a host never")
    late = {
        host: {
            -1.0 - row[0]
            for row, h in zip(found["rollout_log_probs"], found["host"], strict=True)
            if h == host
        }
        for host in set(found["host"])
    }
    assert late["host-3"] == {0.0}
    assert late["host-0"] == set(map(float, range(13)))
    assert len(set(found["group_id"])) == 13 * sync.ROWS // 8


def test_digests_are_those_of_the_versions(tmp_path):
    found = written(tmp_path, "until step 5, with digests")
    assert found["weight_digest_rollout"] == [f"w{min(step, 5)}" for step in found["step"]]
    assert found["weight_digest_train"] == [f"w{step}" for step in found["step"]]


def test_an_honest_case_is_never_behind_its_recorded_lag():
    for case in sync.CASES:
        if case.cause or case.lag is None:
            continue
        for step in range(case.steps[0], case.steps[1] + 1):
            for host in range(case.hosts):
                assert case.held(step, host).version == step - case.lag(step, host), case.name
                assert case.held(step, host).kind == Held(0).kind


@pytest.mark.parametrize(
    ("cause", "verdict", "named", "fitting", "said"),
    [
        ("sync_stopped", "bug", ["sync_stopped"], [], "right"),
        ("sync_stopped", "bug", ["weights_differ"], [], "misleading"),
        ("sync_stopped", "honest_mismatch", ["stale"], [], "misleading"),
        ("sync_stopped", "honest_mismatch", ["numerics"], [], "missed"),
        ("sync_stopped", "cannot_tell", [], ["stale", "sync_stopped"], "candidate"),
        ("sync_stopped", "cannot_tell", [], ["stale"], "cannot tell"),
        ("", "bug", ["sync_stopped"], [], "misleading"),
        ("", "healthy", [], [], "right"),
        ("", "cannot_tell", [], ["sync_stopped"], "cannot tell"),
    ],
)
def test_an_answer_is_judged_by_what_is_named(cause, verdict, named, fitting, said):
    assert sync.judged(cause, verdict, named, fitting) == said


def test_no_honest_dump_is_called_a_bug_and_no_answer_misleads():
    rows = [row for some in sync.results().values() for row in some]
    honest = [row for row in rows if not row["cause"]]
    assert len({row["architecture"] for row in rows}) >= 6
    assert len(honest) >= 100
    assert [row["case"] for row in honest if row["verdict"] == "bug"] == []
    assert [row["case"] for row in rows if row["said"] == "misleading"] == []


def test_most_causes_that_a_dump_decides_are_named():
    rows = [row for some in sync.results().values() for row in some]
    decidable = [row for row in rows if row["cause"] and row["decidable"]]
    assert np.mean([row["said"] == "right" for row in decidable]) > 0.7
    assert np.mean([row["said"] in ("right", "candidate") for row in decidable]) > 0.9


def test_the_page_is_made_of_the_results_that_are_kept():
    assert sync.DOCS.read_text(encoding="utf-8") == sync.text(sync.results())
