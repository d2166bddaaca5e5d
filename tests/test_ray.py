"""On a Ray cluster of several nodes: the numbers, the errors and the remarks of one machine."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import offpol_diag
from offpol_diag.errors import ClusterError, DumpError, UsageError, install
from offpol_diag.run import ray as tasks
from tests.devices import same
from tests.jobs import Look, dump
from tests.reading import analyze, opened
from tests.test_read import sequences

if "CI" in os.environ:
    import ray  # CI installs it: there its absence is a failure
else:
    ray = pytest.importorskip("ray", reason="THE RAY ENGINE IS NOT TESTED: ray is missing")
PRESETS = "token_is,seq_mis,m2po,seq_is_norm,geo_rs"  # a batch's cut, a weight divided by its mean, a veto


@contextmanager
def cluster():
    """Start a cluster of two nodes, whose workers find `tests.jobs`; the second claims a GPU."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setattr(tasks, "RANGE", {"cpu": 1, "cuda": 1})  # every row group is one
        node = {"num_cpus": 1, "object_store_memory": 80 << 20}
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            made.add_node(**node, num_gpus=1)
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def nodes():
    with cluster() as made:
        ray.init(address=made.address, log_to_driver=False, logging_level="CRITICAL")
        yield made
        ray.shutdown()


def reduced(folder, **how):
    (folder / "marks").mkdir()
    with tasks.connected("cpu") as engine:
        return engine.reduce(opened(dump(folder)), Look(folder / "marks", **how))


def test_numbers_remarks_and_rows_of_sequences_are_those_of_one_machine(nodes, tmp_path):
    path, found, said = dump(tmp_path, "rollout_log_probs", 0.5, (3, 17, 18, 39)), [], []
    for way in ("local", "ray", "ray"):
        rows = tmp_path / f"{len(found)}.rows"
        one = analyze(path, presets=PRESETS, engine=way, on_bad_row="skip", sequences=rows)
        assert one.run.engine == way
        found.append((one.model_dump(mode="json", exclude={"run"}), pq.read_table(rows).to_pylist()))
    assert {"m2po", "seq_is_norm"} <= found[0][0]["presets"].keys()
    assert found[0][0]["dump"]["skipped"] == 4
    assert all(same(here, there) for here, there in zip(found[0], found[1], strict=True))
    assert found[1] == found[2], "a second run is equal to the last bit"
    for engine in ("local", "ray"):
        with pytest.raises(DumpError, match="row group 7, row 30") as caught:
            analyze(dump(tmp_path, bad=(30, 39)), engine=engine)
        said.append((caught.value.message, caught.value.hint))
    assert said[0] == said[1]


def test_a_worker_that_dies_once_changes_nothing(nodes, tmp_path):
    found = reduced(tmp_path, at="s13", once=True)
    assert [*found] == [row["sequence_id"] for row in sequences()]


TROUBLE = [  # what a task raises (or it is killed), whether once only, and the error
    (None, False, ClusterError, "lost a task 2 times", "too little memory"),
    (DumpError("a bad row", "mend it"), True, DumpError, "a bad row", "mend it"),  # it is not tried again
    (ZeroDivisionError("a bug"), False, ZeroDivisionError, "a bug", ""),
]


@pytest.mark.parametrize(("error", "once", "kind", "says", "hint"), TROUBLE)
def test_trouble_of_a_task_is_its_error(nodes, tmp_path, monkeypatch, error, once, kind, says, hint):
    monkeypatch.setattr(tasks, "RETRIES", 1)  # Ray waits longer before each
    with pytest.raises(kind, match=says) as caught:
        reduced(tmp_path, at="s13", error=error, once=once)
    assert hint in getattr(caught.value, "hint", "")


def test_a_node_with_another_version_is_refused(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "version", lambda name: "0.0.0")
    with pytest.raises(ClusterError, match=r"a node has offpol-diag .*, and this is 0\.0\.0"):
        reduced(tmp_path)


DRIVER = """
import sys, pathlib
from offpol_diag.shell import exit_codes
from tests import test_ray
with exit_codes():
    test_ray.reduced(pathlib.Path(sys.argv[1]), seconds=1)
"""


def test_a_head_that_is_killed_is_an_error_within_seconds_and_not_a_failed_gate(tmp_path):
    """Ray itself ends the process after a minute, with exit code 1 and a line of its own."""
    with cluster() as made:
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = os.environ | {"RAY_ADDRESS": made.address}
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], env=environment, **how)
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
    assert (empty, hint) == ("", "hint: see why its head ended, and start it again")


WRONG = [
    ({"engine": "ray"}, "Ray is not installed", install("ray")),
    ({"engine": "ray", "device": "cuda:1"}, "cuda:1", "say cpu, or cuda"),
    ({"engine": "ray", "threads": 2}, "--threads 2", "offer Ray more or fewer CPUs"),
    ({"engine": "spark"}, "spark", "give local or ray"),
]


@pytest.mark.parametrize(("how", "says", "hint"), WRONG)
def test_a_wrong_engine_is_a_usage_error(monkeypatch, how, says, hint):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=says) as caught:
        offpol_diag.analyze("sample_data/healthy.parquet", **how)
    assert hint in caught.value.hint


NOWHERE = [  # RAY_ADDRESS or what a cluster has, device, what is said
    *((one, "cpu", f"{one}: no cluster answers") for one in ("127.0.0.1:1", "nonsense", "ray://[::1]:1")),
    *(({"CPU": 4.0}, "cuda", "has a GPU"), ({"GPU": 2.0}, "cuda", "has a CPU")),
]


@pytest.mark.parametrize(("there", "device", "said"), NOWHERE)
def test_a_cluster_that_could_never_run_a_task_is_refused_at_once(monkeypatch, there, device, said):
    monkeypatch.setattr(ray, "is_initialized", lambda: isinstance(there, dict))
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    monkeypatch.setenv("RAY_ADDRESS", str(there))
    with pytest.raises(ClusterError, match=re.escape(said)), tasks.connected(device):
        pass
