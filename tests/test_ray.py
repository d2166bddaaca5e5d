"""On a Ray cluster of several nodes: the numbers, the errors and the remarks of one machine."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_jobs import Look

import offpol_diag
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import ClusterError, DumpError, UsageError, install
from offpol_diag.presets.catalogue import load
from offpol_diag.run import ray as tasks
from tests.devices import same
from tests.reading import analyze

if "CI" in os.environ:
    import ray  # CI installs it: there its absence is a failure
else:
    ray = pytest.importorskip("ray", reason="THE RAY ENGINE IS NOT TESTED: ray is missing")
PRESETS = "token_is,seq_mis,m2po,seq_is_norm,geo_rs"  # a batch's cut, a weight divided by its mean, a veto
SEQUENCES, GROUP = 48, 4


@contextmanager
def cluster(gpus=0):
    """Start a cluster of two nodes, whose workers find `cluster_jobs`; the second may claim a GPU."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        )
        patch.setattr(tasks, "RANGE", {"cpu": 1, "cuda": 1})  # every row group is one
        node = {"num_cpus": 1, "object_store_memory": 80 << 20}
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            made.add_node(**node, num_gpus=gpus)
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def nodes():
    with cluster(gpus=1) as made:
        ray.init(address=made.address, log_to_driver=False, logging_level="CRITICAL")
        yield made
        ray.shutdown()


def write(folder, positive=(), nan=()):
    """Write a dump of 12 row groups; some rows have a positive log-prob, or a NaN."""
    rng = np.random.default_rng(0)
    logs = [-rng.exponential(0.4, n) for n in rng.integers(2, 30, SEQUENCES)]
    old = [np.minimum(x + rng.normal(0, 0.3, len(x)), -1e-6) for x in logs]
    for rows, column, value in ((positive, logs, 0.5), (nan, old, np.nan)):
        for row in rows:
            column[row][0] = value
    mask = [np.append(1, rng.random(len(x) - 1) < 0.9).tolist() for x in logs]
    table = {
        "rollout_log_probs": [x.tolist() for x in logs],
        "old_log_probs": [x.tolist() for x in old],
        "response_mask": mask,
        "rewards": rng.normal(size=SEQUENCES),
        "group_id": np.arange(SEQUENCES) // 8,
        "step": np.arange(SEQUENCES) % 3,
    }
    pq.write_table(pa.table(table), folder / "x.parquet", row_group_size=GROUP)
    return str(folder / "x.parquet")


def reduced(folder, **how):
    (folder / "marks").mkdir()
    with tasks.connected("cpu") as engine:
        return engine.reduce(open_dump([write(folder)]), Look(folder / "marks", **how))


def test_numbers_remarks_and_rows_of_sequences_are_those_of_one_machine(nodes, tmp_path):
    path, presets, found = write(tmp_path, positive=(3, 17, 18, 47)), load().resolve(PRESETS), {}
    for way in ("local", "ray", "again"):
        engine = "local" if way == "local" else "ray"
        rows = tmp_path / f"{way}.rows"
        one = analyze([path], presets=presets, engine=engine, on_bad_row="skip", sequences=rows)
        assert (
            engine == "local" or one.run.engine == "ray, 24 tasks"
        )  # 12 for the advantages, 12 for the rest
        found[way] = one.model_copy(update={"run": None}), pq.read_table(rows)
    local, far = (found[way][0].model_dump(mode="json", exclude={"run"}) for way in ("local", "ray"))
    assert {"m2po", "seq_is_norm"} <= local["presets"].keys()
    assert local["dump"]["skipped"]["count"] == 4
    assert same(local, far)
    assert same(*(found[way][1].to_pylist() for way in ("local", "ray")))
    assert found["ray"] == found["again"], "a second run is equal to the last bit"
    said = []
    for engine in ("local", "ray"):
        with pytest.raises(DumpError, match="row group 7, row 30") as caught:
            analyze([write(tmp_path, nan=(30, 41))], engine=engine)
        said.append((caught.value.message, caught.value.hint))
    assert said[0] == said[1]


def test_a_worker_that_dies_once_changes_nothing(nodes, tmp_path):
    found = reduced(tmp_path, at=13, trouble="killed", once=True)
    assert found.ids == tuple(range(SEQUENCES))
    assert found.merges == f"{'(' * 11}.{'.)' * 11}"


@pytest.mark.parametrize(
    ("trouble", "once", "kind", "says", "hint"),
    [
        ("killed", False, ClusterError, "lost a task 2 times", "too little memory"),
        ("refused", True, DumpError, "a bad row", "mend it"),  # it is not tried again
        ("bug", False, ZeroDivisionError, "a bug", ""),
    ],
)
def test_trouble_of_a_task_is_an_error_of_its_kind(
    nodes, tmp_path, monkeypatch, trouble, once, kind, says, hint
):
    monkeypatch.setattr(tasks, "RETRIES", 1)  # Ray waits longer before each
    with pytest.raises(kind, match=says) as caught:
        reduced(tmp_path, at=13, trouble=trouble, once=once)
    assert hint in getattr(caught.value, "hint", "")


def test_a_node_with_another_version_is_refused(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "version", lambda name: "0.0.0")
    with pytest.raises(ClusterError, match=r"a node has offpol-diag .*, and this is 0\.0\.0"):
        reduced(tmp_path)


DRIVER = """
import sys, test_ray
from offpol_diag.shell import exit_codes
with exit_codes():
    test_ray.reduced(test_ray.Path(sys.argv[1]), seconds=1)
"""


def test_a_head_that_is_killed_is_an_error_within_seconds_and_not_a_failed_gate(tmp_path):
    """Ray itself ends the process after a minute, with exit code 1 and a line of its own."""
    with cluster() as made:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)],
            env=os.environ | {"RAY_ADDRESS": made.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun = time.monotonic()
        while not list(tmp_path.glob("marks/*")) and driver.poll() is None:
            assert time.monotonic() < begun + 100
            time.sleep(0.1)
        made.head_node.kill_gcs_server()
        made.head_node.kill_raylet()
        killed = time.monotonic()
        out, err = driver.communicate(timeout=100)
    assert (driver.returncode, out) == (2, ""), err
    assert time.monotonic() - killed < 40
    error, empty, hint = err.splitlines()[-3:]
    assert error.startswith("error: the cluster is lost (")
    assert (empty, hint) == ("", "hint: see why its head ended, start it, repeat the command")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "host:port", "ray://[::1]:1"])
def test_an_address_where_nobody_answers_is_an_error_at_once(monkeypatch, address):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with (
        pytest.raises(ClusterError, match=f"{re.escape(address)}: no cluster answers"),
        tasks.connected("cpu"),
    ):
        pass


@pytest.mark.parametrize(
    ("how", "says", "hint"),
    [
        ({"engine": "ray"}, "Ray is not installed", install("ray")),
        ({"engine": "ray", "device": "cuda:1"}, "cuda:1", "say cpu, or cuda"),
        ({"engine": "spark"}, "spark", "give local or ray"),
    ],
)
def test_a_wrong_engine_is_a_usage_error(monkeypatch, how, says, hint):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=says) as caught:
        offpol_diag.analyze("sample_data/healthy.parquet", **how)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("there", "device", "said"),
    [({"CPU": 4.0}, "cuda", "has a GPU"), ({}, "cpu", "has a CPU"), ({"GPU": 2.0}, "cuda", "has a CPU")],
)
def test_a_cluster_that_could_never_run_a_task_is_refused(monkeypatch, there, device, said):
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(ClusterError, match=said), tasks.connected(device):
        pass
